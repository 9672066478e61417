"""``kvpolicy new-plugin``: a distribution with one plugin, which installs and passes its tests."""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import importlib.resources
import keyword
import os
import re
import shlex
import shutil
import string
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.markup import escape

from kvpolicy import __version__
from kvpolicy.cli.output import Output
from kvpolicy.errors import OptionError
from kvpolicy.hooks import API_VERSION
from kvpolicy.plugins.discovery import installed, normal_name

_EXAMPLE = """\
example:
  kvpolicy new-plugin few-layers
  pip install './few-layers[test]'
  python -m pytest few-layers

The name is that of the plugin and of its distribution; its package has underscores for hyphens."""

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_NAME_CHARS = 60
_FORM = (
    "lower-case letters and digits in words joined by single hyphens, a letter first, at most "
    f"{_NAME_CHARS} characters"
)
_PRIORITY = 60
# Of the project's own distributions, installed or not; then names that the conformance kit gives.
_OWN = ("slab", "numba", "cuda")
_KIT = ("under-test", "forced", "above", "below")
# Folders of the distribution itself, and modules that pytest looks for.
_FOLDERS = ("src", "test", "tests", "conftest")
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    ".github/workflows/test.yml": "test.yml",
    "src/{module}/__init__.py": "init.py",
    "src/{module}/py.typed": None,
    "tests/test_{module}.py": "test.py",
}


@attrs.frozen(kw_only=True)
class _Plugin:
    """What the templates fill in."""

    name: str

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def kind(self) -> str:
        """The class's name."""
        return "".join(word.capitalize() for word in self.name.split("-"))

    def files(self) -> Iterator[tuple[str, str]]:
        """Every file's path inside the distribution, with its text."""
        values = {
            "name": self.name,
            "module": self.module,
            "kind": self.kind,
            "priority": _PRIORITY,
            "api": API_VERSION,
            "version": __version__,
        }
        templates = importlib.resources.files("kvpolicy.cli") / "templates"
        for path, template in _FILES.items():
            text = "" if template is None else (templates / f"{template}.tmpl").read_text("utf-8")
            yield path.format(module=self.module), string.Template(text).substitute(values)


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "new-plugin",
        help="write a plugin distribution to start from",
        description="Writes a distribution with one plugin, which installs and passes its tests.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the plugin's name, such as few-layers")
    parser.add_argument("--out", metavar="DIR", help="where its folder is made (here)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Runs the command."""
    plugin = _Plugin(name=_checked(args.name))
    folder = Path(args.out or ".") / plugin.name
    files = dict(plugin.files())
    _write(folder, files)
    told = {
        "name": plugin.name,
        "module": plugin.module,
        "path": str(folder),
        "files": sorted(files),
    }
    out.show(told, lambda console: _people(folder, files, console))
    return 0


def _people(folder: Path, files: Mapping[str, str], console: Console) -> None:
    console.print(f"{escape(str(folder))} has {len(files)} files:", style="bold", soft_wrap=True)
    for path in sorted(files):
        console.print(f"  {path}", soft_wrap=True)
    target = str(folder) if folder.is_absolute() else f"./{folder}"
    console.print("\nInstall it, run its tests, and see it listed:", style="bold")
    for command in (
        f"pip install {shlex.quote(f'{target}[test]')}",
        f"python -m pytest {shlex.quote(str(folder))}",
        "kvpolicy plugins",
    ):
        console.print(f"  {escape(command)}", soft_wrap=True)


def _checked(name: str) -> str:
    """The name, if a plugin and its distribution can have it.

    Raises:
        OptionError: it has another form, or it is taken; says by whom.
    """
    if len(name) > _NAME_CHARS or _NAME.fullmatch(name) is None:
        likely = normal_name(name.strip()).strip("-")
        fits = len(likely) <= _NAME_CHARS and _NAME.fullmatch(likely)
        hint = f"; did you mean {likely!r}?" if fits else ""
        raise OptionError(f"a plugin's name is {_FORM}; found {name[:80]!r}{hint}")
    taken = _taken(_Plugin(name=name))
    if taken:
        raise OptionError(f"a plugin cannot be named {name!r}: {taken}; choose another name")
    return name


def _taken(plugin: _Plugin) -> str:
    """Why the name cannot be had, "" if it can."""
    name, module = plugin.name, plugin.module
    if keyword.iskeyword(module) or keyword.iskeyword(plugin.kind):
        return "it is a word of Python"
    if name in _FOLDERS:
        return "its package could not be told from the distribution's own folders"
    if name in _OWN or name in {f"kvpolicy-{own}" for own in (*_OWN, "vllm")}:
        return "it is one of kvpolicy's own plugins"
    if name in _KIT:
        return "the conformance kit gives this name"
    for one in installed():
        if one.name == name:
            return f"{one.distribution or 'a distribution'} provides a plugin of that name"
    for dist in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # an installation that is broken names nothing
            if normal_name(dist.name) == name:
                return f"{dist.name} {dist.version} is installed"
    if module in sys.stdlib_module_names or _importable(module):
        return f"there is a module {module!r} already"
    return ""


def _importable(module: str) -> bool:
    """Whether a module of that name is installed; what lies in the current folder is not."""
    here = Path.cwd()
    paths = [path for path in sys.path if path and Path(path).resolve() != here]
    return importlib.machinery.PathFinder.find_spec(module, paths) is not None


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files into a folder that was not there; all of them or none.

    Raises:
        OptionError: something is there, or it cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        raise OptionError(
            f"{os.fspath(error.filename)!r} is there already, and nothing is ever overwritten; "
            "choose another name or another --out"
        ) from None
    except OSError as error:
        raise OptionError(f"cannot make {str(folder)!r}: {error.strerror}") from None
    try:
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise OptionError(f"cannot write into {str(folder)!r}: {error.strerror}") from None
        raise
