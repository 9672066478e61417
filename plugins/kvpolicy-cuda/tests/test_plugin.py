"""The plugin as it is installed: its place, its door, and that it does nothing at import."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import attrs
import kvpolicy_cuda
import pytest
import torch
from cuda_jobs import Rank, Recorder
from cuda_simulation import SimulatedDevice
from kvpolicy_cuda import CudaError, driver, engine

import kvpolicy

ROOT = Path(__file__).parents[1]


def run(*words, **environment):
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=given
    )


def test_importing_it_loads_neither_torch_nor_triton_nor_a_driver():
    done = run("-c", "import sys, kvpolicy_cuda; print([*sys.modules])")
    assert done.returncode == 0, done.stderr
    loaded = set(eval(done.stdout))
    assert "kvpolicy_cuda" in loaded
    assert not loaded & {"torch", "triton", "cuda", "kvpolicy_cuda.driver"}


def test_it_is_asked_before_the_built_in_engine():
    plugins = kvpolicy.load_plugins(
        kvpolicy.select(names=(), strict=True, environ={}), {"cuda-here": kvpolicy_cuda.policy}
    )
    mine = next(info for info in plugins.infos if info.name == "cuda-here")
    assert (mine.priority, mine.hooks, mine.status) == (100, ("transfer",), "active")


def test_its_entry_point_is_the_policy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["kvpolicy"] == {"cuda": "kvpolicy_cuda:policy"}
    try:
        importlib.metadata.distribution("kvpolicy-cuda")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("kvpolicy-cuda is not installed")
    found = importlib.metadata.entry_points(group="kvpolicy", name="cuda")
    assert {entry.load() for entry in found} == {kvpolicy_cuda.policy}


def no_driver():
    raise CudaError("no CUDA driver")


@pytest.mark.parametrize(
    ("load", "triton", "said"),
    [
        (lambda: SimulatedDevice().driver, True, ""),
        (lambda: SimulatedDevice(batch_version=0).driver, True, "has no cuMemcpyBatchAsync"),
        (lambda: SimulatedDevice().driver, False, "triton is not installed: small fragments"),
        (no_driver, False, "no CUDA driver; triton is not installed"),
    ],
)
def test_its_status_is_what_is_missing(load, triton, said, monkeypatch):
    monkeypatch.setattr(driver.Driver, "load", load)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: triton or None)
    status = kvpolicy_cuda.policy.status()
    assert said in status
    assert bool(said) == bool(status)


def test_its_status_loads_no_torch():
    done = run(
        "-c", "import sys, kvpolicy_cuda; kvpolicy_cuda.policy.status(); print([*sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert not set(eval(done.stdout)) & {"torch", "triton"}


def test_what_is_missing_is_seen_where_plugins_are_listed(monkeypatch):
    monkeypatch.setattr(driver.Driver, "load", no_driver)
    plugins = kvpolicy.load_plugins(
        kvpolicy.select(names=(), environ={}), {"cuda-here": kvpolicy_cuda.policy}
    )
    mine = next(info for info in plugins.infos if info.name == "cuda-here")
    assert mine.status == "active"
    assert mine.reason.startswith("no CUDA driver")


# Rows that a connector shows it before the first job.


def test_rows_for_another_device_stay_as_they_are():
    assert kvpolicy_cuda.policy.prepare_rows(torch.zeros(4, 8, dtype=torch.uint8), "cpu") is None


def test_rows_for_cuda_are_pinned_and_the_device_is_measured(monkeypatch):
    device, rows = SimulatedDevice(pinned=False), torch.zeros(4, 4096, dtype=torch.uint8)
    monkeypatch.setattr(driver.Driver, "load", lambda: device.driver)
    monkeypatch.setattr(engine, "installed", lambda: engine.Engine(lambda _name: device))
    held = kvpolicy_cuda.policy.prepare_rows(rows, "cuda:0")
    assert sum(device.registered.values()) == rows.numel()
    held.close()


def test_rows_that_cannot_be_pinned_are_warned_about(monkeypatch, caplog):
    device = SimulatedDevice(pinned=False)
    device.fail("cuMemHostRegister", 2)
    monkeypatch.setattr(driver.Driver, "load", lambda: device.driver)
    monkeypatch.setattr(engine, "installed", lambda: engine.Engine(lambda _name: device))
    rows = torch.zeros(4, 4096, dtype=torch.uint8)
    assert kvpolicy_cuda.policy.prepare_rows(rows, "cuda:0") is None
    assert "host rows are not pinned, copies will be slower: cuMemHostRegister" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_its_calibration_without_cuda_is_the_reason():
    assert "can use no CUDA device here" in kvpolicy_cuda.policy.calibration()


def test_its_calibration_is_of_every_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(kvpolicy_cuda, "calibration", lambda device: {"store": len(device)})
    assert kvpolicy_cuda.policy.calibration() == {"cuda:0": {"store": 6}, "cuda:1": {"store": 6}}


@pytest.fixture
def job():
    recorder = Recorder()
    rank = Rank(recorder)
    rank.connector.wait([rank.connector.store([1, 2], [1, 4])])
    return recorder.jobs[0]


@pytest.mark.parametrize("device", ["cpu", "meta", "xpu:0", "cudalike"])
def test_another_device_is_not_its_business(job, device):
    assert kvpolicy_cuda.policy.transfer(attrs.evolve(job, device=device)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_cuda_job_without_cuda_is_a_failed_result_with_the_reason(job):
    handle = kvpolicy_cuda.policy.transfer(attrs.evolve(job, device="cuda:0"))
    assert handle.done()
    assert handle.result().failed_ids == (1, 4)
    assert "can use no CUDA device here" in handle.result().error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_the_command_says_what_there_is():
    done = run("-m", "kvpolicy_cuda", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "no CUDA driver" in found["driver"] or "cuda" in found["driver"]
    assert found["devices"] == {}
    assert "can use no CUDA device here" in found["calibration"]


def test_every_public_name_is_there_and_described():
    assert kvpolicy_cuda.__all__ == sorted(kvpolicy_cuda.__all__)
    for name in kvpolicy_cuda.__all__:
        assert getattr(kvpolicy_cuda, name).__doc__, name
    assert {*kvpolicy_cuda.__all__} <= {*dir(kvpolicy_cuda)}
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = kvpolicy_cuda.missing
