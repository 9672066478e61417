"""vLLM's configuration and cache specs as kvpolicy's values; nothing is decided here.

vLLM's objects are read by attribute and their kinds by exact class name, so that this module
imports nothing of vLLM, and a kind that it does not know is refused rather than taken for its
parent class.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import kvpolicy
from kvpolicy_vllm.compat import Backend
from kvpolicy_vllm.errors import VLLMConfigError

_HEADS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_LATENT = ("MLAAttentionSpec",)
_UNIFORM = "UniformTypeKVCacheSpecs"

OPTIONS = ("cpu_bytes_to_use", "canonical_layout", "kvpolicy", "pool_file")
"""The names of ``kv_connector_extra_config`` that are read here, beside vLLM's own."""

LayerSpec = kvpolicy.AttentionSpec | kvpolicy.LatentSpec
InstructionSet = Callable[[int, int], str]
"""(block size, head size) -> the instruction set that arranges a block's values."""


def group_name(group_id: int) -> str:
    """How kvpolicy calls vLLM's cache group."""
    return f"group-{group_id}"


def extra_config(vllm_config: Any) -> Mapping[str, Any]:
    """``kv_connector_extra_config``.

    Raises:
        VLLMConfigError: a ``canonical_layout``, ``kvpolicy`` or ``pool_file`` of the wrong type, or
            a name that is nearly one of ours.
    """
    extra: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
    canonical, options = extra.get("canonical_layout", False), extra.get("kvpolicy", {})
    pool_file = extra.get("pool_file")
    for name in extra:
        if name not in OPTIONS and (meant := difflib.get_close_matches(name, OPTIONS, 1, 0.8)):
            raise VLLMConfigError(
                f"kv_connector_extra_config has no {name!r}; did you mean {meant[0]!r}?"
            )
    if not isinstance(canonical, bool):
        raise VLLMConfigError(f"canonical_layout is true or false, not {canonical!r}")
    if not isinstance(options, Mapping):
        raise VLLMConfigError(
            f"kv_connector_extra_config['kvpolicy'] is a mapping of options, not {options!r}"
        )
    if pool_file is not None and not (isinstance(pool_file, str) and pool_file):
        raise VLLMConfigError(f"pool_file is the path of a file, not {pool_file!r}")
    return extra


def grid(vllm_config: Any, platform: str) -> kvpolicy.ParallelGrid:
    """The engine's ranks.

    Raises:
        VLLMConfigError: parallelism that this version of the connector does not serve.
    """
    parallel = vllm_config.parallel_config
    dcp, pcp = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    if platform == "cpu" and dcp * pcp > 1:
        raise VLLMConfigError(
            "context parallelism on the CPU: its kernels permute values across the tokens of a "
            "block, which cannot be spread over ranks; set the context-parallel sizes to 1"
        )
    return kvpolicy.ParallelGrid(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dcp=dcp,
        pcp=pcp,
        cp_interleave=parallel.cp_kv_cache_interleave_size,
    )


def layer_spec(
    spec: Any, tp: int, model_kv_heads: int, kernel_block_size: int | None
) -> LayerSpec | kvpolicy.Refusal:
    """One layer's cache spec, as the whole model has it, or why it cannot be told.

    Args:
        spec: vLLM's, of one rank.
        tp: tensor-parallel ranks.
        model_kv_heads: KV heads of the model's attention layers, before TP.
        kernel_block_size: tokens that the kernel addresses; None: the block.
    """
    kind = type(spec).__name__
    if kind not in (*_HEADS, *_LATENT):
        return kvpolicy.Refusal(
            "unknown-cache-spec",
            f"vLLM's {kind} is not known to this connector; known: "
            f"{', '.join((*_HEADS, *_LATENT))}",
        )
    tokens = tokens_per_state(spec)
    if tokens != 1 or spec.num_head_slots not in (None, spec.num_kv_heads):
        return kvpolicy.Refusal(
            "packing-unknown",
            f"the backend packs {tokens} tokens into a state and "
            f"{spec.num_kv_heads} heads into {spec.num_head_slots} slots; one each is possible",
        )
    padding = spec.page_size_bytes - spec.unpadded_page_size_bytes
    row = spec.state_content_size_bytes
    common = {
        "block_size": spec.block_size,
        "page_padding": padding,
        "kernel_block_size": kernel_block_size,
    }
    if kind in _LATENT:
        return kvpolicy.LatentSpec(row_bytes=row * spec.num_kv_heads, **common)
    heads = total_heads(spec.num_kv_heads, tp, model_kv_heads)
    if isinstance(heads, kvpolicy.Refusal):
        return heads
    itemsize = spec.dtype.itemsize
    scales = row - (spec.head_size + spec.head_size_v) * itemsize
    if scales < 0 or scales % 2:
        return kvpolicy.Refusal(
            "packing-unknown",
            f"a row of {row} B does not hold a key of {spec.head_size} and a value of "
            f"{spec.head_size_v} elements of {itemsize} B with a scale for each",
        )
    return kvpolicy.AttentionSpec(
        total_kv_heads=heads,
        head_size=spec.head_size,
        v_head_size=spec.head_size_v,
        itemsize=itemsize,
        scale_bytes=scales // 2,
        **common,
    )


