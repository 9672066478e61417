"""Ids, plans, jobs, spans and results; a copy engine made from what they promise alone."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy as kv
from kvpolicy.transfer import MAX_JOB_BLOCKS, check_ids, check_unique, failed, make_job

# C14: ids.


@pytest.mark.parametrize(
    "ids",
    [
        [0, 3, 3, 1],
        (0, 3, 3, 1),
        iter([0, 3, 3, 1]),
        np.array([0, 3, 3, 1]),
        np.array([0, 3, 3, 1], dtype=np.int8),
        np.array([0, 3, 3, 1], dtype=np.uint16),
        np.array([0, 3, 3, 1], dtype=np.uint64),
        np.array([0, 3, 3, 1], dtype=">i4"),
        np.array([0, 9, 3, 9, 3, 9, 1, 9])[::2],
        torch.tensor([0, 3, 3, 1]),
        torch.tensor([0, 3, 3, 1], dtype=torch.uint8),
        [np.int32(0), np.int64(3), 3, np.uint8(1)],
    ],
    ids=lambda ids: f"{type(ids).__name__}-{getattr(ids, 'dtype', '')}",
)
def test_ids_become_a_read_only_int64_copy(ids: object) -> None:
    found = check_ids(ids, 4, "block")
    assert found.dtype == np.int64
    assert found.tolist() == [0, 3, 3, 1]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 2


@pytest.mark.parametrize("empty", [[], (), np.zeros(0, dtype=np.int32), torch.zeros(0)])
def test_no_ids_are_fine(empty: object) -> None:
    assert check_ids(empty, 4, "block").tolist() == []


@pytest.mark.parametrize("wrong", [4, 5, -1, 2**31, -(2**62)])
def test_c14_an_id_outside_the_cache_is_refused(wrong: int) -> None:
    for ids in ([0, wrong], np.array([wrong, 1]), torch.tensor([wrong])):
        with pytest.raises(kv.BlockIdError, match=f"block id {wrong} is out of range; .* 0 to 3"):
            check_ids(ids, 4, "block")


def test_c14_an_unsigned_id_does_not_wrap_around() -> None:
    with pytest.raises(kv.BlockIdError, match=f"slot id {2**64 - 1} is out of range"):
        check_ids(np.array([2**64 - 1], dtype=np.uint64), 4, "slot")


@pytest.mark.parametrize(
    "ids",
    [
        [True, False],
        [1, True],
        [np.True_, 1],
        np.array([True]),
        torch.tensor([True]),
        [1.0],
        [1, 2.5],
        np.array([1.0]),
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([1], device="meta"),
        ["1"],
        "12",
        b"\x01".decode(),
        [None],
        None,
        3,
        [[1], [2]],
        [[1], [2, 3]],
        np.array([[1, 2]]),
        np.array(1),
        torch.tensor([[1, 2]]),
        torch.tensor(1),
        [2**70],
        np.array([1], dtype=object),
        np.array([1], dtype="m8[s]"),
    ],
    ids=repr,
)
def test_c14_ids_are_one_dimension_of_integers(ids: object) -> None:
    with pytest.raises(kv.BlockIdError, match=r"block ids are .* integers"):
        check_ids(ids, 4, "block")


def test_a_job_has_a_limit() -> None:
    ids = np.zeros(MAX_JOB_BLOCKS + 1, dtype=np.int8)
    with pytest.raises(
        kv.BlockIdError, match="a job has at most 16,777,216 blocks, not 16,777,217"
    ):
        check_ids(ids, 4, "block")


@given(st.lists(st.integers(0, 6), max_size=8))
def test_c14_a_destination_is_named_once(ids: list[int]) -> None:
    checked = check_ids(ids, 7, "slot")
    if len(set(ids)) == len(ids):
        check_unique(checked, "slot")
    else:
        first = min(i for i in ids if ids.count(i) > 1)
        with pytest.raises(kv.BlockIdError, match=f"slot id {first} is a destination twice"):
            check_unique(checked, "slot")


# A third party's copy engine: one byte run at a time, as `PlannedCopy` says, when told to.


class Deferred(kv.TransferHandle):
    """Copies when `run` is called, and stops before the block at place ``fail_at``."""

    def __init__(self, job: kv.TransferJob, fail_at: int | None = None) -> None:
        self.job, self.fail_at = job, fail_at
        self._result: kv.TransferResult | None = None

    def run(self) -> None:
        job, moved, places = self.job, 0, 0
        lost: list[int] = []
        for part in job.parts:
            for block, slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True):
                if self.fail_at is not None and places >= self.fail_at:
                    lost.append(slot if job.direction == "store" else block)
                    continue
                places += 1
                moved += sum(
                    self.copy(copy, part.plan.rows, block, slot) for copy in part.plan.copies
                )
        error = f"the device went away at block {places + 1}" if lost else ""
        self._result = kv.TransferResult(
            job_id=job.job_id, ok=not lost, bytes=moved, seconds=0.0, failed_ids=lost, error=error
        )

    def copy(self, copy: kv.PlannedCopy, rows: torch.Tensor, block: int, slot: int) -> int:
        start = copy.offset + block * copy.block_stride
        for at, to, size in copy.box.runs():
            memory = copy.storage[start + at : start + at + size]
            row = rows[slot, to : to + size]
            if self.job.direction == "store":
                row.copy_(memory)
            else:
                memory.copy_(row)
        return copy.box.bytes

    def done(self) -> bool:
        return self._result is not None

    def result(self) -> kv.TransferResult:
        assert self._result is not None
        return self._result


class Engine:
    """A transfer plugin that keeps its handles, so that a test decides when they run."""

    priority = 10

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.handles: list[Deferred] = []

    @kv.hookimpl
    def transfer(self, job: kv.TransferJob) -> Deferred:
        self.handles.append(Deferred(job, self.fail_at))
        return self.handles[-1]


SPEC = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=4, itemsize=1)
PAGE = 64  # 2 heads x 4 tokens x rows of 8 B


def connector(
    plugin: object = None,
    *,
    specs: dict[str, kv.AttentionSpec] | None = None,
    caches: object = None,
    pool: kv.HostPool | None = None,
    blocks: int = 10,
    **wishes: object,
) -> tuple[kv.Connector, torch.Tensor | None]:
    """One layer of 64-byte pages, if nothing else is said, block b full of b + 1."""
    specs = specs or {"l": SPEC}
    context = kv.PolicyContext(
        **{
            "geometry": kv.CacheGeometry(layers=specs, num_blocks=blocks),
            "canonical": True,
            **wishes,
        }
    )
    made = kv.Connector(context, [] if plugin is None else [plugin], host=pool or kv.HostPool(10))
    cache = None
    if caches is None:
        cache = (torch.arange(blocks, dtype=torch.uint8) + 1).view(-1, 1, 1, 1).repeat(1, 2, 4, 8)
        caches = {"l": cache}
    made.register(caches)
    return made, cache


def job_of(
    made: kv.Connector, engine: Engine, blocks: list[int], slots: list[int]
) -> kv.TransferJob:
    made.store(blocks, slots)
    return engine.handles[-1].job


def finish(made: kv.Connector, job_id: int) -> kv.TransferResult:
    (result,) = made.wait([job_id], timeout=60)
    return result


# C29: spans and runs.


def test_c29_adjacent_blocks_and_slots_of_dense_rows_are_one_run() -> None:
    engine = Engine()
    made, _ = connector(engine)
    job = job_of(made, engine, [3, 4, 5], [7, 8, 9])
    assert list(job.parts[0].spans()) == [kv.Span(3, 7, 3)]
    assert job.runs() == 1


@pytest.mark.parametrize(
    ("blocks", "slots", "spans"),
    [
        ([3, 5, 7], [7, 8, 9], [(3, 7, 1), (5, 8, 1), (7, 9, 1)]),
        ([3, 4, 5], [7, 9, 2], [(3, 7, 1), (4, 9, 1), (5, 2, 1)]),
        ([3, 4, 5], [9, 8, 7], [(3, 9, 1), (4, 8, 1), (5, 7, 1)]),
        ([3, 4, 5], [7, 8, 1], [(3, 7, 2), (5, 1, 1)]),
        ([5, 3, 4], [9, 7, 8], [(3, 7, 3)]),  # the order of the pairs does not matter
        ([3, 3, 4], [1, 2, 3], [(3, 1, 1), (3, 2, 2)]),  # a source may repeat
    ],
)
def test_c29_what_is_not_adjacent_on_both_sides_stays_apart(
    blocks: list[int], slots: list[int], spans: list[tuple[int, int, int]]
) -> None:
    engine = Engine()
    made, _ = connector(engine)
    job = job_of(made, engine, blocks, slots)
    assert list(job.parts[0].spans()) == spans
    assert job.runs() == len(spans)


def test_c29_runs_are_never_merged_across_the_padding_of_rows() -> None:
    engine = Engine()
    made, _ = connector(engine, pool=kv.HostPool(10, record_bytes=PAGE + 1))
    job = job_of(made, engine, [3, 4, 5], [7, 8, 9])
    assert list(job.parts[0].spans()) == [kv.Span(3, 7, 3)]
    assert job.runs() == 3


def test_c29_runs_are_never_merged_across_the_padding_of_pages() -> None:
    engine = Engine()
    padded = kv.AttentionSpec(
        block_size=4, total_kv_heads=2, head_size=4, itemsize=1, page_padding=16
    )
    cache = torch.zeros(10, PAGE + 16, dtype=torch.uint8)
    made, _ = connector(engine, specs={"l": padded}, caches={"l": cache})
    assert job_of(made, engine, [3, 4, 5], [7, 8, 9]).runs() == 3


def test_c29_a_slab_kept_as_it_is_moves_in_one_run_and_separate_layers_in_one_each() -> None:
    specs = {"a": SPEC, "b": SPEC, "c": SPEC}
    aware = kv.BackendCapabilities(stride_aware=True)
    engine = Engine()
    slab = torch.zeros(10, 3, 2, 4, 8, dtype=torch.uint8)
    made, _ = connector(engine, specs=specs, caches=slab, canonical=False, backend=aware)
    job = job_of(made, engine, [3, 4, 5], [7, 8, 9])
    assert job.runs() == 1
    assert job.bytes == 3 * 3 * PAGE

    caches = {name: torch.zeros(10, 2, 4, 8, dtype=torch.uint8) for name in specs}
    made, _ = connector(engine, specs=specs, caches=caches)
    assert job_of(made, engine, [3, 4, 5], [7, 8, 9]).runs() == 3 * 3  # pages of a row lie apart


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique_by=lambda pair: pair[1]))
def test_spans_are_the_pairs_each_once(pairs: list[tuple[int, int]]) -> None:
    part = kv.TransferPart(
        plan=None,  # spans need none
        block_ids=np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)[:, 0],
        slots=np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)[:, 1],
    )
    spans = list(part.spans())
    found = [(b + i, s + i) for b, s, length in spans for i in range(length)]
    assert found == sorted(pairs)
    for one, other in itertools.pairwise(spans):
        assert (one.block + one.length, one.slot + one.length) != (other.block, other.slot)


# Plans.


def plans_of(made: kv.Connector, engine: Engine) -> list[kv.TransferPlan]:
    return [part.plan for part in job_of(made, engine, [0, 1], [0, 1]).parts]


def test_equal_layers_of_a_slab_become_one_copy() -> None:
    specs = dict.fromkeys("abcd", SPEC)
    engine = Engine()
    slab = torch.zeros(10, 4, 2, 4, 8, dtype=torch.uint8)
    made, _ = connector(engine, specs=specs, caches=kv.KVCaches.from_slab(slab, specs, layer_dim=1))
    (plan,) = plans_of(made, engine)
    (copy,) = plan.copies
    assert copy.layers == tuple("abcd")
    assert copy.box.bytes == 4 * PAGE
    assert copy.box.num_runs == 1
    assert plan.block_bytes == 4 * PAGE


def test_layers_of_storages_of_their_own_are_copied_one_by_one() -> None:
    specs = dict.fromkeys("abcd", SPEC)
    engine = Engine()
    caches = {name: torch.zeros(10, 2, 4, 8, dtype=torch.uint8) for name in specs}
    (plan,) = plans_of(connector(engine, specs=specs, caches=caches)[0], engine)
    assert [copy.layers for copy in plan.copies] == [(name,) for name in "abcd"]


def test_layers_are_joined_only_while_their_distance_stays_the_same() -> None:
    """Cells 0, 1, 2, 4, 5 of a slab, and one layer of another spec in cell 6."""
    other = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=2, itemsize=1)
    specs = {**dict.fromkeys("abcde", SPEC), "f": other}
    cells = dict(zip("abcdef", (0, 1, 2, 4, 5, 6), strict=True))
    engine = Engine()
    slab = torch.zeros(10, 7 * PAGE, dtype=torch.uint8)
    placed = {
        name: kv.SlabPlacement(offset=cell * PAGE, block_stride=7 * PAGE)
        for name, cell in cells.items()
    }
    made, _ = connector(engine, specs=specs, caches=kv.KVCaches(slab=slab, placements=placed))
    (plan,) = plans_of(made, engine)
    assert [copy.layers for copy in plan.copies] == [("a", "b", "c"), ("d", "e"), ("f",)]


def test_layers_are_not_joined_across_storages_or_block_strides() -> None:
    """In both, the layers' offsets look as if they followed one another in one slab."""
    specs = dict.fromkeys("ab", SPEC)
    apart = {
        name: torch.full((PAGE * 12,), 10 * (i + 1), dtype=torch.uint8)[i * PAGE :][: PAGE * 10]
        for i, name in enumerate(specs)
    }
    apart = {name: whole.view(10, PAGE) for name, whole in apart.items()}
    slab = torch.zeros(40 * PAGE, dtype=torch.uint8)
    slab[: 10 * PAGE], slab[10 * PAGE :] = 10, 20
    uneven = kv.KVCaches(
        slab=slab,
        placements={
            "a": kv.SlabPlacement(offset=0, block_stride=PAGE),
            "b": kv.SlabPlacement(offset=10 * PAGE, block_stride=2 * PAGE),
        },
    )
    for caches in (apart, uneven):
        engine = Engine()
        made, _ = connector(engine, specs=specs, caches=caches)
        (plan,) = plans_of(made, engine)
        assert [copy.layers for copy in plan.copies] == [("a",), ("b",)]
        engine.handles[-1].run()
        for slot in (0, 1):
            row = made.host.rows[slot, : 2 * PAGE].view(2, PAGE)
            assert [set(page.tolist()) for page in row] == [{10}, {20}]


