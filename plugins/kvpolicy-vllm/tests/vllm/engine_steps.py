"""Runs one engine as `engine.py` does, with steps for what a pool in a file and failures need."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from engine import STEPS, _sampling, generate, main, prompt
from models import MODELS, QWEN3

PATIENCE_SECONDS = 120
NO_BLOCK = [9, 20]  # a prompt that fills no block, so that nothing of it is stored


def counters(llm: Any) -> dict[str, float]:
    """Our own counters, and vLLM's of what we bring; after some steps in which nothing is moved.

    Those of a step arrive in the one after it.
    """
    generate(llm, NO_BLOCK)
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if hasattr(metric, "value") and any(
            word in name for word in ("kvpolicy", "kv_offload", "external")
        ):
            found[name] = found.get(name, 0) + metric.value
    return found


def outcome(llm: Any, one: list[int]) -> list[Any]:
    """Why a request ended, and how many tokens it came to."""
    (output,) = llm.generate([{"prompt_token_ids": prompt(*one)}], _sampling(), use_tqdm=False)
    return [output.outputs[0].finish_reason, len(output.outputs[0].token_ids)]


def _asked(worker: Any) -> dict[str, int]:
    from acme_faults import plugin

    return plugin.bytes


def asked(llm: Any) -> list[dict[str, int]]:
    """Bytes that each rank was to load and to store, as acme-faults has seen it."""
    return llm.collective_rpc(_asked)


def die(llm: Any, records: int) -> None:
    """Ends this process as a crash would, once the pool has that many whole records."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    pool = get_kv_transfer_group().offload.host
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        pool.collect()
        if sum(record.complete for record in pool.records()) >= records:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    raise TimeoutError(f"the pool has {pool.records()}")


def linger(llm: Any, folder: str) -> bool:
    """Stays until there is a file ``go`` in the folder; makes one named ``here`` first."""
    (Path(folder) / "here").touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if (Path(folder) / "go").exists():
            return True
        time.sleep(0.05)
    raise TimeoutError("nobody said that it may go")


MODELS["one-head"] = QWEN3 | {"num_key_value_heads": 1}
MODELS["other-angles"] = QWEN3 | {"rope_theta": 20000.0}  # a cache of the same shape
STEPS.update({step.__name__: step for step in (counters, outcome, asked, die, linger)})

if __name__ == "__main__":
    main()
