"""``kvpolicy bench``: what it measures is verified, what it says is there; no clock is asserted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

import kvpolicy as kv
from kvpolicy.cli import bench, bench_cases, bench_costs, bench_measure, bench_references, main
from kvpolicy.testing import fakes

MODELS = Path(__file__).parent / "models"
SMALL = ["--layers", "3", "--kv-heads", "4", "--head-size", "16"]
QUICK = ["--megabytes", "1", "--rounds", "2", "--blocks", "8"]
KEYS = {
    *("case", "plugin", "direction", "bytes", "fragments_per_block", "gbps", "r1", "r2"),
    *("spread", "memory_page_bytes", "verified"),
}


def ran(capsys, *words):
    """Exit status, the JSON object, standard error."""
    status = main(["bench", *words, "--json", "--plugins", ""])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def test_every_case_both_ways_with_every_key(capsys):
    status, report, said = ran(capsys, *SMALL, *QUICK)
    assert (status, said) == (0, "")
    found = {(one["case"], one["direction"]): one for one in report["cases"]}
    kinds = ("slab", "pages", "pages-irregular", "canonical-hnd", "canonical-nhd")
    names = [name for kind in kinds for name in (kind, f"{kind}-consecutive")]
    assert set(found) == {(name, way) for name in names for way in ("store", "load")}
    for one in report["cases"]:
        assert set(one) >= KEYS
        assert one["verified"] is True
        assert one["plugin"] == "host-copy"
        assert one["bytes"] >= 2**20
        assert min(one["gbps"], one["r1"], one["r2"]) > 0
        assert one["spread"] >= 0
    fragments = {name: one["fragments_per_block"] for (name, _), one in found.items()}
    assert fragments["slab"] == 1
    assert fragments["pages"] == fragments["pages-irregular"] == 3
    assert fragments["canonical-hnd"] == 3  # a head of its own: each page is one run
    assert fragments["canonical-nhd"] == 3 * 16
    assert {name: one["tp"] for (name, _), one in found.items() if "consecutive" not in name} == {
        "slab": 1,
        "pages": 1,
        "pages-irregular": 1,
        "canonical-hnd": 4,
        "canonical-nhd": 2,
    }
    assert report["threads"] == 1
    (cost,) = report["jobs"]
    assert cost["plugin"] == "host-copy"
    assert 0 < cost["submit_us"] <= cost["fixed_us"]
    assert cost["block_us"] >= 0


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gemma-3-27b", "deepseek-v3", "gpt-oss-20b"])
def test_real_models(capsys, model):
    status, report, _ = ran(
        capsys, str(MODELS / f"{model}.json"), *QUICK, "--ids", "scattered", "--rounds", "1"
    )
    assert status == 0
    assert {one["case"] for one in report["cases"]} == set(bench_cases.KINDS)
    assert all(one["verified"] for one in report["cases"])


def test_splits_and_tensor_parallel_sizes_are_measured_too(capsys):
    status, report, _ = ran(
        capsys, *SMALL, *QUICK, "--tp", "2", "--kv-packing", "split", "--ids", "consecutive"
    )
    assert status == 0
    assert {one["tp"] for one in report["cases"]} == {2}
    assert all(one["verified"] for one in report["cases"])


def test_what_a_model_does_not_allow_is_left_out_with_the_reason(capsys):
    status, report, _ = ran(capsys, *SMALL, *QUICK, "--tp", "8", "--cases", "pages,canonical-nhd")
    assert status == 0
    assert report["left_out"] == {
        "canonical-nhd": "2 ranks hold the same bytes and take turns at storing them; lower --tp"
    }
    assert {one["case"] for one in report["cases"]} == {"pages", "pages-consecutive"}
    status, report, _ = ran(capsys, *SMALL, *QUICK, "--tp", "3", "--cases", "canonical-hnd")
    assert "heads-not-divisible" in report["left_out"]["canonical-hnd"]
    assert report["cases"] == []


def test_jobs_of_one_block_move_as_many_bytes(capsys):
    _, report, _ = ran(capsys, *SMALL, *QUICK, "--blocks", "1", "--cases", "slab,pages")
    assert all(one["bytes"] >= 2**20 and one["blocks"] == 1 for one in report["cases"])


def test_several_threads_and_afterwards_those_of_before(capsys, monkeypatch):
    before = torch.get_num_threads()
    status, report, _ = ran(capsys, *SMALL, *QUICK, "--threads", "2", "--cases", "pages")
    assert (status, report["threads"]) == (0, 2)
    assert torch.get_num_threads() == before
    assert "KVPOLICY_HOST_THREADS" not in os.environ
    monkeypatch.setenv("KVPOLICY_HOST_THREADS", "5")
    with bench_references.exact_threads(1):
        assert os.environ["KVPOLICY_HOST_THREADS"] == "1"
    assert os.environ["KVPOLICY_HOST_THREADS"] == "5"


def test_a_table_for_people_says_what_the_ratios_are(capsys):
    assert main(["bench", *SMALL, *QUICK, "--plugins", "", "--cases", "pages,slab"]) == 0
    said = capsys.readouterr().out
    assert "speed against one large torch copy" in said
    assert "host-copy: through a connector a job costs" in said
    for word in ("slab-consecutive", "fragments of a block", "spread", "verified"):
        assert word in said


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_written(capsys, tmp_path, suffix):
    path = tmp_path / f"ratios{suffix}"
    status, _, said = ran(capsys, *SMALL, *QUICK, "--cases", "pages", "--plot", str(path))
    assert (status, said) == (0, "")
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--plot", "ratios.pdf"], "--plot takes a name that ends in .png or .svg"),
        (["--plot", "/nowhere/ratios.svg"], "cannot write '/nowhere/ratios.svg'"),
        (["--blocks", "0"], "--blocks lies between 1 and 65,536, not 0"),
        (["--rounds", "0"], "--rounds lies between 1 and 1,000, not 0"),
        (["--threads", "0"], "--threads lies between 1 and 256, not 0"),
        (["--megabytes", "0"], "--megabytes lies between 1 and 65,536, not 0"),
        (["--cases", "page"], "--cases has no 'page'; did you mean 'pages'"),
        (["--cases", ","], "--cases names at least one of slab, pages"),
        (["--ids", "random"], "--ids has no 'random'"),
        (["--compare", "nobody"], "--compare names 'nobody', no active transfer plugin"),
        (["--group", "sliding"], "--group names 'sliding', which is no group of attention"),
    ],
)
def test_wrong_usage_is_said_in_words(capsys, words, reason):
    status, report, said = ran(capsys, *SMALL, *QUICK, "--cases", "pages", *words)
    assert status == 2
    assert reason in said
    assert report["error"]["code"]


def test_a_bench_of_which_every_case_is_refused_is_a_refusal(capsys):
    status, report, _ = ran(capsys, *SMALL, *QUICK, "--tp", "3")
    assert (status, report["cases"]) == (3, [])
    assert set(report["left_out"]) == set(bench._CASES)


def test_a_model_is_a_config_or_all_its_sizes(capsys):
    status, _, said = ran(capsys, "--layers", "3")
    assert (status, "sizes: --kv-heads, --head-size missing" in said) == (2, True)
    config = str(MODELS / "qwen3-30b-a3b.json")
    status, _, said = ran(capsys, config, "--layers", "3")
    assert (status, "give CONFIG.json or sizes, not both" in said) == (2, True)


def test_a_plot_without_matplotlib_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    status, _, said = ran(capsys, *SMALL, *QUICK, "--cases", "pages", "--plot", "x.svg")
    assert status == 2
    assert "--plot needs matplotlib: pip install 'kvpolicy[plot]'" in said


# What copy engines have measured of themselves.


class Measured:
    priority = 10

    def __init__(self, calibration):
        self.calibration = calibration

    @kv.hookimpl
    def transfer(self, job):
        return None


def calibrated(monkeypatch, capsys, *words, **plugins):
    chosen = kv.load_plugins(kv.select(names=(), environ={}), plugins)
    monkeypatch.setattr(bench, "plugins_of", lambda args: chosen)
    status = main(["bench", "--calibration", *words])
    return status, *capsys.readouterr()


def fails():
    raise OSError("no device")


def test_the_calibration_of_every_engine_that_has_one_is_printed(monkeypatch, capsys):
    found = {"cuda:0": {"store": 65536, "measured": "a device"}}
    engines = {"acme": Measured(lambda: found), "other": Measured(fails), "odd": Measured(set)}
    engines["nan"] = Measured(lambda: float("nan"))
    status, told, _ = calibrated(monkeypatch, capsys, "--json", **engines)
    assert status == 0
    assert json.loads(told)["calibration"] == {
        "acme": found,
        "other": "failed: OSError: no device",
        "odd": "failed: TypeError: Object of type set is not JSON serializable",
        "nan": "failed: ValueError: Out of range float values are not JSON compliant",
    }
    status, told, _ = calibrated(monkeypatch, capsys, **engines)
    words = told.split()
    assert [word for word in ("acme", "cuda:0", "65,536", "OSError:") if word not in words] == []


def test_without_an_engine_that_has_a_calibration_it_says_who_is_there(monkeypatch, capsys):
    status, _, said = calibrated(monkeypatch, capsys)
    assert status == 2
    assert "no active transfer plugin has a calibration; active: host-copy" in said
    status, _, said = calibrated(monkeypatch, capsys, "--layers", "3")
    assert status == 2
    assert "--calibration is of the machine and takes no CONFIG.json or sizes" in said


# Who checks the bytes: each kind of lie is found.


def case(kind, ids="scattered"):
    spec = kv.AttentionSpec(block_size=4, total_kv_heads=4, head_size=8, itemsize=1)
    order = "NHD" if kind == "canonical-nhd" else "HND"
    canonical = kind.startswith("canonical")
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers={"a": spec, "b": spec}, num_blocks=1),
        grid=kv.ParallelGrid(tp=2 if canonical else 1),
        canonical=canonical,
        canonical_order=order,
        layout=order,
        backend=kv.BackendCapabilities(stride_aware=kind == "slab"),
    )
    return bench_cases.Case(kind=kind, ids=ids, context=context)


def verdict(copies, kind, ids="scattered"):
    """What the bench says of a plugin whose transfers are one of the kit's fakes."""
    settings = bench_references.Settings(blocks=16, copied_bytes=4096, rounds=1, threads=1)
    plugins = kv.load_plugins(kv.select(names=[]), {"mine": copies})
    return bench_measure.CaseRun(case(kind, ids), settings, plugins, ["mine"]).verified("mine")