def test_layers_that_lie_backwards_in_memory_are_not_joined_and_come_out_right() -> None:
    specs = dict.fromkeys("ab", SPEC)
    engine = Engine()
    slab = torch.zeros(10, 2, PAGE, dtype=torch.uint8)
    slab[:, 0], slab[:, 1] = 20, 10
    made, _ = connector(engine, specs=specs, caches={"a": slab[:, 1], "b": slab[:, 0]})
    (plan,) = plans_of(made, engine)
    assert [copy.layers for copy in plan.copies] == [("a",), ("b",)]
    engine.handles[-1].run()
    row = made.host.rows[0, : 2 * PAGE].view(2, PAGE)
    assert [set(page.tolist()) for page in row] == [{10}, {20}]


def test_layers_with_other_elections_have_plans_of_their_own() -> None:
    """TP4: heads 2 are held twice, heads 4 once; rank 1 writes odd slots of the first only."""
    twice = SPEC
    once = kv.AttentionSpec(block_size=4, total_kv_heads=4, head_size=4, itemsize=1)
    engine = Engine()
    made, _ = connector(
        engine,
        specs={"a": twice, "b": once, "c": twice},
        caches={name: torch.zeros(10, 1, 4, 8, dtype=torch.uint8) for name in "abc"},
        grid=kv.ParallelGrid(tp=4),
        rank=1,
    )
    store = job_of(made, engine, [5, 6, 7, 8], [0, 1, 2, 3])
    by_layers = {
        tuple(name for copy in part.plan.copies for name in copy.layers): part
        for part in store.parts
    }
    assert by_layers["a", "c"].slots.tolist() == [1, 3]
    assert by_layers["a", "c"].block_ids.tolist() == [6, 8]
    assert by_layers["b",].slots.tolist() == [0, 1, 2, 3]
    assert store.bytes == 2 * 2 * 32 + 4 * 32
    assert store.destinations.tolist() == [0, 1, 2, 3]


