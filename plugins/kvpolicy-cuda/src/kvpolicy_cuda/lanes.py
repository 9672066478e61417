"""Order: what a job waits for, what waits for it, and when it is over.

A device has a lane for each direction, so that both run at once. A lane is two streams, each
with a staging buffer of its own: while one gathers, the other's copy engine works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

import kvpolicy
from kvpolicy_cuda.device import Device, Event, Stream
from kvpolicy_cuda.errors import CudaError
from kvpolicy_cuda.runs import PlanRuns

STAGING_BYTES = 16 * 2**20
"""Of one stream's buffer, taken when it is first needed; four of them for a device."""


@attrs.frozen(kw_only=True, eq=False)
class Touched:
    """What a job reads or writes on the device: some blocks. Keeps no memory of the engine's."""

    runs: PlanRuns
    blocks: NDArray[np.int64]

    def meets(self, other: Touched) -> bool:
        """Whether both may touch one byte; plans that share a storage count as if they did."""
        if self.runs is not other.runs:
            return not self.runs.storages.isdisjoint(other.runs.storages)
        return bool(np.isin(self.blocks, other.blocks).any())


class Lane:
    """The jobs of one direction, first in, first out."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.streams: tuple[Stream, Stream] = (device.new_stream(), device.new_stream())
        self._staging: list[torch.Tensor | None] = [None, None]
        self._under_way: list[tuple[tuple[Touched, ...], Event]] = []

    def staging(self, stream: int) -> torch.Tensor:
        """The staging buffer of one of the streams.

        Raises:
            RuntimeError: no device memory for it.
        """
        buffer = self._staging[stream]
        if buffer is None:
            buffer = self._staging[stream] = self._device.scratch(STAGING_BYTES)
        return buffer

    def begin(self, start: Event, touched: tuple[Touched, ...], other: Lane) -> None:
        """What is enqueued next waits for the submitter's stream and for what it would disturb.

        A load must not overwrite blocks that a store still reads, nor a store read blocks that
        are still being loaded.
        """
        waits = [start, *(event for _, event in self._still()[-1:])]
        waits += [
            event
            for theirs, event in other._still()
            if any(one.meets(another) for one in touched for another in theirs)
        ]
        for stream in self.streams:
            for event in waits:
                stream.wait_event(event)

    def end(self, touched: tuple[Touched, ...]) -> Event:
        """An event that comes when all that was enqueued has ended."""
        first, second = self.streams
        first.wait_event(second.record_event())
        event: Event = first.record_event()
        self._under_way.append((touched, event))
        return event

    def drain(self) -> None:
        """Blocks until nothing is under way."""
        for stream in self.streams:
            stream.synchronize()

    def _still(self) -> list[tuple[tuple[Touched, ...], Event]]:
        self._under_way = [one for one in self._under_way if not self._over(one[1])]
        return self._under_way

    def _over(self, event: Event) -> bool:
        try:
            return self._device.driver.is_done(event.cuda_event)
        except CudaError:  # its job's own handle reports it
            return True


class CudaHandle(kvpolicy.TransferHandle):
    """A job on a device; over when its last event is.

    Args:
        job: what is copied.
        device: where.
        event: comes last.
        begun: `time.perf_counter` at submission.
        error: what could not be enqueued, "" if all was.
        release: called once, when it is over.
        held: what must live until then.
    """

    def __init__(
        self,
        job: kvpolicy.TransferJob,
        device: Device,
        event: Event,
        *,
        begun: float,
        error: str,
        release: Callable[[], None],
        held: Any,
    ) -> None:
        self._job, self._device, self._event = job, device, event
        self._begun, self._error = begun, error
        self._release, self._held = release, held
        self._result: kvpolicy.TransferResult | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether the device has done all of it, or failed; never blocks."""
        with self._lock:
            if self._result is not None:
                return True
            try:
                with self._device.entered():
                    if not self._device.driver.is_done(self._event.cuda_event):
                        return False
            except Exception as error:  # noqa: BLE001  whatever it is, the job has failed
                self._error = self._error or told(error)
            seconds = time.perf_counter() - self._begun
            self._result = result_of(self._job, self._error, seconds)
            self._held = None
            self._release()
            return True

    def result(self) -> kvpolicy.TransferResult:
        """The result, once `done`.

        Raises:
            RuntimeError: it is not.
        """
        self.done()
        if self._result is None:
            raise RuntimeError(f"job {self._job.job_id} is still under way; ask done first")
        return self._result


def result_of(job: kvpolicy.TransferJob, error: str, seconds: float) -> kvpolicy.TransferResult:
    """A success, or a failure of which nothing is known to be written."""
    return kvpolicy.TransferResult(
        job_id=job.job_id,
        ok=not error,
        bytes=0 if error else job.bytes,
        seconds=seconds,
        failed_ids=job.destinations.tolist() if error else (),
        error=error,
    )


def told(error: BaseException) -> str:
    """An error in words; ours need no type before them."""
    text = str(error).strip().split("\n")[0]
    return text if isinstance(error, CudaError) else f"{type(error).__name__}: {text}"