def total_heads(held: int, tp: int, model_kv_heads: int) -> int | kvpolicy.Refusal:
    """A layer's KV heads before TP: vLLM's specs tell only what one rank holds."""
    if held > 1 or tp == 1:
        return held * tp  # every rank holds as many
    if model_kv_heads <= tp:
        return model_kv_heads  # one head, perhaps on several ranks
    return kvpolicy.Refusal(
        "heads-unknown",
        f"a rank holds 1 KV head at tp {tp}, but the model has {model_kv_heads}; how many this "
        "layer has in all cannot be told",
    )


def _specs_of(group: Any) -> Mapping[str, Any]:
    spec = group.kv_cache_spec
    if type(spec).__name__ == _UNIFORM:
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def model_order(names: Iterable[str]) -> list[str]:
    """Layer names by the numbers in them: a group's own order follows vLLM's version."""

    def key(name: str) -> list[tuple[bool, int, str]]:
        parts = re.split(r"(\d+)", name)
        return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]

    return sorted(names, key=key)


Stage = Mapping[str, Mapping[str, LayerSpec | kvpolicy.Refusal]]
"""Group name -> layer name -> its spec, of the layers that one rank holds."""


def stage(
    kv_cache_config: Any,
    group_ids: Iterable[int],
    tp: int,
    model_kv_heads: int,
    kernel_blocks: Mapping[str, int],
) -> Stage:
    """What one rank's cache says of its layers, each as the whole model has it.

    Args:
        kv_cache_config: vLLM's, of one rank.
        group_ids: the groups that are offloaded.
        tp: tensor-parallel ranks.
        model_kv_heads: as for `layer_spec`.
        kernel_blocks: layer name -> kernel block size in tokens.
    """
    found = {}
    for group_id in group_ids:
        specs = _specs_of(kv_cache_config.kv_cache_groups[group_id])
        found[group_name(group_id)] = {
            name: layer_spec(specs[name], tp, model_kv_heads, kernel_blocks.get(name))
            for name in model_order(specs)
        }
    return found


def geometry(stages: Sequence[Stage], num_blocks: int) -> kvpolicy.CacheGeometry:
    """The model's cache.

    Args:
        stages: of one rank of each pipeline stage, in their order.
        num_blocks: blocks of a rank's cache.

    Raises:
        CertificationError: layers that cannot be translated, one reason for each.
        VLLMConfigError: a pipeline stage without layers to offload.
    """
    groups: dict[str, list[str]] = {}
    layers: dict[str, LayerSpec] = {}
    refusals: dict[str, kvpolicy.Refusal] = {}
    counts = []
    for number, held in enumerate(stages):
        specs = {name: spec for group in held.values() for name, spec in group.items()}
        for group, names in held.items():
            groups.setdefault(group, []).extend(names)
        for name in model_order(specs):
            found = specs[name]
            if isinstance(found, kvpolicy.Refusal):
                refusals[name] = found
            else:
                layers[name] = found
        if not specs:
            raise VLLMConfigError(
                f"pipeline stage {number} has no layer with a KV cache; lower "
                "pipeline_parallel_size"
            )
        counts.append(len(specs))
    if refusals:
        count = len(refusals) + len(layers)
        raise kvpolicy.CertificationError(
            f"{len(refusals)} of {count} layers have caches that this connector cannot translate",
            refusals,
        )
    return kvpolicy.CacheGeometry(
        layers=layers,
        num_blocks=num_blocks,
        groups=[kvpolicy.LayerGroup(name=n, layer_names=names) for n, names in groups.items()],
        stages=counts,
    )


def tokens_per_state(spec: Any) -> Any:
    """How many tokens one row of a page holds; vLLM 0.28 says it by the rows of a block."""
    if hasattr(spec, "tokens_per_state"):
        return spec.tokens_per_state
    return spec.block_size / spec.storage_block_size


