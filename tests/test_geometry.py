"""Specs, groups and stages: what they derive, and everything that they refuse at birth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import GeometryError
from kvpolicy.geometry import MAX_LAYERS, CacheGeometry, LayerGroup, even_stages
from kvpolicy.specs import MAX_SIZE, AttentionSpec, LatentSpec, StateSpec

NEEDED = {
    AttentionSpec: {"block_size": 16, "total_kv_heads": 4, "head_size": 128, "itemsize": 2},
    LatentSpec: {"block_size": 16, "row_bytes": 1152},
    StateSpec: {"state_bytes": 4096},
}
# field -> whether 0 is a value
SIZES = {
    AttentionSpec: {
        "block_size": False,
        "total_kv_heads": False,
        "head_size": False,
        "itemsize": False,
        "v_head_size": False,
        "scale_bytes": True,
        "page_padding": True,
        "kernel_block_size": False,
    },
    LatentSpec: {
        "block_size": False,
        "row_bytes": False,
        "page_padding": True,
        "kernel_block_size": False,
    },
    StateSpec: {"state_bytes": False, "page_padding": True},
}
FIELDS = [(kind, field) for kind, fields in SIZES.items() for field in fields]
LATENT = LatentSpec(block_size=4, row_bytes=8)
STATE = StateSpec(state_bytes=64)


def attention(**changes):
    return AttentionSpec(**{**NEEDED[AttentionSpec], **changes})


def layers(number, spec=LATENT):
    return {f"layer.{n}": spec for n in range(number)}


@pytest.mark.parametrize(("kind", "field"), FIELDS)
@pytest.mark.parametrize(
    "value", [True, False, "16", b"1", 1.0, 16.5, float("nan"), [16], {}, 1j], ids=repr
)
def test_a_size_is_a_whole_number(kind, field, value):
    with pytest.raises(GeometryError, match=rf"{kind.__name__}\.{field} is a whole number, not"):
        kind(**{**NEEDED[kind], field: value})


@pytest.mark.parametrize(("kind", "field"), FIELDS)
@pytest.mark.parametrize("value", [-1, -(2**70), 2**41, 10**30])
def test_a_size_out_of_range_is_refused_with_the_range(kind, field, value):
    with pytest.raises(GeometryError, match=rf"{kind.__name__}\.{field} lies between"):
        kind(**{**NEEDED[kind], field: value})


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_number_too_long_to_print_is_refused_all_the_same(kind, field):
    with pytest.raises(GeometryError, match="not a number of 16,610 bits"):
        kind(**{**NEEDED[kind], field: 10**5000})


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_zero_is_refused_where_something_must_be(kind, field):
    values = {**NEEDED[kind], field: 0}
    if SIZES[kind][field]:
        assert getattr(kind(**values), field) == 0
    else:
        with pytest.raises(GeometryError, match=rf"{field} lies between 1 and .*, not 0"):
            kind(**values)


@pytest.mark.parametrize(("kind", "field"), [(k, f) for k in NEEDED for f in NEEDED[k]])
def test_none_is_no_size(kind, field):
    with pytest.raises(GeometryError, match=f"{field} is a whole number, not NoneType None"):
        kind(**{**NEEDED[kind], field: None})


def test_none_means_the_other_size():
    spec = attention(v_head_size=None, kernel_block_size=None)
    assert (spec.v_head_size, spec.kernel_block_size) == (128, 16)
    assert spec == attention() == attention(v_head_size=128, kernel_block_size=16)
    assert hash(spec) == hash(attention(v_head_size=128))
    assert LatentSpec(block_size=8, row_bytes=1).kernel_block_size == 8


@pytest.mark.parametrize(
    ("changes", "row_bytes", "halves"),
    [
        ({}, 512, 1),
        ({"v_head_size": 64}, 384, 1),
        ({"scale_bytes": 4}, 520, 1),
        ({"head_size": 64, "itemsize": 1, "scale_bytes": 4}, 136, 1),  # C2's row: 2 * (64 + 4)
        ({"kv_packing": "split"}, 256, 2),
        ({"kv_packing": "split", "scale_bytes": 4}, 260, 2),
    ],
)
def test_row_bytes(changes, row_bytes, halves):
    spec = attention(**changes)
    assert (spec.row_bytes, spec.halves, spec.split) == (row_bytes, halves, halves == 2)


@pytest.mark.parametrize("packing", ["PACKED", "", None, 2, True, ["packed"]])
def test_an_unknown_packing_is_refused(packing):
    with pytest.raises(GeometryError, match="kv_packing is 'packed' or 'split', not"):
        attention(kv_packing=packing)


def test_split_halves_of_different_size_are_refused_with_what_to_do():
    with pytest.raises(GeometryError, match="head_size is 128 and v_head_size 64") as error:
        attention(kv_packing="split", v_head_size=64)
    assert "declare kv_packing='packed'" in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: attention(head_size=2**40),
        lambda: attention(block_size=65_536, total_kv_heads=65_536, head_size=2**20),
        lambda: LatentSpec(block_size=65_536, row_bytes=2**40),
        lambda: LatentSpec(block_size=2, row_bytes=2**39 + 1),
    ],
)
def test_sizes_whose_page_no_offset_can_count_are_refused(make):
    """Every offset of a page and of 4,096 ranks' pages must fit a 64-bit number."""
    with pytest.raises(GeometryError, match=r"declares a page of .* B \(.*\); a page has at most"):
        make()


