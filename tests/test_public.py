"""The public surface: complete, documented, and as the design fixes it."""

import ast
import enum
import importlib.metadata
import inspect
import re
import typing
from pathlib import Path

import attrs
import pytest

import kvpolicy
from kvpolicy import errors
from kvpolicy.models import geometry_from_config

SOURCE = Path(kvpolicy.__file__).parent
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
every_name = pytest.mark.parametrize("name", kvpolicy.__all__)
CONSTANTS = ("REFUSAL_CODES", "__version__")  # docs/reference/api.md describes them
# Values whose one line says what each field is.
SELF_EVIDENT = ("CastVote", "Rank")
ERRORS = [
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception) and not name.startswith("_")
]


def page(name):
    return (REFERENCE / name).read_text(encoding="utf-8")


def names_in(text):
    """Every identifier of a page."""
    return set(re.findall(r"\w+", text))


def quoted(text):
    """Everything between backticks."""
    return set(re.findall(r"`([^`\n]+)`", text))


# __all__.


def test_all_is_sorted_constants_first_then_classes_then_the_rest():
    def place(name):
        kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
        return kind, name

    assert kvpolicy.__all__ == sorted(kvpolicy.__all__, key=place)
    assert len(set(kvpolicy.__all__)) == len(kvpolicy.__all__)


def test_all_is_what_the_package_imports_and_its_version():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvpolicy")
        for alias in node.names
    }
    assert imported | {"__version__"} == {*kvpolicy.__all__}


def test_every_error_is_public():
    assert {*ERRORS} - {*kvpolicy.__all__} == set()
    assert "KVPolicyError" in ERRORS


@every_name
def test_a_public_name_resolves_and_is_listed(name):
    assert getattr(kvpolicy, name) is not None
    assert name in dir(kvpolicy)


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'kvpolicy' has no attribute 'Conector'$"):
        _ = kvpolicy.Conector


def test_the_version_is_the_distribution_s():
    assert importlib.metadata.version("kvpolicy") == kvpolicy.__version__


# Documented.


@pytest.mark.parametrize("name", [n for n in kvpolicy.__all__ if n not in CONSTANTS])
def test_a_public_name_has_a_docstring(name):
    value = getattr(kvpolicy, name)
    own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    assert own
    assert own.strip().splitlines()[0].rstrip().endswith((".", ":"))


@pytest.mark.parametrize(
    "name", [n for n in kvpolicy.__all__ if isinstance(getattr(kvpolicy, n), type)]
)
def test_a_public_class_documents_its_methods_and_attributes(name):
    kind = getattr(kvpolicy, name)
    for member, value in vars(kind).items():
        described = isinstance(value, property | classmethod | staticmethod) or callable(value)
        if described and not member.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{member}"
    if attrs.has(kind) and len(attrs.fields(kind)) > 3 and name not in SELF_EVIDENT:
        text = inspect.getdoc(kind)
        for field in attrs.fields(kind):
            if field.init:
                assert re.search(rf"\b{field.name}\b", text), f"{name}.{field.name}"


def test_every_public_name_is_on_the_api_page():
    assert {*kvpolicy.__all__} - names_in(page("api.md")) == set()


def test_every_error_is_on_the_page_of_errors_with_its_code():
    assert {*ERRORS} - names_in(page("errors.md")) == set()
    assert {getattr(errors, name).code for name in ERRORS} - quoted(page("errors.md")) == set()


def test_every_refusal_code_is_on_the_page_of_errors():
    assert {*kvpolicy.REFUSAL_CODES} - quoted(page("errors.md")) == set()


# Refusal codes: those in use are those that are documented.


