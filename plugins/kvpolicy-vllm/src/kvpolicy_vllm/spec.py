"""vLLM's offloading spec: its scheduler's book of chunks, and its workers' transfers, as ours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

import kvpolicy
from kvpolicy_vllm import compat
from kvpolicy_vllm.errors import VLLMConfigError
from kvpolicy_vllm.manager import KVPolicyOffloadingManager
from kvpolicy_vllm.pools import PoolWish, find_pool
from kvpolicy_vllm.report import METRICS
from kvpolicy_vllm.translate import group_name
from kvpolicy_vllm.worker import KVPolicyWorker

IN_PROCESS = "kvpolicy_worker_in_process"
"""A key that our connector puts into the extra config: whether one rank runs in this process."""


class KVPolicyOffloadingSpec(OffloadingSpec):
    """Made in the scheduler and in every worker; memory is taken in a worker only."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Those of vLLM's manager, which is ours too, and our own."""
        own = {
            name: OffloadingCounterMetadata(documentation=documentation)
            for name, documentation in METRICS.items()
        }
        return {**CPUOffloadingSpec.build_metric_definitions(extra_config), **own}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        file, parallel = self.extra_config.get("pool_file"), config.parallel
        if file is not None and parallel.data_parallel_size > 1:
            file = f"{file}.dp{parallel.data_parallel_index}"  # one engine at a time has a file
        self.pool = PoolWish(
            engine=config.engine_id,
            capacity=_capacity(self.extra_config.get("cpu_bytes_to_use")),
            blocks_per_chunk=self.blocks_per_chunk,
            file=None if file is None else Path(file).absolute(),
            own_memory=file is None and bool(self.extra_config.get(IN_PROCESS)),
        )
        self._manager: OffloadingManager | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the offloaded groups, in vLLM's order."""
        groups = self.config.groups  # vLLM 0.28 and 0.29 number them by their place
        return tuple(group_name(getattr(group, "group_id", n)) for n, group in enumerate(groups))

    def get_manager(self) -> OffloadingManager:
        """The scheduler's book of chunks; the workers have made the pool by then."""
        if self._manager is None:
            pool, joined = find_pool(self.pool)
            self._manager = KVPolicyOffloadingManager(
                pool,
                self.blocks_per_chunk,
                len(self.groups),
                leaves_pool=joined,
                cache_policy=self.extra_config.get("eviction_policy", "lru"),
                cache_policy_module_path=self.extra_config.get("cache_policy_module_path"),
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=_whole(
                    "store_threshold", self.extra_config.get("store_threshold", 0)
                ),
                max_tracker_size=_whole(
                    "max_tracker_size", self.extra_config.get("max_tracker_size", 64_000)
                ),
            )
        return self._manager

    def get_worker(self, kv_caches: kvpolicy.Connector) -> OffloadingWorker:
        """The rank's transfers.

        Args:
            kv_caches: our connector hands its registered kvpolicy connector through here, in
                place of vLLM's canonical caches.
        """
        # Where vLLM can compute several groups' blocks again, it is told; elsewhere we try again.
        hopeless = len(self.groups) > 1 and not compat.has_request_failures()
        return KVPolicyWorker(
            kv_caches, self.groups, self.blocks_per_chunk, retries=2 if hopeless else 0
        )


def _capacity(value: object) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 1 <= value < math.inf):
        raise VLLMConfigError(
            "kv_connector_extra_config needs cpu_bytes_to_use, the bytes of host memory for all "
            f"ranks of the node together; found {value!r}"
        )
    return int(value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise VLLMConfigError(
            f"kv_connector_extra_config's {name} is a whole number >= 0; found {value!r}"
        )
    return value
