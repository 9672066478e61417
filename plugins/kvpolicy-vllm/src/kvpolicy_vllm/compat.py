"""Every name of vLLM that is not a stable interface, and the versions that have them.

Nothing else in this package reaches into vLLM's internals. What is missing is refused by name at
start-up, so that a new vLLM fails with a sentence and never in the middle of a transfer.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvpolicy_vllm.errors import VLLMConfigError, VLLMVersionError

TESTED = ("0.28", "0.32")
"""Versions against which the end-to-end suite runs."""
UNTESTED = ("0.29", "0.30", "0.31", "0.33")
"""Versions whose code was read and agrees; used with a warning."""

LOGGER = "vllm.kvpolicy"
"""vLLM shows the messages of loggers below its own, and of others only warnings."""

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_V1}.offloading"
# "a|b": one of these, since vLLM has renamed it.
_NAMES: Mapping[str, tuple[str, ...]] = {
    f"{_V1}.offloading_connector": (
        "OffloadingConnector.get_required_kvcache_layout",
        "OffloadingConnector.build_connector_worker_meta",
        "OffloadingConnector.update_connector_output",
        "OffloadingConnector.get_block_ids_with_load_errors",
    ),
    f"{_OFFLOADING}.worker": (
        "OffloadingConnectorWorker._init_worker",
        "OffloadingConnectorWorker.get_finished",
    ),
    f"{_OFFLOADING}.scheduler": ("OffloadingConnectorScheduler",),
    f"{_OFFLOADING}.common": ("OffloadingWorkerMetadata.aggregate",),
    f"{_OFFLOADING}.metrics": ("OffloadingConnectorStats.increase_counter",),
    "vllm.v1.kv_offload.base": (
        "OffloadingSpec",
        "OffloadingWorker",
        "TransferResult",
        "get_offload_group_idx",
    ),
    "vllm.v1.kv_offload.cpu.common": ("CPULoadStoreSpec",),
    "vllm.v1.kv_offload.cpu.manager": (
        "CPUOffloadingManager._get_load_store_spec",
        "CPUOffloadingManager._free_chunk|CPUOffloadingManager._free_block",
    ),
    "vllm.v1.kv_offload.cpu.policies.base": ("ChunkStatus|BlockStatus",),
    "vllm.v1.kv_offload.cpu.spec": ("CPUOffloadingSpec.build_metric_definitions",),
    "vllm.v1.attention.selector": ("get_attn_backend",),
    "vllm.v1.attention.backend": (
        "AttentionBackend.supported_kv_cache_layouts|AttentionBackend.indexes_kv_by_block_stride",
    ),
    "vllm.distributed.parallel_state": ("get_world_group", "get_inner_dp_world_group"),
    "vllm.config": ("set_current_vllm_config",),
}
_CPU_NAMES: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.attention.backends.cpu_attn": ("_get_attn_isa",)
}


@attrs.frozen(kw_only=True)
class Backend:
    """What vLLM says of its attention backend, from the configuration alone.

    Attributes:
        name: vLLM's name of it.
        platform: "cpu", "cuda", ...
        layouts: layout names that its kernels take; None: it declares none.
        stride_aware: whether its kernels follow a block's stride.
        nhd: whether vLLM would lay out tokens before heads, where no connector asks.
    """

    name: str
    platform: str
    layouts: tuple[str, ...] | None = None
    stride_aware: bool = True
    nhd: bool = False


# Versions.


def vllm_version() -> str:
    """The installed vLLM's version, whichever distribution it came in."""
    return str(importlib.import_module("vllm").__version__)


def version_rule(version: str) -> str | None:
    """None for a tested version, a warning for an untested one.

    Raises:
        VLLMVersionError: a version with which the connector is known or likely not to work.
    """
    found = re.match(r"(\d+\.\d+)", version)
    release = found[1] if found else version
    if release in TESTED:
        return None
    tested = ", ".join(TESTED)
    if release in UNTESTED:
        return f"vLLM {version} is untested with this connector (tested: {tested})"
    raise VLLMVersionError(
        f"vLLM {version} is not supported by this connector; tested: {tested}; used with a "
        f"warning: {', '.join(UNTESTED)}; install one of these"
    )


