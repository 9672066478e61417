"""A plan as runs of bytes: descriptors for the copy engine, boxes for the kernel.

Everything that does not depend on block ids and slots is reckoned once for a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

import kvpolicy

Numbers = NDArray[np.int64]

_Shape = tuple[int, int, tuple[kvpolicy.Dim, ...]]

UNITS = (16, 8, 4)
"""Bytes of a kernel's accesses."""

MAX_DIMS = 4
MAX_DESCRIPTORS = 65_536
"""Of one batched copy."""

MAX_RUNS = 2**31 - 2**13
"""Of one launch: the kernel counts in 32 bits, up to a tile past the end."""


@attrs.frozen(kw_only=True, eq=False)
class KernelBox:
    """Planned copies that differ in their places alone, as the kernel takes them; in bytes.

    Attributes:
        bases: of each copy, the address of block 0's first run.
        offsets: of each copy, the place of that run in a row.
        block_stride: from one block to the next.
        size: of a run.
        times, device_strides, host_strides: of `MAX_DIMS` dimensions, outermost first, unused
            ones in front.
    """

    bases: Numbers
    offsets: Numbers
    block_stride: int
    size: int
    times: tuple[int, ...]
    device_strides: tuple[int, ...]
    host_strides: tuple[int, ...]

    @property
    def num_runs(self) -> int:
        """Runs of one block."""
        return len(self.bases) * math.prod(self.times)

    def unit(self, host: int, row_stride: int) -> int | None:
        """The widest access that divides every address, or None; rows as for `Kernels.copy`."""
        strides = [
            stride
            for n, *both in zip(self.times, self.device_strides, self.host_strides, strict=True)
            for stride in both
            if n > 1
        ]
        places = int(np.gcd.reduce(self.bases)), int(np.gcd.reduce(host + self.offsets))
        common = math.gcd(*places, self.block_stride, row_stride, self.size, *strides)
        return next((unit for unit in UNITS if common % unit == 0), None)


