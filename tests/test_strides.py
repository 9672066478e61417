"""Pages read off real tensors: every element is found by its logical coordinates, or refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.canonical import page_mapping
from kvpolicy.errors import Refusal
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.pages import StridedPage
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec
from kvpolicy.strides import TensorFacts, page_of_tensor

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
ITEM = 4  # elements are int32, each with a number of its own


def attention(**changes):
    sizes = {"block_size": 4, "total_kv_heads": 2, "head_size": 3, "itemsize": ITEM}
    return AttentionSpec(**{**sizes, **changes})


def facts_of(tensor):
    item = tensor.element_size()
    return TensorFacts(
        shape=tuple(tensor.shape),
        strides=tuple(stride * item for stride in tensor.stride()),
        itemsize=item,
        offset=tensor.storage_offset() * item,
    )


def read(tensor, spec, layout=HND, heads=None, num_blocks=None):
    heads = heads or (1 if isinstance(spec, StateSpec) else spec.total_kv_heads)
    return page_of_tensor(facts_of(tensor), spec, heads, layout, num_blocks or tensor.shape[0])


def numbered(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)


def storage_bytes(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def elements(tensor, page, block, dtype=np.int32):
    """A block's dense page, fetched from the raw storage as the page says."""
    memory = storage_bytes(tensor)
    dense = np.zeros(page.page_bytes, dtype=np.uint8)
    for at, to, size in page.box.runs():
        start = page.offset + block * page.block_stride + at
        dense[to : to + size] = memory[start : start + size]
    return dense.view(dtype).tolist()


def by_coordinates(logical, block, layout):
    """A block's dense page of a (block, half, head, token, element) array."""
    page = np.asarray(logical)[block]
    return (page if layout.heads_first else page.swapaxes(1, 2)).reshape(-1).tolist()


def refused(tensor, spec, layout=HND, **arguments):
    refusal = read(tensor, spec, layout, **arguments)
    assert isinstance(refusal, Refusal), refusal
    return refusal.code, refusal.detail


# --- tensors that an engine may give -----------------------------------------------------------


@st.composite
def engines(draw):
    """One layer's view of memory in any layout: (tensor, logical (B, K, H, N, C), spec, order)."""
    layout = draw(st.sampled_from(KVCacheLayout))
    layers, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, tokens, size = (draw(st.integers(1, 4)) for _ in range(3))
    split = layout.block_compact and draw(st.booleans())
    spec = attention(
        block_size=tokens,
        total_kv_heads=heads,
        head_size=size,
        kv_packing="split" if split else "packed",
    )
    content = spec.row_bytes // ITEM
    shape = (layers, blocks, spec.halves, heads, tokens, content)
    order = [{"L": 0, "B": 1, "H": 3, "N": 4, "C": 5}[axis] for axis in layout.value]
    halves_at = draw(st.sampled_from([0, 1, 2])) if split and layout.layer_compact else 2
    order.insert(halves_at, 2)  # beside L and B: inside the block, or outside all blocks
    memory = numbered(*(shape[axis] for axis in order))
    logical = memory.permute(*np.argsort(order).tolist())
    tail = draw(st.permutations(range(1, 5)))
    layer = draw(st.integers(0, layers - 1))
    return logical[layer].permute(0, *tail), logical[layer], spec, layout


@given(engines())
def test_pages_of_views_of_any_layout_in_any_order_of_dimensions(engine):
    """Sizes may be equal (heads, tokens, elements, halves): then the declared layout decides."""
    tensor, logical, spec, layout = engine
    page = read(tensor, spec, layout)
    for block in range(tensor.shape[0]):
        assert elements(tensor, page, block) == by_coordinates(logical, block, layout)
    assert page.is_disjoint(tensor.shape[0])


@pytest.mark.parametrize("layout", [HND, NHD])
def test_k_and_v_of_a_packed_row_may_be_a_dimension(layout):
    heads_first = numbered(3, 2, 4, 2, 3) if layout is HND else numbered(3, 4, 2, 2, 3)
    logical = heads_first if layout is HND else heads_first.movedim(1, 2)
    page = read(heads_first, attention(), layout)
    expected = logical.reshape(3, 1, 2, 4, 6)
    assert elements(heads_first, page, 2) == by_coordinates(expected, 2, layout)


def test_k_and_v_tensors_side_by_side_per_head_are_no_packed_row():
    """(block, 2, head, token, element) is split K/V, not packed."""
    code, detail = refused(numbered(3, 2, 2, 4, 3), attention())
    assert code == "stride-contradicts-layout"
    assert "declare the engine's layout and its padding" in detail


