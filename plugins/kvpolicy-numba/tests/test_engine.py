"""The copy engine: which jobs it takes, who copies them, and what comes of a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial

import attrs
import numpy as np
import pytest
import torch
from kvpolicy_numba import NumbaCopy, engine, runs

import kvpolicy as kv

NAMES = ("a", "b")
ROW = 1024


class Kept:
    """Asked first; keeps the jobs and takes none."""

    priority = 100

    def __init__(self):
        self.jobs = []

    @kv.hookimpl
    def transfer(self, job):
        self.jobs.append(job)


def connect(blocks, copies, *more):
    """Two latent layers; the connector, its caches, and what it offers."""
    spec = kv.LatentSpec(block_size=4, row_bytes=ROW)
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers=dict.fromkeys(NAMES, spec), num_blocks=blocks),
        canonical=True,
    )
    connector = kv.Connector(context, [copies, *more], host=blocks)
    caches = {name: torch.randint(0, 256, (blocks, 1, 4, ROW), dtype=torch.uint8) for name in NAMES}
    connector.register(caches)
    return connector, caches


def is_stored(connector, caches, blocks, slots):
    rows = connector.host.rows.numpy()
    pages = [cache.numpy().reshape(cache.shape[0], -1) for cache in caches.values()]
    return all(
        np.array_equal(rows[slot], np.concatenate([page[block] for page in pages]))
        for block, slot in zip(blocks, slots, strict=True)
    )


def offered(blocks=8):
    """A job as the core makes it, its caches, and the pool's rows."""
    kept = Kept()
    connector, caches = connect(blocks, NumbaCopy(threads=0), kept)
    (result,) = connector.wait([connector.store(range(blocks), range(blocks))], timeout=60)
    assert result.ok
    connector.host.rows.fill_(0)
    return kept.jobs[0], caches, connector


def watch(monkeypatch, told):
    """Has every call of the kernel tell of itself before it copies."""
    real = engine.kernel()

    def told_first(*how):
        told()
        return real(*how)

    monkeypatch.setattr(engine, "kernel", lambda: told_first)


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_a_job_of_many_pieces_is_copied_whole(monkeypatch, threads):
    used = set()
    watch(monkeypatch, lambda: used.add(threading.current_thread().name))
    connector, caches = connect(64, NumbaCopy(threads, piece_bytes=1))
    blocks, slots = list(range(60)), list(range(63, 3, -1))
    (result,) = connector.wait([connector.store(blocks, slots)], timeout=60)
    assert (result.ok, result.bytes) == (True, 60 * 2 * 4 * ROW)
    assert is_stored(connector, caches, blocks, slots)
    here = threading.current_thread().name
    assert used == ({here} if threads == 0 else {"kvpolicy-numba"})


def test_submitting_does_not_wait_for_the_copies(monkeypatch):
    go_on = threading.Event()
    watch(monkeypatch, partial(go_on.wait, 60))
    connector, caches = connect(8, NumbaCopy(2))
    jobs = [connector.store([i], [i]) for i in range(8)]
    assert connector.poll() == []
    go_on.set()
    assert [result.ok for result in connector.wait(jobs, timeout=60)] == [True] * 8
    assert is_stored(connector, caches, range(8), range(8))


def test_a_piece_that_fails_fails_alone(monkeypatch):
    calls = []

    def told():
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the page is poisoned")

    watch(monkeypatch, told)
    connector, caches = connect(32, NumbaCopy(2, piece_bytes=1))
    blocks, slots = list(range(32)), list(range(31, -1, -1))
    (result,) = connector.wait([connector.store(blocks, slots)], timeout=60)
    assert (result.ok, result.error) == (False, "OSError: the page is poisoned")
    assert 1 <= len(result.failed_ids) < 32
    assert result.bytes == (32 - len(result.failed_ids)) * 2 * 4 * ROW
    kept = [pair for pair in zip(blocks, slots, strict=True) if pair[1] not in result.failed_ids]
    assert is_stored(connector, caches, [b for b, _ in kept], [s for _, s in kept])


