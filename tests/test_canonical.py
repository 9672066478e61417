"""Canonical format v1 by hand: the worked offsets, and what they do and do not depend on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.canonical import local_heads, page_mapping, shards_of
from kvpolicy.errors import Refusal
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC


def attention(**changes):
    """Block 4, 4 heads of 8 elements of 2 B: packed rows of 32 B, split rows of 16 B."""
    sizes = {"block_size": 4, "total_kv_heads": 4, "head_size": 8, "itemsize": 2}
    return AttentionSpec(**{**sizes, **changes})


def mapping(spec, grid, rank, layout, order=None):
    return page_mapping(spec, grid, grid.rank(rank), layout, order or layout.order)


def runs(*arguments):
    return list(mapping(*arguments).byte_runs())


# --- worked values -----------------------------------------------------------------------------


def test_tp2_nhd():
    found = mapping(attention(), ParallelGrid(tp=2), 1, NHD)
    assert (found.local_page_bytes, found.canonical_page_bytes) == (256, 512)
    assert list(found.byte_runs()) == [(0, 64, 64), (64, 192, 64), (128, 320, 64), (192, 448, 64)]


def test_tp2_hnd():
    assert runs(attention(), ParallelGrid(tp=2), 1, HND) == [(0, 256, 256)]


@pytest.mark.parametrize("layout", [HND, NHD])
@pytest.mark.parametrize("packing", ["packed", "split"])
def test_tp1_is_one_run(packing, layout):
    assert runs(attention(kv_packing=packing), ParallelGrid(), 0, layout) == [(0, 0, 512)]


def test_tp8_nhd_replicates_four_heads_twice():
    """Rank 5 is shard 2, writer 1 of 2."""
    found = mapping(attention(), ParallelGrid(tp=8), 5, NHD)
    assert (found.num_writers, found.writer_index) == (2, 1)
    assert (found.local_page_bytes, found.canonical_page_bytes) == (128, 512)
    assert list(found.byte_runs()) == [(0, 64, 32), (32, 192, 32), (64, 320, 32), (96, 448, 32)]


def test_split_nhd_tp2():
    """Local half 128 B, canonical half 256 B."""
    assert runs(attention(kv_packing="split"), ParallelGrid(tp=2), 0, NHD) == [
        *[(32 * token, 64 * token, 32) for token in range(4)],
        *[(128 + 32 * token, 256 + 64 * token, 32) for token in range(4)],
    ]


def test_split_hnd_tp2():
    found = runs(attention(kv_packing="split"), ParallelGrid(tp=2), 1, HND)
    assert found == [(0, 128, 128), (128, 384, 128)]


def test_latent_dcp2():
    """Rows of 8 B at TP4 DCP2: rank 3 is cp rank 1, writer 1 of 2."""
    found = mapping(LatentSpec(block_size=4, row_bytes=8), ParallelGrid(tp=4, dcp=2), 3, NHD)
    assert (found.num_writers, found.writer_index) == (2, 1)
    assert (found.local_page_bytes, found.canonical_page_bytes) == (32, 64)
    assert list(found.byte_runs()) == [(0, 8, 8), (8, 24, 8), (16, 40, 8), (24, 56, 8)]


def test_hnd_pages_are_converted_to_nhd():
    """TP2, rank 1, heads 2 and 3: row (head, token) goes to 32 * (4 * token + head)."""
    found = runs(attention(), ParallelGrid(tp=2), 1, HND, NHD)
    rows = [(32 * (4 * h + t), 32 * (4 * t + 2 + h), 32) for t in range(4) for h in range(2)]
    assert found == rows


def test_converted_split_halves_meet_where_nothing_lies_between_them():
    """2 heads x 2 tokens at TP1: the last row of K and the first of V are one run of 2 rows."""
    spec = attention(block_size=2, total_kv_heads=2, kv_packing="split")
    assert runs(spec, ParallelGrid(), 0, HND, NHD) == [
        (0, 0, 16), (32, 16, 16), (16, 32, 16), (48, 48, 32),
        (96, 80, 16), (80, 96, 16), (112, 112, 16),
    ]  # fmt: skip


def test_inline_scales_only_lengthen_the_rows():
    """Rows of 2 * (64 + 4) = 136 B, each with its scales: TP2 NHD rank 1."""
    spec = attention(head_size=64, itemsize=1, scale_bytes=4)
    found = runs(spec, ParallelGrid(tp=2), 1, NHD)
    assert found == [(272 * token, 544 * token + 272, 272) for token in range(4)]


def test_k_and_v_may_differ_in_size():
    """(8 + 4) * 2 = 24 B a row."""
    found = runs(attention(v_head_size=4), ParallelGrid(tp=2), 1, NHD)
    assert found == [(48 * token, 96 * token + 48, 48) for token in range(4)]


def test_state_lies_side_by_side_a_slice_per_rank():
    grid = ParallelGrid(tp=2, pp=2, pcp=2)
    for rank in range(8):
        found = mapping(StateSpec(state_bytes=100), grid, rank, NHD)
        assert (found.num_writers, found.writer_index, found.portable) == (1, 0, False)
        assert found.canonical_page_bytes == 400
        assert list(found.byte_runs()) == [(0, rank % 4 * 100, 100)]


def test_padding_is_in_no_page():
    padded = mapping(attention(page_padding=64), ParallelGrid(tp=2), 1, NHD)
    assert padded == mapping(attention(), ParallelGrid(tp=2), 1, NHD)


# --- context parallelism -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interleave", "rank", "tokens"),
    [(1, 0, [0, 2, 4, 6]), (1, 1, [1, 3, 5, 7]), (2, 0, [0, 1, 4, 5]), (2, 1, [2, 3, 6, 7])],
)
@pytest.mark.parametrize("kind", ["dcp", "pcp"])
def test_c20_tokens_of_two_ranks_by_interleave(kind, interleave, rank, tokens):
    degrees = {"tp": 2, "dcp": 2} if kind == "dcp" else {"pcp": 2}
    grid = ParallelGrid(cp_interleave=interleave, **degrees)
    found = runs(LatentSpec(block_size=4, row_bytes=8), grid, rank, HND)
    placed = [to // 8 + n for _, to, size in found for n in range(size // 8)]
    assert placed == tokens


@pytest.mark.parametrize("interleave", [3, 8])
@pytest.mark.parametrize("spec", [attention(), LatentSpec(block_size=4, row_bytes=8)])
def test_c20_an_interleave_that_does_not_divide_the_block_is_refused(interleave, spec):
    grid = ParallelGrid(pcp=2, cp_interleave=interleave)
    for rank in range(2):  # the same in every role
        refusal = mapping(spec, grid, rank, HND)
        assert refusal == Refusal(
            "interleave-not-dividing",
            f"cp_interleave {interleave} does not divide block size 4; choose a divisor of 4",
        )


@pytest.mark.parametrize("interleave", [3, 8])
def test_c20_an_interleave_means_nothing_without_context_parallelism(interleave):
    spec = attention()
    here = mapping(spec, ParallelGrid(tp=2, cp_interleave=interleave), 1, NHD)
    assert here == mapping(spec, ParallelGrid(tp=2), 1, NHD)


# --- what the bytes depend on ------------------------------------------------------------------


def test_c7_packed_and_split_give_different_canonical_bytes():
    grid = ParallelGrid(tp=2)
    assert runs(attention(), grid, 0, NHD) != runs(attention(kv_packing="split"), grid, 0, NHD)


@given(
    st.sampled_from(["packed", "split"]),
    st.sampled_from(KVCacheLayout),
    st.sampled_from([HND, NHD]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 16),
)
def test_c8_a_dtype_selects_nothing(packing, layout, order, tp, factor):
    """The same page with wider elements: every number of its runs is that much larger."""
    grid = ParallelGrid(tp=tp)
    for rank in range(tp):
        thin = runs(attention(kv_packing=packing, itemsize=1), grid, rank, layout, order)
        wide = runs(attention(kv_packing=packing, itemsize=factor), grid, rank, layout, order)
        assert wide == [tuple(factor * number for number in run) for run in thin]


def test_c9_one_region_is_not_replicated():
    """Packed GQA at TP2: one region, one writer per head, a canonical page of two local pages."""
    found = [mapping(attention(), ParallelGrid(tp=2), rank, NHD) for rank in range(2)]
    for here in found:
        assert here.num_writers == 1
        assert here.canonical_page_bytes == 2 * here.local_page_bytes
    assert found[0].box != found[1].box


@given(st.sampled_from([attention(), attention(kv_packing="split")]))
def test_layouts_of_one_order_have_one_dense_page(spec):
    grid = ParallelGrid(tp=2)
    for layout in KVCacheLayout:
        assert runs(spec, grid, 1, layout, HND) == runs(spec, grid, 1, layout.order, HND)


@pytest.mark.parametrize(
    ("spec", "tp", "heads"),
    [
        (attention(), 1, 4),
        (attention(), 2, 2),
        (attention(), 8, 1),
        (LatentSpec(block_size=4, row_bytes=8), 4, 1),
        (StateSpec(state_bytes=8), 4, 1),
    ],
)
def test_local_heads(spec, tp, heads):
    assert local_heads(spec, ParallelGrid(tp=tp)) == heads


def test_heads_that_do_not_divide_are_refused_on_every_way():
    grid = ParallelGrid(tp=3)
    refusals = {
        local_heads(attention(), grid),
        shards_of(attention(), grid),
        *(mapping(attention(), grid, rank, HND) for rank in range(3)),
    }
    assert [refusal.code for refusal in refusals] == ["heads-not-divisible"]
