"""The command line, in process: exit statuses, JSON, words for people, and bytes verified."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvpolicy.cli import main
from kvpolicy.sharedfile import PREFIX

MODELS = Path(__file__).parent / "models"
QWEN = str(MODELS / "qwen3-30b-a3b.json")
ALL_MODELS = sorted(path.name for path in MODELS.glob("*.json"))


@pytest.fixture
def kvpolicy(capsys):
    """Runs a command: (exit status, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def told(kvpolicy):
    """Runs a command with --json: (exit status, the one object)."""

    def run(*words: object) -> tuple[int, dict]:
        status, out, _ = kvpolicy(*words, "--json")
        return status, json.loads(out)

    return run


@pytest.fixture
def config(tmp_path):
    """Writes a config that is Qwen3-30B-A3B's with changes; None takes a key out."""

    def write(text: str | None = None, **changes: object) -> str:
        path = tmp_path / "config.json"
        if text is None:
            found = json.loads(Path(QWEN).read_text()) | changes
            text = json.dumps({key: value for key, value in found.items() if value is not None})
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a plugin distribution from source text, with real metadata."""

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}_module.py").write_text(source)
        info = tmp_path / f"{name}_dist-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[kvpolicy]\n{name} = {name}_module:plugin\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    for name in [n for n in sys.modules if n.endswith("_module")]:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


# plugins


def test_plugins_lists_the_builtins_in_the_order_in_which_they_are_asked(told):
    status, found = told("plugins", "--plugins", "")
    assert status == 0
    names = [(p["name"], p["priority"]) for p in found["plugins"] if p["status"] == "active"]
    assert names == [
        ("canonical", 100),
        ("cross-layer", 50),
        ("direct", -100),
        ("host-copy", -100),
    ]
    keys = {"name", "distribution", "version", "priority", "hooks", "status", "reason"}
    assert all(set(p) == keys for p in found["plugins"])
    assert found["plugins"][0]["distribution"] == "kvpolicy"


def test_plugins_for_people_names_every_plugin(kvpolicy):
    status, out, _ = kvpolicy("plugins")
    assert status == 0
    for name in ("canonical", "cross-layer", "direct", "host-copy", "transfer"):
        assert name in out


def test_a_broken_plugin_is_listed_with_its_reason_and_strict_makes_it_an_error(told, installed):
    installed("broken", "raise RuntimeError('no driver here')\n")
    status, found = told("plugins")
    (broken,) = [p for p in found["plugins"] if p["name"] == "broken"]
    assert status == 0
    assert broken["status"] == "failed"
    assert broken["distribution"] == "broken-dist"
    assert "no driver here" in broken["reason"]
    status, found = told("plugins", "--strict")
    assert status == 3
    assert found["error"]["code"] == "plugin"
    assert "'broken' (broken-dist 1.2)" in found["error"]["message"]


def test_a_broken_plugin_is_warned_of_where_a_decision_is_explained(kvpolicy, installed):
    installed("broken", "raise RuntimeError('no driver here')\n")
    status, _, err = kvpolicy("explain", QWEN)
    assert status == 0
    assert "warning: plugin 'broken' is out" in err
    assert "no driver here" in err


def test_plugins_does_without_torch():
    code = (
        "import sys, kvpolicy.cli; kvpolicy.cli.main(['plugins', '--json']); "
        "sys.exit(9 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


# explain


def test_c1_the_seed_cross_layer_by_default_and_per_layer_when_canonical(told):
    status, found = told("explain", QWEN, "--tp", 2)
    assert status == 0
    assert found["decision"]["cross_layer_blocks"] is True
    assert found["decision"]["decided_by"] == "cross-layer"
    assert found["decision"]["layout"] == "BLHNC"
    assert found["fragments_per_block"] == 1
    status, found = told("explain", QWEN, "--tp", 2, "--canonical")
    assert status == 0
    assert found["decision"]["cross_layer_blocks"] is False
    assert found["decision"]["decided_by"] == "canonical"
    assert sum(layer["portable"] for layer in found["layers"]) == 48
    # 48 layers x 16 tokens x 4 heads x 2 x 128 elements x 2 B
    assert found["record_bytes"] == 48 * 16 * 4 * 2 * 128 * 2


def test_explain_has_the_promised_keys(told):
    _, found = told("explain", QWEN, "--tp", 2)
    assert {
        "decision",
        "layers",
        "record_bytes",
        "fragments_per_block",
        "format_id",
        "fingerprint",
        "plugins",
        "groups",
    } <= set(found)
    assert set(found["decision"]) == {"cross_layer_blocks", "layout", "decided_by", "votes"}
    assert set(found["decision"]["votes"][0]) == {"plugin", "priority", "answer", "reason"}
    assert {
        "name",
        "kind",
        "local_page_bytes",
        "canonical_page_bytes",
        "portable",
        "fragments_per_block",
        "refusal",
    } <= set(found["layers"][0])
    assert found["engine"] == {
        "name": "simulated",
        "simulated": True,
        "stride_aware": True,
        "layouts": None,
    }


def test_the_fragments_of_the_facts(told):
    """Qwen3-30B-A3B at TP2: NHD 16 x 1 KiB a layer, 768 a block; HND 1 x 16 KiB, 48 a block."""
    _, nhd = told("explain", QWEN, "--tp", 2, "--canonical", "--layout", "nhd")
    _, hnd = told("explain", QWEN, "--tp", 2, "--canonical", "--layout", "LBHNC")
    assert (nhd["layers"][0]["fragments_per_block"], nhd["fragments_per_block"]) == (16, 768)
    assert (hnd["layers"][0]["fragments_per_block"], hnd["fragments_per_block"]) == (1, 48)


def test_c3_a_backend_that_is_not_stride_aware_keeps_layers_apart(told):
    _, found = told("explain", QWEN, "--no-stride-aware")
    assert found["decision"]["cross_layer_blocks"] is False
    assert found["decision"]["decided_by"] is None
    votes = {vote["plugin"]: vote for vote in found["decision"]["votes"]}
    assert votes["cross-layer"]["answer"] is None
    assert "not stride-aware" in votes["cross-layer"]["reason"]


def test_backend_layouts_that_lack_the_slab_keep_layers_apart(told):
    _, found = told("explain", QWEN, "--backend-layouts", "HND,NHD")
    assert found["decision"]["cross_layer_blocks"] is False
    _, found = told("explain", QWEN, "--backend-layouts", "HND,blhnc")
    assert found["decision"]["cross_layer_blocks"] is True


def test_stages_by_hand_are_stages(told):
    _, found = told("explain", QWEN, "--pp-layers", "21,27", "--canonical")
    assert found["grid"]["pp"] == 2
    assert len(found["layers"]) == 48


def test_explain_in_words_says_who_decided_and_what_the_engine_is(kvpolicy):
    status, out, _ = kvpolicy("explain", QWEN, "--tp", 2, "--canonical")
    assert status == 0
    assert "decided by canonical" in out
    assert "48 of 48 layers are portable" in out
    assert "stride-aware, takes all layouts" in out


@pytest.mark.parametrize("canonical", [(), ("--canonical",)], ids=["as-it-lies", "canonical"])
@pytest.mark.parametrize("model", ALL_MODELS)
def test_every_model_is_explained_and_round_tripped(told, model, canonical):
    status, explained = told("explain", MODELS / model, "--tp", 2, *canonical)
    assert status == 0
    load = ("--load-tp", 1) if canonical else ()
    status, found = told("roundtrip", MODELS / model, "--tp", 2, *load, *canonical, "--blocks", 2)
    assert status == 0, found
    assert found["verified"] is True
    assert found["mismatched_bytes"] == found["changed_outside_bytes"] == 0
    assert found["format_id"] == explained["format_id"]
    if canonical:
        # Every block of every group is stored once, whatever the replication.
        assert found["bytes"] == 2 * sum(g["record_bytes"] for g in explained["groups"])


def test_explain_tells_a_layer_s_group_and_spec(told):
    _, found = told("explain", QWEN, "--encoding", "mine")
    assert (found["dtype"], found["encoding"]) == ("bfloat16", "mine")
    layer = found["layers"][0]
    assert layer["group"] == "full"
    assert layer["spec"] == {
        "block_size": 16,
        "total_kv_heads": 4,
        "head_size": 128,
        "itemsize": 2,
        "kv_packing": "packed",
        "v_head_size": 128,
        "scale_bytes": 0,
        "page_padding": 0,
        "kernel_block_size": 16,
    }


# roundtrip


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("layers", [1, 2])
def test_kernel_blocks_are_explained_and_moved_whatever_the_caches_look_like(
    told, config, layers, layout
):
    """One layer is a slab whose page spans two kernel blocks; two layers are kept apart."""
    path = config(num_hidden_layers=layers)
    words = ("--kernel-block-size", 8, "--layout", layout)
    status, found = told("explain", path, *words)
    assert status == 0, found
    assert found["decision"]["cross_layer_blocks"] is (layers == 1)
    status, found = told("roundtrip", path, *words, "--blocks", 3)
    assert status == 0, found
    assert found["verified"] is True
    assert found["bytes"] == 3 * found["record_bytes"] > 0


HYBRID = {
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "full_attn_idxs": [1, 3],
    "conv_dim": 64,
    "conv_L_cache": 3,
    "torch_dtype": "float16",
}


def test_a_group_alone_changes_topology_where_the_whole_model_cannot(told, kvpolicy, config):
    path = config(text=json.dumps(HYBRID))
    words = ("roundtrip", path, "--canonical", "--tp", 2, "--load-tp", 4, "--blocks", 3)
    status, found = told(*words)
    assert status == 3
    assert "recurrent state is kept per rank" in found["error"]["message"]
    assert "--group full leaves it out" in found["error"]["message"]
    status, found = told(*words, "--group", "full")
    assert status == 0
    assert found["verified"] is True
    assert [(g["name"], g["portable"]) for g in found["groups"]] == [("full", True)]
    # 2 layers x 16 tokens x 4 heads x 2 x 16 elements x 2 B
    assert found["record_bytes"] == found["groups"][0]["record_bytes"] == 2 * 16 * 4 * 2 * 16 * 2
    assert found["bytes"] == 3 * found["record_bytes"]
    _, out, _ = kvpolicy(*words, "--group", "full")
    assert "3 of each group (full)" in out
    status, found = told(*words, "--group", "state")
    assert status == 3
    assert "--group" not in found["error"]["message"]


def test_groups_may_be_named_one_by_one(told, config):
    words = ("roundtrip", config(text=json.dumps(HYBRID)), "--canonical", "--blocks", 2)
    _, everything = told(*words)
    _, named = told(*words, "--group", "full", "--group", "state", "--group", "full")
    for key in ("groups", "bytes", "load_bytes", "record_bytes", "format_id", "verified"):
        assert named[key] == everything[key]
    assert [group["name"] for group in named["groups"]] == ["state", "full"]
    _, state = told(*words, "--group", "state")
    assert state["format_id"] != named["format_id"]
    assert 0 < state["bytes"] < named["bytes"]


@pytest.mark.parametrize(("least", "said"), [(3600, "too little to time"), (0, "%")])
def test_a_share_is_told_only_of_a_copy_that_took_its_time(kvpolicy, monkeypatch, least, said):
    monkeypatch.setattr("kvpolicy.cli.roundtrip._LEAST_SECONDS", least)
    _, out, _ = kvpolicy("roundtrip", QWEN, "--blocks", 1)
    for what in ("stored", "loaded"):
        (line,) = [line.rstrip() for line in out.splitlines() if line.startswith(f" {what}")]
        assert line.endswith(said)


@pytest.mark.parametrize(
    "words",
    [
        ("--tp", 2, "--load-tp", 4),
        ("--tp", 8, "--load-tp", 1, "--layout", "NHD"),
        ("--pp", 3, "--load-pp", 1, "--canonical-order", "NHD"),
        ("--pp-layers", "21,27", "--tp", 2, "--load-pp", 4),
        ("--pcp", 2, "--cp-interleave", 4, "--load-pcp", 1, "--load-block-size", 32),
        ("--tp", 8, "--dcp", 2, "--load-tp", 2, "--load-dcp", 1, "--load-block-size", 32),
        ("--kv-packing", "split", "--load-layout", "NHD", "--canonical-order", "HND"),
        ("--kernel-block-size", 8, "--load-tp", 4),
        ("--dtype", "fp8", "--load-tp", 2),
    ],
    ids=lambda words: " ".join(str(word) for word in words),
)
def test_canonical_round_trips_across_grids_and_layouts(told, words):
    status, found = told("roundtrip", QWEN, "--canonical", "--blocks", 3, *words)
    assert status == 0, found
    assert found["verified"] is True
    assert found["load_bytes"] > 0
    assert found["store_ratio"] > 0
    assert found["load_ratio"] > 0


def test_bytes_that_are_not_canonical_do_not_change_topology(told):
    status, found = told("roundtrip", QWEN, "--tp", 2, "--load-tp", 4)
    assert status == 3
    assert found["error"]["code"] == "format-mismatch"
    assert "tp: stored 2, wanted 4" in found["error"]["message"]
    assert "--canonical" in found["error"]["message"]


def test_another_span_is_refused_with_the_block_size_that_fits(told):
    status, found = told("roundtrip", QWEN, "--pcp", 2, "--load-pcp", 1, "--canonical")
    assert status == 3
    assert "tokens: stored 32, wanted 16" in found["error"]["message"]
    assert "--load-block-size 32" in found["error"]["message"]


LIAR = """
import kvpolicy
class Liar:
    priority = 500
    @kvpolicy.hookimpl
    def transfer(self, job):
        if job.direction == "store":
            return None
        return kvpolicy.TransferHandle.finished(
            kvpolicy.TransferResult(job_id=job.job_id, ok=True, bytes=job.bytes, seconds=0.1))
plugin = Liar()
"""
QUITTER = """
import kvpolicy
class Quitter:
    priority = 500
    @kvpolicy.hookimpl
    def transfer(self, job):
        raise OSError("the device is gone")
plugin = Quitter()
"""


def test_a_plugin_that_says_it_copied_and_did_not_is_found_out(told, kvpolicy, installed):
    installed("liar", LIAR)
    status, found = told("roundtrip", QWEN, "--canonical", "--blocks", 2)
    assert status == 1
    assert found["verified"] is False
    assert found["mismatched_bytes"] > 0.9 * found["bytes"]
    status, out, _ = kvpolicy("roundtrip", QWEN, "--canonical", "--blocks", 2)
    assert status == 1
    assert "NOT verified" in out


def test_a_transfer_that_fails_is_a_failed_verification_that_names_the_plugin(told, installed):
    installed("quitter", QUITTER)
    status, found = told("roundtrip", QWEN, "--canonical", "--blocks", 2)
    assert status == 1
    assert found["verified"] is False
    assert any("'quitter'" in e and "the device is gone" in e for e in found["errors"])


# what is refused, and how


def test_three_ranks_for_four_heads_are_refused_canonical_or_not(told):
    for canonical in ((), ("--canonical",)):
        for command in ("explain", "roundtrip"):
            status, found = told(command, QWEN, "--tp", 3, *canonical)
            assert status == 3
            assert found["error"]["code"] == "uncertified"
            assert len(found["error"]["refusals"]) == 48
            assert {r["code"] for r in found["error"]["refusals"]} == {"heads-not-divisible"}
            assert found["layers"][0]["refusal"]["code"] == "heads-not-divisible"


def test_cross_layer_raised_above_canonical_is_refused_with_a_reason_per_layer(told):
    status, found = told("explain", QWEN, "--canonical", "--priority", "cross-layer=200")
    assert status == 3
    assert found["decision"]["decided_by"] == "cross-layer"
    assert [r["code"] for r in found["error"]["refusals"]] == ["uncertified"] * 48
    assert found["layers"][0]["portable"] is False


def test_opposite_votes_at_one_priority_are_a_conflict_with_the_switch_that_settles_it(kvpolicy):
    status, _, err = kvpolicy("explain", QWEN, "--canonical", "--priority", "cross-layer=100")
    assert status == 3
    assert "'canonical'" in err
    assert "'cross-layer'" in err
    assert "--priority canonical=101" in err


def test_a_conflict_is_told_with_its_votes_and_the_plugins(told):
    status, found = told("explain", QWEN, "--canonical", "--priority", "cross-layer=100")
    assert status == 3
    assert found["error"]["code"] == "conflict"
    decision = found["decision"]
    assert decision["decided_by"] is decision["layout"] is decision["cross_layer_blocks"] is None
    votes = {vote["plugin"]: (vote["priority"], vote["answer"]) for vote in decision["votes"]}
    assert votes == {"canonical": (100, False), "cross-layer": (100, True)}
    assert {"canonical", "cross-layer"} <= {plugin["name"] for plugin in found["plugins"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "required: COMMAND"),
        (("explain",), "required: CONFIG.json"),
        (("explain", QWEN, "--layout", "XYZ"), "no KV cache layout 'XYZ'"),
        (("explain", QWEN, "--layout", "LBHCN"), "or 'LBHNC'"),
        (("explain", QWEN, "--tp", "two"), "invalid int value: 'two'"),
        (("explain", QWEN, "--tp", "0"), "--tp lies between 1 and 4,096, not 0"),
        (("explain", QWEN, "--cp-interleave", "0"), "--cp-interleave lies between 1 and"),
        (("roundtrip", QWEN, "--load-tp", "0"), "--load-tp lies between 1 and 4,096, not 0"),
        (("roundtrip", QWEN, "--load-block-size", "0"), "--load-block-size lies between 1"),
        (("explain", QWEN, "--kernel-block-size", "0"), "--kernel-block-size lies between 1"),
        (("explain", QWEN, "--tp", "4", "--dcp", "3"), "dcp 3 does not divide tp 4"),
        (("explain", QWEN, "--block-size", "-1"), "--block-size lies between 1 and 65,536"),
        (("explain", QWEN, "--dtype", "float12"), "float12"),
        (("explain", QWEN, "--kv-packing", "woven"), "'woven'"),
        (("explain", QWEN, "--pp-layers", "21,x"), "--pp-layers is layers per stage"),
        (("explain", QWEN, "--pp-layers", "21,26"), "the model has 48"),
        (("explain", QWEN, "--pp", "3", "--pp-layers", "21,27"), "2 stages are given for pp=3"),
        (("explain", QWEN, "--pp", "49"), "48 layers cannot fill 49"),
        (("explain", QWEN, "--priority", "canonical=abc"), "is a whole number, not 'abc'"),
        (("explain", QWEN, "--priority", "canonical"), "--priority is NAME=INTEGER"),
        (("explain", QWEN, "--priority", "canonicle=1"), "did you mean 'canonical'"),
        (("explain", QWEN, "--plugins", "cannonical"), "did you mean 'canonical'"),
        (("explain", QWEN, "--plugins", "cannonical"), "--plugins names plugin 'cannonical'"),
        (("roundtrip", QWEN, "--group", "ful"), "has no group 'ful'; did you mean 'full'?"),
        (("explain", QWEN, "--backend-layouts", "HND,XYZ"), "no KV cache layout 'XYZ'"),
        (("explain", QWEN, "--canonical", "--canonical-order", "BLHNC"), "a canonical order is"),
        (("roundtrip", QWEN, "--blocks", "0"), "--blocks lies between 1 and"),
        (("roundtrip", QWEN, "--blocks", "1000000"), "lower --blocks"),
        (("explain", QWEN, "--frobnicate"), "unrecognized arguments: --frobnicate"),
        (("explain", "no-such.json"), "no such file"),
        (("explain", str(MODELS)), "config.json"),
    ],
    ids=lambda value: " ".join(value).replace(QWEN, "QWEN") if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_status_2_with_a_sentence_and_never_a_traceback(kvpolicy, words, said):
    status, out, err = kvpolicy(*words)
    assert (status, out) == (2, "")
    assert err.startswith("kvpolicy: ")
    assert said in err
    assert "Traceback" not in err
    status, out, _ = kvpolicy(*words, "--json")
    assert status == 2
    assert said in json.loads(out)["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": -4}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"head_dim": "128"}, "head_dim"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"torch_dtype": None, "dtype": None}, "dtype"),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "kv_cache_quant_algo"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_is_status_2_with_its_key(kvpolicy, config, changes, said):
    status, _, err = kvpolicy("explain", config(**changes))
    assert status == 2
    assert said in err


def test_a_truncated_config_is_status_2(kvpolicy, config):
    status, _, err = kvpolicy("explain", config(text=Path(QWEN).read_text()[:100]))
    assert status == 2
    assert "JSON" in err


def test_a_config_that_says_a_thing_twice_is_status_2_with_the_key(told, config):
    path = config(text='{"head_dim": 64, "head_dim": 128}')
    status, found = told("explain", path)
    assert status == 2
    assert found["error"]["code"] == "config"
    assert "has the key 'head_dim' twice" in found["error"]["message"]


def test_dtype_on_the_command_line_stands_in_for_a_missing_one(told, config):
    status, found = told("explain", config(torch_dtype=None, dtype=None), "--dtype", "bfloat16")
    assert status == 0
    assert found["layers"][0]["local_page_bytes"] == 16 * 4 * 2 * 128 * 2


# help, terminals, pipes


@pytest.mark.parametrize("command", ["plugins", "explain", "roundtrip", "bench", "new-plugin"])
def test_every_command_has_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert re.search(r"^examples?:$", out, re.MULTILINE)
    assert f"kvpolicy {command}" in out


# roundtrip --processes: real processes, so that each case costs seconds.

POOLS = f"{PREFIX}roundtrip-*"


@pytest.fixture
def no_pool_left():
    before = set(Path("/dev/shm").glob(POOLS))
    yield
    assert set(Path("/dev/shm").glob(POOLS)) <= before
    assert multiprocessing.active_children() == []


def without_times(report: dict) -> dict:
    return {k: v for k, v in report.items() if not k.endswith(("_seconds", "_ratio"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("--canonical", "--tp", 8, "--load-tp", 1)),
        (None, ("--tp", 2)),
        (HYBRID, ("--canonical", "--pp", 2, "--load-pp", 1, "--group", "full")),
    ],
    ids=["replicas", "private", "stages"],
)
def test_ranks_in_processes_give_the_same_report(told, config, no_pool_left, text, words):
    path = config() if text is None else config(text=json.dumps(text))
    status, found = told("roundtrip", path, "--blocks", 3, *words, "--processes")
    assert status == 0, found
    assert found["verified"] is True
    assert without_times(found) == without_times(told("roundtrip", path, "--blocks", 3, *words)[1])


FATAL = """
import os, signal
import kvpolicy
class Fatal:
    priority = 500
    @kvpolicy.hookimpl
    def transfer(self, job):
        if job.direction == "load":
            {}
plugin = Fatal()
"""


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process was ended by SIGKILL"),
        ("os._exit(0)", "its process ended with status 0 before it was done"),
        ("raise KeyboardInterrupt", "its process raised KeyboardInterrupt"),
    ],
)
def test_a_rank_that_dies_or_raises_is_an_error(told, installed, no_pool_left, act, words):
    installed("fatal", FATAL.format(act))
    status, found = told("roundtrip", QWEN, "--canonical", "--blocks", 1, "--tp", 2, "--processes")
    assert status == 1
    assert found["error"]["code"] == "rank"
    assert words in found["error"]["message"]
    assert re.match(r"rank [01] of the loading side: ", found["error"]["message"])


PICKY = """
import kvpolicy
class Picky:
    priority = 500
    @kvpolicy.hookimpl
    def register_layers(self, context, decision, caches):
        raise OSError("not these")
plugin = Picky()
"""
VARIOUS = """
import os
import kvpolicy
class Various:
    priority = os.getpid()
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return None
plugin = Various()
"""


def test_what_a_rank_is_refused_keeps_its_code_and_status(told, installed, no_pool_left):
    installed("picky", PICKY)
    status, found = told("roundtrip", QWEN, "--canonical", "--blocks", 1, "--processes")
    assert status == 3
    assert found["error"]["code"] in ("plugin", "registration")
    assert found["error"]["message"].startswith("rank 0 of the storing side: ")
    assert "not these" in found["error"]["message"]


def test_ranks_with_other_fingerprints_do_not_move(told, installed, no_pool_left):
    installed("various", VARIOUS)
    status, found = told("roundtrip", QWEN, "--canonical", "--blocks", 1, "--tp", 2, "--processes")
    assert status == 1
    assert "rank 0 of the storing side has fingerprint " in found["error"]["message"]
    assert "every process of an engine needs the same" in found["error"]["message"]


def test_a_transfer_that_fails_in_a_process_is_in_the_report(told, installed, no_pool_left):
    installed("quitter", QUITTER)
    status, found = told("roundtrip", QWEN, "--canonical", "--blocks", 2, "--processes")
    assert (status, found["verified"], found["load_bytes"]) == (1, False, 0)
    assert "the device is gone" in found["errors"][0]


def test_what_processes_cannot_do_is_refused(told, monkeypatch, no_pool_left):
    words = ("roundtrip", QWEN, "--canonical", "--processes")
    status, found = told(*words, "--load-tp", 128)
    assert status == 2
    assert "at most 64; this grid has 128 ranks" in found["error"]["message"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("kvpolicy.sharedfile.os.posix_fallocate", full)
    status, found = told(*words)
    assert status == 2
    assert "/dev/shm has no room for a pool" in found["error"]["message"]
    assert "--blocks" in found["error"]["message"]


def test_ranks_in_processes_show_progress_and_print_nothing(monkeypatch, no_pool_left):
    words = ["roundtrip", QWEN, "--canonical", "--blocks", "1", "--processes"]
    master, slave = pty.openpty()
    shown = []

    def watch() -> None:
        # A terminal that nobody reads takes a few kilobytes; a bar is drawn again and again.
        with contextlib.suppress(OSError):  # it ends when the other side is closed
            while part := os.read(master, 65536):
                shown.append(part)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with os.fdopen(slave, "w") as terminal:
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setattr(sys, "stderr", terminal)
            assert main(words) == 0
    finally:
        watcher.join()
        os.close(master)
    assert b"store: rank 1 of 1" in b"".join(shown)


SLOW = """
import sys, time
import kvpolicy
class Slow:
    priority = 500
    @kvpolicy.hookimpl
    def transfer(self, job):
        print("a slow transfer", flush=True)
        time.sleep(1)
plugin = Slow()
"""


def test_ranks_end_with_the_command_that_is_killed(installed, tmp_path, no_pool_left):
    installed("slow", SLOW)
    words = ("roundtrip", QWEN, "--canonical", "--blocks", "1", "--tp", "2", "--processes")
    with subprocess.Popen(
        [sys.executable, "-m", "kvpolicy", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    ) as command:
        assert command.stderr is not None
        while b"a slow transfer" not in (line := command.stderr.readline()):
            assert line, "it ended"
        command.kill()
        # The ranks have its streams: these end when the last of them has.
        assert command.communicate(timeout=60)[0] == b""


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "kvpolicy", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("kvpolicy ")


def test_progress_shows_on_a_terminal_only(kvpolicy, monkeypatch):
    words = ("roundtrip", QWEN, "--canonical", "--blocks", 1)
    assert kvpolicy(*words)[2] == ""
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w") as terminal:
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setattr(sys, "stderr", terminal)
            assert main([str(word) for word in words]) == 0
        shown = b""
        with contextlib.suppress(OSError):  # it ends when all is read; pieces are small
            while part := os.read(master, 65536):
                shown += part
    finally:
        os.close(master)
    assert "rank 1 of 1" in shown.decode()


def unread(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command whose standard output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "kvpolicy", *map(str, words)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)


def test_a_reader_that_goes_away_is_no_error():
    done = unread("explain", QWEN)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("explain", QWEN, "--tp", 3), 3, "kvpolicy: 48 of 48 layers cannot be certified"),
        (("explain", "nope.json"), 2, "kvpolicy: nope.json: no such file"),
        (("plugins", "--plugins", "zz"), 2, "kvpolicy: --plugins names plugin 'zz'"),
    ],
)
def test_an_error_is_told_and_counts_although_nobody_reads_the_output(words, status, said, more):
    done = unread(*words, *more)
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_output_that_cannot_be_written_is_told_in_words(more):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvpolicy", "plugins", *more],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("kvpolicy: cannot write the output: ")
    assert "Traceback" not in done.stderr


NOISY = """
import sys
print("import of noise")
import kvpolicy
class Noisy:
    priority = 500
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        print("a noisy vote")
        sys.stdout.write("written noise")
    @kvpolicy.hookimpl
    def transfer(self, job):
        print("a noisy transfer")
plugin = Noisy()
"""


@pytest.mark.parametrize("command", ["plugins", "explain", "roundtrip"])
def test_what_a_plugin_prints_goes_to_standard_error(kvpolicy, installed, command):
    installed("noisy", NOISY)
    words = {"plugins": (), "explain": (QWEN,), "roundtrip": (QWEN, "--blocks", 1)}[command]
    said = {"plugins": "import of noise", "explain": "a noisy vote", "roundtrip": "noisy transfer"}
    status, out, err = kvpolicy(command, *words, "--json")
    assert status == 0
    assert isinstance(json.loads(out), dict)
    assert said[command] in err
    assert "noise" not in out
    _, out, _ = kvpolicy(command, *words)
    assert "noise" not in out
    assert "noisy vote" not in out


def outputs(*words: object, encoding: str, path: object = "") -> tuple[int, bytes, bytes]:
    """As `kvpolicy`, from a process of its own whose streams have that encoding."""
    paths = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "kvpolicy", *(os.fsencode(str(word)) for word in words)],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": paths},
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    return done.returncode, done.stdout, done.stderr


STRANGE = """
import kvpolicy
class Strange:
    priority = 500
    @kvpolicy.hookimpl
    def prefer_cross_layer_blocks(self, context):
        return kvpolicy.Vote(None, "na\\u00efve \\udcff \\U0001f600")
plugin = Strange()
"""


@pytest.mark.parametrize("encoding", ["ascii", "ascii:strict", "utf-8:strict", "latin-1:strict"])
def test_a_text_that_a_stream_cannot_say_is_escaped(installed, tmp_path, encoding):
    installed("strange", STRANGE)
    status, out, _ = outputs("explain", QWEN, encoding=encoding, path=tmp_path)
    assert status == 0
    assert b"\\udcff" in out
    status, out, _ = outputs("explain", QWEN, "--json", encoding=encoding, path=tmp_path)
    assert status == 0
    assert out.isascii()
    votes = json.loads(out)["decision"]["votes"]
    assert votes[0]["reason"] == "na\u00efve \udcff \U0001f600"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_a_file_name_of_any_bytes_is_said(tmp_path, encoding):
    path = tmp_path / os.fsdecode(b"config-\xff-\xc3\xa9.json")
    status, _, err = outputs("explain", path, encoding=encoding)
    assert status == 2
    assert b"config-\\udcff-" in err
    assert b"no such file" in err
    status, out, _ = outputs("explain", path, "--json", encoding=encoding)
    assert status == 2
    assert str(path) in json.loads(out)["error"]["message"]
    path.write_text(json.dumps(HYBRID))
    assert outputs("explain", path, "--encoding", path.name, encoding=encoding)[0] == 0


def test_json_is_one_object_and_nothing_else(kvpolicy):
    for words in (("plugins",), ("explain", QWEN), ("roundtrip", QWEN, "--blocks", 1)):
        _, out, _ = kvpolicy(*words, "--json")
        decoder = json.JSONDecoder()
        value, end = decoder.raw_decode(out)
        assert isinstance(value, dict)
        assert out[end:].strip() == ""


LONG_STATE = {
    "model_type": "bamba",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "dtype": "bfloat16",
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def test_the_portable_group_of_a_hybrid_moves_though_its_state_is_longer_elsewhere(told, config):
    words = ("--tp", 2, "--load-tp", 4, "--canonical", "--blocks", 2, "--group", "full")
    status, found = told("roundtrip", config(text=json.dumps(LONG_STATE)), *words)
    assert status == 0, found
    assert found["verified"] is True
