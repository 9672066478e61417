"""The paragraph names the decision, who made it, and who was outvoted and why."""

from __future__ import annotations

from kvpolicy_vllm.report import paragraph

import kvpolicy


def explained(canonical, plugins=()):
    spec = kvpolicy.AttentionSpec(block_size=16, total_kv_heads=4, head_size=8, itemsize=2)
    layers = dict.fromkeys(["a.0", "a.1"], spec)
    context = kvpolicy.PolicyContext(
        geometry=kvpolicy.CacheGeometry(layers=layers, num_blocks=4),
        canonical=canonical,
        backend=kvpolicy.BackendCapabilities(stride_aware=True),
    )
    return kvpolicy.Connector(context, plugins=list(plugins)).explain()


def test_canonical_outvotes_cross_layer():
    said = paragraph(explained(canonical=True), "LBHNC", 1000)
    assert (
        "decided for a cache per layer (LBHNC) by 'canonical' (priority 100): canonical is" in said
    )
    assert "'cross-layer' (priority 50) was outvoted: one group of equal pages" in said
    assert "the engine resolved LBHNC;" in said
    assert "canonical pages requested, 2 of 2 layers portable" in said
    assert "4,096 B a record in 2 fragment(s)" in said
    assert "1,000 slots" in said
    assert "transfers by 'host-copy'" in said


def test_an_engine_that_resolves_something_else_is_said_so():
    said = paragraph(explained(canonical=False), "LBHNC", 1)
    assert "decided for cross-layer blocks (BLHNC) by 'cross-layer' (priority 50): " in said
    assert "'canonical' (priority 100) abstained: canonical is not requested" in said
    assert "the engine resolved LBHNC, not BLHNC" in said
    assert "0 of 2 layers portable" in said
