"""Registration: what an engine's tensors, or a plugin's answer, get wrong is refused by name."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import kvpolicy as kv

SPEC = kv.AttentionSpec(block_size=4, total_kv_heads=2, head_size=4, itemsize=1)
ROW, PAGE, BLOCKS = 8, 64, 3  # 2 heads x 4 tokens x rows of 8 B
NAMES = ("a", "b", "c", "d")


def context_of(specs: Mapping[str, Any] | None = None, **wishes: object) -> kv.PolicyContext:
    known = {"groups": wishes.pop("groups", None), "stages": wishes.pop("stages", None)}
    blocks = wishes.pop("blocks", BLOCKS)
    geometry = kv.CacheGeometry(
        layers=specs or dict.fromkeys(NAMES, SPEC), num_blocks=blocks, **known
    )
    return kv.PolicyContext(**{"geometry": geometry, "canonical": True, **wishes})


def tensors(names: object = NAMES, dtype: torch.dtype = torch.uint8) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(BLOCKS, 2, 4, ROW, dtype=dtype) for name in names}


def refused(
    context: kv.PolicyContext, caches: object, plugins: object = ()
) -> kv.RegistrationError:
    """The error, every refusal of which has a documented code and a sentence."""
    connector = kv.Connector(context, plugins, host=2)
    with pytest.raises(kv.RegistrationError) as caught:
        connector.register(caches)
    error = caught.value
    for why in error.refusals.values():
        assert why.code in kv.REFUSAL_CODES, why
        assert len(why.detail.split()) > 3, why
        assert str(why) in str(error)
    assert connector.registration is None
    told = {layer["name"]: layer["refusal"] for layer in error.explanation["layers"]}
    for name in {*told} & {*error.refusals}:
        why = error.refusals[name]
        assert told[name] == {"code": why.code, "detail": why.detail}
    return error


def codes(error: kv.RegistrationError) -> dict[str, str]:
    return {name: why.code for name, why in error.refusals.items()}


# The engine's tensors.


def test_tensors_that_agree_are_registered_and_never_copied() -> None:
    caches = tensors()
    connector = kv.Connector(context_of(), (), host=2)
    connector.register(caches)
    for name, pages in connector.registration.pages.items():
        assert pages.tensor is caches[name]
    caches["c"][1] = 7  # what the engine writes afterwards is seen
    (result,) = connector.wait([connector.store([1], [0])], timeout=60)
    assert result.ok
    assert connector.host.rows[0].tolist() == [0] * 2 * PAGE + [7] * PAGE + [0] * PAGE


def test_a_missing_layer_and_an_unknown_one_are_both_named() -> None:
    caches = tensors(["a", "b", "c", "x"])
    error = refused(context_of(), caches)
    assert codes(error) == {"d": "layer-missing", "x": "layer-unknown"}
    assert error.plugin_name == ""
    assert "the engine's tensors are refused" in str(error)


def test_half_of_the_layers_are_refused_by_name() -> None:
    assert codes(refused(context_of(), tensors(["a", "b"]))) == dict.fromkeys("cd", "layer-missing")


def test_layers_of_another_stage_are_unknown_to_this_rank() -> None:
    context = context_of(grid=kv.ParallelGrid(pp=2), rank=1, stages=[1, 3])
    error = refused(context, tensors())
    assert codes(error) == {"a": "layer-unknown"}
    assert error.refusals["a"].detail.startswith("rank 1 (stage 1) holds 3 layers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_elements_of_another_size_are_refused(dtype: torch.dtype) -> None:
    error = refused(context_of(dtype="float8_e4m3fn"), {**tensors(), **tensors("b", dtype)})
    assert codes(error) == {"b": "shape-contradicts-spec"}
    assert f"elements of {dtype.itemsize} B" in error.refusals["b"].detail
    assert "the spec declares 1 B; pass the tensor as uint8" in error.refusals["b"].detail


@pytest.mark.parametrize("declared", ["float8_e4m3fn", "torch.float8_e4m3fn", ""])
def test_a_dtype_of_the_right_size_must_be_the_declared_one(declared: str) -> None:
    caches = {**tensors(), "b": torch.zeros(BLOCKS, 2, 4, ROW).to(torch.float8_e5m2)}
    context = context_of(dtype=declared)
    if not declared:  # nothing is declared, so nothing is contradicted
        kv.Connector(context).register(caches)
        return
    error = refused(context, caches)
    assert codes(error) == {"b": "dtype-contradicts-context"}
    assert "holds float8_e5m2, but the context declares float8_e4m3fn" in str(error)


@pytest.mark.parametrize(
    ("declared", "dtype"),
    [("half", torch.float16), ("float16", torch.float16), ("nvfp4", torch.int16)],
)
def test_a_dtype_may_go_by_another_name_and_unknown_names_contradict_nothing(
    declared: str, dtype: torch.dtype
) -> None:
    spec = attrs.evolve(SPEC, head_size=4, itemsize=2)
    caches = {"a": torch.zeros(BLOCKS, 2, 4, 8, dtype=dtype)}
    kv.Connector(context_of({"a": spec}, dtype=declared)).register(caches)


def test_tensors_without_memory_are_refused() -> None:
    caches = {name: tensor.to("meta") for name, tensor in tensors().items()}
    error = refused(context_of(), caches)
    assert set(codes(error).values()) == {"device-contradicts-registration"}
    assert "tensors lie on meta" in str(error)


def test_tensors_on_several_devices_are_refused() -> None:
    error = refused(context_of(), {**tensors(), "d": tensors("d")["d"].to("meta")})
    assert set(codes(error)) == set(NAMES)
    assert "tensors lie on cpu, meta; one rank's caches lie on one device" in str(error)


def test_a_tensor_without_strides_is_refused() -> None:
    error = refused(context_of(), {**tensors(), "b": tensors("b")["b"].to_sparse()})
    assert codes(error) == {"b": "stride-contradicts-layout"}
    assert "torch.sparse_coo" in str(error)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "stride-contradicts-layout"),
        (lambda t: t.repeat(1, 1, 2, 1)[:, :, ::2], "stride-contradicts-layout"),
        (lambda t: t.repeat(1, 1, 1, 2)[..., ::2], "stride-contradicts-layout"),
        (
            lambda t: t.new_zeros(BLOCKS, 2, 5 * ROW)[:, :, : 4 * ROW].unflatten(2, (4, ROW)),
            "stride-contradicts-layout",
        ),  # heads apart by what is no other head
        (lambda t: t[:1].expand(BLOCKS, -1, -1, -1), "overlapping"),
        (lambda t: t[:, :1].expand(-1, 2, -1, -1), "stride-contradicts-layout"),
        (lambda t: t[:-1], "shape-contradicts-spec"),
        (lambda t: t[..., :-1], "shape-contradicts-spec"),
        (lambda t: t[:, :1], "shape-contradicts-spec"),
        (lambda t: t.reshape(-1), "shape-contradicts-spec"),
        (lambda t: t[0, 0, 0, 0], "shape-contradicts-spec"),
        (lambda t: t.movedim(0, -1), "shape-contradicts-spec"),
    ],
)
def test_strides_and_shapes_that_contradict_the_declaration_are_refused(
    wrong: Callable[[torch.Tensor], torch.Tensor], code: str
) -> None:
    error = refused(context_of(), {**tensors(), "b": wrong(tensors("b")["b"])})
    assert codes(error) == {"b": code}
    assert error.plugin_name == "canonical"
    assert error.distribution == "kvpolicy"
    assert error.version == kv.__version__
    assert "1 of 4 layers contradict what the context declares" in str(error)


def test_padding_that_is_not_there_is_refused() -> None:
    spec = attrs.evolve(SPEC, page_padding=16)
    error = refused(context_of({"a": spec}), tensors("a"))
    assert codes(error) == {"a": "stride-contradicts-layout"}
    assert "less than the declared page of 64 B with its padding of 16 B" in str(error)


def test_a_placement_that_reaches_beyond_the_slab_is_out_of_bounds() -> None:
    slab = torch.zeros(BLOCKS * PAGE, dtype=torch.uint8)
    fits = kv.KVCaches(slab=slab, placements={"a": kv.SlabPlacement(offset=0, block_stride=PAGE)})
    kv.Connector(context_of({"a": SPEC})).register(fits)
    for placement in (
        kv.SlabPlacement(offset=1, block_stride=PAGE),
        kv.SlabPlacement(offset=0, block_stride=PAGE + 1),
    ):
        caches = kv.KVCaches(slab=slab, placements={"a": placement})
        error = refused(context_of({"a": SPEC}), caches)
        assert codes(error) == {"a": "out-of-bounds"}
        assert "whose tensor holds 0 to 192" in str(error)


def test_a_slab_that_is_a_view_bounds_its_placements_to_the_view() -> None:
    """The storage goes on beyond the view, but that memory belongs to somebody else."""
    storage = torch.zeros(10 * PAGE, dtype=torch.uint8)
    view = storage[PAGE : PAGE + BLOCKS * PAGE]
    placement = kv.SlabPlacement(offset=PAGE, block_stride=PAGE)
    error = refused(context_of({"a": SPEC}), kv.KVCaches(slab=view, placements={"a": placement}))
    assert codes(error) == {"a": "out-of-bounds"}
    assert "reach from byte 128 to 320 of the storage, whose tensor holds 64 to 256" in str(error)


def two_layers(offset: int, **groups: object) -> tuple[kv.PolicyContext, kv.KVCaches]:
    """Layer a in cell 0 and b at an offset, in a slab of cells of 3 pages."""
    slab = torch.zeros(BLOCKS * 3 * PAGE, dtype=torch.uint8)
    placed = {
        "a": kv.SlabPlacement(offset=0, block_stride=3 * PAGE),
        "b": kv.SlabPlacement(offset=offset, block_stride=3 * PAGE),
    }
    context = context_of({"a": SPEC, "b": SPEC}, **groups)
    return context, kv.KVCaches(slab=slab, placements=placed)


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1])
def test_layers_of_one_group_may_not_overlap(offset: int) -> None:
    context, caches = two_layers(offset)
    error = refused(context, caches)
    assert codes(error) == {"a": "overlapping", "b": "overlapping"}
    assert "layers 'a' and 'b' of one group share bytes" in str(error)


@pytest.mark.parametrize("offset", [PAGE, 2 * PAGE])
def test_layers_that_only_touch_do_not_overlap(offset: int) -> None:
    context, caches = two_layers(offset)
    kv.Connector(context).register(caches)


@pytest.mark.parametrize("offset", [0, 1, PAGE])
def test_layers_of_different_groups_may_overlap(offset: int) -> None:
    groups = [kv.LayerGroup(name=name, layer_names=[name]) for name in "ab"]
    context, caches = two_layers(offset, groups=groups)
    kv.Connector(context).register(caches)


def test_layers_that_overlap_in_a_later_block_only_are_found() -> None:
    """Block strides of 100 and 64 from bytes 0 and 1000: block 10 of a meets block 0 of b."""
    blocks = 12
    slab = torch.zeros(4096, dtype=torch.uint8)
    for offset, overlap in ((1000, True), (100 * (blocks - 1) + PAGE, False)):
        placed = {
            "a": kv.SlabPlacement(offset=0, block_stride=100),
            "b": kv.SlabPlacement(offset=offset, block_stride=64),
        }
        caches = kv.KVCaches(slab=slab, placements=placed)
        context = context_of({"a": SPEC, "b": SPEC}, blocks=blocks)
        if overlap:
            assert codes(refused(context, caches)) == dict.fromkeys("ab", "overlapping")
        else:
            kv.Connector(context).register(caches)


@pytest.mark.parametrize("overlap", [0, 1])
def test_layers_one_behind_the_other_may_touch_but_not_share_a_byte(overlap: int) -> None:
    """All blocks of a, then all blocks of b."""
    slab = torch.zeros(2 * BLOCKS * PAGE, dtype=torch.uint8)
    placed = {
        "a": kv.SlabPlacement(offset=0, block_stride=PAGE),
        "b": kv.SlabPlacement(offset=BLOCKS * PAGE - overlap, block_stride=PAGE),
    }
    context = context_of({"a": SPEC, "b": SPEC})
    caches = kv.KVCaches(slab=slab, placements=placed)
    if overlap:
        assert codes(refused(context, caches)) == dict.fromkeys("ab", "overlapping")
    else:
        kv.Connector(context).register(caches)


def test_one_tensor_for_two_layers_is_an_overlap() -> None:
    tensor = tensors("a")["a"]
    context = context_of({"a": SPEC, "b": SPEC})
    assert codes(refused(context, dict.fromkeys("ab", tensor))) == dict.fromkeys(
        "ab", "overlapping"
    )


def test_after_a_refusal_the_right_tensors_are_taken() -> None:
    connector = kv.Connector(context_of(), (), host=1)
    with pytest.raises(kv.RegistrationError):
        connector.register(tensors("abc"))
    connector.register(tensors())
    assert set(connector.registration.pages) == set(NAMES)


# A plugin's registration: installed from a distribution, so that the error can name it.


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The plugin "acme" of "acme-kv 1.2.3"; a test sets what it answers."""
    info = tmp_path / "acme_kv-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kv\nVersion: 1.2.3\n")
    (info / "entry_points.txt").write_text("[kvpolicy]\nacme = acme_kv_of_this_test\n")
    (tmp_path / "acme_kv_of_this_test.py").write_text(
        "import kvpolicy\n"
        "priority = 500\n"
        "answer = None\n"
        "@kvpolicy.hookimpl\n"
        "def register_layers(context, decision, caches):\n"
        "    return answer(context, caches)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_kv_of_this_test", raising=False)
    import acme_kv_of_this_test as module

    yield module
    del sys.modules["acme_kv_of_this_test"]


