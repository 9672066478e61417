"""vLLM's offloading spec and manager: its scheduler side as it is, with record names added."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

import kvpolicy
from kvpolicy_vllm.errors import VLLMConfigError
from kvpolicy_vllm.translate import group_name
from kvpolicy_vllm.worker import KVPolicyWorker

ROW_ALIGNMENT = 64


class KeyedLoadStoreSpec(CPULoadStoreSpec):
    """Chunks with their names, so that no rank ever loads a chunk that holds something else."""

    def __init__(self, chunk_ids: list[int], keys: list[bytes]) -> None:
        super().__init__(chunk_ids)
        self.keys = keys


class KVPolicyOffloadingManager(CPUOffloadingManager):
    """The manager of vLLM; chunks of failed jobs are misses, freed when nobody reads them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failed: set[OffloadKey] = set()

    def _get_load_store_spec(
        self, keys: Iterable[OffloadKey], chunks: Iterable[ChunkStatus]
    ) -> CPULoadStoreSpec:
        return KeyedLoadStoreSpec([chunk.chunk_id for chunk in chunks], list(keys))

    def mark_failed(self, keys: Iterable[OffloadKey]) -> None:
        """Makes chunks misses from now on; call it before their job is completed."""
        self._failed.update(keys)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As vLLM's; a failed chunk is a miss."""
        return LookupResult.MISS if key in self._failed else super().lookup(key, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """As vLLM's; failed chunks go with their last reader."""
        super().complete_load(keys, req_context)
        for key in self._failed.intersection(keys):
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 0:
                self._policy.remove(key)
                self._num_evictable_cache_chunks -= 1
                self._free_chunk(chunk)
            if chunk is None or chunk.ref_cnt == 0:
                self._failed.discard(key)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """As vLLM's; what some rank failed to store was not stored."""
        failed = self._failed.intersection(keys)
        super().complete_store([key for key in keys if key not in failed], req_context, success)
        super().complete_store(sorted(failed), req_context, success=False)
        self._failed -= failed

    def reset_cache(self) -> None:
        """As vLLM's."""
        super().reset_cache()
        self._failed.clear()


class KVPolicyOffloadingSpec(OffloadingSpec):
    """Made in the scheduler and in every worker; memory is taken in a worker only."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Those of vLLM's manager, which is ours too."""
        return CPUOffloadingSpec.build_metric_definitions(extra_config)

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.capacity_bytes = _capacity(self.extra_config.get("cpu_bytes_to_use"))
        # From the configuration alone, hence the same in the scheduler and on every rank.
        ranks_bytes = config.worker_kv_bytes_per_block * config.parallel.world_size
        row_bytes = -(-ranks_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        chunk_bytes = row_bytes * self.blocks_per_chunk
        self.num_chunks = self.capacity_bytes // chunk_bytes if chunk_bytes else 0
        if not self.num_chunks:
            raise VLLMConfigError(
                f"cpu_bytes_to_use is {self.capacity_bytes:,}, less than one chunk of "
                f"{self.blocks_per_chunk} block(s): {chunk_bytes:,} B over all ranks; raise it"
            )
        self._manager: OffloadingManager | None = None

    @property
    def num_slots(self) -> int:
        """Rows of the host pool."""
        return self.num_chunks * self.blocks_per_chunk

    def get_manager(self) -> OffloadingManager:
        """The scheduler's book of chunks."""
        if self._manager is None:
            self._manager = KVPolicyOffloadingManager(
                num_chunks=self.num_chunks,
                cache_policy=self.extra_config.get("eviction_policy", "lru"),
                cache_policy_module_path=self.extra_config.get("cache_policy_module_path"),
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=int(self.extra_config.get("store_threshold", 0)),
                max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
            )
        return self._manager

    def get_worker(self, kv_caches: kvpolicy.Connector) -> OffloadingWorker:
        """The rank's transfers.

        Args:
            kv_caches: our connector hands its registered kvpolicy connector through here, in
                place of vLLM's canonical caches.
        """
        names = [group_name(group.group_id) for group in self.config.groups]
        return KVPolicyWorker(kv_caches, names, self.blocks_per_chunk)


def _capacity(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise VLLMConfigError(
            "kv_connector_extra_config needs cpu_bytes_to_use, the bytes of host memory for all "
            f"ranks of the node together; found {value!r}"
        )
    return int(value)
