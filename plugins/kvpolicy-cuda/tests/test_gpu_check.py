"""The check for GPUs, rehearsed without one: its bytes part runs on the simulated device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_simulation import Simulated, SimulatedDevice
from kvpolicy_cuda import lanes

import kvpolicy

SCRIPT = Path(__file__).parents[1] / "gpu_check.py"


@pytest.fixture
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Rig:
    """What the script's own rig offers, on the simulation."""

    device = "cpu"

    def __init__(self):
        self.simulated = None

    def plugin(self, path):
        self.simulated = SimulatedDevice(seed=5, steps=2)
        return Simulated(path, self.simulated)

    def pool(self, slots, record_bytes):
        return kvpolicy.HostPool(slots, record_bytes)

    def later(self, work, *, slow):
        self.simulated.current.enqueue(work) if slow else work()

    def settle(self):
        self.simulated.finish()

    def more_checks(self):
        return []


def test_its_bytes_part_passes(gpu_check, capsys):
    pytest.importorskip("triton", reason="kernels need triton")
    assert gpu_check.check_bytes(Rig()) == []
    assert capsys.readouterr().out.count("right") == len(gpu_check.PATHS) * (
        len(gpu_check.SHAPES) + 1
    )


def test_its_bytes_part_finds_a_race(gpu_check, monkeypatch, capsys):
    """Jobs that wait for nothing are found out, on each path."""
    pytest.importorskip("triton", reason="kernels need triton")
    monkeypatch.setattr(lanes.Lane, "begin", lambda *rest: None)
    monkeypatch.setattr(gpu_check, "SHAPES", {"NHD at TP2": gpu_check.SHAPES["NHD at TP2"]})
    wrong = gpu_check.check_bytes(Rig())
    assert {line.partition(":")[0] for line in wrong} == set(gpu_check.PATHS)
    assert all("bytes of" in line for line in wrong)
    assert capsys.readouterr().out.count("WRONG") == 3


@pytest.mark.parametrize("row", range(9))
def test_what_it_times_has_fragments_of_the_size_that_it_says(gpu_check, row):
    name, shape, *targets = gpu_check.TIMED[row]
    assert all(0.5 < target < 1 for target in targets)
    context = gpu_check.model(**shape, blocks=2)
    made = kvpolicy.Connector(context, [])
    (layer, *_) = made.explain()["layers"]
    size = layer["local_page_bytes"] // layer["fragments_per_block"]
    if name.startswith("slab"):
        assert made.decision.cross_layer_blocks
        assert made.record_bytes == 1.5 * 2**20
    else:
        assert f" {size // 1024} KiB" in name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_it_says_that_nothing_was_run():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "has no CUDA device here; nothing was run" in done.stdout


def test_a_checkout_needs_no_installation(tmp_path):
    """Both plugins are found where neither distribution is installed."""
    program = f"""
import importlib.metadata, importlib.util, sys
spec = importlib.util.spec_from_file_location("gpu_check", {str(SCRIPT)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
real = importlib.metadata.distribution
def gone(name):
    if "kvpolicy" in name:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.distribution = gone
sys.path[:] = [p for p in sys.path if "kvpolicy" not in p]
with module.checkout():
    import kvpolicy
    assert kvpolicy.__file__.startswith({str(SCRIPT.parents[2])!r}), kvpolicy.__file__
    found = {{i.name: i for i in kvpolicy.load_plugins(kvpolicy.select(environ={{}})).infos}}
    assert found["cuda"].status == "active", found
    assert "host-copy" in found
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
