"""The CUDA driver's functions that torch does not offer, found by name and called by address.

Descriptors of a batched copy are NumPy arrays whose addresses are handed over as they are: a
Python object for each run would cost more than the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpolicy_cuda.errors import CudaError

Find = Callable[[str, int], int]
"""Name and CUDA version (12080 is 12.8) -> the address of that function, 0 if there is none."""

Numbers = NDArray[np.int64]

BASE_VERSION = 12000
BATCH = "cuMemcpyBatchAsync"
EIGHT_ARGUMENTS, NINE_ARGUMENTS = 13000, 12080

_SUCCESS, _NOT_READY, _INVALID_VALUE = 0, 600, 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_HOST = 1  # CU_MEMORYTYPE_HOST
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP

_P, _INT, _UINT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_BATCH_ARGUMENTS = (_P, _P, _P, _SIZE, _P, _P, _SIZE)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (_INT, _P),
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGet": (_P, _INT),
    "cuDeviceGetAttribute": (_P, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_P, _INT),
    "cuCtxPushCurrent": (_P,),
    "cuCtxPopCurrent": (_P,),
    "cuThreadExchangeStreamCaptureMode": (_P,),
    "cuEventQuery": (_P,),
    "cuPointerGetAttribute": (_P, _INT, _SIZE),
    "cuMemHostRegister": (_P, _SIZE, _UINT),
    "cuMemHostUnregister": (_P,),
    "cuMemcpyAsync": (_SIZE, _SIZE, _SIZE, _P),
}
"""The driver's functions by name, with the types of their arguments; each returns an int."""


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; a location without a type is no hint."""

    _fields_ = (
        ("source_order", _INT),
        ("source_hint", _INT * 2),
        ("destination_hint", _INT * 2),
        ("flags", _UINT),
    )


class SourceOrder(IntEnum):
    """When the driver may read what a batch copies (CUmemcpySrcAccessOrder)."""

    STREAM = 1  # in the stream's order: the source is still being written when we enqueue
    ANY = 3  # whenever it likes: the source was complete before we enqueue


class Driver:
    """The driver of this machine.

    Args:
        find: looks a function up.

    Raises:
        CudaError: a function that every driver since 12.0 has is missing.

    Thread-safe. Every call but `version` needs a context: see `entered`.
    """

    def __init__(self, find: Find) -> None:
        self._calls: dict[str, Callable[..., int]] = {}
        for name, arguments in SIGNATURES.items():
            address = find(name, BASE_VERSION)
            if not address:
                raise CudaError(
                    f"the CUDA driver has no {name}; CUDA 12.0 or newer is needed", call=name
                )
            self._calls[name] = ctypes.CFUNCTYPE(_INT, *arguments)(address)
        found = _INT()
        self._check("cuDriverGetVersion", ctypes.byref(found))
        self.version = found.value
        self._batch, self._has_fail_index = _batch(find)
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def load(cls) -> Driver:
        """The installed driver.

        Raises:
            CudaError: there is none, or it is older than 12.0.
        """
        try:
            library = ctypes.CDLL("libcuda.so.1")
            get = library.cuGetProcAddress_v2
        except (OSError, AttributeError) as error:
            raise CudaError(f"no CUDA driver of 12.0 or newer can be loaded: {error}") from None
        get.argtypes = (ctypes.c_char_p, _P, _INT, ctypes.c_uint64, _P)

        def find(name: str, version: int) -> int:
            address, status = _P(), _INT()
            failed = get(name.encode(), ctypes.byref(address), version, 0, ctypes.byref(status))
            return 0 if failed else address.value or 0

        return cls(find)

    @property
    def no_batch(self) -> str:
        """Why runs are copied one call at a time; "" if they are not."""
        if self._batch is not None:
            return ""
        return (
            f"the driver (CUDA {self.version // 1000}.{self.version % 1000 // 10}) has no {BATCH}, "
            "which came with 12.8: one call for each run"
        )

    @contextlib.contextmanager
    def entered(self, ordinal: int) -> Iterator[None]:
        """Makes a device's primary context current in this thread, and captures no obstacle.

        While another thread captures a graph, calls such as an event's query are refused unless
        this thread's capture mode is relaxed.
        """
        self._check("cuCtxPushCurrent", self._context(ordinal))
        mode, popped = _INT(_RELAXED), _P()
        try:
            self._check("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                self._calls["cuThreadExchangeStreamCaptureMode"](ctypes.byref(mode))
        finally:
            self._calls["cuCtxPopCurrent"](ctypes.byref(popped))

    def maps_host_pointers(self, ordinal: int) -> bool:
        """Whether kernels of a device may use the addresses of registered host memory."""
        value = _INT()
        device = self._device(ordinal)
        self._check("cuDeviceGetAttribute", ctypes.byref(value), _HOST_POINTERS, device)
        return bool(value.value)

    def is_pinned(self, address: int) -> bool:
        """Whether a host address lies in page-locked memory."""
        kind = _UINT()
        status = self._calls["cuPointerGetAttribute"](ctypes.byref(kind), _MEMORY_TYPE, address)
        if status == _INVALID_VALUE:  # an address that CUDA has never heard of
            return False
        self._raise_for("cuPointerGetAttribute", status)
        return kind.value == _HOST

    def is_done(self, event: int) -> bool:
        """Whether all work before an event has ended.

        Raises:
            CudaError: some of it has failed.
        """
        status = self._calls["cuEventQuery"](event)
        if status == _NOT_READY:
            return False
        self._raise_for("cuEventQuery", status)
        return True

    def register(self, address: int, size: int) -> None:
        """Page-locks host memory for every device of the process."""
        self._check("cuMemHostRegister", address, size, _PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> None:
        """Undoes `register`."""
        self._check("cuMemHostUnregister", address)

    def copy(
        self, to: Numbers, frm: Numbers, sizes: Numbers, *, order: SourceOrder, stream: int
    ) -> None:
        """Enqueues copies, in no order among themselves.

        Args:
            to: addresses, C-contiguous; read before this returns, as are the others.
            frm: addresses, as many.
            sizes: bytes, as many.
            order: when the sources may be read.
            stream: the handle of a stream, not the default one.
        """
        if self._batch is None:
            for one in zip(to.tolist(), frm.tolist(), sizes.tolist(), strict=True):
                self._check("cuMemcpyAsync", *one, stream)
            return
        attributes = CopyAttributes(source_order=order)
        first, failed_at = _SIZE(0), _SIZE(0)
        tail = (ctypes.byref(failed_at), stream) if self._has_fail_index else (stream,)
        status = self._batch(
            *(array.ctypes.data for array in (to, frm, sizes)),
            len(to),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            *tail,
        )
        self._raise_for(BATCH, status)

    def _context(self, ordinal: int) -> int:
        with self._lock:
            if ordinal not in self._contexts:
                device, context = self._device(ordinal), _P()
                self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[ordinal] = context.value or 0
            return self._contexts[ordinal]

    def _device(self, ordinal: int) -> int:
        # Not sooner: a process that forks after this could not use CUDA in its children.
        self._check("cuInit", 0)
        device = _INT()
        self._check("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _check(self, call: str, *arguments: Any) -> None:
        self._raise_for(call, self._calls[call](*arguments))

    def _raise_for(self, call: str, status: int) -> None:
        if status == _SUCCESS:
            return
        text = ctypes.c_char_p()
        self._calls["cuGetErrorName"](status, ctypes.byref(text))
        name = (text.value or b"").decode() or f"CUresult {status}"
        raise CudaError(f"{call} failed with {name}", call=call, name=name)


def _batch(find: Find) -> tuple[Callable[..., int] | None, bool]:
    """The batched copy, and whether it also takes where to write the index of a failure."""
    for version, more in ((EIGHT_ARGUMENTS, (_P,)), (NINE_ARGUMENTS, (_P, _P))):
        address = find(BATCH, version)
        if address:
            return ctypes.CFUNCTYPE(_INT, *_BATCH_ARGUMENTS, *more)(address), len(more) == 2
    return None, False
