"""Times copies beside references of the same run: medians, spreads, and the bytes verified.

Each copy is measured between two large copies by torch, so that what a neighbour on the machine
takes away is taken from both.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.caches import KVCaches
from kvpolicy.cli.bench_cases import BenchMemory, Case, block_bytes
from kvpolicy.cli.engine import SENTINEL
from kvpolicy.connector import Connector
from kvpolicy.context import PolicyContext
from kvpolicy.errors import KVPolicyError, NoTransferError, OptionError
from kvpolicy.geometry import CacheGeometry
from kvpolicy.hooks import hookimpl
from kvpolicy.hostmemory import allocate, page_bytes
from kvpolicy.hostpool import HostPool
from kvpolicy.plugins import PluginSet, load_plugins, select
from kvpolicy.specs import LatentSpec
from kvpolicy.transfer import Direction, TransferHandle, TransferJob, TransferResult
from kvpolicy.workers import VARIABLE

NOISY_SPREAD = 0.2
"""A ratio, or the references, that spread more than this over their median tell nothing."""
_SEED = 31
_FIXED_JOBS = 200
_FIXED_BLOCKS = 256
_PATIENCE_SECONDS = 600
_JOBS_AHEAD = 2
_POLICIES = ("canonical", "cross-layer", "direct")
_DIRECTIONS: tuple[Direction, ...] = ("store", "load")

Ids = NDArray[np.int64]


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
        return _least_page(self._from, self._to)

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


def only(plugins: PluginSet, name: str) -> PluginSet:
    """The built-in policies and one plugin, which nobody else's policy or copies stand beside."""
    kept = (*_POLICIES, name)
    return attrs.evolve(
        plugins, active=tuple(plugin for plugin in plugins.active if plugin.info.name in kept)
    )


def _least_page(*memories: NDArray[np.uint8]) -> int | None:
    found = [page_bytes(one.ctypes.data, one.nbytes) for one in memories]
    known = [one for one in found if one is not None]
    return min(known) if len(known) == len(found) else None


def _spread(values: Sequence[float]) -> float:
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
        spread = _spread(r1)
        noisy = max(spread, _spread(self.torch_rates)) > NOISY_SPREAD
        return {
            "gbps": round(statistics.median(self.rates) / 1e9, 3),
            "r1": round(statistics.median(r1), 3),
            "r2": round(statistics.median(r2), 3),
            "spread": round(spread, 3),
            "noisy": noisy,
        }


class _Recorder:
    """Takes every job and moves nothing: the bench hands the jobs to the plugins itself."""

    priority = 2**31

    def __init__(self) -> None:
        self.jobs: list[TransferJob] = []

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle:
        """Keeps the job."""
        self.jobs.append(job)
        return TransferHandle.finished(
            TransferResult(job_id=job.job_id, ok=True, bytes=job.bytes, seconds=0.0)
        )


