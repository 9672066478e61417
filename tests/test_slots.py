"""The rules of slots, over every table that keeps them: what is listed, and what is forgotten.

A small model of named records, which shares no code with the rules, says what must come of any
sequence of stores, loads and forgetting by two owners.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpolicy as kv
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology
from kvpolicy.sharedterms import StoredKey

FORMAT = GroupFormat(fields={"dtype": "bfloat16"})
OTHER = GroupFormat(fields={"dtype": "float16"})
TWO_RANKS = Topology(grid=kv.ParallelGrid(tp=2), stages=(1,))
FOUR_RANKS = Topology(grid=kv.ParallelGrid(tp=4), stages=(2,))
BOTH = frozenset({0, 1})
SLOTS = range(3)
KEYS = (b"one", b"two")
End = Callable[[], None]


def everyone(_slot: int) -> frozenset[int]:
    return BOTH


@pytest.fixture(params=["of one process", "shared", "kept"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kv.HostPool]:
    if request.param == "of one process":
        yield kv.HostPool(4, record_bytes=8)
        return
    kept = request.param == "kept"
    shared = kv.SharedHostPool("it", 4, 8, nonce="A", keep=kept, directory=tmp_path)
    yield shared
    del shared  # some tests end with slots in use


def begin(pool: kv.HostPool, rank: int, slots: list[int], key: object = None, **how: object) -> End:
    keys = None if key is None else dict.fromkeys(slots, key)
    what = {"fmt": FORMAT, "topology": TWO_RANKS, "writers": everyone, **how}
    return pool.begin_store(slots, rank=rank, keys=keys, **what)


def store(
    pool: kv.HostPool, rank: int, slots: list[int], key: object = None, **how: object
) -> None:
    begin(pool, rank, slots, key, **how)
    pool.end_store(slots, rank, frozenset())


def load(pool: kv.HostPool, slots: list[int], key: object = None) -> End:
    keys = None if key is None else dict.fromkeys(slots, key)
    return pool.begin_load(slots, FORMAT, TWO_RANKS, everyone, keys=keys)


def held(pool: kv.HostPool) -> list[tuple[int, object, bool]]:
    return [(record.slot, record.key, record.complete) for record in pool.records()]


# What is listed.


def test_a_record_says_what_it_is(pool: kv.HostPool) -> None:
    assert pool.records() == []
    store(pool, 0, [2], b"key")
    store(pool, 1, [0], "other", fmt=OTHER, topology=FOUR_RANKS, writers=lambda _: frozenset({1}))
    assert pool.records() == [
        kv.StoredRecord(slot=0, key="other", format=OTHER, topology=FOUR_RANKS, complete=True),
        kv.StoredRecord(slot=2, key=b"key", format=FORMAT, topology=TWO_RANKS, complete=False),
    ]
    assert pool.records()[0].format.fields == {"dtype": "float16"}
    store(pool, 1, [2], b"key")
    assert held(pool) == [(0, "other", True), (2, b"key", True)]


def test_what_a_load_would_not_find_is_not_listed(pool: kv.HostPool) -> None:
    begin(pool, 0, [0, 1, 2], b"key")
    assert held(pool) == [(slot, b"key", False) for slot in (0, 1, 2)]
    pool.end_store([0, 1, 2], 0, frozenset({1}))
    assert held(pool) == [(0, b"key", False), (2, b"key", False)]
    store(pool, 0, [3])  # a record without a key ...
    begin(pool, 1, [3])
    pool.end_store([3], 1, frozenset({3}))  # ... is given up as a whole
    assert held(pool) == [(0, b"key", False), (2, b"key", False)]
    begin(pool, 0, [3])
    assert held(pool)[-1] == (3, None, False)


def test_a_record_that_is_stored_again_is_whole_when_that_has_ended(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [1], b"key")
    end = load(pool, [1])
    assert held(pool) == [(1, b"key", True)]  # it is being read
    end()
    begin(pool, 0, [1], b"key")
    assert held(pool) == [(1, b"key", False)]
    pool.end_store([1], 0, frozenset())
    assert held(pool) == [(1, b"key", True)]


def test_each_slot_has_writers_of_its_own(pool: kv.HostPool) -> None:
    def elected(slot: int) -> frozenset[int]:
        return frozenset({slot % 2, 3})

    store(pool, 3, [0, 1], b"key", writers=elected, topology=FOUR_RANKS)
    store(pool, 1, [0, 1], b"key", writers=elected, topology=FOUR_RANKS)
    assert held(pool) == [(0, b"key", False), (1, b"key", True)]


def test_a_writer_that_the_pool_has_no_place_for_is_never_there(tmp_path: Path) -> None:
    for max_ranks, last in ((2, 2), (2, 63), (2, 64), (256, 300)):
        with kv.SharedHostPool(f"m{last}", 1, 8, directory=tmp_path, max_ranks=max_ranks) as pool:
            store(pool, 0, [0], b"key", writers=lambda _: frozenset({0, last}))  # noqa: B023
            assert held(pool) == [(0, b"key", False)]


@pytest.mark.parametrize(
    "key", [b"", "", 0, -(2**70), (), ((), (b"",)), ("a", b"\xff", 7, ("é\udcff",)), b"x" * 40]
)
def test_a_short_key_is_given_back(pool: kv.HostPool, key: object) -> None:
    store(pool, 0, [1], key)
    ((_, found, _),) = held(pool)
    assert found == key
    assert type(found) is type(key)


def test_a_long_key_is_known_by_its_digest(tmp_path: Path) -> None:
    with kv.SharedHostPool("it", 3, 8, directory=tmp_path) as pool:
        store(pool, 0, [0], "x" * 60)
        store(pool, 0, [1], "x" * 61)
        begin(pool, 0, [2], "x" * 61)
        whole, stored, storing = (record.key for record in pool.records())
        assert whole == "x" * 60
        assert isinstance(stored, StoredKey)
        assert stored == storing
        assert repr(stored).startswith("(sha256 ")
        pool.end_store([2], 0, frozenset())


def test_busy_slots_and_idle_ones_are_listed_in_order(pool: kv.HostPool) -> None:
    for slot in (3, 1, 0, 2):
        for rank in BOTH:
            store(pool, rank, [slot], slot)
    load(pool, [2])
    begin(pool, 0, [0], 0)
    assert held(pool) == [(0, 0, False), (1, 1, True), (2, 2, True), (3, 3, True)]


# What is forgotten.


@pytest.mark.parametrize("slots", [None, [1], [1, 1], (1, 3), range(4), {1}])
def test_what_is_forgotten_is_as_if_it_was_never_stored(pool: kv.HostPool, slots: object) -> None:
    for rank in BOTH:
        store(pool, rank, [0, 1], b"key")
    assert pool.forget(slots) is None
    gone = {0, 1} if slots is None or 0 in slots else {1}
    assert held(pool) == [(slot, b"key", True) for slot in (0, 1) if slot not in gone]
    for slot in gone:
        assert pool.holds(slot) is None
        with pytest.raises(kv.PoolError, match=f"slot {slot} holds nothing; store to it before"):
            load(pool, [slot])
    store(pool, 0, [1], b"key")
    assert held(pool)[-1] == (1, b"key", False)  # rank 1's old part does not count
    store(pool, 1, [1], b"key")
    load(pool, [1], b"key")()


def test_what_is_being_written_stays_closed_and_ends_as_nothing(pool: kv.HostPool) -> None:
    store(pool, 1, [0], b"key")
    begin(pool, 0, [0], b"key")
    pool.forget([0])
    assert pool.is_busy([0])
    assert held(pool) == []
    for rank, key in ((0, b"key"), (1, b"key"), (1, b"new")):
        with pytest.raises(kv.PoolError, match="slot 0 is being written by a store that has not"):
            begin(pool, rank, [0], key)
    pool.end_store([0], 0, frozenset())
    assert not pool.is_busy([0])
    assert held(pool) == []
    with pytest.raises(kv.PoolError, match="slot 0 holds nothing"):
        load(pool, [0])
    store(pool, 1, [0], b"key")
    assert held(pool) == [(0, b"key", False)]


@pytest.mark.parametrize("key", [b"key", None])
def test_a_forgotten_store_that_fails_leaves_nothing_behind(pool: kv.HostPool, key: object) -> None:
    begin(pool, 0, [0], key)
    pool.forget()
    pool.end_store([0], 0, frozenset({0}))
    for rank in BOTH:
        store(pool, rank, [0], key)
    assert held(pool) == [(0, key, True)]


def test_a_forgotten_store_that_is_undone_brings_nothing_back(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0, 1], b"key")
    undo = begin(pool, 0, [0, 1], b"new")
    pool.forget([0])
    undo()
    assert held(pool) == [(1, b"key", True)]
    assert not pool.is_busy([0, 1])


def test_what_is_being_read_is_read_to_its_end(pool: kv.HostPool) -> None:
    for rank in BOTH:
        store(pool, rank, [0], b"key")
    end = load(pool, [0])
    pool.forget()
    assert pool.is_busy([0])
    with pytest.raises(kv.PoolError, match="slot 0 is being read by 1 pending load"):
        begin(pool, 0, [0], b"new")
    end()
    assert not pool.is_busy([0])
    begin(pool, 0, [0], b"new")


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([4], "slot 4 is out of range; possible: 0 to 3"),
        ([0, -1], "slot -1 is out of range"),
        ([1.0], "slots are a sequence of integers"),
        ([True], "slots are a sequence of integers: True and False are not numbers"),
        (3, "slots are a sequence of integers"),
    ],
)
def test_slots_that_are_none_are_refused(pool: kv.HostPool, slots: object, words: str) -> None:
    for rank in BOTH:
        store(pool, rank, [0], b"key")
    with pytest.raises(kv.BlockIdError, match=words):
        pool.forget(slots)
    assert held(pool) == [(0, b"key", True)]


# Any sequence, against the model.


class Model:
    """Named records of two ranks, one slot."""

    def __init__(self) -> None:
        self.name: bytes | None = None
        self.parts: set[int] = set()
        self.writing: dict[int, bool] = {}  # rank -> whether its record was forgotten meanwhile
        self.loads = 0
        self.changes = 0

    def may_store(self, rank: int, name: bytes) -> bool:
        others = self.writing and (name != self.name or True in self.writing.values())
        return not self.loads and rank not in self.writing and not others

    def begin(self, rank: int, name: bytes) -> Callable[[], None]:
        before, parts = self.name, set(self.parts)
        self.changes += 1
        changes = self.changes
        if name != self.name:
            self.name, self.parts = name, set()
        self.writing[rank] = False

        def undo() -> None:
            del self.writing[rank]
            if self.changes == changes:
                self.name, self.parts = before, self.parts | parts

        return undo

    def end(self, rank: int, ok: bool) -> None:
        if not self.writing.pop(rank):
            self.parts = self.parts | {rank} if ok else self.parts - {rank}

    def forget(self) -> None:
        self.name, self.parts = None, set()
        self.writing = dict.fromkeys(self.writing, True)
        self.changes += 1

    def may_load(self, name: bytes) -> bool:
        return self.name == name and not self.writing and self.parts == {0, 1}

    def listed(self) -> tuple[bytes, bool] | None:
        if self.name is None or not (self.parts or self.writing):
            return None
        return self.name, not self.writing and self.parts == {0, 1}


some_slots = st.sets(st.sampled_from(SLOTS), min_size=1)
steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "end", "end", "fail", "undo", "load", "done", "forget"]),
        st.integers(0, 1),
        some_slots,
        st.sampled_from(KEYS),
        st.integers(0, 9),
    ),
    max_size=40,
)


def run(pools: list[kv.HostPool], plan: list[tuple[str, int, set[int], bytes, int]]) -> None:
    models = {slot: Model() for slot in SLOTS}
    stores: list[tuple[kv.HostPool, int, set[int], End, list[End]]] = []
    loads: list[tuple[set[int], End]] = []
    for step, rank, slots, key, choice in plan:
        pool = pools[choice % len(pools)]
        if step == "store":
            allowed = all(models[slot].may_store(rank, key) for slot in slots)
            with contextlib.nullcontext() if allowed else pytest.raises(kv.PoolError):
                undo = begin(pool, rank, sorted(slots), key)
            if allowed:
                undos = [models[slot].begin(rank, key) for slot in slots]
                stores.append((pool, rank, slots, undo, undos))
        elif step in ("end", "fail", "undo") and stores:
            owner, rank, slots, undo, undos = stores.pop(choice % len(stores))
            if step == "undo":
                undo()
                for one in undos:
                    one()
            else:
                lost = frozenset(slots if step == "fail" else ())
                owner.end_store(slots, rank, lost)
                for slot in slots:
                    models[slot].end(rank, slot not in lost)
        elif step == "load":
            allowed = all(models[slot].may_load(key) for slot in slots)
            with contextlib.nullcontext() if allowed else pytest.raises(kv.PoolError):
                end = load(pool, sorted(slots), key)
            if allowed:
                loads.append((slots, end))
                for slot in slots:
                    models[slot].loads += 1
        elif step == "done" and loads:
            slots, end = loads.pop(choice % len(loads))
            end()
            for slot in slots:
                models[slot].loads -= 1
        elif step == "forget":
            pool.forget(None if choice > 7 else slots)
            for slot in SLOTS if choice > 7 else slots:
                models[slot].forget()
        wanted = [(slot, *told) for slot in SLOTS if (told := models[slot].listed())]
        busy = [bool(model.writing or model.loads) for model in models.values()]
        for one in pools:
            assert held(one) == wanted
            assert [one.is_busy([slot]) for slot in SLOTS] == busy
    for owner, rank, slots, _, _ in stores:
        owner.end_store(slots, rank, frozenset())
    for _, end in loads:
        end()


@given(steps)
def test_any_sequence_in_one_process_comes_to_what_the_model_says(
    plan: list[tuple[str, int, set[int], bytes, int]],
) -> None:
    run([kv.HostPool(len(SLOTS), record_bytes=8)], plan)


@settings(max_examples=60)
@given(steps, st.booleans())
def test_any_sequence_of_two_owners_comes_to_what_the_model_says(
    plan: list[tuple[str, int, set[int], bytes, int]], keep: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pools: list[kv.HostPool] = [
            stack.enter_context(
                kv.SharedHostPool("it", len(SLOTS), 8, nonce="A", keep=keep, directory=folder)
            )
            for _ in range(2)
        ]
        run(pools, plan)
