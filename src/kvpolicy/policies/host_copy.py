"""Copies between CPU tensors and host rows, through NumPy views, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np

from kvpolicy.hooks import hookimpl
from kvpolicy.words import spare, told
from kvpolicy.workers import Workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvpolicy.boxes import Box
    from kvpolicy.pieces import PiecewiseHandle
    from kvpolicy.plan import PlannedCopy, TransferPlan
    from kvpolicy.transfer import TransferHandle, TransferJob, TransferPart

    Bytes = NDArray[np.uint8]
    Pair = tuple[Any, Any]
    """One box as seen in the engine's blocks and in the rows, the first dimension counting them."""

_PIECE_BYTES = 4 * 2**20
"""What one thread is given at least: the hand-over costs tens of microseconds."""
_PIECES_PER_THREAD = 4
_SHARED_CALL_BYTES = 64 * 2**10
"""Calls that copy less make threads wait for the interpreter's lock more than they copy."""

# Runs of these sizes are copied faster by torch than by NumPy, which hands each to memmove. torch
# costs more per call, and starts threads of its own from so many elements on.
_TORCH_RUNS = range(1024, 2048 + 1)
_TORCH_LEAST_BYTES = 64 * 2**10
_TORCH_MOST_ELEMENTS = 32_768 - 1
_ELEMENT = np.dtype(np.complex128)  # the widest: the fewest elements


@attrs.frozen(kw_only=True, eq=False)
class Views:
    """A plan's boxes as arrays, made once.

    Attributes:
        spans: copied span by span.
        blocks: copied block by block, by torch.
    """

    spans: tuple[Pair, ...]
    blocks: tuple[Pair, ...]


class HostCopy:
    """Takes jobs whose storages lie on the CPU; large ones are shared among its threads.

    Args:
        threads: how many copy, as `Workers` takes it.

    The views of a plan are made once; a job then makes no array, only slices. torch's thread
    setting is left alone.

    Raises:
        OptionError: threads that are no number from 0 to 256.
    """

    priority = -100

    def __init__(self, threads: int | None = None) -> None:
        self._lock = threading.Lock()
        self._views: WeakKeyDictionary[TransferPlan, Views] = WeakKeyDictionary()
        self._workers = Workers("kvpolicy-host-copy", threads)

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """Copies in the background; None for a job of another device."""
        if job.device != "cpu":
            return None
        from kvpolicy.pieces import PiecewiseHandle

        threads = self._workers.threads()
        pieces = [
            [(part, self._views_of(part.plan)) for part in parts] for parts in _cut(job, threads)
        ]
        handle, storing = PiecewiseHandle(job, len(pieces)), job.direction == "store"
        self._workers.put(
            [partial(_run, handle, number, piece, storing) for number, piece in enumerate(pieces)],
            threads,
        )
        return handle

    def prepare_rows(self, _rows: object, _device: str) -> None:
        """Nothing but to refuse a number of threads that cannot be before the first job does.

        Raises:
            OptionError: as `Workers.threads` says.
        """
        self._workers.threads()

    def _views_of(self, plan: TransferPlan) -> Views:
        with self._lock:
            views = self._views.get(plan)
            if views is None:
                views = self._views[plan] = _views(plan)
            return views