def test_a_load_reads_every_slot_whoever_wrote_it() -> None:
    engine = Engine()
    made, _ = connector(engine)
    made.store([0, 1, 2], [4, 5, 6])
    engine.handles[-1].run()
    made.load([6, 4], [9, 8])
    job = engine.handles[-1].job
    assert job.destinations.tolist() == [9, 8]
    assert job.parts[0].block_ids.tolist() == [8, 9]
    assert job.parts[0].slots.tolist() == [4, 6]
    for ids in (job.block_ids, job.slots, job.parts[0].block_ids, job.parts[0].slots):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 1


def test_a_rank_without_the_layers_of_a_group_has_an_empty_job() -> None:
    ids = check_ids([1, 2], 4, "block")
    job = make_job(3, "store", (), ids, ids)
    assert (job.parts, job.bytes, job.runs(), job.device) == ((), 0, 0, "cpu")


# C21, C22, C14 through a connector, with the naive engine.


def test_the_naive_engine_stores_and_loads() -> None:
    engine = Engine()
    made, cache = connector(engine)
    job = made.store([2, 7, 2], [0, 5, 3])  # a repeated source
    engine.handles[-1].run()
    assert finish(made, job).bytes == 3 * PAGE
    assert [set(made.host.rows[s].tolist()) for s in (0, 5, 3)] == [{3}, {8}, {3}]
    job = made.load([5, 5], [1, 0])  # and again
    engine.handles[-1].run()
    assert finish(made, job).ok
    assert [set(cache[b].flatten().tolist()) for b in (0, 1, 2)] == [{8}, {8}, {3}]