@pytest.mark.parametrize(
    ("field", "ids"), [("block_ids", [0, 8]), ("slots", [8, 0]), ("block_ids", [-1, 0])]
)
def test_ids_out_of_range_move_nothing(field, ids):
    job, _, connector = offered()
    (part,) = job.parts
    good = np.array([1, 2])
    torn = attrs.evolve(part, block_ids=good, slots=good)
    torn = attrs.evolve(torn, **{field: np.array(ids)})
    handle = NumbaCopy(threads=0).transfer(attrs.evolve(job, parts=(torn,)))
    result = handle.result()
    assert (result.ok, result.bytes) == (False, 0)
    wrong = next(one for one in ids if one in (-1, 8))
    what = "block" if field == "block_ids" else "slot"
    assert f"{what} {wrong} " in result.error
    assert "is out of range; possible: blocks 0 to 7, slots 0 to 7" in result.error
    assert result.failed_ids == tuple(sorted(torn.slots.tolist()))
    assert not connector.host.rows.any()


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"offset": 64}, "reach past their storage"), ({"block_stride": 8192}, "past their storage")],
)
def test_pages_past_their_storage_are_refused(changes, what):
    job, _, _ = offered()
    plan = job.parts[0].plan
    torn = attrs.evolve(plan, copies=(attrs.evolve(plan.copies[0], **changes),))
    with pytest.raises(ValueError, match=what):
        runs.runs_of(torn)


def test_pages_past_their_row_are_refused():
    job, _, _ = offered()
    plan = job.parts[0].plan
    torn = attrs.evolve(plan, rows=plan.rows[:, : 4 * ROW].contiguous())
    with pytest.raises(ValueError, match="layer 'b' reach past their row"):
        runs.runs_of(torn)


def test_another_device_and_pages_in_too_many_runs_are_left_to_others(monkeypatch):
    job, _, _ = offered()
    copies = NumbaCopy(threads=0)
    assert copies.transfer(attrs.evolve(job, device="cuda:0")) is None
    monkeypatch.setattr(engine, "MAX_RUNS", 1)
    assert copies.transfer(job) is None  # two layers in memory of their own


def test_memory_that_has_moved_is_found_again():
    job, caches, connector = offered()
    copies = NumbaCopy(threads=0)
    assert copies.transfer(job).result().ok
    cache = caches["a"]
    size = cache.untyped_storage().nbytes()
    kept = cache.clone()
    cache.untyped_storage().resize_(64 * size)
    cache.untyped_storage().resize_(size)
    cache.copy_(kept)
    connector.host.rows.fill_(0)
    assert copies.transfer(job).result().ok
    assert is_stored(connector, caches, range(8), range(8))


def test_runs_that_follow_one_another_on_both_sides_are_joined():
    """A slab's layers, kept as they are, lie as in the row: one run of a block, one table row."""
    spec = kv.LatentSpec(block_size=4, row_bytes=ROW)
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers=dict.fromkeys(NAMES, spec), num_blocks=4),
        backend=kv.BackendCapabilities(stride_aware=True),
    )
    kept = Kept()
    connector = kv.Connector(context, [NumbaCopy(threads=0), kept], host=4)
    assert connector.decision.cross_layer_blocks
    slab = torch.randint(0, 256, (4, 2, 1, 4, ROW), dtype=torch.uint8)
    connector.register(kv.KVCaches.from_slab(slab, NAMES, layer_dim=1))
    (result,) = connector.wait([connector.store([3, 1], [0, 2])], timeout=60)
    assert result.ok
    table = runs.runs_of(kept.jobs[0].parts[0].plan)
    assert table.size.tolist() == [2 * 4 * ROW]
    assert torch.equal(connector.host.rows[[0, 2]], slab[[3, 1]].flatten(1))


