"""The handle of a job that several threads copy in pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvpolicy.errors import OptionError
from kvpolicy.transfer import TransferHandle, TransferJob, TransferResult
from kvpolicy.values import is_whole
from kvpolicy.words import shown

_LONGEST_WAIT = 0.05


class _Outcome(NamedTuple):
    piece: int
    ended: float
    bytes: int
    failed_ids: Sequence[int]
    error: str


class PiecewiseHandle(TransferHandle):
    """Collects what comes of a job's pieces, in any order and from any threads.

    Nothing here takes a lock that an interrupt could leave held.

    Args:
        job: what is copied.
        pieces: how many there are; without any the job is done.

    Raises:
        OptionError: pieces that are no whole number >= 0.
    """

    def __init__(self, job: TransferJob, pieces: int) -> None:
        if not is_whole(pieces) or pieces < 0:
            raise OptionError(f"PiecewiseHandle pieces is a whole number >= 0, not {shown(pieces)}")
        self._job, self._pieces, self._begun = job, pieces, time.perf_counter()
        self._outcomes: dict[int, _Outcome] = {}
        self._latch = threading.Lock()
        self._latch.acquire()

    def ended(
        self, piece: int, bytes_copied: int, failed_ids: Sequence[int] = (), error: str = ""
    ) -> None:
        """What came of a piece, once for each.

        Args:
            piece: its number; the error of the lowest one is the job's.
            bytes_copied: in whole blocks.
            failed_ids: its destinations that were not wholly written.
            error: why, "" if nothing failed.

        Raises:
            OptionError: no such piece, or one that has ended.
        """
        if not 0 <= piece < self._pieces or piece in self._outcomes:
            raise OptionError(
                f"piece {shown(piece)} of {self._pieces} has ended already, or is none"
            )
        outcome = _Outcome(piece, time.perf_counter(), bytes_copied, failed_ids, error)
        self._outcomes[piece] = outcome
        if self.done():
            with suppress(RuntimeError):  # two that are the last at once
                self._latch.release()

    def done(self) -> bool:
        """Whether every piece has ended."""
        return len(self._outcomes) == self._pieces

    def result(self) -> TransferResult:
        """What came of all pieces."""
        outcomes = sorted(self._outcomes.values(), key=lambda one: one.piece)
        error = next((one.error for one in outcomes if one.error), "")
        return TransferResult(
            job_id=self._job.job_id,
            ok=not error,
            bytes=sum(one.bytes for one in outcomes),
            seconds=max((one.ended for one in outcomes), default=self._begun) - self._begun,
            failed_ids=sorted({lost for one in outcomes for lost in one.failed_ids}),
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