def test_c21_a_store_that_fails_at_block_3_of_4_says_so_and_keeps_the_first_two() -> None:
    engine = Engine(fail_at=2)
    made, _ = connector(engine)
    job = made.store([1, 2, 3, 4], [6, 7, 8, 9])
    engine.handles[-1].run()
    result = finish(made, job)
    assert (result.ok, result.failed_ids, result.bytes) == (False, (8, 9), 2 * PAGE)
    assert result.error == "the device went away at block 3"
    engine.fail_at = None
    for slot in (8, 9):
        with pytest.raises(kv.PoolError, match=f"slot {slot} holds nothing"):
            made.load([slot], [0])
    job = made.load([6, 7], [0, 1])
    engine.handles[-1].run()
    assert finish(made, job).ok


def test_c21_a_load_that_fails_at_block_3_of_4_names_the_blocks_and_moves_no_more() -> None:
    engine = Engine()
    made, cache = connector(engine)
    job = made.store([1, 2, 3, 4], [6, 7, 8, 9])
    engine.handles[-1].run()
    assert finish(made, job).ok
    cache.fill_(99)
    engine.fail_at = 2
    job = made.load([6, 7, 8, 9], [2, 4, 6, 8])
    engine.handles[-1].run()
    result = finish(made, job)
    assert (result.ok, result.failed_ids, result.bytes) == (False, (6, 8), 2 * PAGE)
    assert [set(cache[b].flatten().tolist()) for b in (2, 4, 6, 8)] == [{2}, {3}, {99}, {99}]
    engine.fail_at = None
    job = made.load([8, 9], [6, 8])  # the record is still there
    engine.handles[-1].run()
    assert finish(made, job).ok


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
def test_c22_ids_that_are_changed_after_submit_do_not_change_the_job(kind: str) -> None:
    engine = Engine()
    made, _ = connector(engine)
    make = {"list": list, "numpy": np.array, "torch": torch.tensor}[kind]
    blocks, slots = make([2, 3]), make([5, 6])
    job = made.store(blocks, slots)
    for ids in (blocks, slots):
        ids[0], ids[1] = 9, 0
    engine.handles[-1].run()
    assert finish(made, job).ok
    assert [set(made.host.rows[s].tolist()) for s in (5, 6, 9, 0)] == [{3}, {4}, {0}, {0}]


