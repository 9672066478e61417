"""Triton's interpreter for every kernel, hypothesis without chance, no cache of measurements."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from kvpolicy_cuda import engine, lanes

# Triton reads it when a kernel is defined, so it is set before any test imports one.
os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parent))  # test modules import the simulation
pytest.register_assert_rewrite("cuda_simulation")

settings.register_profile("cuda", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile("cuda")


@pytest.fixture(autouse=True)
def _no_measurements_but_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    for module in (lanes, engine):
        monkeypatch.setattr(module, "STAGING_BYTES", 2**18)