def test_wider_elements_of_the_same_rows_are_the_same_page():
    """Whether a dtype is right is the context's business; see registration."""
    tensor = numbered(3, 2, 4, 6)
    assert read(tensor.view(torch.int64), attention()) == read(tensor, attention())


@pytest.mark.parametrize("packing", ["packed", "split"])
def test_heads_of_a_token_may_be_flattened_in_nhd(packing):
    spec = attention(kv_packing=packing, total_kv_heads=3)
    row = spec.row_bytes // ITEM
    tensor = numbered(2, *([2] if spec.split else []), 4, 3 * row)
    logical = tensor.reshape(2, spec.halves, 4, 3, row).movedim(3, 2)
    page = read(tensor, spec, NHD)
    assert elements(tensor, page, 1) == by_coordinates(logical, 1, NHD)
    assert refused(tensor, spec, HND)[0] == "shape-contradicts-spec"


@pytest.mark.parametrize("layout", [HND, NHD])
@pytest.mark.parametrize("packing", ["packed", "split"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_a_tail_that_is_one_run_is_the_dense_page(layout, packing, dtype):
    spec = attention(kv_packing=packing)
    tensor = numbered(3, 48).view(dtype)
    page = read(tensor, spec, layout)
    assert list(page.box.runs()) == [(0, 0, 192)]
    assert page.block_stride == 192
    assert elements(tensor, page, 1) == list(range(48, 96))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((3, 4, 6), LatentSpec(block_size=4, row_bytes=24)),
        ((3, 1, 4, 6), LatentSpec(block_size=4, row_bytes=24)),
        ((3, 4, 1, 6), LatentSpec(block_size=4, row_bytes=24)),
        ((3, 24), LatentSpec(block_size=4, row_bytes=24)),
        ((3, 24), StateSpec(state_bytes=96)),
        ((3, 2, 3, 4), StateSpec(state_bytes=96)),
    ],
)
@pytest.mark.parametrize("layout", [HND, NHD])
def test_latents_and_states(shape, spec, layout):
    tensor = numbered(*shape)
    page = read(tensor, spec, layout)
    assert list(page.box.runs()) == [(0, 0, 96)]
    assert elements(tensor, page, 2) == list(range(48, 72))


def test_latents_in_a_slab_keep_the_slab_s_block_stride():
    slab = numbered(3, 5, 4, 6)  # blocks, layers, tokens, elements
    page = read(slab[:, 2], LatentSpec(block_size=4, row_bytes=24))
    assert (page.offset, page.block_stride) == (2 * 96, 5 * 96)
    assert elements(slab, page, 1) == slab[1, 2].reshape(-1).tolist()


def test_c10_kernel_blocks_are_rows():
    """Block 4, kernel block 2, 4 blocks: 8 rows; block b is rows 2b and 2b+1."""
    spec = attention(kernel_block_size=2)
    tensor = numbered(8, 2, 2, 6)
    page = read(tensor, spec, num_blocks=4)
    for block in range(4):
        rows = tensor[2 * block : 2 * block + 2]  # (row, head, token, element)
        assert elements(tensor, page, block) == rows.movedim(1, 0).reshape(-1).tolist()


def test_c13_a_view_is_taken_as_it_is():
    """Block stride 1,039,680, offset 8,640: nothing outside the view's own pages is touched."""
    storage = torch.zeros(2 * 1_039_680, dtype=torch.uint8)
    spec = LatentSpec(block_size=16, row_bytes=540)
    view = storage.as_strided((2, 16, 540), (1_039_680, 540, 1), 8_640)
    page = read(view, spec)
    assert (page.offset, page.block_stride, page.page_bytes) == (8_640, 1_039_680, 8_640)
    view.fill_(7)
    memory = storage_bytes(storage)
    assert np.flatnonzero(memory).tolist() == [
        block * page.block_stride + page.offset + byte for block in (0, 1) for byte in range(8_640)
    ]


def test_c12_padding_between_pages_is_skipped():
    """4 heads of 1024 B in rows of 4160 B: head 2 begins at 2048."""
    spec = attention(block_size=32, total_kv_heads=4, head_size=4, page_padding=64)
    padded = numbered(3, 1_040)
    view = padded.as_strided((3, 4, 32, 8), (1_040, 256, 8, 1))
    for tensor in (view, padded, padded.view(torch.uint8)):
        page = read(tensor, spec)
        assert page.block_stride == 4_160
        assert list(page.box.runs()) == [(0, 0, 4_096)]
        assert elements(padded, page, 1)[512:514] == [1_040 + 512, 1_040 + 513]


