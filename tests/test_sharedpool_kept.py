"""A shared pool that is kept: made, joined, left, and taken over by the next engine.

Processes are real ones, which come, are killed, and find what others left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpolicy as kv
from kvpolicy import owners, sharedfile, sharedterms
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology
from kvpolicy.sharedfile import PREFIX
from kvpolicy.sharedheader import MAGIC, MAKING, MAX_CONTENTS_BYTES, VERSION

FORMAT = GroupFormat(fields={"dtype": "bfloat16"})
ONE_RANK = Topology(grid=kv.ParallelGrid(), stages=(1,))
CONTENTS = {"model": "m", "blocks_per_chunk": 1, "sharp": True, "revision": None}
SIZES = {"num_slots": 4, "record_bytes": 100, "keep": True, "contents": CONTENTS}
BOOT = bytes(15) + b"x"

PRELUDE = f"""
import os, signal, sys, time
import kvpolicy as kv
from kvpolicy import owners, sharedfile
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology

FORMAT = GroupFormat(fields={{"dtype": "bfloat16"}})
ONE_RANK = Topology(grid=kv.ParallelGrid(), stages=(1,))
everyone = lambda slot: frozenset({{0}})

def say(*words):
    print(*words, flush=True)

def hear():
    return sys.stdin.readline().strip()

def make(nonce="A"):
    return kv.SharedHostPool("it", nonce=nonce, directory=sys.argv[1], **{SIZES!r})

def begin(pool, slot, key):
    pool.begin_store([slot], FORMAT, ONE_RANK, 0, everyone, keys={{slot: key}})

def store(pool, slot, key):
    begin(pool, slot, key)
    pool.end_store([slot], 0, frozenset())

