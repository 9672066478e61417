"""The driver's functions: found, called, and their errors told by their own names."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from cuda_simulation import SimulatedDevice
from kvpolicy_cuda import CudaError
from kvpolicy_cuda.driver import BATCH, SIGNATURES, CopyAttributes, Driver, SourceOrder

import kvpolicy


def known(device, size=64):
    """A block of device memory and one of the host, made known."""
    there, here = torch.arange(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    device.device_memory.add(there)
    device.host_memory.add(here)
    return there, here


def copied(device, there, here, runs):
    stream = device.new_stream()
    to = np.array([here.data_ptr() + at for at, _, _ in runs])
    frm = np.array([there.data_ptr() + at for _, at, _ in runs])
    sizes = np.array([size for _, _, size in runs])
    with device.entered():
        device.driver.copy(to, frm, sizes, order=SourceOrder.STREAM, stream=stream.cuda_stream)
    to[:], frm[:], sizes[:] = 0, 0, 0  # the driver has read them
    device.finish()


@pytest.mark.parametrize(
    ("version", "call", "calls"), [(13000, BATCH, 1), (12080, BATCH, 1), (0, "cuMemcpyAsync", 3)]
)
def test_every_form_of_the_copy_moves_the_runs(version, call, calls):
    device = SimulatedDevice(batch_version=version)
    there, here = known(device)
    copied(device, there, here, [(0, 10, 5), (20, 40, 8), (60, 0, 4)])
    assert here[:5].tolist() == there[10:15].tolist()
    assert here[20:28].tolist() == there[40:48].tolist()
    assert here[60:].tolist() == there[:4].tolist()
    assert int((here != 0).sum()) == 5 + 8 + 3
    assert device.calls.count(call) == calls


def test_a_driver_without_the_batched_copy_says_so():
    assert SimulatedDevice().driver.no_batch == ""
    told = SimulatedDevice(batch_version=0).driver.no_batch
    assert told == (
        "the driver (CUDA 12.4) has no cuMemcpyBatchAsync, which came with 12.8: one call for "
        "each run"
    )


def test_a_missing_function_is_named():
    device = SimulatedDevice()

    def find(name, version):
        return 0 if name == "cuEventQuery" else device.find(name, version)

    with pytest.raises(CudaError, match=r"has no cuEventQuery; CUDA 12\.0 or newer is needed"):
        Driver(find)


def test_a_machine_without_a_driver_says_so(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(CudaError, match=r"no CUDA driver of 12\.0 or newer can be loaded: libcuda"):
        Driver.load()


CALLS = {
    BATCH: lambda device, there, here: copied(device, there, here, [(0, 0, 4)]),
    "cuEventQuery": lambda device, there, here: device.driver.is_done(1),
    "cuPointerGetAttribute": lambda device, there, here: device.driver.is_pinned(here.data_ptr()),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_has_the_driver_s_name_for_it(call):
    device = SimulatedDevice()
    there, here = known(device)
    device.fail(call, 700)
    with pytest.raises(CudaError, match=f"{call} failed with CUDA_ERROR_ILLEGAL_ADDRESS") as error:
        CALLS[call](device, there, here)
    assert (error.value.call, error.value.name) == (call, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert isinstance(error.value, kvpolicy.KVPolicyError)


def test_an_error_without_a_name_keeps_its_number():
    device = SimulatedDevice()
    device.fail(BATCH, 12345)
    there, here = known(device)
    with pytest.raises(CudaError, match="failed with CUresult 12345"):
        copied(device, there, here, [(0, 0, 4)])


def test_the_context_and_the_capture_mode_are_as_before_whatever_happens():
    device = SimulatedDevice()
    with pytest.raises(ZeroDivisionError), device.entered():
        1 // (1 - device.depth)
    assert device.depth == 0
    assert device.calls.count("cuThreadExchangeStreamCaptureMode") == 2
    device.fail("cuThreadExchangeStreamCaptureMode", 1)
    with pytest.raises(CudaError), device.entered():
        pass
    assert device.depth == 0


def test_cuda_is_not_initialised_before_a_device_is_asked_for():
    """A process that forks afterwards could not use it in its children."""
    device = SimulatedDevice()
    assert device.driver.no_batch == ""
    assert "cuInit" not in device.calls
    with device.entered(), device.entered():
        assert device.calls.count("cuInit") == device.calls.count("cuDevicePrimaryCtxRetain") == 1


def test_pageable_memory_is_not_pinned_and_no_error():
    device = SimulatedDevice(pinned=False)
    assert device.driver.is_pinned(4096) is False
    device.registered[4096] = 10
    assert device.driver.is_pinned(4100) is True


def test_it_is_what_cuda_bindings_has():
    """Names, values and sizes against the vendor's own binding."""
    theirs = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    for name in (*SIGNATURES, BATCH):
        assert callable(getattr(theirs, name)), name
    order = theirs.CUmemcpySrcAccessOrder
    assert int(order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) == SourceOrder.STREAM
    assert int(order.CU_MEMCPY_SRC_ACCESS_ORDER_ANY) == SourceOrder.ANY
    assert int(theirs.CUresult.CUDA_ERROR_NOT_READY) == 600
    assert int(theirs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED) == 2
    assert int(theirs.CUmemorytype.CU_MEMORYTYPE_HOST) == 1
    assert int(theirs.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE) == 2
    attribute = theirs.CUdevice_attribute
    assert int(attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) == 91
    assert theirs.CU_MEMHOSTREGISTER_PORTABLE | theirs.CU_MEMHOSTREGISTER_DEVICEMAP == 3
    held = theirs.CUmemcpyAttributes()
    held.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    held.flags = 0x01020304
    raw = ctypes.string_at(int(held.getPtr()), ctypes.sizeof(CopyAttributes))
    mine = CopyAttributes.from_buffer_copy(raw)
    assert (mine.source_order, mine.flags) == (3, 0x01020304)
    assert ctypes.sizeof(CopyAttributes) == 24  # as in cuda.h of CUDA 13.0
