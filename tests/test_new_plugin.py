"""The scaffold: what it writes fits together, what it refuses, and that it overwrites nothing.

That a plugin as written installs and passes its tests is proved in test_tutorial.py.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvpolicy import __version__, load_plugins, select
from kvpolicy.cli import main, new_plugin
from kvpolicy.errors import OptionError
from kvpolicy.hooks import API_VERSION

FILES = {
    ".github/workflows/test.yml",
    "README.md",
    "pyproject.toml",
    "src/few_layers/__init__.py",
    "src/few_layers/py.typed",
    "tests/test_few_layers.py",
}


@pytest.fixture
def kvpolicy(capsys):
    """Runs a command: (exit status, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


# What it writes.


def test_it_writes_a_distribution_and_says_what_to_do_with_it(kvpolicy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = kvpolicy("new-plugin", "few-layers")
    assert (status, err) == (0, "")
    assert set(tree(tmp_path / "few-layers")) == FILES
    for said in (
        *FILES,
        "pip install './few-layers[test]'",
        "python -m pytest few-layers",
        "kvpolicy plugins",
    ):
        assert f"  {said}\n" in out


def test_out_says_where_and_json_says_what(kvpolicy, tmp_path):
    where = tmp_path / "not" / "there yet"
    status, out, _ = kvpolicy("new-plugin", "few-layers", "--out", where, "--json")
    assert status == 0
    assert json.loads(out) == {
        "name": "few-layers",
        "module": "few_layers",
        "path": str(where / "few-layers"),
        "files": sorted(FILES),
    }
    assert set(tree(where / "few-layers")) == FILES


def test_a_path_of_any_words_stays_one_word_of_the_commands(kvpolicy, tmp_path):
    where = tmp_path / ("long " * 30)
    _, out, _ = kvpolicy("new-plugin", "few-layers", "--out", where)
    assert f"  pip install '{where / 'few-layers'}[test]'\n" in out


WORD = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=6)
NAMES = st.lists(WORD, min_size=1, max_size=4).map("-".join)


def available(name: str) -> bool:
    try:
        new_plugin._checked(name)
    except OptionError:
        return False
    return True


@settings(max_examples=25)
@given(NAMES)
def test_whatever_name_is_taken_the_parts_fit_together(name):
    """An oracle of its own: the entry point is followed as Python follows it."""
    assume(available(name))
    with tempfile.TemporaryDirectory() as where:
        assert main(["new-plugin", name, "--out", where, "--json"]) == 0
        written = tree(Path(where) / name)
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["name"] == name
    assert project["dependencies"] == [f"kvpolicy>={__version__}"]
    [(plugin, reference)] = project["entry-points"]["kvpolicy"].items()
    assert plugin == name
    module, attribute = reference.split(":")
    assert module.isidentifier()
    namespace: dict[str, object] = {"__name__": module}
    exec(written[f"src/{module}/__init__.py"], namespace)
    found = load_plugins(select(names=(), environ={}), {"mine": namespace[attribute]})
    (info,) = [info for info in found.infos if info.name == "mine"]
    assert (info.status, info.hooks, info.priority) == (
        "active",
        ("prefer_cross_layer_blocks",),
        60,
    )
    assert namespace[attribute].requires_api == API_VERSION
    tests = ast.parse(written[f"tests/test_{module}.py"])
    (contract,) = [node for node in tests.body if isinstance(node, ast.ClassDef)]
    assert [ast.unparse(base) for base in contract.bases] == ["kvpolicy.testing.PolicyContract"]
    assert name in written["README.md"]
    for path, text in written.items():
        unfilled = re.findall(r"\$(?!\{\{)", text)
        assert not unfilled, path


def test_ci_runs_what_the_readme_says(tmp_path):
    assert main(["new-plugin", "few-layers", "--out", str(tmp_path), "--json"]) == 0
    written = tree(tmp_path / "few-layers")
    steps = re.findall(r"^ +- run: (.+)$", written[".github/workflows/test.yml"], re.MULTILINE)
    assert steps == [
        "pip install '.[test]'",
        "python -m pytest",
        "kvpolicy plugins --plugins few-layers --strict",
    ]
    said = [line.strip() for line in written["README.md"].splitlines() if line.startswith("    ")]
    assert steps[:2] == said[:2]
    assert "${{ matrix.python }}" in written[".github/workflows/test.yml"]


# What it refuses.


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Few_Layers", "did you mean 'few-layers'?"),
        ("few.layers", "did you mean 'few-layers'?"),
        (" few-layers ", "did you mean 'few-layers'?"),
        ("few--layers", "did you mean 'few-layers'?"),
        ("few-layers-", "did you mean 'few-layers'?"),
        ("7layers", "a letter first"),
        ("", "a letter first"),
        ("../layers", "found '../layers'"),
        ("/tmp", "found '/tmp'"),
        ("f\u00fcr", "lower-case letters and digits"),
        ("few layers\n", "lower-case letters"),
        ("a" * 61, "at most 60 characters"),
    ],
)
def test_a_name_that_is_not_valid_is_refused_with_one_that_is(kvpolicy, tmp_path, name, said):
    status, _, err = kvpolicy("new-plugin", "--out", tmp_path, "--", name)
    assert status == 2
    assert err.startswith("kvpolicy: a plugin's name is lower-case letters and digits")
    assert said in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("canonical", "kvpolicy provides a plugin of that name"),
        ("host-copy", "kvpolicy provides a plugin of that name"),
        ("kvpolicy", "is installed"),
        ("pluggy", "is installed"),
        ("json", "there is a module 'json' already"),
        ("sys", "there is a module 'sys' already"),
        ("class", "a word of Python"),
        ("none", "a word of Python"),
        ("tests", "the distribution's own folders"),
        ("slab", "one of kvpolicy's own plugins"),
        ("kvpolicy-vllm", "one of kvpolicy's own plugins"),
        ("under-test", "the conformance kit gives this name"),
    ],
)
def test_a_name_that_is_taken_is_refused_and_says_by_whom(kvpolicy, tmp_path, name, said):
    status, out, err = kvpolicy("new-plugin", name, "--out", tmp_path, "--json")
    assert status == 2
    assert json.loads(out)["error"]["code"] == "option"
    assert f"a plugin cannot be named {name!r}" in err
    assert said in err
    assert err.rstrip().endswith("choose another name")
    assert not any(tmp_path.iterdir())


