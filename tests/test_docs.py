"""The documentation is true: its code runs, what it shows is what is printed, its links lead on.

A page's blocks run in order. ``python`` blocks share one namespace and a temporary directory; one
that begins with ``# name.py`` is also a file there, and the tests in a ``# test_name.py`` are run.
A ``toml`` block is a pyproject that installs those files, with its entry points, for the rest of
the page. ``console`` and ``bash`` commands run in that directory, which has the checkout's tests,
and what a ``console`` block shows after one must be its output, line ends aside; ``> name`` keeps
standard output in a file. A ``json`` block after a ``--json`` command is its
object, every list cut to its first entry. What is not to be run is marked ``text``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TUTORIALS = sorted(DOCS.glob("tutorial/*.md"))  # test_tutorial.py follows them
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LANGUAGES = {"python", "console", "bash", "json", "toml", "text"}

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
NAV = re.compile(r"^ +- [^:\n]+: (\S+\.md)$", re.MULTILINE)
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
ASSIGNMENT = re.compile(r"[A-Z_]+=.*", re.DOTALL)
# The speed of a machine, and its share of one large copy: "5.55 GB/s                37%".
TIMING = re.compile(r"[\d.]+ GB/s +(?:\d+%|too little to time)$", re.MULTILINE)


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{named(self.page)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1].strip(), found[2])
        for found in FENCE.finditer(text)
    ]


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Every command with what is shown after it; a ``bash`` block shows nothing."""
    lines = block.text.splitlines()
    if block.language == "bash":
        lines = [f"$ {line}" for line in block.text.replace("\\\n", " ").splitlines() if line]
    command, shown = None, []
    for line in lines:
        if command is not None and command.endswith("\\"):
            command = f"{command[:-1]} {line}"
        elif line.startswith("$ "):
            if command is not None:
                yield command, "\n".join(shown)
            command, shown = line[2:], []
        else:
            assert command is not None, f"{block}: output without a command"
            shown.append(line)
    if command is not None:
        yield command, "\n".join(shown)


def told(output: str, *, timed: bool = False) -> str:
    """What is compared: no blanks at line ends; of a round trip neither speeds nor their widths."""
    lines = [line.rstrip() for line in output.splitlines()]
    text = "\n".join(lines).strip("\n")
    if not timed:
        return text
    assert not text or len(TIMING.findall(text)) == 2, text
    return re.sub(" +", " ", TIMING.sub("SPEED", text))


