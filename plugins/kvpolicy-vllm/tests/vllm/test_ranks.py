"""Two ranks, each a process."""

from __future__ import annotations

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
    moved,
    paragraph,
    run,
)

pytestmark = NEEDS_VLLM

TWO = {"in_process": False, "environ": TWO_RANKS, "tensor_parallel_size": 2}


@pytest.mark.parametrize("canonical", [False, True])
def test_two_ranks_in_processes(models, canonical, figures):
    steps = [
        *(["generate", LONG], ["generate", SHORT], ["reset"], ["generate", LONG], ["metrics"]),
        *(["reset"], ["corrupt"], ["generate", LONG]),
    ]
    results, log = run(models, steps, connector(canonical_layout=canonical), **TWO)
    long, _, _, again, metrics, _, held, corrupted = results
    assert_same(again, long)
    assert again[0]["cached"] == corrupted[0]["cached"] == 4 * BLOCK
    assert held == 6
    assert_changed(corrupted, long)
    assert metrics["kv_offload_store_bytes"] == 6 * RECORD_BYTES  # each rank's half, summed
    assert metrics["kv_offload_load_bytes"] == 4 * RECORD_BYTES
    assert f"{4 * canonical} of 4 layers portable" in paragraph(log)
    figures(moved(metrics, log))
