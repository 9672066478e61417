"""What the end-to-end tests are handed; and the suite prints what it measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # test modules import the harness, engines import the models
pytest.register_assert_rewrite("harness")

from harness import LONG, SHORT, run  # noqa: E402

_FIGURES: list[str] = []


@pytest.fixture
def figures(request):
    """Call it with words; they stand at the end of the run, after the test's name."""
    return lambda words: _FIGURES.append(f"{request.node.name}: {words}")


def pytest_terminal_summary(terminalreporter):
    if _FIGURES:
        terminalreporter.section("vLLM figures")
        for line in _FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def plain(models):
    """What the model says without any connector: to the long prompt, and to the short one."""
    (first, second), _ = run(models, [["generate", LONG], ["generate", SHORT]])
    return {"long": first, "short": second}


@pytest.fixture(scope="session")
def outside(tmp_path_factory):
    """A folder with the wheel of ``outside/``, installed: kvpolicy plugins of somebody else's."""
    built, installed = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    for command in (
        ("hatchling", "build", "-t", "wheel", "-d", built),
        (
            *("pip", "--disable-pip-version-check", "install", "-qq", "--no-deps", "--no-index"),
            *("--find-links", built, "--target", installed, "acme-kv"),
        ),
    ):
        words = [sys.executable, "-m", *map(str, command)]
        done = subprocess.run(
            words, cwd=HERE / "outside", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return installed