@pytest.mark.parametrize(
    ("blocks", "slots", "what"),
    [
        ([10], [0], "block id 10 is out of range; possible: 0 to 9"),
        ([-1], [0], "block id -1 is out of range"),
        ([0], [10], "slot id 10 is out of range; possible: 0 to 9"),
        ([0], [-1], "slot id -1 is out of range"),
        ([0, 1], [3, 3], "slot id 3 is a destination twice"),
        ([0, 1], [3], "2 block ids and 1 slots do not pair"),
        ([True], [3], "block ids are a sequence of integers: True and False are not numbers"),
    ],
)
def test_c14_a_store_with_wrong_ids_is_refused_before_anything_happens(
    blocks: list[int], slots: list[int], what: str
) -> None:
    engine = Engine()
    made, _ = connector(engine)
    with pytest.raises(kv.BlockIdError, match=what):
        made.store(blocks, slots)
    assert engine.handles == []
    assert made.poll() == []
    assert all(made.host.holds(slot) is None for slot in range(10))


def test_c14_a_load_may_repeat_its_sources_but_not_its_destinations() -> None:
    engine = Engine()
    made, _ = connector(engine)
    made.store([0], [3])
    engine.handles[-1].run()
    with pytest.raises(kv.BlockIdError, match="block id 7 is a destination twice"):
        made.load([3, 3], [7, 7])
    with pytest.raises(kv.BlockIdError, match="block id 10 is out of range"):
        made.load([3], [10])
    made.load([3, 3], [7, 8])
    assert len(engine.handles) == 2


