"""The built-in policies: what they vote, why they abstain, which layers they register."""

import functools

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import (
    AttentionSpec,
    BackendCapabilities,
    CacheGeometry,
    CertificationError,
    Connector,
    KVCacheLayout,
    KVCaches,
    LatentSpec,
    LayerGroup,
    LayoutDecision,
    ParallelGrid,
    PolicyContext,
    Registration,
    StateSpec,
    Vote,
    hookimpl,
)
from kvpolicy.policies.canonical import policy as canonical
from kvpolicy.policies.cross_layer import policy as cross_layer
from kvpolicy.policies.direct import policy as direct

AWARE = BackendCapabilities(name="aware", stride_aware=True)
SIZES = {"block_size": 16, "total_kv_heads": 4, "head_size": 128, "itemsize": 2}
QWEN = AttentionSpec(**SIZES)


def layers(*specs):
    return {f"model.layers.{i}.self_attn.attn": spec for i, spec in enumerate(specs)}


def qwen(**changes):
    """Qwen3-30B-A3B at TP2: 48 layers, 4 KV heads of 128 bf16 elements, blocks of 16 tokens."""
    asked = {
        "geometry": CacheGeometry(layers=layers(*[QWEN] * 48), num_blocks=4),
        "grid": ParallelGrid(tp=2),
        "backend": AWARE,
        "dtype": "bfloat16",
    }
    return PolicyContext(**asked | changes)


def of(*specs, grid=None, backend=AWARE, groups=None, **changes):
    """A context of these layers."""
    geometry = CacheGeometry(layers=layers(*specs), num_blocks=4, groups=groups)
    return PolicyContext(geometry=geometry, grid=grid or ParallelGrid(), backend=backend, **changes)


def attention(**changes):
    return AttentionSpec(**SIZES | changes)


def vote(context):
    """What cross-layer says of it."""
    said = cross_layer.prefer_cross_layer_blocks(context)
    assert isinstance(said, Vote)
    return said


def decided(context, **plugins):
    return Connector(context, plugins).decision


class Voter:
    def __init__(self, answer, priority=0):
        self.answer = answer
        self.priority = priority

    @hookimpl
    def prefer_cross_layer_blocks(self):
        return self.answer


# The seed: cross-layer blocks by default, and canonical goes over them. No tensor, no GPU.


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("wish", "prefers"), [({}, True), ({"canonical": False}, True), ({"canonical": True}, False)]
)
def test_the_default_prefers_cross_layer_blocks_and_canonical_does_not(wish, prefers, rank):
    decision = Connector(qwen(rank=rank, **wish), []).decision
    assert decision.cross_layer_blocks is prefers


def test_canonical_requested_is_per_layer_and_the_explanation_names_canonical_c1():
    slab = Connector(qwen(), []).explain()
    assert slab["decision"]["cross_layer_blocks"] is True
    assert slab["decision"]["layout"] == "BLHNC"
    assert slab["decision"]["decided_by"] == "cross-layer"
    assert slab["fragments_per_block"] == 1

    told = Connector(qwen(canonical=True), []).explain()
    assert told["decision"]["cross_layer_blocks"] is False
    assert told["decision"]["layout"] == "LBHNC"
    assert told["decision"]["decided_by"] == "canonical"
    first, second = told["decision"]["votes"]
    assert (first["plugin"], first["priority"], first["answer"]) == ("canonical", 100, False)
    assert first["reason"].startswith("canonical is requested")
    assert (second["plugin"], second["priority"], second["answer"]) == ("cross-layer", 50, True)
    assert [layer["portable"] for layer in told["layers"]] == [True] * 48
    assert [layer["refusal"] for layer in told["layers"]] == [None] * 48


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("backend", [AWARE, BackendCapabilities()], ids=["aware", "unknown"])
@pytest.mark.parametrize("requested", [False, True])
def test_a_slab_vote_at_priority_0_yields_to_canonical_and_to_nobody_else_c1(
    requested, backend, layout
):
    context = qwen(canonical=requested, backend=backend, layout=layout)
    decision = decided(context, eager=Voter(True))
    assert decision.cross_layer_blocks is not requested
    if requested:
        assert decision.decided_by == "canonical"
    else:
        assert decision.decided_by == ("cross-layer" if backend is AWARE else "eager")
    assert {v.plugin: v.answer for v in decision.votes}["eager"] is True


