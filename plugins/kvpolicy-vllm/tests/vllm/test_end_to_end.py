"""A real vLLM on the CPU: what comes out with the connector is what comes out without it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; make test-vllm has it",
    ),
    pytest.mark.slow,
]

SHARED = Path("/dev/shm")
ENGINE = Path(__file__).with_name("engine.py")
MARK = "KVPOLICY-RESULT "
LONG, SHORT = [1, 600], [2, 300]
BLOCK = 128  # the CPU backend's own block size
RECORD_BYTES = 4 * 4 * BLOCK * 2 * 64 * 2  # layers, heads, tokens, K and V, head size, bfloat16
TOLERANCE = 0.02


def connector(*, module: bool = False, **extra: Any) -> dict[str, Any]:
    named = {
        "kv_connector": "KVPolicyConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 * 2**20,
            "kvpolicy": {"plugins": []},
        }
        | extra,
    }
    return named | ({"kv_connector_module_path": "kvpolicy_vllm.connector"} if module else {})


def left_over() -> set[str]:
    """Names of vLLM's in shared memory that no process has mapped."""
    names = {path.name for path in SHARED.glob("vllm_dist_*")}
    mapped = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended since, or is somebody else's
            mapped.append(maps.read_text())
    return {name for name in names if not any(name in text for text in mapped)}


