"""A pool in a file: the next engine starts warm, or says why it does not."""

from __future__ import annotations

import hashlib
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import (
    BLOCK,
    LONG,
    NEEDS_VLLM,
    RECORD_BYTES,
    SHORT,
    TWO_RANKS,
    assert_changed,
    assert_same,
    connector,
    paragraph,
)
from trouble import BEFORE_0_30, other_weights, run, said, told

import kvpolicy

pytestmark = NEEDS_VLLM

OTHER, NO_BLOCK = [3, 300], [9, 20]
TWO = {"in_process": False, "tensor_parallel_size": 2, "environ": TWO_RANKS}
FLOAT32 = {"dtype": "float32"}


def kept_in(file, **extra):
    return connector(canonical_layout=True, pool_file=str(file), **extra)


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def corrupt(file):
    """Puts what the first record of a pool that nobody has open holds into all others."""
    found = kvpolicy.PoolAddress.find(file.name, directory=file.parent, keep=True)
    with kvpolicy.SharedHostPool(
        found.name,
        found.num_slots,
        found.record_bytes,
        nonce="the test",
        directory=found.directory,
        alignment=found.alignment,
        max_ranks=found.max_ranks,
        keep=True,
        contents=found.contents,
    ) as pool:
        held = [record.slot for record in pool.records() if record.complete]
        pool.rows[held[1:]] = pool.rows[held[:1]]
    return len(held)


@pytest.fixture(scope="module")
def stored(models, tmp_path_factory):
    """A file that an engine has left: four blocks of the long prompt, two of the short one."""
    file = tmp_path_factory.mktemp("stored") / "pool"
    steps = [["generate", LONG], ["generate", SHORT], ["generate", NO_BLOCK]]
    _, log = run(models, steps, kept_in(file))
    assert f"shared in {file}" in paragraph(log)
    assert "reopened" not in paragraph(log)
    return file


@pytest.fixture
def file(stored, tmp_path):
    """A copy of it."""
    return shutil.copy(stored, tmp_path / "pool")


def test_engines_of_other_parallel_sizes_start_warm(models, tmp_path, figures):
    """Two ranks, then one, then two again; each hits what the ones before it have stored."""
    file = tmp_path / "pool"
    (long, short), _ = run(models, [["generate", LONG], ["generate", SHORT]], **FLOAT32)

    (first, stored), log = run(
        models, [["generate", LONG], ["counters"]], kept_in(file), **FLOAT32, **TWO
    )
    assert_same(first, long)
    assert stored["kv_offload_store_bytes"] == 4 * 2 * RECORD_BYTES  # float32
    figures(f"two ranks: {told(stored, log)}")

    steps = [["generate", LONG], ["generate", SHORT], ["counters"]]
    (again, other, one), log = run(models, steps, kept_in(file), **FLOAT32)
    assert_same(again + other, long + short)
    assert [again[0]["cached"], other[0]["cached"]] == [4 * BLOCK, 0]
    assert one["kv_offload_load_bytes"] == 4 * 2 * RECORD_BYTES
    assert one["kv_offload_store_bytes"] == 2 * 2 * RECORD_BYTES
    assert "pool file reopened with 4 record(s);" in paragraph(log)
    assert "kvpolicy: 4 of 64 chunks are hits from the start" in log
    figures(f"then one rank: {told(one, log)}")

    steps = [
        *(["generate", SHORT], ["generate", LONG], ["counters"], ["reset"], ["corrupt"]),
        *(["generate", SHORT],),
    ]
    (other, again, two, _, held, spoilt), log = run(models, steps, kept_in(file), **FLOAT32, **TWO)
    assert_same(other + again, short + long)
    assert [other[0]["cached"], again[0]["cached"]] == [2 * BLOCK, 4 * BLOCK]
    assert two["kv_offload_load_bytes"] == 6 * 2 * RECORD_BYTES
    assert "pool file reopened with 6 record(s);" in paragraph(log)
    assert held == 6
    assert spoilt[0]["cached"] == 2 * BLOCK
    assert_changed(spoilt, short)
    figures(f"then two: {told(two, log)}")


def test_what_a_later_engine_loads_are_the_bytes_of_the_file(models, plain, file):
    assert corrupt(file) == 6
    (spoilt,), _ = run(models, [["generate", LONG]], kept_in(file))
    assert spoilt[0]["cached"] == 4 * BLOCK
    assert_changed(spoilt, plain["long"])


