"""The copy engine: jobs of CPU tensors, cut into pieces, each one call of the kernel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

import kvpolicy
from kvpolicy_numba.loading import kernel
from kvpolicy_numba.runs import MAX_RUNS, Numbers, Runs, count, runs_of, sealed
from kvpolicy_numba.workers import MAX_THREADS, Workers, host_threads

_PIECE_BYTES = 4 * 2**20
_PIECES_PER_THREAD = 4
_LONGEST_WAIT = 0.05

Piece = tuple[kvpolicy.TransferPart, Runs, slice]


class NumbaCopy:
    """Takes jobs whose storages lie on the CPU.

    Args:
        threads: how many copy, 0 for the caller's own; None: ``KVPOLICY_HOST_THREADS``, or the
            cores that the process may use, at most eight.
        piece_bytes: what one thread is given at least; the hand-over costs tens of microseconds.

    Raises:
        OptionError: threads that are no number from 0 to 256, or pieces of less than a byte.
        Unavailable: numba or the processor cannot.
    """

    priority = 50  # before host-copy (-100)
    requires_api = 1

    def __init__(self, threads: int | None = None, *, piece_bytes: int = _PIECE_BYTES) -> None:
        if threads is not None and not (_whole(threads) and 0 <= threads <= MAX_THREADS):
            raise kvpolicy.OptionError(
                f"NumbaCopy threads is a whole number from 0 to {MAX_THREADS} or None, not "
                f"{threads!r}"
            )
        if not (_whole(piece_bytes) and piece_bytes > 0):
            raise kvpolicy.OptionError(
                f"NumbaCopy piece_bytes is a whole number >= 1, not {piece_bytes!r}"
            )
        self._kernel = kernel()
        self._threads, self._piece_bytes = threads, piece_bytes
        self._lock = threading.Lock()
        self._runs: WeakKeyDictionary[kvpolicy.TransferPlan, Runs] = WeakKeyDictionary()
        self._workers = Workers()

    @kvpolicy.hookimpl
    def transfer(self, job: kvpolicy.TransferJob) -> kvpolicy.TransferHandle | None:
        """Copies in the background; None for another device, or for pages in too many runs."""
        if job.device != "cpu":
            return None
        if any(count(part.plan) > MAX_RUNS for part in job.parts):
            return None
        begun = time.perf_counter()
        threads = host_threads() if self._threads is None else self._threads
        parts = [(part, self._runs_of(part.plan)) for part in job.parts]
        pieces = list(_cut(job, parts, threads, self._piece_bytes))
        handle = _Handle(job, begun, len(pieces), self._kernel)
        tasks = [partial(handle.run, number, piece) for number, piece in enumerate(pieces)]
        if threads:
            self._workers.put(tasks, threads)
        else:
            for task in tasks:
                task()
        return handle

    def _runs_of(self, plan: kvpolicy.TransferPlan) -> Runs:
        with self._lock:
            found = self._runs.get(plan)
            if found is None or found.moved():
                found = self._runs[plan] = runs_of(plan)
            return found


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


class _Handle(kvpolicy.TransferHandle):
    """A job under way: its pieces put what came of them into one list, which takes no lock."""

    def __init__(
        self,
        job: kvpolicy.TransferJob,
        begun: float,
        pieces: int,
        copy_pairs: Callable[..., int],
    ) -> None:
        self._job, self._begun, self._pieces, self._kernel = job, begun, pieces, copy_pairs
        self._outcomes: list[tuple[int, float, int, list[int], str]] = []
        self._latch = threading.Lock()
        self._latch.acquire()

    def run(self, number: int, piece: Sequence[Piece]) -> None:
        """Copies a piece; whatever happens becomes its outcome."""
        copied, error = 0, ""
        failed: list[int] = []
        storing = self._job.direction == "store"
        for part, runs, chosen in piece:
            blocks, slots = part.block_ids[chosen], part.slots[chosen]
            try:
                self._copy(sealed(blocks), sealed(slots), runs, storing)
                copied += len(blocks) * part.plan.block_bytes
            except Exception as raised:  # noqa: BLE001  whatever it is, it becomes the result
                error = f"{type(raised).__name__}: {raised}"
                failed += (slots if storing else blocks).tolist()
        self._outcomes.append((number, time.perf_counter(), copied, failed, error))
        if self.done():
            with suppress(RuntimeError):  # two that are the last at once
                self._latch.release()

    def _copy(self, blocks: Numbers, slots: Numbers, runs: Runs, storing: bool) -> None:
        wrong = self._kernel(
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

    def done(self) -> bool:
        """Whether every piece has ended."""
        return len(self._outcomes) == self._pieces

    def result(self) -> kvpolicy.TransferResult:
        """What came of all pieces."""
        outcomes = sorted(self._outcomes)
        error = next((one[4] for one in outcomes if one[4]), "")
        return kvpolicy.TransferResult(
            job_id=self._job.job_id,
            ok=not error,
            bytes=sum(one[2] for one in outcomes),
            seconds=max((one[1] for one in outcomes), default=self._begun) - self._begun,
            failed_ids=sorted({one_id for one in outcomes for one_id in one[3]}),
            error=error,
        )

    def wait(self, timeout: float | None = None) -> bool:
        """Wakes with the last piece. Whoever holds the latch too long is not waited for."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            left = _LONGEST_WAIT
            if deadline is not None:
                left = min(left, deadline - time.monotonic())
            if left <= 0:
                return False
            if self._latch.acquire(timeout=left):
                self._latch.release()
        return True
