"""What the end-to-end tests are handed; and the suite prints what it measured."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # test modules import the harness, engines import the models
pytest.register_assert_rewrite("harness")

from harness import LONG, SHORT, installed, run  # noqa: E402

_FIGURES: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def sockets():
    """A folder for the sockets of engines, which vLLM leaves behind where it made them."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", folder)
        yield


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
    return installed(tmp_path_factory.mktemp, "outside", "acme-kv")