def test_other_settings_and_another_model_are_refused_by_name(models, stored, file):
    """Each in one message; what is equal is not named, and the file stays as it is."""
    before = digest(file)
    for config, engine, differing in (
        (
            {"blocks_per_chunk": 2},
            {"environ": {"PYTHONHASHSEED": "1"}},
            ["blocks_per_chunk (the pool's 1, this process's 2)", "hash_seed ("],
        ),
        (
            {},
            {"model": "other-angles"},
            ["model (", "model_config (", "weights ("],
        ),
    ):
        _, log = run(
            models, [["generate", LONG]], kept_in(file, **config), ends_badly=True, **engine
        )
        (line, *_) = said(log, f"the pool {file} is another one")
        named = line.partition("it differs in ")[2]
        assert named.count("contents.") == len(differing)
        for name in differing:
            assert f"contents.{name}" in named
        assert "give this engine another file, or remove that one" in line
        assert digest(file) == before


def test_weights_that_were_replaced_in_place_are_refused(models, file):
    before = digest(file)
    with other_weights(models, "qwen3", "bfloat16"):
        _, log = run(models, [["generate", LONG]], kept_in(file), ends_badly=True)
    (line, *_) = said(log, f"the pool {file} is another one; it differs in contents.weights (")
    assert line.count("contents.") == 1
    assert digest(file) == before


def test_random_weights_are_kept_for_nobody(models, file):
    before = digest(file)
    _, log = run(models, [], kept_in(file), load_format="dummy", ends_badly=True)
    assert said(log, "load_format is 'dummy', whose weights are random, so that no later engine ")
    assert digest(file) == before


def test_a_reset_counts_for_later_engines_too(models, plain, file):
    """And so does what was stored after it: the weights may have been others by then."""
    steps = [["generate", LONG], ["reset", True], ["generate", SHORT]]
    (hit, was_reset, stored), log = run(models, steps, kept_in(file))
    assert hit[0]["cached"] == 4 * BLOCK
    assert (was_reset, stored[0]["cached"]) == (True, 0)
    assert_same(hit, plain["long"])
    assert "kvpolicy: the host pool's records are forgotten, after a reset" in log

    (missed, other), log = run(models, [["generate", LONG], ["generate", SHORT]], kept_in(file))
    assert [missed[0]["cached"], other[0]["cached"]] == [0, 0]
    assert_same(missed + other, plain["long"] + plain["short"])
    assert "pool file reopened with 2 record(s);" in paragraph(log)
    (line, *_) = said(log, "kvpolicy: 0 of 128 chunks are hits from the start; ")
    assert "2 record(s) do not count, since they were stored after a reset" in line


def test_after_a_crash_what_was_stored_counts_and_one_engine_has_the_file(
    models, plain, file, tmp_path
):
    """The second engine that comes while another has the file is refused, and disturbs nobody."""
    steps = [["generate", LONG], ["generate", OTHER], ["generate", NO_BLOCK], ["die", 8]]
    run(models, steps, kept_in(file), ends_badly=True)

    steps = [
        *(["generate", OTHER], ["generate", LONG], ["linger", str(tmp_path)], ["reset"]),
        *(["generate", LONG],),
    ]
    mine = kept_in(file) | {"engine_id": "mine"}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, models, steps, mine)
        while not (tmp_path / "here").exists() and not first.done():
            time.sleep(0.1)
        try:
            _, log = run(models, [["generate", LONG]], kept_in(file), ends_badly=True)
            _, alike = run(models, [["generate", LONG]], mine, ends_badly=True)
        finally:
            (tmp_path / "go").touch()
        (other, long, _, _, again), warm = first.result()
    (line, *_) = said(log, f"the pool {file} is in use by another engine (process ")
    assert "give this engine another file, or wait until that one has ended" in line
    assert said(alike, f"another engine that runs has the pool {file} and the same engine_id, ")

    assert "pool file reopened with 8 record(s);" in paragraph(warm)
    assert [one["cached"] for one in other + long + again] == [2 * BLOCK, *[4 * BLOCK] * 2]
    assert_same(long + again, plain["long"] * 2)
    (plainly,), _ = run(models, [["generate", OTHER]])
    assert_same(other, plainly)


@pytest.mark.skipif(not BEFORE_0_30, reason="vLLM 0.29 and newer have a seed of their own")
def test_hashes_that_no_other_engine_could_make_are_refused(models, file):
    before = digest(file)
    _, log = run(
        models,
        [["generate", LONG]],
        kept_in(file),
        ends_badly=True,
        environ={"PYTHONHASHSEED": None},
    )
    assert "set PYTHONHASHSEED, the same for all of them" in log
    assert digest(file) == before
