"""The built-in copy engine: contained, views made once, failures as results, its own threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy as kv
from kvpolicy import workers
from kvpolicy.policies import host_copy
from kvpolicy.policies.host_copy import HostCopy
from kvpolicy.transfer import make_job

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


class Watched(np.ndarray):
    """An array that tells of every assignment."""

    told: Callable[[], None]

    def __array_finalize__(self, parent: object) -> None:
        self.told = getattr(parent, "told", lambda: None)

    def __setitem__(self, key: object, value: np.ndarray) -> None:
        self.told()
        super().__setitem__(key, value)


def watch(monkeypatch: pytest.MonkeyPatch, told: Callable[[], None]) -> None:
    """Has every copy of plans that are prepared from now on tell of itself before it is made."""
    pair = host_copy._pair

    def watched(*how: object) -> tuple[np.ndarray, ...]:
        both = [array.view(Watched) for array in pair(*how)]
        for array in both:
            array.told = told
        return tuple(both)

    monkeypatch.setattr(host_copy, "_pair", watched)


class Copies:
    """Counts copies, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        self.calls, self.fail_at = 0, fail_at
        watch(monkeypatch, self._told)

    def _told(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError("the page is poisoned")


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
    copies = Copies(monkeypatch)
    assert rank.finish(rank.connector.store([0, 1, 2, 3], [4, 5, 6, 7])).ok
    before = rank.memory()
    copies.fail_at = copies.calls + 2 * len(NAMES) + 1
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
    changed = threading.Event()
    watch(monkeypatch, lambda: changed.wait(60) or pytest.fail("nobody went on"))
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
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, lambda: inside.append(torch.get_num_threads()))
        assert rank.finish(rank.connector.store([0], [0])).ok
    assert set(inside) == {before}
    assert torch.get_num_threads() == before


# Threads


