"""The real device, as far as it can be looked at without one: torch's part is stood in for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from cuda_simulation import SimulatedDevice
from kvpolicy_cuda import CudaError, calibrating
from kvpolicy_cuda import cudadevice as module
from kvpolicy_cuda.cudadevice import CudaDevice, cuda_device
from kvpolicy_cuda.planner import Limits


@pytest.fixture
def simulated(monkeypatch):
    """torch.cuda as if there were two devices, the second one current."""
    found = SimulatedDevice()
    there = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device: SimpleNamespace(
            name="NVIDIA H200", uuid=f"GPU-{device.index}"
        ),
        "is_current_stream_capturing": lambda: False,
    }
    for name, value in there.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(module.Driver, "load", lambda: found.driver)
    return found


@pytest.mark.parametrize(("name", "ordinal"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_a_device_is_found_by_its_name(name, ordinal, simulated):
    device = cuda_device(name)
    assert (device.ordinal, device.torch_device) == (ordinal, torch.device("cuda", ordinal))
    assert device.key == f"NVIDIA H200-GPU-{ordinal}-13000"
    assert device.no_mapping == ""
    assert device.capturing() is False


def test_without_a_device_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaError, match=r"torch .* can use no CUDA device here"):
        cuda_device("cuda:0")


def test_a_device_with_other_host_addresses_says_so(simulated, monkeypatch):
    monkeypatch.setattr(simulated.driver, "maps_host_pointers", lambda ordinal: False)
    assert cuda_device("cuda:0").no_mapping == "the device has other addresses for host memory"


def test_inside_the_driver_s_context_is_current(simulated):
    device = cuda_device("cuda:0")
    with device.entered():
        assert simulated.depth == 1
    assert simulated.depth == 0


def test_limits_are_asked_for_once(simulated, monkeypatch):
    asked = []

    def limits_of(device, key):
        asked.append((device, key))
        return Limits(store=1)

    monkeypatch.setattr(calibrating, "limits_of", limits_of)
    device = CudaDevice(0, simulated.driver, "no kernel")
    assert device.limits.store == device.limits.store == 1
    assert asked == [(device, device.key)]