def run(words: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output alone, and both outputs as a shell shows them."""
    out, both = io.StringIO(), io.StringIO()

    class Tee(io.StringIO):
        def write(self, text: str) -> int:
            out.write(text)
            return both.write(text)

    with contextlib.redirect_stdout(Tee()), contextlib.redirect_stderr(both):
        try:
            status = main(words)
        except SystemExit as end:  # --help and --version
            status = int(end.code or 0)
    return status, out.getvalue(), both.getvalue()


def cut(value: object) -> object:
    """Every list cut to its first entry; times and ratios, which differ from run to run, to 0."""
    if isinstance(value, dict):
        return {
            key: 0 if key.endswith(("_seconds", "_ratio")) else cut(entry)
            for key, entry in value.items()
        }
    return [cut(entry) for entry in value[:1]] if isinstance(value, list) else value


@dataclass
class Reader:
    """Does what a page says, block by block."""

    home: Path
    monkeypatch: pytest.MonkeyPatch
    namespace: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})
    files: list[str] = field(default_factory=list)
    distributions: list[str] = field(default_factory=lambda: ["kvpolicy"])
    status: int = 0
    printed: str = ""

    def __post_init__(self) -> None:
        self.monkeypatch.syspath_prepend(self.home)
        (self.home / "tests").symlink_to(ROOT / "tests")
        installed = importlib.metadata.distributions

        def distributions() -> Iterator[importlib.metadata.Distribution]:
            """What a newcomer has: kvpolicy, and what the page installs."""
            return (dist for dist in installed() if dist.name in self.distributions)

        self.monkeypatch.setattr(importlib.metadata, "distributions", distributions)

    def read_all(self, page: Path) -> None:
        for block in blocks(page):
            self.read(block)

    def read(self, block: Block) -> None:
        getattr(self, f"_{block.language}", lambda _: None)(block)

    def _python(self, block: Block) -> None:
        first = block.text.split("\n", 1)[0]
        found = re.fullmatch(r"# (\w+\.py)", first)
        if found:
            self.files.append(found[1])
            (self.home / found[1]).write_text(block.text)
            importlib.invalidate_caches()
        self.monkeypatch.chdir(self.home)
        code = compile("\n" * block.line + block.text, str(block.page), "exec", dont_inherit=True)
        before = {*self.namespace}
        exec(code, self.namespace)
        if found and found[1].startswith("test_"):
            tests = [name for name in {*self.namespace} - before if name.startswith("test_")]
            assert tests, f"{block}: no tests"
            for name in tests:
                self.namespace[name]()

    def _toml(self, block: Block) -> None:
        project = tomllib.loads(block.text)["project"]
        entries = project["entry-points"]["kvpolicy"]
        name, version = project["name"], project["version"]
        info = self.home / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        self.distributions.append(name)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        lines = ["[kvpolicy]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        importlib.invalidate_caches()
        found = {info.name: info for info in kvpolicy.load_plugins(kvpolicy.select()).infos}
        for name in entries:
            assert found[name].status == "active", f"{block}: {found[name]}"

    def _console(self, block: Block) -> None:
        for command, shown in commands(block):
            self._do(block, command, shown)

    _bash = _console

    def _do(self, block: Block, command: str, shown: str) -> None:
        if command == "echo $?":
            assert shown.strip() == str(self.status), f"{block}: {command}"
            return
        words = shlex.split(command, comments=True)
        with self.monkeypatch.context() as environment:
            while words and ASSIGNMENT.fullmatch(words[0]):
                environment.setenv(*words.pop(0).split("=", 1))
            if words[:1] == ["make"]:
                targets = TARGET.findall((ROOT / "Makefile").read_text())
                assert words[1] in targets, f"{block}: {command}"
            if words[:1] != ["kvpolicy"]:
                return
            environment.chdir(self.home)
            kept = words.pop() if words[-2:-1] == [">"] else None
            self.status, self.printed, both = run([word for word in words[1:] if word != ">"])
            if kept is not None:
                (self.home / kept).write_text(self.printed)
        if shown:
            timed = words[1] == "roundtrip" and not self.status
            assert told(shown, timed=timed) == told(both, timed=timed), f"{block}: {command}"
        else:
            assert self.status == 0, f"{block}: {command}\n{both}"

    def _json(self, block: Block) -> None:
        assert json.dumps(cut(json.loads(block.text)), indent=2) == json.dumps(
            cut(json.loads(self.printed)), indent=2
        ), str(block)


@pytest.fixture
def reader(tmp_path, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):  # would change what is printed
        monkeypatch.delenv(name, raising=False)
    made = Reader(tmp_path, monkeypatch)
    yield made
    for name in made.files:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.parametrize("page", [one for one in PAGES if one not in TUTORIALS], ids=named)
def test_what_a_page_says_is_what_happens(page, reader):
    reader.read_all(page)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_says_what_it_is(page):
    unknown = [(block.line, block.language) for block in blocks(page)]
    unknown = [(line, language) for line, language in unknown if language not in LANGUAGES]
    assert not unknown, f"{named(page)}: mark what is not to be run as text; {unknown}"


def anchors(page: Path) -> set[str]:
    """The ids that mkdocs gives to headings."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(prose)]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_every_relative_link_leads_somewhere(page):
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        inside = not page.is_relative_to(DOCS) or found.is_relative_to(DOCS)
        if not (inside and found.is_file()) or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken, f"{named(page)} links to {broken}"


def test_the_navigation_lists_every_page_once():
    listed = NAV.findall((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(pages)


# The harness itself: each kind of lie is caught.


LIES = {
    "code that fails": "```python\nassert 1 == 2\n```\n",
    "another output": "```console\n$ kvpolicy --version\nkvpolicy 0.0.0\n```\n",
    "a failure that is not shown": "```console\n$ kvpolicy explain no-such-file.json\n```\n",
    "another status": "```console\n$ kvpolicy --version\n$ echo $?\n3\n```\n",
    "a target that is not there": "```bash\nmake coffee\n```\n",
    "another object": '```console\n$ kvpolicy plugins --json\n```\n```json\n{"plugins": []}\n```\n',
    "an entry point to nothing": '```toml\n[project]\nname = "x"\nversion = "1"\n'
    '[project.entry-points.kvpolicy]\nx = "no_such_module:policy"\n```\n',
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_is_caught(lie, tmp_path, reader):
    page = tmp_path / "page.md"
    page.write_text(lie)
    with pytest.raises(AssertionError):
        reader.read_all(page)
