"""Where the plugin cannot be used it is out, with a reason that says what to do."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import types

import kvpolicy_numba
import pytest
from kvpolicy_numba import Unavailable, loading


@pytest.fixture(autouse=True)
def _fresh():
    """Each test loads the kernel anew, and leaves no one else its own."""
    loading.kernel.cache_clear()
    yield
    loading.kernel.cache_clear()


@pytest.mark.parametrize("machine", ["riscv64", "ppc64le", "s390x", "", "i686"])
def test_another_processor_is_named(monkeypatch, machine):
    monkeypatch.setattr(loading.platform, "machine", lambda: machine)
    with pytest.raises(Unavailable, match=f"the processor is {machine or 'unknown'}; streaming"):
        loading.kernel()


def test_a_numba_that_is_missing_or_does_not_fit_is_quoted(monkeypatch):
    def refuse(name):
        raise ImportError("Numba needs NumPy 2.4 or less. Got NumPy 3.0.\nmore words")

    monkeypatch.setattr(loading.importlib, "import_module", refuse)
    with pytest.raises(Unavailable) as caught:
        loading.kernel()
    assert str(caught.value) == (
        "numba cannot be imported: Numba needs NumPy 2.4 or less. Got NumPy 3.0.; install one >= "
        "0.65 that fits this NumPy"
    )


@pytest.mark.parametrize(
    ("version", "disabled", "reason"),
    [
        ("0.64.0", False, "numba 0.64.0 is older than 0.65; install a newer one"),
        ("0.9", False, "numba 0.9 is older than 0.65"),
        ("1.0.0", True, "NUMBA_DISABLE_JIT is set"),
    ],
)
def test_a_numba_that_cannot_is_named(monkeypatch, version, disabled, reason):
    fake = types.SimpleNamespace(
        __version__=version, config=types.SimpleNamespace(DISABLE_JIT=disabled)
    )
    monkeypatch.setattr(loading.importlib, "import_module", lambda name: fake)
    with pytest.raises(Unavailable, match=reason):
        loading.kernel()


def test_what_the_compiler_says_is_quoted(monkeypatch):
    def fail(compile_):
        raise LookupError("no such instruction\nand a page of IR")

    monkeypatch.setattr(loading, "_compiled", fail)
    with pytest.raises(Unavailable, match=r"LookupError: no such instruction$"):
        loading.kernel()


def test_a_kernel_that_copies_wrongly_is_not_used(monkeypatch):
    monkeypatch.setattr(loading, "_compiled", lambda compile_: lambda *how: None)
    with pytest.raises(Unavailable, match="copies 1061 B at an odd address wrongly"):
        loading.kernel()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("cannot cache function 'copy_pairs': no locator available"),
            "no locator available",
        ),
        (EOFError("Ran out of input"), "EOFError: Ran out of input"),  # a file that was cut short
    ],
)
def test_where_the_cache_is_of_no_use_it_is_compiled_for_this_process(caplog, error, words):
    asked = []

    def compile_(cache):
        asked.append(cache)
        if cache:
            raise error
        return "a kernel"

    with caplog.at_level(logging.WARNING, "kvpolicy_numba"):
        assert loading._compiled(compile_) == "a kernel"
    assert asked == [True, False]
    (said,) = caplog.messages
    assert words in said
    assert "set NUMBA_CACHE_DIR to a directory that can be written, or empty it" in said


def test_a_kernel_is_made_once_in_a_process():
    assert loading.kernel() is loading.kernel()


def test_the_module_has_no_other_names():
    with pytest.raises(AttributeError, match="has no attribute 'polic'"):
        kvpolicy_numba.polic  # noqa: B018  looking it up is what is tested


def listed(**environment):
    """What ``kvpolicy plugins`` says of this plugin, and how strict mode ends."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVPOLICY_")}
    command = [sys.executable, "-m", "kvpolicy", "plugins", "--json"]
    ran = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    plugins = {one["name"]: one for one in json.loads(ran.stdout).get("plugins", [])}
    return plugins.get("numba"), ran.returncode, ran.stderr


def test_the_command_line_lists_it_as_active():
    found, status, _ = listed()
    assert (found["status"], found["priority"], found["hooks"]) == ("active", 50, ["transfer"])
    assert status == 0


def test_the_command_line_lists_it_as_failed_with_the_reason():
    found, status, _ = listed(NUMBA_DISABLE_JIT="1")
    assert found["status"] == "failed"
    assert "NUMBA_DISABLE_JIT is set" in found["reason"]
    assert status == 0
    _, status, said = listed(NUMBA_DISABLE_JIT="1", KVPOLICY_STRICT="1")
    assert status != 0
    assert "NUMBA_DISABLE_JIT is set" in said
