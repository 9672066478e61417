"""SharedHostPool: who makes, joins, leaves and removes it, with real processes that come and die.

What holds for the slots of every pool is in test_hostpool.py, which runs over this one too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpolicy as kv
from kvpolicy import sharedterms
from kvpolicy.identity import GroupFormat
from kvpolicy.owners import MAX_OWNERS, Owner, owners_of
from kvpolicy.records import Topology
from kvpolicy.sharedfile import PREFIX
from kvpolicy.sharedheader import VERSION
from kvpolicy.sharedslots import MAX_BUSY
from kvpolicy.sharedterms import stored_key

FORMAT = GroupFormat(fields={"dtype": "bfloat16"})
ONE_RANK = Topology(grid=kv.ParallelGrid(), stages=(1,))
SIZES = {"num_slots": 4, "record_bytes": 100}

PRELUDE = """
import os, pickle, sys, time
import kvpolicy as kv
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology

FORMAT = GroupFormat(fields={"dtype": "bfloat16"})
ONE_RANK = Topology(grid=kv.ParallelGrid(), stages=(1,))
everyone = lambda slot: frozenset({0})
directory = sys.argv[1]

def say(*words):
    print(*words, flush=True)

def hear():
    return sys.stdin.readline().strip()

"""
OPEN = "pool = kv.SharedHostPool('it', 4, 100, directory=directory)\n"


@pytest.fixture
def child(processes, tmp_path: Path) -> Callable[..., Any]:
    """Another process that has the prelude; the directory is its argument."""

    def start(code: str, directory: Path = tmp_path, *, seed: str = "1") -> Any:
        return processes(PRELUDE + code, directory, PYTHONHASHSEED=seed)

    return start


@pytest.fixture(autouse=True)
def _nothing_left_in_memory() -> Iterator[None]:
    def there() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"{PREFIX}test-*")}

    yield
    assert there() == set()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[kv.SharedHostPool]:
    with contextlib.closing(make(tmp_path)) as made:
        yield made


def make(directory: Path, name: str = "it", **how: object) -> kv.SharedHostPool:
    return kv.SharedHostPool(name, **{**SIZES, "directory": directory, **how})


def everyone(_slot: int) -> frozenset[int]:
    return frozenset({0})


def store(pool: kv.HostPool, slot: int, key: object = None, rank: int = 0) -> None:
    keys = None if key is None else {slot: key}
    pool.begin_store([slot], FORMAT, ONE_RANK, rank, everyone, keys=keys)
    pool.end_store([slot], rank, frozenset())


def read(pool: kv.HostPool, slot: int, key: object = None) -> None:
    keys = None if key is None else {slot: key}
    pool.begin_load([slot], FORMAT, ONE_RANK, everyone, keys=keys)()


def files(directory: Path) -> list[str]:
    return sorted(path.name.removeprefix(PREFIX) for path in directory.iterdir())


# One process.


@pytest.mark.parametrize(
    ("record_bytes", "alignment", "row_stride"), [(1, 64, 64), (65, 1, 65), (4097, 4096, 8192)]
)
def test_rows_are_aligned_zeroed_and_hold_a_record(
    tmp_path: Path, record_bytes: int, alignment: int, row_stride: int
) -> None:
    with make(tmp_path, record_bytes=record_bytes, alignment=alignment) as pool:
        assert (pool.record_bytes, pool.row_stride) == (record_bytes, row_stride)
        assert pool.rows.shape == (4, row_stride)
        assert [row.data_ptr() % alignment for row in pool.rows] == [0] * 4
        assert not pool.rows.any()
        assert repr(pool) == f"SharedHostPool('it', num_slots=4, record_bytes={record_bytes})"
        with pytest.raises(kv.PoolError, match="rows hold"):
            pool.join(record_bytes + 1, lambda: None)


def test_by_default_it_lies_in_memory_and_is_gone_with_the_last_that_closes_it() -> None:
    name = f"test-{os.getpid()}"
    with kv.SharedHostPool(name, 2, 8) as pool:
        assert pool.path == Path(f"/dev/shm/{PREFIX}{name}")
        assert pool.path.stat().st_mode & 0o777 == 0o600
        with pool.address().open():
            pass
        assert pool.path.exists()
    assert not pool.path.exists()
    pool.close()  # again does no harm


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_slots": 0}, "SharedHostPool num_slots is a whole number >= 1, not 0"),
        ({"record_bytes": None}, "SharedHostPool record_bytes is a whole number >= 1, not None"),
        ({"alignment": 48}, "SharedHostPool alignment is a power of two, not 48"),
        ({"alignment": 2 * mmap.PAGESIZE}, "alignment is at most a page, "),
        ({"max_ranks": 4_097}, "max_ranks is at most 4,096, not 4,097"),
        ({"name": "../it"}, "a pool's name is up to 128 letters, .* not '../it'"),
        ({"name": ""}, "a pool's name is"),
        ({"name": 3}, "a pool's name is"),
        ({"nonce": ""}, "a nonce is 1 to 512 B of printable text, not ''"),
        ({"nonce": "\udcff"}, "a nonce is 1 to 512 B of printable text"),
        ({"nonce": b"x"}, "a nonce is 1 to 512 B of printable text, not b'x'"),
        ({"nonce": 513 * "x"}, "a nonce is 1 to 512 B of printable text"),
    ],
)
def test_arguments_that_cannot_be_are_refused(tmp_path: Path, how: dict, words: str) -> None:
    with pytest.raises(kv.OptionError, match=words):
        make(tmp_path, **{"name": "it", **how})
    assert files(tmp_path) == []


@pytest.mark.parametrize("directory", ["nowhere", "file/inside"])
def test_a_directory_that_is_none_is_a_pool_error(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        kv.PoolError, match=r"cannot open the pool .*: (No such.*; make the folder|Not a dir)"
    ):
        make(tmp_path / directory)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_slots": 5}, r"num_slots \(the pool's 4, this process's 5\)"),
        ({"record_bytes": 99}, r"record_bytes \(the pool's 100, this process's 99\)"),
        ({"alignment": 32}, r"alignment \(the pool's 64, this process's 32\)"),
        ({"max_ranks": 8}, r"max_ranks \(the pool's 256, this process's 8\)"),
        ({"nonce": "B"}, r"nonce \(the pool's 'A', this process's 'B'\)"),
        ({"nonce": None}, r"nonce \(the pool's 'A', this process's ''\)"),
        ({"num_slots": 5, "nonce": "B"}, r"num_slots .*, nonce .*; give each engine's pool a name"),
    ],
)
def test_who_joins_must_agree(tmp_path: Path, how: dict, words: str) -> None:
    with make(tmp_path, nonce="A") as pool:
        with pytest.raises(kv.PoolError, match=f"is another one; it differs in {words}"):
            make(tmp_path, **{"nonce": "A", **how})
        with make(tmp_path, nonce="A") as other:
            other.rows[2] = 7
            assert pool.rows[2].tolist() == [7] * 128


def test_a_pool_of_another_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / f"{PREFIX}it"
    with make(tmp_path):
        raw = bytearray(path.read_bytes())
        raw[8] = VERSION + 1
        (tmp_path / f"{PREFIX}new").write_bytes(raw)
    words = rf"differs in version \(the pool's {VERSION + 1}, this process's {VERSION}\);"
    with pytest.raises(kv.PoolError, match=words):
        make(tmp_path, "new")
    assert kv.SharedHostPool.sweep(tmp_path) == []
    assert files(tmp_path) == ["new"]


@pytest.mark.parametrize("left", [b"", b"something else", bytes(2**20)])
def test_a_file_that_its_maker_never_finished_is_made_anew(tmp_path: Path, left: bytes) -> None:
    (tmp_path / f"{PREFIX}it").write_bytes(left)
    with make(tmp_path) as pool:
        store(pool, 0)
        read(pool, 0)
    assert files(tmp_path) == []


def test_what_is_no_pool_of_ours_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / f"{PREFIX}it").symlink_to(target)
    with pytest.raises(kv.PoolError, match="cannot open the pool"):
        make(tmp_path)
    (tmp_path / f"{PREFIX}fifo").mkdir()
    with pytest.raises(kv.PoolError, match="cannot open the pool"):
        make(tmp_path, "fifo")
    assert kv.SharedHostPool.sweep(tmp_path) == []
    assert target.read_text() == "precious"


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(tmp_path):
        monkeypatch.setattr("kvpolicy.sharedfile.os.geteuid", lambda: os.getuid() + 1)
        with pytest.raises(kv.PoolError, match="is no pool of this user's; choose another name"):
            make(tmp_path)
        monkeypatch.undo()


def test_no_room_is_an_error_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, at: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvpolicy.sharedfile.os.posix_fallocate", full)
    with pytest.raises(kv.PoolError, match=r"has no room for a pool of 0\.00 GiB \(.* GiB free\)"):
        make(tmp_path)
    assert files(tmp_path) == []
    with pytest.raises(kv.PoolError, match=r"at most .* B of rows, .* lower the number of slots"):
        make(tmp_path, num_slots=2**40)


def test_a_real_limit_of_the_system_is_no_room_either(child: object, tmp_path: Path) -> None:
    told = child(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "try:\n    " + OPEN + "except kv.PoolError as error:\n    say(error)"
    )
    assert "has no room for a pool" in told.says()
    told.ends()
    assert files(tmp_path) == []


def test_closed_it_is_of_no_use_and_with_jobs_under_way_it_stays_open(tmp_path: Path) -> None:
    pool = make(tmp_path)
    rows = pool.rows
    pool.begin_store([1], FORMAT, ONE_RANK, 0, everyone)
    with pytest.raises(
        kv.PoolError, match=r"1 slot\(s\) of the pool .* close the connectors first"
    ):
        pool.close()
    pool.end_store([1], 0, frozenset())
    end = pool.begin_load([1], FORMAT, ONE_RANK, everyone)
    with pytest.raises(kv.PoolError, match="close the connectors first"):
        pool.close()
    end()
    pool.close()
    end()
    pool.end_store([1], 0, frozenset())  # what comes late does no harm
    rows.fill_(3)  # nor does who still looks at the memory
    assert files(tmp_path) == []
    for use in (lambda: pool.rows, lambda: pool.holds(0), lambda: read(pool, 0)):
        with pytest.raises(kv.ClosedError, match="is closed here; open it again"):
            use()


def test_a_pool_that_nobody_closed_goes_with_its_last_reference(tmp_path: Path) -> None:
    pool = make(tmp_path)
    assert files(tmp_path) == ["it"]
    del pool
    assert files(tmp_path) == []


def test_an_address_joins_and_never_makes(tmp_path: Path) -> None:
    with make(tmp_path, nonce="A") as pool:
        address = pickle.loads(pickle.dumps(pool.address()))
        with address.open() as one, pickle.loads(pickle.dumps(pool)) as other:
            one.rows[0, 0], other.rows[0, 1] = 1, 2
            assert pool.rows[0, :2].tolist() == [1, 2]
    with pytest.raises(kv.PoolError, match=r"there is no pool .*; its engine has ended"):
        address.open()
    (tmp_path / f"{PREFIX}it").touch()
    with pytest.raises(kv.PoolError, match="there is no pool"):
        address.open()


# Slots: what is particular to a file.


@pytest.mark.parametrize("key", [1.5, True, None, frozenset(), ("a", None), ("a", (False,))])
def test_a_key_without_stable_bytes_is_refused(pool: kv.SharedHostPool, key: object) -> None:
    with pytest.raises(kv.OptionError, match="a key of a shared pool is a str, bytes, an int"):
        pool.begin_store([0], FORMAT, ONE_RANK, 0, everyone, keys={0: key})
    assert not pool.is_busy([0])


def test_keys_that_differ_are_stored_as_keys_that_differ(pool: kv.SharedHostPool) -> None:
    keys = ["1", b"1", 1, -1, (1,), ("1",), (1, 1), ((1,), 1), ("a", "b"), ("ab",), ("a:1", ""), ()]
    assert len({stored_key(key) for key in keys}) == len(keys)
    store(pool, 0, ("hash", b"\xff", 2**70))
    read(pool, 0, ("hash", b"\xff", 2**70))
    held = re.escape(f"holds record ('hash', b'\\xff', {2**70}), this load wants 'x'")
    with pytest.raises(kv.PoolError, match=held):
        read(pool, 0, "x")
    store(pool, 1, b"y" * 61)  # its encoded form is one byte too long to be kept whole
    read(pool, 1, b"y" * 61)
    with pytest.raises(kv.PoolError, match=r"holds record \(sha256 \w{16}\), .* wants b'y{60}'$"):
        read(pool, 1, b"y" * 60)


def test_two_owners_in_one_process_see_one_another(pool: kv.SharedHostPool) -> None:
    with pool.address().open() as other:
        pool.begin_store([0], FORMAT, ONE_RANK, 0, everyone)
        with pytest.raises(kv.PoolError, match="slot 0 is being written"):
            read(other, 0)
        assert other.is_busy([0])
        other.end_store([0], 0, frozenset())  # not its own
        assert other.is_busy([0])
        pool.end_store([0], 0, frozenset())
        read(other, 0)
        assert other.holds(0) == FORMAT
        assert other.holds(0).fields == FORMAT.fields
        ends = [one.begin_load([0], FORMAT, ONE_RANK, everyone) for one in (pool, other, other)]
        for pending in (3, 2, 1):
            with pytest.raises(kv.PoolError, match=rf"being read by {pending} pending load"):
                store(pool, 0)
            ends.pop()()
        wanted = GroupFormat(fields={"dtype": "float16"})
        with pytest.raises(kv.FormatMismatchError, match="dtype: stored 'bfloat16', wanted 'floa"):
            other.begin_load([0], wanted, ONE_RANK, everyone)


def test_limits_of_the_file_are_errors_that_mark_nothing(
    pool: kv.SharedHostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kv.PoolError, match=r"rank 256 cannot store in a pool made with max_ranks="):
        pool.begin_store([0, 1], FORMAT, ONE_RANK, 256, everyone)
    for rank in range(MAX_BUSY):
        pool.begin_store([0], FORMAT, ONE_RANK, rank, everyone)
    with pytest.raises(kv.PoolError, match=f"slot 0 is in use by {MAX_BUSY} others"):
        pool.begin_store([1, 2, 0], FORMAT, ONE_RANK, MAX_BUSY, everyone)
    assert not pool.is_busy([1, 2, 3])
    for rank in range(MAX_BUSY):
        pool.end_store([0], rank, frozenset())
    monkeypatch.setattr(sharedterms, "_MAX_TERMS", 5)
    for number in range(8):
        other = GroupFormat(fields={"number": number})
        with contextlib.suppress(kv.PoolError):
            pool.begin_store([1, 2], other, ONE_RANK, 0, everyone)
            pool.end_store([1, 2], 0, frozenset())
    with pytest.raises(kv.PoolError, match="has seen too many formats and topologies"):
        pool.begin_store([1, 2], other, ONE_RANK, 0, everyone)
    assert not pool.is_busy([0, 1, 2, 3])
    read(pool, 0)


def test_too_many_owners_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.owners.MAX_OWNERS", 2)
    assert MAX_OWNERS > 2
    with make(tmp_path), make(tmp_path):
        with pytest.raises(kv.PoolError, match="at most 2 owners have a pool open at once"):
            make(tmp_path)
        assert files(tmp_path) == ["it"]


def test_a_slot_whose_change_was_cut_short_is_as_it_was(pool: kv.SharedHostPool) -> None:
    store(pool, 1, "key")
    table = pool._table
    at = table._at(1)
    other = at + 8 + (1 - table.file.map[at]) * table._place
    table.file.map[other : other + table._place] = b"\xff" * table._place
    read(pool, 1, "key")
    with table.locked():
        held = table.file.map[at]
        place = slice(at + 8 + held * table._place, at + 8 + (held + 1) * table._place)
        before = table.file.map[place]
        table.put(1, table.get(1))
        assert table.file.map[place] == before  # what holds is written only when it no longer does
        assert table.file.map[at] == 1 - held
    store(pool, 1, "another")
    read(pool, 1, "another")


def test_of_many_threads_one_gets_a_slot(pool: kv.SharedHostPool) -> None:
    barrier, got = threading.Barrier(8), []

    def contend(owner: kv.SharedHostPool) -> None:
        barrier.wait()
        with contextlib.suppress(kv.PoolError):
            owner.begin_store([0, 1, 2, 3], FORMAT, ONE_RANK, 0, everyone)
            got.append(owner)

    with pool.address().open() as other:
        threads = [threading.Thread(target=contend, args=(one,)) for one in [pool, other] * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        got[0].end_store([0, 1, 2, 3], 0, frozenset())


# Owners.


def test_an_owner_is_its_process_and_not_only_its_id() -> None:
    me = Owner.current()
    assert Owner.unpack(me.pack()) == me
    assert Owner.unpack(bytes(40)) is None
    others = [
        Owner(me.pid, me.started + 1, me.namespace, me.boot),
        Owner(2**22 + 1, me.started, me.namespace, me.boot),
    ]
    # What an id means in another container or boot is not known here; its lock tells.
    elsewhere = [
        Owner(me.pid, me.started, me.namespace + 1, me.boot),
        Owner(me.pid, me.started, me.namespace, bytes(15) + b"x"),
    ]
    for locked in (True, False):
        assert me.is_alive(lambda: locked)  # noqa: B023  asked at once
        assert [other.is_alive(lambda: locked) for other in others] == [False, False]  # noqa: B023
        assert [one.is_alive(lambda: locked) for one in elsewhere] == [locked] * 2  # noqa: B023
    assert [one.is_here() for one in (me, *others, *elsewhere)] == [True] * 3 + [False] * 2


def test_without_proc_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.owners._PROC", tmp_path)
    with pytest.raises(kv.PoolError, match="needs Linux's /proc"):
        make(tmp_path)
    assert files(tmp_path) == []


# Several processes.


@pytest.mark.slow
def test_of_several_makers_one_makes_the_pool_and_the_others_join(
    child: object, tmp_path: Path
) -> None:
    code = (
        "say('ready'); number = int(hear())\n" + OPEN + "pool.rows[number] = number + 1\n"
        "say('open'); hear()\n"
        "say(*pool.rows[:, 0].tolist()); pool.close()"
    )
    children = [child(code) for _ in range(4)]
    for one in children:
        assert one.says() == "ready"
    for number, one in enumerate(children):
        one.tell(str(number))
    for one in children:
        assert one.says() == "open"
    for one in children:
        one.tell("go on")
    for one in children:
        assert one.says() == "1 2 3 4"
        one.ends()
    assert files(tmp_path) == []


@pytest.mark.slow
def test_makers_that_come_and_go_never_meet_a_half_made_pool(child: object, tmp_path: Path) -> None:
    code = (
        "say('ready'); hear()\n"
        "for _ in range(150):\n"
        "    with kv.SharedHostPool('it', 4, 100, directory=directory) as pool:\n"
        "        assert pool.rows.shape == (4, 128)\n"
        "        pool.is_busy([0])\n"
    )
    children = [child(code) for _ in range(3)]
    for one in children:
        one.says()
    for one in children:
        one.tell("go")
    for one in children:
        one.ends()
    assert files(tmp_path) == []


def test_ranks_in_processes_store_and_another_grid_loads(child: object, tmp_path: Path) -> None:
    connect = """