def run(
    models: Path,
    steps: list[list[Any]],
    connector: dict[str, Any] | None = None,
    *,
    model: str = "qwen3",
    dtype: str = "bfloat16",
    layouts: list[str] | None = None,
    in_process: bool = True,
    refused: bool = False,
    environ: dict[str, str] | None = None,
    **engine: Any,
) -> tuple[list[Any], str]:
    """The steps' results and what the engine logged; if refused, no results."""
    request = {
        "models": str(models),
        "model": model,
        "dtype": dtype,
        "connector": connector,
        "layouts": layouts,
        "engine": engine,
        "steps": steps,
    }
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        **(environ or {}),
    }
    shared = left_over()
    done = subprocess.run(
        [sys.executable, str(ENGINE)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    # vLLM 0.32 leaves its own message queues behind when its ranks were processes.
    for name in left_over() - shared:
        (SHARED / name).unlink(missing_ok=True)
    log = done.stdout + done.stderr
    if refused:
        assert done.returncode, log[-4000:]
        return [], log
    assert not done.returncode, log[-6000:]
    (answer,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(answer.removeprefix(MARK))["results"], log


def seconds(log: str) -> float:
    """How long the engine lived, from its making to its end."""
    (answer,) = [line for line in log.splitlines() if line.startswith(MARK)]
    return json.loads(answer.removeprefix(MARK))["seconds"]


def paragraph(log: str) -> str:
    (found,) = [line for line in log.splitlines() if "kvpolicy: decided" in line]
    return found


def assert_same(answers: list[dict], expected: list[dict]) -> None:
    for answer, plain in zip(answers, expected, strict=True):
        assert answer["tokens"] == plain["tokens"]
        pairs = zip(answer["logprobs"], plain["logprobs"], strict=True)
        assert max(abs(one - other) for one, other in pairs) <= TOLERANCE


def assert_changed(answers: list[dict], expected: list[dict]) -> None:
    for answer, plain in zip(answers, expected, strict=True):
        moved = abs(answer["logprobs"][0] - plain["logprobs"][0])
        assert answer["tokens"][0] != plain["tokens"][0] or moved > 5 * TOLERANCE


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(models):
    """What the model says without any connector: to the long prompt, and to the short one."""
    (first, second), _ = run(models, [["generate", LONG], ["generate", SHORT]])
    return {"long": first, "short": second}


KINDS = {
    # name: (connector, declared layouts, resolved layout, cross-layer, decided by, portable)
    "default": (connector(), None, "LBHNC", False, None, 0),
    "canonical": (
        connector(module=True, canonical_layout=True),
        None,
        "LBHNC",
        False,
        "canonical",
        4,
    ),
    "cross-layer": (connector(), ["LBHNC", "BLHNC"], "BLHNC", True, "cross-layer", 0),
    "canonical, slab possible": (
        connector(canonical_layout=True),
        ["LBHNC", "BLHNC"],
        "LBHNC",
        False,
        "canonical",
        4,
    ),
    "slab": (
        connector(canonical_layout=True, kvpolicy={"plugins": ["slab"]}),
        ["LBHNC", "BLHNC"],
        "BLHNC",
        True,
        "slab",
        4,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_connector_and_corruption_shows(models, plain, kind, figures):
    config, layouts, resolved, cross_layer, decided_by, portable = KINDS[kind]
    # One prompt at a time: in bfloat16 a batch of two rounds otherwise, with or without connector.
    steps = [
        *(["generate", LONG], ["generate", SHORT], ["reset"]),
        *(["generate", LONG], ["generate", SHORT], ["metrics"], ["explain"], ["reset"]),
        *(["corrupt"], ["generate", LONG]),
    ]
    results, log = run(models, steps, config, layouts=layouts)
    long, short, _, *again, metrics, explained, _, held, corrupted = results
    again = again[0] + again[1]

    assert_same(long + short + again, (plain["long"] + plain["short"]) * 2)
    assert [answer["cached"] for answer in long + short + again] == [0, 0, 4 * BLOCK, 2 * BLOCK]
    assert metrics["external_prefix_cache_hits"] == 6 * BLOCK
    assert metrics["kv_offload_load_bytes"] == 6 * RECORD_BYTES
    assert metrics["kv_offload_store_bytes"] == 6 * RECORD_BYTES

    decision = explained["decision"]
    assert (decision["cross_layer_blocks"], decision["layout"]) == (cross_layer, resolved)
    assert decision["decided_by"] == decided_by
    assert sum(layer["portable"] for layer in explained["layers"]) == portable
    assert explained["record_bytes"] == RECORD_BYTES
    assert f"the engine resolved {resolved};" in paragraph(log)
    assert f"{portable} of 4 layers portable" in paragraph(log)
    assert "transfers by 'host-copy'" in paragraph(log)

    figures(
        f"{metrics['external_prefix_cache_hits']:.0f} tokens hit, "
        f"{metrics['kv_offload_store_bytes']:,.0f} B stored, "
        f"{metrics['kv_offload_load_bytes']:,.0f} B loaded, {seconds(log):.1f} s"
    )
    assert held == 6
    assert corrupted[0]["cached"] == 4 * BLOCK
    assert_changed(corrupted, plain["long"])


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("nth", [0, 2])
def test_a_lost_record_is_computed_again(models, plain, nth, blocks_per_chunk):
    steps = [
        *(["generate", LONG], ["generate", SHORT], ["reset"], ["lose", nth]),
        *(["generate", LONG], ["reset"], ["generate", LONG], ["reset"], ["generate", LONG]),
    ]
    config = connector(canonical_layout=True, blocks_per_chunk=blocks_per_chunk)
    results, log = run(models, steps, config)
    long, _, _, lost, failed, _, second, _, third = results
    assert lost == ""
    assert_same(long + failed + second + third, plain["long"] * 4)
    assert "this load wants" in log
    assert failed[0]["cached"] <= nth * BLOCK
    assert third[0]["cached"] == 4 * BLOCK


def test_several_cache_groups(models):
    """Gemma-3: two groups that slide over 256 tokens, and one that does not; blocks of 32."""
    prompt, engine = [1, 900], {"model": "gemma3", "block_size": 32}
    (plain,), _ = run(models, [["generate", prompt]], **engine)
    steps = [
        *(["generate", prompt], ["generate", SHORT], ["reset"], ["generate", prompt]),
        *(["explain"], ["reset"], ["corrupt"], ["generate", prompt]),
    ]
    for blocks_per_chunk in (1, 2):
        config = connector(canonical_layout=True, blocks_per_chunk=blocks_per_chunk)
        results, log = run(models, steps, config, **engine)
        first, _, _, again, explained, _, _, corrupted = results
        assert_same(first + again, plain * 2)
        assert again[0]["cached"] == corrupted[0]["cached"] == 896
        assert_changed(corrupted, plain)
        assert [len(group["layers"]) for group in explained["groups"]] == [2, 2, 2]
        assert "6 of 6 layers portable" in paragraph(log)


def test_preemption_and_eviction_change_no_token(models, figures):
    """40 requests, some with a prefix in common, in 72 blocks, and a pool of about as many slots.

    float32, since in bfloat16 a batch's size alone changes tokens.
    """
    requests = [[i % 5, 96 + 32 * (i % 3), 100 + i, 40 + 5 * i] for i in range(40)]
    engine = {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 72}
    (plain,), _ = run(models, [["generate", *requests]], **engine)
    expected = [answer["tokens"] for answer in plain]
    steps = [["generate", *requests], ["reset"], ["generate", *requests], ["metrics"]]
    for blocks_per_chunk in (1, 2):
        config = connector(
            canonical_layout=True, blocks_per_chunk=blocks_per_chunk, cpu_bytes_to_use=20 * 2**20
        )
        (first, _, again, metrics), log = run(models, steps, config, **engine)
        assert [answer["tokens"] for answer in first] == expected
        assert [answer["tokens"] for answer in again] == expected
        assert metrics["num_preemptions"] > 0
        assert metrics["kv_offload_store_bytes"] > 20 * 2**20  # so that something was evicted
        assert metrics["kv_offload_load_bytes"] > 0
        assert "80 slots of the host pool" in paragraph(log)
        assert "kvpolicy: load of job" not in log
        assert "kvpolicy: store of job" not in log
        figures(
            f"{blocks_per_chunk} blocks a chunk: {metrics['num_preemptions']:.0f} preemptions, "
            f"{metrics['external_prefix_cache_hits']:.0f} tokens hit, "
            f"{metrics['kv_offload_store_bytes']:,.0f} B stored, "
            f"{metrics['kv_offload_load_bytes']:,.0f} B loaded, {seconds(log):.1f} s"
        )


def test_engine_in_its_own_process(models, plain):
    steps = [["generate", LONG], ["generate", SHORT], ["reset"], ["generate", LONG]]
    config = connector(canonical_layout=True)
    (long, _, _, again), log = run(models, steps, config, in_process=False)
    assert_same(long + again, plain["long"] * 2)
    assert again[0]["cached"] == 4 * BLOCK
    assert "4 of 4 layers portable" in paragraph(log)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cpu_bytes_to_use": None}, "needs cpu_bytes_to_use"),
        ({"cpu_bytes_to_use": 4096}, "less than one chunk of 1 block"),
        ({"canonical_layout": "yes"}, "canonical_layout is true or false"),
        ({"kvpolicy": {"plugins": ["slap"]}}, "slap"),
        ({"spec_name": "CPUOffloadingSpec"}, "KVPolicyConnector brings its own"),
    ],
)
def test_a_wrong_setting_stops_the_engine_with_its_reason(models, change, words):
    _, log = run(models, [], connector(**change), refused=True)
    assert words in log


@pytest.mark.parametrize("canonical", [False, True])
def test_two_ranks_in_processes(models, canonical, figures):
    results, log = run(
        models,
        [["generate", LONG], ["generate", SHORT], ["reset"], ["generate", LONG], ["metrics"]],
        connector(canonical_layout=canonical),
        in_process=False,
        environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
    )
    long, _, _, again, metrics = results
    assert_same(again, long)
    assert again[0]["cached"] == 4 * BLOCK
    assert metrics["kv_offload_store_bytes"] == 6 * RECORD_BYTES  # each rank's half, summed
    assert metrics["kv_offload_load_bytes"] == 4 * RECORD_BYTES
    assert f"{4 * canonical} of 4 layers portable" in paragraph(log)
    figures(
        f"{metrics['kv_offload_store_bytes']:,.0f} B stored, "
        f"{metrics['kv_offload_load_bytes']:,.0f} B loaded, {seconds(log):.1f} s"
    )


def test_canonical_pages_that_nobody_certifies_stop_the_engine(models):
    """A raised priority decides for a slab in which `cross-layer` cannot certify a page."""
    config = connector(
        canonical_layout=True, kvpolicy={"plugins": [], "priority": {"cross-layer": 200}}
    )
    _, log = run(models, [], config, layouts=["LBHNC", "BLHNC"], refused=True)
    assert "model.layers.0-3.self_attn.attn (4 layers): uncertified" in log
    assert "which cross-layer decided; lower that plugin's priority" in log
