"""KVCaches: how an engine hands its tensors over, and where the core reads their pages to lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvpolicy as kv
from kvpolicy.caches import read_layer

SPEC = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=4, itemsize=1)
PAGE = 64  # 2 heads x 4 tokens x rows of 8 B


def context_of(specs: dict | None = None, blocks: int = 3, **wishes: object) -> kv.PolicyContext:
    geometry = kv.CacheGeometry(layers=specs or {"a": SPEC, "b": SPEC}, num_blocks=blocks)
    return kv.PolicyContext(**{"geometry": geometry, "canonical": True, **wishes})


def connect(context: kv.PolicyContext, caches: object, slots: int = 3) -> kv.Connector:
    connector = kv.Connector(context, (), host=slots)
    connector.register(caches)
    return connector


def stored(connector: kv.Connector, block: int, group: str | None = None) -> bytes:
    """The record of a block."""
    (result,) = connector.wait([connector.store([block], [0], group)], timeout=60)
    assert result.ok, result
    return connector.host.rows[0].numpy().tobytes()


def refusal_of(context: kv.PolicyContext, caches: kv.KVCaches, name: str = "a") -> kv.Refusal:
    found = read_layer(context, caches, name, context.stage_layers[name])
    assert isinstance(found, kv.Refusal), found
    assert found.code in kv.REFUSAL_CODES
    return found


def page_of(context: kv.PolicyContext, caches: object, name: str = "a") -> kv.StridedPage:
    if not isinstance(caches, kv.KVCaches):
        caches = kv.KVCaches(tensors=caches)
    found = read_layer(context, caches, name, context.stage_layers[name])
    assert isinstance(found, kv.LayerPages), found
    return found.page


# Values.


@pytest.mark.parametrize("field", ["offset", "block_stride"])
@pytest.mark.parametrize("value", [-1, True, 1.5, "8", None])
def test_a_placement_is_whole_bytes(field: str, value: object) -> None:
    with pytest.raises(kv.OptionError, match=rf"SlabPlacement\.{field} is a number of bytes"):
        kv.SlabPlacement(**({"offset": 0, "block_stride": 64} | {field: value}))


def test_caches_are_torch_tensors_by_name() -> None:
    slab, placement = torch.zeros(8), kv.SlabPlacement(offset=0, block_stride=8)
    for wrong, what in (
        ({"tensors": [slab]}, "a mapping by layer name, not list"),
        ({"tensors": {"a": np.zeros(3)}}, "layer 'a' is a torch tensor, not ndarray"),
        ({"slab": np.zeros(3)}, "a slab is a torch tensor, not ndarray"),
        ({"placements": {"a": placement}}, "but no slab is given"),
        ({"slab": slab, "placements": [placement]}, "a mapping by layer name, not list"),
        ({"slab": slab, "placements": {"a": (0, 8)}}, "'a' is a SlabPlacement, not tuple"),
        (
            {"slab": slab, "tensors": {"a": slab}, "placements": {"a": placement}},
            "layer 'a' has a tensor and a placement",
        ),
    ):
        with pytest.raises(kv.OptionError, match=what):
            kv.KVCaches(**wrong)


def test_caches_know_who_holds_a_layer_and_keep_their_own_mapping() -> None:
    one, slab = torch.zeros(8), torch.zeros(9)
    given = {"a": one}
    caches = kv.KVCaches(
        tensors=given, slab=slab, placements={"b": kv.SlabPlacement(offset=0, block_stride=8)}
    )
    given["c"] = one
    assert caches.layer_names() == ("a", "b")
    assert caches.owner("a") is one
    assert caches.owner("b") is slab
    assert caches.owner("c") is None


# One slab.


@pytest.mark.parametrize("layer_dim", [0, 1])
def test_a_slab_is_cut_by_the_dimension_that_counts_layers(layer_dim: int) -> None:
    whole = torch.arange(2 * 3 * PAGE, dtype=torch.int16).to(torch.uint8)
    slab = whole.view(2, 3, 2, 4, 8) if layer_dim == 0 else whole.view(3, 2, 2, 4, 8)
    caches = kv.KVCaches.from_slab(slab, ["a", "b"], layer_dim=layer_dim)
    assert caches.slab is slab
    for index, name in enumerate(("a", "b")):
        view = caches.owner(name)
        assert torch.equal(view, slab.select(layer_dim, index))
        assert view.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
    connector = connect(context_of(), caches)
    pages = [slab.select(layer_dim, i)[1].numpy().tobytes() for i in (0, 1)]
    assert stored(connector, 1) == b"".join(pages)


def test_a_slab_is_cut_by_placement_in_bytes() -> None:
    """Offset 5, pages of 64 B at a layer stride of 80 and a block stride of 170."""
    slab = torch.arange(5 + 2 * 170 + 80 + PAGE, dtype=torch.int16).to(torch.uint8)
    caches = kv.KVCaches.from_slab(slab, ["a", "b"], offset=5, layer_stride=80, block_stride=170)
    assert caches.placements["b"] == kv.SlabPlacement(offset=85, block_stride=170)
    connector = connect(context_of(), caches)
    for block in range(3):
        first = 5 + block * 170
        expected = [slab[first : first + PAGE], slab[first + 80 : first + 80 + PAGE]]
        assert stored(connector, block) == torch.cat(expected).numpy().tobytes()


def test_a_placement_counts_from_the_slabs_first_byte_whatever_its_dtype_and_offset() -> None:
    base = torch.arange(300, dtype=torch.int32)
    slab = base[7:]
    caches = kv.KVCaches.from_slab(slab, ["a", "b"], offset=4, layer_stride=64, block_stride=128)
    spec = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=1, itemsize=4)
    connector = connect(context_of({"a": spec, "b": spec}), caches)
    assert stored(connector, 2)[:64] == base.numpy().tobytes()[28 + 4 + 256 :][:64]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"layer_stride": 64},
        {"block_stride": 64},
        {"layer_dim": 0, "layer_stride": 64},
        {"layer_dim": 0, "block_stride": 64},
        {"layer_dim": 0, "layer_stride": 64, "block_stride": 128},
        {"layer_dim": 0, "offset": 64},
    ],
)
def test_a_slab_is_cut_in_one_way_given_whole(how: dict[str, int]) -> None:
    with pytest.raises(kv.OptionError, match=r"by layer_dim, or by .* give one way, whole"):
        kv.KVCaches.from_slab(torch.zeros(2, 3, PAGE), ["a", "b"], **how)


@pytest.mark.parametrize(("dim", "found"), [(1, 3), (3, None), (-1, None)])
def test_a_dimension_that_does_not_count_the_layers_is_refused(dim: int, found: int | None) -> None:
    with pytest.raises(
        kv.OptionError, match=rf"dimension {dim} of .* counts {found} layers; 2 are"
    ):
        kv.KVCaches.from_slab(torch.zeros(2, 3, PAGE), ["a", "b"], layer_dim=dim)


def test_a_slab_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(kv.OptionError, match="a slab is a torch tensor, not ndarray"):
        kv.KVCaches.from_slab(np.zeros((2, 3, PAGE)), ["a", "b"], layer_dim=0)


def test_a_layer_named_twice_is_refused() -> None:
    for how in ({"layer_dim": 0}, {"layer_stride": 64, "block_stride": 128}):
        with pytest.raises(kv.OptionError, match="layer 'a' is named twice"):
            kv.KVCaches.from_slab(torch.zeros(2, 3, PAGE), ["a", "a"], **how)


def bare_slab(blocks: int, layers_outside: bool) -> torch.Tensor:
    """Two layers; byte 0 of layer l, block b is 10*l + b."""
    shape = (2, blocks, 2, 4, 8) if layers_outside else (blocks, 2, 2, 4, 8)
    slab = torch.zeros(shape, dtype=torch.uint8)
    for layer in range(2):
        for block in range(blocks):
            slab[(layer, block) if layers_outside else (block, layer)] = 10 * layer + block
    return slab


@pytest.mark.parametrize(
    ("blocks", "cross_layer", "layers_outside"),
    [
        (3, False, False),
        (3, False, True),
        (3, True, False),
        (3, True, True),
    ],
)
def test_a_bare_slab_tensor_is_layers_and_blocks_in_either_order(
    blocks: int, cross_layer: bool, layers_outside: bool
) -> None:
    wishes = {
        "canonical": False,
        "backend": kv.BackendCapabilities(stride_aware=cross_layer),
    }
    connector = connect(context_of(blocks=blocks, **wishes), bare_slab(blocks, layers_outside))
    assert connector.decision.cross_layer_blocks == cross_layer
    assert stored(connector, 1) == bytes([1] * PAGE + [11] * PAGE)


@pytest.mark.parametrize("layer_dim", [0, 1])
@pytest.mark.parametrize("cross_layer", [False, True])
def test_as_many_blocks_as_layers_is_not_guessed(cross_layer: bool, layer_dim: int) -> None:
    """Two layers and two blocks, layers outside or inside: only the engine can say."""
    wishes = {"canonical": False, "backend": kv.BackendCapabilities(stride_aware=cross_layer)}
    slab = bare_slab(2, layers_outside=layer_dim == 0)
    with pytest.raises(kv.OptionError, match="as many blocks as layers"):
        connect(context_of(blocks=2, **wishes), slab)
    said = kv.KVCaches.from_slab(slab, list("ab"), layer_dim=layer_dim)
    assert stored(connect(context_of(blocks=2, **wishes), said), 1) == bytes(
        [1] * PAGE + [11] * PAGE
    )


def test_placements_need_a_slab_that_is_one_run_of_memory() -> None:
    """The other half of the allocation is somebody else's."""
    half = torch.zeros(3, 2 * PAGE, dtype=torch.uint8)[:, :PAGE]
    with pytest.raises(kv.OptionError, match="a slab that is one run of memory"):
        kv.KVCaches.from_slab(half, ["a"], offset=PAGE, layer_stride=PAGE, block_stride=2 * PAGE)