def test_the_largest_page_is_one():
    assert LatentSpec(block_size=2, row_bytes=2**39).row_bytes * 2 == MAX_SIZE


def test_values_are_frozen_and_keyword_only():
    for value in (attention(), LATENT, STATE, LayerGroup(name="g", layer_names=["a"])):
        with pytest.raises(AttributeError):
            value.name = 1
    for kind in (AttentionSpec, LatentSpec, StateSpec, LayerGroup, CacheGeometry):
        with pytest.raises(TypeError, match="positional"):
            kind(16, 16)


@pytest.mark.parametrize("number", [0, MAX_LAYERS + 1, 10**6])
def test_too_few_or_too_many_layers_are_refused(number):
    with pytest.raises(GeometryError, match=f"1 to 4,096 layers, not {number:,}"):
        CacheGeometry(layers=layers(number), num_blocks=1)


def test_4096_layers_are_taken():
    assert len(CacheGeometry(layers=layers(MAX_LAYERS), num_blocks=1).layers) == 4_096


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([("a", LATENT)], "layers maps names to specs; it cannot be list"),
        (None, "it cannot be NoneType"),
        ({"": LATENT}, "a layer's name is a non-empty string, not ''"),
        ({3: LATENT}, "a layer's name is a non-empty string, not 3"),
        ({"a": 16}, "layer 'a' has int for a spec; possible: AttentionSpec, LatentSpec, StateSpec"),
        ({"a": LatentSpec}, "layer 'a' has type for a spec"),
    ],
)
def test_layers_of_the_wrong_kind_are_refused(wrong, sentence):
    with pytest.raises(GeometryError) as error:
        CacheGeometry(layers=wrong, num_blocks=1)
    assert sentence in str(error.value)


@pytest.mark.parametrize("value", [True, 0, -1, 1.0, "4", None, 2**41])
def test_num_blocks_is_a_number_of_blocks(value):
    with pytest.raises(GeometryError, match=r"CacheGeometry\.num_blocks"):
        CacheGeometry(layers=layers(1), num_blocks=value)


def test_layers_are_kept_apart_from_the_caller_s_mapping():
    given_layers = layers(2)
    geometry = CacheGeometry(layers=given_layers, num_blocks=1)
    given_layers.clear()
    assert list(geometry.layers) == ["layer.0", "layer.1"]
    with pytest.raises(TypeError):
        geometry.layers["x"] = LATENT


def test_default_groups_are_one_per_kind_and_block_size():
    geometry = CacheGeometry(
        layers={"a": attention(), "s": STATE, "b": attention(head_size=64), "m": LATENT},
        num_blocks=1,
    )
    found = {group.name: group.layer_names for group in geometry.groups}
    assert found == {"attention": ("a", "b"), "state": ("s",), "latent": ("m",)}
    assert geometry.group_of("b").name == "attention"


def test_default_groups_of_one_kind_are_told_apart_by_block_size():
    geometry = CacheGeometry(layers={"a": attention(), "b": attention(block_size=32)}, num_blocks=1)
    assert [group.name for group in geometry.groups] == ["attention-16", "attention-32"]


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([{"name": "g", "layer_names": ["a"]}], "groups holds LayerGroup values, not"),
        (5, "groups holds LayerGroup values, not 5"),
        ([], "2 layers are in no group, 'a' first"),
        ([("g", ["a"])], "1 layers are in no group, 'b' first"),
        ([("g", ["a"]), ("g", ["b"])], "two groups are named 'g'"),
        ([("g", ["a", "b", "c"])], "group 'g' names 'c', which is no layer"),
        ([("g", ["a", "b"]), ("h", ["b"])], "layer 'b' is named twice, in groups 'g' and 'h'"),
        ([("g", ["a", "a", "b"])], "layer 'a' is named twice, in groups 'g' and 'g'"),
    ],
)
def test_groups_that_are_no_partition_are_refused(groups, sentence):
    with pytest.raises(GeometryError) as error:
        CacheGeometry(
            layers={"a": LATENT, "b": LATENT},
            num_blocks=1,
            groups=[
                LayerGroup(name=g[0], layer_names=g[1]) if isinstance(g, tuple) else g
                for g in groups
            ]
            if isinstance(groups, list)
            else groups,
        )
    assert sentence in str(error.value)


