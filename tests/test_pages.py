"""Where pages lie, against memory that numpy lays out by transposing logical axes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.canonical import page_mapping
from kvpolicy.certify import certify
from kvpolicy.errors import Refusal
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.pages import StridedPage, page_in_layout, page_shape, unplaceable
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
PADDING = -1


def attention(**changes):
    return AttentionSpec(
        **{"block_size": 4, "total_kv_heads": 2, "head_size": 1, "itemsize": 1, **changes}
    )


def logical_bytes(spec, num_layers, num_blocks):
    """A number of its own for every byte (layer, block, half, head, token, byte of the row)."""
    shape = (num_layers, num_blocks, spec.halves, spec.total_kv_heads, spec.block_size)
    return np.arange(np.prod((*shape, spec.row_bytes))).reshape(*shape, spec.row_bytes)


def dense_page(logical, layer, block, heads_first):
    page = logical[layer, block]  # half, head, token, byte
    return (page if heads_first else page.swapaxes(1, 2)).reshape(-1)


def memory_of(logical, layout, ratio, padding):
    """The engine's whole memory: the logical bytes in the layout's order, a row per kernel block.

    The K and V halves of a split page lie next after L and B, and so does padding, at the end of
    every row.
    """
    layers, blocks, halves, heads, tokens, row = logical.shape
    rows = logical.reshape(layers, blocks, halves, heads, ratio, tokens // ratio, row)
    rows = np.moveaxis(rows, 4, 2).reshape(layers, blocks * ratio, halves, heads, -1, row)
    axes = {"L": 0, "B": 1, "H": 3, "N": 4, "C": 5}
    order = [axes[axis] for axis in layout.value]
    order.insert(2, 2)  # the halves
    memory = rows.transpose(order)
    if not padding:
        return memory.reshape(-1)
    flat = memory.reshape(memory.shape[0] * memory.shape[1], -1)
    filler = np.full((len(flat), padding // ratio), PADDING)
    return np.concatenate([flat, filler], axis=1).reshape(-1)


@st.composite
def placings(draw):
    layout = draw(st.sampled_from(KVCacheLayout))
    kernel = draw(st.integers(1, 4))
    ratio = draw(st.integers(1, 3)) if layout.layer_compact else 1
    spec = attention(
        block_size=kernel * ratio,
        kernel_block_size=kernel,
        total_kv_heads=draw(st.integers(1, 3)),
        head_size=draw(st.integers(1, 3)),
        scale_bytes=draw(st.integers(0, 1)),
        kv_packing=draw(st.sampled_from(["packed", "split"])) if layout.block_compact else "packed",
        page_padding=draw(st.integers(0, 2)) * ratio if layout.block_compact else 0,
    )
    return spec, layout, draw(st.integers(1, 3)), draw(st.integers(1, 3))


@given(placings())
def test_every_layout_places_every_byte_where_its_axes_say(placing):
    """And padding lies in no run."""
    spec, layout, num_layers, num_blocks = placing
    logical = logical_bytes(spec, num_layers, num_blocks)
    memory = memory_of(
        logical, layout, spec.block_size // spec.kernel_block_size, spec.page_padding
    )
    for layer in range(num_layers):
        page = page_in_layout(
            spec,
            spec.total_kv_heads,
            layout,
            num_blocks=num_blocks,
            offset=int(np.flatnonzero(memory == logical[layer, 0].min())[0]),
            num_layers=num_layers,
        )
        for block in range(num_blocks):
            expected = dense_page(logical, layer, block, layout.heads_first)
            found = np.full_like(expected, PADDING)
            for at, dense, size in page.box.runs():
                start = page.offset + block * page.block_stride + at
                found[dense : dense + size] = memory[start : start + size]
            assert found.tolist() == expected.tolist()
        last = np.flatnonzero(np.isin(memory, logical[layer])).max()
        assert page.end(num_blocks) == last + 1
        assert page.page_bytes == logical[layer, 0].size
        assert page.is_disjoint(num_blocks)


def test_c10_two_kernel_blocks_of_an_hnd_block_are_not_dense():
    """2 heads, block 4, kernel block 2: memory holds canonical rows 0,1,4,5,2,3,6,7."""
    page = page_in_layout(
        attention(kernel_block_size=2, itemsize=16), 2, HND, num_blocks=3
    )  # rows of 32 B
    by_memory = sorted(
        (at // 32 + n, to // 32 + n) for at, to, size in page.box.runs() for n in range(size // 32)
    )
    assert [canonical for _, canonical in by_memory] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert page.block_stride == 8 * 32


def test_c10_block_b_is_kernel_rows_2b_and_2b_plus_1():
    """Block 128, kernel block 64, 4 blocks: 8 rows."""
    spec = attention(block_size=128, kernel_block_size=64, head_size=64, itemsize=2)
    page = page_in_layout(spec, 2, HND, num_blocks=4)
    row_bytes = page.page_bytes // 2
    assert page.span_bytes(4) == 8 * row_bytes
    for block in range(4):
        touched = {(block * page.block_stride + at) // row_bytes for at, _, _ in page.box.runs()}
        assert touched == {2 * block, 2 * block + 1}


@pytest.mark.parametrize("order", [HND, NHD])
@pytest.mark.parametrize("packing", ["packed", "split"])
def test_c10_canonical_bytes_do_not_know_of_kernel_blocks(order, packing):
    grid = ParallelGrid(tp=2)
    whole = attention(kv_packing=packing, head_size=8, total_kv_heads=4)
    split = attention(kv_packing=packing, head_size=8, total_kv_heads=4, kernel_block_size=2)
    for rank in grid.ranks():
        one, other = (page_mapping(s, grid, rank, order, order) for s in (whole, split))
        assert one == other
    assert certify(whole, grid, order).mappings == certify(split, grid, order).mappings


def test_c11_the_span_ends_with_the_last_payload_byte():
    page = page_in_layout(
        LatentSpec(block_size=16, row_bytes=256, page_padding=64), 1, HND, num_blocks=28_743
    )
    assert (page.page_bytes, page.block_stride) == (4_096, 4_160)
    assert page.span_bytes(28_743) == 119_570_816
    assert page.span_bytes(28_743) != 28_743 * 4_096 == 117_731_328
    assert page.span_bytes(1) == 4_096


def test_c12_padding_moves_no_head_and_is_in_no_run():
    """4 heads of 1024 B in a page of 4160 B."""
    spec = attention(block_size=8, total_kv_heads=4, head_size=32, itemsize=2, page_padding=64)
    page = page_in_layout(spec, 4, HND, num_blocks=2)
    assert page_shape(spec, 4, 8, HND).head_stride * 2 == 2_048
    assert list(page.box.runs()) == [(0, 0, 4_096)]
    assert page.block_stride == 4_160


def test_pages_of_a_state_are_opaque_and_one_run():
    page = page_in_layout(StateSpec(state_bytes=100, page_padding=28), 1, NHD, num_blocks=3)
    assert list(page.box.runs()) == [(0, 0, 100)]
    assert (page.block_stride, page.span_bytes(3)) == (128, 356)


def test_a_slab_of_unequal_pages_has_the_block_stride_that_is_given():
    spec = attention(head_size=8)
    page = page_in_layout(
        spec, 2, KVCacheLayout.BLHNC, num_blocks=3, offset=512, num_layers=7, slab_block_bytes=2_000
    )
    assert (page.offset, page.block_stride) == (512, 2_000)


NOT_BLOCK_COMPACT = [KVCacheLayout.LHBNC, KVCacheLayout.BHLNC]
BLOCK_OUTERMOST = [layout for layout in KVCacheLayout if layout.block_outermost]


@pytest.mark.parametrize("layout", NOT_BLOCK_COMPACT)
def test_split_halves_need_a_page_that_is_one_run(layout):
    refusal = page_in_layout(attention(kv_packing="split"), 2, layout, num_blocks=2)
    assert refusal.code == "kv-halves-need-block-compact"
    assert f"which {layout} does not give; use {layout.order} or {layout.slab}" in refusal.detail
    assert "or packed K/V" in refusal.detail


@pytest.mark.parametrize("layout", NOT_BLOCK_COMPACT)
@pytest.mark.parametrize(
    "spec", [attention(page_padding=8), StateSpec(state_bytes=8, page_padding=8)]
)
def test_padding_needs_a_page_that_is_one_run(layout, spec):
    refusal = page_in_layout(spec, 2, layout, num_blocks=2)
    assert refusal.code == "padding-needs-block-compact"
    assert f"padded by 8 B must be one run of bytes, which {layout} does not" in refusal.detail
    assert f"use {layout.order} or {layout.slab}" in refusal.detail


@pytest.mark.parametrize("layout", BLOCK_OUTERMOST)
@pytest.mark.parametrize(
    "spec",
    [
        attention(block_size=128, kernel_block_size=64),
        LatentSpec(block_size=128, row_bytes=8, kernel_block_size=64),
    ],
)
def test_c5_kernel_blocks_need_a_layer_s_own_memory(layout, spec):
    refusal = page_in_layout(spec, 1, layout, num_blocks=2, num_layers=2)
    assert refusal.code == "kernel-split-needs-layer-compact"
    assert "blocks of 64 tokens, so a block of 128 is 2 kernel blocks" in refusal.detail
    assert f"use {layout.order}, or make the two sizes equal" in refusal.detail
    assert isinstance(page_in_layout(spec, 1, layout.order, num_blocks=2), StridedPage)


@pytest.mark.parametrize("kernel", [3, 5, 8, 65])
@pytest.mark.parametrize("layout", KVCacheLayout)
def test_a_kernel_block_divides_the_block(kernel, layout):
    refusal = page_in_layout(attention(kernel_block_size=kernel), 2, layout, num_blocks=2)
    assert refusal.code == "kernel-block-not-dividing"
    assert f"a kernel block of {kernel} tokens does not divide the block of 4" in refusal.detail
    assert "choose a divisor of 4" in refusal.detail


def test_padding_is_shared_evenly_by_kernel_blocks():
    refusal = unplaceable(attention(kernel_block_size=1, page_padding=6), HND)
    assert refusal.code == "kernel-block-not-dividing"
    assert "a padding of 6 B cannot be shared evenly by the 4 kernel blocks" in refusal.detail
    assert "choose a multiple of 4" in refusal.detail


@given(
    st.sampled_from(KVCacheLayout),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 4),
    st.sampled_from(["packed", "split"]),
)
def test_pages_are_placed_exactly_where_nothing_speaks_against_it(
    layout, block, kernel, padding, packing
):
    spec = attention(
        block_size=block, kernel_block_size=kernel, page_padding=padding, kv_packing=packing
    )
    why = unplaceable(spec, layout)
    placed = page_in_layout(spec, 2, layout, num_blocks=2)
    assert (placed == why) if why else isinstance(placed, StridedPage)
    possible = block % kernel == 0 and padding % (block // kernel) == 0
    possible &= layout.block_compact or (packing == "packed" and not padding)
    possible &= layout.layer_compact or block == kernel
    assert isinstance(why, Refusal) != possible
    assert not possible or placed.is_disjoint(2)
