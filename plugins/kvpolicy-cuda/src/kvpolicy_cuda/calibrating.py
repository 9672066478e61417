"""From which size of run on the copy engine is as fast as the kernel, measured on the device.

Both copy the same scattered runs of one size after another, in either direction. What comes of
it is kept in a file for each device and driver.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import kvpolicy
from kvpolicy_cuda import paths
from kvpolicy_cuda.device import Device
from kvpolicy_cuda.planner import Limits
from kvpolicy_cuda.runs import plan_runs

SIZES = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
"""Bytes of a run."""

TOTAL_BYTES = 32 * 2**20
AS_FAST = 0.9
"""The share of the kernel's rate from which the copy engine is chosen: it costs the model less."""

_FORMAT = 1
_REPEATS = 3
_BLOCKS = 16

_log = logging.getLogger(__name__)

Rates = Mapping[int, tuple[float, float]]
"""Bytes of a run -> bytes per second by the copy engine, and by the kernel."""


def limits_of(device: Device, key: str, *, anew: bool = False) -> Limits:
    """What was measured under that key, or is measured now and kept.

    Args:
        device: is measured unless the key is known; what cannot be measured is assumed.
        key: names device and driver.
        anew: measure again.
    """
    file = cache_file(key)
    if not anew and (known := _read(file)) is not None:
        return known
    if isinstance(device.kernels, str):
        return Limits()  # without a kernel there is nothing to choose
    try:
        store, load = (measure(device, to_host=to_host) for to_host in (True, False))
    except (kvpolicy.KVPolicyError, RuntimeError) as error:
        _log.warning("the copy paths could not be measured, limits are assumed: %s", error)
        return Limits()
    limits = Limits(store=limit_from(store), load=limit_from(load), measured=key)
    _write(file, {"format": _FORMAT, **attrs.asdict(limits), "rates": _told(store, load)})
    return limits


def limit_from(rates: Rates) -> int:
    """The smallest size from which on the copy engine keeps up; past the largest if it never does.

    Args:
        rates: of both ways, by size.
    """
    limit = 2 * max(rates)
    for size in sorted(rates, reverse=True):
        engine, kernel = rates[size]
        if engine < AS_FAST * kernel:
            break
        limit = size
    return limit


def measure(
    device: Device,
    *,
    to_host: bool,
    sizes: Sequence[int] = SIZES,
    total_bytes: int = TOTAL_BYTES,
) -> Rates:
    """Both ways' rates for runs of each size, on scratch memory.

    Raises:
        CudaError, RuntimeError: no memory, or a copy fails.
    """
    if isinstance(device.kernels, str):
        raise RuntimeError(f"no kernel to measure: {device.kernels}")
    kernels = device.kernels
    stream = device.new_stream()
    cache = device.scratch(2 * total_bytes)
    rows = device.pinned_scratch(_BLOCKS, 2 * total_bytes // _BLOCKS)
    blocks = np.random.default_rng(1).permutation(_BLOCKS).astype(np.int64)
    slots = np.arange(_BLOCKS, dtype=np.int64)
    rates: dict[int, tuple[float, float]] = {}
    for size in sizes:
        times = max(1, total_bytes // _BLOCKS // size)
        # Every other run, so that nothing can be merged on either side.
        box = kvpolicy.Box(size, (kvpolicy.Dim(times, 2 * size, 2 * size),))
        copy = kvpolicy.PlannedCopy(
            storage=cache, offset=0, block_stride=2 * size * times, box=box, layers=("scratch",)
        )
        plan = kvpolicy.TransferPlan(
            rows=rows,
            num_blocks=_BLOCKS,
            num_writers=1,
            writer_index=0,
            copies=(copy,),
            device="cuda",
        )
        runs = plan_runs(plan)
        unit = runs.unit(runs.rows, runs.row_stride) or 0
        what = device, runs, blocks, slots
        ways: tuple[Callable[[], object], ...] = (
            functools.partial(paths.dma, *what, to_host=to_host, stream=stream),
            functools.partial(
                paths.direct,
                device,
                kernels,
                *what[1:],
                unit=unit,
                to_host=to_host,
                stream=stream,
            ),
        )
        moved = _BLOCKS * runs.block_bytes
        engine, kernel = (moved / _seconds(way, stream.synchronize) for way in ways)
        rates[size] = engine, kernel
    return rates


def _seconds(way: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """The shortest of some runs, after one that may compile."""
    shortest = float("inf")
    for repeat in range(1 + _REPEATS):
        begun = time.perf_counter()
        held = way()
        synchronize()
        del held
        if repeat:
            shortest = min(shortest, time.perf_counter() - begun)
    return shortest


def cache_file(key: str) -> Path:
    """Where measurements of a device and driver are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvpolicy" / "cuda" / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', key)}.json"


def _read(file: Path) -> Limits | None:
    """What a file of ours holds; anything else is as good as none."""
    try:
        held: Any = json.loads(file.read_text(encoding="utf-8"))
        if held["format"] != _FORMAT:
            return None
        return Limits(store=int(held["store"]), load=int(held["load"]), measured=held["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, held: Mapping[str, object]) -> None:
    """Whole or not at all, since several ranks may write at once."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as new:
            json.dump(held, new, indent=2)
        Path(new.name).replace(file)
    except OSError as error:
        _log.warning("measurements are not kept: %s", error)
        with contextlib.suppress(OSError, UnboundLocalError):
            Path(new.name).unlink()


def _told(store: Rates, load: Rates) -> dict[str, dict[str, dict[str, float]]]:
    """Rates in GB/s, for people who read the file."""
    return {
        direction: {
            str(size): {"dma": round(engine / 1e9, 2), "direct": round(kernel / 1e9, 2)}
            for size, (engine, kernel) in rates.items()
        }
        for direction, rates in (("store", store), ("load", load))
    }