def kernel_blocks(
    kv_cache_config: Any, group_ids: Iterable[int], kv_caches: Mapping[str, Any]
) -> Mapping[str, int]:
    """Layer name -> tokens of a kernel block, told by how many blocks its tensor counts."""
    found = {}
    for group_id in group_ids:
        for name, spec in _specs_of(kv_cache_config.kv_cache_groups[group_id]).items():
            if name not in kv_caches:
                continue  # the core says which layers lack a tensor
            ratio = kv_caches[name].shape[0] // kv_cache_config.num_blocks
            if ratio > 1 and spec.block_size % ratio == 0:
                found[name] = spec.block_size // ratio
    return found


def capabilities(
    backend: Backend, latent: bool, only: kvpolicy.KVCacheLayout | None = None
) -> kvpolicy.BackendCapabilities:
    """What the backend can address: from vLLM 0.29 on, exactly the layouts that it declares.

    Args:
        backend: what vLLM says; one that declares no layouts takes all that strides can say.
        latent: whether the model's caches are latents.
        only: the layout that the engine has resolved against what was asked for.
    """
    if only is not None:
        taken = {only, only.slab} if only.block_outermost else {only}
        return kvpolicy.BackendCapabilities(
            name=backend.name, stride_aware=backend.stride_aware, layouts=taken
        )
    if backend.platform == "cpu" and latent:
        # These kernels take one layout only, declare none, and crash in another (vLLM 0.32).
        return kvpolicy.BackendCapabilities(
            name=backend.name, stride_aware=False, layouts=frozenset({"LBHNC"})
        )
    return kvpolicy.BackendCapabilities(
        name=backend.name, stride_aware=backend.stride_aware, layouts=backend.layouts
    )


def engine_order(backend: Backend) -> kvpolicy.KVCacheLayout:
    """The head/token order to ask for: HND, unless the backend takes NHD layouts only."""
    return kvpolicy.KVCacheLayout.LBNHC if backend.nhd else kvpolicy.KVCacheLayout.LBHNC


def cache_dtype(vllm_config: Any) -> str:
    """The cache's element type by name: the cache's own, else the model's."""
    cache = vllm_config.cache_config.cache_dtype
    found = vllm_config.model_config.dtype if cache in (None, "auto") else cache
    return str(found).removeprefix("torch.")


def encoding(
    backend: Backend, layers: Mapping[str, LayerSpec], instruction_set: InstructionSet
) -> str:
    """How the bytes encode numbers beyond their dtype: on the CPU, the order of a block's values.

    The CPU backend permutes the values inside a (head, K or V) by its instruction set, so that
    such bytes mean something else on another machine.
    """
    if backend.platform != "cpu":
        return ""
    found = {
        instruction_set(spec.kernel_block_size, spec.head_size)
        for spec in layers.values()
        if isinstance(spec, kvpolicy.AttentionSpec)
    }
    return f"cpu-{'+'.join(sorted(found))}" if found else "cpu"


def policy_context(
    vllm_config: Any,
    cache: kvpolicy.CacheGeometry,
    backend: Backend,
    instruction_set: InstructionSet,
    layout: str | None = None,
    *,
    is_as_asked: bool = True,
) -> kvpolicy.PolicyContext:
    """Everything that policies may look at.

    Args:
        vllm_config: the configuration.
        cache: from `geometry`, or guessed from the model's config before vLLM has one.
        backend: the attention backend.
        instruction_set: asked on the CPU only.
        layout: the layout that the engine has resolved; None: not yet.
        is_as_asked: whether that is what was decided; else it is all that the backend takes, and
            the votes are cast anew.

    Raises:
        VLLMConfigError: settings that cannot be served.
        KVPolicyError: what kvpolicy itself refuses.
    """
    extra = extra_config(vllm_config)
    resolved = kvpolicy.KVCacheLayout.parse(layout) if layout else None
    latent = any(isinstance(spec, kvpolicy.LatentSpec) for spec in cache.layers.values())
    return kvpolicy.PolicyContext(
        geometry=cache,
        grid=grid(vllm_config, backend.platform),
        rank=vllm_config.parallel_config.rank,
        canonical=extra.get("canonical_layout", False),
        layout=resolved or engine_order(backend),
        backend=capabilities(backend, latent, None if is_as_asked else resolved),
        dtype=cache_dtype(vllm_config),
        encoding=encoding(backend, cache.layers, instruction_set),
        options={"kvpolicy": dict(extra.get("kvpolicy", {}))},
    )
