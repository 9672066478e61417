"""Jobs in, handles out: a queue for each device, and what is said of both."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch

import kvpolicy
from kvpolicy_cuda import paths, pinned
from kvpolicy_cuda.cudadevice import cuda_device
from kvpolicy_cuda.device import Device
from kvpolicy_cuda.driver import Driver
from kvpolicy_cuda.errors import CudaError
from kvpolicy_cuda.kernels import Kernels
from kvpolicy_cuda.lanes import (
    STAGING_BYTES,
    CudaHandle,
    Lane,
    Touched,
    result_of,
    told,
)
from kvpolicy_cuda.planner import Choice, Choose, Facts, Path, choose
from kvpolicy_cuda.runs import PlanRuns, plan_runs


@attrs.frozen(kw_only=True)
class _Way:
    """A choice, and the kernel's access for it."""

    choice: Choice
    unit: int = 0


class DeviceQueue:
    """The jobs of one device; thread-safe."""

    def __init__(self, device: Device, choose: Choose) -> None:
        self._device, self._choose = device, choose
        self._lock = threading.Lock()
        with device.entered():
            self._lanes = {"store": Lane(device), "load": Lane(device)}
        self._runs: WeakKeyDictionary[kvpolicy.TransferPlan, PlanRuns] = WeakKeyDictionary()
        self._choices: WeakKeyDictionary[kvpolicy.TransferPlan, dict[str, Choice]]
        self._choices = WeakKeyDictionary()

    def submit(self, job: kvpolicy.TransferJob, begun: float) -> kvpolicy.TransferHandle:
        """Enqueues a job behind what the caller's stream holds, and what it would disturb."""
        with self._lock, self._device.entered():
            if self._device.capturing():
                why = "the current stream is being captured into a graph; submit outside of it"
                return _ended(job, why, begun)
            others = {"store": "load", "load": "store"}
            lane, other = self._lanes[job.direction], self._lanes[others[job.direction]]
            touched: list[Touched] = []
            borrowed = pinned.borrow(job.rows)
            held: list[object] = [job, borrowed]
            error = ""
            try:
                all_runs = [self._runs_of(part.plan) for part in job.parts]
                touched += [
                    Touched(runs=runs, blocks=part.block_ids)
                    for part, runs in zip(job.parts, all_runs, strict=True)
                ]
                ways = [
                    self._way(job, *both, lane) for both in zip(job.parts, all_runs, strict=True)
                ]
                lane.begin(self._device.current_stream().record_event(), tuple(touched), other)
                for part, runs, way in zip(job.parts, all_runs, ways, strict=True):
                    held.append(self._move(job, part, runs, way, lane))
            except Exception as raised:  # noqa: BLE001  whatever it is, it becomes the result
                error = told(raised)
            except BaseException:
                # An interrupt: the core will think that nothing is under way, so let it be true.
                lane.drain()
                borrowed.give_back()
                raise
            try:
                event = lane.end(tuple(touched))
            except Exception as raised:  # noqa: BLE001  the device takes nothing any more
                borrowed.give_back()
                return _ended(job, error or told(raised), begun)
        return CudaHandle(
            job,
            self._device,
            event,
            begun=begun,
            error=error,
            release=borrowed.give_back,
            held=held,
        )

    def measure(self) -> None:
        """Has the device's limits known."""
        with self._lock, self._device.entered():
            _ = self._device.limits

    def describe(self) -> dict[str, Any]:
        """Limits and latest choices, as JSON values."""
        with self._lock:
            choices = [
                {
                    "layers": list(plan.copies[0].layers[:1]),
                    "fragment_bytes": self._runs[plan].fragment_bytes,
                    **{way: f"{one.path}: {one.reason}" for way, one in sorted(found.items())},
                }
                for plan, found in self._choices.items()
            ]
        return {
            "limits": attrs.asdict(self._device.limits),
            "mapping": self._device.no_mapping,
            "plans": choices,
        }

    def _runs_of(self, plan: kvpolicy.TransferPlan) -> PlanRuns:
        runs = self._runs.get(plan)
        if runs is None:
            runs = self._runs[plan] = plan_runs(plan)
        return runs

    def _way(
        self, job: kvpolicy.TransferJob, part: kvpolicy.TransferPart, runs: PlanRuns, lane: Lane
    ) -> _Way:
        """How a part goes."""
        low, high = runs.window
        staged_unit = runs.unit(-low, high - low)  # a staging buffer itself is aligned
        direct_unit = runs.unit(runs.rows, runs.row_stride)
        no_kernel = self._device.kernels if isinstance(self._device.kernels, str) else ""
        no_kernel = no_kernel or runs.no_boxes
        unaligned = "addresses or sizes are not multiples of 4 B"
        facts = Facts(
            to_host=job.direction == "store",
            runs=len(part.block_ids) * len(runs.sizes),
            fragment_bytes=runs.fragment_bytes,
            host_run_bytes=runs.host_run_bytes,
            not_pinned=self._not_pinned(job.rows),
            no_kernel=no_kernel or ("" if staged_unit else unaligned),
            no_staging=_too_long(high - low),
            no_mapping=self._device.no_mapping or ("" if direct_unit else f"rows: {unaligned}"),
        )
        choice = self._choose(facts, self._device.limits)
        if choice.path is Path.STAGED and (no_memory := _no_buffers(lane)):
            choice = self._choose(attrs.evolve(facts, no_staging=no_memory), self._device.limits)
        self._choices.setdefault(part.plan, {})[job.direction] = choice
        return _Way(
            choice=choice,
            unit=(staged_unit if choice.path is Path.STAGED else direct_unit) or 0,
        )

    def _not_pinned(self, rows: torch.Tensor) -> str:
        driver, first = self._device.driver, rows.data_ptr()
        last = first + rows.numel() - 1
        if driver.is_pinned(first) and driver.is_pinned(last):
            return ""
        return "the rows are not pinned, which is slower; use a PinnedHostPool, or pin its rows"

    def _move(
        self,
        job: kvpolicy.TransferJob,
        part: kvpolicy.TransferPart,
        runs: PlanRuns,
        way: _Way,
        lane: Lane,
    ) -> object:
        """Enqueues a part; returns what must live until it has run."""
        device, kernels = self._device, self._device.kernels
        to_host, path = job.direction == "store", way.choice.path
        ids = part.block_ids, part.slots
        if path is Path.DMA or isinstance(kernels, str):
            paths.dma(device, runs, *ids, to_host=to_host, stream=lane.streams[0])
            return None
        if path is Path.STAGED:
            return paths.staged(
                device, kernels, runs, *ids, unit=way.unit, to_host=to_host, lane=lane
            )
        stream = lane.streams[0]
        return paths.direct(
            device, kernels, runs, *ids, unit=way.unit, to_host=to_host, stream=stream
        )


