"""The slab plugin: both wishes met, and records that are canonical's, byte for byte."""

from __future__ import annotations

import attrs
import kvpolicy_slab
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpolicy
from kvpolicy import AttentionSpec, CacheGeometry, KVCacheLayout, LatentSpec, ParallelGrid

settings.register_profile("slab", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("slab")

AWARE = kvpolicy.BackendCapabilities(stride_aware=True)
HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC


def context(**changes):
    spec = changes.pop(
        "spec", AttentionSpec(block_size=4, total_kv_heads=4, head_size=8, itemsize=2)
    )
    layers = changes.pop("layers", {f"layer.{i}": spec for i in range(3)})
    values = {
        "geometry": CacheGeometry(layers=layers, num_blocks=changes.pop("num_blocks", 6)),
        "canonical": True,
        "backend": AWARE,
    } | changes
    return kvpolicy.PolicyContext(**values)


def connector(given_context, **options):
    """With the plugin as an object if it is not installed, which is the same plugin."""
    installed = [i.name for i in kvpolicy.load_plugins(kvpolicy.select(environ={})).infos]
    plugins = ["slab"] if "slab" in installed else {"slab": kvpolicy_slab.policy}
    return kvpolicy.Connector(given_context, plugins, **options)


# The vote


def test_both_wishes_are_met():
    made = connector(context(grid=ParallelGrid(tp=2)))
    assert made.decision.cross_layer_blocks
    assert made.decision.layout is KVCacheLayout.BLHNC
    assert made.decision.decided_by == "slab"
    assert all(layer["portable"] for layer in made.explain()["layers"])


def test_it_has_no_opinion_where_canonical_is_not_requested():
    vote = kvpolicy_slab.policy.prefer_cross_layer_blocks(context(canonical=False))
    assert vote == kvpolicy.Vote(None, "canonical is not requested")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": kvpolicy.BackendCapabilities()}, "is not known, which counts as no"),
        ({"backend": kvpolicy.BackendCapabilities(stride_aware=False)}, "not stride-aware"),
        (
            {"backend": kvpolicy.BackendCapabilities(stride_aware=True, layouts=["HND"])},
            "does not take BLHNC",
        ),
        (
            {
                "spec": AttentionSpec(
                    block_size=4, total_kv_heads=4, head_size=8, itemsize=1, scale_bytes=4
                )
            },
            "scales are inline",
        ),
        (
            {
                "spec": AttentionSpec(
                    block_size=4,
                    total_kv_heads=4,
                    head_size=8,
                    itemsize=2,
                    kernel_block_size=2,
                )
            },
            "a kernel block of 2 tokens",
        ),
        (
            {
                "layers": {
                    "a": AttentionSpec(block_size=4, total_kv_heads=4, head_size=8, itemsize=2),
                    "b": LatentSpec(block_size=4, row_bytes=9),
                }
            },
            "2 groups",
        ),
        ({"grid": ParallelGrid(tp=3)}, "heads-not-divisible"),
        ({"grid": ParallelGrid(pcp=2, cp_interleave=3)}, "interleave-not-dividing"),
    ],
)
def test_it_abstains_with_the_reason_where_it_cannot(changes, reason):
    vote = kvpolicy_slab.policy.prefer_cross_layer_blocks(context(**changes))
    assert vote.answer is None
    assert reason in vote.reason


def test_canonical_keeps_the_layers_apart_where_it_abstains():
    made = connector(context(backend=kvpolicy.BackendCapabilities(stride_aware=False)))
    assert made.decision.decided_by == "canonical"
    assert not made.decision.cross_layer_blocks


def test_it_registers_nothing_that_is_not_its_own():
    apart = context()
    decision = kvpolicy.LayoutDecision(cross_layer_blocks=False, layout="LBHNC")
    assert kvpolicy_slab.policy.register_layers(apart, decision, None) is None
    slab = kvpolicy.LayoutDecision(cross_layer_blocks=True, layout="BLHNC")
    direct = attrs.evolve(apart, canonical=False)
    assert kvpolicy_slab.policy.register_layers(direct, slab, None) is None


# The bytes


