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


def said_of(explained, asked, slots=1000, **changed):
    pool = kvpolicy.HostPool(slots, 4096)
    facts = {"asked": asked, "resolved": "LBHNC", "asks_by_layout": True, "pool": pool}
    facts["fragments"] = {"attention": 2}
    return paragraph(explained, **facts | changed)


def test_canonical_outvotes_cross_layer():
    said = said_of(explained(canonical=True), "LBHNC")
    assert (
        "decided for a cache per layer (LBHNC) by 'canonical' (priority 100): canonical is" in said
    )
    assert "'cross-layer' (priority 50) was outvoted: one group of equal pages" in said
    assert "the engine resolved LBHNC;" in said
    assert "canonical pages requested, 2 of 2 layers portable" in said
    assert "4,096 B a record in 2 fragment(s) a block;" in said
    assert "1,000 slots of the host pool (4,096,000 B);" in said
    assert "this vLLM consults get_required_kvcache_layout" in said
    assert "transfers by 'host-copy'" in said


def test_an_engine_that_resolves_something_else_is_said_so():
    said = said_of(explained(canonical=False), "BLHNC")
    assert "decided for cross-layer blocks (BLHNC) by 'cross-layer' (priority 50): " in said
    assert "'canonical' (priority 100) abstained: canonical is not requested" in said
    assert "the engine resolved LBHNC, not BLHNC as asked" in said
    assert "0 of 2 layers portable" in said


def test_what_a_shared_pool_held_is_said(tmp_path):
    with kvpolicy.SharedHostPool("a", 3, 4096, directory=tmp_path) as pool:
        said = said_of(
            explained(canonical=True),
            "LBHNC",
            resolved="HND",
            asks_by_layout=False,
            pool=pool,
            found="pool file reopened with 2 record(s)",
        )
    assert f"3 slots of the host pool (12,288 B), shared in {pool.path}" in said
    assert "; pool file reopened with 2 record(s);" in said
    assert "this vLLM consults prefer_cross_layer_blocks" in said
    assert "the engine resolved LBHNC;" in said