Pages = dict[str, Any]


def changed(page: kv.StridedPage, **changes: object) -> kv.StridedPage:
    inside = {k: v for k, v in changes.items() if k in ("size", "dims", "from_offset", "to_offset")}
    outside = {k: v for k, v in changes.items() if k not in inside}
    return attrs.evolve(page, box=attrs.evolve(page.box, **inside), **outside)


def with_page(**changes: object) -> Callable[[Pages], Pages]:
    """Layer b's page, changed."""

    def make(pages: Pages) -> Pages:
        return {**pages, "b": attrs.evolve(pages["b"], page=changed(pages["b"].page, **changes))}

    return make


def with_tensor(make_tensor: Callable[[torch.Tensor], object]) -> Callable[[Pages], Pages]:
    def make(pages: Pages) -> Pages:
        return {**pages, "b": attrs.evolve(pages["b"], tensor=make_tensor(pages["b"].tensor))}

    return make


def shifted(pages: Pages, by: int) -> Pages:
    page = pages["b"].page
    return {
        **pages,
        "b": attrs.evolve(pages["b"], page=changed(page, offset=page.offset + by)),
    }


NHD_IN_MEMORY = kv.Box(ROW, (kv.Dim(2, ROW, 4 * ROW), kv.Dim(4, 2 * ROW, ROW)))

