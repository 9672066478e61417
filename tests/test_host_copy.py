"""The built-in copy engine: contained, one view per plan, failures as results, safe after fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy as kv
from kvpolicy.policies import host_copy
from kvpolicy.policies.host_copy import HostCopy

SENTINEL = 0xA5
HEADS, TOKENS, ROW = 4, 4, 6
SPEC = kv.AttentionSpec(
    block_size=TOKENS, total_kv_heads=HEADS, head_size=3, itemsize=1, page_padding=8
)
NAMES = ("a", "b")


class Rank:
    """One rank whose caches, and whose pool's rows, have guard zones that nobody may touch."""

    def __init__(self, tp: int = 2, rank: int = 1, blocks: int = 8, slots: int = 8) -> None:
        heads = HEADS // tp
        self.page = heads * TOKENS * ROW
        padded = self.page + SPEC.page_padding
        self.wholes, caches = {}, {}
        for name in NAMES:
            whole = torch.full((64 + blocks * padded + 64,), SENTINEL, dtype=torch.uint8)
            cells = whole[64:-64].view(blocks, padded)
            cells[:, : self.page] = torch.randint(0, 160, (blocks, self.page), dtype=torch.uint8)
            self.wholes[name] = whole
            caches[name] = cells[:, : self.page].view(blocks, TOKENS, heads, ROW)
        self.caches = caches
        self.pool = kv.HostPool(slots, record_bytes=2 * HEADS * TOKENS * ROW + 10)
        self.pool.rows.fill_(SENTINEL)
        context = kv.PolicyContext(
            geometry=kv.CacheGeometry(layers=dict.fromkeys(NAMES, SPEC), num_blocks=blocks),
            grid=kv.ParallelGrid(tp=tp),
            rank=rank,
            canonical=True,
            layout="NHD",
        )
        self.connector = kv.Connector(context, (), host=self.pool)
        self.connector.register(caches)

    def finish(self, job_id: int) -> kv.TransferResult:
        (result,) = self.connector.wait([job_id], timeout=60)
        return result

    def memory(self) -> dict[str, np.ndarray]:
        found = {name: whole.numpy().copy() for name, whole in self.wholes.items()}
        return {**found, "rows": self.pool.rows.numpy().copy()}