def test_one_block_has_no_stride_to_contradict():
    tensor = numbered(1, 2, 4, 6).as_strided((1, 2, 4, 6), (0, 24, 6, 1))
    page = read(tensor, attention(page_padding=8))
    assert page.block_stride == 192 + 8


# --- what a shape cannot tell, and what it contradicts ---------------------------------------


def test_c7_with_two_heads_the_declaration_alone_tells_packed_from_split():
    """(N, 2, tokens, X): two heads of packed HND, or two halves of flattened split NHD."""
    tensor = numbered(3, 2, 4, 6)
    packed, split = attention(), attention(kv_packing="split")
    one, other = read(tensor, packed, HND), read(tensor, split, NHD)
    assert one == other  # the same bytes in the same places ...
    grid = ParallelGrid(tp=2)
    meanings = [
        list(page_mapping(spec, grid, grid.rank(1), order, order).byte_runs())
        for spec, order in ((packed, HND), (split, NHD))
    ]
    assert meanings[0] != meanings[1]  # ... which mean something else


@pytest.mark.parametrize("spec", [attention(), attention(kv_packing="split")])
def test_c7_a_shape_that_contradicts_the_declaration_is_refused(spec):
    other = numbered(3, 2, 2, 4, 6)  # split with rows of 24 B, whose half is declared 12 B
    code, detail = refused(other, spec)
    assert code == "shape-contradicts-spec"
    assert "found shape [3, 2, 2, 4, 6] of 4 B elements" in detail
    halves = "2 halves x " if spec.split else ""
    content = spec.row_bytes // ITEM
    expected = f"expected 3 rows x {halves}2 heads x 4 tokens x {content} elements of 4 B"
    assert expected in detail


def test_equal_heads_and_tokens_are_told_apart_by_the_declared_layout():
    tensor = numbered(2, 4, 4, 6)
    spec = attention(total_kv_heads=4)
    assert read(tensor, spec, HND) == read(tensor.transpose(1, 2), spec, HND)
    page = read(tensor, spec, NHD)
    expected = tensor.unsqueeze(1).transpose(2, 3)  # the first of the two is tokens
    assert elements(tensor, page, 1) == by_coordinates(expected, 1, NHD)


@pytest.mark.parametrize("flip", [False, True])
def test_c7_two_halves_and_two_heads_inside_a_page_are_told_apart(flip):
    """The half lies outside the head, in whatever order the dimensions come."""
    tensor = numbered(3, 2, 2, 4, 3)
    given_tensor = tensor.transpose(1, 2) if flip else tensor
    page = read(given_tensor, attention(kv_packing="split"))
    assert elements(tensor, page, 1) == tensor[1].reshape(-1).tolist()


def test_c7_two_halves_and_two_heads_outside_the_blocks_are_refused():
    outside = numbered(2, 2, 3, 4, 3).permute(2, 0, 1, 3, 4)
    code, detail = refused(outside, attention(kv_packing="split"))
    assert code == "stride-contradicts-layout"
    assert "tell the 2 halves and the 2 heads apart in two ways" in detail
    assert "allocate each page as one run of bytes" in detail


def test_tensors_of_the_other_order_are_refused():
    nhd = numbered(3, 4, 2, 6)
    code, detail = refused(nhd, attention(), HND)
    assert code == "stride-contradicts-layout"
    assert "and strides [192, 48, 24, 4] B, which is not the order LBHNC" in detail
    assert "declare the engine's layout and its padding" in detail
    assert refused(numbered(3, 2, 4, 6), attention(), NHD)[0] == "stride-contradicts-layout"


def test_a_split_tensor_with_the_halves_first_is_told_what_to_pass():
    spec = attention(kv_packing="split")
    tensor = numbered(2, 5, 2, 4, 3)
    code, detail = refused(tensor, spec, num_blocks=5)
    assert code == "shape-contradicts-spec"
    assert detail.endswith("K and V lie outermost: pass tensor.movedim(1, 0)")
    page = read(tensor.movedim(1, 0), spec, num_blocks=5)
    assert elements(tensor, page, 3) == tensor[:, 3].reshape(-1).tolist()


def test_blocks_where_kernel_blocks_should_be_are_refused_with_the_ratio():
    code, detail = refused(numbered(3, 2, 4, 6), attention(kernel_block_size=2), num_blocks=3)
    assert code == "shape-contradicts-spec"
    assert detail.endswith("a block of 4 tokens is 2 kernel blocks, a row each")


