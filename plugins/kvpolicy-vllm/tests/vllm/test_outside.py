"""Plugins of somebody else's, in a wheel: what they say is done, and the log says so."""

from __future__ import annotations

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

PAGE_BYTES = RECORD_BYTES // 4
STEPS = [
    *(["generate", LONG], ["generate", SHORT], ["reset"], ["generate", LONG], ["metrics"]),
    *(["placed"], ["stored"], ["reset"], ["corrupt"], ["generate", LONG]),
]


def check_tokens(results, plain):
    long, short, _, again, _, _, _, _, _, corrupted = results
    assert_same(long + short + again, plain["long"] + plain["short"] + plain["long"])
    assert again[0]["cached"] == corrupted[0]["cached"] == 4 * BLOCK
    assert_changed(corrupted, plain["long"])


def test_one_that_outvotes_canonical_gets_its_slab_and_stores_the_same_bytes(
    models, plain, outside, figures
):
    theirs = connector(canonical_layout=True, kvpolicy={"plugins": ["acme-slab"]})
    results, log = run(models, STEPS, theirs, layouts=SLABS, path=outside)
    check_tokens(results, plain)
    metrics, placed, stored = results[4:7]
    assert list(placed.values()) == [[n * PAGE_BYTES, RECORD_BYTES] for n in range(4)]
    said = paragraph(log)
    assert "decided for cross-layer blocks (BLHNC) by 'acme-slab' (priority 300)" in said
    assert "acme moves whole blocks" in said
    assert "'canonical' (priority 100) was outvoted" in said
    assert "the engine resolved BLHNC;" in said
    assert "4 of 4 layers portable" in said

    steps = [["generate", LONG], ["generate", SHORT], ["reset"], ["stored"], ["placed"]]
    (*_, canonical, apart), _ = run(models, steps, connector(canonical_layout=True))
    assert {stride for _, stride in apart.values()} == {PAGE_BYTES}
    assert len(set(stored)) == 6
    assert stored == canonical
    figures(moved(metrics, log))


def test_one_that_outvotes_cross_layer_keeps_layers_apart(models, plain, outside, figures):
    theirs = connector(kvpolicy={"plugins": ["acme-layers", "acme-broken"]})
    del theirs["kv_load_failure_policy"]
    results, log = run(models, STEPS, theirs, layouts=SLABS, path=outside)
    check_tokens(results, plain)
    metrics, placed = results[4:6]
    assert {stride for _, stride in placed.values()} == {PAGE_BYTES}
    said = paragraph(log)
    assert "decided for a cache per layer (LBHNC) by 'acme-layers' (priority 60)" in said
    assert "'cross-layer' (priority 50) was outvoted" in said
    assert "the engine resolved LBHNC;" in said
    assert "plugin 'acme-broken' is out: " in said
    assert "set it to 'recompute'" in log  # what vLLM does by default is said
    figures(moved(metrics, log))
