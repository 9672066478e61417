"""Runs one engine, does what the request on standard input says, and prints one JSON object.

A process of its own for each engine: vLLM keeps global state that a second engine would inherit.

The request: {"models": folder, "model": name, "dtype": name, "connector": null or a
kv_transfer_config, "layouts": null or what the CPU backend shall declare, "engine": {arguments of
LLM},
"steps": [[name of a step below, its arguments ...], ...]}.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models import make_model

MARK = "KVPOLICY-RESULT "


def prompt(*parts: int) -> list[int]:
    """Token ids without a pattern, none of them a special one; parts are (seed, tokens, ...)."""
    return [
        3 + (seed * 7919 + i * i * 31 + i * 17) % 1000
        for seed, tokens in zip(parts[::2], parts[1::2], strict=True)
        for i in range(tokens)
    ]


def _sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=16, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False
    )


_first: dict[tuple[int, ...], int] = {}


def generate(llm: Any, *prompts: list[int]) -> list[dict[str, Any]]:
    found = _answers(llm, [prompt(*one) for one in prompts])
    _first.update({tuple(p): answer["tokens"][0] for p, answer in zip(prompts, found, strict=True)})
    return found


def follow(llm: Any, one: list[int]) -> list[dict[str, Any]]:
    """Generates behind a prompt and the first token of what came to it before."""
    return _answers(llm, [[*prompt(*one), _first[tuple(one)]]])


def _answers(llm: Any, prompts: list[list[int]]) -> list[dict[str, Any]]:
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    found = []
    for output in llm.generate(asked, _sampling(), use_tqdm=False):
        (answer,) = output.outputs
        tokens = list(answer.token_ids)
        logprobs = [step[t].logprob for t, step in zip(tokens, answer.logprobs, strict=True)]
        found.append({"tokens": tokens, "logprobs": logprobs, "cached": output.num_cached_tokens})
    return found


def reset(llm: Any, connector: bool = False) -> bool:
    return llm.reset_prefix_cache(reset_connector=connector)


def metrics(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            name = metric.name.removeprefix("vllm:")
            found[name] = found.get(name, 0) + metric.value
    wanted = ("kv_offload", "external", "preemptions")
    return {name: value for name, value in found.items() if any(word in name for word in wanted)}


# What the ranks do; each function runs on every rank, wherever its process is.


def _every_rank(llm: Any, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return llm.collective_rpc(function, args=arguments)


def _connector() -> Any:
    """Ours, in this rank's process; perhaps one of several."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    (found,) = [one for one in getattr(group, "_connectors", [group]) if hasattr(one, "offload")]
    return found


def _held(offload: Any) -> list[int]:
    return [slot for slot in range(offload.host.num_slots) if offload.host.holds(slot)]


def _explain(worker: Any) -> dict[str, Any]:
    return _connector().offload.explain()


def _corrupt(worker: Any) -> int:
    offload = _connector().offload
    held, rows = _held(offload), offload.host.rows
    rows[held[1:]] = rows[held[:1]]  # the same, whether one rank of a shared pool does it or all
    return len(held)


def _lose(worker: Any, nth: int) -> str:
    offload = _connector().offload
    job = offload.store([0], [_held(offload)[nth]], next(iter(offload.formats)), keys=[b"another"])
    (result,) = offload.wait([job], timeout=60)
    return result.error


def _stored(worker: Any) -> list[str]:
    offload = _connector().offload
    rows = offload.host.rows[:, : offload.record_bytes]
    return [hashlib.sha256(rows[slot].numpy().tobytes()).hexdigest() for slot in _held(offload)]


def _placed(worker: Any) -> dict[str, list[int]]:
    pages = _connector().offload.registration.pages
    return {name: [at.page.offset, at.page.block_stride] for name, at in pages.items()}


def _acme(worker: Any, word: str) -> Any:
    from acme_engine import plugin

    return getattr(plugin, word)()


def explain(llm: Any) -> dict[str, Any]:
    return _every_rank(llm, _explain)[0]


def corrupt(llm: Any) -> int:
    """Puts what the first stored record holds into all others; returns how many there are."""
    return _every_rank(llm, _corrupt)[0]


def lose(llm: Any, nth: int) -> str:
    """Stores another record where the nth one is, so that loading that one is refused."""
    return max(_every_rank(llm, _lose, nth))


def stored(llm: Any) -> list[str]:
    """Digests of the stored records, by slot."""
    return _every_rank(llm, _stored)[0]


def placed(llm: Any) -> dict[str, list[int]]:
    """Layer -> bytes to its first page, bytes between its pages."""
    return _every_rank(llm, _placed)[0]


# What needs the engine in this process.


def abort(llm: Any, one: list[int], direction: str, reset_all: bool) -> dict[str, Any]:
    """Ends a request while acme-engine holds a transfer of it back, and lets go a second later.

    Returns:
        The directions held when the request ended, and what resetting all caches said.
    """
    engine = llm.llm_engine
    _every_rank(llm, _acme, "hold")
    engine.add_request("aborted", {"prompt_token_ids": prompt(*one)}, _sampling())
    for _ in range(100):  # its first step may only ask whether the chunks are there
        engine.step()
        held = _every_rank(llm, _acme, "waiting")[0]
        if direction in held:
            break
    engine.abort_request(["aborted"])
    found = {"held": held, "reset": reset(llm, connector=True) if reset_all else None}
    # Later steps wait for the transfer, so another thread lets it go.
    threading.Timer(1, _every_rank, (llm, _acme, "let_go")).start()
    return found


def idle(llm: Any) -> dict[str, int]:
    """What the connector's two sides have under way, and vLLM's free blocks."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    ours = _connector()
    return {
        "scheduler jobs": len(scheduler.connector.connector_scheduler._jobs),
        "requests": len(scheduler.requests),
        "worker jobs": len(ours.connector_worker.worker._jobs),
        "loads": len(ours.connector_worker._load_jobs),
        "blocks in use": -scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        + scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        - 1,  # the block that stands for none
    }


STEPS = {
    step.__name__: step
    for step in (
        *(generate, follow, reset, metrics, explain, corrupt, lose, stored, placed),
        *(abort, idle),
    )
}


def declare_layouts(names: list[str]) -> None:
    """Makes the CPU backend declare layouts: its kernels follow strides that it does not offer."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if hasattr(CPUAttentionBackend, "supported_kv_cache_layouts"):
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layouts = tuple(KVCacheLayout[name] for name in names)
        CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)
        return
    # vLLM 0.28 asks for the order of a slab, and takes blocks outermost for being stride-aware.
    slab = tuple("LBHNC".index(axis) for axis in names[-1])

    def order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return slab if include_num_layers_dimension else (0, 1, 2, 3)

    CPUAttentionBackend.get_kv_cache_stride_order = staticmethod(order)


def main() -> None:
    request = json.load(sys.stdin)
    from vllm import LLM

    if request["layouts"]:
        declare_layouts(request["layouts"])
    began = time.perf_counter()
    arguments = {"max_model_len": 1024} | request["engine"]
    llm = LLM(
        model=str(make_model(Path(request["models"]), request["model"], request["dtype"])),
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=request["connector"],
        **arguments,
    )
    try:
        results = [STEPS[name](llm, *arguments) for name, *arguments in request["steps"]]
    finally:
        llm.llm_engine.engine_core.shutdown()
    answer = {"results": results, "seconds": time.perf_counter() - began}
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
