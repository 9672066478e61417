"""Checks kvpolicy-cuda on a GPU: first that bytes are right, then how fast they move.

Run it in a checkout, with any Python that has torch for CUDA, triton, numpy, attrs and pluggy::

    python plugins/kvpolicy-cuda/gpu_check.py [--json FILE] [--only bytes|speed]

It needs no installation, takes the first CUDA device, and is written for under four minutes. Exit
status: 0 all is well; 1 bytes are wrong; 2 a target is missed; 3 there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import statistics
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SENTINEL = 0xA5
SLEEP_CYCLES = 20_000_000
TIMED_BYTES = 2**29
REFERENCE_BYTES = 2**30
REPEATS = 5


@contextlib.contextmanager
def checkout() -> Iterator[None]:
    """Makes the checkout's kvpolicy and plugin importable and known, where they are not installed.

    Plugins are found through the metadata of installed distributions, so each gets some.
    """
    with tempfile.TemporaryDirectory() as folder:
        for home in (ROOT, HERE):
            project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
            name, version = project["name"], project["version"]
            try:
                importlib.metadata.distribution(name)
                continue
            except importlib.metadata.PackageNotFoundError:
                sys.path.insert(0, str(home / "src"))
            info = Path(folder) / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            entries = project["entry-points"]["kvpolicy"].items()
            lines = ["[kvpolicy]", *(f"{key} = {value}" for key, value in entries)]
            (info / "entry_points.txt").write_text("\n".join(lines))
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)


def say(line: str = "") -> None:
    """A line for people, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# What is copied


def model(
    *,
    heads: int = 4,
    tp: int = 1,
    rank: int = 0,
    order: str = "HND",
    tokens: int = 16,
    row: int = 512,
    layers: int = 48,
    blocks: int = 8,
    slab: bool = False,
) -> Any:
    """A context of one rank; a token's row of one head has ``row`` elements of one byte."""
    import kvpolicy

    spec = kvpolicy.AttentionSpec(
        block_size=tokens, total_kv_heads=heads, head_size=row // 2, itemsize=1
    )
    names = [f"layer.{i}" for i in range(layers)]
    return kvpolicy.PolicyContext(
        geometry=kvpolicy.CacheGeometry(layers=dict.fromkeys(names, spec), num_blocks=blocks),
        grid=kvpolicy.ParallelGrid(tp=tp),
        rank=rank,
        canonical=not slab,
        layout=kvpolicy.KVCacheLayout.parse(order),
        backend=kvpolicy.BackendCapabilities(stride_aware=slab),
    )


def caches_of(context: Any, device: str) -> dict[str, Any] | Any:
    """Empty caches as an engine allocates them: a tensor for each layer, or one slab."""
    import torch

    spec = next(iter(context.geometry.layers.values()))
    heads = max(1, spec.total_kv_heads // context.grid.tp)
    inner = (heads, spec.block_size) if str(context.layout) == "LBHNC" else (spec.block_size, heads)
    blocks, names = context.geometry.num_blocks, list(context.geometry.layers)
    page = (*inner, 2 * spec.head_size)
    if context.canonical:
        return {
            name: torch.empty((blocks, *page), dtype=torch.uint8, device=device) for name in names
        }
    whole = torch.empty((blocks, len(names), *page), dtype=torch.uint8, device=device)
    return {name: whole[:, i] for i, name in enumerate(names)}


def contents(caches: dict[str, Any], seed: int) -> list[Any]:
    """Random bytes for every cache, on its device."""
    import torch

    made = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, cache.shape, dtype=torch.uint8, generator=made).to(cache.device)
        for cache in caches.values()
    ]


def fill(caches: dict[str, Any], values: Sequence[Any] | None) -> None:
    """Writes contents, or the sentinel for None; work of the device alone."""
    for cache, value in zip(caches.values(), values or [None] * len(caches), strict=True):
        cache.fill_(SENTINEL) if value is None else cache.copy_(value)


