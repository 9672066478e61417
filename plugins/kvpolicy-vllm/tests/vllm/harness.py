"""What the end-to-end tests share: an engine in a process of its own, and what to hold it to."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# A folder named vllm on the path, such as this one, has no file of its own.
_VLLM = importlib.util.find_spec("vllm")
NEEDS_VLLM = [
    pytest.mark.skipif(
        _VLLM is None or _VLLM.origin is None,
        reason="vLLM is not installed here; make test-vllm has it",
    ),
    pytest.mark.slow,
]

HERE = Path(__file__).parent
SHARED = Path("/dev/shm")
MARK = "KVPOLICY-RESULT "
LONG, SHORT = [1, 600], [2, 300]
BLOCK = 128  # the CPU backend's own block size
RECORD_BYTES = 4 * 4 * BLOCK * 2 * 64 * 2  # layers, heads, tokens, K and V, head size, bfloat16
TOLERANCE = 0.02
SLABS = ["LBHNC", "BLHNC"]  # what the CPU backend declares where a slab is to be possible
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def connector(*, module: bool = False, **extra: Any) -> dict[str, Any]:
    """A kv_transfer_config; ``extra`` goes into its kv_connector_extra_config."""
    named = {
        "kv_connector": "KVPolicyConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 * 2**20,
            "kvpolicy": {"plugins": []},
        }
        | extra,
    }
    return named | ({"kv_connector_module_path": "kvpolicy_vllm.connector"} if module else {})


def environment(
    *,
    in_process: bool = True,
    path: Path | None = None,
    environ: dict[str, str | None] | None = None,
) -> dict[str, str]:
    """An engine's environment; ``path`` holds installed distributions, as PYTHONPATH does.

    A variable that is None is not set.
    """
    paths = [str(path)] if path else []
    paths += [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    given = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        # Steps that run on the ranks reach them as functions.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(paths),
        **(environ or {}),
    }
    return {name: value for name, value in given.items() if value is not None}


def installed(make_folder: Callable[[str], Path], source: str, name: str) -> Path:
    """A folder with a distribution of this one, built as a wheel and installed from it.

    Args:
        make_folder: makes a new folder.
        source: where the distribution lies, beside this file.
        name: its own.
    """
    built, found = make_folder("wheel"), make_folder("installed")
    for command in (
        ("hatchling", "build", "-t", "wheel", "-d", built),
        (
            *("pip", "--disable-pip-version-check", "install", "-qq", "--no-deps", "--no-index"),
            *("--find-links", built, "--target", found, name),
        ),
    ):
        words = [sys.executable, "-m", *map(str, command)]
        done = subprocess.run(words, cwd=HERE / source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return found


def left_over() -> set[str]:
    """Names in shared memory that no process has mapped."""
    names = {path.name for path in SHARED.iterdir()}
    mapped = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended since, or is somebody else's
            mapped.append(maps.read_text())
    return {name for name in names if not any(name in text for text in mapped)}


@contextlib.contextmanager
def swept(engine_id: str = ""):
    """Removes what vLLM itself leaves behind: its message queues, where ranks were processes.

    An engine whose id is given must have left nothing that bears it.
    """
    before = left_over()
    try:
        yield
    finally:
        theirs = {name for name in left_over() - before if name.startswith("vllm_dist_")}
        ours = {path.name for path in SHARED.iterdir() if engine_id and engine_id in path.name}
        for name in theirs | ours:
            (SHARED / name).unlink(missing_ok=True)
    assert not ours, f"left in {SHARED}: {ours}"


def identified(config: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """The kv_transfer_config of an engine with an id of its own, and that id."""
    engine_id = f"end-to-end-{uuid.uuid4()}"
    return config and {"engine_id": engine_id} | config, engine_id


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
    script: str = "engine.py",
    **engine: Any,
) -> tuple[list[Any], str]:
    """The steps' results and what the engine logged; if it is to end badly, no results."""
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
    with swept(engine_id):
        done = subprocess.run(
            [sys.executable, str(HERE / script)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment(in_process=in_process, path=path, environ=environ),
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


def seconds(log: str) -> float:
    """How long the engine lived, from its making to its end."""
    (answer,) = [line for line in log.splitlines() if line.startswith(MARK)]
    return json.loads(answer.removeprefix(MARK))["seconds"]


def paragraph(log: str) -> str:
    """The one line in which the connector says what start-up came to."""
    (found,) = [line for line in log.splitlines() if "kvpolicy: decided" in line]
    return found


def moved(metrics: dict[str, float], log: str = "") -> str:
    """The figures of a run, for people."""
    return (
        f"{metrics['external_prefix_cache_hits']:.0f} tokens hit, "
        f"{metrics['kv_offload_store_bytes']:,.0f} B stored, "
        f"{metrics['kv_offload_load_bytes']:,.0f} B loaded"
        + (f", {seconds(log):.1f} s" if log else "")
    )


def assert_same(answers: list[dict], expected: list[dict]) -> None:
    for answer, plain in zip(answers, expected, strict=True):
        assert answer["tokens"] == plain["tokens"]
        pairs = zip(answer["logprobs"], plain["logprobs"], strict=True)
        assert max(abs(one - other) for one, other in pairs) <= TOLERANCE


def assert_changed(answers: list[dict], expected: list[dict]) -> None:
    for answer, plain in zip(answers, expected, strict=True):
        moved = abs(answer["logprobs"][0] - plain["logprobs"][0])
        assert answer["tokens"][0] != plain["tokens"][0] or moved > 5 * TOLERANCE