@pytest.mark.parametrize("requested", [False, True])
def test_the_decided_layout_keeps_the_engine_s_head_and_token_order(requested):
    for layout, order, slab in (
        ("HND", KVCacheLayout.LBHNC, KVCacheLayout.BLHNC),
        ("NHD", KVCacheLayout.LBNHC, KVCacheLayout.BLNHC),
        ("BHLNC", KVCacheLayout.LBHNC, KVCacheLayout.BLHNC),
    ):
        decision = decided(qwen(canonical=requested, layout=layout))
        assert decision.layout is (order if requested else slab)


# What stands against a slab.


def test_inline_scales_are_an_abstention_that_says_so_c2():
    spec = AttentionSpec(block_size=16, total_kv_heads=4, head_size=64, itemsize=1, scale_bytes=4)
    assert spec.row_bytes == 136
    said = vote(of(spec, spec))
    assert said.answer is None
    assert said.reason == (
        "scales are inline in the rows, which a slab cell cannot be trusted to hold"
    )
    decision = decided(of(spec, spec))
    assert decision.cross_layer_blocks is False
    assert decision.decided_by is None
    assert said.reason in [v.reason for v in decision.votes]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_layer_with_inline_scales_is_enough_c2(position):
    plain = attention(head_size=68, itemsize=1)
    scaled = attention(head_size=64, itemsize=1, scale_bytes=4)
    assert plain.row_bytes == scaled.row_bytes
    specs = [plain, plain, plain]
    specs[position] = scaled
    assert vote(of(plain, plain, plain)).answer is True
    assert vote(of(*specs)).answer is None
    assert "scales are inline" in vote(of(*specs)).reason


UNKNOWN = "whether the backend is stride-aware is not known, which counts as no"


@pytest.mark.parametrize(
    ("backend", "answer", "reason"),
    [
        ({}, None, UNKNOWN),
        ({"stride_aware": None, "layouts": ["BLHNC"]}, None, UNKNOWN),
        ({"stride_aware": False}, None, "the backend is not stride-aware"),
        (
            {"stride_aware": False, "layouts": ["BLHNC"]},
            None,
            "the backend is not stride-aware",
        ),
        ({"stride_aware": True}, True, "one group of equal pages and a stride-aware backend"),
        (
            {"stride_aware": True, "layouts": ["LBHNC", "BLHNC"]},
            True,
            "one group of equal pages and a stride-aware backend",
        ),
        (
            {"stride_aware": True, "layouts": ["HND", "BLNHC"]},
            None,
            "the backend does not take BLHNC",
        ),
        ({"stride_aware": True, "layouts": []}, None, "the backend does not take BLHNC"),
    ],
)
def test_the_backend_must_be_known_to_follow_strides_c3(backend, answer, reason):
    context = qwen(backend=BackendCapabilities(**backend))
    assert vote(context) == Vote(answer, reason)
    decision = decided(context)
    assert decision.cross_layer_blocks is (answer is True)
    assert decision.layout is (KVCacheLayout.BLHNC if answer else KVCacheLayout.LBHNC)
    assert decision.decided_by == ("cross-layer" if answer else None)


def test_the_backend_s_layouts_are_compared_in_the_engine_s_order_c3():
    nhd = BackendCapabilities(stride_aware=True, layouts=["blnhc"])
    assert vote(qwen(backend=nhd, layout="NHD")).answer is True
    assert vote(qwen(backend=nhd, layout="HND")).reason == "the backend does not take BLHNC"


@given(
    aware=st.sampled_from([None, False, True]),
    family=st.text(min_size=1, max_size=12),
    dtype=st.sampled_from(["", "bfloat16", "float8_e4m3fn"]),
    encoding=st.sampled_from(["", "e4m3"]),
    backend=st.sampled_from(["", "FLASH_ATTN", "FLASHINFER"]),
)
def test_the_capability_is_never_guessed_from_names_c3(aware, family, dtype, encoding, backend):
    named = {f"{family}.{i}": QWEN for i in range(3)}
    context = PolicyContext(
        geometry=CacheGeometry(layers=named, num_blocks=4),
        backend=BackendCapabilities(name=backend, stride_aware=aware),
        dtype=dtype,
        encoding=encoding,
    )
    assert vote(context).answer is (True if aware else None)


