"""The tutorial, word for word: in a virtual environment outside the repository, from wheels.

Every command runs in one shell, every file is written as the page has it, and every output that the
page shows is compared. The environment is the one that the tutorial makes; of this one it sees the
packages that kvpolicy depends on and no kvpolicy. Afterwards the same plugin takes part beside
every plugin of the repository.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import attrs
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial" / "your-first-layout-plugin.md"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"# (\S+\.py)")
# What the environment does not see of this one: kvpolicy and its plugins; it has a pip of its own.
HIDDEN = re.compile(r"_*editable|_?kvpolicy|pip\b|.*\.pth$")


def sections() -> dict[str, list[tuple[str, str]]]:
    """Heading -> its blocks, each a language and a text."""
    parts = re.split(r"^## +(.+?) *$", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    return {
        heading: [(found[1].strip(), found[2]) for found in FENCE.finditer(text)]
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }


SECTIONS = sections()
RUN = [heading for heading, blocks in SECTIONS.items() if blocks]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """A ``console`` block's commands with the lines that are shown after each."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line.rstrip())
    return found


@attrs.define
class Shell:
    """One shell whose folder and variables last from command to command."""

    home: Path
    state: Path
    variables: dict[str, str]

    def run(self, command: str) -> tuple[int, str]:
        """Exit status, and both outputs as a terminal shows them."""
        script = (
            f"test -e {self.state} && . {self.state}\n{command}\nstatus=$?\n"
            f'{{ export -p; printf "cd %q\\n" "$PWD"; }} > {self.state}\nexit $status\n'
        )
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.home,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def must(self, command: str) -> str:
        status, out = self.run(command)
        assert status == 0, f"$ {command}\n{out}"
        return out


@attrs.define
class Reader:
    """Does what the page says, one section after the other, each once."""

    shell: Shell
    done: list[str] = attrs.field(factory=list)

    def read_to(self, heading: str) -> None:
        for one in RUN[: RUN.index(heading) + 1]:
            if one not in self.done:
                self.done.append(one)
                self._read(SECTIONS[one])

    def _read(self, blocks: list[tuple[str, str]]) -> None:
        for language, text in blocks:
            if language == "bash":
                self.shell.must(f"set -e\n{text}\nset +e")
            elif language == "console":
                for command, shown in commands(text):
                    lines = [line.rstrip() for line in self.shell.must(command).splitlines()]
                    assert lines == shown, f"$ {command}"
            else:
                assert language == "python", f"a block of {language} is not executed"
                path = MODULE.fullmatch(text.split("\n", 1)[0])
                assert path is not None, "a block of python is a file, and begins with its name"
                (self.shell.home / path[1]).write_text(text)


def wheel(source: Path, into: Path) -> None:
    built = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-qq"),
            *("--no-deps", "--no-index", "--no-build-isolation", "-w", str(into), str(source)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """An empty folder, kvpolicy's wheel where pip finds it, and what kvpolicy depends on."""
    home = tmp_path_factory.mktemp("tutorial")
    tools = tmp_path_factory.mktemp("tools")
    seen = tools / "packages"
    seen.mkdir()
    for key in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(key)).iterdir():
            if not HIDDEN.match(entry.name) and not (seen / entry.name).exists():
                (seen / entry.name).symlink_to(entry)
    wheel(ROOT, tools / "wheels")
    python = tools / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVPOLICY_", "PIP_", "PYTHON", "VIRTUAL_ENV"))
        and name not in {"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "PYTEST_ADDOPTS"}
    }
    variables = kept | {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(seen),
        "PYTHONUTF8": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tools / "wheels"),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this variable the other way round
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
    return Reader(Shell(home, tools / "state", variables))


@pytest.mark.parametrize("heading", RUN)
def test_what_the_tutorial_says_is_what_happens(reader: Reader, heading: str) -> None:
    reader.read_to(heading)


def test_kvpolicy_there_is_the_wheel_and_not_the_checkout(reader: Reader) -> None:
    reader.read_to(RUN[0])
    where = Path(reader.shell.must("python -c 'import kvpolicy; print(kvpolicy.__file__)'").strip())
    assert where.is_relative_to(reader.shell.home / "my-venv")
    assert not where.resolve().is_relative_to(ROOT)


def told(shell: Shell, command: str) -> dict:
    out = shell.must(f"{command} --json 2>/dev/null")
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_beside_every_plugin_of_the_repository(reader: Reader) -> None:
    """Installed again, it is listed and decides among all of them; uninstalled, it is gone."""
    reader.read_to(RUN[-1])
    shell = reader.shell
    wheels = shell.home / "wheels"
    for source in PLUGINS:
        wheel(source, wheels)
    assert len(list(wheels.glob("*.whl"))) == len(PLUGINS)
    shell.must(f"pip install -qq --no-deps {wheels}/*.whl ./few-layers")
    expected = {
        name
        for source in PLUGINS
        for name in tomllib.loads((source / "pyproject.toml").read_text())["project"]
        .get("entry-points", {})
        .get("kvpolicy", {})
    }
    found = {one["name"]: one for one in told(shell, "kvpolicy plugins")["plugins"]}
    assert {"few-layers", "slab"} <= {*expected, "few-layers"} <= {*found}
    assert (found["few-layers"]["status"], found["few-layers"]["priority"]) == ("active", 60)
    shell.must("kvpolicy plugins --plugins few-layers --strict")  # as its CI does
    decision = told(shell, "kvpolicy explain config.json")["decision"]
    assert decision["decided_by"] == "few-layers"
    assert decision["cross_layer_blocks"] is False
    votes = {vote["plugin"]: vote["answer"] for vote in decision["votes"]}
    assert votes["cross-layer"] is True
    assert votes["slab"] is None
    # Canonical bytes are wanted: slab, of a higher priority, outvotes them both.
    decision = told(shell, "kvpolicy explain config.json --canonical")["decision"]
    assert decision["decided_by"] == "slab"
    assert {vote["plugin"]: vote["answer"] for vote in decision["votes"]}["few-layers"] is False
    shell.must("pip uninstall -qq -y few-layers")
    assert "few-layers" not in {p["name"] for p in told(shell, "kvpolicy plugins")["plugins"]}
    decision = told(shell, "kvpolicy explain config.json")["decision"]
    assert decision["decided_by"] == "cross-layer"


def test_every_block_of_the_tutorial_is_of_a_kind_that_is_executed() -> None:
    kinds = {language for blocks in SECTIONS.values() for language, _ in blocks}
    assert kinds == {"bash", "console", "python"}
    assert FENCE.search(PAGE.read_text("utf-8").split("\n## ", 1)[0]) is None