@pytest.mark.parametrize(
    "tensor",
    [
        numbered(4, 2, 4, 6),  # a block too many
        numbered(3, 3, 4, 6),  # a head too many
        numbered(3, 2, 4, 5),  # an element too few
        numbered(3, 2, 4, 6, 1, 2),  # a dimension too many
        numbered(3, 49),  # a flat row of another size
        numbered(3),
        torch.tensor(3),
        numbered(0, 2, 4, 6),
        torch.zeros((3, 2, 4, 6), dtype=torch.uint8),
        torch.zeros((3, 2, 4, 4), dtype=torch.complex128),  # 16 B do not divide rows of 24 B
    ],
    ids=lambda tensor: f"{list(tensor.shape)} {tensor.dtype}",
)
def test_other_shapes_are_refused_with_what_was_found_and_expected(tensor):
    code, detail = refused(tensor, attention(), num_blocks=3)
    assert code == "shape-contradicts-spec"
    assert f"found shape {list(tensor.shape)} of {tensor.element_size()} B elements" in detail
    item = tensor.element_size()
    row = "rows of 24 B" if item == 16 else f"{24 // item} elements of {item} B"
    assert f"expected 3 rows x 2 heads x 4 tokens x {row}" in detail


@pytest.mark.parametrize("packing", ["packed", "split"])
@pytest.mark.parametrize("flat", [False, True])
def test_c2_rows_without_room_for_the_scales_are_refused(packing, flat):
    """Rows of 128 B in memory, 2 * (64 + 4) = 136 B declared; half of each where K/V is split."""
    spec = attention(head_size=64, itemsize=1, scale_bytes=4, kv_packing=packing)
    bare = 64 * (1 if spec.split else 2)
    shape = (3, *([2] if spec.split else []), 2, 4, bare)
    tensor = torch.zeros(shape, dtype=torch.uint8)
    code, detail = refused(tensor.reshape(3, -1) if flat else tensor, spec)
    assert code == "scale-does-not-fit"
    assert f"rows of {bare} B in memory cannot hold the spec's rows of {spec.row_bytes} B" in detail
    assert "allocate the scales inside the rows or declare scale_bytes=0" in detail


@pytest.mark.parametrize("packing", ["packed", "split"])
def test_c2_rows_with_room_for_the_scales_are_taken(packing):
    spec = attention(head_size=64, itemsize=1, scale_bytes=4, kv_packing=packing)
    shape = (3, *([2] if spec.split else []), 2, 4, spec.row_bytes)
    assert isinstance(read(torch.zeros(shape, dtype=torch.uint8), spec), StridedPage)


def test_padding_that_is_declared_but_not_there_is_refused():
    code, detail = refused(numbered(3, 2, 4, 6), attention(page_padding=64))
    assert code == "stride-contradicts-layout"
    assert "block stride 192 B is less than the declared page of 192 B with its padding" in detail


def test_c5_kernel_blocks_among_other_layers_are_refused():
    """A B-outermost cache forced all the same."""
    slab = numbered(8, 3, 2, 2, 6)  # rows, layers, heads, tokens, elements
    code, detail = refused(slab[:, 1], attention(kernel_block_size=2), num_blocks=4)
    assert code == "kernel-split-needs-layer-compact"
    assert "the 2 kernel blocks of a block lie 288 B apart, among other layers" in detail
    assert "allocate the layer by itself (LBHNC), or make the block and the kernel" in detail


def test_a_kernel_block_that_does_not_divide_is_refused():
    code, detail = refused(numbered(3, 2, 4, 6), attention(kernel_block_size=3))
    assert code == "kernel-block-not-dividing"
    assert "a kernel block of 3 tokens does not divide the block of 4" in detail


@pytest.mark.parametrize(
    "tensor",
    [
        numbered(1, 2, 4, 6).expand(3, 2, 4, 6),  # every block is the same
        torch.zeros(500, dtype=torch.int32).as_strided((3, 2, 4, 6), (47, 24, 6, 1)),
    ],
)
def test_blocks_that_share_bytes_are_refused(tensor):
    code, detail = refused(tensor, attention())
    assert code == "overlapping"
    assert "pages of 192 B at a block stride of" in detail