WRONG: dict[str, tuple[Callable[[Pages], Pages], dict[str, str]]] = {
    "half of the layers": (
        lambda pages: {name: pages[name] for name in "ac"},
        {"b": "layer-missing", "d": "layer-missing"},
    ),
    "no layer": (lambda pages: {}, dict.fromkeys(NAMES, "layer-missing")),
    "a layer too many": (lambda pages: {**pages, "x": pages["a"]}, {"x": "layer-unknown"}),
    "a copy": (with_tensor(torch.clone), {"b": "page-contradicts-spec"}),
    "no tensor": (with_tensor(lambda _: None), {"b": "page-contradicts-spec"}),
    "an array": (with_tensor(lambda t: t.numpy()), {"b": "page-contradicts-spec"}),
    "a storage cut short": (
        with_tensor(lambda t: torch.from_numpy(t.numpy().reshape(-1)[:PAGE])),
        {"b": "page-contradicts-spec"},
    ),
    "another kind of value": (
        lambda pages: {**pages, "b": "pages"},
        {"b": "page-contradicts-spec"},
    ),
    "a page of no box": (
        lambda pages: {**pages, "b": attrs.evolve(pages["b"], page="page")},
        {"b": "page-contradicts-spec"},
    ),
    "another layer's pages": (
        lambda pages: {**pages, "b": pages["a"]},
        {"b": "page-contradicts-spec"},
    ),
    "two layers exchanged": (
        lambda pages: {**pages, "a": pages["b"], "b": pages["a"]},
        {"a": "page-contradicts-spec", "b": "page-contradicts-spec"},
    ),
    "shifted by one row": (lambda pages: shifted(pages, ROW), {"b": "out-of-bounds"}),
    "shifted back by one row": (lambda pages: shifted(pages, -ROW), {"b": "out-of-bounds"}),
    "shifted by one byte": (lambda pages: shifted(pages, 1), {"b": "out-of-bounds"}),
    "shifted by one block": (lambda pages: shifted(pages, PAGE), {"b": "out-of-bounds"}),
    "far away": (with_page(offset=2**60), {"b": "out-of-bounds"}),
    "before the tensor": (with_page(offset=-PAGE), {"b": "out-of-bounds"}),
    "a longer block stride": (with_page(block_stride=PAGE + 1), {"b": "out-of-bounds"}),
    "a shorter block stride": (with_page(block_stride=PAGE - ROW), {"b": "overlapping"}),
    "all blocks in one": (with_page(block_stride=0), {"b": "overlapping"}),
    "blocks backwards": (
        with_page(offset=2 * PAGE, block_stride=-PAGE),
        {"b": "out-of-bounds"},
    ),
    "half a page": (with_page(size=PAGE // 2), {"b": "page-contradicts-spec"}),
    "two pages": (with_page(size=2 * PAGE), {"b": "page-contradicts-spec"}),
    "no bytes": (with_page(size=0), {"b": "page-contradicts-spec"}),
    "a page that begins inside": (with_page(to_offset=ROW), {"b": "page-contradicts-spec"}),
    "another order": (
        with_page(size=NHD_IN_MEMORY.size, dims=NHD_IN_MEMORY.dims),
        {"b": "page-contradicts-spec"},
    ),
    "a byte twice and another never": (
        with_page(size=ROW, dims=(kv.Dim(2, 4 * ROW, 4 * ROW), kv.Dim(4, ROW, 0))),
        {"b": "page-contradicts-spec"},
    ),
    "every head from the same memory": (
        with_page(size=4 * ROW, dims=(kv.Dim(2, 0, 4 * ROW),)),
        {"b": "overlapping"},
    ),
    "runs backwards": (
        with_page(from_offset=4 * ROW, size=4 * ROW, dims=(kv.Dim(2, -4 * ROW, 4 * ROW),)),
        {"b": "out-of-bounds"},
    ),
    "a fraction": (with_page(offset=0.0), {"b": "page-contradicts-spec"}),
    "a word": (with_page(block_stride="64"), {"b": "page-contradicts-spec"}),
    "nothing": (with_page(offset=None), {"b": "page-contradicts-spec"}),
    "True": (with_page(offset=False), {"b": "page-contradicts-spec"}),
    "dims that are none": (with_page(dims=(3,)), {"b": "page-contradicts-spec"}),
    "dims of two": (with_page(size=32, dims=((2, 32),)), {"b": "page-contradicts-spec"}),
    "times that are negative": (
        with_page(dims=(kv.Dim(-1, 0, 0), kv.Dim(-1, 0, 0))),
        {"b": "page-contradicts-spec"},
    ),
    "more runs than can be proved": (
        with_page(size=1, dims=(kv.Dim(PAGE, 1, 1), kv.Dim(2**40, 0, 0))),
        {"b": "page-contradicts-spec"},
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_registration_is_refused_and_its_plugin_named(
    acme: types.ModuleType, what: str
) -> None:
    wrong, expected = WRONG[what]

    def answer(context: kv.PolicyContext, caches: kv.KVCaches) -> kv.Registration:
        right = kv.Registration.from_caches(context, caches)
        return kv.Registration(pages=wrong(dict(right.pages)))

    acme.answer = answer
    error = refused(context_of(), tensors(), ["acme"])
    assert codes(error) == expected
    assert (error.plugin_name, error.distribution, error.version) == ("acme", "acme-kv", "1.2.3")
    assert "plugin 'acme' (acme-kv 1.2.3) made a registration that cannot be proved" in str(error)


def test_a_page_shifted_inside_a_slab_is_refused_even_though_it_stays_inside(
    acme: types.ModuleType,
) -> None:
    """Here nothing reaches outside the tensor, and only the tensor's own strides tell."""
    slab = torch.zeros(BLOCKS, 6, PAGE, dtype=torch.uint8)
    placed = {
        name: kv.SlabPlacement(offset=(1 + i) * PAGE, block_stride=6 * PAGE)
        for i, name in enumerate(NAMES)
    }
    caches = kv.KVCaches(slab=slab, placements=placed)
    for by in (ROW, -ROW, PAGE, 6 * PAGE):
        acme.answer = lambda context, caches, by=by: kv.Registration(
            pages=shifted(dict(kv.Registration.from_caches(context, caches).pages), by)
        )
        error = refused(context_of(blocks=BLOCKS - 1), caches, ["acme"])
        assert codes(error) == {"b": "page-contradicts-spec"}
        assert "the tensor's own strides say byte 128, block stride 384" in str(error)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda context, caches: "fine", "answered 'fine', not a Registration or None"),
        (lambda context, caches: {}, "answered {}, not a Registration or None"),
        (lambda context, caches: 1 // 0, "raised ZeroDivisionError"),
        (
            lambda context, caches: kv.Registration(pages=["a"]),
            "raised OptionError: a Registration maps layer names to pages, not list",
        ),
    ],
)
def test_an_answer_that_is_no_registration_is_the_plugins_fault(
    acme: types.ModuleType, answer: Callable[..., object], what: str
) -> None:
    acme.answer = answer
    error = refused(context_of(), tensors(), ["acme"])
    assert str(error).startswith("plugin 'acme' (acme-kv 1.2.3) ")
    assert what in str(error)
    assert error.refusals == {}


def test_a_plugin_refuses_with_reasons_of_its_own(acme: types.ModuleType) -> None:
    def answer(context: kv.PolicyContext, caches: kv.KVCaches) -> None:
        why = kv.Refusal("out-of-bounds", "this layer lies in memory that I do not know")
        raise kv.RegistrationError("I know no layer b", {"b": why})

    acme.answer = answer
    error = refused(context_of(), tensors(), ["acme"])
    assert codes(error) == {"b": "out-of-bounds"}
    assert "plugin 'acme' (acme-kv 1.2.3) refuses: I know no layer b" in str(error)


def test_none_leaves_the_layers_to_the_next_policy(acme: types.ModuleType) -> None:
    acme.answer = lambda context, caches: None
    connector = kv.Connector(context_of(), ["acme"])
    connector.register(tensors())
    assert set(connector.registration.pages) == set(NAMES)


def test_nobody_takes_canonical_pages_in_a_slab_that_was_decided_against_them() -> None:
    context = context_of(backend=kv.BackendCapabilities(stride_aware=True))
    connector = kv.Connector(context, priorities={"cross-layer": 200})
    assert connector.decision.decided_by == "cross-layer"
    with pytest.raises(kv.CertificationError) as caught:
        connector.register(torch.zeros(BLOCKS, 4, 2, 4, ROW, dtype=torch.uint8))
    assert {why.code for why in caught.value.refusals.values()} == {"uncertified"}
    assert set(caught.value.refusals) == set(NAMES)
    assert "no policy registers canonical pages in BLHNC" in str(caught.value)
    assert "lower that plugin's priority" in str(caught.value)


# What a plugin may do: read what the core cannot, and say the same in other words.


def in_a_heap(offsets: Mapping[str, int], page: kv.Box) -> Callable[..., kv.Registration]:
    def answer(context: kv.PolicyContext, caches: kv.KVCaches) -> kv.Registration:
        return kv.Registration(
            pages={
                name: kv.LayerPages(
                    tensor=caches.tensors[name],
                    page=kv.StridedPage(offset=offset, block_stride=3 * PAGE, box=page),
                )
                for name, offset in offsets.items()
            }
        )

    return answer


def heap() -> dict[str, torch.Tensor]:
    """One run of bytes for both layers: no shape that the core could read."""
    return dict.fromkeys("ab", torch.arange(BLOCKS * 3 * PAGE).to(torch.uint8))


def test_a_plugin_may_register_what_the_core_cannot_read(acme: types.ModuleType) -> None:
    context, memory = context_of({"a": SPEC, "b": SPEC}), heap()
    assert set(codes(refused(context, memory)).values()) == {"shape-contradicts-spec"}
    acme.answer = in_a_heap({"a": PAGE, "b": 2 * PAGE}, kv.Box(PAGE))
    connector = kv.Connector(context, ["acme"], host=1)
    connector.register(memory)
    (result,) = connector.wait([connector.store([1], [0])], timeout=60)
    assert result.ok
    first = 3 * PAGE + PAGE
    assert connector.host.rows[0].tolist() == memory["a"][first : first + 2 * PAGE].tolist()


@pytest.mark.parametrize(
    ("offsets", "page", "code"),
    [
        ({"a": 0, "b": PAGE - 1}, kv.Box(PAGE), "overlapping"),
        ({"a": 0, "b": 0}, kv.Box(PAGE), "overlapping"),
        ({"a": 0, "b": 3 * PAGE}, kv.Box(PAGE), "out-of-bounds"),
        (
            # Heads of both layers take turns: a, b, a, b would be fine, but b is a row early.
            {"a": 0, "b": 3 * ROW},
            kv.Box(4 * ROW, (kv.Dim(2, 8 * ROW, 4 * ROW),)),
            "overlapping",
        ),
    ],
)
def test_what_the_core_cannot_read_is_still_proved(
    acme: types.ModuleType, offsets: dict[str, int], page: kv.Box, code: str
) -> None:
    acme.answer = in_a_heap(offsets, page)
    error = refused(context_of({"a": SPEC, "b": SPEC}), heap(), ["acme"])
    assert set(codes(error).values()) == {code}
    assert error.plugin_name == "acme"


def test_a_page_cut_where_no_copy_can_be_cut_is_refused_with_a_reason(
    acme: types.ModuleType,
) -> None:
    """Pieces of 2 B; a row of 3 B begins in the middle of every second one."""
    spec = kv.LatentSpec(block_size=4, row_bytes=3)
    acme.answer = lambda context, caches: kv.Registration(
        pages={
            "a": kv.LayerPages(
                tensor=caches.tensors["a"],
                page=kv.StridedPage(offset=0, block_stride=40, box=kv.Box(2, (kv.Dim(6, 4, 2),))),
            )
        }
    )
    grid = kv.ParallelGrid(tp=2, dcp=2)  # rows of the two ranks take turns in the record
    memory = {"a": torch.zeros(BLOCKS * 40, dtype=torch.uint8)}
    error = refused(context_of({"a": spec}, grid=grid), memory, ["acme"])
    assert codes(error) == {"a": "page-contradicts-spec"}
    assert "cut at points that do not divide one another" in str(error)


def test_pages_that_interleave_without_sharing_a_byte_are_fine(acme: types.ModuleType) -> None:
    turns = kv.Box(4 * ROW, (kv.Dim(2, 8 * ROW, 4 * ROW),))
    acme.answer = in_a_heap({"a": 0, "b": 4 * ROW}, turns)
    connector = kv.Connector(context_of({"a": SPEC, "b": SPEC}), ["acme"], host=1)
    memory = heap()
    connector.register(memory)
    (result,) = connector.wait([connector.store([0], [0])], timeout=60)
    assert result.ok
    heads = memory["a"][: 2 * PAGE].view(4, 4 * ROW)
    assert connector.host.rows[0].tolist() == heads[[0, 2, 1, 3]].flatten().tolist()


@pytest.mark.parametrize(
    "page",
    [
        kv.Box(ROW, (kv.Dim(2, 4 * ROW, 4 * ROW), kv.Dim(4, ROW, ROW))),  # nothing merged
        kv.Box(4 * ROW, (kv.Dim(2, 4 * ROW, 4 * ROW),)),
        kv.Box(4 * ROW, (kv.Dim(1, 7, 7), kv.Dim(2, 4 * ROW, 4 * ROW))),
        kv.Box(PAGE),
    ],
)
def test_the_same_bytes_may_be_said_in_another_box(acme: types.ModuleType, page: kv.Box) -> None:
    acme.answer = lambda context, caches: kv.Registration(
        pages={
            name: attrs.evolve(pages, page=attrs.evolve(pages.page, box=page))
            for name, pages in kv.Registration.from_caches(context, caches).pages.items()
        }
    )
    connector = kv.Connector(context_of(), ["acme"], host=1)
    caches = {
        name: torch.randint(0, 256, t.shape, dtype=torch.uint8) for name, t in tensors().items()
    }
    connector.register(caches)
    (result,) = connector.wait([connector.store([1], [0])], timeout=60)
    assert result.ok
    assert connector.host.rows[0].tolist() == [b for t in caches.values() for b in t[1].flatten()]


def test_a_registration_keeps_its_own_mapping() -> None:
    given: dict[str, kv.LayerPages] = {}
    registration = kv.Registration(pages=given)
    given["a"] = kv.LayerPages(tensor=torch.zeros(1), page=None)
    assert registration.pages == {}


def test_a_plugin_cannot_talk_the_core_out_of_its_own_reading(acme: types.ModuleType) -> None:
    """An NHD tensor under HND, registered as if it were a dense HND page."""

    def flat(context: kv.PolicyContext, caches: kv.KVCaches) -> kv.Registration:
        size = 2 * 4 * ROW
        page = kv.StridedPage(offset=0, block_stride=size, box=kv.Box(size))
        owners = {name: caches.owner(name) for name in context.stage_layers}
        return kv.Registration(
            pages={name: kv.LayerPages(tensor=t, page=page) for name, t in owners.items()}
        )

    acme.answer = flat
    context = context_of()
    wrong = {name: torch.zeros(3, 4, 2, ROW, dtype=torch.uint8).transpose(1, 2) for name in NAMES}
    with pytest.raises(kv.RegistrationError) as error:
        kv.Connector(context, ["acme"]).register(wrong)
    assert set(codes(error.value).values()) == {"stride-contradicts-layout"}
    opaque = {name: torch.zeros(3, 2 * 4 * ROW, dtype=torch.uint8) for name in NAMES}
    kv.Connector(context, ["acme"]).register(opaque)


def test_a_page_that_could_answer_otherwise_when_asked_again_is_refused(
    acme: types.ModuleType,
) -> None:
    class Shifty(kv.StridedPage):
        """A subclass."""

    def shifty(context: kv.PolicyContext, caches: kv.KVCaches) -> kv.Registration:
        honest = kv.Registration.from_caches(context, caches).pages
        return kv.Registration(
            pages={
                name: kv.LayerPages(
                    tensor=pages.tensor,
                    page=Shifty(
                        offset=pages.page.offset,
                        block_stride=pages.page.block_stride,
                        box=pages.page.box,
                    ),
                )
                for name, pages in honest.items()
            }
        )

    acme.answer = shifty
    with pytest.raises(kv.RegistrationError) as error:
        kv.Connector(context_of(), ["acme"]).register(tensors())
    assert set(codes(error.value).values()) == {"page-contradicts-spec"}