def missing_names(names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Those of ``module -> dotted attributes`` that are not there; "a|b" is there if one is."""
    missing = []
    for module, attributes in names.items():
        try:
            owner: Any = importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{module} ({error})")
            continue
        missing += [
            f"{module}.{dotted}"
            for dotted in attributes
            if not any(_has(owner, one) for one in dotted.split("|"))
        ]
    return missing


def _has(owner: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        owner = getattr(owner, part, None)
    return owner is not None


def check_vllm(logger: logging.Logger) -> None:
    """Refuses a vLLM that cannot work, and warns of one that nobody has tried.

    Raises:
        VLLMVersionError: its version, or the names that it lacks.
    """
    version = vllm_version()
    warning = version_rule(version)
    names = dict(_NAMES) | (dict(_CPU_NAMES) if _platform() == "cpu" else {})
    if missing := missing_names(names):
        raise VLLMVersionError(
            f"vLLM {version} lacks what this connector needs: {'; '.join(missing)}"
        )
    if warning:
        logger.warning("kvpolicy: %s", warning)


def check_attributes(owner: object, *names: str) -> None:
    """Refuses an object of vLLM's that lacks attributes which only its constructor sets.

    Raises:
        VLLMVersionError: the first that is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            raise VLLMVersionError(
                f"vLLM {vllm_version()} lacks what this connector needs: "
                f"{type(owner).__module__}.{type(owner).__name__} has no {name}"
            )


def has_layout_names() -> bool:
    """Whether this vLLM resolves a named layout (0.29+), rather than asking for slabs (0.28)."""
    backend = importlib.import_module("vllm.v1.attention.backend").AttentionBackend
    return hasattr(backend, "supported_kv_cache_layouts")


def has_request_failures() -> bool:
    """Whether a failed load can be reported by its request (0.30+), rather than by its blocks."""
    base = importlib.import_module(f"{_V1}.base")
    return hasattr(base.KVConnectorBase_V1, "get_transfer_results")


def _platform() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


# The cache and the backend.


def offloading_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """The cache groups that vLLM's scheduler offloads, in its order."""
    module = importlib.import_module(f"{_OFFLOADING}.config")
    if hasattr(module, "get_offloading_group_ids"):
        return tuple(module.get_offloading_group_ids(kv_cache_config))
    return tuple(range(len(kv_cache_config.kv_cache_groups)))


def attention_backend(vllm_config: Any) -> Backend:
    """The backend that vLLM selects for this configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = vllm_config.model_config, vllm_config.cache_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla
        )
        if has_layout_names():
            layouts = backend.supported_kv_cache_layouts()
            names = None if layouts is None else tuple(layout.name for layout in layouts)
            hnd = ("LBHNC", "BLHNC", "BHLNC")
            nhd = names is not None and not any(name in hnd for name in names)
            return Backend(name=backend.get_name(), platform=_platform(), layouts=names, nhd=nhd)
        # The V2 runner never asks for slabs.
        strides = backend.indexes_kv_by_block_stride() and not vllm_config.use_v2_model_runner
        return Backend(
            name=backend.get_name(),
            platform=_platform(),
            stride_aware=bool(strides),
            nhd=backend.get_required_kv_cache_layout() == "NHD",
        )


def cpu_instruction_set(vllm_config: Any, block_size: int, head_size: int) -> str:
    """The instruction set by which the CPU backend arranges the values of a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    return str(_get_attn_isa(vllm_config.model_config.dtype, block_size, head_size, cache_dtype))


def resolved_layout(vllm_config: Any) -> str:
    """The layout in which vLLM has laid out a cache per layer (0.28), or any cache (0.29+)."""
    if has_layout_names():
        return str(vllm_config.cache_config.kv_cache_layout)
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    return str(utils.get_kv_cache_layout())


def slab_order(backend: Any) -> str:
    """The axes of a slab of vLLM 0.28, outermost first, as a layout's name.

    Args:
        backend: the attention backend's class that vLLM hands over with the slab.
    """
    try:
        order = tuple(backend.get_kv_cache_stride_order(include_num_layers_dimension=True))
    except (AttributeError, NotImplementedError):
        order = tuple(range(5))
    return "".join("LBHNC"[axis] for axis in order)


# Ranks.


def gather(value: Any) -> list[Any]:
    """What every rank of this engine gives, in the order of ranks; every rank must call it."""
    import torch
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_inner_dp_world_group()
    except AssertionError:
        group = parallel_state.get_world_group()
    if group.world_size == 1:
        return [value]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


# The scheduler's book of chunks.


def manager_names(manager: Any) -> Mapping[str, str]:
    """What this vLLM calls the manager's chunks, which 0.28 and 0.29 called blocks."""
    unit = "chunk" if hasattr(manager, "_free_chunk") else "block"
    names = {
        "free": f"_free_{unit}",
        "evictable": f"_num_evictable_cache_{unit}s",
        "pending": f"_num_write_pending_{unit}s",
        "allocated": f"_num_allocated_{unit}s",
    }
    check_attributes(manager, "_policy", "_free_list", *names.values())
    return names


def chunk_id(chunk: Any) -> int:
    """The host chunk that one of the manager's entries stands for."""
    return int(chunk.chunk_id if hasattr(chunk, "chunk_id") else chunk.block_id)


def new_chunk(number: int) -> Any:
    """An entry for a host chunk, not ready yet."""
    base = importlib.import_module("vllm.v1.kv_offload.cpu.policies.base")
    return getattr(base, "ChunkStatus", getattr(base, "BlockStatus", None))(number)


# What the keys of a pool in a file mean.


def key_meaning(vllm_config: Any) -> Mapping[str, str | int]:
    """What another engine must agree on for its block hashes to mean the same tokens and weights.

    Raises:
        VLLMConfigError: hashes or weights that no other process can reproduce.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    algorithm = str(cache.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if not algorithm.startswith("sha256"):
        raise VLLMConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose hashes may collide; a pool_file "
            "needs sha256 or sha256_cbor"
        )
    if seed is None and not has_default_seed():
        raise VLLMConfigError(
            f"vLLM {vllm_version()} seeds its block hashes at random, so that no other engine "
            "could find what is in the pool_file; set PYTHONHASHSEED, the same for all of them"
        )
    load_format = vllm_config.load_config.load_format
    if getattr(load_format, "value", load_format) == "dummy":
        raise VLLMConfigError(
            "load_format is 'dummy', whose weights are random, so that no later engine could use "
            "what is in the pool_file; load the model's own weights, or leave pool_file out"
        )
    text = model.hf_text_config
    described = json.dumps(text.to_dict(), sort_keys=True, default=str)
    return {
        "model": str(model.model),
        "model_config": short_digest(described),
        "weights": _weights(model),
        "quantization": str(model.quantization or ""),
        "hash_algorithm": algorithm,
        "hash_seed": "" if seed is None else short_digest(seed),
    }


def short_digest(text: str) -> str:
    """What tells texts apart, for a pool's contents; 64 bits in hex."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def has_default_seed() -> bool:
    """Whether block hashes are the same in every process without PYTHONHASHSEED (0.29+)."""
    return _has(importlib.import_module("vllm.v1.core.kv_cache_utils"), "DEFAULT_NONE_HASH_SEED")


def _weights(model: Any) -> str:
    """Names the weights: a commit, else a local folder's files by name, size and time."""
    folder = Path(str(model.model))
    if not folder.is_dir():
        commit = getattr(model.hf_config, "_commit_hash", None)
        return str(commit or model.revision or "main")
    files = [
        (path.name, found.st_size, found.st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")
        for found in [path.stat()]
    ]
    return short_digest(json.dumps(files))
