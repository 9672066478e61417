"""Whatever a user can meet is documented: hooks, codes, options, variables, properties."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy import errors, hooks
from kvpolicy.cli import _parser, main
from kvpolicy.plugins.selection import _OPTION_KEYS
from kvpolicy.testing import PolicyContract, TransferContract

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
SOURCES = [ROOT / "src", *sorted(ROOT.glob("plugins/*/src"))]
VARIABLE = re.compile(r"KVPOLICY_[A-Z0-9_]*[A-Z0-9]")


def page(name: str) -> str:
    return (REFERENCE / name).read_text("utf-8")


def reference() -> str:
    return "".join(path.read_text("utf-8") for path in sorted(REFERENCE.glob("*.md")))


def constants() -> Iterator[tuple[Path, str]]:
    """Every text in the sources of the core and of the plugins, docstrings too."""
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path, node.value


# Hooks and attributes: their signatures are compared in test_hooks.py.


@pytest.mark.parametrize("name", hooks.HOOKS)
def test_every_hook_has_a_section(name):
    assert f"\n### {name}\n" in page("hooks.md")


def test_no_section_tells_of_a_hook_that_is_not_there():
    text = page("hooks.md")
    section = text[text.index("\n## The three hooks\n") : text.index("\n## Priorities\n")]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == list(hooks.HOOKS)


def test_the_page_says_which_version_the_hooks_have():
    text = " ".join(page("hooks.md").split())
    assert f"The plugin API has a version of its own, a whole number: {hooks.API_VERSION} " in text
    assert f"this kvpolicy has {hooks.API_VERSION}," in text


# Errors and codes.


def kinds(kind: type[errors.KVPolicyError]) -> Iterator[type[errors.KVPolicyError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__.partition(".")[0] == "kvpolicy":
            yield from kinds(child)


PUBLIC = [kind for kind in kinds(errors.KVPolicyError) if not kind.__name__.startswith("_")]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("kind", PUBLIC[1:], ids=lambda kind: kind.__name__)
def test_every_error_has_a_row_with_its_parent_code_and_status(kind):
    (row,) = [row for row in rows(page("errors.md")) if row[0] == f"`{kind.__name__}`"]
    parents = [parent.__name__ for parent in kind.__mro__[1:]]
    assert row[1] in parents
    assert row[2:4] == [f"`{kind.code}`", str(kind.exit_status)]
    assert row[4]
    assert row[5]


@pytest.mark.parametrize("code", kvpolicy.REFUSAL_CODES)
def test_every_refusal_code_has_a_row_with_what_to_do(code):
    (row,) = [row for row in rows(page("errors.md")) if row[0] == f"`{code}`"]
    assert len(row) == 3
    assert all(row)


def codes_in_use() -> set[str]:
    """What the core and its plugins call ``Refusal`` with, by name."""
    found = set()
    for source in SOURCES:
        for path in source.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                called = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1]
                if called == "Refusal" and node.args:
                    code = node.args[0]
                    if isinstance(code, ast.Constant) and isinstance(code.value, str):
                        found.add(code.value)
    return found


def test_every_code_that_a_refusal_is_made_with_is_documented():
    used = codes_in_use()
    assert used >= {"heads-not-divisible", "uncertified"}
    told = {row[0].strip("`") for row in rows(reference())}
    assert used - told == set()


def plugin_errors() -> dict[str, str]:
    """The plugins' own errors of kvpolicy's tree, by name, with their codes."""
    found = {}
    for source in SOURCES[1:]:
        for path in source.rglob("errors.py"):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and "KVPolicyError" in ast.unparse(node):
                    code = re.search(r"^    code(?:: .+?)? = '(.+)'$", ast.unparse(node), re.M)
                    found[node.name] = code[1] if code else "error"
    return found


def test_every_error_of_a_plugin_has_a_row_with_its_code():
    found = plugin_errors()
    assert {"VLLMConfigError": "vllm-config", "CudaError": "cuda"}.items() <= found.items()
    told = {row[0].strip("`"): row[2].strip("`") for row in rows(page("errors.md")) if row[2:]}
    assert {name: told.get(name) for name in found} == found


def test_every_exit_status_is_documented():
    statuses = {kind.exit_status for kind in PUBLIC} | {0, 1, 130}
    text = page("errors.md")
    section = text[text.index("\n## Exit statuses\n") : text.index("\n## Errors\n")]
    assert {row[0] for row in rows(section)[2:]} == {str(status) for status in statuses}


# The command line.


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


COMMANDS = commands()
OPTIONS = [
    (command, option)
    for command, parser in COMMANDS.items()
    for action in parser._actions
    for option in action.option_strings
    if option.startswith("--")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_section_and_a_line_of_usage(command):
    text = page("cli.md")
    assert f"\n## kvpolicy {command}\n" in text
    usage = text[text.index("```text\n") : text.index("```\n\n")]
    assert f"\nkvpolicy {command} " in usage.replace("```text", "")


def test_no_section_tells_of_a_command_that_is_not_there():
    found = re.findall(r"^## kvpolicy (\S+)$", page("cli.md"), re.MULTILINE)
    assert sorted(found) == sorted(COMMANDS)


def test_every_option_is_documented():
    """In the table of shared options, or in a section of the command."""
    text = page("cli.md")
    shared = text[text.index("\n## Options\n") : text.index("\n## kvpolicy plugins\n")]
    missing = []
    for command, option in OPTIONS:
        start = text.index(f"\n## kvpolicy {command}\n")
        end = text.find("\n## ", start + 1)
        section = text[start : None if end < 0 else end]
        if not re.search(rf"`(?:[^`]* )?{option}\b(?!-)", shared + section):
            missing.append(f"{command} {option}")
    assert missing == []


def test_no_option_is_documented_that_is_not_there():
    there = {option for _, option in OPTIONS} | {"--version"}
    told = set(re.findall(r"`(--[a-z][a-z-]*)", page("cli.md")))
    assert told <= there, told - there


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_says_something_of_every_option(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    for action in COMMANDS[command]._actions:
        assert action.help or action.dest in {"dtype"}, f"{command} {action.dest}"
        for option in action.option_strings:
            assert option in out


# Variables, options of the context, properties of the kit.


def variables() -> set[str]:
    return {name for _, text in constants() for name in VARIABLE.findall(text)}


def test_every_environment_variable_is_in_the_reference():
    found = variables()
    assert found >= {"KVPOLICY_PLUGINS", "KVPOLICY_PRIORITY", "KVPOLICY_STRICT"}
    told = set(VARIABLE.findall(reference()))
    assert found - told == set()
    assert told - found == set(), "documented, and nobody reads it"


@pytest.mark.parametrize("key", _OPTION_KEYS)
def test_every_key_of_the_options_is_documented(key):
    assert f'`"{key}"`' in page("hooks.md")


@pytest.mark.parametrize("contract", [PolicyContract, TransferContract])
def test_every_property_of_the_kit_has_a_row(contract):
    numbers = {
        found[1].upper() for name in dir(contract) if (found := re.match(r"test_([pt]\d+)_", name))
    }
    (letter,) = {number[0] for number in numbers}
    told = {row[0] for row in rows(page("testing.md")) if re.fullmatch(rf"{letter}\d+", row[0])}
    assert told == numbers


# Pictures are what the command draws.


def test_the_picture_of_the_page_is_what_the_command_draws(tmp_path, monkeypatch):
    (line,) = re.findall(r"^kvpolicy (explain .* --svg block\.svg)$", page("cli.md"), re.MULTILINE)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    assert main([*line.split(), "--plugins", ""]) == 0
    drawn = (tmp_path / "block.svg").read_text("utf-8")
    assert drawn == (ROOT / "docs" / "images" / "block.svg").read_text("utf-8")