"""
HOLDS_ONE = "pool = make()\nstore(pool, 1, b'one')\n"
WAITS = "say('ready'); hear()\n"
ELSEWHERE = "owners._namespace = lambda: 7\n"
REBOOTS = f"owners._boot = lambda: {BOOT!r}\n"


Start = Callable[[str], Any]


@pytest.fixture
def child(processes, tmp_path: Path) -> Start:
    """Another process that has the prelude; the directory is its argument."""
    return lambda code: processes(PRELUDE + code, tmp_path)


@pytest.fixture
def killed(child: Start) -> Start:
    """Runs code in a process that is then killed."""

    def run(code: str) -> Any:
        one = child(code + WAITS)
        assert one.says() == "ready"
        one.kill()
        return one

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it"


@pytest.fixture
def open_pool(tmp_path: Path) -> Iterator[Callable[..., kv.SharedHostPool]]:
    """Opens the pool as another engine; closed in the end."""
    with contextlib.ExitStack() as stack:

        def again(nonce: str = "B", **how: object) -> kv.SharedHostPool:
            pool = make(tmp_path, nonce, **how)
            stack.callback(pool.close)
            return pool

        yield again


def make(directory: Path, nonce: str = "A", **how: object) -> kv.SharedHostPool:
    return kv.SharedHostPool("it", **{**SIZES, "nonce": nonce, "directory": directory, **how})


def everyone(_slot: int) -> frozenset[int]:
    return frozenset({0})


def begin(pool: kv.HostPool, slot: int, key: object) -> None:
    pool.begin_store([slot], FORMAT, ONE_RANK, 0, everyone, keys={slot: key})


def store(pool: kv.HostPool, slot: int, key: object) -> None:
    begin(pool, slot, key)
    pool.end_store([slot], 0, frozenset())


def load(pool: kv.HostPool, slot: int, key: object) -> Callable[[], None]:
    return pool.begin_load([slot], FORMAT, ONE_RANK, everyone, keys={slot: key})


def held(pool: kv.HostPool) -> dict[int, tuple[object, bool]]:
    return {record.slot: (record.key, record.complete) for record in pool.records()}


# Arguments.


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"nonce": None}, "a kept pool needs a nonce"),
        ({"keep": 1}, "SharedHostPool keep is True or False, not 1"),
        ({"name": f"{PREFIX}it"}, f"a kept pool's name does not begin with {PREFIX}"),
        ({"contents": ["model"]}, r"a pool's contents are a mapping, not \['model'\]"),
        ({"contents": {"model": 1.5}}, "map names to a str, an int, .* not 'model' to 1.5"),
        ({"contents": {"model": {}}}, "map names to a str, an int, .* not 'model' to {}"),
        ({"contents": {1: "model"}}, "map names to a str, an int, .* not 1 to 'model'"),
        ({"contents": {"m": "x" * 3_000}}, "at most 3,000 B as JSON, not 3,008; give a digest"),
        ({"contents": {"m": 10**5_000}}, "cannot be written as JSON: Exceeds the limit"),
    ],
)
def test_arguments_that_cannot_be_are_refused(tmp_path: Path, how: dict, words: str) -> None:
    given = {**SIZES, "name": "it", "nonce": "A", "directory": tmp_path, **how}
    with pytest.raises(kv.OptionError, match=words):
        kv.SharedHostPool(**given)
    assert list(tmp_path.iterdir()) == []


def test_contents_fill_their_room_beside_the_longest_nonce(tmp_path: Path) -> None:
    contents = {"m": "x" * (MAX_CONTENTS_BYTES - 8)}
    nonce = "n" * 512
    with make(tmp_path, nonce, contents=contents) as pool:
        store(pool, 3, "k")
        with make(tmp_path, nonce, contents=contents) as other:
            assert held(other) == {3: ("k", True)}
    with make(tmp_path, "B", contents=contents) as pool:
        assert held(pool) == {3: ("k", True)}


# One engine after another.


def test_it_is_made_joined_left_and_taken_over(tmp_path: Path, path: Path) -> None:
    with make(tmp_path) as pool:
        assert (pool.opened, pool.dropped, pool.path) == ("made", "", path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert pool.records() == []
        store(pool, 1, b"one")
        pool.rows[1] = 7
        with make(tmp_path) as other:
            assert (other.opened, other.dropped) == ("joined", "")
            assert held(other) == {1: (b"one", True)}
    assert path.exists()
    with make(tmp_path, "B") as pool:
        assert (pool.opened, pool.dropped) == ("reopened", "")
        assert held(pool) == {1: (b"one", True)}
        assert pool.rows[1].tolist() == [7] * 128
        load(pool, 1, b"one")()
        store(pool, 2, b"two")
        with make(tmp_path, "B") as other:
            assert other.opened == "joined"
    with make(tmp_path) as pool:  # the first nonce may come again
        assert pool.opened == "reopened"
        assert held(pool) == {1: (b"one", True), 2: (b"two", True)}
    assert [entry.name for entry in tmp_path.iterdir()] == ["it"]


def test_a_pool_that_nobody_closed_is_left_in_order_with_its_process(
    child: Start, path: Path, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    one = child(REBOOTS + HOLDS_ONE + "say('stored')")
    assert one.says() == "stored"
    one.ends()
    assert held(open_pool()) == {1: (b"one", True)}  # though the machine was restarted since


def test_an_address_joins_and_neither_makes_nor_takes_over(tmp_path: Path, path: Path) -> None:
    with make(tmp_path) as pool:
        address = pickle.loads(pickle.dumps(pool.address()))
        assert (address.keep, dict(address.contents)) == (True, CONTENTS)
        assert address == pool.address()
        assert hash(address) == hash(pool.address())
        store(pool, 1, b"one")
        for joining in (address.open(), pickle.loads(pickle.dumps(pool))):
            with joining:
                assert (joining.opened, joining.path) == ("joined", path)
                assert held(joining) == {1: (b"one", True)}
    before = path.read_bytes()
    with pytest.raises(kv.PoolError, match=r"nobody has the pool .* open any more, .* keep=T"):
        address.open()
    assert path.read_bytes() == before
    path.write_bytes(b"")
    with pytest.raises(kv.PoolError, match="nobody has the pool"):
        address.open()
    assert path.read_bytes() == b""
    path.unlink()
    with pytest.raises(kv.PoolError, match="there is no pool"):
        address.open()
    assert not path.exists()


def test_while_one_engine_has_it_another_is_told_by_whom(
    child: Start, path: Path, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    one = child(HOLDS_ONE + WAITS)
    assert one.says() == "ready"
    before = path.read_bytes()
    words = rf"in use by another engine \(process {one.process.pid}\), .* give this engine another"
    for how in ({}, {"contents": {}}, {"num_slots": 3}):
        with pytest.raises(kv.PoolError, match=words):
            open_pool(**how)
    assert path.read_bytes() == before
    assert open_pool("A").opened == "joined"
    one.kill()
    with pytest.raises(kv.PoolError, match=rf"in use .* \(process {os.getpid()}\)"):
        open_pool()  # now by this one


def test_a_rank_that_stays_keeps_other_engines_out(
    child: Start, tmp_path: Path, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    with make(tmp_path):
        one = child("pool = make(); say(pool.opened); hear()")
        assert one.says() == "joined"
    with pytest.raises(kv.PoolError, match=rf"in use .* \(process {one.process.pid}\)"):
        open_pool()
    one.tell("end")
    one.ends()
    assert open_pool().opened == "reopened"


# What is refused stays as it was.


REFUSALS: list[tuple[dict[str, object], list[tuple[str, str, str]]]] = [
    ({"num_slots": 5}, [("num_slots", "4", "5")]),
    ({"record_bytes": 99}, [("record_bytes", "100", "99")]),
    ({"alignment": 32}, [("alignment", "64", "32")]),
    ({"max_ranks": 8}, [("max_ranks", "256", "8")]),
    ({"contents": {**CONTENTS, "model": "n"}}, [("contents.model", "'m'", "'n'")]),
    ({"contents": {**CONTENTS, "sharp": 1}}, [("contents.sharp", "True", "1")]),
    ({"contents": {**CONTENTS, "hash": None}}, [("contents.hash", "nothing", "None")]),
    (
        {"num_slots": 2, "contents": {"model": "m", "blocks_per_chunk": 2, "revision": "main"}},
        [
            ("num_slots", "4", "2"),
            ("contents.blocks_per_chunk", "1", "2"),
            ("contents.revision", "None", "'main'"),
            ("contents.sharp", "True", "nothing"),
        ],
    ),
]


@pytest.mark.parametrize("somebody_has_it", [False, True])
@pytest.mark.parametrize(("how", "fields"), REFUSALS)
def test_other_sizes_or_contents_are_refused_field_by_field(
    tmp_path: Path, path: Path, how: dict, fields: list, somebody_has_it: bool
) -> None:
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(make(tmp_path))
        store(pool, 1, b"one")
        if not somebody_has_it:
            pool.close()
        before = path.read_bytes(), path.stat().st_mtime_ns
        with pytest.raises(kv.PoolError) as refused:
            make(tmp_path, "A" if somebody_has_it else "B", **how)
        words = [f"{field} (the pool's {one}, this process's {two})" for field, one, two in fields]
        assert str(refused.value) == (
            f"the pool {path} is another one; it differs in {', '.join(words)}; give this engine "
            "another file, or remove that one"
        )
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_long_contents_that_differ_at_their_end_differ(tmp_path: Path) -> None:
    with (
        make(tmp_path, contents={"m": "x" * 1_000 + "1"}),
        pytest.raises(kv.PoolError, match=r"contents\.m \(the pool's 'xxx"),
    ):
        make(tmp_path, contents={"m": "x" * 1_000 + "2"})


def test_contents_of_a_pool_that_is_not_kept_are_compared_too(tmp_path: Path) -> None:
    how = {"keep": False, "directory": tmp_path, "num_slots": 4, "record_bytes": 100}
    with kv.SharedHostPool("it", **how, contents={"a": 1}) as pool:
        assert pool.opened == "made"
        with kv.SharedHostPool("it", **how, contents={"a": 1}) as other:
            assert other.opened == "joined"
        with pytest.raises(kv.PoolError, match=r"contents\.a .*; give each engine's pool a name"):
            kv.SharedHostPool("it", **how, contents={"a": 2})
    with kv.SharedHostPool("it", **how, contents={"a": 2}) as pool:
        assert pool.opened == "made"


@pytest.mark.parametrize(
    "there",
    [b"precious", bytes(2**16), MAGIC, MAGIC + bytes(4_000), MAGIC[:7], b"\n" + MAKING],
    ids=repr,
)
def test_a_file_that_is_no_pool_is_never_overwritten(
    tmp_path: Path, path: Path, there: bytes
) -> None:
    path.write_bytes(there)
    with pytest.raises(kv.PoolError, match="is no pool, and is left as it is; choose another name"):
        make(tmp_path)
    assert path.read_bytes() == there


def test_a_link_and_a_folder_are_no_pools(tmp_path: Path, path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(kv.PoolError, match="cannot open the pool"):
        make(tmp_path)
    assert (tmp_path / "target").read_text() == "precious"
    path.unlink()
    path.mkdir()
    with pytest.raises(kv.PoolError, match="cannot open the pool"):
        make(tmp_path)


def test_a_pool_of_another_version_is_left_alone(tmp_path: Path, path: Path) -> None:
    make(tmp_path).close()
    raw = bytearray(path.read_bytes())
    raw[8] = VERSION + 1
    path.write_bytes(raw)
    with pytest.raises(kv.PoolError) as refused:
        make(tmp_path, num_slots=5)
    assert (
        f"differs in version (the pool's {VERSION + 1}, this process's {VERSION}); give this "
        "engine another file, or remove that one" in str(refused.value)
    )
    assert path.read_bytes() == raw


def test_a_pool_that_was_cut_short_is_refused(tmp_path: Path, path: Path) -> None:
    make(tmp_path).close()
    os.truncate(path, path.stat().st_size - 1)
    before = path.read_bytes()
    words = r"has [\d,]+ B and not the [\d,]+ B with which it was made; remove it"
    with pytest.raises(kv.PoolError, match=words):
        make(tmp_path)
    assert path.read_bytes() == before


def test_it_is_never_swept(tmp_path: Path, path: Path, killed: Start) -> None:
    killed(HOLDS_ONE)
    with kv.SharedHostPool("other", 4, 100, directory=tmp_path):  # making one sweeps too
        assert kv.SharedHostPool.sweep(tmp_path) == []
    assert path.exists()


# Makers that die.


@pytest.mark.parametrize("left", [b"", MAKING, MAKING + bytes(2**16)], ids=repr)
def test_a_file_that_its_maker_never_finished_is_made_anew(
    tmp_path: Path, path: Path, left: bytes
) -> None:
    path.write_bytes(left)
    inode = path.stat().st_ino
    with make(tmp_path) as pool:
        assert pool.opened == "made"
        assert pool.records() == []
        store(pool, 0, "k")
    assert path.stat().st_ino == inode
    with make(tmp_path, "B") as pool:
        assert (pool.opened, held(pool)) == ("reopened", {0: ("k", True)})


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_maker_that_is_killed_leaves_no_pool(
    tmp_path: Path, path: Path, child: Start, call: str
) -> None:
    one = child(
        f"real, calls = os.{call}, []\n"
        "def stop(*given):\n"
        "    real(*given)\n"
        "    calls.append(given)\n"
        f"    if '{call}' != 'fsync' or len(calls) == 2:\n"
        "        say('half'); time.sleep(60)\n"
        f"os.{call} = stop\n"
        "make()\n"
    )
    assert one.says() == "half"
    one.kill()
    assert path.read_bytes().startswith(MAKING)
    with make(tmp_path, "B") as pool:
        assert (pool.opened, pool.records()) == ("made", [])


def test_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, at: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvpolicy.sharedfile.os.posix_fallocate", full)
    with pytest.raises(kv.PoolError, match="has no room for a pool"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_cannot_be_mapped_is_kept_if_it_was_there(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("kvpolicy.sharedfile.mmap.mmap", refuse)
        with pytest.raises(kv.PoolError, match="cannot map the pool"):
            make(tmp_path)
    assert not path.exists()
    with make(tmp_path) as pool:
        store(pool, 1, b"one")
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("kvpolicy.sharedfile.mmap.mmap", refuse)
        with pytest.raises(kv.PoolError, match="cannot map the pool"):
            make(tmp_path)
    assert path.read_bytes() == before


# Owners that are killed.


def test_of_a_killed_engine_what_was_whole_counts(
    killed: Start, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    killed(
        HOLDS_ONE + "store(pool, 0, b'zero')\n"
        "begin(pool, 0, b'other')\n"
        "begin(pool, 2, b'two')\n"
        "pool.begin_load([1], FORMAT, ONE_RANK, everyone)\n"
        "pool.begin_store([3], FORMAT, ONE_RANK, 0, everyone)\n"
    )
    pool = open_pool()
    assert (pool.opened, pool.dropped) == ("reopened", "")
    assert held(pool) == {1: (b"one", True)}
    assert not pool.is_busy(range(4))
    for slot in (0, 2, 3):
        with pytest.raises(kv.PoolError, match=f"slot {slot} holds nothing"):
            pool.begin_load([slot], FORMAT, ONE_RANK, everyone)
    load(pool, 1, b"one")()
    for slot in range(4):  # and every slot can be stored to again
        store(pool, slot, slot)
    assert held(pool) == {slot: (slot, True) for slot in range(4)}


@pytest.mark.slow
def test_engines_killed_again_and_again_hand_on_whole_records_only(
    child: Start, tmp_path: Path
) -> None:
    """A row is full of the number that its key says, or it is not complete."""
    code = (
        "pool = make(hear())\n"
        "start = max((r.key for r in pool.records()), default=0)\n"
        "for n in range(start + 1, 10**9):\n"
        "    slot = n % 4\n"
        "    begin(pool, slot, n)\n"
        "    pool.rows[slot] = n % 251\n"
        "    pool.end_store([slot], 0, frozenset())\n"
        "    if n % 7 == 0:\n"
        "        pool.forget([slot])\n"
        "    if n == start + 20:\n"
        "        say('on its way')\n"
    )
    ends = [0]
    for number in range(6):
        one = child(code)
        one.tell(f"engine {number}")
        assert one.says() == "on its way"
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(0.01 * number)
        one.kill()
        with make(tmp_path, f"between {number}") as pool:
            assert pool.opened == "reopened"
            found = held(pool)
            assert all(complete for _, complete in found.values())
            for slot, (key, _) in found.items():
                assert set(pool.rows[slot].tolist()) == {key % 251}
                assert key % 4 == slot
            ends.append(max(key for key, _ in found.values()))
            assert ends[-1] > ends[-2]
            # What each seventh store left was forgotten, but for those that were killed just then.
            assert all(key % 7 or key in ends for key, _ in found.values())


CONNECT = """
import torch
spec = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=3, itemsize=1)
geometry = kv.CacheGeometry(layers={"a": spec, "b": spec}, num_blocks=4)

