"""Order: on a device that runs streams in any order that events allow, bytes are always right."""

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from cuda_jobs import NHD, Rank
from cuda_simulation import FaultError, Simulated, SimulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpolicy_cuda import lanes
from kvpolicy_cuda.planner import Path

PATHS = pytest.mark.parametrize("path", list(Path))
SEEDS = st.integers(0, 2**16)


def needs(path):
    if path is not Path.DMA:
        pytest.importorskip("triton", reason="kernels need triton")


def made(path, seed, **rank):
    needs(path)
    device = SimulatedDevice(seed=seed, steps=2)
    plugin = Simulated(path, device)
    return device, Rank(plugin, seed=seed, **rank)


@PATHS
@given(SEEDS)
@settings(max_examples=15)
def test_a_store_waits_for_what_writes_the_pages(path, seed):
    device, rank = made(path, seed)
    new = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 4 * 4 * 16, np.uint8))
    page = rank.caches["layer.1"][2]
    # Slow: it is in the queue of the submitter's stream when the store is submitted.
    device.current.enqueue(lambda: page.copy_(new.view_as(page)))
    job = rank.connector.store([2], [4])
    assert rank.connector.wait([job])[0].ok
    device.finish()
    assert torch.equal(page.flatten(), new)
    expected = rank.stored(rank.bytes(), np.full(rank.rows.shape, 0xA5, np.uint8), [2], [4])
    assert np.array_equal(rank.rows.numpy(), expected)


@PATHS
@given(SEEDS)
@settings(max_examples=15)
def test_a_load_waits_for_what_still_reads_or_zeroes_the_pages(path, seed):
    device, rank = made(path, seed)
    assert rank.connector.wait([rank.connector.store([2], [4])])[0].ok
    stored = rank.bytes()[:, 2]
    seen = []
    page = rank.caches["layer.1"][3]
    before = page.clone()
    device.current.enqueue(lambda: seen.append(page.clone()))
    device.current.enqueue(lambda: page.zero_())
    assert rank.connector.wait([rank.connector.load([4], [3])])[0].ok
    device.finish()
    assert torch.equal(seen[0], before)
    assert np.array_equal(rank.bytes()[:, 3], stored)