class Twins:
    """One rank twice: on the device by the path under test, on the CPU by the core's own copy."""

    def __init__(self, rig: Any, path: str, **shape: Any) -> None:
        import kvpolicy

        self.rig, self.context = rig, model(**shape)
        self.slots = 5
        probe = kvpolicy.Connector(self.context, [])
        self.pools = rig.pool(self.slots, probe.record_bytes), kvpolicy.HostPool(self.slots)
        plugins = {"under-test": rig.plugin(path)}, []
        self.caches = caches_of(self.context, rig.device), caches_of(self.context, "cpu")
        self.connectors = [
            kvpolicy.Connector(self.context, plugin, host=pool)
            for plugin, pool in zip(plugins, self.pools, strict=True)
        ]
        for connector, caches, pool in zip(self.connectors, self.caches, self.pools, strict=True):
            connector.register(caches)
            pool.rows.fill_(SENTINEL)
            fill(caches, contents(caches, 1))
        rig.settle()

    def both(self, act: Callable[[int], None]) -> None:
        """Does something to the device's side (0) and to the CPU's (1)."""
        act(0)
        act(1)

    def run(self, side: int, jobs: Sequence[int]) -> None:
        """Waits for jobs, which must succeed."""
        for result in self.connectors[side].wait(jobs, timeout=60):
            if not result.ok:
                raise AssertionError(result.error)

    def compare(self, what: str) -> None:
        """Every byte of rows and caches, on both sides."""
        self.rig.settle()
        record = self.connectors[0].record_bytes
        mine, theirs = (pool.rows[:, :record] for pool in self.pools)
        if not mine.equal(theirs):
            raise AssertionError(f"{what}: {int((mine != theirs).sum())} bytes of rows are wrong")
        for name, cache in self.caches[0].items():
            other = self.caches[1][name]
            if not cache.cpu().equal(other):
                wrong = int((cache.cpu() != other).sum())
                raise AssertionError(f"{what}: {wrong} bytes of {name} are wrong")


SHAPES: dict[str, dict[str, Any]] = {
    "HND": {"layers": 3, "tokens": 4, "row": 256},
    "HND at TP2": {"layers": 3, "tokens": 4, "row": 256, "tp": 2, "rank": 1},
    "NHD at TP2": {"layers": 3, "tokens": 4, "row": 256, "tp": 2, "rank": 1, "order": "NHD"},
    "NHD at TP4": {"layers": 2, "tokens": 4, "row": 64, "tp": 4, "rank": 3, "order": "NHD"},
    "rows of 264 B": {"layers": 3, "tokens": 3, "row": 264, "tp": 2, "order": "NHD"},
    "rows of 260 B": {"layers": 3, "tokens": 3, "row": 260, "tp": 2, "order": "NHD"},
    "rows of 6 B": {"layers": 2, "tokens": 3, "row": 6, "tp": 2, "order": "NHD"},
    "slab": {"layers": 4, "tokens": 4, "row": 256, "slab": True},
}
PATHS = ("dma", "staged", "direct")


def check_round_trip(rig: Any, path: str, shape: dict[str, Any]) -> None:
    """Stores shuffled blocks, poisons the caches, loads them elsewhere."""
    twins = Twins(rig, path, **shape)
    blocks, slots, back = [6, 1, 2, 7], [0, 4, 2, 1], [3, 0, 5, 6]

    def store(side: int) -> None:
        twins.run(side, [twins.connectors[side].store(blocks, slots)])

    def load(side: int) -> None:
        fill(twins.caches[side], None)
        twins.run(side, [twins.connectors[side].load(slots, back)])

    twins.both(store)
    twins.compare("stored")
    twins.both(load)
    twins.compare("loaded")


def check_races(rig: Any, path: str) -> None:
    """Slow work before every job: a store must see it, and a load must not run ahead of it."""
    twins = Twins(rig, path, **SHAPES["NHD at TP2"])

    def slow_writer(side: int) -> None:
        new = contents(twins.caches[side], 2)

        def write() -> None:
            fill(twins.caches[side], new)

        rig.later(write, slow=side == 0)
        twins.run(side, [twins.connectors[side].store([1, 2, 3], [1, 2, 3])])

    def slow_eraser(side: int) -> None:
        def erase() -> None:
            fill(twins.caches[side], None)

        rig.later(erase, slow=side == 0)
        twins.run(side, [twins.connectors[side].load([1, 2, 3], [4, 5, 6])])

    for act in (slow_writer, slow_eraser):
        twins.both(act)
        twins.compare(act.__name__.replace("_", " "))