def refusals(path):
    """The first argument of every ``Refusal(...)`` in a source file, as a node."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Refusal":
            yield node.args[0] if node.args else None


def test_every_refusal_in_the_sources_has_a_documented_code_and_every_code_is_used():
    used = set()
    for path in SOURCE.rglob("*.py"):
        for code in refusals(path):
            assert isinstance(code, ast.Constant), f"{path.name}: a refusal's code is a literal"
            used.add(code.value)
    assert used == {*kvpolicy.REFUSAL_CODES}


def test_refusal_codes_are_words_with_hyphens_and_have_sentences():
    for code, meaning in kvpolicy.REFUSAL_CODES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert meaning[0].isupper()
        assert meaning.endswith(".")


def test_error_codes_tell_the_errors_apart():
    codes = {name: getattr(errors, name).code for name in ERRORS}
    assert len(set(codes.values())) == len(codes)


# The fixed public surface, as the design lists it.

VALUES = {
    "AttentionSpec": "*, block_size, total_kv_heads, head_size, itemsize, kv_packing='packed', "
    "v_head_size=None, scale_bytes=0, page_padding=0, kernel_block_size=None",
    "LatentSpec": "*, block_size, row_bytes, page_padding=0, kernel_block_size=None",
    "StateSpec": "*, state_bytes, page_padding=0",
    "LayerGroup": "*, name, layer_names",
    "CacheGeometry": "*, layers, num_blocks, groups=None, stages=None",
    "ParallelGrid": "*, tp=1, pp=1, dcp=1, pcp=1, cp_interleave=1",
    "BackendCapabilities": "*, name='', stride_aware=None, layouts=None",
    "PolicyContext": "*, geometry, grid=ParallelGrid, rank=0, canonical=False, "
    "canonical_order=None, layout=LBHNC, backend=BackendCapabilities, dtype='', encoding='', "
    "options=dict",
    "Vote": "answer, reason=''",
    "Refusal": "code, detail",
    "TransferResult": "*, job_id, ok, bytes, seconds, failed_ids=(), error=''",
    "HostPool": None,  # the design leaves its making to us
}
FUNCTIONS = {
    "certify": "spec, grid, layout=LBHNC, canonical_order=None",
    "Connector.store": "self, block_ids, slots, group=None, *, keys=None",
    "Connector.load": "self, slots, block_ids, group=None, *, keys=None",
    "Connector.register": "self, caches",
    "Connector.poll": "self",
    "Connector.wait": "self, job_ids=None, timeout=None",
    "Connector.close": "self",
    "Certificate.mapping": "self, rank",
    "PageMapping.byte_runs": "self",
    "ParallelGrid.ranks": "self",
    "KVCacheLayout.parse": "name",
}
ATTRIBUTES = {
    "Certificate": (),
    "PageMapping": (
        "local_page_bytes",
        "canonical_page_bytes",
        "num_writers",
        "writer_index",
        "portable",
    ),
    "LayoutDecision": ("cross_layer_blocks", "layout", "decided_by", "votes"),
    "Registration": ("pages",),
    "Connector": ("decision", "fingerprint", "format_id", "explain"),
    "AttentionSpec": ("row_bytes",),
}


def parameters(function, own=None):
    """The parameters with their defaults, without annotations; a factory's is its name."""
    factories = {
        field.name: field.default.factory.__name__
        for field in (attrs.fields(own) if own is not None and attrs.has(own) else ())
        if isinstance(field.default, attrs.Factory)
    }
    told, named_only = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not named_only:
            named_only = True
            told.append("*")
        default = parameter.default
        if default is parameter.empty:
            told.append(name)
        elif name in factories:
            told.append(f"{name}={factories[name]}")
        elif isinstance(default, enum.Enum):
            told.append(f"{name}={default.name}")
        else:
            told.append(f"{name}={default!r}")
    return ", ".join(told)


def public(dotted):
    value = kvpolicy
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", [name for name, fixed in VALUES.items() if fixed is not None])
def test_a_value_is_made_of_what_the_design_says(name):
    kind = public(name)
    assert parameters(kind, kind) == VALUES[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_what_the_design_says(name):
    assert parameters(public(name)) == FUNCTIONS[name]


def test_a_connector_takes_what_the_design_says():
    taken = inspect.signature(kvpolicy.Connector).parameters
    fixed = {"context": inspect.Parameter.empty, "plugins": None, "strict": False, "host": None}
    assert {name: taken[name].default for name in fixed} == fixed
    assert list(taken)[:2] == ["context", "plugins"]
    by_name = {n for n, p in taken.items() if p.kind is p.KEYWORD_ONLY}
    assert by_name == {*taken} - {"context", "plugins"}


def test_a_geometry_is_read_from_a_config_as_the_design_says():
    fixed, _, ours = parameters(geometry_from_config).partition(", *, ")
    assert fixed == "mapping, block_size=16, dtype=None, num_blocks=1024"
    assert all("=" in one for one in ours.split(", ") if one)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in ATTRIBUTES.items() for name in names]
)
def test_a_value_has_what_the_design_says(kind, name):
    value = public(kind)
    fields = {field.name for field in attrs.fields(value)} if attrs.has(value) else set()
    assert name in fields | {*dir(value)}


@pytest.mark.parametrize(
    "name",
    [n for n in VALUES if n != "HostPool"] + ["Certificate", "PageMapping", "LayoutDecision"],
)
def test_values_are_frozen_and_keyword_only_but_for_two(name):
    kind = public(name)
    fields = attrs.fields(kind)
    assert all(field.kw_only for field in fields if field.init) is (name not in ("Vote", "Refusal"))
    value = object.__new__(kind)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, fields[0].name, 1)


def test_the_layouts_are_the_six():
    assert [layout.name for layout in kvpolicy.KVCacheLayout] == [
        "LBHNC",
        "LBNHC",
        "LHBNC",
        "BLHNC",
        "BLNHC",
        "BHLNC",
    ]


def test_every_error_derives_from_one_and_from_a_built_in_parent():
    for name in ERRORS:
        kind = getattr(kvpolicy, name)
        assert issubclass(kind, kvpolicy.KVPolicyError)
        if kind is not kvpolicy.KVPolicyError:
            assert issubclass(kind, ValueError | LookupError | RuntimeError), name


def test_annotations_of_public_functions_resolve():
    for name in ("certify", "load_plugins", "select"):
        assert "return" in typing.get_type_hints(public(name))