def value(layer, block, head, token, dim):
    return 1 + (97 * layer + 61 * block + 31 * head + 7 * token + dim) % 251

def fill(cache, layer, head_at):
    for block, head, token, dim in torch.cartesian_prod(*map(torch.arange, cache.shape)).tolist():
        cache[block, head, token, dim] = value(layer, block, head + head_at, token, dim)

def connect(tp, rank, pool):
    context = kv.PolicyContext(
        geometry=geometry, grid=kv.ParallelGrid(tp=tp), rank=rank, canonical=True)
    made = kv.Connector(context, (), host=pool)
    caches = {name: torch.zeros(4, 2 // tp, 4, 6, dtype=torch.uint8) for name in ("a", "b")}
    made.register(caches)
    return made, caches
"""


@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_an_engine_of_another_topology_starts_warm(
    child: Start, open_pool: Callable[..., kv.SharedHostPool], ending: str
) -> None:
    names: dict[str, object] = {"kv": kv}
    exec(CONNECT, names)
    record_bytes = 2 * 2 * 4 * 6
    sizes = f"{{**{SIZES!r}, 'record_bytes': {record_bytes}}}"
    code = CONNECT + (
        "rank = int(hear())\n"
        f"pool = kv.SharedHostPool('it', nonce='A', directory=sys.argv[1], **{sizes})\n"
        "made, caches = connect(2, rank, pool)\n"
        "for layer, cache in enumerate(caches.values()):\n"
        "    fill(cache, layer, rank)\n"
        "(result,) = made.wait([made.store([0, 2], [3, 1], keys=[b'A', b'B'])])\n"
        "say(result.ok, pool.opened); hear()\n"
        "if rank == 0:\n"
        "    made.store([1], [2], keys=[b'C']); made.wait()\n"  # rank 1 never stores its part
        "say('end'); hear()\n"
        "made.close(); pool.close()\n"
    )
    ranks = [child(code) for _ in range(2)]
    told = []
    for rank, one in enumerate(ranks):
        one.tell(str(rank))
        told.append(one.says())
    assert told == ["True made", "True joined"]
    for one in ranks:
        one.tell("on")
        assert one.says() == "end"
    for one in ranks:
        if ending == "closed":
            one.tell("end")
            one.ends()
        else:
            one.kill()
    pool = open_pool(record_bytes=record_bytes)
    assert (pool.opened, pool.dropped) == ("reopened", "")
    assert held(pool) == {1: (b"B", True), 2: (b"C", False), 3: (b"A", True)}
    assert {record.topology.grid.tp for record in pool.records()} == {2}
    made, caches = names["connect"](1, 0, pool)
    with made:
        assert {record.format for record in pool.records()} == {*made.formats.values()}
        (result,) = made.wait([made.load([1, 3], [3, 0], keys=[b"B", b"A"])], timeout=60)
        assert result.ok, result
        with pytest.raises(kv.PoolError, match=r"slot 2 is incomplete: rank\(s\) 1 "):
            made.load([2], [1], keys=[b"C"])
    for layer, cache in enumerate(caches.values()):
        wanted = torch.zeros_like(cache)
        for block, came_from in ((3, 2), (0, 0)):
            for head, token, dim in torch.cartesian_prod(*map(torch.arange, (2, 4, 6))).tolist():
                wanted[block, head, token, dim] = names["value"](layer, came_from, head, token, dim)
        assert torch.equal(cache, wanted)


# Restarts of the machine.


def test_after_a_restart_the_records_of_a_killed_engine_do_not_count(
    tmp_path: Path, killed: Start
) -> None:
    killed(REBOOTS + HOLDS_ONE)
    with make(tmp_path, "B") as pool:
        assert pool.opened == "reopened"
        assert pool.dropped.startswith(
            "the machine was restarted, or this copy of it was made, while the pool was open, and "
        )
        assert pool.records() == []
        assert pool.holds(1) is None
        with pytest.raises(kv.PoolError, match="slot 1 holds nothing"):
            load(pool, 1, b"one")
        with make(tmp_path, "B") as other:
            assert (other.opened, other.dropped) == ("joined", "")
        store(pool, 2, b"two")
    with make(tmp_path, "C") as pool:
        assert (pool.dropped, held(pool)) == ("", {2: (b"two", True)})


def test_a_rank_that_left_in_order_does_not_speak_for_one_that_was_killed(
    tmp_path: Path, child: Start, killed: Start
) -> None:
    first = child(REBOOTS + HOLDS_ONE + WAITS + "pool.close()")
    assert first.says() == "ready"
    killed(REBOOTS + "pool = make()\n")
    first.tell("end")  # the last one, so the disk has all of it
    first.ends()
    with make(tmp_path, "B") as pool:
        assert (pool.dropped, held(pool)) == ("", {1: (b"one", True)})
    first = child(REBOOTS + "pool = make('C')\n" + WAITS + "pool.close()")
    assert first.says() == "ready"
    second = child(REBOOTS + "pool = make('C')\n" + WAITS)
    assert second.says() == "ready"
    first.tell("end")  # not the last one
    first.ends()
    second.kill()
    with make(tmp_path, "B") as pool:
        assert pool.dropped.startswith("the machine was restarted")
        assert pool.records() == []


def test_where_the_boot_has_no_name_a_pool_that_was_not_closed_does_not_count(
    tmp_path: Path, killed: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.owners._boot", lambda: bytes(16))
    with make(tmp_path) as pool:
        store(pool, 0, b"zero")
    killed("owners._boot = lambda: bytes(16)\n" + HOLDS_ONE)
    with make(tmp_path, "B") as pool:
        assert pool.dropped.startswith("it was not closed, and the system does not say whether ")
        assert pool.records() == []
        store(pool, 0, b"zero")
    with make(tmp_path, "C") as pool:
        assert (pool.dropped, held(pool)) == ("", {0: (b"zero", True)})


def test_a_copy_of_a_pool_that_was_open_does_not_count(
    tmp_path: Path, path: Path, killed: Start
) -> None:
    """It may have a slot's name from one moment, and its bytes from another."""
    killed(HOLDS_ONE)
    (tmp_path / "copies").mkdir()
    shutil.copy(path, tmp_path / "copies")
    with make(tmp_path / "copies", "B") as pool:
        assert pool.dropped.startswith("the machine was restarted, or this copy of it was made, ")
        assert pool.records() == []
    with make(tmp_path, "C") as pool:  # the pool itself is whole
        assert (pool.dropped, held(pool)) == ("", {1: (b"one", True)})
    shutil.copy(path, tmp_path / "copies")
    with make(tmp_path / "copies", "D") as pool:  # and so is a copy of it once it is closed
        assert (pool.dropped, held(pool)) == ("", {1: (b"one", True)})


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606])
@pytest.mark.parametrize("is_there", ["empty", "closed"])
def test_nobody_else_may_read_what_is_in_it(
    tmp_path: Path, path: Path, mode: int, is_there: str
) -> None:
    path.touch() if is_there == "empty" else make(tmp_path).close()
    path.chmod(mode)
    with make(tmp_path, "B"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_refused_with_that_word(tmp_path: Path, path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(kv.PoolError, match="it is a symbolic link; name the file that it stands"):
        make(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_index_with_flipped_bits_is_read_or_refused_in_words(
    tmp_path: Path, path: Path, data: st.DataObject
) -> None:
    path.unlink(missing_ok=True)
    with make(tmp_path) as pool:
        store(pool, 1, b"one")
        store(pool, 2, b"two")
    raw = bytearray(path.read_bytes())
    texts = sharedterms._TEXTS_AT
    index = st.integers(sharedterms._TERMS_AT, sharedterms._TERMS_AT + 80)
    slots = st.integers(sharedterms._TERMS_END, sharedterms._TERMS_END + 1500)
    places = st.one_of(index, st.integers(texts, texts + 300), slots)
    for at in data.draw(st.lists(places, min_size=1, max_size=4)):
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    refused = ""
    try:
        with make(tmp_path, "B") as pool:
            pool.records()
            for slot in range(4):
                pool.holds(slot)
    except kv.PoolError as error:
        refused = str(error)
    assert not refused or f"the index of the pool {path} is damaged" in refused


@pytest.mark.parametrize("at", [1, 2])
def test_who_dies_while_it_drops_records_leaves_that_to_the_next(
    tmp_path: Path, child: Start, killed: Start, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    killed(REBOOTS + HOLDS_ONE)
    # It dies after its first flush, of the slots, or after the second, which says that it is open.
    one = child(
        "owners._boot = lambda: bytes(15) + b'y'\n"
        "real, calls = sharedfile.PoolFile.flush, []\n"
        "def stop(self, *given):\n"
        "    real(self, *given)\n"
        "    calls.append(given)\n"
        f"    if len(calls) == {at}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "sharedfile.PoolFile.flush = stop\n"
        "make('B')\n"
    )
    one.process.communicate(timeout=60)
    assert one.process.returncode == -9
    monkeypatch.setattr("kvpolicy.owners._boot", lambda: bytes(15) + b"y")
    with make(tmp_path, "C") as pool:
        assert bool(pool.dropped) is (at == 1)
        assert pool.records() == []


class Disk(mmap.mmap):
    """A mapping that tells what it writes to the disk, and can refuse it."""

    told: list[tuple[int, bool, int]]
    refuses = False

    def flush(self, at: int = 0, size: int = 0) -> None:
        if Disk.refuses:
            raise OSError(errno.EIO, "Input/output error")
        is_open = sharedfile.header.open_mark(self) is not None
        entered = sum(1 for n in range(256) if any(self[4096 + 64 * n : 4104 + 64 * n]))
        Disk.told.append((size, is_open, entered))
        super().flush(at, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[Disk]:
    monkeypatch.setattr("kvpolicy.sharedfile.mmap.mmap", Disk)
    monkeypatch.setattr(Disk, "told", [], raising=False)
    monkeypatch.setattr(Disk, "refuses", False)
    return Disk


def test_the_disk_has_all_of_it_before_it_counts_as_closed(
    tmp_path: Path, path: Path, disk: type[Disk]
) -> None:
    pool = make(tmp_path)
    size, start = path.stat().st_size, sharedfile.BODY_AT
    other = make(tmp_path)
    disk.told.clear()
    other.close()
    assert disk.told == []  # the last one does it
    pool.close()
    # First everything, while it is open and entered, and then that it is closed.
    assert disk.told == [(size, True, 1), (start, False, 1)]
    disk.told.clear()
    with make(tmp_path, "B"):
        # That it is open, before anybody is entered or anything else is written.
        assert disk.told == [(start, True, 0)]


def test_pools_that_are_not_kept_are_not_written_to_the_disk(
    tmp_path: Path, disk: type[Disk]
) -> None:
    kv.SharedHostPool("it", 4, 100, directory=tmp_path).close()
    assert disk.told == []


def test_a_disk_that_refuses_is_told_and_the_pool_is_left(
    tmp_path: Path, disk: type[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(tmp_path)
    store(pool, 1, b"one")
    disk.refuses = True
    words = r"cannot be written to its disk \(Input/output error\); .* until the machine restarts"
    with pytest.raises(kv.PoolError, match=words):
        pool.close()
    with pytest.raises(kv.ClosedError):
        pool.records()
    pool.close()  # again does no harm
    with pytest.raises(kv.PoolError, match=words):
        make(tmp_path, "B")
    disk.refuses = False
    with make(tmp_path, "C") as pool:
        assert (pool.opened, pool.dropped, held(pool)) == ("reopened", "", {1: (b"one", True)})
        disk.refuses = True
        with pytest.raises(kv.PoolError, match=words):
            pool.close()
    disk.refuses = False
    monkeypatch.setattr("kvpolicy.owners._boot", lambda: BOOT)
    with make(tmp_path, "D") as pool:
        assert pool.dropped.startswith("the machine was restarted")


# Owners in other containers.


@pytest.mark.parametrize("where", [ELSEWHERE, ELSEWHERE + REBOOTS], ids=["container", "machine"])
def test_an_owner_elsewhere_lives_as_long_as_its_lock(
    child: Start, open_pool: Callable[..., kv.SharedHostPool], where: str
) -> None:
    one = child(where + HOLDS_ONE + "begin(pool, 2, b'two')\n" + WAITS)
    assert one.says() == "ready"
    words = rf"in use by another engine \(process {one.process.pid} of another container\)"
    with pytest.raises(kv.PoolError, match=words):
        open_pool()
    mine = open_pool("A")
    with pytest.raises(kv.PoolError, match="slot 2 is being written"):
        store(mine, 2, b"mine")
    assert len(owners.live_owners(mine._table.file.fd)) == 2
    one.kill()
    assert len(owners.live_owners(mine._table.file.fd)) == 1
    assert held(mine) == {1: (b"one", True)}
    store(mine, 2, b"mine")


def test_a_pool_that_is_not_kept_is_swept_when_its_container_was_killed(
    child: Start, tmp_path: Path
) -> None:
    one = child(
        ELSEWHERE + "pool = kv.SharedHostPool('it', 4, 100, directory=sys.argv[1])\n" + WAITS
    )
    assert one.says() == "ready"
    assert kv.SharedHostPool.sweep(tmp_path) == []
    one.kill()
    assert kv.SharedHostPool.sweep(tmp_path) == ["it"]


def test_programs_that_an_owner_started_do_not_hold_its_lock(
    child: Start, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    one = child(
        ELSEWHERE + HOLDS_ONE + "import subprocess\n"
        "code = 'import os, sys; print(os.getpid(), flush=True); sys.stdin.read()'\n"
        "subprocess.Popen([sys.executable, '-c', code], close_fds=False)\n" + WAITS
    )
    told = {one.says(), one.says()}
    (program,) = told - {"ready"}
    one.kill()
    os.kill(int(program), 0)  # it still runs
    try:
        assert open_pool().opened == "reopened"
    finally:
        os.kill(int(program), 9)


@pytest.mark.parametrize("enters", [False, True])
def test_a_forked_child_holds_its_own_lock_and_not_its_parents(
    child: Start, open_pool: Callable[..., kv.SharedHostPool], enters: bool
) -> None:
    one = child(
        ELSEWHERE + HOLDS_ONE + "begin(pool, 2, b'two')\n"
        "if not os.fork():\n"
        f"    {enters} and pool.is_busy([0])\n"
        "    say(os.getpid()); time.sleep(60); os._exit(0)\n"
        "hear()\n"
    )
    forked = int(one.says())
    one.kill()
    try:
        if enters:
            with pytest.raises(kv.PoolError, match=rf"in use .* \(process {forked} of another"):
                open_pool()
            assert not open_pool("A").is_busy(range(4))  # what its parent stored has failed
        else:
            assert held(open_pool()) == {1: (b"one", True)}
    finally:
        os.kill(forked, 9)


@pytest.mark.parametrize("ending", ["pool.close()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_forked_child_that_comes_when_another_engine_has_it_is_told(
    child: Start, open_pool: Callable[..., kv.SharedHostPool], ending: str
) -> None:
    one = child(
        HOLDS_ONE + "parent, (read, write) = os.getpid(), os.pipe()\n"
        "if not os.fork():\n"
        "    say('forked'); os.read(read, 1)\n"
        "    try:\n        pool.is_busy([0]); say('came in')\n"
        "    except kv.PoolError as error:\n        say(error)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(write, b'x'))\n"
        f"hear()\nif {'kill' in ending}:\n"
        "    if not os.fork():\n"
        "        say(os.getpid()); time.sleep(60); os._exit(0)\n"
        f"    hear()\n{ending}\n"
        "say('left'); time.sleep(60)\n"
    )
    assert one.says() == "forked"
    one.tell("on")
    if "kill" in ending:
        helper = int(one.says())
        one.tell("on")
        one.process.wait(60)
    else:
        assert one.says() == "left"
        helper = one.process.pid
    pool = open_pool()
    assert held(pool) == {1: (b"one", True)}
    os.kill(helper, 10)
    assert "is gone: its last process has left it" in one.says()
    assert held(pool) == {1: (b"one", True)}
    os.kill(helper, 9)


def test_a_forked_child_goes_on_where_its_parent_was_killed(
    child: Start, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    one = child(
        HOLDS_ONE + "read, write = os.pipe()\n"
        "if not os.fork():\n"
        "    os.close(write); os.read(read, 1)\n"  # which ends with the parent
        "    store(pool, 2, b'two'); say(os.getpid(), len(pool.records()))\n"
        "    time.sleep(60); os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    forked, count = one.says().split()
    try:
        assert count == "2"
        one.process.wait(60)  # its files are closed a moment before it has ended
        with pytest.raises(kv.PoolError, match=rf"in use .* \(process {forked}\)"):
            open_pool()
    finally:
        os.kill(int(forked), 9)


def test_where_there_are_no_such_locks_an_owner_elsewhere_counts_as_alive(
    tmp_path: Path, killed: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(ELSEWHERE + HOLDS_ONE)
    real = fcntl.fcntl

    def refuse(fd: int, command: int, given: object = 0) -> object:
        if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, given)

    with monkeypatch.context() as patched:
        patched.setattr(owners.fcntl, "fcntl", refuse)
        with pytest.raises(kv.PoolError, match=r"in use by another engine .* of another container"):
            make(tmp_path, "B")
        with kv.SharedHostPool("other", 4, 100, directory=tmp_path) as pool:  # and all else works
            store(pool, 1, "k")
            with pool.address().open() as other:
                load(other, 1, "k")()
    with make(tmp_path, "B") as pool:
        assert held(pool) == {1: (b"one", True)}


def test_a_number_whose_lock_somebody_still_has_is_not_given_away(
    tmp_path: Path, path: Path
) -> None:
    make(tmp_path).close()
    with path.open("r+b") as file:
        assert owners.lock_byte(file.fileno(), 4096)
        with make(tmp_path) as pool:
            assert pool._table.owner == 1
            assert owners.is_byte_locked(file.fileno(), 4096 + 64)
            assert not owners.lock_byte(file.fileno(), 4096 + 64)
            childs = os.dup(pool._table.file.fd)
        assert not owners.is_byte_locked(file.fileno(), 4096 + 64)
        os.close(childs)


def test_a_lock_that_fails_otherwise_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(owners.fcntl, "fcntl", refuse)
    with pytest.raises(kv.PoolError, match=r"cannot open the pool .*: No locks available"):
        make(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


# Forgetting, across processes.


def test_everyone_sees_that_a_record_was_forgotten(
    child: Start, tmp_path: Path, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    one = child(
        HOLDS_ONE + "begin(pool, 2, b'two')\n"
        "end = pool.begin_load([1], FORMAT, ONE_RANK, everyone)\n" + WAITS + "end()\n"
        "pool.end_store([2], 0, frozenset())\n"
        "say(pool.records(), pool.is_busy(range(4))); hear(); pool.close()"
    )
    assert one.says() == "ready"
    pool = open_pool("A")
    assert held(pool) == {1: (b"one", True), 2: (b"two", False)}
    pool.forget()
    assert held(pool) == {}
    for slot in (1, 2):
        with pytest.raises(kv.PoolError, match=f"slot {slot} holds nothing"):
            pool.begin_load([slot], FORMAT, ONE_RANK, everyone)
    with pytest.raises(kv.PoolError, match="slot 1 is being read by 1 pending load"):
        store(pool, 1, b"new")
    for key in (b"two", b"new"):
        with pytest.raises(kv.PoolError, match="slot 2 is being written by a store"):
            store(pool, 2, key)
    one.tell("end both")
    assert one.says() == "[] False"
    store(pool, 1, b"new")
    assert held(pool) == {1: (b"new", True)}
    one.tell("close")
    one.ends()
    pool.forget([1, 1])
    pool.close()
    with make(tmp_path, "B") as next_one:
        assert next_one.records() == []


def test_a_killed_store_of_a_forgotten_record_ends_too(
    child: Start, open_pool: Callable[..., kv.SharedHostPool]
) -> None:
    one = child(HOLDS_ONE + "begin(pool, 1, b'one')\n" + WAITS)
    assert one.says() == "ready"
    pool = open_pool("A")
    pool.forget([1])
    assert pool.is_busy([1])
    one.kill()
    assert not pool.is_busy([1])
    assert held(pool) == {}
    store(pool, 1, b"one")
    assert held(pool) == {1: (b"one", True)}