def check_bytes(rig: Any) -> list[str]:
    """Every path on every shape, then races; returns what is wrong."""
    wrong = []
    checks: list[tuple[str, Callable[[], None]]] = [
        (f"{path}: {name}", lambda path=path, shape=shape: check_round_trip(rig, path, shape))
        for path in PATHS
        for name, shape in SHAPES.items()
    ]
    checks += [(f"{path}: races", lambda path=path: check_races(rig, path)) for path in PATHS]
    checks += rig.more_checks()
    for name, check in checks:
        try:
            check()
        except Exception as error:  # noqa: BLE001  the others are still worth knowing
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        say(f"  {'WRONG' if wrong and wrong[-1].startswith(f'{name}: ') else 'right'}  {name}")
    return wrong


class CudaRig:
    """The first CUDA device, with a compute stream that is not the default one."""

    device = "cuda:0"

    def __init__(self) -> None:
        import torch

        self.stream = torch.cuda.Stream(self.device)
        torch.cuda.set_stream(self.stream)

    def plugin(self, path: str) -> object:
        """The engine, made to take a path wherever nothing stands against it."""
        from kvpolicy_cuda.engine import Engine
        from kvpolicy_cuda.planner import Choice, Path

        import kvpolicy

        def choose(facts: Any, _limits: Any) -> Any:
            against = {
                "dma": "",
                "staged": facts.no_kernel or facts.no_staging,
                "direct": facts.not_pinned or facts.no_kernel or facts.no_mapping,
            }
            return Choice(Path("dma" if against[path] else path), against[path] or "checked")

        class Forced:
            engine = Engine(choose=choose)

            @kvpolicy.hookimpl
            def transfer(self, job: Any) -> Any:
                return self.engine.transfer(job)

        return Forced()

    def pool(self, slots: int, record_bytes: int) -> Any:
        """Pinned rows; it is an error if they cannot be."""
        import kvpolicy_cuda

        pool = kvpolicy_cuda.PinnedHostPool(slots, record_bytes)
        if pool.not_pinned:
            raise RuntimeError(pool.not_pinned)
        return pool

    def later(self, work: Callable[[], None], *, slow: bool) -> None:
        """Work of the compute stream, after something slow."""
        import torch

        if slow:
            torch.cuda._sleep(SLEEP_CYCLES)
        work()

    def settle(self) -> None:
        """Waits for the device."""
        import torch

        torch.cuda.synchronize()

    def more_checks(self) -> list[tuple[str, Callable[[], None]]]:
        """What only a device shows."""
        return [
            ("rows that are not pinned", self.check_pageable),
            ("beside a graph's capture", self.check_capture),
        ]

    def check_pageable(self) -> None:
        """Ordinary rows are copied too."""
        import kvpolicy

        class Pageable(CudaRig):
            def pool(self, slots: int, record_bytes: int) -> Any:
                return kvpolicy.HostPool(slots, record_bytes)

        check_round_trip(Pageable(), "direct", SHAPES["NHD at TP2"])

    def check_capture(self) -> None:
        """A job in another thread while this one captures; and one that would be captured."""
        import torch

        twins = Twins(self, "direct", **SHAPES["HND"])
        made, said = twins.connectors[0], []
        counter = torch.zeros(1, device=self.device)
        graph = torch.cuda.CUDAGraph()
        twins.run(0, [made.store([3], [3])])  # what a first job makes is there before the capture

        def job() -> None:
            said.extend(made.wait([made.store([1], [1])], timeout=60))

        with torch.cuda.graph(graph):
            counter.add_(1)
            (refused,) = made.wait([made.store([2], [2])], timeout=60)
            thread = threading.Thread(target=job)
            thread.start()
            thread.join()
        graph.replay()
        torch.cuda.synchronize()
        if refused.ok or "captured" not in refused.error:
            raise AssertionError(f"a job on the capturing stream ended as {refused}")
        if not (said and said[0].ok and counter.item() == 1):
            raise AssertionError(f"beside the capture: {said}, graph ran {counter.item()} times")