SPLIT = attention(total_kv_heads=3, head_size=5, kv_packing="split")
# (spec, shape after the blocks, the axes of that shape, order): sizes that tell the axes apart
NEAR_MISSES = [
    (attention(), (2, 4, 6), "HNC", HND),
    (attention(), (4, 2, 6), "NHC", NHD),
    (attention(), (2, 4, 2, 3), "HNPC", HND),
    (attention(total_kv_heads=3), (4, 18), "NX", NHD),
    (SPLIT, (2, 3, 4, 5), "KHNC", HND),
    (SPLIT, (2, 4, 3, 5), "KNHC", NHD),
    (LatentSpec(block_size=4, row_bytes=24), (4, 6), "NC", HND),
]


def axes_of(view, axes, spec):
    """(block, half, head, token, element), whatever axes the view spells out."""
    array = view.numpy()
    if "X" in axes:  # heads and elements of a token in one
        array = array.reshape(*array.shape[:-1], spec.total_kv_heads, -1)
        axes = axes.replace("X", "HC")
    if "P" in axes:  # the K and V elements of a row
        array = array.reshape(*array.shape[:-2], -1)
        axes = axes.replace("P", "")
    for axis in "KH":
        if axis not in axes:
            array, axes = np.expand_dims(array, 1), axis + axes
    return array.transpose(0, *(1 + axes.index(axis) for axis in "KHNC"))


@pytest.mark.parametrize(("spec", "shape", "axes", "layout"), NEAR_MISSES)
@given(data=st.data())
def test_one_stride_that_is_another_is_followed_or_refused_never_misread(
    spec, shape, axes, layout, data
):
    """Whatever a view's strides are: a page that is read off holds what the view shows."""
    strides = list(numbered(3, *shape).stride())
    changed = data.draw(st.integers(0, len(shape)))
    strides[changed] = data.draw(st.integers(0, 250))
    if data.draw(st.booleans()):  # make room for what lies between
        strides[0] = data.draw(st.integers(0, 250))
    view = numbered(6_000).as_strided((3, *shape), strides, data.draw(st.integers(0, 9)))
    page = read(view, spec, layout)
    if isinstance(page, StridedPage):
        logical = axes_of(view, axes, spec)
        for block in range(3):
            assert elements(view, page, block) == by_coordinates(logical, block, layout)
    elif changed == 0 and strides[0] >= numbered(*shape).numel():
        pytest.fail(f"blocks further apart are no reason: {page}")


@pytest.mark.parametrize(
    ("shape", "strides", "layout"),
    [
        ((3, 2, 4, 6), (96, 48, 12, 1), HND),  # gaps between tokens
        ((3, 2, 4, 6), (96, 30, 6, 1), HND),  # a gap between heads that no page fits
        ((3, 2, 4, 6), (96, 12, 6, 1), HND),  # heads inside one another
        ((3, 2, 4, 6), (200, 96, 6, 2), HND),  # gaps between elements
        ((3, 2, 4, 2, 3), (200, 24, 6, 48, 1), HND),  # K and V of a row apart
        ((3, 4, 2, 6), (96, 12, 24, 1), NHD),  # gaps between heads
        ((3, 4, 2, 6), (96, 24, 6, 1), NHD),  # gaps between tokens
        ((3, 4, 12), (96, 12, 2), NHD),  # gaps between elements of flattened heads
    ],
)
def test_other_gaps_than_whole_pages_are_refused(shape, strides, layout):
    view = torch.zeros(1_000, dtype=torch.int32).as_strided(shape, strides)
    assert refused(view, attention(), layout)[0] == "stride-contradicts-layout"


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-40, 60)), max_size=6),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(
        [
            attention(),
            attention(kv_packing="split", total_kv_heads=2, block_size=2),
            attention(kernel_block_size=2, scale_bytes=2),
            attention(kernel_block_size=3),
            LatentSpec(block_size=2, row_bytes=8, page_padding=4),
            StateSpec(state_bytes=24),
        ]
    ),
    st.sampled_from(KVCacheLayout),
    st.integers(1, 4),
)
def test_any_tensor_is_read_as_pages_that_share_no_byte_or_refused(
    dims, itemsize, spec, layout, num_blocks
):
    facts = TensorFacts(
        shape=tuple(count for count, _ in dims),
        strides=tuple(stride * itemsize for _, stride in dims),
        itemsize=itemsize,
        offset=0,
    )
    heads = 1 if isinstance(spec, StateSpec) else spec.total_kv_heads
    found = page_of_tensor(facts, spec, heads, layout, num_blocks)
    if isinstance(found, StridedPage):
        touched = [
            block * found.block_stride + at + byte
            for block in range(num_blocks)
            for at, _, size in found.box.runs()
            for byte in range(size)
        ]
        assert len(set(touched)) == len(touched)
    else:
        assert len(found.detail) > 20