def test_a_group_has_one_block_size():
    with pytest.raises(GeometryError, match=r"shares one block table.* blocks of 4, 16 tokens"):
        CacheGeometry(
            layers={"a": LATENT, "b": attention()},
            num_blocks=1,
            groups=[LayerGroup(name="g", layer_names=["a", "b"])],
        )


@pytest.mark.parametrize(
    ("name", "layer_names", "sentence"),
    [
        ("", ["a"], "a group's name is a non-empty string, not ''"),
        (None, ["a"], "a group's name is a non-empty string, not None"),
        ("g", [], "group 'g' has no layers"),
        ("g", 5, "layer_names are several names, not 5"),
        ("g", "layer", "layer_names are several names, not 'layer'"),
        ("g", [["a"]], "layer_names are names, not \\['a'\\]"),
    ],
)
def test_a_group_that_cannot_be_is_refused(name, layer_names, sentence):
    with pytest.raises(GeometryError, match=sentence):
        LayerGroup(name=name, layer_names=layer_names)


@pytest.mark.parametrize(
    ("number", "pp", "stages"),
    [
        # as vLLM deals: what is left over goes before the last stage, last ones first
        (46, 4, (11, 12, 12, 11)),
        (45, 4, (11, 11, 12, 11)),
        (47, 4, (12, 12, 12, 11)),
        (48, 4, (12, 12, 12, 12)),
        (5, 2, (3, 2)),
        (7, 1, (7,)),
        (3, 3, (1, 1, 1)),
    ],
)
def test_default_stages(number, pp, stages):
    assert even_stages(number, pp) == stages
    assert CacheGeometry(layers=layers(number), num_blocks=1).stages_for(pp) == stages


@given(st.integers(1, 300), st.integers(1, 300))
def test_default_stages_are_as_even_as_can_be(number, pp):
    if pp > number:
        with pytest.raises(GeometryError, match=f"{number} layers cannot fill {pp} pipeline st"):
            even_stages(number, pp)
        return
    stages = even_stages(number, pp)
    assert len(stages) == pp
    assert sum(stages) == number
    assert max(stages) - min(stages) <= 1
    assert stages[-1] == min(stages)


def test_c19_given_stages_hold_layers_by_name():
    geometry = CacheGeometry(layers=layers(44), num_blocks=1, stages=[21, 23])
    stage_of = geometry.stage_of(2)
    assert [stage_of[f"layer.{n}"] for n in (0, 20, 21, 43)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([2, 1], r"stages \[2, 1\] hold 3 layers; the model has 4"),
        ([5], r"stages \[5\] hold 5 layers; the model has 4"),
        ([], r"stages \[\] hold 0 layers"),
        ([4, 0], "a whole number of layers >= 1, not 0"),
        ([5, -1], "a whole number of layers >= 1, not -1"),
        ([True, 3], "a whole number of layers >= 1, not True"),
        ([2.0, 2], "a whole number of layers >= 1, not 2.0"),
        ("22", "a whole number of layers >= 1, not '2'"),
        (None, None),
        (4, None),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages, sentence):
    if sentence is None:  # no stages, or one number for one stage, are fine
        assert CacheGeometry(layers=layers(4), num_blocks=1, stages=stages).stages_for(1) == (4,)
        return
    with pytest.raises(GeometryError, match=sentence):
        CacheGeometry(layers=layers(4), num_blocks=1, stages=stages)


def test_stages_of_another_number_than_pp_are_refused():
    geometry = CacheGeometry(layers=layers(4), num_blocks=1, stages=[2, 2])
    with pytest.raises(GeometryError, match="2 stages are given for pp=4"):
        geometry.stages_for(4)


def test_what_has_an_order_is_not_given_as_a_set():
    one = LayerGroup(name="one", layer_names=["layer.0"])
    for wrong in ({"stages": {1}}, {"groups": {one}}, {"groups": frozenset({one})}):
        with pytest.raises(GeometryError, match="are given in order; a set has none"):
            CacheGeometry(layers=layers(1), num_blocks=1, **wrong)


def test_layers_in_another_order_are_another_geometry():
    """As they are another format."""
    one = layers(2)
    other = dict(reversed(one.items()))
    assert CacheGeometry(layers=one, num_blocks=1) != CacheGeometry(layers=other, num_blocks=1)
    assert CacheGeometry(layers=one, num_blocks=1) == CacheGeometry(layers=dict(one), num_blocks=1)
