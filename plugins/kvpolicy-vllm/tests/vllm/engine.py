"""Runs one engine, does what the request on standard input says, and prints one JSON object.

A process of its own for each engine: vLLM keeps global state that a second engine would inherit.

The request: {"models": folder, "model": name, "dtype": name, "connector": null or a
kv_transfer_config, "layouts": null or what the CPU backend shall declare, "engine": {arguments of
LLM},
"steps": [[name of a step below, its arguments ...], ...]}.
"""

from __future__ import annotations

import json
import sys
import time
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


def generate(llm: Any, *prompts: list[int]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=16, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt(*one)} for one in prompts]
    found = []
    for output in llm.generate(asked, params, use_tqdm=False):
        (answer,) = output.outputs
        tokens = list(answer.token_ids)
        logprobs = [step[t].logprob for t, step in zip(tokens, answer.logprobs, strict=True)]
        found.append({"tokens": tokens, "logprobs": logprobs, "cached": output.num_cached_tokens})
    return found


def reset(llm: Any) -> bool:
    return llm.reset_prefix_cache()


def metrics(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            name = metric.name.removeprefix("vllm:")
            found[name] = found.get(name, 0) + metric.value
    wanted = ("kv_offload", "external", "preemptions")
    return {name: value for name, value in found.items() if any(word in name for word in wanted)}


def _offload() -> Any:
    """The kvpolicy connector of an engine in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().offload


def explain(llm: Any) -> dict[str, Any]:
    return _offload().explain()


def _held() -> list[int]:
    host = _offload().host
    return [slot for slot in range(host.num_slots) if host.holds(slot)]


def corrupt(llm: Any) -> int:
    """Puts into each stored record what its neighbour holds; returns how many there are."""
    held, rows = _held(), _offload().host.rows
    rows[held] = rows[held[1:] + held[:1]]
    return len(held)


def lose(llm: Any, nth: int) -> str:
    """Stores another record where the nth one is, so that loading that one is refused."""
    offload = _offload()
    job = offload.store([0], [_held()[nth]], next(iter(offload.formats)), keys=[b"another"])
    (result,) = offload.wait([job], timeout=60)
    return result.error


STEPS = {step.__name__: step for step in (generate, reset, metrics, explain, corrupt, lose)}


def declare_layouts(names: list[str]) -> None:
    """Makes the CPU backend declare layouts: its kernels follow strides that it does not offer."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = tuple(KVCacheLayout[name] for name in names)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


def main() -> None:
    request = json.load(sys.stdin)
    from vllm import LLM

    if request["layouts"]:
        declare_layouts(request["layouts"])
    began = time.perf_counter()
    llm = LLM(
        model=str(make_model(Path(request["models"]), request["model"], request["dtype"])),
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=1024,
        kv_transfer_config=request["connector"],
        **request["engine"],
    )
    try:
        results = [STEPS[name](llm, *arguments) for name, *arguments in request["steps"]]
    finally:
        llm.llm_engine.engine_core.shutdown()
    answer = {"results": results, "seconds": time.perf_counter() - began}
    sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
