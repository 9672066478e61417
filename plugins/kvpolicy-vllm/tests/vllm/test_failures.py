"""What goes wrong in a transfer costs time, never a token."""

from __future__ import annotations

import pytest
from harness import BLOCK, LONG, NEEDS_VLLM, SHORT, assert_same, connector, run

pytestmark = NEEDS_VLLM


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