@pytest.mark.parametrize("ids", bench_cases.IDS)
@pytest.mark.parametrize("kind", bench_cases.KINDS)
def test_a_copy_that_is_right_is_verified(kind, ids):
    assert verdict(fakes.PlainCopy(), kind, ids) == {"store": True, "load": True}


@pytest.mark.parametrize("kind", bench_cases.KINDS)
@pytest.mark.parametrize(
    ("fake", "found"),
    [
        (fakes.HalfCopy, {"store": False, "load": False}),
        (fakes.OneWayCopy, {"store": True, "load": False}),
        (fakes.ShortTableCopy, {"store": False, "load": False}),
        (fakes.SpillingCopy, {"store": True, "load": False}),
    ],
)
def test_a_copy_that_is_wrong_is_not_verified(fake, found, kind):
    """Too few bytes, one way only, eight pairs of a job, a byte before every run that is loaded."""
    assert verdict(fake(), kind) == found


@pytest.mark.parametrize("kind", bench_cases.KINDS)
def test_a_byte_at_the_end_of_a_row_is_found(kind):
    """It is another rank's part where pages are canonical, so that what is loaded is right."""
    found = verdict(fakes.SpillingRowCopy(), kind)
    assert found == {"store": False, "load": kind.startswith("canonical")}


