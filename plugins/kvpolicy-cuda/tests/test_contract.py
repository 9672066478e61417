"""Every path keeps the transfer contract, on a simulated device; kernels run in the interpreter."""

from __future__ import annotations

import pytest
from cuda_simulation import Simulated, SimulatedDevice
from kvpolicy_cuda.planner import Path

from kvpolicy.testing import TransferContract


class TestDma(TransferContract):
    examples = 15

    def make_transfer(self):
        return Simulated(Path.DMA)


class TestOneCallForEachRun(TransferContract):
    examples = 5

    def make_transfer(self):
        return Simulated(Path.DMA, SimulatedDevice(batch_version=0, steps=500))


class TestStaged(TransferContract):
    examples = 8

    def make_transfer(self):
        pytest.importorskip("triton", reason="kernels need triton")
        return Simulated(Path.STAGED)

    @pytest.mark.slow
    def test_t13_a_large_job_is_moved_whole(self):
        super().test_t13_a_large_job_is_moved_whole()


class TestDirect(TransferContract):
    examples = 8

    def make_transfer(self):
        pytest.importorskip("triton", reason="kernels need triton")
        return Simulated(Path.DIRECT)

    @pytest.mark.slow
    def test_t13_a_large_job_is_moved_whole(self):
        super().test_t13_a_large_job_is_moved_whole()