def test_kernel_blocks_between_layers_are_an_abstention_with_the_reason_c5():
    split = attention(block_size=128, kernel_block_size=64)
    said = vote(of(split, split))
    assert said == Vote(
        None,
        "a kernel block of 64 tokens is smaller than the block of 128, and 2 layers would lie "
        "between",
    )
    assert decided(of(split, split)).layout is KVCacheLayout.LBHNC
    assert vote(of(split)).answer is True  # one layer: nothing lies between


def test_the_reason_names_the_layer_that_is_split_not_the_first_one_c5():
    whole, split = attention(block_size=128), attention(block_size=128, kernel_block_size=32)
    for specs in ((whole, split), (split, whole)):
        assert vote(of(*specs)).reason.startswith(
            "a kernel block of 32 tokens is smaller than the block of 128, and 2 layers"
        )


@pytest.mark.parametrize("requested", [False, True])
def test_a_forced_slab_of_kernel_blocks_is_refused_with_what_to_do_c5(requested):
    split = attention(block_size=128, kernel_block_size=64)
    with pytest.raises(CertificationError) as caught:
        decided(of(split, split, canonical=requested), forced=Voter(True, priority=900))
    assert [r.code for r in caught.value.refusals.values()] == [
        "kernel-split-needs-layer-compact"
    ] * 2
    assert "use LBHNC, or make the two sizes equal" in str(caught.value)
    assert decided(of(split, split, canonical=requested)).layout is KVCacheLayout.LBHNC


LATENT = LatentSpec(block_size=16, row_bytes=1152)


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (
            of(QWEN, LATENT),
            "the layers form 2 groups (attention, latent), each with its own blocks",
        ),
        (
            of(
                QWEN,
                QWEN,
                groups=[
                    LayerGroup(name="full", layer_names=layers(QWEN)),
                    LayerGroup(name="sliding", layer_names=["model.layers.1.self_attn.attn"]),
                ],
            ),
            "the layers form 2 groups (full, sliding), each with its own blocks",
        ),
        (
            of(StateSpec(state_bytes=64), StateSpec(state_bytes=64)),
            "recurrent state is not addressed through the attention backend's strides",
        ),
        (
            of(QWEN, attention(total_kv_heads=8), attention(total_kv_heads=2)),
            "pages differ in size: 16384 B, 32768 B, 65536 B",
        ),
        (
            of(QWEN, attention(page_padding=64)),
            "pages differ in size: 32768 B, 32832 B",
        ),
    ],
    ids=["kinds", "groups", "state", "heads", "padding"],
)
def test_every_other_obstacle_is_an_abstention_with_its_reason(context, reason):
    assert vote(context) == Vote(None, reason)
    decision = decided(context)
    assert decision.cross_layer_blocks is False
    assert decision.decided_by is None
    assert {v.plugin: v.reason for v in decision.votes}["cross-layer"] == reason


def test_what_counts_is_the_page_of_a_rank_with_its_padding():
    few, many = attention(total_kv_heads=4), attention(total_kv_heads=8)
    assert vote(of(few, many)).answer is None
    assert vote(of(few, many, grid=ParallelGrid(tp=8))).answer is True  # one head a rank of both
    padded = attention(head_size=124, page_padding=1024)
    assert vote(of(QWEN, padded)).answer is True
    assert vote(of(LATENT, LATENT)).answer is True


def test_heads_that_cannot_be_spread_are_refused_by_certification_not_by_the_vote():
    context = qwen(grid=ParallelGrid(tp=3))
    assert vote(context).answer is True
    with pytest.raises(CertificationError) as caught:
        decided(context)
    assert {r.code for r in caught.value.refusals.values()} == {"heads-not-divisible"}
    assert len(caught.value.refusals) == 48


# Votes do not depend on the wish, or on the rank.

specs = st.builds(
    AttentionSpec,
    block_size=st.sampled_from([16, 32]),
    total_kv_heads=st.sampled_from([1, 2, 4]),
    head_size=st.sampled_from([8, 16]),
    itemsize=st.sampled_from([1, 2]),
    kv_packing=st.sampled_from(["packed", "split"]),
    scale_bytes=st.sampled_from([0, 0, 0, 4]),
    page_padding=st.sampled_from([0, 0, 32]),
    kernel_block_size=st.sampled_from([None, None, 16]),
)
backends = st.builds(
    BackendCapabilities,
    stride_aware=st.sampled_from([None, False, True, True]),
    layouts=st.none() | st.sets(st.sampled_from(list(KVCacheLayout))),
)