def test_a_bare_slab_without_a_dimension_of_layers_is_refused() -> None:
    connector = kv.Connector(context_of())
    with pytest.raises(
        kv.OptionError, match=r"are 2 layers and 3 blocks; found shape \[3, 5, 64\]"
    ):
        connector.register(torch.zeros(3, 5, PAGE))
    with pytest.raises(kv.OptionError, match=r"found shape \[\]"):
        connector.register(torch.tensor(1))
    with pytest.raises(kv.OptionError, match="a KVCaches or one slab tensor, not list"):
        connector.register([torch.zeros(3, PAGE)])


# Field cases.


def test_c2_a_slab_of_rows_without_room_for_their_scales_is_refused() -> None:
    """C2: rows of 2 x (64 + 4) B are declared, rows of 128 B are given."""
    spec = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=64, itemsize=1, scale_bytes=4)
    assert spec.row_bytes == 136
    context = context_of({"a": spec, "b": spec})
    bare_page, page = 2 * 4 * 128, 2 * 4 * 136
    slab = torch.zeros(3, 2, 2, 4, 128, dtype=torch.uint8)
    given = {
        "one tensor per layer": {
            name: torch.zeros(3, 2, 4, 128, dtype=torch.uint8) for name in "ab"
        },
        "a bare slab": slab,
        "a slab by dimension": kv.KVCaches.from_slab(slab, list("ab"), layer_dim=1),
        "a slab by placement": kv.KVCaches.from_slab(
            slab, list("ab"), layer_stride=bare_page, block_stride=2 * bare_page
        ),
        "layers outermost": kv.KVCaches.from_slab(
            slab, list("ab"), layer_stride=3 * bare_page, block_stride=bare_page
        ),
    }
    for how, caches in given.items():
        with pytest.raises(kv.RegistrationError) as refused:
            kv.Connector(context).register(caches)
        codes = {why.code for why in refused.value.refusals.values()}
        assert codes == {"scale-does-not-fit"}, how
        assert all(
            "128 B" in why.detail and "136 B" in why.detail
            for why in refused.value.refusals.values()
        ), how

    fits = torch.zeros(3, 2, 2, 4, 136, dtype=torch.uint8)
    connect(context, fits)
    connect(
        context, kv.KVCaches.from_slab(fits, list("ab"), layer_stride=page, block_stride=2 * page)
    )


