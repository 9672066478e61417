"""Limits from rates, measured once and kept."""

from __future__ import annotations

import json
import logging

import pytest
from cuda_simulation import SimulatedDevice
from kvpolicy_cuda import calibrating
from kvpolicy_cuda.calibrating import cache_file, limit_from, limits_of
from kvpolicy_cuda.planner import DMA_BYTES, Limits


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        ({4: (5, 40), 16: (20, 40), 64: (50, 40)}, 64),
        ({4: (5, 40), 16: (37, 40), 64: (50, 40)}, 16),  # 37 is nine tenths and more
        ({4: (5, 40), 16: (35, 40), 64: (35, 40)}, 128),  # never: past the largest
        ({4: (40, 5), 16: (40, 40), 64: (50, 40)}, 4),  # always: from the smallest on
        ({4: (40, 5), 16: (10, 40), 64: (50, 40)}, 64),  # a lucky one below does not count
    ],
)
def test_the_limit_is_where_the_copy_engine_keeps_up_from_there_on(rates, limit):
    assert limit_from(rates) == limit


@pytest.mark.parametrize("to_host", [True, False])
def test_both_ways_move_the_same_runs(to_host):
    pytest.importorskip("triton", reason="kernels need triton")
    device = SimulatedDevice()
    with device.entered():
        rates = calibrating.measure(device, to_host=to_host, sizes=(256, 1024), total_bytes=32_768)
    assert rates.keys() == {256, 1024}
    assert all(engine > 0 and kernel > 0 for engine, kernel in rates.values())
    assert {tuple(sizes.tolist()) for _, _, sizes in device.copies} == {
        (256,) * 128,
        (1024,) * 32,
    }


def rates_of(device, *, to_host):
    """Faster by the kernel up to 8 KiB in a store, up to 32 KiB in a load."""
    limit = 8_192 if to_host else 32_768
    return {size: (1.0, 2.0 if size <= limit else 1.0) for size in calibrating.SIZES}


class Device:
    kernels = None


def test_it_is_measured_once_and_kept(monkeypatch):
    monkeypatch.setattr(calibrating, "measure", rates_of)
    key = "NVIDIA H200-GPU/1-13000"
    found = limits_of(Device(), key)
    assert found == Limits(store=16_384, load=65_536, measured=key)
    held = json.loads(cache_file(key).read_text())
    assert held["rates"]["store"]["4096"] == {"dma": 0.0, "direct": 0.0}
    monkeypatch.setattr(calibrating, "measure", None)  # not asked again
    assert limits_of(Device(), key) == found
    monkeypatch.setattr(calibrating, "measure", rates_of)
    cache_file(key).write_text(json.dumps({**held, "store": 1}))
    assert limits_of(Device(), key).store == 1
    assert limits_of(Device(), key, anew=True) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 0, "store": 1, "load": 1}', "\xff"])
def test_a_file_that_is_not_ours_is_measured_anew(text, monkeypatch):
    monkeypatch.setattr(calibrating, "measure", rates_of)
    file = cache_file("key")
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode("latin-1"))
    assert limits_of(Device(), "key").store == 16_384
    assert json.loads(file.read_text())["store"] == 16_384


def test_what_cannot_be_kept_is_used_and_told(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(calibrating, "measure", rates_of)
    (tmp_path / "kvpolicy").write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        assert limits_of(Device(), "key").store == 16_384
    assert "measurements are not kept" in caplog.text


def test_what_cannot_be_measured_is_assumed_and_told(monkeypatch, caplog):
    def fails(device, *, to_host):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibrating, "measure", fails)
    with caplog.at_level(logging.WARNING):
        assert limits_of(Device(), "key") == Limits(store=DMA_BYTES, load=DMA_BYTES)
    assert "limits are assumed: out of memory" in caplog.text
    assert not cache_file("key").exists()


def test_without_a_kernel_there_is_nothing_to_measure():
    assert limits_of(SimulatedDevice(no_kernel="no triton"), "key") == Limits()