# How fast

# name, shape, target of a store, target of a load: ratios to one pinned copy
TIMED: list[tuple[str, dict[str, Any], float, float]] = [
    ("slab, 1.5 MiB a block", {"slab": True}, 0.95, 0.95),
    ("pages of 64 KiB", {"tokens": 32}, 0.92, 0.92),
    ("pages of 32 KiB", {}, 0.90, 0.90),
    ("pages of 16 KiB", {"tokens": 8}, 0.85, 0.85),
    ("pages of 4 KiB", {"tokens": 8, "heads": 1}, 0.85, 0.85),
    ("canonical HND, 8 KiB", {"tp": 4}, 0.85, 0.75),
    ("canonical HND, 4 KiB", {"tp": 4, "tokens": 8}, 0.85, 0.75),
    ("canonical NHD, 4 KiB", {"tp": 2, "order": "NHD", "heads": 16}, 0.80, 0.60),
    ("canonical NHD, 1 KiB", {"tp": 2, "order": "NHD"}, 0.80, 0.60),
]


def seconds_of(act: Callable[[], None]) -> float:
    """The median of some runs, after one that warms up."""
    found = []
    for repeat in range(1 + REPEATS):
        begun = time.perf_counter()
        act()
        if repeat:
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def reference(*, to_host: bool) -> float:
    """Bytes per second of one pinned copy."""
    import torch

    there = torch.empty(REFERENCE_BYTES, dtype=torch.uint8, device="cuda:0")
    here = torch.empty(REFERENCE_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        here.copy_(there, non_blocking=True) if to_host else there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()

    return REFERENCE_BYTES / seconds_of(copy)


class Timed:
    """An engine with caches of `TIMED_BYTES` and as many rows, as it is installed."""

    def __init__(self, shape: dict[str, Any]) -> None:
        import kvpolicy_cuda
        import torch

        import kvpolicy

        one = model(**shape, blocks=1)
        page = sum(cache.numel() for cache in caches_of(one, "meta").values())
        self.blocks = max(2, TIMED_BYTES // page)
        context = model(**shape, blocks=self.blocks)
        record = kvpolicy.Connector(one, []).record_bytes
        self.pool = kvpolicy_cuda.PinnedHostPool(self.blocks, record)
        self.made = kvpolicy.Connector(context, ["cuda"], host=self.pool)
        self.caches = caches_of(context, "cuda:0")
        self.made.register(self.caches)
        self.bytes = self.blocks * page
        self.random = torch.Generator().manual_seed(3)
        self.everything = torch.arange(self.blocks)
        self.finish([self.made.store(self.everything, self.everything)])

    def shuffled(self, half: int | None = None) -> Any:
        """Ids in random order: all, or one half of them."""
        import torch

        ids = torch.randperm(self.blocks, generator=self.random)
        middle = self.blocks // 2
        return ids if half is None else ids[(ids < middle) == (half == 0)][:middle]

    def finish(self, jobs: Sequence[int]) -> None:
        """Polls until the jobs are over; they must succeed."""
        left = set(jobs)
        while left:
            for result in self.made.poll():
                if not result.ok:
                    raise AssertionError(result.error)
                left.discard(result.job_id)

    def store(self) -> None:
        """All blocks, scattered."""
        self.finish([self.made.store(self.shuffled(), self.shuffled())])

    def load(self) -> None:
        """All blocks, scattered."""
        self.finish([self.made.load(self.shuffled(), self.shuffled())])

    def both(self) -> None:
        """One half of the blocks down, the other up, at once."""
        jobs = [
            self.made.store(self.shuffled(0), self.shuffled(0)),
            self.made.load(self.shuffled(1), self.shuffled(1)),
        ]
        self.finish(jobs)

    def close(self) -> None:
        """Frees the memory."""
        self.made.close()
        self.pool.close()


def paths_taken() -> list[str]:
    """The latest plan's path of a store and of a load."""
    import kvpolicy_cuda

    plans = kvpolicy_cuda.describe()["devices"]["cuda:0"]["plans"]
    return [plans[-1].get(way, "").partition(":")[0] for way in ("store", "load")]


def check_speed() -> tuple[list[str], list[dict[str, Any]]]:
    """The table of ratios; what misses its target, and every figure."""
    import torch

    down, up = reference(to_host=True), reference(to_host=False)
    say(
        f"  one pinned copy of {REFERENCE_BYTES / 2**30:.0f} GiB: ",
    )
    say(f"    store {down / 1e9:.1f} GB/s, load {up / 1e9:.1f} GB/s")
    missed: list[str] = []
    rows: list[dict[str, Any]] = [{"name": "reference", "store": down, "load": up}]

    def judge(name: str, value: float, target: float, least: bool = True) -> str:
        good = value >= target if least else value <= target
        if not good:
            missed.append(f"{name}: {value:.2f}, target {target:.2f}")
        return f"{value:5.2f} ({'ok' if good else 'MISSED'}, {target:.2f})"

    for name, shape, least_down, least_up in TIMED:
        timed = Timed(shape)
        store, load = seconds_of(timed.store), seconds_of(timed.load)
        ratios = timed.bytes / store / down, timed.bytes / load / up
        ways = paths_taken()
        said = [
            judge(f"{name}, {way}", ratio, target)
            for way, ratio, target in zip(
                ("store", "load"), ratios, (least_down, least_up), strict=True
            )
        ]
        say(f"  {name:24} store {said[0]} {ways[0]:7} load {said[1]} {ways[1]}")
        rows.append({"name": name, "store": ratios[0], "load": ratios[1], "paths": ways})
        if name.startswith("slab"):
            both = seconds_of(timed.both)
            gain = timed.bytes / both / max(timed.bytes / store, timed.bytes / load)
            say(f"  {'both directions at once':24} {judge('both directions', gain, 1.5)} x one way")
            rows.append({"name": "both", "gain": gain})
        if name == "canonical NHD, 1 KiB":
            ids = timed.everything[:64]  # 64 blocks of 48 layers and 16 tokens: 49,152 runs

            found = []
            for _ in range(1 + REPEATS):
                begun = time.perf_counter()
                job = timed.made.store(ids, ids)
                found.append(1e3 * (time.perf_counter() - begun))
                timed.finish([job])
            told = judge("submission of 49,152 runs, ms", min(found[1:]), 1.0, least=False)
            say(f"  {'49,152 runs submitted':24} {told} ms of host time")
            rows.append({"name": "submit", "milliseconds": found[1:]})
        timed.close()
        del timed
        torch.cuda.empty_cache()
    return missed, rows


def main(words: Sequence[str] | None = None) -> int:
    """Runs the checks; see the module for the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--only", choices=["bytes", "speed"], help="one of the two parts")
    args = parser.parse_args(words)
    begun = time.perf_counter()
    import torch

    if not torch.cuda.is_available():
        say(f"torch {torch.__version__} has no CUDA device here; nothing was run")
        return 3
    with checkout():
        import kvpolicy_cuda

        found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            **kvpolicy_cuda.describe(),
            "calibration": kvpolicy_cuda.calibration(anew=True),
        }
        for name in ("device", "torch", "driver", "kernels", "calibration"):
            say(f"{name}: {found[name] or 'as they should be'}")
        if args.only != "speed":
            say("bytes, against the core's own copy on the CPU")
            found["wrong"] = check_bytes(CudaRig())
        if args.only != "bytes" and not found.get("wrong"):
            say("speed, as ratios to one pinned copy (target)")
            found["missed"], found["figures"] = check_speed()
    found["seconds"] = time.perf_counter() - begun
    for line in (*found.get("wrong", ()), *found.get("missed", ())):
        say(f"  {line}")
    say(f"{found['seconds']:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if found.get("wrong") else 2 if found.get("missed") else 0


if __name__ == "__main__":
    sys.exit(main())