def test_c5_kernel_blocks_of_a_block_cannot_lie_among_other_layers() -> None:
    """C5: block 128, kernel block 64, two layers; B-outermost is refused with what to do."""
    spec = kv.AttentionSpec(
        block_size=128, total_kv_heads=2, head_size=4, itemsize=1, kernel_block_size=64
    )
    context = context_of({"a": spec, "b": spec})
    slab = torch.zeros(6, 2, 2, 64, 8, dtype=torch.uint8)
    kernel_page = 2 * 64 * 8
    for caches in (
        kv.KVCaches.from_slab(slab, list("ab"), layer_dim=1),
        kv.KVCaches.from_slab(
            slab, list("ab"), layer_stride=kernel_page, block_stride=2 * 2 * kernel_page
        ),
    ):
        refusal = refusal_of(context, caches)
        assert refusal.code == "kernel-split-needs-layer-compact"
        assert "allocate the layer by itself (LBHNC), or make the block" in refusal.detail
    per_layer = {name: torch.zeros(6, 2, 64, 8, dtype=torch.uint8) for name in "ab"}
    assert page_of(context, per_layer).block_stride == 2 * kernel_page


def test_c5_a_forced_vote_for_cross_layer_blocks_is_refused_at_start_up() -> None:
    spec = kv.AttentionSpec(
        block_size=128, total_kv_heads=2, head_size=4, itemsize=1, kernel_block_size=64
    )

    class Slabs:
        name, priority = "slabs", 200

        @kv.hookimpl
        def prefer_cross_layer_blocks(self, context: kv.PolicyContext) -> bool:
            return True

    with pytest.raises(kv.CertificationError) as refused:
        kv.Connector(context_of({"a": spec, "b": spec}, canonical=False), [Slabs()])
    assert {why.code for why in refused.value.refusals.values()} == {
        "kernel-split-needs-layer-compact"
    }
    assert "use LBHNC, or make the two sizes equal" in str(refused.value)