def test_a_plugin_that_fails_or_does_not_take_a_job_is_an_error():
    settings = bench_references.Settings(blocks=2, copied_bytes=4096, rounds=1, threads=1)

    class Fails:
        @kv.hookimpl
        def transfer(self, job):
            return kv.TransferHandle.finished(
                kv.TransferResult(job_id=job.job_id, ok=False, bytes=0, seconds=0, error="no ink")
            )

    class Declines:
        @kv.hookimpl
        def transfer(self, job):
            return None

    for copies, reason in ((Fails(), "failed: no ink"), (Declines(), "does not store")):
        plugins = kv.load_plugins(kv.select(names=[]), {"mine": copies})
        run = bench_measure.CaseRun(case("pages"), settings, plugins, ["mine"])
        with pytest.raises(kv.OptionError, match=f"plugin 'mine' {reason}"):
            run.measure("mine", "store")


def test_exit_status_1_where_bytes_are_wrong(capsys, monkeypatch):
    monkeypatch.setattr(
        bench_measure.CaseRun, "verified", lambda self, name: {"store": True, "load": False}
    )
    status, report, _ = ran(capsys, *SMALL, *QUICK, "--cases", "pages")
    assert status == 1
    assert {one["direction"]: one["verified"] for one in report["cases"]} == {
        "store": True,
        "load": False,
    }
    main(["bench", *SMALL, *QUICK, "--plugins", "", "--cases", "pages"])
    assert "NOT verified" in capsys.readouterr().out