def owned(heads, tp, tp_rank):
    """The heads of a rank: a share of them, or the one that it repeats."""
    if tp > heads:
        return [tp_rank * heads // tp]
    share = heads // tp
    return list(range(tp_rank * share, (tp_rank + 1) * share))


def logical(layers, blocks, heads, tokens, row):
    """The model's cache with no parallelism: [layer, block, head, token, byte]."""
    shape = (layers, blocks, heads, tokens, row)
    return (
        (torch.arange(layers * blocks * heads * tokens * row) * 7919 % 251)
        .to(torch.uint8)
        .reshape(shape)
    )


def in_layout(layout, order, layers, blocks, heads, tokens, row, fill):
    """One allocation in a physical order; its logical view [layer, block, head, token, byte]."""
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": row}
    base = torch.full([sizes[axis] for axis in layout.value], fill, dtype=torch.uint8)
    return base.permute([layout.value.index(axis) for axis in "LBHNC"])


ORDERS = {
    HND: [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC, KVCacheLayout.LHBNC],
    NHD: [KVCacheLayout.LBNHC, KVCacheLayout.BLNHC],
}


@st.composite
def journeys(draw):
    """Heads, head size, block and two sides: grid, head/token order, physical layout."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    spec = AttentionSpec(
        block_size=draw(st.sampled_from([1, 2, 4])),
        total_kv_heads=heads,
        head_size=draw(st.sampled_from([1, 3, 8])),
        v_head_size=draw(st.sampled_from([1, 3, 8])),
        itemsize=1,
    )
    sides = []
    for _ in range(2):
        tp = draw(
            st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if not heads % n or not n % heads])
        )
        order = draw(st.sampled_from([HND, NHD]))
        sides.append((tp, order, draw(st.sampled_from(ORDERS[order]))))
    return spec, draw(st.integers(1, 3)), sides


@given(journeys())
def test_records_are_those_of_canonical_across_tp_slab_or_not(journey):
    spec, layers, (one, other) = journey
    blocks = 5
    whole = logical(layers, blocks, spec.total_kv_heads, spec.block_size, spec.row_bytes)
    names = {f"layer.{i}": spec for i in range(layers)}
    pool = kvpolicy.HostPool(4)
    used, slots = [4, 0, 3], [2, 0, 1]
    formats = set()
    for storing, (tp, order, layout) in ((True, one), (False, other)):
        held = []
        for rank in range(tp):
            given_context = context(
                layers=names,
                num_blocks=blocks,
                grid=ParallelGrid(tp=tp),
                rank=rank,
                layout=order,
                canonical_order=HND,
                backend=kvpolicy.BackendCapabilities(stride_aware=layout.block_outermost),
            )
            heads = owned(spec.total_kv_heads, tp, rank)
            cache = in_layout(
                layout, order, layers, blocks, len(heads), spec.block_size, spec.row_bytes, 0xEE
            )
            made = connector(given_context, host=pool)
            assert made.decision.cross_layer_blocks is layout.block_outermost
            if layout.block_outermost:
                physical = cache.permute(1, 0, 2, 3, 4) if layers != blocks else cache
                caches = kvpolicy.KVCaches.from_slab(
                    physical, names, layer_dim=0 if layers == blocks else 1
                )
            else:
                caches = {name: cache[i] for i, name in enumerate(names)}
            made.register(caches)
            formats.add(made.format_id)
            held.append((made, cache, heads))
        for made, cache, heads in held:
            if storing:
                cache[:] = whole[:, :, heads]
                made.store(used, slots)
            else:
                made.load(slots, used)
        for made, cache, heads in held:
            assert [result.ok for result in made.wait()] == [True]
            made.close()
            if storing:
                continue
            assert torch.equal(cache[:, used], whole[:, used][:, :, heads])
            assert (cache[:, [1, 2]] == 0xEE).all()
        if storing:
            for block, slot in zip(used, slots, strict=True):
                # Canonical format v1, HND: layer after layer, head, token, row.
                record = whole[:, block].reshape(-1)
                assert torch.equal(pool.rows[slot][: len(record)], record)
    assert len(formats) == 1


def test_fragments_are_reported_for_both(monkeypatch):
    """Qwen3-30B-A3B at TP2, HND: 48 runs of 16 KiB a block from a slab as from layers apart."""
    spec = AttentionSpec(block_size=16, total_kv_heads=4, head_size=128, itemsize=2)
    layers = {f"layer.{i}": spec for i in range(48)}
    slab = connector(context(layers=layers, grid=ParallelGrid(tp=2))).explain()
    apart = kvpolicy.Connector(context(layers=layers, grid=ParallelGrid(tp=2)), []).explain()
    assert slab["decision"]["cross_layer_blocks"]
    assert not apart["decision"]["cross_layer_blocks"]
    assert slab["fragments_per_block"] == apart["fragments_per_block"] == 48
    assert slab["format_id"] == apart["format_id"]
    one = connector(context(layers=layers)).explain()
    assert one["fragments_per_block"] == 1  # with one rank the slab's block is the record