@attrs.frozen(kw_only=True, eq=False)
class PlanRuns:
    """The runs of one block of a plan, merged, sorted by their place in the row.

    Attributes:
        device, block_strides: address of block 0's run, and bytes to the next block's.
        offsets, sizes: place in a row, and bytes.
        rows, row_stride: address of row 0, and bytes to the next.
        host_offsets, host_sizes: the same bytes as runs of the row alone.
        boxes: for the kernel; empty if some copy cannot be given to it.
        no_boxes: why they are empty, else "".
        storages: addresses of the engine's storages.
    """

    device: Numbers
    block_strides: Numbers
    offsets: Numbers
    sizes: Numbers
    rows: int
    row_stride: int
    host_offsets: Numbers
    host_sizes: Numbers
    boxes: tuple[KernelBox, ...]
    no_boxes: str
    storages: frozenset[int]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return int(self.sizes.sum())

    @property
    def fragment_bytes(self) -> int:
        """Bytes of a run, contiguous on both sides; the mean."""
        return self.block_bytes // len(self.sizes)

    @property
    def host_run_bytes(self) -> int:
        """Bytes of a run, contiguous in the row; the mean."""
        return self.block_bytes // len(self.host_sizes)

    @property
    def window(self) -> tuple[int, int]:
        """The part of a row that the plan touches: first byte and end, multiples of 16."""
        low = int(self.host_offsets[0]) // UNITS[0] * UNITS[0]
        high = int(self.host_offsets[-1] + self.host_sizes[-1])
        return low, -(-high // UNITS[0]) * UNITS[0]

    def unit(self, rows: int, row_stride: int) -> int | None:
        """The widest access for all boxes; None if some are less than 4-byte aligned."""
        units = [box.unit(rows, row_stride) for box in self.boxes]
        return None if None in units else min((unit for unit in units if unit), default=None)

    def descriptors(
        self, blocks: Numbers, slots: Numbers
    ) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
        """Device address, host address and bytes of every run, `MAX_DESCRIPTORS` at most at once.

        Args:
            blocks: int64 ids.
            slots: as many.
        """
        for part, pairs in _batches(len(self.sizes), len(blocks)):
            device = self.device[part] + blocks[pairs, None] * self.block_strides[part]
            host = self.offsets[part] + (self.rows + slots[pairs, None] * self.row_stride)
            yield device.reshape(-1), host.reshape(-1), _repeated(self.sizes[part], len(device))

    def host_descriptors(
        self, slots: Numbers, staging: int
    ) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
        """Staging address, host address and bytes of every run of the rows; as `descriptors`.

        Args:
            slots: int64 slots; the i-th one's window is staged i windows into the buffer.
            staging: the buffer's address.
        """
        low, high = self.window
        windows = staging - low + np.arange(len(slots), dtype=np.int64) * (high - low)
        starts = self.rows + slots * self.row_stride
        for part, pairs in _batches(len(self.host_sizes), len(slots)):
            offsets = self.host_offsets[part]
            device = windows[pairs, None] + offsets
            host = starts[pairs, None] + offsets
            yield (
                device.reshape(-1),
                host.reshape(-1),
                _repeated(self.host_sizes[part], len(device)),
            )


def _batches(num_runs: int, num_pairs: int) -> Iterator[tuple[slice, slice]]:
    """Slices of runs and pairs, of `MAX_DESCRIPTORS` together at most."""
    few_runs = min(num_runs, MAX_DESCRIPTORS)
    few_pairs = max(1, MAX_DESCRIPTORS // few_runs)
    for pair, run in itertools.product(
        range(0, num_pairs, few_pairs), range(0, num_runs, few_runs)
    ):
        yield slice(run, run + few_runs), slice(pair, pair + few_pairs)


def _repeated(sizes: Numbers, times: int) -> Numbers:
    return np.ascontiguousarray(np.broadcast_to(sizes, (times, len(sizes)))).reshape(-1)


def plan_runs(plan: kvpolicy.TransferPlan) -> PlanRuns:
    """The runs of a plan."""
    device, strides, offsets, sizes = [], [], [], []
    alike: dict[_Shape, list[tuple[int, int]]] = {}
    no_boxes = ""
    for copy in plan.copies:
        base = copy.storage.data_ptr() + copy.offset
        frm, to = copy.box.offsets()
        device.append(base + frm)
        offsets.append(to)
        strides.append(np.full(len(to), copy.block_stride, dtype=np.int64))
        sizes.append(np.full(len(to), copy.box.size, dtype=np.int64))
        no_boxes = no_boxes or _obstacle(copy)
        place = base + copy.box.from_offset, copy.box.to_offset
        alike.setdefault((copy.block_stride, copy.box.size, copy.box.dims), []).append(place)
    runs = [np.concatenate(part) for part in (device, strides, offsets, sizes)]
    order = np.argsort(runs[2], kind="stable")
    at, stride, offset, size = (part[order] for part in runs)
    follows = offset[:-1] + size[:-1] == offset[1:]
    both = follows & (at[:-1] + size[:-1] == at[1:]) & (stride[:-1] == stride[1:])
    merged = _starts(both)
    rows = _starts(follows)
    return PlanRuns(
        device=at[merged],
        block_strides=stride[merged],
        offsets=offset[merged],
        sizes=np.add.reduceat(size, merged),
        rows=plan.rows.data_ptr(),
        row_stride=plan.rows.stride(0),
        host_offsets=offset[rows],
        host_sizes=np.add.reduceat(size, rows),
        boxes=() if no_boxes else tuple(map(_kernel_box, alike, alike.values())),
        no_boxes=no_boxes,
        storages=frozenset(copy.storage.data_ptr() for copy in plan.copies),
    )


def _starts(follows: NDArray[np.bool_]) -> Numbers:
    """Where a run begins that does not follow the one before it."""
    return np.concatenate(([0], np.flatnonzero(~follows) + 1)).astype(np.int64)


def _obstacle(copy: kvpolicy.PlannedCopy) -> str:
    """Why a copy cannot be given to the kernel, or ""."""
    box = copy.box
    if len(box.dims) > MAX_DIMS:
        return f"a box of {len(box.dims)} dimensions; the kernel takes {MAX_DIMS}"
    if max(box.num_runs, box.size) >= MAX_RUNS:
        return f"a box of {box.num_runs:,} runs of {box.size:,} B; the kernel counts to 2**31"
    return ""


def _kernel_box(shape: _Shape, places: Sequence[tuple[int, int]]) -> KernelBox:
    block_stride, size, dims = shape
    bases, offsets = np.array(places, dtype=np.int64).T
    unused = MAX_DIMS - len(dims)
    return KernelBox(
        bases=bases,
        offsets=offsets,
        block_stride=block_stride,
        size=size,
        times=(1,) * unused + tuple(dim.times for dim in dims),
        device_strides=(0,) * unused + tuple(dim.from_stride for dim in dims),
        host_strides=(0,) * unused + tuple(dim.to_stride for dim in dims),
    )
