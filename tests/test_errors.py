"""The exception tree, refusals, and close names."""

import inspect
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy
from kvpolicy import errors
from kvpolicy.errors import REFUSAL_CODES, KVPolicyError, OptionError, Refusal
from kvpolicy.words import close_names

TREE = {
    # name: (kvpolicy parent, built-in parent, code, exit status)
    "GeometryError": ("KVPolicyError", ValueError, "geometry", 2),
    "LayoutError": ("KVPolicyError", ValueError, "layout", 2),
    "ConfigError": ("KVPolicyError", ValueError, "config", 2),
    "OptionError": ("KVPolicyError", ValueError, "option", 2),
    "UnknownPluginError": ("KVPolicyError", LookupError, "unknown-plugin", 2),
    "PluginError": ("KVPolicyError", RuntimeError, "plugin", 3),
    "DuplicatePluginError": ("PluginError", RuntimeError, "duplicate-plugin", 3),
    "PolicyConflictError": ("KVPolicyError", RuntimeError, "conflict", 3),
    "CertificationError": ("KVPolicyError", RuntimeError, "uncertified", 3),
    "RegistrationError": ("KVPolicyError", RuntimeError, "registration", 3),
    "FormatMismatchError": ("KVPolicyError", ValueError, "format-mismatch", 3),
    "BlockIdError": ("KVPolicyError", ValueError, "block-id", 3),
    "PoolError": ("KVPolicyError", RuntimeError, "pool", 3),
    "UnknownJobError": ("KVPolicyError", LookupError, "unknown-job", 3),
    "NoTransferError": ("KVPolicyError", RuntimeError, "no-transfer", 3),
    "ClosedError": ("KVPolicyError", RuntimeError, "closed", 3),
}

REFUSED = {"layer.0": Refusal("overlapping", "they overlap; move one")}

RAISED = [
    errors.KVPolicyError("m"),
    errors.GeometryError("m"),
    errors.LayoutError("m"),
    errors.ConfigError("m", "head_dim"),
    errors.OptionError("m"),
    errors.UnknownPluginError("m", "slap"),
    errors.PluginError("m", plugin_name="slab", distribution="kvpolicy-slab", version="1.2"),
    errors.DuplicatePluginError("m", plugin_name="slab"),
    errors.PolicyConflictError("m", ["slab", "other"], 50),
    errors.CertificationError("m", REFUSED),
    errors.RegistrationError("m", REFUSED, plugin_name="slab", distribution="d", version="1"),
    errors.FormatMismatchError("m", ["dtype: stored 'a', wanted 'b'"]),
    errors.BlockIdError("m"),
    errors.PoolError("m"),
    errors.UnknownJobError("m"),
    errors.NoTransferError("m"),
    errors.ClosedError("m"),
]


def public_classes():
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value)
        and issubclass(value, Exception)
        and value.__module__ == errors.__name__
        and not name.startswith("_")
    }


def test_the_tree_is_whole():
    assert set(public_classes()) == {*TREE, "KVPolicyError"}


@pytest.mark.parametrize("name", TREE)
def test_parents_code_and_exit_status(name):
    parent, built_in, code, exit_status = TREE[name]
    found = getattr(errors, name)
    assert issubclass(found, getattr(errors, parent))
    assert issubclass(found, KVPolicyError)
    assert issubclass(found, built_in)
    assert not issubclass(found, KeyError)  # its text would show in quotes
    assert (found.code, found.exit_status) == (code, exit_status)