@contextlib.contextmanager
def unguarded():
    """Jobs that share blocks reach the plugin, as from two connectors over the same caches.

    Those of one connector the core refuses.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpolicy.jobs._met_blocks", lambda job, others: None)
        yield


@PATHS
@given(SEEDS)
@settings(max_examples=15)
def test_a_load_does_not_overwrite_what_a_store_still_reads(path, seed):
    """The same block: stored, and at once loaded with something else; and the other way round."""
    device, rank = made(path, seed, layout=NHD, tp=2)
    before = rank.bytes()
    wait = rank.connector.wait
    assert wait([rank.connector.store([0, 1], [0, 1])])[0].ok
    with unguarded():
        jobs = [
            rank.connector.store([2, 3], [2, 3]),
            rank.connector.load([0, 1], [3, 2]),
            rank.connector.store([3], [4]),
        ]
    assert all(result.ok for result in wait(jobs))
    device.finish()
    rows = np.full(rank.rows.shape, 0xA5, np.uint8)
    rows = rank.stored(before, rows, [0, 1, 2, 3], [0, 1, 2, 3])
    pages = rank.loaded(before, rows, [0, 1], [3, 2])
    rows = rank.stored(pages, rows, [3], [4])
    assert np.array_equal(rank.rows.numpy(), rows)
    assert np.array_equal(rank.bytes(), pages)


@PATHS
@given(SEEDS)
@settings(max_examples=10)
def test_jobs_of_one_direction_run_in_order(path, seed):
    """Several loads into one block: the last one stays."""
    _, rank = made(path, seed)
    blocks = list(range(5))
    assert rank.connector.wait([rank.connector.store(blocks, blocks)])[0].ok
    stored = rank.bytes()
    with unguarded():
        jobs = [rank.connector.load([slot], [5]) for slot in blocks]
    assert all(result.ok for result in rank.connector.wait(jobs))
    assert np.array_equal(rank.bytes()[:, 5], stored[:, 4])


@given(SEEDS)
@settings(max_examples=15)
def test_a_ring_smaller_than_the_job_is_not_overwritten_too_soon(seed):
    """Windows of 784 B, two to a buffer, five blocks: three turns, on two streams."""
    needs(Path.STAGED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "STAGING_BYTES", 1600)
        device, rank = made(Path.STAGED, seed, blocks=6, slots=5)
        before, blocks, slots = rank.bytes(), [5, 0, 3, 2, 1], [1, 3, 0, 2, 4]
        assert rank.connector.wait([rank.connector.store(blocks, slots)])[0].ok
        rows = np.full(rank.rows.shape, 0xA5, np.uint8)
        rows = rank.stored(before, rows, blocks, slots)
        assert np.array_equal(rank.rows.numpy(), rows)
        back = [0, 1, 2, 3, 5]
        assert rank.connector.wait([rank.connector.load(slots, back)])[0].ok
        assert np.array_equal(rank.bytes(), rank.loaded(before, rows, slots, back))
        assert len(device.copies) == 6


@given(SEEDS)
@settings(max_examples=15)
def test_both_streams_of_a_lane_keep_its_order(seed):
    """Block 5 is loaded by the first job's first stream and by the second job's second one."""
    needs(Path.STAGED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "STAGING_BYTES", 800)  # one window
        _, rank = made(Path.STAGED, seed)
        slots = list(range(5))
        assert rank.connector.wait([rank.connector.store(slots, slots)])[0].ok
        stored = rank.bytes()
        # Pairs go by block id: 5 is first of one, and second of two.
        with unguarded():
            jobs = [rank.connector.load([1], [5]), rank.connector.load([2, 3], [4, 5])]
        assert all(result.ok for result in rank.connector.wait(jobs))
        assert np.array_equal(rank.bytes()[:, 5], stored[:, 3])


@given(SEEDS)
@settings(max_examples=25)
def test_plans_that_share_memory_wait_for_each_other(seed):
    """Two connectors of the same caches: the one does not overwrite what the other stores yet."""
    _, one = made(Path.DMA, seed)
    twin = one.twin()
    before = one.bytes()
    assert twin.wait([twin.store([0], [0])])[0].ok
    store = one.connector.store([3], [3])
    load = twin.load([0], [3])
    assert twin.wait([load])[0].ok
    assert one.connector.wait([store])[0].ok
    rows = one.stored(before, np.full(one.rows.shape, 0xA5, np.uint8), [3], [3])
    assert np.array_equal(one.rows.numpy(), rows)
    assert np.array_equal(one.bytes()[:, 3], before[:, 0])


def test_both_directions_are_under_way_at_once():
    """A store that cannot go on does not hold up a load of other blocks."""
    device, rank = made(Path.DMA, 0)
    assert rank.connector.wait([rank.connector.store([0], [0])])[0].ok
    device.steps = 0
    before = set(device.streams)
    slow = device.current = device.new_stream()
    slow.paused = True
    store = rank.connector.store([1], [1])
    device.current = device.new_stream()
    load = rank.connector.load([0], [2])
    device.finish()
    assert [result.job_id for result in rank.connector.poll()] == [load]
    slow.paused = False
    device.finish()
    assert [result.job_id for result in rank.connector.poll()] == [store]
    assert len(set(device.streams) - before) == 2  # no stream of the plugin's is made for a job


def test_what_has_ended_keeps_no_memory_of_the_engine_s():
    device, rank = made(Path.DMA, 0)
    rank.connector.wait([rank.connector.store([1], [1])])
    gone = weakref.ref(rank.caches["layer.0"])
    device.device_memory.ranges.clear()
    device.current = device.new_stream()
    rank.connector.close()
    del rank
    gc.collect()
    assert gone() is None


def test_a_fault_on_the_device_is_a_failed_result():
    device, rank = made(Path.DMA, 0)

    def fault():
        raise FaultError

    device.current.enqueue(fault)
    (result,) = rank.connector.wait([rank.connector.store([1, 2], [1, 3])])
    assert (result.ok, result.bytes, result.failed_ids) == (False, 0, (1, 3))
    assert result.error == "cuEventQuery failed with CUDA_ERROR_ILLEGAL_ADDRESS"