def pairs_of_ids(limit: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    ids = st.integers(0, limit - 1)
    return st.lists(st.tuples(ids, ids), unique_by=(lambda p: p[0], lambda p: p[1]))


@given(pairs_of_ids(8), pairs_of_ids(8))
def test_invariant_4_no_byte_outside_a_jobs_own_runs_changes(
    stored: list[tuple[int, int]], loaded: list[tuple[int, int]]
) -> None:
    """Rank 1 of 2, token by token: its heads are the second half of every token's row."""
    rank = Rank()
    before = rank.memory()
    job = rank.connector.store([b for b, _ in stored], [s for _, s in stored])
    assert rank.finish(job).ok
    expected = {name: memory.copy() for name, memory in before.items()}
    for block, slot in stored:
        for layer, name in enumerate(NAMES):
            page = rank.caches[name][block].numpy()
            record = expected["rows"][slot, layer * 96 : (layer + 1) * 96].reshape(
                TOKENS, HEADS, ROW
            )
            record[:, 2:] = page
    for name, memory in rank.memory().items():
        np.testing.assert_array_equal(memory, expected[name], err_msg=name)

    there = {slot for _, slot in stored}
    loaded = [(block, slot) for block, slot in loaded if slot in there]
    before = rank.memory()
    job = rank.connector.load([s for _, s in loaded], [b for b, _ in loaded])
    assert rank.finish(job).ok
    expected = {name: memory.copy() for name, memory in before.items()}
    for block, slot in loaded:
        for layer, name in enumerate(NAMES):
            record = before["rows"][slot, layer * 96 : (layer + 1) * 96].reshape(TOKENS, HEADS, ROW)
            at = 64 + block * (rank.page + SPEC.page_padding)
            expected[name][at : at + rank.page] = record[:, 2:].reshape(-1)
    for name, memory in rank.memory().items():
        np.testing.assert_array_equal(memory, expected[name], err_msg=name)


class Copies:
    """Counts calls of np.copyto, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        self.calls, self.fail_at, self._copyto = 0, fail_at, np.copyto
        monkeypatch.setattr(host_copy.np, "copyto", self)

    def __call__(self, dst: np.ndarray, src: np.ndarray) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError("the page is poisoned")
        self._copyto(dst, src)


def test_c29_adjacent_blocks_are_one_copy_per_layer_and_scattered_ones_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank()
    copies = Copies(monkeypatch)
    assert rank.finish(rank.connector.store([3, 4, 5], [5, 6, 7])).ok
    assert copies.calls == len(NAMES)
    assert rank.finish(rank.connector.store([3, 5, 7], [0, 1, 2])).ok
    assert copies.calls == len(NAMES) + 3 * len(NAMES)


@pytest.mark.parametrize("failing", [1, 2], ids=["its first layer", "its second layer"])
def test_c21_a_store_that_fails_at_block_3_of_4_is_a_result_that_names_it(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    rank = Rank(tp=1, rank=0)
    copies = Copies(monkeypatch, fail_at=2 * len(NAMES) + failing)
    result = rank.finish(rank.connector.store([0, 2, 4, 6], [7, 5, 3, 1]))
    assert (result.ok, result.failed_ids) == (False, (1, 3))
    assert result.error == "OSError: the page is poisoned"
    assert result.bytes == 2 * 2 * rank.page
    copies.fail_at = None
    for slot in (1, 3):
        assert rank.pool.holds(slot) is None
        with pytest.raises(kv.PoolError, match=f"slot {slot} holds nothing"):
            rank.connector.load([slot], [0])
    assert rank.finish(rank.connector.load([7, 5], [1, 3])).ok
    for cache in rank.caches.values():
        assert torch.equal(cache[1], cache[0])
        assert torch.equal(cache[3], cache[2])


def test_c21_a_load_that_fails_at_block_3_of_4_leaves_the_rest_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(tp=1, rank=0)
    assert rank.finish(rank.connector.store([0, 1, 2, 3], [4, 5, 6, 7])).ok
    before = rank.memory()
    copies = Copies(monkeypatch, fail_at=2 * len(NAMES) + 1)
    result = rank.finish(rank.connector.load([4, 5, 6, 7], [1, 3, 5, 7]))
    assert (result.ok, result.failed_ids) == (False, (5, 7))
    padded = rank.page + SPEC.page_padding
    for name in NAMES:
        for block, source in ((1, 0), (3, 1), (5, None), (7, None)):
            page = slice(64 + block * padded, 64 + block * padded + rank.page)
            first = 64 + (block if source is None else source) * padded
            np.testing.assert_array_equal(
                rank.wholes[name].numpy()[page],
                before[name][first : first + rank.page],
                err_msg=f"block {block}",
            )
    copies.fail_at = None
    assert rank.finish(rank.connector.load([6, 7], [5, 7])).ok  # the records are still there


def test_c21_a_span_that_fails_counts_as_failed_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(tp=1, rank=0)
    Copies(monkeypatch, fail_at=len(NAMES) + 2)
    result = rank.finish(rank.connector.store([0, 1, 4, 5, 6], [0, 1, 2, 3, 4]))
    assert (result.ok, result.failed_ids, result.bytes) == (False, (2, 3, 4), 2 * 2 * rank.page)


def test_c22_ids_are_the_jobs_own_even_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits until the caller has changed its arrays."""
    rank = Rank(tp=1, rank=0)
    changed, copyto = threading.Event(), np.copyto

    def wait_then_copy(dst: np.ndarray, src: np.ndarray) -> None:
        assert changed.wait(60)
        copyto(dst, src)

    monkeypatch.setattr(host_copy.np, "copyto", wait_then_copy)
    blocks, slots = np.array([0, 4]), np.array([5, 6])
    job = rank.connector.store(blocks, slots)
    assert rank.connector.poll() == []  # it runs beside us
    blocks[:], slots[:] = [1, 2], [0, 7]
    changed.set()
    assert rank.finish(job).ok
    for block, slot in ((0, 5), (4, 6)):
        pages = np.concatenate([cache[block].numpy().ravel() for cache in rank.caches.values()])
        np.testing.assert_array_equal(rank.pool.rows[slot, : 2 * rank.page].numpy(), pages)
    assert (rank.pool.rows[[0, 7]] == SENTINEL).all()


def test_the_views_of_a_plan_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pair = [], host_copy._pair

    def counted(copy: kv.PlannedCopy, *how: object) -> tuple[np.ndarray, np.ndarray]:
        made.append(copy.layers)
        return pair(copy, *how)

    monkeypatch.setattr(host_copy, "_pair", counted)
    rank = Rank()
    assert rank.finish(rank.connector.store([0, 3], [1, 2])).ok
    assert made == [(name,) for name in NAMES]
    for _ in range(3):
        assert rank.finish(rank.connector.store(range(8), range(8))).ok
        assert rank.finish(rank.connector.load(range(8), [7, 6, 5, 4, 3, 2, 1, 0])).ok
    assert made == [(name,) for name in NAMES]


@pytest.mark.parametrize("scattered", [False, True])
def test_a_job_allocates_nothing_that_grows_with_its_pages(scattered: bool) -> None:
    """32 pages of 512 KiB, padded so that they cannot be one run; less than half of one is made."""
    spec = kv.LatentSpec(block_size=16, row_bytes=32_768, page_padding=64)
    blocks = 32
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers={"l": spec}, num_blocks=blocks), canonical=True
    )
    connector = kv.Connector(context, (), host=blocks)
    connector.register({"l": torch.zeros(blocks, 16 * 32_768 + 64, dtype=torch.uint8)[:, :-64]})
    ids = (
        list(range(0, blocks, 2)) + list(range(1, blocks, 2)) if scattered else list(range(blocks))
    )
    connector.wait([connector.store([0], [0])])  # views and thread
    tracemalloc.start()
    try:
        job = connector.store(range(blocks), ids)
        (result,) = connector.wait([job], timeout=60)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.bytes == blocks * 16 * 32_768
    assert peak < 16 * 32_768 // 2