def test_codes_differ():
    codes = [found.code for found in public_classes().values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("name", TREE)
def test_the_module_docstring_draws_each_class_with_its_built_in_parent(name):
    lines = [line for line in errors.__doc__.splitlines() if f"── {name}" in line]
    assert len(lines) == 1
    parent, built_in, _, _ = TREE[name]
    if parent == "KVPolicyError":
        assert f"{name} ({built_in.__name__})" in lines[0]
    assert re.search(r"\S  +\S", lines[0])  # and says what it means


@pytest.mark.parametrize("name", [*TREE, "KVPolicyError"])
def test_each_class_has_a_docstring_and_is_public(name):
    assert getattr(errors, name).__doc__
    assert getattr(kvpolicy, name) is getattr(errors, name)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_crosses_a_process_whole(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_class_is_raised_in_that_list():
    assert {type(error) for error in RAISED} == set(public_classes().values())


def test_refusals_are_listed_a_line_each():
    error = errors.CertificationError("2 layers are refused", {**REFUSED, "b": Refusal("x", "Y.")})
    assert str(error).splitlines() == [
        "2 layers are refused",
        "  layer.0: overlapping: they overlap; move one",
        "  b: x: Y.",
    ]
    assert error.message == "2 layers are refused"
    assert error.explanation is None


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a"], "a"),
        (["m.0.attn", "m.1.attn", "m.2.attn"], "m.0-2.attn (3 layers)"),
        (["a", "b", "c"], "a ... c (3 layers)"),
        (["m.0.attn", "m.1.mlp"], "m.0.attn ... m.1.mlp (2 layers)"),
    ],
)
def test_layers_refused_for_one_reason_share_a_line(names, shown):
    refusals = {**dict.fromkeys(names, Refusal("x", "Y.")), "other": Refusal("x", "Z.")}
    error = errors.RegistrationError("m", refusals)
    assert str(error).splitlines() == ["m", f"  {shown}: x: Y.", "  other: x: Z."]
    assert error.refusals == refusals  # and each layer keeps its own


def test_format_differences_are_listed_a_line_each():
    error = errors.FormatMismatchError("no", ["dtype: stored 'a', wanted 'b'"])
    assert str(error).splitlines() == ["no", "  dtype: stored 'a', wanted 'b'"]


def test_a_conflict_names_its_plugins_in_order():
    assert errors.PolicyConflictError("m", ["b", "a"], 7).plugin_names == ("a", "b")


@pytest.mark.parametrize(
    "code",
    ["", " ", "Upper", "two words", " spaced", "spaced ", "-x", "x-", "a--b", "a_b", None, 3, True],
)
def test_a_refusal_without_a_hyphenated_code_is_refused(code):
    with pytest.raises(OptionError, match="lower-case words joined by hyphens"):
        Refusal(code, "a sentence")


@pytest.mark.parametrize("detail", ["", "  ", None, 3])
def test_a_refusal_without_a_sentence_is_refused(detail):
    with pytest.raises(OptionError, match="needs a sentence that says why"):
        Refusal("overlapping", detail)


@pytest.mark.parametrize("code", REFUSAL_CODES)
def test_every_refusal_code_is_a_code_with_a_meaning(code):
    meaning = REFUSAL_CODES[code]
    assert str(Refusal(code, meaning)) == f"{code}: {meaning}"
    assert meaning.endswith(".")
    assert meaning[0].isupper()


def test_the_core_makes_no_refusal_with_an_undocumented_code():
    source = Path(errors.__file__).parent
    made = {
        code
        for path in source.rglob("*.py")
        for code in re.findall(r"\bRefusal\(\s*\"([^\"]+)\"", path.read_text(encoding="utf-8"))
    }
    assert made - {*REFUSAL_CODES} == set()
    assert {*REFUSAL_CODES} - made == set()  # nor documents one that nothing makes


@pytest.mark.parametrize(
    ("name", "known", "tail"),
    [
        ("canonicel", ["canonical", "direct"], "did you mean 'canonical'?"),
        ("laby", ["slab", "laby1", "laby2"], "did you mean 'laby2' or 'laby1' or 'slab'?"),
        ("zzz", ["b", "a"], "known: a, b"),
        ("zzz", [], "known: none"),
        (
            "zzz",
            [f"{n:02}" for n in range(20)],
            "known: 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, 10, 11, ...",
        ),
    ],
)
def test_close_names(name, known, tail):
    assert close_names(name, known) == tail


@given(st.text(), st.lists(st.text(min_size=1), max_size=5), st.randoms())
def test_close_names_do_not_depend_on_order(name, known, random):
    shuffled = random.sample(known, len(known))
    assert close_names(name, known) == close_names(name, shuffled)
