"""A plan as the kernel takes it: an address, a stride, an offset and a size for each run."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from kvpolicy import TransferPlan

MAX_RUNS = 2**22
"""Of one block; more would be a table of more than 100 MB."""

LONG = 16_384
"""Runs from here on are followed by the processor's own prefetches."""

Numbers = NDArray[np.int64]


def sealed(numbers: Any) -> Numbers:
    """The numbers as the kernel takes them: a read-only view, copied where that must be."""
    view = np.ascontiguousarray(numbers, dtype=np.int64).view()
    view.flags.writeable = False
    return view


@attrs.frozen(kw_only=True, eq=False)
class Runs:
    """The runs of one block, those that follow one another on both sides joined.

    Attributes:
        base, stride, at, size: as the kernel takes them; sorted by ``at``.
        rows, row_stride: the address of row 0, and bytes from one row to the next.
        num_blocks, num_slots: ids lie below.
        storages: the engine's memory, with the addresses at which it was found.
        is_short: whether most bytes lie in runs of fewer than `LONG` bytes.
    """

    base: Numbers = attrs.field(repr=False)
    stride: Numbers = attrs.field(repr=False)
    at: Numbers = attrs.field(repr=False)
    size: Numbers = attrs.field(repr=False)
    rows: int
    row_stride: int
    num_blocks: int
    num_slots: int
    storages: tuple[tuple[Any, int], ...] = attrs.field(repr=False)
    is_short: bool

    def moved(self) -> bool:
        """Whether the engine's memory is no longer where it was."""
        return any(storage.data_ptr() != address for storage, address in self.storages)


def count(plan: TransferPlan) -> int:
    """Runs of one block, before they are joined."""
    return sum(copy.box.num_runs for copy in plan.copies)


def runs_of(plan: TransferPlan) -> Runs:
    """The table of a plan.

    Raises:
        ValueError: a run reaches past its storage or its row.
    """
    parts: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
    storages: dict[int, tuple[Any, int]] = {}
    row_stride = plan.rows.stride(0)
    for copy in plan.copies:
        here, there = copy.box.offsets()
        size = copy.box.size
        here = here + copy.offset
        last = (plan.num_blocks - 1) * copy.block_stride
        ends = int(here.max()) + last + size, int(there.max()) + size
        if here.min() < 0 or there.min() < 0 or ends[0] > copy.storage.numel():
            raise ValueError(f"the pages of layer {copy.layers[0]!r} reach past their storage")
        if ends[1] > row_stride:
            raise ValueError(f"the pages of layer {copy.layers[0]!r} reach past their row")
        address = copy.storage.data_ptr()
        storages[id(copy.storage)] = (copy.storage, address)
        parts.append(
            (
                here + address,
                np.full(len(here), copy.block_stride, dtype=np.int64),
                there,
                np.full(len(here), size, dtype=np.int64),
            )
        )
    joined = _joined(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    sizes = joined[3]
    return Runs(
        base=sealed(joined[0]),
        stride=sealed(joined[1]),
        at=sealed(joined[2]),
        size=sealed(sizes),
        rows=plan.rows.data_ptr(),
        row_stride=row_stride,
        num_blocks=plan.num_blocks,
        num_slots=plan.rows.shape[0],
        storages=tuple(storages.values()),
        is_short=bool(2 * sizes[sizes < LONG].sum() > sizes.sum()),
    )


def _joined(
    base: Numbers, stride: Numbers, at: Numbers, size: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    order = np.argsort(at, kind="stable")
    base, stride, at, size = base[order], stride[order], at[order], size[order]
    follows = (
        (base[1:] == base[:-1] + size[:-1])
        & (at[1:] == at[:-1] + size[:-1])
        & (stride[1:] == stride[:-1])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return base[starts], stride[starts], at[starts], np.add.reduceat(size, starts)