def many(blocks: int, page: int = 4096, threads: int | None = None) -> tuple[kv.Connector, dict]:
    """Two layers of large pages; a connector whose host-copy has so many threads."""
    spec = kv.LatentSpec(block_size=4, row_bytes=page // 4)
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers=dict.fromkeys(NAMES, spec), num_blocks=blocks),
        canonical=True,
    )
    engine = HostCopy(threads)
    engine.priority = 10  # before the built-in one
    connector = kv.Connector(context, [engine], host=blocks)
    caches = {
        name: torch.randint(0, 256, (blocks, 1, 4, page // 4), dtype=torch.uint8) for name in NAMES
    }
    connector.register(caches)
    return connector, caches


def is_stored(connector: kv.Connector, caches: dict, blocks: list[int], slots: list[int]) -> bool:
    rows = connector.host.rows.numpy()
    pages = [cache.numpy().reshape(cache.shape[0], -1) for cache in caches.values()]
    return all(
        np.array_equal(rows[slot], np.concatenate([page[block] for page in pages]))
        for block, slot in zip(blocks, slots, strict=True)
    )


def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is a piece of its own."""
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 1)
    monkeypatch.setattr(host_copy, "_SHARED_CALL_BYTES", 0)


@pytest.mark.parametrize(
    ("page", "blocks", "pieces"),
    [
        (65_536, 128, 4),  # 16 MiB in pieces of 4 MiB
        (65_536, 32, 1),  # 4 MiB
        (32_768, 256, 1),  # 16 MiB, but a call copies only 32 KiB
        (131_072, 1024, 8),  # 256 MiB: four pieces for each thread
    ],
)
def test_a_job_is_shared_where_that_pays(page: int, blocks: int, pieces: int) -> None:
    """Two layers of their own, so that a block takes two calls."""
    connector, _ = many(1, page)
    ((plan,),) = connector._plans.values()
    ids = np.arange(blocks)
    job = make_job(0, "store", [plan], ids, ids)
    found = list(host_copy._cut(job, 2))
    assert len(found) == pieces
    covered = np.concatenate([part.block_ids for parts in found for part in parts])
    assert covered.tolist() == ids.tolist()
    assert [len(parts) for parts in host_copy._cut(job, 1)] == [1]


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_a_job_of_many_pieces_is_copied_whole(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Pieces of one block each; whoever copies them, every byte arrives."""
    in_small_pieces(monkeypatch)
    connector, caches = many(64, threads=threads)
    used: set[str] = set()
    watch(monkeypatch, lambda: used.add(threading.current_thread().name))
    blocks, slots = list(range(60)), list(range(63, 3, -1))
    (result,) = connector.wait([connector.store(blocks, slots)], timeout=60)
    assert (result.ok, result.bytes) == (True, 60 * 2 * 4096)
    assert is_stored(connector, caches, blocks, slots)
    here = threading.current_thread().name
    assert used == ({here} if threads == 0 else {"kvpolicy-host-copy"})


def test_a_piece_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other pieces copied is reported as there, and it is."""
    in_small_pieces(monkeypatch)
    copies = Copies(monkeypatch, fail_at=3)
    connector, caches = many(32, threads=2)
    blocks, slots = list(range(32)), list(range(31, -1, -1))
    (result,) = connector.wait([connector.store(blocks, slots)], timeout=60)
    assert not result.ok
    assert result.error == "OSError: the page is poisoned"
    assert 1 <= len(result.failed_ids) < 32
    assert result.bytes == (32 - len(result.failed_ids)) * 2 * 4096
    kept = [pair for pair in zip(blocks, slots, strict=True) if pair[1] not in result.failed_ids]
    assert is_stored(connector, caches, [b for b, _ in kept], [s for _, s in kept])
    copies.fail_at = None
    (again,) = connector.wait([connector.store(blocks, slots)], timeout=60)
    assert again.ok


def test_submitting_does_not_wait_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    watch(monkeypatch, lambda: go_on.wait(60) or pytest.fail("nobody went on"))
    connector, caches = many(8, threads=2)
    jobs = [connector.store([i], [i]) for i in range(8)]
    assert connector.poll() == []
    go_on.set()
    assert [result.ok for result in connector.wait(jobs, timeout=60)] == [True] * 8
    assert is_stored(connector, caches, [*range(8)], [*range(8)])


def test_a_waiter_wakes_although_another_one_never_lets_go() -> None:
    """The latch is left held, as by a thread that was interrupted between two instructions."""
    connector, _ = many(4, threads=1)
    (done,) = connector.wait([connector.store([0], [0])], timeout=60)
    assert done.ok
    handle = kv.PiecewiseHandle(None, 1)
    assert handle.wait(0.001) is False
    handle._outcomes[0] = None  # as `ended` does before it releases the latch
    assert handle.wait(60) is True


def test_the_environment_says_how_many_threads_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    put = workers.Workers.put

    def counted(self: workers.Workers, tasks: object, threads: int) -> None:
        asked.append(threads)
        put(self, tasks, threads)

    monkeypatch.setattr(workers.Workers, "put", counted)
    connector, _ = many(4)
    for text in ("1", "3", "0", ""):
        monkeypatch.setenv("KVPOLICY_HOST_THREADS", text)
        (result,) = connector.wait([connector.store([0], [1])], timeout=60)
        assert result.ok
    assert asked == [1, 3, 0, workers.default_threads()]
    monkeypatch.setenv("KVPOLICY_HOST_THREADS", "two")
    with pytest.raises(kv.OptionError, match="KVPOLICY_HOST_THREADS is a whole number"):
        many(4)
    (result,) = connector.wait([connector.store([0], [1])], timeout=60)
    assert not result.ok
    assert "KVPOLICY_HOST_THREADS is a whole number from 0" in result.error
    assert "'two'" in result.error


@pytest.mark.parametrize("threads", [-1, 257, True, 1.0, "2"])
def test_threads_that_cannot_be_are_refused(threads: object) -> None:
    with pytest.raises(kv.OptionError, match="host-copy: threads is a whole number from 0 to 256"):
        HostCopy(threads)


# Runs that torch copies


@pytest.mark.parametrize("size", [512, 1024, 1040, 1032, 2048, 2064])
@pytest.mark.parametrize("blocks", [(3, 0, 5), (2, 3, 4)], ids=["scattered", "consecutive"])
def test_short_runs_are_copied_exactly_whoever_copies_them(
    size: int, blocks: tuple[int, ...]
) -> None:
    """Token-major at TP 2: each token is one run of ``size``; bytes of every bit pattern."""
    spec = kv.AttentionSpec(
        block_size=16, total_kv_heads=2, head_size=size // 2, itemsize=1, page_padding=16
    )
    names = [f"layer.{i}" for i in range(9)]
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers=dict.fromkeys(names, spec), num_blocks=6),
        grid=kv.ParallelGrid(tp=2),
        rank=1,
        canonical=True,
        layout="NHD",
    )
    whole = torch.randint(0, 256, (9, 6, 16 * size + 16), dtype=torch.uint8)
    before = whole.clone()
    caches = {
        name: whole[i, :, : 16 * size].unflatten(1, (16, 1, size)) for i, name in enumerate(names)
    }
    connector = kv.Connector(context, (), host=6)
    connector.register(caches)
    connector.host.rows.fill_(SENTINEL)
    slots = [4, 5, 0] if blocks[1] < blocks[0] else [1, 2, 3]
    (stored,) = connector.wait([connector.store(blocks, slots)], timeout=60)
    assert stored.ok
    rows = connector.host.rows.unflatten(1, (9, 16, 2, size))
    for block, slot in zip(blocks, slots, strict=True):
        assert torch.equal(rows[slot, :, :, 1], before[:, block, : 16 * size].view(9, 16, size))
        assert (rows[slot, :, :, 0] == SENTINEL).all()
    assert (rows[[s for s in range(6) if s not in slots]] == SENTINEL).all()
    assert torch.equal(whole, before)
    back = [1, 2, 3] if blocks[1] < blocks[0] else [5, 0, 1]
    (loaded,) = connector.wait([connector.load(slots, back)], timeout=60)
    assert loaded.ok
    expected = before.clone()
    for block, source in zip(back, blocks, strict=True):
        expected[:, block, : 16 * size] = before[:, source, : 16 * size]
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("size", [512, 1024, 2048, 4096, 16_384])
def test_c30_fragments_decide_who_copies_them_not_pages(size: int) -> None:
    """Pages of one fragment, 64 of them, and pages of 64 fragments: the same bytes to copy."""

    def torch_copies(layers: int, tokens: int) -> bool:
        spec = kv.AttentionSpec(
            block_size=tokens, total_kv_heads=2, head_size=size // 2, itemsize=1
        )
        context = kv.PolicyContext(
            geometry=kv.CacheGeometry(
                layers={f"layer.{i}": spec for i in range(layers)}, num_blocks=1
            ),
            grid=kv.ParallelGrid(tp=2),
            canonical=True,
            layout="NHD",
        )
        whole = torch.zeros(layers, 1, tokens, 1, size, dtype=torch.uint8)
        connector = kv.Connector(context, (), host=1)
        connector.register({f"layer.{i}": whole[i] for i in range(layers)})
        ((plan,),) = connector._plans.values()
        return bool(host_copy._views(plan).blocks)

    chosen = {torch_copies(64, 1), torch_copies(1, 64), torch_copies(8, 8)}
    assert chosen == {size in (1024, 2048)}


def test_torch_is_never_asked_for_so_much_that_it_uses_threads() -> None:
    spec = kv.AttentionSpec(block_size=16, total_kv_heads=2, head_size=512, itemsize=1)
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers={f"layer.{i}": spec for i in range(80)}, num_blocks=2),
        grid=kv.ParallelGrid(tp=2),
        canonical=True,
        layout="NHD",
    )
    whole = torch.zeros(80, 2, 16, 1, 1024, dtype=torch.uint8)
    pool = kv.HostPool(2)
    connector = kv.Connector(context, (), host=pool)
    connector.register({f"layer.{i}": whole[i] for i in range(80)})
    ((plan,),) = connector._plans.values()
    views = host_copy._views(plan)
    assert not views.spans
    elements = [pair[0][0].numel() for pair in views.blocks]
    assert sum(elements) * 16 == plan.block_bytes
    assert max(elements) < 32_768
    assert len(elements) == 3


def test_tensors_of_inference_mode_are_copied_outside_it() -> None:
    """An engine registers, and stores, while it is in inference mode; a thread of ours is not."""
    spec = kv.AttentionSpec(block_size=64, total_kv_heads=2, head_size=512, itemsize=1)
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers={"layer": spec}, num_blocks=4),
        grid=kv.ParallelGrid(tp=2),
        canonical=True,
        layout="NHD",
    )
    with torch.inference_mode():
        cache = torch.randint(0, 256, (4, 64, 1, 1024), dtype=torch.uint8)
        connector = kv.Connector(context, (), host=4)
        connector.register({"layer": cache})
        jobs = [connector.store([0], [1])]
        assert connector.wait(jobs, timeout=60)[0].ok
        jobs = [connector.load([1], [2])]
    (result,) = connector.wait(jobs, timeout=60)
    assert (result.ok, result.error) == (True, "")
    assert torch.equal(cache[2], cache[0])
    ((plan,),) = connector._plans.values()
    assert host_copy._views(plan).blocks


# Forks

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
