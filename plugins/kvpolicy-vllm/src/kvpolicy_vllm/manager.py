"""The scheduler's book of chunks: vLLM's, with failures and what a pool held before."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

import kvpolicy
from kvpolicy_vllm import compat
from kvpolicy_vllm.jobs import record_key
from kvpolicy_vllm.report import METRICS

logger = init_logger(compat.LOGGER)


class KeyedLoadStoreSpec(CPULoadStoreSpec):
    """Chunks with their names, so that no rank ever loads a chunk that holds something else."""

    def __init__(self, chunk_ids: list[int], keys: list[bytes]) -> None:
        super().__init__(chunk_ids)
        self.keys = keys


def chunk_name(key: OffloadKey, generation: int) -> bytes:
    """The name of a chunk's records: its key, and how often the cache was reset before."""
    return key + generation.to_bytes(4, "big")


def first_of_chunk(record: object) -> OffloadKey | None:
    """The key of the chunk that a record begins, None if it begins none or is of a later reset."""
    if not isinstance(record, bytes) or record[-8:] != bytes(8):
        return None
    return OffloadKey(record[:-8])


def is_after_reset(record: object) -> bool:
    """Whether a record was stored after its engine's cache was reset."""
    return isinstance(record, bytes) and record[-8:-4] != bytes(4)


class KVPolicyOffloadingManager(CPUOffloadingManager):
    """The manager of vLLM over one pool.

    Chunks of failed jobs are misses, freed when nobody reads them. Whole chunks that a pool in a
    file holds from an earlier engine are hits from the start, unless that engine had been reset.

    Args:
        pool: the engine's.
        blocks_per_chunk: slots of a chunk.
        num_groups: how many cache groups are offloaded.
        leaves_pool: whether to close the pool at the end, which else is the worker's.
        settings: as vLLM's manager takes them.
    """

    def __init__(
        self,
        pool: kvpolicy.HostPool,
        blocks_per_chunk: int,
        num_groups: int,
        *,
        leaves_pool: bool,
        **settings: Any,
    ) -> None:
        num_chunks = pool.num_slots // blocks_per_chunk
        super().__init__(num_chunks, **settings)
        self._names = compat.manager_names(self)
        self._failed: set[OffloadKey] = set()
        self._failed_jobs: set[int] = set()
        self._counts = dict.fromkeys(METRICS, 0)
        self._counted = False
        self._generation = 0
        self._pool, self._leaves_pool = pool, leaves_pool
        self._adopt(num_chunks, blocks_per_chunk, num_groups)

    def _adopt(self, num_chunks: int, blocks_per_chunk: int, num_groups: int) -> None:
        """Enters the whole chunks that the pool holds, and leaves the others free."""
        held = {one.slot: one.key for one in self._pool.records() if one.complete}
        if not held:
            return
        found: dict[OffloadKey, int] = {}
        for number in range(num_chunks):
            first = number * blocks_per_chunk
            name = first_of_chunk(held.get(first))
            if name is None or get_offload_group_idx(name) >= num_groups:
                continue
            named = chunk_name(name, generation=0)
            if all(held.get(first + n) == record_key(named, n) for n in range(blocks_per_chunk)):
                found[name] = number
        late = sum(is_after_reset(key) for key in held.values())
        logger.info(
            "kvpolicy: %d of %d chunks are hits from the start%s",
            len(found),
            num_chunks,
            f"; {late} record(s) do not count, since they were stored after a reset" * bool(late),
        )
        if not found:
            return
        taken = {*found.values()}
        setattr(self, self._names["allocated"], num_chunks)
        self._free_list = [n for n in reversed(range(num_chunks)) if n not in taken]
        for name, number in found.items():
            self._policy.insert(name, compat.new_chunk(number))
        self._count("pending", len(found))
        super().complete_store(list(found), ReqContext(req_id=""))

    def _count(self, name: str, change: int) -> None:
        attribute = self._names[name]
        setattr(self, attribute, getattr(self, attribute) + change)

    def _get_load_store_spec(
        self, keys: Iterable[OffloadKey], chunks: Iterable[Any]
    ) -> CPULoadStoreSpec:
        names = [chunk_name(key, self._generation) for key in keys]
        return KeyedLoadStoreSpec([compat.chunk_id(chunk) for chunk in chunks], names)

    def mark_failed(self, job_id: int, keys: Iterable[OffloadKey], *, is_store: bool) -> None:
        """Makes a job's chunks misses from now on; before it is completed, once for each rank."""
        self._failed.update(keys)
        if job_id not in self._failed_jobs:
            self._failed_jobs.add(job_id)
            self._counts[f"vllm:kvpolicy_{'store' if is_store else 'load'}_failures"] += 1

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """As vLLM's; a failed chunk is a miss."""
        return LookupResult.MISS if key in self._failed else super().lookup(key, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """As vLLM's; failed chunks go with their last reader."""
        self._counts["vllm:kvpolicy_load_jobs"] += 1
        super().complete_load(keys, req_context)
        for key in self._failed.intersection(keys):
            chunk = self._policy.get(key)
            if chunk is not None and chunk.ref_cnt == 0:
                self._policy.remove(key)
                self._count("evictable", -1)
                getattr(self, self._names["free"])(chunk)
            if chunk is None or chunk.ref_cnt == 0:
                self._failed.discard(key)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """As vLLM's; what some rank failed to store was not stored."""
        self._counts["vllm:kvpolicy_store_jobs"] += 1
        failed = self._failed.intersection(keys)
        super().complete_store([key for key in keys if key not in failed], req_context, success)
        super().complete_store(sorted(failed), req_context, success=False)
        self._failed -= failed

    def reset_cache(self) -> None:
        """As vLLM's; what the pool holds no longer counts, for a later engine either."""
        super().reset_cache()
        self._failed.clear()
        # The weights may be others from here on, under the name that the pool was opened with.
        self._generation += 1
        self._pool.forget()
        logger.info("kvpolicy: the host pool's records are forgotten, after a reset")

    def get_stats(self) -> OffloadingConnectorStats | None:
        """As vLLM's, with the jobs and failures since the last call."""
        stats = super().get_stats() or OffloadingConnectorStats()
        for name, count in self._counts.items():
            if count or not self._counted:  # each counter is there from the first time on
                stats.increase_counter(name, count)
        self._counts, self._counted = dict.fromkeys(METRICS, 0), True
        return stats

    def shutdown(self) -> None:
        """Leaves the pool, if it was joined for this."""
        super().shutdown()
        if self._leaves_pool and isinstance(self._pool, kvpolicy.SharedHostPool):
            self._pool.close()
