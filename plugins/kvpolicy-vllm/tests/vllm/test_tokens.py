"""A real vLLM on the CPU: what comes out with the connector is what comes out without it."""

from __future__ import annotations

import pytest
from harness import (
    BLOCK,
    LONG,
    NEEDS_VLLM,
    RECORD_BYTES,
    SHORT,
    SLABS,
    assert_changed,
    assert_same,
    connector,
    moved,
    paragraph,
    run,
)

pytestmark = NEEDS_VLLM

CANONICAL = connector(canonical_layout=True)
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
    "cross-layer": (connector(), SLABS, "BLHNC", True, "cross-layer", 0),
    "canonical, slab possible": (CANONICAL, SLABS, "LBHNC", False, "canonical", 4),
    "slab": (
        connector(canonical_layout=True, kvpolicy={"plugins": ["slab"]}),
        SLABS,
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

    figures(moved(metrics, log))
    assert held == 6
    assert corrupted[0]["cached"] == 4 * BLOCK
    assert_changed(corrupted, plain["long"])


def test_engine_in_its_own_process(models, plain):
    steps = [
        *(["generate", LONG], ["generate", SHORT], ["reset"], ["generate", LONG], ["reset"]),
        *(["corrupt"], ["generate", LONG]),
    ]
    results, log = run(models, steps, CANONICAL, in_process=False)
    long, _, _, again, _, held, corrupted = results
    assert_same(long + again, plain["long"] * 2)
    assert again[0]["cached"] == corrupted[0]["cached"] == 4 * BLOCK
    assert held == 6
    assert_changed(corrupted, plain["long"])
    assert "4 of 4 layers portable" in paragraph(log)


def test_several_cache_groups(models, figures):
    """Gemma-3: two groups that slide over 256 tokens, and one that does not; blocks of 32."""
    prompt, engine = [1, 900], {"model": "gemma3", "block_size": 32}
    (plain,), _ = run(models, [["generate", prompt]], **engine)
    steps = [
        *(["generate", prompt], ["generate", SHORT], ["reset"], ["generate", prompt]),
        *(["metrics"], ["explain"], ["reset"], ["corrupt"], ["generate", prompt]),
    ]
    for blocks_per_chunk in (1, 2):
        config = connector(canonical_layout=True, blocks_per_chunk=blocks_per_chunk)
        results, log = run(models, steps, config, **engine)
        first, _, _, again, metrics, explained, _, _, corrupted = results
        assert_same(first + again, plain * 2)
        assert again[0]["cached"] == corrupted[0]["cached"] == 896
        assert_changed(corrupted, plain)
        assert [len(group["layers"]) for group in explained["groups"]] == [2, 2, 2]
        assert "6 of 6 layers portable" in paragraph(log)
        figures(f"{blocks_per_chunk} blocks a chunk: {moved(metrics, log)}")


def test_a_cache_in_fp8(models, figures):
    """Half the bytes; without connector the same cache type, which changes tokens by itself."""
    steps = [
        *(["generate", LONG], ["generate", SHORT], ["reset"], ["generate", LONG], ["metrics"]),
        *(["explain"], ["reset"], ["corrupt"], ["generate", LONG]),
    ]
    (plain,), _ = run(models, [["generate", LONG]], kv_cache_dtype="fp8")
    results, log = run(models, steps, CANONICAL, kv_cache_dtype="fp8")
    long, _, _, again, metrics, explained, _, held, corrupted = results
    assert_same(long + again, plain * 2)
    assert again[0]["cached"] == corrupted[0]["cached"] == 4 * BLOCK
    assert held == 6
    assert_changed(corrupted, plain)
    assert explained["record_bytes"] == RECORD_BYTES // 2
    assert metrics["kv_offload_store_bytes"] == 6 * RECORD_BYTES // 2
    assert metrics["kv_offload_load_bytes"] == 4 * RECORD_BYTES // 2
    assert "4 of 4 layers portable" in paragraph(log)
    figures(moved(metrics, log))


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
            f"{moved(metrics, log)}"
        )
