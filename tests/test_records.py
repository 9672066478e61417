"""What a slot holds: offsets, who writes and who is read, and how many copies that takes."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.boxes import Box
from kvpolicy.certify import Certificate
from kvpolicy.context import PolicyContext
from kvpolicy.decision import CastVote, decide
from kvpolicy.errors import Refusal
from kvpolicy.geometry import CacheGeometry, LayerGroup
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.records import fragments, group_records, prove_layers
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
LATENT = LatentSpec(block_size=4, row_bytes=8)
STATE = StateSpec(state_bytes=100)


def attention(**changes):
    sizes = {"block_size": 4, "total_kv_heads": 4, "head_size": 8, "itemsize": 2}
    return AttentionSpec(**{**sizes, **changes})


QWEN3 = attention(block_size=16, head_size=128)  # Qwen3-30B-A3B: 48 of these


def numbered(specs):
    return {f"layer.{n}": spec for n, spec in enumerate(specs)}


def start(layers, grid=None, *, slab=False, canonical=True, groups=None, stages=None, **more):
    """(context, decision, certificates, records) of an engine whose layers can be certified."""
    context = PolicyContext(
        geometry=CacheGeometry(layers=layers, num_blocks=8, groups=groups, stages=stages),
        grid=grid or ParallelGrid(),
        canonical=canonical,
        **more,
    )
    votes = [CastVote(plugin="test", priority=0, answer=slab)]
    decision = decide(votes, context.layout)
    proofs = prove_layers(context, decision)
    assert all(isinstance(proof, Certificate) for proof in proofs.values()), proofs
    return context, decision, proofs, group_records(context, proofs)


def record_of(*arguments, **named):
    records = start(*arguments, **named)[3]
    assert len(records) == 1
    return next(iter(records.values()))


def counted(*arguments, group="attention", **named):
    context, decision, proofs, records = start(*arguments, **named)
    return fragments(context, decision, proofs, records[group])


# --- offsets and sizes -------------------------------------------------------------------------


def test_a_canonical_record_is_its_pages_in_the_model_s_order():
    """Pages of 512, 1024 and 256 B."""
    layers = {
        "b": attention(),
        "a": attention(total_kv_heads=8),
        "c": attention(total_kv_heads=2),
    }
    record = record_of(layers, ParallelGrid(tp=2))
    assert record.offsets == {"b": 0, "a": 512, "c": 1536}
    assert record.record_bytes == 1792
    assert record.portable
    # rank 1 of 2 holds the upper heads: the second half of each HND page
    assert record.part(1, "a").box == Box(512, (), 0, 512 + 512)
    assert record.part(1, "c").box == Box(128, (), 0, 1536 + 128)


def test_a_private_record_is_a_slice_per_rank_of_that_rank_s_layers():
    """TP2, PP2: ranks 0, 1 hold layer 0 and ranks 2, 3 layer 1; pages of 256 and 512 B."""
    layers = numbered([attention(), attention(total_kv_heads=8)])
    record = record_of(layers, ParallelGrid(tp=2, pp=2), canonical=False)
    held = [(0, "layer.0"), (1, "layer.0"), (2, "layer.1"), (3, "layer.1")]
    assert [record.part(*one).box.to_offset for one in held] == [0, 256, 512, 1024]
    assert record.record_bytes == 1536
    assert not record.portable
    part = record.part(3, "layer.1")
    assert (part.box, part.num_writers, part.writer_index) == (Box(512, (), 0, 1024), 1, 0)


def test_a_private_slice_is_a_rank_s_pages_in_the_model_s_order():
    """TP2: rank 1's slice begins after rank 0's two pages of 256 and 512 B."""
    layers = {"b": attention(), "a": attention(total_kv_heads=8)}
    record = record_of(layers, ParallelGrid(tp=2), canonical=False)
    places = [record.part(rank, name).box.to_offset for rank in (0, 1) for name in layers]
    assert places == [0, 256, 768, 1024]


def test_a_group_lists_its_layers_in_the_model_s_order():
    groups = [LayerGroup(name="g", layer_names=["layer.1", "layer.0"])]
    record = record_of(numbered([attention(), attention()]), groups=groups)
    assert record.group.layer_names == ("layer.0", "layer.1")
    assert record.offsets == {"layer.0": 0, "layer.1": 512}


def test_groups_have_records_of_their_own():
    layers = {"a": attention(), "s": STATE, "b": attention()}
    records = start(layers, ParallelGrid(tp=2))[3]
    assert {name: r.record_bytes for name, r in records.items()} == {
        "attention": 1024,
        "state": 200,
    }
    assert {name: r.portable for name, r in records.items()} == {"attention": True, "state": False}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_c16_a_canonical_record_has_one_size_at_any_tp(tp):
    """2 heads, head size 128, bf16, block 16, 4 layers."""
    spec = attention(block_size=16, total_kv_heads=2, head_size=128)
    assert record_of(numbered([spec] * 4), ParallelGrid(tp=tp)).record_bytes == 65_536


@pytest.mark.parametrize(("tp", "record_bytes"), [(1, 65_536), (2, 65_536), (4, 131_072)])
def test_c16_a_private_record_repeats_what_ranks_repeat(tp, record_bytes):
    spec = attention(block_size=16, total_kv_heads=2, head_size=128)
    record = record_of(numbered([spec] * 4), ParallelGrid(tp=tp), canonical=False)
    assert record.record_bytes == record_bytes


def test_c19_stages_are_paired_by_name():
    """21 + 23 layers: rank 1's first layer begins where layer 21's canonical page does."""
    layers = numbered([attention(total_kv_heads=1 + n % 3) for n in range(44)])
    one = record_of(layers)
    two = record_of(layers, ParallelGrid(pp=2), stages=[21, 23])
    assert (two.record_bytes, two.offsets) == (one.record_bytes, one.offsets)
    pages = [128 * (1 + n % 3) for n in range(44)]
    assert two.offsets["layer.0"] == 0
    assert two.offsets["layer.21"] == sum(pages[:21])
    assert two.topology.stages == (21, 23)
    for name in layers:
        rank = 0 if name in list(layers)[:21] else 1
        assert two.part(rank, name) == one.part(0, name)


# --- who writes, who is read -------------------------------------------------------------------


@st.composite
def engines(draw):
    """Layers of several kinds that can be certified on one grid, in one group or by kind."""
    replicas, shards = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    latent_only = draw(st.booleans())
    tp = replicas * shards
    spread = tp if latent_only else replicas
    grid = ParallelGrid(
        tp=tp,
        pp=draw(st.integers(1, 2)),
        dcp=draw(st.sampled_from([n for n in range(1, 9) if spread % n == 0])),
        pcp=draw(st.integers(1, 2)),
    )
    kinds = [LatentSpec(block_size=1, row_bytes=3), StateSpec(state_bytes=5)]
    if not latent_only:
        split = attention(block_size=1, head_size=1, total_kv_heads=shards, kv_packing="split")
        kinds += [split, attrs.evolve(split, kv_packing="packed", v_head_size=2)]
        if grid.dcp == 1:
            kinds.append(attrs.evolve(split, total_kv_heads=tp))
    specs = draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=4))
    layers = numbered(specs)
    together = [LayerGroup(name="all", layer_names=layers)] if draw(st.booleans()) else None
    stages = [1, len(specs) - 1] if grid.pp == 2 else None
    return layers, grid, together, stages, draw(st.sampled_from([HND, NHD]))


def touched(record, rank, name):
    """The record's bytes that a rank's page of a layer is."""
    runs = record.part(rank, name).box.runs()
    return [byte for _, to, size in runs for byte in range(to, to + size)]


@given(engines(), st.booleans(), st.integers(0, 30))
def test_the_elected_writers_of_a_slot_write_each_byte_once(engine, canonical, slot):
    """And sources are exactly the ranks that wrote what a rank reads, if it reads anything."""
    layers, grid, groups, stages, order = engine
    context, _, _, records = start(
        layers, grid, groups=groups, stages=stages, layout=order, canonical=canonical
    )
    stage_of = context.geometry.stage_of(grid.pp)
    for record in records.values():
        owner = np.full(record.record_bytes, -1)
        held = {
            rank: [name for name in record.group.layer_names if stage_of[name] == stage]
            for stage in range(grid.pp)
            for rank in range(stage * grid.stage_size, (stage + 1) * grid.stage_size)
        }
        for rank, names in held.items():
            for name in names:
                part = record.part(rank, name)
                if slot % part.num_writers == part.writer_index:
                    written = touched(record, rank, name)
                    assert (owner[written] == -1).all()
                    owner[written] = rank
        assert (owner >= 0).all()
        assert record.writers(slot) == {*owner.tolist()}
        for rank, names in held.items():
            read = [byte for name in names for byte in touched(record, rank, name)]
            assert record.sources(rank, slot) == {*owner[read].tolist()}


@pytest.mark.parametrize("slot", range(4))
def test_c17_one_writer_per_block_and_head(slot):
    """2 heads at TP4: head 0 is written by rank 0 or 1, head 1 by rank 2 or 3, in turn."""
    record = record_of({"a": attention(total_kv_heads=2)}, ParallelGrid(tp=4))
    turn = slot % 2
    assert record.writers(slot) == {turn, 2 + turn}
    assert record.sources(0, slot) == record.sources(1, slot) == {turn}
    assert record.sources(2, slot) == record.sources(3, slot) == {2 + turn}


def test_c17_eight_heads_at_tp16():
    record = record_of({"a": attention(total_kv_heads=8)}, ParallelGrid(tp=16))
    assert record.writers(0) == set(range(0, 16, 2))
    assert record.writers(1) == set(range(1, 16, 2))


def test_c18_a_replicated_latent_has_one_writer_and_a_state_has_all():
    records = start({"m": LATENT, "s": STATE}, ParallelGrid(tp=2))[3]
    assert [records["latent"].writers(slot) for slot in range(3)] == [{0}, {1}, {0}]
    assert [records["state"].writers(slot) for slot in range(3)] == [{0, 1}] * 3
    assert records["state"].sources(1, 0) == {1}
    assert [records["state"].part(rank, "s").box.to_offset for rank in (0, 1)] == [0, 100]


def test_c18_both_kinds_in_one_group():
    layers = {"m": LatentSpec(block_size=1, row_bytes=8), "s": STATE}
    groups = [LayerGroup(name="g", layer_names=layers)]
    record = record_of(layers, ParallelGrid(tp=2), groups=groups)
    assert not record.portable
    assert record.record_bytes == 8 + 200
    assert record.writers(0) == record.writers(1) == {0, 1}
    assert record.sources(0, 1) == {0, 1}  # the latent from rank 1, its own state
    assert record.sources(1, 1) == {1}


# --- fragments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "per_layer", "total"), [(NHD, 16, 768), (HND, 1, 48)])
def test_fragments_of_qwen3_30b_a3b_at_tp2(layout, per_layer, total):
    found = counted(numbered([QWEN3] * 48), ParallelGrid(tp=2), layout=layout)
    assert {*found.layers.values()} == {per_layer}
    assert len(found.layers) == 48
    assert found.total == total


@pytest.mark.parametrize("layout", [HND, NHD])
def test_a_slab_stored_as_it_is_is_one_fragment(layout):
    layers = numbered([QWEN3] * 48)
    found = counted(layers, ParallelGrid(tp=2), layout=layout, slab=True, canonical=False)
    assert {*found.layers.values()} == {1}
    assert found.total == 1


def test_a_slab_of_two_stages_is_two_fragments():
    layers = numbered([QWEN3] * 48)
    found = counted(layers, ParallelGrid(tp=2, pp=2), slab=True, canonical=False)
    assert found.total == 2


def test_canonical_pages_inside_a_slab_join_only_where_the_record_does():
    """At TP1 they are the slab; at TP2 each layer's half lies apart from the next layer's."""
    layers = numbered([QWEN3] * 48)
    assert counted(layers, ParallelGrid(tp=1), slab=True).total == 1
    assert counted(layers, ParallelGrid(tp=2), slab=True).total == 48


def test_fragments_never_join_across_padding():
    padded = numbered([attrs.evolve(QWEN3, page_padding=64)] * 48)
    assert counted(padded, slab=True, canonical=False).total == 48


def test_fragments_never_join_across_a_layer_of_another_group():
    layers = {"a": attention(), "b": attention(), "m": LATENT, "c": attention()}
    assert counted(layers, slab=True, canonical=False).total == 2
    assert counted(layers, slab=True, canonical=False, group="latent").total == 1


def test_per_layer_memory_never_joins():
    assert counted(numbered([QWEN3] * 3), canonical=False).total == 3


def test_kernel_blocks_cut_an_hnd_page_into_a_fragment_per_head_and_kernel_block():
    layers = {"a": attention(kernel_block_size=2)}
    assert counted(layers).total == 4 * 2
    assert counted(layers, layout=NHD).total == 1


# --- proofs ------------------------------------------------------------------------------------


def proofs_of(layers, slab, **more):
    context = PolicyContext(geometry=CacheGeometry(layers=layers, num_blocks=8), **more)
    votes = [CastVote(plugin="test", priority=0, answer=slab)]
    return prove_layers(context, decide(votes, context.layout))


def test_every_layer_is_proved_or_refused_by_name():
    layers = {"a": attention(), "b": attention(total_kv_heads=3), "c": STATE}
    proofs = proofs_of(layers, False, grid=ParallelGrid(tp=2))
    assert list(proofs) == ["a", "b", "c"]
    assert isinstance(proofs["b"], Refusal)
    assert proofs["b"].code == "heads-not-divisible"
    assert isinstance(proofs["a"], Certificate)
    assert isinstance(proofs["c"], Certificate)


def test_c5_kernel_blocks_in_a_slab_of_two_layers_are_refused_and_of_one_are_not():
    """With one layer, block-outermost and layer-compact are the same bytes."""
    spec = attention(block_size=128, kernel_block_size=64)
    two = proofs_of(numbered([spec, spec]), True)
    assert {proof.code for proof in two.values()} == {"kernel-split-needs-layer-compact"}
    assert all(
        isinstance(p, Certificate) for p in proofs_of(numbered([spec, spec]), False).values()
    )
    assert isinstance(proofs_of(numbered([spec]), True)["layer.0"], Certificate)


@pytest.mark.parametrize("canonical", [False, True])
def test_the_canonical_order_counts_only_when_canonical_is_asked_for(canonical):
    proofs = proofs_of({"a": attention()}, False, canonical=canonical, canonical_order="nhd")
    assert proofs["a"].canonical_order is (NHD if canonical else HND)
