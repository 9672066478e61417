"""`explain --diff`: it names a field exactly where identities differ, and says both values."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvpolicy
from kvpolicy import CacheGeometry, Connector, KVPolicyError, LayerGroup, PolicyContext
from kvpolicy.cli import main
from kvpolicy.cli.difference import explain_difference
from kvpolicy.testing import strategies
from kvpolicy.testing.fakes import Voter

MODELS = Path(__file__).parent / "models"
QWEN = MODELS / "qwen3-30b-a3b.json"


def explained(context: PolicyContext, plugins: object = ()) -> dict | None:
    try:
        return json.loads(json.dumps(Connector(context, plugins).explain()))
    except KVPolicyError:
        return None


def fields(found: dict, identity: str) -> dict[str, tuple[object, object]]:
    return {one["field"]: (one["a"], one["b"]) for one in found[identity]["differences"]}


# It says something exactly where something differs.


def changed(context: PolicyContext) -> st.SearchStrategy[PolicyContext]:
    """The context with one thing changed, or none."""
    geometry = context.geometry
    first = next(iter(geometry.layers))
    renamed = {
        (f"{name}.x" if name == first else name): spec for name, spec in geometry.layers.items()
    }
    grid = context.grid if geometry.stages else kvpolicy.ParallelGrid()
    return st.sampled_from(
        [
            context,
            attrs.evolve(context, rank=context.grid.size - 1),
            attrs.evolve(context, canonical=not context.canonical),
            attrs.evolve(context, dtype="other"),
            attrs.evolve(context, encoding="other"),
            attrs.evolve(context, layout="NHD" if context.layout.heads_first else "HND"),
            attrs.evolve(context, grid=grid, rank=0),
            attrs.evolve(context, geometry=attrs.evolve(geometry, layers=renamed, groups=None)),
            attrs.evolve(context, geometry=attrs.evolve(geometry, num_blocks=9)),
        ]
    )


@settings(max_examples=100)
@given(strategies.contexts().flatmap(lambda one: st.tuples(st.just(one), changed(one))))
def test_a_field_is_named_exactly_where_an_identity_differs(both):
    one, other = (explained(context) for context in both)
    assume(one is not None and other is not None)
    found = explain_difference(one, other)
    for identity in ("format_id", "fingerprint"):
        assert found[identity]["equal"] is (one[identity] == other[identity])
        assert bool(found[identity]["differences"]) is (one[identity] != other[identity])
        for difference in found[identity]["differences"]:
            assert difference["a"] != difference["b"]


@settings(max_examples=50)
@given(strategies.contexts().flatmap(lambda one: st.tuples(st.just(one), changed(one))))
def test_the_other_way_round_it_says_the_same_with_sides_exchanged(both):
    one, other = (explained(context) for context in both)
    assume(one is not None and other is not None)
    there, back = explain_difference(one, other), explain_difference(other, one)
    for identity in ("format_id", "fingerprint"):
        swapped = {field: (b, a) for field, (a, b) in fields(back, identity).items()}
        assert fields(there, identity) == swapped


# Each field by hand.


SPEC = kvpolicy.AttentionSpec(block_size=16, total_kv_heads=4, head_size=8, itemsize=2)
BASE = PolicyContext(
    geometry=CacheGeometry(layers=dict.fromkeys(("l.0", "l.1", "l.2"), SPEC), num_blocks=2),
    grid=kvpolicy.ParallelGrid(tp=2),
    canonical=True,
    dtype="float16",
)


def compared(other: PolicyContext, base: PolicyContext = BASE, plugins: object = ()) -> dict:
    return explain_difference(explained(base), explained(other, plugins))


def layers(**changes: object) -> CacheGeometry:
    made = attrs.evolve(SPEC, **changes)
    return CacheGeometry(layers={"l.0": SPEC, "l.1": made, "l.2": made}, num_blocks=2)


def test_equal_formats_of_other_topology_differ_in_their_fingerprints_alone():
    found = compared(attrs.evolve(BASE, grid=kvpolicy.ParallelGrid(tp=4)))
    assert found["format_id"]["equal"] is True
    assert found["format_id"]["differences"] == []
    assert fields(found, "fingerprint") == {"grid, tp": (2, 4)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "bfloat16"}, {"group attention, dtype": ("float16", "bfloat16")}),
        ({"encoding": "mine"}, {"group attention, encoding": ("", "mine")}),
        ({"canonical_order": "NHD"}, {"group attention, order": ("LBHNC", "LBNHC")}),
        (
            {"geometry": layers(head_size=16, v_head_size=16)},
            {
                "group attention, layers l.1-2, head_size": (8, 16),
                "group attention, layers l.1-2, v_head_size": (8, 16),
            },
        ),
        (
            {"geometry": CacheGeometry(layers={"l.0": SPEC, "l.1": SPEC}, num_blocks=2)},
            {"group attention, layers of one side alone": ("l.2", None)},
        ),
        (
            {
                "geometry": CacheGeometry(
                    layers=dict.fromkeys(
                        ("l.0", "l.1", "l.2"),
                        attrs.evolve(SPEC, block_size=32, kernel_block_size=32),
                    ),
                    num_blocks=2,
                )
            },
            {"group attention, tokens": (16, 32)},
        ),
        (
            {
                "geometry": CacheGeometry(
                    layers=dict.fromkeys(("l.1", "l.0", "l.2"), SPEC), num_blocks=2
                )
            },
            {"group attention, order of layers": (["l.0", "l.1", "l.2"], ["l.1", "l.0", "l.2"])},
        ),
    ],
)
def test_a_format_names_its_field_and_the_layers(changes, said):
    found = compared(attrs.evolve(BASE, **changes))
    assert fields(found, "format_id") == said
    assert set(fields(found, "fingerprint")) <= {"format_id", "layers per stage"}


def test_a_private_format_names_its_topology_too():
    found = compared(attrs.evolve(BASE, canonical=False))
    told = fields(found, "format_id")
    assert told["group attention, form"] == ("canonical", "private")
    assert told["group attention, tp"] == (None, 2)
    assert told["group attention, layout"][0] is None


def test_a_group_that_only_one_side_has_is_named_with_its_layers():
    split = CacheGeometry(
        layers=BASE.geometry.layers,
        num_blocks=2,
        groups=[
            LayerGroup(name="near", layer_names=["l.0"]),
            LayerGroup(name="far", layer_names=["l.1", "l.2"]),
        ],
    )
    assert fields(compared(attrs.evolve(BASE, geometry=split)), "format_id") == {
        "group attention": ("l.0-2", None),
        "group near": (None, "l.0"),
        "group far": (None, "l.1-2"),
    }


def test_the_name_of_a_group_alone_is_no_difference():
    named = CacheGeometry(
        layers=BASE.geometry.layers,
        num_blocks=2,
        groups=[LayerGroup(name="mine", layer_names=["l.0", "l.1", "l.2"])],
    )
    found = compared(attrs.evolve(BASE, geometry=named))
    assert found["format_id"]["equal"] is found["fingerprint"]["equal"] is True


def test_plugins_are_named_with_version_and_priority():
    found = compared(BASE, plugins={"mine": Voter(None)})
    assert fields(found, "fingerprint") == {"plugin mine": (None, "an object at priority 0")}
    raised = json.loads(json.dumps(explained(BASE)))
    found = explain_difference(
        raised, json.loads(json.dumps(Connector(BASE, priorities={"direct": 7}).explain()))
    )
    version = kvpolicy.__version__
    assert fields(found, "fingerprint") == {
        "plugin direct": (
            f"kvpolicy {version} at priority -100",
            f"kvpolicy {version} at priority 7",
        )
    }


def test_the_decision_and_the_stages_are_named():
    slab = attrs.evolve(
        BASE, canonical=False, backend=kvpolicy.BackendCapabilities(stride_aware=True)
    )
    told = fields(compared(slab), "fingerprint")
    assert told["decision, cross_layer_blocks"] == (False, True)
    assert told["decision, layout"] == ("LBHNC", "BLHNC")
    assert told["decision, decided_by"] == ("canonical", "cross-layer")
    grid = kvpolicy.ParallelGrid(pp=2)
    one, other = (
        attrs.evolve(BASE, grid=grid, geometry=attrs.evolve(BASE.geometry, stages=stages))
        for stages in ((1, 2), (2, 1))
    )
    assert fields(compared(other, one), "fingerprint") == {"layers per stage": ([1, 2], [2, 1])}


def test_identities_that_no_field_explains_are_told_to_be_of_other_versions(capsys, tmp_path):
    one = explained(BASE)
    other = copy.deepcopy(one)
    other["format_id"] = other["fingerprint"] = other["groups"][0]["format_id"] = "0" * 32
    status, out, _ = run(capsys, tmp_path, one, other)
    assert status == 0
    assert "no field says why" in out


# The command.


def run(capsys, tmp_path, *found: object, words: tuple[str, ...] = ()) -> tuple[int, str, str]:
    files = []
    for i, one in enumerate(found):
        path = tmp_path / f"{'ab'[i]}.json"
        path.write_text(one if isinstance(one, str) else json.dumps(one))
        files.append(str(path))
    capsys.readouterr()
    status = main(["explain", "--diff", *files, *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def told(capsys, *words: object) -> dict:
    capsys.readouterr()
    assert main(["explain", str(QWEN), *(str(word) for word in words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_the_command_line_wrote_is_compared(capsys, tmp_path):
    one, other = told(capsys, "--tp", 2), told(capsys, "--tp", 4)
    status, out, err = run(capsys, tmp_path, one, other)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"A is {tmp_path / 'a.json'}"
    assert f"the format ids differ: A {one['format_id']}, B {other['format_id']}" in lines
    assert "└── group full, tp: A 2, B 4" in lines
    assert "└── grid, tp: A 2, B 4" in lines
    status, out, _ = run(capsys, tmp_path, one, other, words=("--json",))
    assert json.loads(out) == json.loads(json.dumps(explain_difference(one, other)))


def test_equal_identities_are_said_to_be_equal(capsys, tmp_path):
    one = told(capsys, "--tp", 2, "--canonical")
    status, out, _ = run(capsys, tmp_path, one, told(capsys, "--tp", 2, "--canonical"))
    assert status == 0
    assert f"equal format ids: {one['format_id']}" in out
    assert f"equal fingerprints: {one['fingerprint']}" in out
    assert "differ" not in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not whole JSON"),
        ("{", "is not whole JSON"),
        ("[" * 100_000, "is not whole JSON"),
        ("[]", "is no explanation"),
        ("{}", "it lacks 'decision'"),
        ('{"error": {"code": "conflict"}}', "tells of a start-up that was refused"),
    ],
)
def test_a_file_that_is_no_explanation_is_status_2(capsys, tmp_path, text, said):
    status, out, err = run(capsys, tmp_path, explained(BASE), text)
    assert (status, out) == (2, "")
    assert said in err
    assert str(tmp_path / "b.json") in err


def test_formats_that_are_not_told_and_files_that_are_not_there_are_status_2(capsys, tmp_path):
    older = explained(BASE)
    for group in older["groups"]:
        del group["format"]
    status, _, err = run(capsys, tmp_path, older, explained(BASE))
    assert status == 2
    assert "it lacks the formats of its groups" in err
    assert main(["explain", "--diff", str(tmp_path / "x"), str(tmp_path / "y")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def paths(value: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every place in a JSON value."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [at, *(path for key, one in inner for path in paths(one, (*at, key)))]


WHOLE = explained(BASE)


@settings(max_examples=150)
@given(
    st.sampled_from(paths(WHOLE)[1:]),
    st.sampled_from([None, 3, "x", [], [3], {}, {"name": 3}, True]),
)
def test_a_file_that_was_changed_by_hand_gives_words_and_never_a_traceback(path, value):
    spoiled = copy.deepcopy(WHOLE)
    *outer, last = path
    place = spoiled
    for key in outer:
        place = place[key]
    place[last] = value
    for key in ("format_id", "fingerprint"):  # so that every field is looked at
        if path != (key,):
            spoiled[key] = "other"
    with tempfile.TemporaryDirectory() as where:
        files = [Path(where) / name for name in ("a.json", "b.json")]
        for file, one in zip(files, (WHOLE, spoiled), strict=True):
            file.write_text(json.dumps(one))
        for order in (files, files[::-1]):
            assert main(["explain", "--diff", *map(str, order)]) in (0, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "are required: CONFIG.json, or --diff A.json B.json"),
        ((str(QWEN), "--diff", "a", "b"), "stands alone"),
        (("--diff", "a", "b", "--svg", "c"), "stands alone"),
        (("--diff", "a"), "expected 2 arguments"),
    ],
)
def test_diff_and_a_config_exclude_each_other(capsys, words, said):
    assert main(["explain", *words]) == 2
    assert said in capsys.readouterr().err
