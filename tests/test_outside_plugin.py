"""A plugin by somebody else: its wheel, in an environment of its own, runs the kit.

Once as it should be, and once with a fault planted in it, which the kit must find.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-engine"
version = "3.1"
dependencies = ["kvpolicy"]

[project.entry-points.kvpolicy]
acme-engine = "acme_engine:plugin"

[tool.hatch.build.targets.wheel]
only-include = ["acme_engine.py"]
"""
ENGINE = '''\
"""A copy engine that moves a job with plain NumPy before it returns."""

import numpy as np

import kvpolicy


class AcmeEngine:
    priority = 20

    @kvpolicy.hookimpl
    def transfer(self, job):
        if job.device != "cpu":
            return None
        rows = job.rows.numpy()
        for part in job.parts:
            for block, slot in zip(part.block_ids.tolist(), part.slots.tolist()):
                for copy in part.plan.copies:
                    memory = copy.storage.numpy()
                    base = copy.offset + block * copy.block_stride
                    for frm, to, size in copy.box.runs():
                        here = memory[base + frm : base + frm + size]
                        there = rows[slot, to : to + size]
                        if job.direction == "store":
                            np.copyto(there, here)
                        else:
                            np.copyto(here, there)
        return kvpolicy.TransferHandle.finished(
            kvpolicy.TransferResult(job_id=job.job_id, ok=True, bytes=job.bytes, seconds=0.0)
        )


plugin = AcmeEngine()
'''
RIGHT, WRONG = "there = rows[slot, to : to + size]", "there = rows[slot - 1, to : to + size]"
TESTS = """\
import importlib.metadata

from kvpolicy.testing import TransferContract


class TestAcmeEngine(TransferContract):
    examples = 5

    def make_transfer(self):
        (entry,) = importlib.metadata.entry_points(group="kvpolicy", name="acme-engine")
        return entry.load()
"""


def ran(*command: object, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **how
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment that sees this one's packages, as if it had installed them."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    seen = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "those_of_the_test_run.pth").write_text(seen)
    return home / "bin" / "python"


@pytest.mark.parametrize("planted", [False, True], ids=["right", "planted wrong"])
def test_the_wheel_of_an_outside_plugin_runs_the_kit(
    python: Path, tmp_path: Path, planted: bool
) -> None:
    source = tmp_path / "acme-engine"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "acme_engine.py").write_text(ENGINE.replace(RIGHT, WRONG) if planted else ENGINE)
    built = ran(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=source)
    assert built.returncode == 0, built.stderr
    (wheel,) = source.glob("dist/*.whl")
    installed = ran(
        sys.executable,
        *("-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-qq"),
        *("--no-deps", "--no-index", "--force-reinstall", wheel),
    )
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "test_acme_engine.py").write_text(TESTS)
    tested = ran(
        python,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path),
        tmp_path / "test_acme_engine.py",
        cwd=tmp_path,
    )
    if planted:
        assert tested.returncode == 1, tested.stdout + tested.stderr
        assert "T3" in tested.stdout
    else:
        assert tested.returncode == 0, tested.stdout + tested.stderr
