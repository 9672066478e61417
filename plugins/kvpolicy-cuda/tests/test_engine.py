"""Paths that are taken, failures that are told, and what is said of both."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cuda_jobs import HND, NHD, SENTINEL, Rank, Recorder
from cuda_simulation import Simulated, SimulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpolicy_cuda import engine as module
from kvpolicy_cuda import lanes
from kvpolicy_cuda.driver import BATCH
from kvpolicy_cuda.engine import Engine
from kvpolicy_cuda.errors import CudaError
from kvpolicy_cuda.planner import Limits, Path


@st.composite
def journeys(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    return {
        "heads": heads,
        "tp": draw(st.sampled_from([n for n in (1, 2, 4) if not heads % n])),
        "layout": draw(st.sampled_from([HND, NHD])),
        "tokens": draw(st.sampled_from([1, 2, 8])),
        "row": draw(st.sampled_from([4, 8, 12, 16, 48])),
        "layers": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 99)),
    }


@pytest.mark.parametrize("path", list(Path))
@given(journeys())
@settings(max_examples=25)
def test_each_path_stores_and_loads_the_certified_bytes(path, journey):
    if path is not Path.DMA:
        pytest.importorskip("triton", reason="kernels need triton")
    plugin = Simulated(path)
    rank = Rank(plugin, **journey)
    before, blocks, slots = rank.bytes(), [4, 1, 2, 5], [0, 4, 2, 1]
    assert rank.connector.wait([rank.connector.store(blocks, slots)])[0].ok
    rows = np.full(rank.rows.shape, SENTINEL, np.uint8)
    rows = rank.stored(before, rows, blocks, slots)
    assert np.array_equal(rank.rows.numpy(), rows)
    assert np.array_equal(rank.bytes(), before)
    back = [0, 3, 5, 2]
    assert rank.connector.wait([rank.connector.load(slots, back)])[0].ok
    assert np.array_equal(rank.bytes(), rank.loaded(before, rows, slots, back))
    assert np.array_equal(rank.rows.numpy(), rows)
    assert plugin.taken() == {path}


def test_eight_bit_floats_move_as_bytes():
    pytest.importorskip("triton", reason="kernels need triton")
    rank = Rank(Simulated(Path.DIRECT), dtype=torch.float8_e4m3fn)
    before = rank.bytes()
    assert rank.connector.wait([rank.connector.store([3], [2])])[0].ok
    assert rank.connector.wait([rank.connector.load([2], [1])])[0].ok
    assert np.array_equal(rank.bytes()[:, 1], before[:, 3])


def test_rows_of_odd_length_go_to_the_copy_engine_with_the_reason():
    plugin = Simulated(Path.DIRECT)
    rank = Rank(plugin, row=6, tokens=1, heads=1)
    assert rank.connector.wait([rank.connector.store([3], [2])])[0].ok
    (plan,) = plugin.engine.describe()["cpu"]["plans"]
    assert plan["store"].startswith("dma: ")
    assert "not multiples of 4 B" in plan["store"] or "triton" in plan["store"]


def test_unless_told_otherwise_the_planner_chooses(monkeypatch):
    pytest.importorskip("triton", reason="kernels need triton")
    plugin = Simulated()
    plugin.device.limits = Limits(store=512, load=64)
    # 256 B pages that make rows of 1,024 B: staged as a store, large enough as a load.
    rank = Rank(plugin, layers=4, blocks=32, slots=32)
    everything = list(range(32))
    assert rank.connector.wait([rank.connector.store(everything, everything)])[0].ok
    assert rank.connector.wait([rank.connector.load(everything, everything)])[0].ok
    (plan,) = plugin.engine.describe()["cpu"]["plans"]
    assert plan["store"] == "staged: fragments of 256 B make runs of 1,024 B in the row"
    assert plan["load"] == "dma: fragments of 256 B are large (from 64 B on)"
    json.dumps(plugin.engine.describe())


def test_rows_that_are_not_pinned_say_so():
    plugin = Simulated(device=SimulatedDevice(pinned=False))
    rank = Rank(plugin)
    assert rank.connector.wait([rank.connector.store([3], [2])])[0].ok
    (plan,) = plugin.engine.describe()["cpu"]["plans"]
    assert plan["store"] == (
        "dma: the rows are not pinned, which is slower; use a PinnedHostPool, or pin its rows"
    )


def test_no_triton_falls_to_the_copy_engine_with_the_reason():
    why = "triton cannot be imported (No module named 'triton')"
    plugin = Simulated(device=SimulatedDevice(no_kernel=why))
    rank = Rank(plugin, layers=4, blocks=32, slots=32)
    everything = list(range(32))
    assert rank.connector.wait([rank.connector.store(everything, everything)])[0].ok
    (plan,) = plugin.engine.describe()["cpu"]["plans"]
    assert plan["store"] == f"dma: fragments of 256 B are small, but no kernel: {why}"


@pytest.mark.parametrize("how", ["no memory", "too long"])
def test_without_a_staging_buffer_the_next_path_is_taken(how, monkeypatch):
    pytest.importorskip("triton", reason="kernels need triton")
    plugin = Simulated()
    plugin.device.limits = Limits(store=512, load=512)
    if how == "too long":
        monkeypatch.setattr(module, "STAGING_BYTES", 1000)
    else:

        def scratch(size):
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(plugin.device, "scratch", scratch)
    rank = Rank(plugin, layers=4, blocks=32, slots=32)
    everything = list(range(32))
    assert rank.connector.wait([rank.connector.store(everything, everything)])[0].ok
    (plan,) = plugin.engine.describe()["cpu"]["plans"]
    assert plan["store"].startswith("direct: fragments of 256 B are small, not staged: ")
    words = {"no memory": "CUDA out of memory", "too long": "1,024 B is longer than"}
    assert words[how] in plan["store"]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_refused_call_is_a_failed_result_once_the_rest_has_run(after, monkeypatch):
    """Three batches, one refused: whatever was enqueued has ended when the result is there."""
    monkeypatch.setattr("kvpolicy_cuda.runs.MAX_DESCRIPTORS", 3)
    device = SimulatedDevice(steps=0)
    rank = Rank(Simulated(Path.DMA, device), layers=3)
    before = rank.bytes()
    device.fail(BATCH, 1, after=after)
    job = rank.connector.store([1, 2, 3], [1, 3, 4])
    assert len(device.copies) == after
    assert rank.connector.poll() == []  # its copies run yet
    device.finish()
    (result,) = rank.connector.poll()
    assert (result.job_id, result.ok, result.bytes) == (job, False, 0)
    assert result.failed_ids == (1, 3, 4)
    assert result.error == f"{BATCH} failed with CUDA_ERROR_INVALID_VALUE"
    assert np.array_equal(rank.bytes(), before)
    device.steps = 3
    assert rank.connector.wait([rank.connector.store([1, 2, 3], [1, 3, 4])])[0].ok


def test_a_device_that_takes_nothing_any_more_is_a_failed_result(monkeypatch):
    device = SimulatedDevice()
    rank = Rank(Simulated(Path.DMA, device))
    assert rank.connector.wait([rank.connector.store([1], [1])])[0].ok

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    for stream in device.streams.values():
        monkeypatch.setattr(stream, "record_event", broken)
    (result,) = rank.connector.wait([rank.connector.store([1], [2])])
    assert result.failed_ids == (2,)
    assert result.error == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_job_is_never_captured_into_a_graph():
    device = SimulatedDevice()
    rank = Rank(Simulated(Path.DMA, device))
    device.is_capturing = True
    (result,) = rank.connector.wait([rank.connector.store([1], [1])])
    assert result.error == (
        "the current stream is being captured into a graph; submit outside of it"
    )
    assert not device.copies
    device.is_capturing = False
    assert rank.connector.wait([rank.connector.store([1], [1])])[0].ok


def test_an_interrupt_leaves_nothing_under_way(monkeypatch):
    device = SimulatedDevice(steps=0)
    recorder = Recorder()
    rank = Rank(recorder)
    rank.connector.wait([rank.connector.store([1, 2], [1, 2])])
    (job,) = recorder.jobs
    device.know(job)
    engine = Engine(lambda name: device)
    monkeypatch.setattr("kvpolicy_cuda.runs.MAX_DESCRIPTORS", 3)
    real, count = device.driver.copy, []

    def interrupted(*args, **more):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        real(*args, **more)

    monkeypatch.setattr(device.driver, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.transfer(job)
    assert len(device.copies) == 1
    assert not any(stream.queue for stream in device.streams.values())
    assert device.depth == 0


def test_a_device_that_cannot_be_had_is_a_failed_result():
    def none(name):
        raise CudaError("no CUDA driver")

    recorder = Recorder()
    rank = Rank(recorder)
    rank.connector.wait([rank.connector.store([1, 2], [1, 4])])
    handle = Engine(none).transfer(recorder.jobs[0])
    assert handle.done()
    assert handle.result().error == "no CUDA driver"
    assert handle.result().failed_ids == (1, 4)


def test_a_handle_has_no_result_before_it_is_done():
    device = SimulatedDevice(steps=0)
    recorder = Recorder()
    rank = Rank(recorder)
    rank.connector.wait([rank.connector.store([1], [1])])
    device.know(recorder.jobs[0])
    handle = Engine(lambda name: device).transfer(recorder.jobs[0])
    with pytest.raises(RuntimeError, match="still under way"):
        handle.result()
    assert handle.wait(0.01) is False
    device.finish()
    assert handle.wait(10)
    assert handle.result() is handle.result()
    assert handle.result().ok


def test_staging_is_taken_once_for_a_stream():
    device = SimulatedDevice()
    lane = lanes.Lane(device)
    with device.entered():
        assert lane.staging(0) is lane.staging(0)
        assert lane.staging(0) is not lane.staging(1)