def test_a_plugin_that_takes_no_copies_on_the_cpu_is_named():
    class Elsewhere:
        @kv.hookimpl
        def transfer(self, job):
            return None

    plugins = kv.load_plugins(kv.select(names=[]), {"elsewhere": Elsewhere()})
    costs, others = bench_costs.taken_by(plugins, ["elsewhere", "host-copy"])
    assert [cost["plugin"] for cost in costs] == ["host-copy"]
    assert others == ["elsewhere"]


# What the figures mean


def test_a_ratio_is_taken_against_the_copies_before_and_after_it():
    """At 2 and 6 bytes a second, a byte takes 1/2 and 1/6 s: 1/3 in the middle."""
    assert bench_references.between(2.0, 6.0) == pytest.approx(3.0)


def test_medians_spreads_and_noise():
    steady = bench_references.Series(
        plugin="p",
        direction="store",
        rates=[9.5e9, 10e9, 10.5e9],
        torch_rates=[10e9] * 3,
        memcpy_rates=[20e9] * 3,
    )
    assert steady.told() == {"gbps": 10.0, "r1": 1.0, "r2": 0.5, "spread": 0.1, "noisy": False}
    shaken = attrs.evolve(steady, torch_rates=[5e9, 10e9, 11e9])
    assert shaken.told()["noisy"] is True


def test_spread_is_the_range_between_the_quartiles():
    assert bench_references.spread([1.0, 1.0, 1.0, 1.0, 9.0]) == pytest.approx(4.0)
    assert bench_references.spread([1.0, 2.0]) == pytest.approx(2 / 3)


def test_references_move_what_they_say():
    settings = bench_references.Settings(blocks=1, copied_bytes=4096, rounds=1, threads=3)
    references = bench_references.References(settings)
    for copy in (references.torch_rate, references.memcpy_rate):
        references._to.fill(2)
        assert copy() > 0
        assert copy() > 0
        assert (references._to == 1).all()  # two turns are both halves
    references.close()


def test_scattered_and_consecutive_ids_name_every_block_once():
    for ids in bench_cases.IDS:
        slots, stored, loaded, others = bench_measure._ids(case("pages", ids), 40)
        together = np.concatenate([stored, loaded, others])
        assert sorted(together.tolist()) == list(range(82))
        assert len({*slots.tolist()}) == 40
        steps = {*np.diff(slots).tolist(), *np.diff(stored).tolist(), *np.diff(loaded).tolist()}
        assert (steps == {1}) is (ids == "consecutive")


def test_irregular_pages_lie_at_no_constant_distance_and_have_storages_of_their_own():
    spec = kv.LatentSpec(block_size=4, row_bytes=64)
    geometry = kv.CacheGeometry(layers={f"l{i}": spec for i in range(6)}, num_blocks=3)
    context = kv.PolicyContext(geometry=geometry)
    made = bench_cases.BenchMemory.of(
        bench_cases.Case(kind="pages-irregular", ids="scattered", context=context)
    )
    starts = [view.ctypes.data for view in made.views.values()]
    steps = np.diff(starts)
    assert np.diff(steps).all()  # no two neighbours are equally far apart
    pointers = {one.untyped_storage().data_ptr() for one in made.caches.tensors.values()}
    assert pointers == {*starts}


def test_the_command_lists_the_cases_that_there_are():
    assert bench._CASES == bench_cases.KINDS
    assert bench._IDS == bench_cases.IDS