# Results and handles.


def a_result(**changes: object) -> kv.TransferResult:
    known = {"job_id": 1, "ok": True, "bytes": 5, "seconds": 0.5}
    return kv.TransferResult(**{**known, **changes})


def test_a_result_is_plain_values() -> None:
    result = a_result(ok=False, failed_ids=np.array([3, 4]), error="gone")
    assert result.failed_ids == (3, 4)
    assert all(type(i) is int for i in result.failed_ids)
    assert a_result() == a_result()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job_id", "1"),
        ("job_id", True),
        ("ok", 1),
        ("ok", None),
        ("bytes", -1),
        ("bytes", 1.5),
        ("bytes", None),
        ("seconds", "fast"),
        ("seconds", None),
        ("failed_ids", [None]),
        ("failed_ids", [True]),
        ("failed_ids", 3),
        ("error", None),
        ("error", ValueError("gone")),
    ],
)
def test_a_result_is_checked_at_birth(field: str, value: object) -> None:
    with pytest.raises(kv.OptionError, match=rf"TransferResult\.{field} is "):
        a_result(**{field: value})


def test_a_failed_job_has_every_destination_among_its_failed_ids() -> None:
    engine = Engine()
    made, _ = connector(engine)
    job = job_of(made, engine, [1, 2], [8, 9])
    result = failed(job, "why", 0.25)
    assert (result.ok, result.bytes, result.failed_ids, result.error, result.seconds) == (
        False,
        0,
        (8, 9),
        "why",
        0.25,
    )


def test_a_finished_handle_has_its_result_at_once() -> None:
    handle = kv.TransferHandle.finished(a_result())
    assert handle.done()
    assert handle.wait(0)
    assert handle.result() == handle.result() == a_result()


class Counted(kv.TransferHandle):
    """Done at the n-th time of asking."""

    def __init__(self, asks: int) -> None:
        self.left = iter(range(asks))

    def done(self) -> bool:
        return next(self.left, None) is None

    def result(self) -> kv.TransferResult:
        return a_result()


def test_a_handles_own_wait_asks_until_it_is_done() -> None:
    assert Counted(5).wait()
    assert Counted(5).wait(60)
    assert not Counted(5).wait(0)


def test_a_handles_own_wait_sees_what_another_thread_ends() -> None:
    class Flag(Counted):
        event = threading.Event()

        def done(self) -> bool:
            return self.event.is_set()

    handle = Flag(0)
    assert not handle.wait(0.001)
    threading.Timer(0.01, handle.event.set).start()
    assert handle.wait(60)