def test_c7_the_declaration_alone_tells_packed_from_split() -> None:
    """C7: with 2 heads, packed HND [B, 2, N, 2D] and flat split NHD [B, 2, N, H*D] look alike."""
    cache = torch.arange(3 * PAGE, dtype=torch.int16).to(torch.uint8).view(3, 2, 4, 8)
    size = {"block_size": 4, "total_kv_heads": 2, "head_size": 4, "itemsize": 1}
    packed, split = kv.AttentionSpec(**size), kv.AttentionSpec(**size, kv_packing="split")
    page = cache[1].numpy().ravel()

    one = stored(connect(context_of({"a": packed}, canonical_order="NHD"), {"a": cache}), 1)
    other = stored(connect(context_of({"a": split}, layout="NHD"), {"a": cache}), 1)
    # Packed: [head, token, 8 B], stored token by token. Split: [half, token, head, 4 B], kept.
    assert one == page.reshape(2, 4, 8).transpose(1, 0, 2).tobytes()
    assert other == page.tobytes()
    assert one != other


@pytest.mark.parametrize(
    ("packing", "layout", "shape"),
    [
        ("packed", "HND", (3, 4, 2, 8)),  # heads and tokens change places in memory
        ("packed", "HND", (3, 2, 4, 4)),
        ("packed", "HND", (3, 2, 2, 4, 4)),
        ("packed", "NHD", (3, 2, 4, 8)),
        ("split", "HND", (3, 2, 4, 8)),  # no flat form: heads lie outside tokens
        ("split", "NHD", (3, 4, 2, 8)),
        ("split", "HND", (2, 3, 2, 4, 4)),
    ],
)
def test_c7_a_tensor_that_contradicts_the_declaration_is_refused(
    packing: str, layout: str, shape: tuple[int, ...]
) -> None:
    spec = kv.AttentionSpec(
        block_size=4, total_kv_heads=2, head_size=4, itemsize=1, kv_packing=packing
    )
    caches = kv.KVCaches(tensors={"a": torch.zeros(shape, dtype=torch.uint8)})
    refusal = refusal_of(context_of({"a": spec}, layout=layout), caches)
    assert refusal.code in ("shape-contradicts-spec", "stride-contradicts-layout")
    assert f"found shape {list(shape)}" in refusal.detail
    if shape[0] == 2:
        assert "K and V lie outermost: pass tensor.movedim(1, 0)" in refusal.detail