@given(
    drawn=st.lists(specs, min_size=1, max_size=2),
    repeats=st.integers(1, 2),
    backend=backends,
    tp=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(list(KVCacheLayout)),
)
def test_cross_layer_votes_the_same_whether_or_not_canonical_is_requested(
    drawn, repeats, backend, tp, layout
):
    context = of(*drawn * repeats, grid=ParallelGrid(tp=tp), backend=backend, layout=layout)
    said = vote(context)
    assert said.answer in (True, None)
    assert said.reason
    for requested in (False, True):
        for rank in range(tp):
            asked = attrs.evolve(context, canonical=requested, rank=rank)
            assert vote(asked) == said


def test_canonical_votes_false_when_requested_and_otherwise_abstains():
    assert canonical.prefer_cross_layer_blocks(qwen(canonical=True)) == Vote(
        False,
        "canonical is requested, and every layer's page is certified by itself; a cross-layer "
        "slab offers no per-layer reference",
    )
    assert canonical.prefer_cross_layer_blocks(qwen()) == Vote(None, "canonical is not requested")


def test_direct_has_no_vote():
    assert not hasattr(direct, "prefer_cross_layer_blocks")
    assert "direct" not in [v.plugin for v in decided(qwen()).votes]


# Who registers what.

SMALL = AttentionSpec(block_size=4, total_kv_heads=2, head_size=4, itemsize=2)


def small(requested):
    return of(SMALL, SMALL, canonical=requested, dtype="bfloat16")


def decision(cross):
    return LayoutDecision(cross_layer_blocks=cross, layout="BLHNC" if cross else "LBHNC")


def per_layer(context):
    tensors = {name: torch.zeros(4, 2, 4, 8, dtype=torch.bfloat16) for name in context.stage_layers}
    return KVCaches(tensors=tensors)


def slab(context):
    names = list(context.stage_layers)
    memory = torch.zeros(4, len(names), 2, 4, 8, dtype=torch.bfloat16)
    return KVCaches.from_slab(memory, names, layer_dim=1)


def placed(registration):
    return {name: pages.page for name, pages in registration.pages.items()}


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("requested", [False, True])
@pytest.mark.parametrize(
    ("policy", "mine"),
    [
        (canonical, lambda requested, cross: requested and not cross),
        (cross_layer, lambda requested, cross: cross and not requested),
        (direct, lambda requested, cross: not requested),
    ],
    ids=["canonical", "cross-layer", "direct"],
)
def test_each_policy_registers_what_is_its_own_and_nothing_else(policy, mine, requested, cross):
    context = small(requested)
    caches = slab(context) if cross else per_layer(context)
    answer = policy.register_layers(context, decision(cross), caches)
    if not mine(requested, cross):
        assert answer is None
        return
    assert isinstance(answer, Registration)
    assert list(answer.pages) == list(context.stage_layers)
    for index, (name, pages) in enumerate(answer.pages.items()):
        assert pages.tensor is caches.tensors[name]  # never copied
        page = 4 * 2 * 16  # tokens, heads, bytes of a row
        assert pages.page.page_bytes == page
        assert pages.page.block_stride == (2 * page if cross else page)
        assert pages.page.offset == (index * page if cross else 0)


@pytest.mark.parametrize("requested", [False, True])
def test_canonical_goes_before_direct_and_both_read_the_same_pages(requested):
    connector = Connector(small(requested), [])
    caches = per_layer(connector.context) if requested else slab(connector.context)
    connector.register(caches)
    own = Registration.from_caches(connector.context, caches)
    assert placed(connector.registration) == placed(own)
    connector.close()


def test_direct_takes_what_the_engine_has_even_where_a_slab_was_not_decided():
    context = of(SMALL, SMALL, dtype="bfloat16", backend=BackendCapabilities())
    connector = Connector(context, [])
    assert connector.decision.cross_layer_blocks is False
    connector.register(slab(context))
    strides = {pages.page.block_stride for pages in connector.registration.pages.values()}
    assert strides == {2 * 128}
    connector.close()


def test_nobody_but_a_plugin_registers_canonical_pages_in_a_slab():
    context = small(True)
    ask = functools.partial(dict, context=context, decision=decision(True), caches=slab(context))
    answers = [policy.register_layers(**ask()) for policy in (canonical, cross_layer, direct)]
    assert answers == [None, None, None]
