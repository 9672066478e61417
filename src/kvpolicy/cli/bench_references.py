"""What copies are measured against, and what is made of the figures."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.errors import OptionError
from kvpolicy.hostmemory import allocate, page_bytes
from kvpolicy.transfer import Direction
from kvpolicy.workers import VARIABLE

NOISY_SPREAD = 0.2
"""A ratio, or the references, that spread more than this over their median tell nothing."""


@attrs.frozen(kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        blocks: of one job.
        copied_bytes: what one measurement moves at least, in as many jobs as that takes, and the
            size of a reference.
        rounds: measurements of each kind.
        threads: of the copies and of the references.
    """

    blocks: int
    copied_bytes: int
    rounds: int
    threads: int


class References:
    """Large copies between buffers of their own: torch ``copy_``, and memcpy of the C library."""

    def __init__(self, settings: Settings) -> None:
        self._bytes, self._threads = settings.copied_bytes, settings.threads
        try:
            self._from, self._to = (allocate(2 * self._bytes) for _ in range(2))
        except MemoryError as error:
            raise OptionError(f"no memory for the references: {error}") from None
        self._from.fill(1)
        self._to.fill(2)
        self._turn = 0
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memcpy.restype = ctypes.c_void_p
        self._pool = ThreadPoolExecutor(settings.threads)

    @property
    def page_bytes(self) -> int | None:
        """The page size of both buffers, the smaller one."""
        return least_page(self._from, self._to)

    def _turned(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The halves whose turn it is: a copy that is repeated would be read from the cache."""
        self._turn ^= 1
        low = self._turn * self._bytes
        return self._to[low : low + self._bytes], self._from[low : low + self._bytes]

    def torch_rate(self) -> float:
        """Bytes a second of one large ``copy_``."""
        to, frm = (torch.from_numpy(half) for half in self._turned())
        begun = time.perf_counter()
        to.copy_(frm)
        return self._bytes / (time.perf_counter() - begun)

    def memcpy_rate(self) -> float:
        """Bytes a second of one large memcpy, cut into as many pieces as there are threads."""
        to, frm = self._turned()
        step = -(-self._bytes // self._threads)
        pieces = [
            (to.ctypes.data + at, frm.ctypes.data + at, min(step, self._bytes - at))
            for at in range(0, self._bytes, step)
        ]
        begun = time.perf_counter()
        if self._threads == 1:
            self._memcpy(*pieces[0])
        else:
            list(self._pool.map(lambda piece: self._memcpy(*piece), pieces))
        return self._bytes / (time.perf_counter() - begun)

    def close(self) -> None:
        """Ends its threads."""
        self._pool.shutdown()


@contextlib.contextmanager
def exact_threads(threads: int) -> Iterator[None]:
    """Copy engines and torch's own copies use so many threads, and afterwards what they did."""
    before, given = torch.get_num_threads(), os.environ.get(VARIABLE)
    torch.set_num_threads(threads)
    os.environ[VARIABLE] = str(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if given is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = given


def least_page(*memories: NDArray[np.uint8]) -> int | None:
    """The smallest page size of the memories; None where one is not known."""
    found = [page_bytes(one.ctypes.data, one.nbytes) for one in memories]
    known = [one for one in found if one is not None]
    return min(known) if len(known) == len(found) else None


def spread(values: Sequence[float]) -> float:
    """The interquartile range over the median; of fewer than four values the whole range."""
    middle = statistics.median(values)
    if len(values) < 4:
        return (max(values) - min(values)) / middle
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


@attrs.define(kw_only=True)
class Series:
    """The measurements of one plugin in one direction."""

    plugin: str
    direction: Direction
    rates: list[float] = attrs.field(factory=list)
    torch_rates: list[float] = attrs.field(factory=list)
    memcpy_rates: list[float] = attrs.field(factory=list)

    def told(self) -> dict[str, Any]:
        """Medians, and how far they can be trusted."""
        r1 = [mine / other for mine, other in zip(self.rates, self.torch_rates, strict=True)]
        r2 = [mine / other for mine, other in zip(self.rates, self.memcpy_rates, strict=True)]
        own = spread(r1)
        noisy = max(own, spread(self.torch_rates)) > NOISY_SPREAD
        return {
            "gbps": round(statistics.median(self.rates) / 1e9, 3),
            "r1": round(statistics.median(r1), 3),
            "r2": round(statistics.median(r2), 3),
            "spread": round(own, 3),
            "noisy": noisy,
        }


def between(one: float, other: float) -> float:
    """The rate at which a copy between two others would have run: times are what is averaged."""
    return 2 / (1 / one + 1 / other)