def test_c10_a_block_of_two_kernel_blocks_is_two_rows() -> None:
    """C10: block 128, kernel block 64, 4 blocks: 8 rows, block b is rows 2b and 2b+1."""
    spec = kv.AttentionSpec(
        block_size=128, total_kv_heads=2, head_size=4, itemsize=1, kernel_block_size=64
    )
    context = context_of({"a": spec}, blocks=4)
    cache = torch.zeros(8, 2, 64, 8, dtype=torch.uint8)
    page = page_of(context, {"a": cache})
    assert (page.offset, page.block_stride, page.page_bytes) == (0, 2048, 2048)
    for row in range(8):
        cache[row] = row
    record = stored(connect(context, {"a": cache}), 3)
    # Head by head: 64 tokens from row 6, then 64 from row 7.
    assert record == bytes([6] * 512 + [7] * 512) * 2
    four_rows = kv.KVCaches(tensors={"a": torch.zeros(4, 2, 128, 8, dtype=torch.uint8)})
    refusal = refusal_of(context, four_rows)
    assert refusal.code == "shape-contradicts-spec"
    assert "a block of 128 tokens is 2 kernel blocks, a row each" in refusal.detail


def test_c11_the_registered_span_ends_with_the_last_payload() -> None:
    """C11: 28743 blocks, block stride 4160, payload 4096: 119,570,816 B, the last byte inside."""
    blocks, span = 28_743, 119_570_816
    spec = kv.LatentSpec(block_size=16, row_bytes=256)
    context = context_of({"a": spec}, blocks=blocks)
    # Exactly as many bytes as that: one less, and the last block does not fit.
    slab = torch.empty(span, dtype=torch.uint8)
    placed = {"a": kv.SlabPlacement(offset=0, block_stride=4160)}
    for caches in (
        kv.KVCaches(tensors={"a": slab.as_strided((blocks, 16, 256), (4160, 256, 1))}),
        kv.KVCaches(slab=slab, placements=placed),
    ):
        page = page_of(context, caches)
        assert page.span_bytes(blocks) == page.end(blocks) == span
        assert blocks * 4096 == 117_731_328  # what counting payloads alone would say
        connector = connect(context, caches, slots=1)
        slab[-4096:] = 77
        assert stored(connector, blocks - 1) == bytes([77]) * 4096
    with pytest.raises(kv.RegistrationError, match="out-of-bounds"):
        kv.Connector(context).register(kv.KVCaches(slab=slab[:-1], placements=placed))


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_c12_a_padded_page_keeps_its_heads_at_their_own_distance(order: str) -> None:
    """C12: 4 heads of 1024 B in pages of 4160: head 2 begins at 2048; the padding is not copied."""
    spec = kv.AttentionSpec(
        block_size=4, total_kv_heads=4, head_size=64, itemsize=2, page_padding=64
    )
    context = context_of({"a": spec}, canonical_order=order)
    memory = torch.full((3 * 4160,), 0xEE, dtype=torch.uint8)
    for block in range(3):
        for head in range(4):
            at = block * 4160 + head * 1024
            memory[at : at + 1024] = 16 * block + head
    cache = memory.view(3, 4160)[:, :4096].view(3, 4, 4, 256)
    page = page_of(context, {"a": cache})
    assert (page.block_stride, page.page_bytes) == (4160, 4096)
    record = stored(connect(context, {"a": cache}), 1)
    if order == "HND":
        assert record == b"".join(bytes([16 + head]) * 1024 for head in range(4))
    else:
        assert record == b"".join(bytes([16 + head]) * 256 for head in range(4)) * 4
    raw = {"a": memory.view(3, 4160)}  # the same as rows of bytes, padding and all
    assert stored(connect(context, raw), 1) == record


def test_c13_a_view_with_a_storage_offset_is_taken_as_it_is_and_never_copied() -> None:
    """C13: block stride 1,039,680, layer 1 at offset 8,640; loads to it never touch layer 0."""
    stride, blocks = 1_039_680, 3
    spec = kv.LatentSpec(block_size=15, row_bytes=576)  # a page of 8,640 B
    names = [f"l{i}" for i in range(2)]
    geometry = kv.CacheGeometry(
        layers=dict.fromkeys(names, spec),
        num_blocks=blocks,
        groups=[kv.LayerGroup(name=name, layer_names=[name]) for name in names],
    )
    slab = torch.zeros(blocks * stride, dtype=torch.uint8)
    views = {
        name: slab.as_strided((blocks, 15, 576), (stride, 576, 1), storage_offset=i * 8_640)
        for i, name in enumerate(names)
    }
    connector = connect(kv.PolicyContext(geometry=geometry, canonical=True), views)
    page = connector.registration.pages["l1"]
    assert (page.page.offset, page.page.block_stride) == (8_640, stride)
    assert page.tensor.data_ptr() == views["l1"].data_ptr()

    views["l1"][1] = 5  # the engine writes after registration
    assert stored(connector, 1, "l1") == bytes([5]) * 8_640
    slab.fill_(9)
    (result,) = connector.wait([connector.load([0], [2], "l1")], timeout=60)
    assert result.ok
    expected = torch.full_like(slab, 9)
    expected[2 * stride + 8_640 : 2 * stride + 2 * 8_640] = 5
    assert torch.equal(slab, expected)


