"""A tiny DeepSeek-V2: latents, of which every rank holds all."""

from __future__ import annotations

from typing import Any

import pytest
from harness import (
    NEEDS_VLLM,
    TWO_RANKS,
    assert_changed,
    assert_same,
    connector,
    moved,
    paragraph,
    run,
)
from trouble import BEFORE_0_30

pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.skipif(
        BEFORE_0_30, reason="vLLM 0.28 misses a name when it loads such a model on the CPU"
    ),
]

PROMPT, OTHER, HELD = [1, 512], [2, 256], 32 + 16
BLOCK_BYTES = 4 * 16 * 576 * 2  # layers, tokens, latent and rotated key, bfloat16
CANONICAL = connector(canonical_layout=True)
# The kernels that every CPU has, which take one block size.
ENGINE = {"model": "deepseek", "block_size": 16, "attention_config": {"backend": "CPU_MLA"}}
TWO = {"in_process": False, "environ": TWO_RANKS, "tensor_parallel_size": 2}


def part(answers: list[dict[str, Any]], first: int, last: int) -> list[dict[str, Any]]:
    """The answers' steps from the first to before the last."""
    return [
        {name: answer[name][first:last] for name in ("tokens", "logprobs")} for answer in answers
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_without_connector_and_corruption_shows(models, ranks, figures):
    """Behind loaded latents vLLM decodes a token that it has decoded before.

    These kernels compute a prompt in another way than they decode, and come to other values, so
    the answer to a longer prompt would differ, with or without connector. They also come to
    other values on two ranks than on one.
    """
    engine = ENGINE | (TWO if ranks > 1 else {})
    steps = [
        *(["generate", PROMPT], ["generate", OTHER], ["reset"], ["follow", PROMPT]),
        *(["metrics"], ["explain"], ["reset"], ["corrupt"], ["follow", PROMPT]),
    ]
    results, log = run(models, steps, CANONICAL, **engine)
    first, _, _, again, metrics, explained, _, held, corrupted = results
    if ranks == 1:
        (plain,), _ = run(models, [["generate", PROMPT]], **engine)
        assert_same(first, plain)
    assert_same(part(again, 0, 15), part(first, 1, 16))
    assert again[0]["cached"] == corrupted[0]["cached"] == 512
    assert held == HELD
    assert_changed(corrupted, part(first, 1, 16))

    assert {layer["kind"] for layer in explained["layers"]} == {"latent"}
    assert explained["record_bytes"] == BLOCK_BYTES
    assert metrics["external_prefix_cache_hits"] == 512
    # Several ranks store one copy together, and each loads all of it.
    assert metrics["kv_offload_store_bytes"] == HELD * BLOCK_BYTES
    assert metrics["kv_offload_load_bytes"] == 32 * BLOCK_BYTES * ranks
    assert "the engine resolved LBHNC;" in paragraph(log)
    assert "4 of 4 layers portable" in paragraph(log)
    figures(moved(metrics, log))
