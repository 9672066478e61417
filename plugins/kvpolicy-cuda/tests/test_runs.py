"""Descriptors and kernel boxes hold exactly the certified runs."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from cuda_jobs import HND, NHD, Rank, Recorder
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_cuda import runs as module
from kvpolicy_cuda.runs import KernelBox, plan_runs

import kvpolicy


@st.composite
def jobs(draw):
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    tp = draw(st.sampled_from([n for n in (1, 2, 4) if not heads % n]))
    recorder = Recorder()
    rank = Rank(
        recorder,
        heads=heads,
        tp=tp,
        rank=draw(st.integers(0, tp - 1)),
        layout=draw(st.sampled_from([HND, NHD])),
        tokens=draw(st.sampled_from([1, 2, 4])),
        row=draw(st.sampled_from([2, 6, 16, 32])),
        layers=draw(st.integers(1, 3)),
    )
    blocks = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    slots = draw(st.permutations(range(5)))[: len(blocks)]
    rank.connector.wait([rank.connector.store(blocks, slots)])
    return rank, recorder.jobs[-1]


def expected_bytes(rank, job):
    """Host address -> device address of every byte, by the certified runs."""
    found = {}
    for block, slot in zip(job.block_ids.tolist(), job.slots.tolist(), strict=True):
        for layer, local, at, size in rank.runs():
            cache = rank.caches[f"layer.{layer}"]
            there = cache.data_ptr() + block * cache.stride(0) + local
            here = rank.rows.data_ptr() + slot * rank.rows.stride(0) + at
            found |= {here + i: there + i for i in range(size)}
    return found


def expanded(batches):
    found = {}
    for there, here, sizes in batches:
        for one, other, size in zip(there.tolist(), here.tolist(), sizes.tolist(), strict=True):
            assert not any(other + i in found for i in range(size)), "a byte twice"
            found |= {other + i: one + i for i in range(size)}
    return found


@given(jobs(), st.sampled_from([1, 2, 7, 65_536]))
def test_descriptors_are_the_certified_runs(made, most):
    rank, job = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_DESCRIPTORS", most)
        found = {}
        for part in job.parts:
            batches = list(plan_runs(part.plan).descriptors(part.block_ids, part.slots))
            assert all(0 < len(sizes) <= most for _, _, sizes in batches)
            assert all(a.flags.c_contiguous and a.dtype == np.int64 for b in batches for a in b)
            found |= expanded(batches)
    assert found == expected_bytes(rank, job)


@given(jobs())
def test_staged_windows_hold_the_same_bytes_where_they_lie_in_the_row(made):
    rank, job = made
    expected, staging = expected_bytes(rank, job), 2**40
    for part in job.parts:
        runs = plan_runs(part.plan)
        low, high = runs.window
        assert low % 16 == high % 16 == 0
        found = expanded(runs.host_descriptors(part.slots, staging))
        assert found.keys() == expected.keys()
        for number, slot in enumerate(part.slots.tolist()):
            row = runs.rows + slot * runs.row_stride
            window = {h: d for h, d in found.items() if row <= h < row + runs.row_stride}
            start = staging + number * (high - low)
            assert all(device - start == host - row - low for host, device in window.items())
            assert all(start <= device < start + high - low for device in window.values())


@given(jobs())
def test_boxes_and_descriptors_are_the_same_bytes(made):
    rank, job = made
    found = {}
    for part in job.parts:
        runs = plan_runs(part.plan)
        assert runs.boxes
        for box in runs.boxes:
            steps = np.indices(box.times).reshape(len(box.times), -1).T
            there = box.bases[:, None] + steps @ np.array(box.device_strides)
            here = runs.rows + box.offsets[:, None] + steps @ np.array(box.host_strides)
            there, here = there.reshape(-1), here.reshape(-1)
            assert len(there) == box.num_runs
            for block, slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True):
                device, host = there + block * box.block_stride, here + slot * runs.row_stride
                found |= expanded([(device, host, np.full(len(there), box.size))])
    assert found == expected_bytes(rank, job)


def test_layers_side_by_side_in_a_slab_are_one_run_of_row_and_cache():
    """A slab of one rank, HND: the whole block is one run, though the plan has many pages."""
    recorder = Recorder()
    slab = Rank(recorder, layers=1, tp=1)
    slab.connector.wait([slab.connector.store([3], [2])])
    (part,) = recorder.jobs[-1].parts
    runs = plan_runs(part.plan)
    assert (runs.fragment_bytes, runs.host_run_bytes, len(runs.sizes)) == (256, 256, 1)


def test_fragments_and_runs_of_the_row_are_told_apart():
    """TP2, NHD: fragments of 2 heads; TP1 of several layers: pages apart, the row in one."""
    recorder = Recorder()
    split = Rank(recorder, tp=2, layout=NHD, layers=3)
    split.connector.wait([split.connector.store([3], [2])])
    runs = plan_runs(recorder.jobs[-1].parts[0].plan)
    assert (runs.fragment_bytes, runs.host_run_bytes, len(runs.sizes)) == (32, 32, 12)
    whole = Rank(recorder, tp=1, layers=3)
    whole.connector.wait([whole.connector.store([3], [2])])
    runs = plan_runs(recorder.jobs[-1].parts[0].plan)
    assert (runs.fragment_bytes, runs.host_run_bytes, len(runs.sizes)) == (256, 768, 3)


@pytest.mark.parametrize(("other", "count"), [(512, 1), (768, 2)])
def test_neighbours_are_one_run_only_if_they_are_so_in_every_block(other, count):
    recorder = Recorder()
    rank = Rank(recorder, layers=1)
    rank.connector.wait([rank.connector.store([3], [2])])
    plan = recorder.jobs[-1].parts[0].plan
    first = attrs.evolve(plan.copies[0], block_stride=512, box=kvpolicy.Box(128, (), 0, 0))
    second = attrs.evolve(first, offset=first.offset + 128, box=kvpolicy.Box(128, (), 0, 128))
    second = attrs.evolve(second, block_stride=other)
    runs = plan_runs(attrs.evolve(plan, copies=(second, first)))
    assert len(runs.sizes) == count
    assert len(runs.host_sizes) == 1


# Alignment


def box(**changes):
    values = {
        "bases": np.array([0x30000, changes.pop("device", 0x10000)]),
        "offsets": np.array([0, changes.pop("host_offset", 64)]),
        "block_stride": 512,
        "size": 32,
        "times": (1, 1, 2, 4),
        "device_strides": (0, 0, 128, 32),
        "host_strides": (0, 0, 256, 64),
    }
    return KernelBox(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "host", "row_stride", "unit"),
    [
        ({}, 0x20000, 1024, 16),
        ({"device": 0x10008}, 0x20000, 1024, 8),
        ({"block_stride": 520}, 0x20000, 1024, 8),
        ({"host_offset": 68}, 0x20000, 1024, 4),
        ({"size": 24}, 0x20000, 1024, 8),
        ({"size": 12}, 0x20000, 1024, 4),
        ({"device_strides": (0, 0, 136, 32)}, 0x20000, 1024, 8),
        ({"host_strides": (0, 0, 256, 36)}, 0x20000, 1024, 4),
        ({}, 0x20004, 1024, 4),
        ({}, 0x20000, 1032, 8),
        ({"times": (1, 1, 1, 4), "device_strides": (0, 0, 3, 32)}, 0x20000, 1024, 16),
        ({"size": 31}, 0x20000, 1024, None),
        ({"device": 0x10002}, 0x20000, 1024, None),
        ({}, 0x20001, 1024, None),
    ],
)
def test_the_widest_access_divides_every_address_and_size(changes, host, row_stride, unit):
    assert box(**changes).unit(host, row_stride) == unit


def test_layers_that_differ_in_their_places_alone_are_one_launch():
    """However far apart the engine has allocated them; another shape is another launch."""
    recorder = Recorder()
    rank = Rank(recorder, layers=5)
    rank.connector.wait([rank.connector.store([3], [2])])
    plan = recorder.jobs[-1].parts[0].plan
    runs = plan_runs(plan)
    assert len(runs.boxes) == 1
    assert runs.boxes[0].num_runs == 5
    *same, last = plan.copies
    half = attrs.evolve(last, box=kvpolicy.Box(128, (), 0, last.box.to_offset))
    runs = plan_runs(attrs.evolve(plan, copies=(*same, half)))
    assert sorted(box.size for box in runs.boxes) == [128, 256]


def test_the_kernel_gets_no_box_that_it_cannot_count():
    recorder = Recorder()
    rank = Rank(recorder)
    rank.connector.wait([rank.connector.store([3], [2])])
    plan = recorder.jobs[-1].parts[0].plan
    dims = tuple(kvpolicy.Dim(2, 32 * 4**i, 32 * 4**i) for i in reversed(range(5)))
    for changed, why in (
        (kvpolicy.Box(16, dims), "5 dimensions; the kernel takes 4"),
        (kvpolicy.Box(2**31), "1 runs of 2,147,483,648 B"),
    ):
        copies = (attrs.evolve(plan.copies[0], box=changed),)
        runs = plan_runs(attrs.evolve(plan, copies=copies))
        assert not runs.boxes
        assert why in runs.no_boxes
