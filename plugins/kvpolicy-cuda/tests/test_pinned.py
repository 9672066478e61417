"""Page-locked rows: chunks on row boundaries, all or none, undone once."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap

import pytest
import torch
from cuda_jobs import Rank
from cuda_simulation import Simulated, SimulatedDevice
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_cuda import CudaError, PinnedHostPool, pin, pinned
from kvpolicy_cuda.pinned import chunks_of
from kvpolicy_cuda.planner import Path

import kvpolicy

PAGE = mmap.PAGESIZE


@given(
    st.integers(0, 200).map(lambda n: n * 64),
    st.integers(1, 300),
    st.integers(1, 500).map(lambda n: n * 64),
    st.integers(1, 2**20),
)
def test_chunks_cover_the_rows_and_end_with_a_row_and_a_page(start, rows, stride, size):
    chunks = list(chunks_of(start, rows, stride, size))
    ends = [start, *(at + length for at, length in chunks)]
    assert [at for at, _ in chunks] == ends[:-1]
    assert ends[-1] == start + rows * stride
    assert all(length > 0 for _, length in chunks)
    for end in ends[1:-1]:
        assert (end - start) % stride == 0
        assert end % PAGE == 0


def test_rows_that_begin_with_a_page_are_cut_near_the_size():
    chunks = list(chunks_of(PAGE, 1000, 1_572_864, 2**30))
    assert [length // 1_572_864 for _, length in chunks] == [682, 318]


def rows_of(num_rows=64, stride=PAGE):
    room = torch.zeros(num_rows * stride + PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % PAGE
    rows = room[start : start + num_rows * stride].view(num_rows, stride)
    rows.copy_(torch.arange(num_rows * stride).view(num_rows, stride) % 251)
    return rows


def test_rows_are_registered_whole_and_unregistered_once():
    device, rows = SimulatedDevice(pinned=False), rows_of()
    before = rows.clone()
    held = pin(rows, driver=device.driver, chunk_bytes=10 * PAGE)
    assert sum(device.registered.values()) == rows.numel()
    assert len(device.registered) == 7
    assert pin(rows, driver=device.driver) is held
    assert len(device.registered) == 7
    assert torch.equal(rows, before)
    held.close()
    held.close()
    assert held.closed
    assert not device.registered
    assert device.calls.count("cuMemHostUnregister") == 1 + 7
    assert device.depth == 0


@pytest.mark.parametrize("given", [None, 0])
def test_the_device_is_the_one_that_this_process_uses(given, monkeypatch):
    """Another one would get a context, and lose memory to it."""
    device, asked = SimulatedDevice(pinned=False), []
    entered = device.driver.entered
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        device.driver, "entered", lambda ordinal: asked.append(ordinal) or entered(ordinal)
    )
    pin(rows_of(), driver=device.driver, device=given).close()
    assert set(asked) == {3 if given is None else given}


def test_nothing_stays_registered_when_a_chunk_is_refused():
    device, rows = SimulatedDevice(pinned=False), rows_of()
    device.fail("cuMemHostRegister", 2, after=1 + 4)
    with pytest.raises(CudaError, match="cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY"):
        pin(rows, driver=device.driver, chunk_bytes=10 * PAGE)
    assert not device.registered
    assert device.calls.count("cuMemHostRegister") == 1 + 5
    assert device.calls.count("cuMemHostUnregister") == 1 + 4


def test_memory_that_cannot_be_pinned_is_not_taken_first(monkeypatch):
    device, taken = SimulatedDevice(pinned=False), []
    device.fail("cuMemHostRegister", 801)
    monkeypatch.setattr(pinned, "prefault", lambda *both: taken.append(both))
    with pytest.raises(CudaError, match="cuMemHostRegister failed with CUresult 801"):
        pin(rows_of(), driver=device.driver)
    assert not taken


def test_rows_that_were_unpinned_are_pinned_again():
    device, rows = SimulatedDevice(pinned=False), rows_of()
    first = pin(rows, driver=device.driver)
    first.close()
    again = pin(rows, driver=device.driver)
    assert again is not first
    assert sum(device.registered.values()) == rows.numel()
    again.close()


def test_rows_are_pinned_no_longer_than_somebody_has_them():
    device, rows = SimulatedDevice(pinned=False), rows_of()
    held = pin(rows, driver=device.driver)
    assert device.registered
    del held
    gc.collect()
    assert not device.registered


def test_a_context_that_is_gone_has_unregistered_itself():
    device, rows = SimulatedDevice(pinned=False), rows_of()
    held = pin(rows, driver=device.driver)
    device.fail("cuMemHostUnregister", 4)
    held.close()
    assert held.closed


def test_another_failure_to_unregister_is_told():
    device, rows = SimulatedDevice(pinned=False), rows_of()
    held = pin(rows, driver=device.driver)
    device.registered.clear()
    with pytest.raises(CudaError, match="cuMemHostUnregister failed with CUDA_ERROR_INVALID_VALUE"):
        held.close()


@pytest.mark.parametrize(
    "rows",
    [
        *(torch.zeros(8), torch.zeros(4, 8)[:, :4], torch.zeros(4, 8, device="meta")),
        *(torch.zeros(4, 8), torch.zeros(0, 8, dtype=torch.uint8)),
    ],
)
def test_only_rows_are_pinned(rows):
    with pytest.raises(kvpolicy.OptionError, match="rows to pin are a tensor, not list"):
        pin([rows], driver=SimulatedDevice().driver)
    with pytest.raises(kvpolicy.OptionError, match="contiguous CPU memory of two dimensions"):
        pin(rows, driver=SimulatedDevice().driver)


@pytest.mark.parametrize("populate", [True, False])
@pytest.mark.parametrize("offset", [0, 100])
def test_memory_is_taken_and_keeps_what_it_holds(populate, offset, monkeypatch):
    if not populate:  # what an old kernel says to it
        monkeypatch.setattr(pinned, "_POPULATE_WRITE", 9999)
    size = 40 * 2**20
    with mmap.mmap(-1, size) as memory:
        memory[5_000_000:5_000_004] = b"held"
        held = (ctypes.c_ubyte * size).from_buffer(memory)
        address = ctypes.addressof(held)
        pinned.prefault(address + offset, size - 2 * offset)
        pages = (ctypes.c_ubyte * (size // PAGE))()
        libc = ctypes.CDLL(None)
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert libc.mincore(address, size, ctypes.addressof(pages)) == 0
        assert sum(page & 1 for page in pages) >= size // PAGE - 2
        assert memory[5_000_000:5_000_004] == b"held"
        del held


def test_a_pool_is_pinned_with_its_rows_on_pages():
    device = SimulatedDevice(pinned=False)
    pool = PinnedHostPool(5, 1000, driver=device.driver)
    assert pool.not_pinned == ""
    assert (pool.row_stride, pool.rows.data_ptr() % PAGE) == (PAGE, 0)
    assert device.driver.is_pinned(pool.rows.data_ptr() + pool.rows.numel() - 1)
    pool.close()
    pool.close()
    assert not device.registered
    assert pool.not_pinned == "closed"


def test_a_pool_without_a_driver_is_ordinary_memory_and_says_so(caplog, monkeypatch):
    def absent():
        raise CudaError("no CUDA driver of 12.0 or newer can be loaded: it is not there")

    monkeypatch.setattr(pinned.Driver, "load", absent)
    with caplog.at_level(logging.WARNING):
        pool = PinnedHostPool(5, 1000)
    assert "no CUDA driver" in pool.not_pinned
    assert "copies will be slower" in caplog.text
    pool.rows[4, 999] = 1
    pool.close()


def test_rows_are_not_closed_under_a_job():
    device = SimulatedDevice(pinned=False, steps=0)
    pool = PinnedHostPool(5, 4096, driver=device.driver)
    rank = Rank(Simulated(Path.DMA, device), pool=pool)
    job = rank.connector.store([1], [2])
    with pytest.raises(kvpolicy.PoolError, match="1 jobs copy to or from these rows"):
        pool.close()
    assert rank.connector.poll() == []
    device.finish()
    assert rank.connector.wait([job])[0].ok
    pool.close()
    assert not device.registered
    # Ordinary memory is still copied, by the path that can.
    device.steps = 3
    assert rank.connector.wait([rank.connector.store([1], [3])])[0].ok