def test_c30_fragments_decide_how_reads_are_prefetched_not_pages():
    """A page of 32 KiB in two runs of 16 KiB less a byte is treated as pages of that size."""

    def is_short(heads, tokens, tp):
        spec = kv.AttentionSpec(
            block_size=tokens, total_kv_heads=heads, head_size=ROW // 2, itemsize=1
        )
        context = kv.PolicyContext(
            geometry=kv.CacheGeometry(layers={"a": spec}, num_blocks=2),
            grid=kv.ParallelGrid(tp=tp),
            canonical=True,
            canonical_order="NHD",
            layout="HND",
        )
        kept = Kept()
        connector = kv.Connector(context, [NumbaCopy(threads=0), kept], host=2)
        connector.register({"a": torch.zeros(2, heads // tp, tokens, ROW, dtype=torch.uint8)})
        connector.wait([connector.store([0], [0])], timeout=60)
        return runs.runs_of(kept.jobs[0].parts[0].plan).is_short

    assert is_short(heads=1, tokens=15, tp=1)
    assert not is_short(heads=1, tokens=16, tp=1)
    assert is_short(heads=2, tokens=64, tp=1)  # 128 KiB in runs of one token's head


def test_the_environment_says_how_many_threads_copy(monkeypatch):
    asked = []
    put = kv.Workers.put

    def counted(self, tasks, threads):
        asked.append(threads)
        put(self, tasks, threads)

    monkeypatch.setattr(kv.Workers, "put", counted)
    connector, _ = connect(4, NumbaCopy())
    for text in ("1", "3", "0", ""):
        monkeypatch.setenv("KVPOLICY_HOST_THREADS", text)
        (result,) = connector.wait([connector.store([0], [1])], timeout=60)
        assert result.ok
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert asked == [1, 3, 0, min(cores, 8)]
    monkeypatch.setenv("KVPOLICY_HOST_THREADS", "257")
    (result,) = connector.wait([connector.store([0], [1])], timeout=60)
    assert not result.ok
    assert "KVPOLICY_HOST_THREADS is a whole number from 0" in result.error


@pytest.mark.parametrize("threads", [-1, 257, True, 1.0, "2"])
def test_threads_that_cannot_be_are_refused(threads):
    with pytest.raises(kv.OptionError, match="numba: threads is a whole number from 0 to 256"):
        NumbaCopy(threads)


@pytest.mark.parametrize("piece", [0, -1, True, 1.0])
def test_pieces_that_cannot_be_are_refused(piece):
    with pytest.raises(kv.OptionError, match="NumbaCopy piece_bytes is a whole number >= 1"):
        NumbaCopy(piece_bytes=piece)


FORKING = """
import os, signal
import torch
import kvpolicy as kv
from kvpolicy_numba import NumbaCopy

spec = kv.LatentSpec(block_size=4, row_bytes=256)
context = kv.PolicyContext(
    geometry=kv.CacheGeometry(layers={"l": spec}, num_blocks=4), canonical=True
)
copies = NumbaCopy()

def round_trip(connector, cache, value):
    cache[0] = value
    (stored,) = connector.wait([connector.store([0], [1])], timeout=60)
    (loaded,) = connector.wait([connector.load([1], [3])], timeout=60)
    return stored.ok and loaded.ok and set(cache[3].flatten().tolist()) == {value}

connector = kv.Connector(context, [copies], host=2)
cache = torch.zeros(4, 1, 4, 256, dtype=torch.uint8)
connector.register({"l": cache})
if not round_trip(connector, cache, 1):
    raise SystemExit("the parent failed before the fork")
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if round_trip(connector, cache, 2) else 1)
_, status = os.waitpid(child, 0)
if status:
    raise SystemExit(f"the child ended with status {status}")
if not round_trip(connector, cache, 4):
    raise SystemExit("the parent failed after the fork")
print("both fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_stores_and_loads_and_so_does_its_parent():
    ran = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "both fine\n"), ran.stderr