# Other shapes that an engine may show.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16, torch.uint8])
def test_elements_may_be_typed_or_bytes(dtype: torch.dtype) -> None:
    spec = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=4, itemsize=2)
    row = 16 // dtype.itemsize
    cache = torch.zeros(3, 2, 4, row, dtype=dtype)
    cache.view(torch.uint8).copy_(torch.arange(3 * 128).to(torch.uint8).view(3, 2, 4, 16))
    connector = connect(context_of({"a": spec}), {"a": cache})
    assert stored(connector, 2) == cache[2].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "show",
    [
        lambda page: page.view(3, 2, 4, 8),
        lambda page: page.view(3, 2, 4, 8).permute(0, 2, 1, 3),
        lambda page: page.view(3, 2, 4, 8).permute(0, 3, 2, 1),
        lambda page: page.view(3, 2, 4, 2, 4),  # K and V apart
        lambda page: page.view(3, 2, 4, 2, 4).permute(0, 3, 2, 1, 4),
        lambda page: page.view(3, 1, 2, 4, 8),
        lambda page: page.view(3, PAGE),
        lambda page: page.view(torch.int8).view(3, PAGE),
    ],
)
def test_dimensions_may_be_shown_in_any_order(show: object) -> None:
    memory = torch.arange(3 * PAGE, dtype=torch.int16).to(torch.uint8)
    connector = connect(context_of({"a": SPEC}), {"a": show(memory)})
    assert stored(connector, 1) == memory[PAGE : 2 * PAGE].numpy().tobytes()


def test_a_state_is_any_shape_of_its_bytes() -> None:
    spec = kv.StateSpec(state_bytes=48)
    cache = torch.arange(3 * 12, dtype=torch.float32).view(3, 2, 6)
    connector = connect(context_of({"a": spec}), {"a": cache})
    assert stored(connector, 1)[:48] == cache[1].numpy().tobytes()


def test_one_block_needs_no_block_stride() -> None:
    placed = {"a": kv.SlabPlacement(offset=2, block_stride=0)}
    slab = torch.arange(PAGE + 2, dtype=torch.uint8)
    connector = connect(
        context_of({"a": SPEC}, blocks=1), kv.KVCaches(slab=slab, placements=placed)
    )
    assert stored(connector, 0) == slab[2:].numpy().tobytes()


def test_a_placement_whose_blocks_share_bytes_is_refused() -> None:
    slab = torch.zeros(1024, dtype=torch.uint8)
    caches = kv.KVCaches(
        slab=slab, placements={"a": kv.SlabPlacement(offset=0, block_stride=PAGE - 1)}
    )
    refusal = refusal_of(context_of({"a": SPEC}), caches)
    assert refusal == kv.Refusal(
        "overlapping", "a block stride of 63 B is less than the page of 64 B"
    )


def test_a_placement_that_kernel_blocks_cannot_share_is_refused() -> None:
    spec = kv.AttentionSpec(
        block_size=4, total_kv_heads=2, head_size=4, itemsize=1, kernel_block_size=2
    )
    caches = kv.KVCaches(
        slab=torch.zeros(1024, dtype=torch.uint8),
        placements={"a": kv.SlabPlacement(offset=0, block_stride=PAGE + 1)},
    )
    refusal = refusal_of(context_of({"a": spec}), caches)
    assert refusal.code == "kernel-block-not-dividing"
    assert "65 B apart, is not a whole number of kernel blocks of 2" in refusal.detail


def test_a_layer_without_a_tensor_is_missing() -> None:
    refusal = refusal_of(context_of(), kv.KVCaches(tensors={"b": torch.zeros(3, 2, 4, 8)}))
    assert refusal == kv.Refusal("layer-missing", "the engine gives no tensor for 'a'")
