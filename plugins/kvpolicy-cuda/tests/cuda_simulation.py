"""A CUDA device without a GPU: streams that run when asked, and a driver of recording fakes.

Work is queued as on a device and runs later, one operation of one stream after another, in an
order that is drawn at random among those which events allow. So what is not ordered is, sooner or
later, run in the wrong order, and a test sees wrong bytes. Device memory is the CPU's.

The driver's functions are real C functions (of ctypes) behind addresses, so `Driver` is the one
that runs on a GPU. Each copy's ranges are checked against the memory that the tests made known.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading

import numpy as np
import torch
from kvpolicy_cuda.driver import BASE_VERSION, BATCH, SIGNATURES, CopyAttributes, Driver
from kvpolicy_cuda.engine import Engine
from kvpolicy_cuda.kernels import Kernels
from kvpolicy_cuda.planner import Choice, Limits, Path

import kvpolicy

NAMES = {
    1: b"CUDA_ERROR_INVALID_VALUE",
    2: b"CUDA_ERROR_OUT_OF_MEMORY",
    4: b"CUDA_ERROR_DEINITIALIZED",
    700: b"CUDA_ERROR_ILLEGAL_ADDRESS",
    712: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
}
NOT_READY = 600
SIMULATION = 999_999  # the test's own complaint; its name is what is wrong


class Memory:
    """Known ranges of memory."""

    def __init__(self):
        self.ranges = []

    def add(self, tensor):
        start = tensor.data_ptr()
        size = tensor.untyped_storage().nbytes() if tensor.dim() == 1 else tensor.numel()
        if (start, size) not in self.ranges:
            self.ranges.append((start, size))

    def holds(self, starts, sizes):
        inside = np.zeros(len(starts), dtype=bool)
        for start, size in self.ranges:
            inside |= (starts >= start) & (starts + sizes <= start + size)
        return bool(inside.all())


class Event:
    def __init__(self, handle):
        self.cuda_event = handle
        self.done = False


class Stream:
    def __init__(self, device, handle):
        self._device = device
        self.cuda_stream = handle
        self.queue = []
        self.paused = False

    def wait_event(self, event):
        self.queue.append(("wait", event))

    def record_event(self):
        event = self._device.new_event()
        self.queue.append(("record", event))
        return event

    def enqueue(self, operation):
        self.queue.append(("run", operation))

    def synchronize(self):
        while self.queue:
            assert self._device.step(), "streams wait for each other"

    def ready(self):
        may = self.queue and (self.queue[0][0] != "wait" or self.queue[0][1].done)
        return bool(may) and not self.paused


class SimulatedDevice:
    """See the module.

    Args:
        seed: of the order in which streams run.
        batch_version: the driver's: 13000 takes eight arguments, 12080 nine, 0 has no batch.
        steps: operations that run at each query of an event.
    """

    def __init__(self, seed=0, batch_version=13000, steps=3, no_kernel="", pinned=True):
        self.random = random.Random(seed)
        self.steps, self.batch_version = steps, batch_version
        self.version = batch_version or 12040
        self.pinned_everywhere = pinned
        self.lock = threading.RLock()
        self.streams, self.events = {}, {}
        self.handles = itertools.count(1)
        self.device_memory, self.host_memory = Memory(), Memory()
        self.registered = {}
        self.calls, self.copies, self.depth = [], [], 0
        self.fails = {}
        self.broken = 0
        self.problem = b""
        self.started = False
        self.is_capturing = False
        self._keep = []
        self._addresses = {name: self._function(name) for name in SIGNATURES}
        self.driver = Driver(self.find)
        self.kernels = no_kernel or Kernels.load()
        self.no_mapping = ""
        self.limits = Limits()
        self.current = self.new_stream()

    # What `Device` asks for.

    def entered(self):
        return self.driver.entered(0)

    def capturing(self):
        return self.is_capturing

    def current_stream(self):
        return self.current

    def new_stream(self):
        with self.lock:
            stream = Stream(self, next(self.handles))
            self.streams[stream.cuda_stream] = stream
            return stream

    def launch(self, stream, kernel):
        assert self.depth, "launched outside of the context"
        stream.enqueue(kernel)

    def upload(self, numbers, stream):
        return torch.from_numpy(numbers.copy())

    def scratch(self, size):
        room = torch.full((size + 256,), 0x5A, dtype=torch.uint8)
        start = -room.data_ptr() % 256
        buffer = room[start : start + size]
        self.device_memory.ranges.append((buffer.data_ptr(), size))
        return buffer

    def pinned_scratch(self, num_rows, row_stride):
        rows = torch.zeros((num_rows, row_stride), dtype=torch.uint8)
        self.host_memory.add(rows)
        return rows

    # How it runs.

    def new_event(self):
        with self.lock:
            event = Event(next(self.handles))
            self.events[event.cuda_event] = event
            return event

    def step(self):
        """Runs one operation of some stream that may go on; False if none may."""
        with self.lock:
            ready = [stream for stream in self.streams.values() if stream.ready()]
            if not ready:
                return False
            kind, what = self.random.choice(ready).queue.pop(0)
            if kind == "record":
                what.done = True
            elif kind == "run":
                try:
                    what()
                except FaultError:
                    self.broken = 700
            return True

    def finish(self):
        while self.step():
            pass
        assert self.paused or not any(stream.queue for stream in self.streams.values())

    @property
    def paused(self):
        return any(stream.paused for stream in self.streams.values())

    def know(self, job):
        """Makes a job's memory known to the checks of ranges."""
        for part in job.parts:
            for copy in part.plan.copies:
                with contextlib.suppress(RuntimeError):
                    self.device_memory.add(copy.storage)
        self.host_memory.add(job.rows)

    def fail(self, call, status, after=0):
        """Has a function fail at its ``after``-th call from now."""
        self.fails[call] = [after, status]

    # The driver.

    def find(self, name, version):
        if name == BATCH:
            assert version in (13000, 12080)
            if version != self.batch_version:
                return 0
            more = 1 if version == 13000 else 2
            p, size = ctypes.c_void_p, ctypes.c_size_t
            arguments = (p, p, p, size, p, p, size, *[p] * more)
            return self._function(name, arguments)
        assert version == BASE_VERSION
        return self._addresses.get(name, 0)

    def _function(self, name, arguments=None):
        body = getattr(self, f"_{name}")

        def called(*given):
            try:
                with self.lock:
                    self.calls.append(name)
                    failing = self.fails.get(name)
                    if failing is not None:
                        failing[0] -= 1
                        if failing[0] < 0:
                            del self.fails[name]
                            return failing[1]
                    return body(*given) or 0
            except Exception as error:  # noqa: BLE001  none may pass through a C function
                self.problem = repr(error).encode()
                return SIMULATION

        function = ctypes.CFUNCTYPE(ctypes.c_int, *(arguments or SIGNATURES[name]))(called)
        self._keep.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value

    def _cuGetErrorName(self, status, to):
        name = self.problem if status == SIMULATION else NAMES.get(status)
        ctypes.cast(to, ctypes.POINTER(ctypes.c_char_p))[0] = name
        return 0 if name else 1

    def _cuDriverGetVersion(self, to):
        _int(to)[0] = self.version

    def _cuInit(self, flags):
        assert flags == 0
        self.started = True

    def _cuDeviceGet(self, to, ordinal):
        assert self.started
        _int(to)[0] = ordinal

    def _cuDeviceGetAttribute(self, to, attribute, device):
        assert attribute == 91
        _int(to)[0] = 1

    def _cuDevicePrimaryCtxRetain(self, to, device):
        ctypes.cast(to, ctypes.POINTER(ctypes.c_void_p))[0] = 0xC0

    def _cuCtxPushCurrent(self, context):
        assert context == 0xC0
        self.depth += 1

    def _cuCtxPopCurrent(self, to):
        self.depth -= 1

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        _int(mode)[0] = 0

    def _cuEventQuery(self, event):
        assert self.depth
        for _ in range(self.random.randrange(self.steps + 1)):
            self.step()
        if self.broken:
            return self.broken
        done = self.events[event].done
        going = self.paused or any(stream.ready() for stream in self.streams.values())
        if not done and not going:
            raise AssertionError("streams wait for each other")
        return 0 if done else NOT_READY

    def _cuPointerGetAttribute(self, to, attribute, address):
        assert attribute == 2
        if not (self.pinned_everywhere or self._registration(address)):
            return 1
        _int(to)[0] = 1
        return 0

    def _registration(self, address):
        return any(start <= address < start + size for start, size in self.registered.items())

    def _cuMemHostRegister(self, address, size, flags):
        assert self.depth
        assert flags == 3
        for start, length in self.registered.items():
            pages = start // 4096, -(-(start + length) // 4096)
            if address // 4096 < pages[1] and pages[0] * 4096 < address + size:
                return 712  # no page twice
        self.registered[address] = size
        return 0

    def _cuMemHostUnregister(self, address):
        assert self.depth
        return 0 if self.registered.pop(address, None) else 1

    def _cuMemcpyAsync(self, to, frm, size, stream):
        one = np.array([to]), np.array([frm]), np.array([size])
        self._queue_copies(*one, 0, stream)

    def _cuMemcpyBatchAsync(self, to, frm, sizes, count, attributes, first, number, *tail):
        assert number == 1
        assert ctypes.cast(first, ctypes.POINTER(ctypes.c_size_t))[0] == 0
        held = ctypes.cast(attributes, ctypes.POINTER(CopyAttributes))[0]
        assert not any([*held.source_hint, *held.destination_hint, held.flags])
        if len(tail) == 2:
            ctypes.cast(tail[0], ctypes.POINTER(ctypes.c_size_t))[0] = 2**64 - 1
        # Read now: the caller's arrays may be gone when the copies run.
        arrays = [_numbers(address, count) for address in (to, frm, sizes)]
        self._queue_copies(*arrays, held.source_order, tail[-1])

    def _queue_copies(self, to, frm, sizes, order, stream):
        assert self.depth
        assert stream in self.streams
        assert stream != self.current.cuda_stream
        assert (sizes > 0).all()
        up = self.host_memory.holds(to, sizes) and self.device_memory.holds(frm, sizes)
        down = self.device_memory.holds(to, sizes) and self.host_memory.holds(frm, sizes)
        assert up or down, "a range outside of the memory of a job"
        assert order in (0, 1 if up else 3)
        self.copies.append((to, frm, sizes))

        def copy():
            for one in zip(to.tolist(), frm.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(*one)

        self.streams[stream].enqueue(copy)


class FaultError(Exception):
    """An operation that fails on the device."""


def _int(address):
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_int))


def _numbers(address, count):
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)).copy()


def prefer(path):
    """Chooses a path wherever nothing stands against it, else the copy engine."""

    def choose(facts, limits):
        against = {
            Path.DMA: "",
            Path.STAGED: facts.no_kernel or facts.no_staging,
            Path.DIRECT: facts.not_pinned or facts.no_kernel or facts.no_mapping,
        }
        return Choice(Path.DMA if against[path] else path, against[path] or "as the test prefers")

    return choose


class Simulated:
    """The plugin on a simulated device; takes CPU tensors."""

    priority = 1000

    def __init__(self, path=None, device=None):
        self.device = device or SimulatedDevice()
        choose = {} if path is None else {"choose": prefer(path)}
        self.engine = Engine(lambda name: self.device, **choose)

    @kvpolicy.hookimpl
    def transfer(self, job):
        if job.device != "cpu":
            return None
        self.device.know(job)
        return self.engine.transfer(job)

    def taken(self):
        """The paths of the latest jobs of all plans."""
        plans = self.engine.describe()["cpu"]["plans"]
        ways = [plan[way] for plan in plans for way in ("store", "load") if way in plan]
        return {way.partition(":")[0] for way in ways}