import torch
spec = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=3, itemsize=1)
geometry = kv.CacheGeometry(layers={"l": spec}, num_blocks=4)
def connector(tp, rank, pool):
    context = kv.PolicyContext(
        geometry=geometry, grid=kv.ParallelGrid(tp=tp), rank=rank, canonical=True)
    made = kv.Connector(context, (), host=pool)
    cache = torch.full((4, 2 // tp, 4, 6), rank + 1, dtype=torch.uint8)
    made.register({"l": cache})
    return made, cache
"""
    stores = (
        connect + "rank = int(hear())\n" + OPEN + "made, _ = connector(2, rank, pool)\n"
        "(result,) = made.wait([made.store([0, 2], [3, 1], keys=[b'A', ('B', 1)])])\n"
        "say(result.ok, made.fingerprint); hear(); made.close(); pool.close()"
    )
    children = [child(stores, seed=str(rank)) for rank in range(2)]
    for rank, one in enumerate(children):
        one.tell(str(rank))
    told = {one.says() for one in children}
    assert len(told) == 1
    assert told.pop().startswith("True ")
    names: dict[str, object] = {"kv": kv}
    exec(connect, names)
    with make(tmp_path) as pool:
        made, cache = names["connector"](1, 0, pool)
        with made:
            (result,) = made.wait([made.load([1, 3], [3, 0], keys=[("B", 1), b"A"])], timeout=60)
            assert result.ok
            assert [set(head.flatten().tolist()) for head in cache[3]] == [{1}, {2}]
            with pytest.raises(kv.PoolError, match="this load wants 'A'"):
                made.load([1], [3], keys=["A"])
        for one in children:
            one.tell("end")
            one.ends()
    assert files(tmp_path) == []


def test_what_a_killed_process_was_storing_has_failed(
    child: object, pool: kv.SharedHostPool
) -> None:
    store(pool, 0)
    store(pool, 1, "kept")
    store(pool, 2, "kept", rank=1)
    one = child(
        OPEN + "for slot, key in ((0, None), (1, 'kept'), (2, 'kept')):\n"
        "    keys = {slot: key} if key else None\n"
        "    pool.begin_store([slot], FORMAT, ONE_RANK, 0, everyone, keys=keys)\n"
        "say('storing'); hear()"
    )
    assert one.says() == "storing"
    for slot in range(3):
        with pytest.raises(kv.PoolError, match=f"slot {slot} is being written"):
            read(pool, slot)
    one.kill()
    for slot in range(2):
        with pytest.raises(kv.PoolError, match=f"slot {slot} (holds nothing|is incomplete)"):
            read(pool, slot)
    with pytest.raises(kv.PoolError, match=r"slot 2 is incomplete: rank\(s\) 0 "):
        read(pool, 2)  # rank 1's part of the named record is still there
    assert not pool.is_busy(range(4))
    store(pool, 0)
    read(pool, 0)


def test_a_killed_process_reads_no_more_and_its_number_goes_to_another(
    child: object, pool: kv.SharedHostPool
) -> None:
    store(pool, 0)
    code = OPEN + "pool.begin_load([0], FORMAT, ONE_RANK, everyone)\nsay('loading'); hear()"
    first = child(code)
    assert first.says() == "loading"
    with pytest.raises(kv.PoolError, match=r"slot 0 is being read by 1 pending load"):
        store(pool, 0)
    first.kill()
    second = child(code)
    assert second.says() == "loading"
    with pytest.raises(kv.PoolError, match=r"slot 0 is being read by 1 pending load"):
        store(pool, 0)
    assert len(owners_of(pool._table.file.fd)) == 2
    second.kill()
    store(pool, 0)


def test_a_process_that_is_killed_with_the_lock_gives_it_up(
    child: object, pool: kv.SharedHostPool
) -> None:
    one = child(OPEN + "with pool._table.locked():\n    say('locked'); hear()")
    assert one.says() == "locked"
    one.kill()
    store(pool, 0)
    read(pool, 0)


def test_a_process_killed_again_and_again_while_it_stores_leaves_no_torn_slot(
    child: object, pool: kv.SharedHostPool
) -> None:
    code = OPEN + (
        "say('go')\n"
        "for n in range(10**9):\n"
        "    keys = {slot: n for slot in range(4)}\n"
        "    pool.begin_store(range(4), FORMAT, ONE_RANK, n % 200, everyone, keys=keys)\n"
        "    pool.end_store(range(4), n % 200, frozenset())\n"
    )
    for _ in range(3):
        one = child(code)
        one.says()
        for _ in range(200):
            pool.is_busy(range(4))
        one.kill()
        assert not pool.is_busy(range(4))
        for slot in range(4):
            assert pool.holds(slot) in (None, FORMAT)
            store(pool, slot)
            read(pool, slot)


def test_pools_of_the_dead_are_swept_and_those_of_the_living_kept(
    child: object, tmp_path: Path
) -> None:
    code = "pool = kv.SharedHostPool(hear(), 4, 100, directory=directory)\nsay('open'); hear()"
    children = [child(code) for _ in range(3)]
    for one, name in zip(children, ("a", "b", "c"), strict=True):
        one.tell(name)
        assert one.says() == "open"
    assert kv.SharedHostPool.sweep(tmp_path) == []
    (tmp_path / "somebody-else's").touch()
    children[0].kill()
    assert kv.SharedHostPool.sweep(tmp_path) == ["a"]
    children[1].kill()
    with make(tmp_path, "d") as pool:  # making one sweeps too
        assert files(tmp_path) == ["c", "d", "somebody-else's"]
        children[2].kill()
        with make(tmp_path, "d"):  # joining does not
            assert files(tmp_path) == ["c", "d", "somebody-else's"]
        store(pool, 0)
    with make(tmp_path, "c", nonce="another engine") as fresh:  # nor is a dead one joined
        with pytest.raises(kv.PoolError, match="holds nothing"):
            read(fresh, 0)
        assert files(tmp_path) == ["c", "somebody-else's"]


def test_a_process_that_ends_without_closing_leaves_nothing(child: object, tmp_path: Path) -> None:
    one = child(OPEN + "say('open')")
    assert one.says() == "open"
    one.ends()
    assert files(tmp_path) == []


def test_a_forked_child_is_an_owner_of_its_own(child: object, tmp_path: Path) -> None:
    code = OPEN + (
        "pool.begin_store([0], FORMAT, ONE_RANK, 0, everyone)\n"
        "if not os.fork():\n"
        "    pool.end_store([0], 0, frozenset())\n"  # its parent's, not its own
        "    pool.begin_store([1], FORMAT, ONE_RANK, 0, everyone)\n"
        "    pool.rows[1] = 5\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "say(pool.is_busy([0]), pool.is_busy([1]), int(pool.rows[1, 0]))\n"
        "pool.end_store([0], 0, frozenset())\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    pool.begin_load([0], FORMAT, ONE_RANK, everyone)\n"
        "    say('reads'); time.sleep(60); os._exit(0)\n"
        "hear()\n"
        "say(pool.is_busy([0]))\n"
        "pool.close()\n"
        "say(os.path.exists(pool.path))\n"
        "os.kill(child, 9); os.wait()"
    )
    one = child(code)
    assert one.says() == "True False 5"
    assert one.says() == "reads"
    one.tell("go on")
    assert one.says() == "True"
    assert one.says() == "True"  # the child has it open
    one.ends()
    assert kv.SharedHostPool.sweep(tmp_path) == ["it"]


def test_a_lock_does_not_outlive_its_holder_in_a_forked_child(
    child: object, pool: kv.SharedHostPool
) -> None:
    code = OPEN + (
        "with pool._table.locked():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        say('forked', os.getpid()); time.sleep(60); os._exit(0)\n"
        "    hear()\n"
    )
    one = child(code)
    _, forked = one.says().split()
    one.kill()
    try:
        with pool.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free, and at once
    finally:
        os.kill(int(forked), 9)


def test_a_forked_child_that_comes_after_the_last_has_left_is_told(
    child: object, tmp_path: Path
) -> None:
    code = OPEN + (
        "read, write = os.pipe()\n"
        "if not os.fork():\n"
        "    os.read(read, 1)\n"
        "    try:\n        pool.is_busy([0])\n"
        "    except kv.PoolError as error:\n        say(error)\n"
        "    os._exit(0)\n"
        "pool.close(); os.write(write, b'x'); os.wait()\n"
    )
    one = child(code)
    assert "is gone: its last process has left it" in one.says()
    one.ends()


def test_a_pool_handed_to_another_process_is_joined_there(child: object, tmp_path: Path) -> None:
    with make(tmp_path, nonce="engine 1") as pool:
        pool.rows[3] = 9
        one = child(
            "pool = pickle.loads(bytes.fromhex(hear()))\n"
            "say(repr(pool), int(pool.rows[3, 0]))\npool.rows[3] = 4\npool.close()"
        )
        one.tell(pickle.dumps(pool).hex())
        assert one.says() == "SharedHostPool('it', num_slots=4, record_bytes=100) 9"
        one.ends()
        assert pool.rows[3].tolist() == [4] * 128
        late = child(
            "import json\n"
            "try:\n    kv.SharedHostPool('it', 4, 100, directory=directory, nonce='engine 2')\n"
            "except kv.PoolError as error:\n    say(json.dumps(str(error)))"
        )
        assert "nonce (the pool's 'engine 1', this process's 'engine 2')" in json.loads(late.says())
        late.ends()


def test_huge_pages_are_asked_for_and_not_insisted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("kvpolicy.sharedpool.mmap.MADV_HUGEPAGE")
    with make(tmp_path) as pool:
        assert isinstance(pool.rows, torch.Tensor)


@pytest.mark.parametrize("keep", [False, True])
def test_a_pool_is_found_by_its_name(tmp_path, keep):
    sizes = {"nonce": "an engine", "keep": keep, "contents": {"model": "a"}, "max_ranks": 3}
    with kv.SharedHostPool("found", 4, 100, directory=tmp_path, **sizes) as pool:
        address = kv.PoolAddress.find("found", directory=tmp_path, keep=keep)
        assert address == pool.address()
        with address.open() as other:
            assert other.rows.data_ptr() != pool.rows.data_ptr()
            pool.rows[2, 5] = 7
            assert other.rows[2, 5] == 7
    with pytest.raises(kv.PoolError, match="there is no pool"):
        kv.PoolAddress.find("lost", directory=tmp_path, keep=keep)
    (tmp_path / "text").write_text("no pool" * 1000)
    with pytest.raises(kv.PoolError, match="no pool that this version can read"):
        kv.PoolAddress.find("text", directory=tmp_path, keep=True)


def test_a_pool_without_its_name_goes_with_its_last_process(tmp_path):
    pool = kv.SharedHostPool("hidden", 4, 100, directory=tmp_path)
    address = pool.address()
    other = address.open()
    pool.unlink()
    pool.unlink()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(kv.PoolError, match="there is no pool"):
        address.open()
    other.rows[1, 2] = 9
    assert pool.rows[1, 2] == 9
    with kv.SharedHostPool("hidden", 4, 100, directory=tmp_path) as another:
        assert not another.rows.any()  # the name is free
        pool.close()
        assert another.path.exists()  # and not taken away by the one that had it
    other.rows[1, 3] = 8
    other.close()


def test_a_kept_pool_keeps_its_name(tmp_path):
    sizes = {"directory": tmp_path, "keep": True, "nonce": "an engine"}
    with (
        kv.SharedHostPool("kept", 4, 100, **sizes) as pool,
        pytest.raises(kv.PoolError, match="keeps its name"),
    ):
        pool.unlink()
    assert pool.path.exists()
