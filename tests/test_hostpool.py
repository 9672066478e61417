"""HostPool: its memory, and what it knows of every slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kvpolicy as kv
from kvpolicy.hostpool import MAX_POOL_BYTES, as_pool
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology

SPEC = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=3, itemsize=1)
PAGE = 2 * 4 * 6

# Memory.


@pytest.mark.parametrize(
    ("record_bytes", "alignment", "row_stride"),
    [(1, 64, 64), (64, 64, 64), (65, 64, 128), (65, 1, 65), (4097, 4096, 8192), (3, 2, 4)],
)
def test_rows_are_aligned_zeroed_and_hold_a_record(
    record_bytes: int, alignment: int, row_stride: int
) -> None:
    pool = kv.HostPool(3, record_bytes=record_bytes, alignment=alignment)
    assert pool.row_stride == row_stride
    assert pool.rows.shape == (3, row_stride)
    assert pool.rows.dtype is torch.uint8
    assert [row.data_ptr() % alignment for row in pool.rows] == [0, 0, 0]
    assert not pool.rows.any()
    assert repr(pool) == f"HostPool(num_slots=3, record_bytes={record_bytes})"


@pytest.mark.parametrize("name", ["num_slots", "record_bytes", "alignment"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8"])
def test_sizes_are_whole_numbers(name: str, value: object) -> None:
    sizes = {"num_slots": 2, "record_bytes": 8, "alignment": 8} | {name: value}
    with pytest.raises(kv.OptionError, match=f"HostPool {name} is a whole number >= 1, not "):
        kv.HostPool(**sizes)


def test_an_alignment_is_a_power_of_two() -> None:
    with pytest.raises(kv.OptionError, match="alignment is a power of two, not 48"):
        kv.HostPool(2, record_bytes=8, alignment=48)


def test_a_pool_that_no_machine_has_memory_for_is_refused_in_words() -> None:
    with pytest.raises(kv.PoolError, match=r"no memory for .* slots of 64 B .* lower the number"):
        kv.HostPool(MAX_POOL_BYTES // 64 + 1, record_bytes=64)


def test_memory_that_the_system_refuses_is_a_pool_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise MemoryError

    pool = kv.HostPool(2)
    monkeypatch.setattr("kvpolicy.hostpool.allocate", refuse)
    with pytest.raises(kv.PoolError, match="no memory for 2 slots of 8 B"):
        pool.join(8, lambda: None)
    monkeypatch.undo()
    pool.join(8, lambda: None)  # it is as it was, and can be tried again
    assert pool.record_bytes == 8


def test_rows_come_with_the_first_connector_where_no_size_was_given() -> None:
    pool = kv.HostPool(2)
    assert pool.row_stride == 0
    with pytest.raises(kv.PoolError, match="no rows yet: give record_bytes, or join"):
        _ = pool.rows
    pool.join(100, lambda: None)
    assert pool.rows.shape == (2, 128)
    pool.join(90, lambda: None)  # shorter records fit
    with pytest.raises(kv.PoolError, match=r"hold 100 B, .* have 120; make .* record_bytes=120"):
        pool.join(120, lambda: None)
    assert pool.rows.shape == (2, 128)


@pytest.mark.parametrize("host", [True, 1.5, "8", [8]])
def test_a_host_is_a_pool_a_number_or_none(host: object) -> None:
    with pytest.raises(kv.OptionError, match="host is a HostPool, a number of slots or None"):
        as_pool(host)


def test_a_number_makes_a_pool_and_a_pool_is_kept() -> None:
    pool = kv.HostPool(2)
    assert as_pool(pool) is pool
    made = as_pool(5)
    assert made is not None
    assert made.num_slots == 5


# Slots, at the pool itself. Two ranks; rank s % 2 writes slot s, as for one replicated head.

ONE, OTHER = GroupFormat(fields={"dtype": "bfloat16"}), GroupFormat(fields={"dtype": "float16"})
TWO_RANKS = Topology(grid=kv.ParallelGrid(tp=2), stages=(1,))
FOUR_RANKS = Topology(grid=kv.ParallelGrid(tp=4), stages=(1,))
BOTH = frozenset({0, 1})


def everyone(_slot: int) -> frozenset[int]:
    return BOTH


def begin(
    pool: kv.HostPool,
    rank: int,
    slots: list[int],
    fmt: GroupFormat = ONE,
    topology: Topology = TWO_RANKS,
    writers: Callable[[int], frozenset[int]] = everyone,
) -> None:
    pool.begin_store(slots, fmt, topology, rank, writers)


def store(pool: kv.HostPool, rank: int, slots: list[int], **how: object) -> None:
    begin(pool, rank, slots, **how)
    pool.end_store(slots, rank, frozenset())


def read(
    pool: kv.HostPool, slots: list[int], fmt: GroupFormat = ONE, topology: Topology = TWO_RANKS
) -> None:
    """Begins and ends a load of what both ranks wrote."""
    pool.begin_load(slots, fmt, topology, everyone)()


@pytest.fixture(params=["of one process", "shared"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kv.HostPool]:
    """The rules are the same wherever slots are kept."""
    if request.param == "of one process":
        yield kv.HostPool(4, record_bytes=8)
    else:
        shared = kv.SharedHostPool("rules", 4, 8, directory=tmp_path)
        yield shared
        del shared  # some tests end with slots in use: it is left as a process that ends leaves it


def test_an_empty_slot_cannot_be_loaded(pool: kv.HostPool) -> None:
    with pytest.raises(kv.PoolError, match="slot 2 holds nothing; store to it before loading"):
        read(pool, [2])
    assert pool.holds(2) is None


def test_a_slot_that_is_being_written_cannot_be_loaded_or_written_twice(
    pool: kv.HostPool,
) -> None:
    begin(pool, 0, [1])
    with pytest.raises(kv.PoolError, match="slot 1 is being written; wait for the store"):
        read(pool, [1])
    with pytest.raises(kv.PoolError, match=r"slot 1 is being written by a store .* not finished"):
        begin(pool, 0, [1])
    with pytest.raises(kv.PoolError, match=r"slot 1 is being written by a store"):
        begin(pool, 1, [1], fmt=OTHER)
    with pytest.raises(kv.PoolError, match=r"slot 1 is being written by a store"):
        begin(pool, 1, [1], topology=FOUR_RANKS)
    begin(pool, 1, [1])  # another rank of the same engine writes its own part beside it
    pool.end_store([1], 0, frozenset())
    pool.end_store([1], 1, frozenset())
    read(pool, [1])


def test_a_slot_that_is_being_read_cannot_be_written_but_read_again(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [3])
    ends = [pool.begin_load([3], ONE, TWO_RANKS, everyone) for _ in range(2)]
    for pending in (2, 1):
        with pytest.raises(kv.PoolError, match=rf"slot 3 is being read by {pending} pending load"):
            begin(pool, 0, [3])
        end = ends.pop()
        end()
        end()  # again does no harm
    begin(pool, 0, [3])


def test_a_slot_that_lacks_a_ranks_part_is_incomplete(pool: kv.HostPool) -> None:
    store(pool, 0, [0])
    assert pool.holds(0) == ONE
    with pytest.raises(kv.PoolError, match=r"slot 0 is incomplete: rank\(s\) 1 of the storing"):
        read(pool, [0])
    with pytest.raises(kv.PoolError, match=r"slot 0 is incomplete: rank\(s\) 1 "):
        read(pool, [0], topology=FOUR_RANKS)
    pool.begin_load([0], ONE, TWO_RANKS, lambda _slot: frozenset({0}))()  # rank 0's own is there
    store(pool, 1, [0])
    read(pool, [0])
    read(pool, [0], topology=FOUR_RANKS)


def test_another_engine_needs_the_elected_writers_of_the_slot_only(pool: kv.HostPool) -> None:
    def elected(slot: int) -> frozenset[int]:
        return frozenset({slot % 2})

    store(pool, 0, [0, 1], writers=elected)
    read(pool, [0], topology=FOUR_RANKS)
    with pytest.raises(kv.PoolError, match=r"slot 1 is incomplete: rank\(s\) 1 "):
        read(pool, [1], topology=FOUR_RANKS)


def test_failed_slots_are_not_there_and_the_others_are(pool: kv.HostPool) -> None:
    begin(pool, 0, [0, 1, 2])
    pool.end_store([0, 1, 2], 0, frozenset({1}))
    store(pool, 1, [0, 1, 2])
    read(pool, [0, 2])
    with pytest.raises(kv.PoolError, match="slot 1 holds nothing"):
        read(pool, [1])


def test_a_failed_store_leaves_nothing_of_what_the_slot_held(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0])
    begin(pool, 0, [0])
    pool.end_store([0], 0, frozenset({0}))
    with pytest.raises(kv.PoolError, match="slot 0 holds nothing"):
        read(pool, [0])


def test_another_format_is_refused_with_the_fields(pool: kv.HostPool) -> None:
    store(pool, 0, [0])
    with pytest.raises(kv.FormatMismatchError, match="dtype: stored 'bfloat16', wanted 'float16'"):
        read(pool, [0], fmt=OTHER)
    store(pool, 1, [0], fmt=OTHER)  # a store of another format begins a new record
    assert pool.holds(0) == OTHER
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 0 "):
        read(pool, [0], fmt=OTHER)


def test_a_rank_that_stores_again_begins_a_new_record(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0])
    store(pool, 1, [0])
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 0 "):
        read(pool, [0])
    store(pool, 0, [0])
    read(pool, [0])


def test_another_engine_of_the_same_format_begins_a_new_record(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0])
    store(pool, 1, [0], topology=FOUR_RANKS)
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 0 "):
        read(pool, [0])


def test_a_refused_store_or_load_marks_none_of_its_slots(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0, 1])
    begin(pool, 0, [2])
    with pytest.raises(kv.PoolError, match="slot 2 is being written"):
        begin(pool, 0, [0, 1, 2, 3])
    assert pool.holds(3) is None
    with pytest.raises(kv.PoolError, match="slot 2 is being written"):
        pool.begin_load([0, 1, 2], ONE, TWO_RANKS, everyone)
    begin(pool, 0, [0, 1])  # neither written nor read


def test_an_undone_store_leaves_every_slot_as_it_was(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0])
    undo = pool.begin_store([0, 1], OTHER, FOUR_RANKS, 0, everyone)
    undo()
    read(pool, [0])
    assert pool.holds(0) == ONE
    assert pool.holds(1) is None
    begin(pool, 1, [0, 1], topology=FOUR_RANKS)  # nobody is busy there


def test_an_undone_store_does_not_revive_what_others_have_overwritten(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0])
    undo = pool.begin_store([0], ONE, TWO_RANKS, 0, everyone)
    begin(pool, 1, [0])  # belongs to the new record, and may already have moved bytes
    undo()
    with pytest.raises(kv.PoolError, match="slot 0 is being written"):
        read(pool, [0])
    pool.end_store([0], 1, frozenset())
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 0 "):
        read(pool, [0])


def test_no_new_record_begins_while_another_rank_still_writes_the_old_one(
    pool: kv.HostPool,
) -> None:
    store(pool, 0, [0])
    begin(pool, 1, [0])
    with pytest.raises(kv.PoolError, match="slot 0 is being written by a store that has not"):
        begin(pool, 0, [0])
    pool.end_store([0], 1, frozenset())
    read(pool, [0])


def test_an_undone_store_keeps_what_another_rank_has_finished_meanwhile(pool: kv.HostPool) -> None:
    undo = pool.begin_store([0], ONE, TWO_RANKS, 0, everyone)
    store(pool, 1, [0])
    undo()
    store(pool, 0, [0])
    read(pool, [0])


def test_a_failed_store_without_a_key_gives_the_record_up(pool: kv.HostPool) -> None:
    """Y0 fails, Y1 comes late, Z0 begins Z: Y's part is never taken for Z's."""
    begin(pool, 0, [0])
    pool.end_store([0], 0, frozenset({0}))
    store(pool, 1, [0])
    with pytest.raises(kv.PoolError, match="slot 0 holds nothing"):
        read(pool, [0])
    store(pool, 0, [0])
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 1 "):
        read(pool, [0])
    store(pool, 1, [0])
    read(pool, [0])


def test_a_record_whose_last_part_failed_begins_anew_with_whoever_stores_again(
    pool: kv.HostPool,
) -> None:
    store(pool, 0, [0])
    begin(pool, 1, [0])
    pool.end_store([0], 1, frozenset({0}))
    store(pool, 1, [0])
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 0 "):
        read(pool, [0])
    store(pool, 0, [0])
    read(pool, [0])


def test_keys_tell_records_apart_in_whatever_order_ranks_store(pool: kv.HostPool) -> None:
    """Y0 Z0 Y1 Z1: only Z is whole in the end, and only under its own name."""

    def named(rank: int, key: str) -> None:
        pool.begin_store([0], ONE, TWO_RANKS, rank, everyone, keys={0: key})
        pool.end_store([0], rank, frozenset())

    def read_as(key: str) -> None:
        pool.begin_load([0], ONE, TWO_RANKS, everyone, keys={0: key})()

    named(0, "Y")
    named(0, "Z")
    named(1, "Y")
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 0 "):
        read_as("Y")
    named(1, "Z")
    with pytest.raises(
        kv.PoolError, match=r"holds record ('Z'|\(sha256 \w+\)), this load wants 'Y'"
    ):
        read_as("Y")
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 0 "):
        read_as("Z")
    named(0, "Z")
    read_as("Z")
    named(0, "Z")  # the same record again changes nothing
    read_as("Z")


def test_tensors_of_another_dtype_are_another_format_though_the_context_names_none(
    pool: kv.HostPool,
) -> None:
    for rank in (0, 1):
        pool.begin_store([0], ONE, TWO_RANKS, rank, everyone, element="bfloat16")
        pool.end_store([0], rank, frozenset())
    for element in ("bfloat16", ""):
        pool.begin_load([0], ONE, TWO_RANKS, everyone, element=element)()
    with pytest.raises(kv.FormatMismatchError, match="tensors: stored bfloat16, wanted float16"):
        pool.begin_load([0], ONE, TWO_RANKS, everyone, element="float16")


def test_one_of_many_threads_gets_a_slot(pool: kv.HostPool) -> None:
    barrier, got, refused = threading.Barrier(8), [], []

    def contend(number: int) -> None:
        barrier.wait()
        try:
            begin(pool, 0, [0, 1, 2, 3])
        except kv.PoolError:
            refused.append(number)
        else:
            got.append(number)

    threads = [threading.Thread(target=contend, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


# Through connectors: who writes what into a shared pool.


def connectors(
    pool: kv.HostPool, tp: int, plugins: object = (), **wishes: object
) -> list[tuple[kv.Connector, torch.Tensor]]:
    """One per rank, whose cache is full of the rank's number + 1."""
    made = []
    for rank in range(tp):
        context = kv.PolicyContext(
            geometry=kv.CacheGeometry(layers={"l": SPEC}, num_blocks=4),
            grid=kv.ParallelGrid(tp=tp),
            rank=rank,
            **wishes,
        )
        connector = kv.Connector(context, plugins, host=pool)
        cache = torch.full((4, max(1, 2 // tp), 4, 6), rank + 1, dtype=torch.uint8)
        connector.register({"l": cache})
        made.append((connector, cache))
    return made


def finish(connector: kv.Connector, job_id: int) -> None:
    (result,) = connector.wait([job_id], timeout=60)
    assert result.ok, result


def test_replicas_store_only_the_slots_that_they_are_elected_for() -> None:
    """TP4 over 2 heads: ranks 0, 1 hold head 0 and take turns, ranks 2, 3 hold head 1."""
    pool = kv.HostPool(4)
    for connector, _ in connectors(pool, 4, canonical=True):
        job = connector.store([0, 1, 2, 3], [0, 1, 2, 3])
        (result,) = connector.wait([job], timeout=60)
        assert (result.ok, result.bytes) == (True, 2 * PAGE // 2)  # half of the slots
    for slot in range(4):
        head_0, head_1 = pool.rows[slot, :PAGE].view(2, -1)
        assert set(head_0.tolist()) == {1 + slot % 2}
        assert set(head_1.tolist()) == {3 + slot % 2}


def test_a_slot_is_loadable_once_its_elected_writers_have_stored() -> None:
    pool = kv.HostPool(2)
    ranks = connectors(pool, 4, canonical=True)
    ((reader, cache),) = connectors(pool, 1, canonical=True)
    for rank in (0, 1, 2):
        finish(ranks[rank][0], ranks[rank][0].store([0, 1], [0, 1]))
    finish(reader, reader.load([0], [3]))  # slot 0: ranks 0 and 2
    assert [set(head.flatten().tolist()) for head in cache[3]] == [{1}, {3}]
    with pytest.raises(kv.PoolError, match=r"slot 1 is incomplete: rank\(s\) 3 "):
        reader.load([1], [3])  # slot 1: ranks 1 and 3


def test_private_records_hold_every_ranks_slice_side_by_side_and_nobody_touches_anothers() -> None:
    pool = kv.HostPool(2)
    ranks = connectors(pool, 2)
    slices = pool.rows[1, :PAGE].view(2, PAGE // 2)
    finish(ranks[0][0], ranks[0][0].store([0], [1]))
    assert [set(part.tolist()) for part in slices] == [{1}, {0}]
    finish(ranks[1][0], ranks[1][0].store([0], [1]))
    assert [set(part.tolist()) for part in slices] == [{1}, {2}]
    ranks[0][1].fill_(9)
    finish(ranks[0][0], ranks[0][0].store([0], [1]))
    assert [set(part.tolist()) for part in slices] == [{9}, {2}]
    assert not pool.rows[0].any()


def test_a_rank_loads_its_own_private_slice_without_waiting_for_others() -> None:
    pool = kv.HostPool(1)
    ranks = connectors(pool, 2)
    finish(ranks[0][0], ranks[0][0].store([0], [0]))
    finish(ranks[0][0], ranks[0][0].load([0], [2]))
    with pytest.raises(kv.PoolError, match=r"incomplete: rank\(s\) 1 "):
        ranks[1][0].load([0], [2])


def test_a_job_that_no_plugin_takes_leaves_the_pool_as_it_was() -> None:
    pool = kv.HostPool(2)
    installed = kv.load_plugins(kv.select(names=(), environ={}))
    ((connector, cache),) = connectors(pool, 1, installed, canonical=True)
    ((helpless, _),) = connectors(pool, 1, installed.without("host-copy", "not here"))
    ((same, _),) = connectors(pool, 1, installed.without("host-copy", "not here"), canonical=True)
    finish(connector, connector.store([0], [0]))
    for submit in (
        lambda: helpless.store([0], [0]),  # of another format
        lambda: same.store([0], [0]),
        lambda: same.store([0, 1], [0, 1]),
        lambda: same.load([0], [1]),
    ):
        with pytest.raises(kv.NoTransferError, match=r"no transfer plugin takes a .* on 'cpu'"):
            submit()
    assert pool.holds(1) is None
    assert same.poll() == []
    finish(connector, connector.load([0], [3]))  # what was stored first is still there
    assert set(cache[3].flatten().tolist()) == {1}
    finish(connector, connector.store([0, 1], [0, 1]))  # and nobody is busy
