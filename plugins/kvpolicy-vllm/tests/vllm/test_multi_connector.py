"""Beside a connector of vLLM's own under MultiConnector."""

from __future__ import annotations

import pytest
from harness import (
    BLOCK,
    LONG,
    NEEDS_VLLM,
    RECORD_BYTES,
    SHORT,
    assert_changed,
    assert_same,
    connector,
    moved,
    paragraph,
    run,
)

pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("known_by", ["name", "module path"])
def test_it_serves_first_and_its_statistics_arrive(models, plain, tmp_path, known_by, figures):
    """The other one stores too; vLLM loads from the first that has what a request wants.

    Where VLLM_PLUGINS hides the name, vLLM still asks for our class by it when statistics arrive.
    In one process with the engine, vLLM 0.28 cannot read statistics of several connectors.
    """
    hidden = known_by == "module path"
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [connector(module=hidden, canonical_layout=True), other]
        },
    }
    steps = [
        *(["generate", LONG], ["generate", SHORT], ["reset"], ["generate", LONG], ["metrics"]),
        *(["reset"], ["corrupt"], ["generate", LONG]),
    ]
    environ = {"VLLM_PLUGINS": ""} if hidden else None
    results, log = run(models, steps, both, in_process=False, environ=environ)
    long, short, _, again, metrics, _, held, corrupted = results
    assert_same(long + short + again, plain["long"] + plain["short"] + plain["long"])
    assert again[0]["cached"] == corrupted[0]["cached"] == 4 * BLOCK
    assert held == 6
    assert_changed(corrupted, plain["long"])  # so it was ours that served
    assert metrics["external_prefix_cache_hits"] == 4 * BLOCK
    assert metrics["kv_offload_store_bytes"] == 6 * RECORD_BYTES
    assert metrics["kv_offload_load_bytes"] == 4 * RECORD_BYTES
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2 * 4  # prompts, layers
    assert "4 of 4 layers portable" in paragraph(log)
    figures(moved(metrics, log))
