"""Times copies beside references of the same run: medians, spreads, and the bytes verified.

Each copy is measured between two large copies by torch, so that what a neighbour on the machine
takes away is taken from both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from kvpolicy.cli.bench_cases import BenchMemory, Case, block_bytes
from kvpolicy.cli.bench_references import References, Series, Settings, between, least_page
from kvpolicy.cli.engine import SENTINEL
from kvpolicy.connector import Connector
from kvpolicy.errors import OptionError
from kvpolicy.hooks import hookimpl
from kvpolicy.hostpool import HostPool
from kvpolicy.plugins import PluginSet, load_plugins, select
from kvpolicy.transfer import Direction, TransferHandle, TransferJob, TransferResult

_SEED = 31
_PATIENCE_SECONDS = 600
_JOBS_AHEAD = 2
_DIRECTIONS: tuple[Direction, ...] = ("store", "load")

Ids = NDArray[np.int64]


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
        return least_page(self._memory.whole, self.rows.reshape(-1))

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
            one.torch_rates.append(between(before, after))
            one.memcpy_rates.append(between(memcpy, memcpy_after))
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
