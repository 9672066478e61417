"""The copy engine: jobs of CPU tensors, cut into pieces, each one call of the kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import kvpolicy
from kvpolicy_numba.loading import kernel
from kvpolicy_numba.runs import MAX_RUNS, Numbers, Runs, count, runs_of, sealed

_PIECE_BYTES = 4 * 2**20
_PIECES_PER_THREAD = 4

Piece = tuple[kvpolicy.TransferPart, Runs, slice]


class NumbaCopy:
    """Takes jobs whose storages lie on the CPU.

    Args:
        threads: how many copy, as `kvpolicy.Workers` takes it.
        piece_bytes: what one thread is given at least; the hand-over costs tens of microseconds.

    Raises:
        OptionError: threads that are no number from 0 to 256, or pieces of less than a byte.
        Unavailable: numba or the processor cannot.
    """

    priority = 50  # before host-copy (-100)
    requires_api = 1

    def __init__(self, threads: int | None = None, *, piece_bytes: int = _PIECE_BYTES) -> None:
        whole = isinstance(piece_bytes, int) and not isinstance(piece_bytes, bool)
        if not (whole and piece_bytes > 0):
            raise kvpolicy.OptionError(
                f"NumbaCopy piece_bytes is a whole number >= 1, not {piece_bytes!r}"
            )
        self._kernel = kernel()
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._runs: WeakKeyDictionary[kvpolicy.TransferPlan, Runs] = WeakKeyDictionary()
        self._workers = kvpolicy.Workers("kvpolicy-numba", threads)

    @kvpolicy.hookimpl
    def transfer(self, job: kvpolicy.TransferJob) -> kvpolicy.TransferHandle | None:
        """Copies in the background; None for another device, or for pages in too many runs."""
        if job.device != "cpu":
            return None
        if any(count(part.plan) > MAX_RUNS for part in job.parts):
            return None
        threads = self._workers.threads()
        parts = [(part, self._runs_of(part.plan)) for part in job.parts]
        pieces = list(_cut(job, parts, threads, self._piece_bytes))
        handle = kvpolicy.PiecewiseHandle(job, len(pieces))
        how = self._kernel, job.direction == "store"
        self._workers.put(
            [partial(_run, handle, number, piece, *how) for number, piece in enumerate(pieces)],
            threads,
        )
        return handle

    def prepare_rows(self, _rows: object, _device: str) -> None:
        """Nothing but to refuse a number of threads that cannot be before the first job does.

        Raises:
            OptionError: ``KVPOLICY_HOST_THREADS`` is no number from 0 to 256.
        """
        self._workers.threads()

    def _runs_of(self, plan: kvpolicy.TransferPlan) -> Runs:
        with self._lock:
            found = self._runs.get(plan)
            if found is None or found.moved():
                found = self._runs[plan] = runs_of(plan)
            return found


def _cut(
    job: kvpolicy.TransferJob,
    parts: Sequence[tuple[kvpolicy.TransferPart, Runs]],
    threads: int,
    piece_bytes: int,
) -> Iterator[Sequence[Piece]]:
    """The job in pieces of whole blocks; a small one, or one thread's, is one piece."""
    most = max(job.bytes // max(1, threads * _PIECES_PER_THREAD), piece_bytes)
    if threads <= 1 or job.bytes <= piece_bytes:
        yield [(part, own, slice(None)) for part, own in parts]
        return
    for part, own in parts:
        step = max(1, most // part.plan.block_bytes)
        for start in range(0, len(part.block_ids), step):
            yield [(part, own, slice(start, start + step))]


def _run(
    handle: kvpolicy.PiecewiseHandle,
    number: int,
    piece: Sequence[Piece],
    copy_pairs: Callable[..., int],
    storing: bool,
) -> None:
    """Copies a piece; whatever happens becomes its outcome."""
    copied, error = 0, ""
    failed: list[int] = []
    for part, runs, chosen in piece:
        blocks, slots = part.block_ids[chosen], part.slots[chosen]
        try:
            _copy(copy_pairs, sealed(blocks), sealed(slots), runs, storing)
            copied += len(blocks) * part.plan.block_bytes
        except Exception as raised:  # noqa: BLE001  whatever it is, it becomes the result
            error = f"{type(raised).__name__}: {raised}"
            failed += (slots if storing else blocks).tolist()
    handle.ended(number, copied, failed, error)


def _copy(
    copy_pairs: Callable[..., int], blocks: Numbers, slots: Numbers, runs: Runs, storing: bool
) -> None:
    wrong = copy_pairs(
        blocks,
        slots,
        runs.base,
        runs.stride,
        runs.at,
        runs.size,
        runs.rows,
        runs.row_stride,
        runs.num_blocks,
        runs.num_slots,
        storing,
        runs.is_short,
    )
    if wrong >= 0:
        raise IndexError(
            f"block {blocks[wrong]} or slot {slots[wrong]} is out of range; possible: blocks 0 "
            f"to {runs.num_blocks - 1}, slots 0 to {runs.num_slots - 1}"
        )
