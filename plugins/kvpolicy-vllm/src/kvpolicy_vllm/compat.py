"""Every name of vLLM that is not a stable interface, and the versions that have them.

Nothing else in this package reaches into vLLM's internals. What is missing is refused by name at
start-up, so that a new vLLM fails with a sentence and never in the middle of a transfer.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping
from typing import Any

import attrs

from kvpolicy_vllm.errors import VLLMVersionError

TESTED = ("0.32",)
"""Versions against which the end-to-end suite runs."""
UNTESTED = ("0.30", "0.31", "0.33")
"""Versions whose code was read and agrees; used with a warning."""

LOGGER = "vllm.kvpolicy"
"""vLLM shows the messages of loggers below its own, and of others only warnings."""

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_NAMES: Mapping[str, tuple[str, ...]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": (
        "OffloadingConnector.get_required_kvcache_layout",
        "OffloadingConnector.build_connector_worker_meta",
        "OffloadingConnector.update_connector_output",
        "OffloadingConnector.get_block_ids_with_load_errors",
    ),
    f"{_OFFLOADING}.worker": ("OffloadingConnectorWorker._init_worker",),
    f"{_OFFLOADING}.scheduler": ("OffloadingConnectorScheduler",),
    f"{_OFFLOADING}.common": ("OffloadingWorkerMetadata.aggregate",),
    f"{_OFFLOADING}.config": ("get_offloading_group_ids",),
    "vllm.v1.kv_offload.base": ("OffloadingSpec", "OffloadingWorker", "TransferResult"),
    "vllm.v1.kv_offload.cpu.common": ("CPULoadStoreSpec",),
    "vllm.v1.kv_offload.cpu.manager": (
        "CPUOffloadingManager._get_load_store_spec",
        "CPUOffloadingManager._free_chunk",
    ),
    "vllm.v1.kv_offload.cpu.spec": ("CPUOffloadingSpec.build_metric_definitions",),
    "vllm.v1.attention.selector": ("get_attn_backend",),
    "vllm.v1.attention.backend": ("AttentionBackend.supported_kv_cache_layouts",),
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
    """

    name: str
    platform: str
    layouts: tuple[str, ...] | None = None


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
    """Those of ``module -> dotted attributes`` that are not there."""
    missing = []
    for module, attributes in names.items():
        try:
            owner: Any = importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{module} ({error})")
            continue
        for dotted in attributes:
            found = owner
            for part in dotted.split("."):
                found = getattr(found, part, None)
            if found is None:
                missing.append(f"{module}.{dotted}")
    return missing


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


def _platform() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def offloading_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """The cache groups that vLLM's scheduler offloads, in its order."""
    module = importlib.import_module(f"{_OFFLOADING}.config")
    return tuple(module.get_offloading_group_ids(kv_cache_config))


def attention_backend(vllm_config: Any) -> Backend:
    """The backend that vLLM selects for this configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model, cache = vllm_config.model_config, vllm_config.cache_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            model.get_head_size(), model.dtype, cache.cache_dtype, use_mla=model.use_mla
        )
    layouts = backend.supported_kv_cache_layouts()
    return Backend(
        name=backend.get_name(),
        platform=_platform(),
        layouts=None if layouts is None else tuple(layout.name for layout in layouts),
    )


def cpu_instruction_set(vllm_config: Any, block_size: int, head_size: int) -> str:
    """The instruction set by which the CPU backend arranges the values of a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    return str(_get_attn_isa(vllm_config.model_config.dtype, block_size, head_size, cache_dtype))
