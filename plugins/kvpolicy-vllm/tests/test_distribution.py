"""What is true of the distribution without any vLLM."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from kvpolicy_vllm import compat
from kvpolicy_vllm.errors import VLLMVersionError


def test_importing_it_imports_neither_vllm_nor_torch():
    code = (
        "import sys, kvpolicy_vllm; print(sorted({'vllm', 'torch', 'kvpolicy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_vllm_finds_it_and_kvpolicy_does_not():
    found = importlib.metadata.distribution("kvpolicy-vllm").entry_points
    assert [(point.group, point.value) for point in found] == [
        ("vllm.general_plugins", "kvpolicy_vllm:register")
    ]


def test_it_depends_on_kvpolicy_alone():
    wanted = importlib.metadata.requires("kvpolicy-vllm")
    assert [one.split(";")[0].strip() for one in wanted if "extra" not in one] == ["kvpolicy>=0.1"]


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_a_tested_version_is_taken(version):
    assert compat.version_rule(version) is None


@pytest.mark.parametrize("version", ["0.29.1", "0.30.0", "0.31.2", "0.33.0"])
def test_an_untested_version_is_warned_of(version):
    assert "untested" in compat.version_rule(version)


@pytest.mark.parametrize("version", ["0.3.2", "0.27.9", "0.34.0", "1.0.0", "dev"])
def test_any_other_version_is_refused_by_name(version):
    with pytest.raises(VLLMVersionError, match=f"vLLM {version} is not supported"):
        compat.version_rule(version)


def test_what_a_vllm_lacks_is_named():
    names = {
        "json": ("dumps", "JSONEncoder.no_such", "no|dumps", "no|such"),
        "no_such_module": ("x",),
    }
    assert compat.missing_names(names) == [
        "json.JSONEncoder.no_such",
        "json.no|such",
        "no_such_module (No module named 'no_such_module')",
    ]


def test_an_attribute_that_only_a_constructor_sets_is_named(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0")
    with pytest.raises(VLLMVersionError, match="object has no _jobs"):
        compat.check_attributes(object(), "_jobs")
