"""Which path a job's part takes. It goes by the size of fragments, never by that of pages."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import attrs

DMA_BYTES = 65_536
"""Where nothing was measured: from this size on, runs go to the copy engine."""

FEW_RUNS = 64
"""So few runs go to the copy engine whatever their size: a launch would cost as much."""


class Path(StrEnum):
    """How bytes move."""

    DMA = "dma"  # every run by the copy engine
    STAGED = "staged"  # a kernel between the cache and a staging buffer, the copy engine from there
    DIRECT = "direct"  # a kernel that reads or writes the rows itself


@attrs.frozen(kw_only=True)
class Limits:
    """From which size of run on the copy engine is no slower than the kernel, in bytes.

    Attributes:
        store, load: either direction's.
        measured: "" if they are only assumed, else on what they were measured.
    """

    store: int = DMA_BYTES
    load: int = DMA_BYTES
    measured: str = ""


@attrs.frozen(kw_only=True)
class Facts:
    """What the choice goes by.

    Attributes:
        to_host: whether the job is a store.
        runs: runs of the whole part.
        fragment_bytes: of a run that is contiguous on both sides.
        host_run_bytes: of a run that is contiguous in the row.
        not_pinned: why the rows are not page-locked, "" if they are.
        no_kernel, no_staging, no_mapping: what stands against any kernel, against the staging
            buffer, and against a kernel that uses the rows; "" if nothing does.
    """

    to_host: bool
    runs: int
    fragment_bytes: int
    host_run_bytes: int
    not_pinned: str = ""
    no_kernel: str = ""
    no_staging: str = ""
    no_mapping: str = ""


class Choice(NamedTuple):
    """A path, and the reason in words."""

    path: Path
    reason: str


Choose = Callable[[Facts, Limits], Choice]


def choose(facts: Facts, limits: Limits) -> Choice:
    """The path of a part.

    1. Rows that are not pinned, few runs, or large ones: the copy engine.
    2. Small fragments that make large runs of the row: staged.
    3. Both small: direct.

    What stands against a path is in the reason of the one that is taken instead.
    """
    if facts.not_pinned:
        return Choice(Path.DMA, facts.not_pinned)
    if facts.runs <= FEW_RUNS:
        return Choice(Path.DMA, f"{facts.runs} runs are few")
    limit = limits.store if facts.to_host else limits.load
    fragments = f"fragments of {facts.fragment_bytes:,} B"
    if facts.fragment_bytes >= limit:
        return Choice(Path.DMA, f"{fragments} are large (from {limit:,} B on)")
    if facts.no_kernel:
        return Choice(Path.DMA, f"{fragments} are small, but no kernel: {facts.no_kernel}")
    against = ""
    if facts.host_run_bytes >= limit:
        rows = f"{fragments} make runs of {facts.host_run_bytes:,} B in the row"
        if not facts.no_staging:
            return Choice(Path.STAGED, rows)
        against = f", not staged: {facts.no_staging}"
    if not facts.no_mapping:
        return Choice(Path.DIRECT, f"{fragments} are small{against}")
    return Choice(Path.DMA, f"{fragments} are small{against}; not direct: {facts.no_mapping}")