def _too_long(window: int) -> str:
    if window <= STAGING_BYTES:
        return ""
    return f"a row's window of {window:,} B is longer than a buffer of {STAGING_BYTES:,} B"


def _no_buffers(lane: Lane) -> str:
    """Takes the lane's staging buffers; why they cannot be had, or ""."""
    try:
        for number in range(len(lane.streams)):
            lane.staging(number)
    except RuntimeError as error:
        return f"no device memory for the buffers ({told(error)})"
    return ""


class Engine:
    """Takes every job it is given.

    Args:
        device_of: the device of a job's ``device``; may raise `CudaError`.
        choose: which path a part takes.
    """

    def __init__(
        self, device_of: Callable[[str], Device] = cuda_device, choose: Choose = choose
    ) -> None:
        self._device_of, self._choose = device_of, choose
        self._lock = threading.Lock()
        self._queues: dict[str, DeviceQueue] = {}

    def transfer(self, job: kvpolicy.TransferJob) -> kvpolicy.TransferHandle:
        """Enqueues a job; what cannot be enqueued is a failed result."""
        begun = time.perf_counter()
        try:
            queue = self._queue(job.device)
        except Exception as error:  # noqa: BLE001  whatever it is, it becomes the result
            return _ended(job, told(error), begun)
        return queue.submit(job, begun)

    def prepare(self, name: str) -> None:
        """Measures a device now, which its first job would have to wait for.

        Raises:
            CudaError: there is no such device.
        """
        self._queue(name).measure()

    def describe(self) -> Mapping[str, Any]:
        """What was found of each device that had a job."""
        with self._lock:
            queues = dict(self._queues)
        return {name: queue.describe() for name, queue in queues.items()}

    def _queue(self, name: str) -> DeviceQueue:
        with self._lock:
            if name not in self._queues:
                self._queues[name] = DeviceQueue(self._device_of(name), self._choose)
            return self._queues[name]


def _ended(job: kvpolicy.TransferJob, error: str, begun: float) -> kvpolicy.TransferHandle:
    result = result_of(job, error, time.perf_counter() - begun)
    return kvpolicy.TransferHandle.finished(result)


class Installed(Engine):
    """The engine of this process's CUDA devices."""

    def describe(self) -> dict[str, Any]:
        """See `kvpolicy_cuda.describe`."""
        kernels = Kernels.load()
        try:
            found = Driver.load()
            major, minor = found.version // 1000, found.version % 1000 // 10
            driver: Any = {
                "cuda": f"{major}.{minor}",
                "copies": found.no_batch or "batched: one call for many runs",
            }
        except CudaError as error:
            driver = str(error)
        return {
            "driver": driver,
            "kernels": kernels if isinstance(kernels, str) else "",
            "devices": super().describe(),
        }


@functools.lru_cache(maxsize=1)
def installed() -> Installed:
    """The one engine of this process; it opens a device with its first job, or `prepare`."""
    return Installed()
