"""The pages on vLLM name every option, metric, version, error and refusal that the sources have."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import kvpolicy_vllm
import pytest
import torch
from kvpolicy_vllm import compat, errors
from kvpolicy_vllm.report import METRICS, paragraph

import kvpolicy

PACKAGE = Path(kvpolicy_vllm.__file__).parent
PLUGIN = Path(__file__).parents[1]
ROOT = PLUGIN.parents[1]
REFERENCE = ROOT / "docs" / "reference" / "vllm.md"
ERRORS = REFERENCE.with_name("errors.md")
HOW_TO = ROOT / "docs" / "how-to" / "run-in-vllm.md"
# Set in the extra config by the connector, for its own spec.
OURS = {"spec_name", "spec_module_path"}

pytestmark = pytest.mark.skipif(
    not REFERENCE.exists(), reason="this folder was copied out of the checkout that has the pages"
)


def source(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def calls() -> list[ast.Call]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.glob("*.py")]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]


def name_of(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1]


def strings(nodes: list[ast.expr]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def options_read() -> set[str]:
    """The names for which the sources ask an extra config."""
    return strings(
        [
            call.args[0]
            for call in calls()
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "get"
            and name_of(call.func.value) in ("extra", "extra_config")
        ]
    )


def dict_keys(module: str, function: str) -> set[str]:
    """The constant keys of a dict that a function returns."""
    (body,) = [
        node
        for node in ast.walk(source(module))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    (returned,) = [node.value for node in ast.walk(body) if isinstance(node, ast.Return)]
    assert isinstance(returned, ast.Dict)
    return strings([key for key in returned.keys if key is not None])


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    text = page.read_text(encoding="utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}\n", text, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def named(heading: str, page: Path = REFERENCE) -> set[str]:
    """What the first column of a table quotes."""
    return quoted([row[0] for row in rows(page, heading)])


# The reference.


def test_every_option_that_is_read_is_documented():
    read = options_read()
    assert {"cpu_bytes_to_use", "canonical_layout", "kvpolicy", "pool_file"} <= read
    assert read | OURS <= named("Options")


def test_every_metric_of_ours_is_documented_and_no_other():
    assert {name for name in named("Metrics") if "kvpolicy" in name} == {*METRICS}


def test_every_version_is_documented_with_what_becomes_of_it():
    said = {row[0]: row[1] for row in rows(REFERENCE, "Versions")}
    assert said == dict.fromkeys(compat.TESTED, "tested") | dict.fromkeys(
        compat.UNTESTED, "used with a warning"
    )


def test_every_term_of_a_pool_file_is_documented():
    terms = dict_keys("compat", "key_meaning") | dict_keys("connector", "_contents")
    assert "weights" in terms
    assert "blocks_per_chunk" in terms
    documented = named("Terms of a pool file")
    assert {name for name in documented if name.startswith("contents.")} == {
        f"contents.{term}" for term in terms
    }


def test_every_refusal_is_documented_and_no_other():
    given = strings([call.args[0] for call in calls() if name_of(call.func) == "Refusal"])
    assert given
    assert named("Errors") == given


def test_every_error_is_documented_with_its_parent_and_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if kind.__module__ == errors.__name__]
    said = {tuple(row[:3]) for row in rows(ERRORS, "Errors of kvpolicy-vllm")}
    assert said == {
        (f"`{kind.__name__}`", kind.__bases__[1].__name__, f"`{kind.code}`") for kind in kinds
    }


# What people copy.


def commands(page: Path) -> list[dict]:
    """The objects that a page gives to vLLM on a command line."""
    found = re.findall(r"--kv-transfer-config '([^']+)'", page.read_text(encoding="utf-8"))
    return [json.loads(text) for text in found]


@pytest.mark.parametrize(
    "page",
    [HOW_TO, ROOT / "README.md", ROOT / "docs" / "index.md", PLUGIN / "README.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_every_command_that_is_shown_names_what_there_is(page):
    shown = commands(page)
    assert shown
    for config in shown:
        extra = config.pop("kv_connector_extra_config")
        assert config == {
            "kv_connector": kvpolicy_vllm.CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        assert "cpu_bytes_to_use" in extra
        assert {*extra} <= named("Options")
        kvpolicy.select({"kvpolicy": extra.get("kvpolicy", {})})  # refuses a key that is none


def test_the_paragraph_that_is_shown_is_the_one_that_is_logged(tmp_path):
    """Of the model that the page speaks of: 4 layers of 4 KV heads of 64, in float32."""
    spec = kvpolicy.AttentionSpec(block_size=128, total_kv_heads=4, head_size=64, itemsize=4)
    names = [f"model.layers.{n}.self_attn.attn" for n in range(4)]
    context = kvpolicy.PolicyContext(
        geometry=kvpolicy.CacheGeometry(
            layers=dict.fromkeys(names, spec),
            num_blocks=8,
            groups=[kvpolicy.LayerGroup(name="group-0", layer_names=names)],
        ),
        canonical=True,
        backend=kvpolicy.BackendCapabilities(
            name="CPU_ATTN", stride_aware=True, layouts=frozenset({"LBHNC"})
        ),
        dtype="float32",
        encoding="cpu-vec",
        options={"kvpolicy": {"plugins": []}},
    )
    offload = kvpolicy.Connector(context)
    with (
        kvpolicy.SharedHostPool("a", 64, offload.record_bytes, directory=tmp_path) as pool,
        offload,
    ):
        offload.use_host(pool)
        offload.register({name: torch.zeros(8, 4, 128, 2 * 64) for name in names})
        said = paragraph(
            offload.explain(),
            asked="LBHNC",
            resolved="LBHNC",
            asks_by_layout=True,
            fragments=offload.fragments,
            pool=pool,
            found="pool file reopened with 10 record(s)",
        ).replace(str(pool.path), "/srv/kv/small.pool")
    assert said in " ".join(HOW_TO.read_text(encoding="utf-8").split())


# What vLLM itself reads and counts, where there is one.


def vllm_source(*parts: str) -> str:
    """A file of the installed vLLM, which is not imported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name on the path has none
        pytest.skip("vLLM is not installed here; make test-vllm has it")
    return Path(found.origin).parent.joinpath(*parts).read_text(encoding="utf-8")


OFFLOADING = ("distributed", "kv_transfer", "kv_connector", "v1", "offloading")


def test_the_options_are_those_that_somebody_reads():
    theirs = vllm_source("v1", "kv_offload", "base.py") + vllm_source(*OFFLOADING, "config.py")
    read = {*re.findall(r'extra_config\.get\(\s*"(\w+)"', theirs)}
    assert "blocks_per_chunk" in read
    assert named("Options") == read | options_read() | OURS


def test_every_metric_of_vllms_offloading_is_documented():
    theirs = vllm_source(*OFFLOADING, "metrics.py")
    theirs += vllm_source("v1", "kv_offload", "cpu", "common.py")
    names = {*re.findall(r'"(vllm:kv_offload_\w+)"', theirs)}
    assert "vllm:kv_offload_store_bytes" in names
    assert names <= quoted([REFERENCE.read_text(encoding="utf-8")])