def _cut(job: TransferJob, threads: int) -> Iterator[Sequence[TransferPart]]:
    """The job in pieces of whole blocks; one piece where sharing it would not pay."""
    calls = sum(len(part.plan.copies) * len(part.block_ids) for part in job.parts)
    if job.bytes < _SHARED_CALL_BYTES * calls:
        threads = 1
    most = max(job.bytes // max(1, threads * _PIECES_PER_THREAD), _PIECE_BYTES)
    if threads <= 1 or job.bytes <= _PIECE_BYTES:
        yield job.parts
        return
    for part in job.parts:
        count = len(part.block_ids)
        step = max(1, most // part.plan.block_bytes)
        for start in range(0, count, step):
            ids = slice(start, start + step)
            yield [attrs.evolve(part, block_ids=part.block_ids[ids], slots=part.slots[ids])]


def _views(plan: TransferPlan) -> Views:
    rows = plan.rows.numpy()
    spans, blocks = [], []
    for copy in plan.copies:
        storage = copy.storage.numpy()
        boxes = _torch_boxes(copy, storage, rows)
        if boxes:
            import torch

            # A tensor made in inference mode could not be written outside it.
            with torch.inference_mode(False):
                for box in boxes:
                    pair = _pair(copy, box, rows, plan.num_blocks, _ELEMENT)
                    blocks.append((torch.from_numpy(pair[0]), torch.from_numpy(pair[1])))
        else:
            spans.append(_pair(copy, copy.box, rows, plan.num_blocks, np.dtype(np.uint8)))
    return Views(spans=tuple(spans), blocks=tuple(blocks))


def _torch_boxes(copy: PlannedCopy, storage: Bytes, rows: Bytes) -> list[Box]:
    """The box in slices that torch copies with one thread; empty where NumPy is to copy it."""
    box, width = copy.box, _ELEMENT.itemsize
    if box.size not in _TORCH_RUNS or box.bytes < _TORCH_LEAST_BYTES:
        return []
    first, *inner = box.dims
    slice_bytes = box.bytes // first.times
    places = [
        storage.ctypes.data + copy.offset + box.from_offset,
        rows.ctypes.data + box.to_offset,
        copy.block_stride,
        rows.strides[0],
        box.size,
        *(stride for dim in box.dims for stride in dim[1:]),
    ]
    most = _TORCH_MOST_ELEMENTS * width // slice_bytes
    if not most or any(place % width for place in places):
        return []
    count = -(-first.times // most)
    step = -(-first.times // count)
    return [
        attrs.evolve(
            box,
            dims=(first._replace(times=min(step, first.times - start)), *inner),
            from_offset=box.from_offset + start * first.from_stride,
            to_offset=box.to_offset + start * first.to_stride,
        )
        for start in range(0, first.times, step)
    ]


def _pair(
    copy: PlannedCopy, box: Box, rows: Bytes, num_blocks: int, element: np.dtype[Any]
) -> Pair:
    """Blocks and rows as arrays of shape (blocks or slots, *dims, elements of a run)."""
    counts = [dim.times for dim in box.dims]
    size, item = box.size // element.itemsize, element.itemsize
    # This constructor checks that the view stays inside its buffer.
    blocks: NDArray[Any] = np.ndarray(
        (num_blocks, *counts, size),
        element,
        copy.storage.numpy(),
        copy.offset + box.from_offset,
        (copy.block_stride, *(dim.from_stride for dim in box.dims), item),
    )
    held: NDArray[Any] = np.ndarray(
        (rows.shape[0], *counts, size),
        element,
        rows.reshape(-1),
        box.to_offset,
        (rows.strides[0], *(dim.to_stride for dim in box.dims), item),
    )
    return blocks, held


def _run(
    handle: PiecewiseHandle,
    number: int,
    piece: Sequence[tuple[TransferPart, Views]],
    storing: bool,
) -> None:
    """Copies a piece; whatever happens becomes its outcome."""
    copied, error = 0, ""
    failed: list[int] = []
    for part, views in piece:
        whole = 0
        try:
            for done in _copy(part, views, storing):
                whole += done
        except BaseException as raised:  # noqa: BLE001  see spare
            spare(raised)
            error = told(raised)
            failed += (part.slots if storing else part.block_ids)[whole:].tolist()
        copied += whole * part.plan.block_bytes
    handle.ended(number, copied, failed, error)


def _copy(part: TransferPart, views: Views, storing: bool) -> Iterator[int]:
    """Span by span, so that a failure leaves whole blocks behind it; yields blocks copied."""
    # A pair's destination first.
    spans, blocks = (
        ([pair[::-1] for pair in pairs] if storing else pairs)
        for pairs in (views.spans, views.blocks)
    )
    one = len(part.block_ids) == 1  # for which asking takes longer than copying a short run
    found = [(int(part.block_ids[0]), int(part.slots[0]), 1)] if one else part.spans()
    for block, slot, length in found:
        # A span of one is an index: NumPy copies it faster than a slice.
        here: int | slice = block if length == 1 else slice(block, block + length)
        there: int | slice = slot if length == 1 else slice(slot, slot + length)
        to, frm = (there, here) if storing else (here, there)
        for into, out_of in spans:
            into[to] = out_of[frm]
        if blocks:
            ends = (slot, block) if storing else (block, slot)
            for i in range(length):
                for into, out_of in blocks:
                    into[ends[0] + i] = out_of[ends[1] + i]
        yield length


policy = HostCopy()