class CaseRun:
    """One case: its memory, its rows, and the jobs that the core makes of them."""

    def __init__(
        self, case: Case, settings: Settings, plugins: PluginSet, names: Sequence[str]
    ) -> None:
        size = block_bytes(case.context)
        count = -(-settings.copied_bytes // (size * settings.blocks))
        pairs = count * settings.blocks
        # Blocks to store, as many to load into, and some that nobody may touch.
        geometry = attrs.evolve(case.context.geometry, num_blocks=2 * pairs + 2)
        case = attrs.evolve(case, context=attrs.evolve(case.context, geometry=geometry))
        self._engines = {one.info.name: one for one in plugins.active if one.info.name in names}
        self._settings = settings
        self._memory = BenchMemory.of(case)
        self._slots, self._stored, self._loaded, self._others = _ids(case, pairs)
        recorder = _Recorder()
        books = load_plugins(select(names=[], environ={}), {"bench": recorder})
        with Connector(case.context, books) as sized:
            self._pool = HostPool(pairs + 1, sized.record_bytes)
            self.fragments = sized.explain()["fragments_per_block"]
        with Connector(case.context, books, host=self._pool) as connector:
            connector.register(self._memory.caches)
            for at in range(0, pairs, settings.blocks):
                some = slice(at, at + settings.blocks)
                connector.store(self._stored[some], self._slots[some])
            connector.wait()
            for at in range(0, pairs, settings.blocks):
                some = slice(at, at + settings.blocks)
                connector.load(self._slots[some], self._loaded[some])
            connector.wait()
        self._jobs: dict[Direction, list[TransferJob]] = {
            direction: [job for job in recorder.jobs if job.direction == direction]
            for direction in _DIRECTIONS
        }
        self.bytes = pairs * size

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The pool's rows."""
        rows: NDArray[np.uint8] = self._pool.rows.numpy()
        return rows

    @property
    def page_bytes(self) -> int | None:
        """The page size of caches and rows, the smaller one."""
        return _least_page(self._memory.whole, self.rows.reshape(-1))

    def wipe(self) -> None:
        """Fills rows, and the blocks to load into, with the sentinel."""
        self.rows.fill(SENTINEL)
        self._memory.wipe([*self._loaded.tolist(), *self._others])

    def measure(self, plugin: str, direction: Direction) -> float:
        """Bytes a second, from the first submission until the last job is done.

        As in an engine, the next job is submitted while one is under way.

        Raises:
            OptionError: the plugin fails.
        """
        engine, pending = self._engines[plugin], deque[TransferHandle]()
        begun = time.perf_counter()
        for job in self._jobs[direction]:
            handle = engine.call("transfer", job=job)
            if not isinstance(handle, TransferHandle):
                raise OptionError(f"plugin {plugin!r} does not {direction} what it was given")
            pending.append(handle)
            if len(pending) > _JOBS_AHEAD:
                _finished(pending.popleft(), plugin)
        while pending:
            _finished(pending.popleft(), plugin)
        return self.bytes / (time.perf_counter() - begun)

    def verified(self, plugin: str) -> dict[Direction, bool]:
        """Whether a store and a load of all pairs leave every byte as it must be."""
        self.wipe()
        before = self._memory.checksum(self._stored.tolist())
        self.measure(plugin, "store")
        pairs = zip(self._slots.tolist(), self._stored.tolist(), strict=True)
        wrong = self._memory.wrong_rows(self.rows, dict(pairs))
        same = self._memory.checksum(self._stored.tolist()) == before
        kept = self.rows.copy() if self.rows.nbytes <= self._settings.copied_bytes else None
        self.measure(plugin, "load")
        moved = zip(self._loaded.tolist(), self._stored.tolist(), strict=True)
        lost = self._memory.wrong_blocks(dict(moved), self._others)
        unread = kept is None or np.array_equal(kept, self.rows)
        same_after = self._memory.checksum(self._stored.tolist()) == before
        return {"store": not wrong and same, "load": not lost and unread and same_after}


def _finished(handle: TransferHandle, plugin: str) -> None:
    """Waits for a job, which must succeed."""
    if not handle.wait(_PATIENCE_SECONDS):
        raise OptionError(f"plugin {plugin!r} has not finished after {_PATIENCE_SECONDS} s")
    result = handle.result()
    if not result.ok:
        raise OptionError(f"plugin {plugin!r} failed: {result.error}")


def _ids(case: Case, pairs: int) -> tuple[Ids, Ids, Ids, list[int]]:
    """Slots, blocks to store, blocks to load into, and blocks that nobody may touch."""
    blocks = np.arange(2 * pairs + 2)
    slots = np.arange(pairs + 1)
    if case.ids == "scattered":
        random = np.random.default_rng(_SEED)
        blocks, slots = random.permutation(blocks), random.permutation(slots)
    ends = blocks[:pairs], blocks[pairs : 2 * pairs], blocks[2 * pairs :].tolist()
    return slots[:pairs], *ends


def measure_case(
    case: Case,
    settings: Settings,
    plugins: PluginSet,
    names: Sequence[str],
    references: References,
    step: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measures every plugin on one case, both ways, and verifies the bytes.

    Args:
        case: what is copied.
        settings: how.
        plugins: all that were loaded.
        names: those to measure; where there are several, they take turns.
        references: what they are measured against.
        step: told of each round.

    Raises:
        KVPolicyError: a plugin does not take the job, or fails it.
    """
    run = CaseRun(case, settings, plugins, names)
    run.wipe()
    series = [
        Series(plugin=name, direction=direction) for direction in _DIRECTIONS for name in names
    ]
    for one in series:
        run.measure(one.plugin, one.direction)  # threads, views and pages are there now
    for _ in range(settings.rounds):
        before, memcpy = references.torch_rate(), references.memcpy_rate()
        for one in series:
            rate = run.measure(one.plugin, one.direction)
            after, memcpy_after = references.torch_rate(), references.memcpy_rate()
            one.rates.append(rate)
            one.torch_rates.append(_between(before, after))
            one.memcpy_rates.append(_between(memcpy, memcpy_after))
            before, memcpy = after, memcpy_after
        step(case.name)
    good = {name: run.verified(name) for name in names}
    step(f"{case.name}: verified")
    pages = [one for one in (run.page_bytes, references.page_bytes) if one is not None]
    return [
        {
            "case": case.name,
            "plugin": one.plugin,
            "direction": one.direction,
            "bytes": run.bytes,
            "fragments_per_block": run.fragments,
            **one.told(),
            "memory_page_bytes": min(pages, default=None),
            "verified": good[one.plugin][one.direction],
            "tp": case.context.grid.tp,
            "fragment_bytes": block_bytes(case.context) // run.fragments,
            "blocks": settings.blocks,
        }
        for one in series
    ]


def _between(one: float, other: float) -> float:
    """The rate at which a copy between two others would have run: times are what is averaged."""
    return 2 / (1 / one + 1 / other)


def fixed_costs(plugins: PluginSet, name: str) -> dict[str, Any]:
    """What a job costs through a connector however little it moves, in microseconds.

    Returns:
        ``submit_us`` and ``fixed_us``, medians for jobs of one block: until `store` returns, and
        until its result is there. ``block_us``: what each further block of a job adds.

    Raises:
        KVPolicyError: the plugin does not take the job, or fails it.
    """
    spec = LatentSpec(block_size=16, row_bytes=4)
    geometry = CacheGeometry(layers={"layer": spec}, num_blocks=_FIXED_BLOCKS)
    context = PolicyContext(geometry=geometry, canonical=True)
    cache = torch.zeros(_FIXED_BLOCKS, 1, 16, 4, dtype=torch.uint8)
    with Connector(context, only(plugins, name), host=_FIXED_BLOCKS) as connector:
        connector.register(KVCaches(tensors={"layer": cache}))

        def timed(blocks: Sequence[int]) -> tuple[float, float]:
            begun = time.perf_counter()
            job = connector.store(blocks, blocks)
            submitted = time.perf_counter()
            (result,) = connector.wait([job])
            if not result.ok:
                raise OptionError(f"plugin {name!r} failed to store: {result.error}")
            return submitted - begun, time.perf_counter() - begun

        def medians(blocks: Sequence[int], jobs: int) -> list[float]:
            timed(blocks)  # the first time, threads and views are made
            found = [timed(blocks) for _ in range(jobs)]
            return [statistics.median(column) * 1e6 for column in zip(*found, strict=True)]

        submit, whole = medians([0], _FIXED_JOBS)
        _, many = medians(range(_FIXED_BLOCKS), _FIXED_JOBS // 10)
    return {
        "plugin": name,
        "submit_us": round(submit, 1),
        "fixed_us": round(whole, 1),
        "block_us": round(max(0.0, many - whole) / (_FIXED_BLOCKS - 1), 2),
    }


def taken_by(plugins: PluginSet, names: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The fixed costs of the plugins that copy on the CPU, and the plugins that do not."""
    costs, others = [], []
    for name in names:
        try:
            costs.append(fixed_costs(plugins, name))
        except NoTransferError:
            others.append(name)
        except KVPolicyError as error:
            raise OptionError(f"plugin {name!r} cannot be measured: {error}") from None
    return costs, others