def test_jobs_of_another_device_are_left_to_others() -> None:
    rank = Rank()
    seen = []

    class Watcher:
        priority = 10

        @kv.hookimpl
        def transfer(self, job: kv.TransferJob) -> None:
            seen.append(job)

    watched = kv.Connector(rank.connector.context, [Watcher()], host=rank.pool)
    watched.register(rank.caches)
    (result,) = watched.wait([watched.store([0], [0])], timeout=60)
    assert result.ok
    (job,) = seen
    assert HostCopy().transfer(job=attrs.evolve(job, device="cuda:0")) is None


def test_torchs_thread_setting_is_left_alone() -> None:
    before = torch.get_num_threads()
    rank = Rank()
    inside: list[int] = []
    copyto = np.copyto

    def spy(dst: np.ndarray, src: np.ndarray) -> None:
        inside.append(torch.get_num_threads())
        copyto(dst, src)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy.np, "copyto", spy)
        assert rank.finish(rank.connector.store([0], [0])).ok
    assert set(inside) == {before}
    assert torch.get_num_threads() == before


FORKING = """
import os, signal
import torch
import kvpolicy as kv

spec = kv.LatentSpec(block_size=4, row_bytes=8)
context = kv.PolicyContext(
    geometry=kv.CacheGeometry(layers={"l": spec}, num_blocks=4), canonical=True
)

def round_trip(connector, cache, value):
    cache[0] = value
    (stored,) = connector.wait([connector.store([0], [1])], timeout=60)
    (loaded,) = connector.wait([connector.load([1], [3])], timeout=60)
    return stored.ok and loaded.ok and set(cache[3].flatten().tolist()) == {value}

def connect():
    connector = kv.Connector(context, (), host=2)
    cache = torch.zeros(4, 4, 8, dtype=torch.uint8)
    connector.register({"l": cache})
    return connector, cache

connector, cache = connect()
if not round_trip(connector, cache, 1):
    raise SystemExit("the parent failed before the fork")
child = os.fork()
if child == 0:
    signal.alarm(60)
    fine = round_trip(connector, cache, 2) and round_trip(*connect(), 3)
    connector.close()
    os._exit(0 if fine else 1)
_, status = os.waitpid(child, 0)
if status:
    raise SystemExit(f"the child ended with status {status}")
if not round_trip(connector, cache, 4):
    raise SystemExit("the parent failed after the fork")
connector.close()
print("both fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_stores_and_loads_and_so_does_its_parent() -> None:
    """A fork takes no threads along; the child inherits connectors whose engine had one."""
    found = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=240, check=False
    )
    assert (found.returncode, found.stdout) == (0, "both fine\n"), found.stderr
