"""Copy engines that are wrong on purpose, each in one way; `PlainCopy` is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import attrs
import torch

from kvpolicy import TransferHandle, TransferJob, TransferResult, hookimpl


class _Piece(NamedTuple):
    """One run of one block: bytes ``here`` of the storage and ``there`` of the slot's row."""

    destination: int
    storage: torch.Tensor
    here: int
    row: torch.Tensor
    there: int
    size: int


class _Work(TransferHandle):
    def __init__(self, work: Callable[[], TransferResult]) -> None:
        self._answer: TransferResult | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._answer = self._work()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> TransferResult:
        self._thread.join()
        if self._answer is None:
            raise RuntimeError("the copying thread died")
        return self._answer


class PlainCopy:
    """Copies run by run in a thread of each job's own; right, slow, for any device."""

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """Takes every job."""
        return _Work(lambda: self.run(job))

    def pieces(self, job: TransferJob) -> Iterator[_Piece]:
        """Every run, in the order in which they are copied."""
        for part in job.parts:
            for span in part.spans():
                for i in range(span.length):
                    block, slot = span.block + i, span.slot + i
                    for copy in part.plan.copies:
                        start = copy.offset + block * copy.block_stride
                        for here, there, size in copy.box.runs():
                            yield _Piece(
                                slot if job.direction == "store" else block,
                                copy.storage,
                                start + here,
                                part.plan.rows[slot],
                                there,
                                size,
                            )

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies one run."""
        held = piece.storage[piece.here : piece.here + piece.size]
        stored = piece.row[piece.there : piece.there + piece.size]
        if job.direction == "store":
            stored.copy_(held)
        else:
            held.copy_(stored)

    def run(self, job: TransferJob) -> TransferResult:
        """Copies everything; what was not wholly written is named."""
        begun = time.perf_counter()
        missing = {int(one): self.share(job, int(one)) for one in job.destinations}
        error = ""
        try:
            for piece in self.pieces(job):
                self.copy(job, piece)
                missing[piece.destination] -= piece.size
        except Exception as raised:  # noqa: BLE001  whatever it is, it becomes the result
            error = f"{type(raised).__name__}: {raised}"
        lost = [one for one, left in missing.items() if left] if error else []
        written = sum(self.share(job, one) for one in missing if one not in lost)
        return self.told(
            TransferResult(
                job_id=job.job_id,
                ok=not error,
                bytes=written,
                seconds=time.perf_counter() - begun,
                failed_ids=lost,
                error=error,
            )
        )

    def share(self, job: TransferJob, destination: int) -> int:
        """Bytes that the job moves to one destination."""
        ids = [part.slots if job.direction == "store" else part.block_ids for part in job.parts]
        counts = [int((found == destination).sum()) for found in ids]
        return sum(n * p.plan.block_bytes for n, p in zip(counts, job.parts, strict=True))

    def told(self, result: TransferResult) -> TransferResult:
        """What is reported."""
        return result


class RaisingCopy(PlainCopy):
    """Raises when it is asked."""

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """Raises."""
        raise RuntimeError(f"no idea how to {job.direction}")


class SilentCopy(PlainCopy):
    """Says "not mine" to every job."""

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """None."""
        del job
        return None


class GreedyCopy(PlainCopy):
    """Takes every job, also those that it does not declare; which ones, the contract is told."""


class OffByOneCopy(PlainCopy):
    """Begins every run one byte late on the engine's side."""

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies the wrong bytes."""
        super().copy(job, piece._replace(here=piece.here + 1))


class HalfCopy(PlainCopy):
    """Copies the first half of every run, or nothing of one byte."""

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies too little."""
        super().copy(job, piece._replace(size=piece.size // 2))


class OneWayCopy(PlainCopy):
    """Stores; a load moves nothing."""

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies one way."""
        if job.direction == "store":
            super().copy(job, piece)


class SpillingCopy(PlainCopy):
    """Copies right, and writes a byte before every run that it loads into engine memory."""

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies, and spills."""
        super().copy(job, piece)
        if job.direction == "load":
            piece.storage[piece.here - 1] = 0x55


class SpillingRowCopy(PlainCopy):
    """Copies right, and writes the last byte of every row that it stores to."""

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies, and spills."""
        super().copy(job, piece)
        if job.direction == "store":
            piece.row[-1] = 0x55


class EarlyCopy(PlainCopy):
    """Says done at once, and copies a moment later."""

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """A handle that is done before the copying is."""
        thread = threading.Timer(0.02, self.run, [job])
        thread.daemon = True
        thread.start()
        return TransferHandle.finished(
            TransferResult(job_id=job.job_id, ok=True, bytes=job.bytes, seconds=0.0)
        )


class WrongResult(PlainCopy):
    """Copies right and reports one byte too many."""

    def told(self, result: TransferResult) -> TransferResult:
        """A wrong number of bytes."""
        return attrs.evolve(result, bytes=result.bytes + 1)


class WrongJob(PlainCopy):
    """Copies right and reports another job."""

    def told(self, result: TransferResult) -> TransferResult:
        """Another job's id."""
        return attrs.evolve(result, job_id=result.job_id + 1)


class TextResult(PlainCopy):
    """Copies right and reports a word."""

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """A handle whose result is a word."""
        self.run(job)
        return TransferHandle.finished("copied")  # type: ignore[arg-type]  # this is the fault


class HidesFailures(PlainCopy):
    """Reports success whatever happened."""

    def told(self, result: TransferResult) -> TransferResult:
        """All is well."""
        return attrs.evolve(result, ok=True, failed_ids=(), error="")


class ForgetsFailures(PlainCopy):
    """Reports a failure, and only the first of what it did not write."""

    def told(self, result: TransferResult) -> TransferResult:
        """Too few failed ids."""
        return attrs.evolve(result, failed_ids=result.failed_ids[:1])


class NamelessFailures(PlainCopy):
    """Reports a failure, and nothing of what it did not write."""

    def told(self, result: TransferResult) -> TransferResult:
        """No failed ids."""
        return attrs.evolve(result, failed_ids=())


class MiscountedFailures(PlainCopy):
    """Names what it did not write, and reports that nothing was moved at all."""

    def told(self, result: TransferResult) -> TransferResult:
        """Bytes that do not agree with the failed ids."""
        return attrs.evolve(result, bytes=0 if result.failed_ids else result.bytes)


class ShortTableCopy(PlainCopy):
    """Has room for eight runs of a job; the rest it takes for copied."""

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies the first eight destinations of a job."""
        if piece.destination in job.destinations[:8]:
            super().copy(job, piece)


class OncePerSource(PlainCopy):
    """Copies every source once, though several destinations may want it."""

    def pieces(self, job: TransferJob) -> Iterator[_Piece]:
        """Drops what has been read before."""
        seen = set()
        for piece in super().pieces(job):
            storing = job.direction == "store"
            row = piece.row.data_ptr() + piece.there
            source = (piece.storage.data_ptr() + piece.here) if storing else row
            if source not in seen:
                seen.add(source)
                yield piece


class StaleCopy(PlainCopy):
    """Keeps the bytes of a plan's first job, and gives them to the next one."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int, str], torch.Tensor] = {}

    def copy(self, job: TransferJob, piece: _Piece) -> None:
        """Copies what lay there the first time."""
        held = piece.storage[piece.here : piece.here + piece.size]
        stored = piece.row[piece.there : piece.there + piece.size]
        source, there = (held, stored) if job.direction == "store" else (stored, held)
        key = (source.data_ptr(), piece.size, job.direction)
        there.copy_(self.kept.setdefault(key, source.clone()))


class SharedStateCopy(PlainCopy):
    """Keeps the job in itself, so that two at once become one twice."""

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle | None:
        """Remembers only the last job."""
        self.job = job

        def later() -> TransferResult:
            time.sleep(0.002)
            return attrs.evolve(self.run(self.job), job_id=job.job_id, bytes=job.bytes)

        return _Work(later)