def test_what_is_installed_takes_its_names(kvpolicy, tmp_path, monkeypatch):
    """A plugin's name, a distribution's and a module's, each by itself."""
    site = tmp_path / "site"
    info = site / "Acme_Kv-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Kv\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[kvpolicy]\nacme-flat = acme_layout:policy\n")
    (site / "acme_layout.py").write_text("raise RuntimeError('it is never imported')\n")
    monkeypatch.syspath_prepend(str(site))
    for name, said in (
        ("acme-flat", "Acme_Kv provides a plugin of that name"),
        ("acme-kv", "Acme_Kv 1.2 is installed"),
        ("acme-layout", "there is a module 'acme_layout' already"),
    ):
        status, _, err = kvpolicy("new-plugin", name, "--out", tmp_path / "out")
        assert status == 2
        assert said in err
    assert kvpolicy("new-plugin", "acme-other", "--out", tmp_path / "out")[0] == 0


def test_a_folder_of_that_name_here_takes_no_module_s_name(tmp_path):
    """``python -m`` puts the current folder on the path; what lies there is not installed."""
    (tmp_path / "here" / "acme").mkdir(parents=True)
    (tmp_path / "here" / "acme_two.py").write_text("")
    for name in ("acme", "acme-two"):
        done = subprocess.run(
            [sys.executable, "-m", "kvpolicy", "new-plugin", name, "--out", str(tmp_path / "out")],
            cwd=tmp_path / "here",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


# Nothing is overwritten, nothing is left half done.


def a_folder(path: Path) -> None:
    path.mkdir()


def a_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "pyproject.toml").write_text("mine")


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [a_folder, a_full_folder, a_file, a_link_to_nothing])
def test_nothing_is_ever_overwritten(kvpolicy, tmp_path, make):
    def state() -> object:
        link = path.is_symlink() and path.readlink()
        return tree(tmp_path), sorted(tmp_path.iterdir()), link

    path = tmp_path / "few-layers"
    make(path)
    before = state()
    status, _, err = kvpolicy("new-plugin", "few-layers", "--out", tmp_path)
    assert status == 2
    assert f"{str(path)!r} is there already, and nothing is ever overwritten" in err
    assert state() == before


def test_a_file_in_the_place_of_out_is_named(kvpolicy, tmp_path):
    (tmp_path / "out").write_text("mine")
    status, _, err = kvpolicy("new-plugin", "few-layers", "--out", tmp_path / "out")
    assert status == 2
    assert str(tmp_path / "out") in err
    status, _, err = kvpolicy("new-plugin", "few-layers", "--out", tmp_path / "out" / "deeper")
    assert status == 2
    assert "cannot make" in err
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("after", range(len(FILES)))
def test_a_disk_that_is_full_leaves_nothing_behind(kvpolicy, tmp_path, monkeypatch, after):
    write, count = Path.write_text, []

    def full(path: Path, text: str, **how: object) -> int:
        count.append(path)
        if len(count) > after:
            raise OSError(28, "No space left on device")
        return write(path, text, **how)

    monkeypatch.setattr(Path, "write_text", full)
    status, _, err = kvpolicy("new-plugin", "few-layers", "--out", tmp_path)
    assert status == 2
    assert "No space left on device" in err
    assert not any(tmp_path.iterdir())


def test_every_template_is_in_the_installed_distribution():
    """An editable installation lists no files; the wheel does."""
    files = importlib.metadata.files("kvpolicy") or []
    listed = {path.name for path in files if "templates" in path.parts}
    used = {f"{name}.tmpl" for name in new_plugin._FILES.values() if name}
    if any(path.name == "new_plugin.py" for path in files):
        assert listed == used
    folder = Path(new_plugin.__file__).parent / "templates"
    assert {path.name for path in folder.iterdir()} == used
