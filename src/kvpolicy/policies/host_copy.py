"""Copies between CPU tensors and host rows, through numpy views, in a thread of its own."""

from __future__ import annotations

import atexit
import os
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from kvpolicy.hooks import hookimpl

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvpolicy.plan import PlannedCopy, TransferPlan
    from kvpolicy.transfer import TransferHandle, TransferJob, TransferResult

    Bytes = NDArray[np.uint8]
    Views = tuple[tuple[Bytes, Bytes], ...]
    _Task = tuple[TransferJob, tuple[Views, ...], float, list[TransferResult]]


class HostCopy:
    """Takes jobs whose storages lie on the CPU; one thread, first in, first out.

    The views of a plan are made once; a job then makes no array, only slices. torch's thread
    setting is left alone.
    """

    priority = -100

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Task | None] | None = None
        self._process = 0
        self._views: WeakKeyDictionary[TransferPlan, Views] = WeakKeyDictionary()

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """Copies in the background; None for a job of another device."""
        if job.device != "cpu":
            return None
        begun = time.perf_counter()
        views = tuple(self._views_of(part.plan) for part in job.parts)
        results: list[TransferResult] = []
        self._worker().put((job, views, begun, results))
        return _handle(results)

    def _worker(self) -> SimpleQueue[_Task | None]:
        """The queue of this process's thread. Its put is atomic: an interrupt leaves no lock."""
        with self._lock:
            if self._queue is None or self._process != os.getpid():
                # A fork does not carry threads over, so each process makes its own.
                self._queue, self._process = SimpleQueue(), os.getpid()
                thread = threading.Thread(
                    target=_serve, args=(self._queue,), name="kvpolicy-host-copy", daemon=True
                )
                thread.start()
                atexit.register(_stop, self._queue, thread, self._process)
            return self._queue

    def _views_of(self, plan: TransferPlan) -> Views:
        with self._lock:
            views = self._views.get(plan)
            if views is None:
                rows = plan.rows.numpy()
                views = tuple(_pair(copy, rows, plan.num_blocks) for copy in plan.copies)
                self._views[plan] = views
            return views


def _pair(copy: PlannedCopy, rows: Bytes, num_blocks: int) -> tuple[Bytes, Bytes]:
    """Blocks and rows as arrays of shape (blocks or slots, *dims, size)."""
    dims, size = copy.box.dims, copy.box.size
    counts = [dim.times for dim in dims]
    # This constructor checks that the view stays inside its buffer.
    blocks: Bytes = np.ndarray(
        (num_blocks, *counts, size),
        np.uint8,
        copy.storage.numpy(),
        copy.offset + copy.box.from_offset,
        (copy.block_stride, *(dim.from_stride for dim in dims), 1),
    )
    held: Bytes = np.ndarray(
        (rows.shape[0], *counts, size),
        np.uint8,
        rows.reshape(-1),
        copy.box.to_offset,
        (rows.strides[0], *(dim.to_stride for dim in dims), 1),
    )
    return blocks, held


def _copy(job: TransferJob, views: tuple[Views, ...], begun: float) -> TransferResult:
    """Span by span, so that a failure leaves whole blocks behind it."""
    from kvpolicy.transfer import TransferResult

    storing = job.direction == "store"
    failed: set[int] = set()
    copied, error = 0, ""
    for part, pairs in zip(job.parts, views, strict=True):
        whole = 0
        try:
            for block, slot, length in part.spans():
                # A span of one is an index: numpy copies it faster than a slice.
                there = slot if length == 1 else slice(slot, slot + length)
                here = block if length == 1 else slice(block, block + length)
                for blocks, rows in pairs:
                    if storing:
                        np.copyto(rows[there], blocks[here])
                    else:
                        np.copyto(blocks[here], rows[there])
                whole += length
        except Exception as raised:  # noqa: BLE001  whatever it is, it becomes the result
            error = f"{type(raised).__name__}: {raised}"
            failed.update((part.slots if storing else part.block_ids)[whole:].tolist())
        copied += whole * part.plan.block_bytes
    return TransferResult(
        job_id=job.job_id,
        ok=not error,
        bytes=copied,
        seconds=time.perf_counter() - begun,
        failed_ids=tuple(sorted(failed)),
        error=error,
    )


def _serve(queue: SimpleQueue[_Task | None]) -> None:
    """The copying thread: one task after the other, until None."""
    while (task := queue.get()) is not None:
        job, views, begun, results = task
        results.append(_copy(job, views, begun))
        del task, job, views, results  # nothing is kept alive while the thread waits


def _stop(queue: SimpleQueue[_Task | None], thread: threading.Thread, process: int) -> None:
    """At exit: what was submitted is copied before its memory goes."""
    if process == os.getpid():
        queue.put(None)
        thread.join()


def _handle(results: list[TransferResult]) -> TransferHandle:
    from kvpolicy.transfer import TransferHandle

    class HostCopyHandle(TransferHandle):
        """Reads one list, which takes no lock that an interrupt could leave held."""

        def done(self) -> bool:
            return bool(results)

        def result(self) -> TransferResult:
            return results[0]

    return HostCopyHandle()


policy = HostCopy()
