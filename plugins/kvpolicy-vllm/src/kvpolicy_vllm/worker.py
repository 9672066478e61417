"""vLLM's transfer jobs as kvpolicy's: chunks become slots, blocks stay blocks, results come back.

A chunk is ``blocks_per_chunk`` consecutive slots, each the record of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

import kvpolicy
from kvpolicy_vllm.compat import LOGGER
from kvpolicy_vllm.jobs import Part, split_job

logger = init_logger(LOGGER)


@attrs.define(kw_only=True)
class _Job:
    """A job of vLLM's: what is still under way, and what has come so far."""

    is_load: bool
    pending: set[int] = attrs.field(factory=set)
    retries: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed_blocks: set[int] = attrs.field(factory=set)
    error: str = ""


@attrs.frozen(kw_only=True)
class Failure:
    """A job that failed.

    Attributes:
        job_id: vLLM's.
        is_load: or a store.
        block_ids: blocks of a load that were not wholly written.
        error: why.
    """

    job_id: int
    is_load: bool
    block_ids: frozenset[int]
    error: str


class KVPolicyWorker(OffloadingWorker):
    """One rank's transfers.

    Args:
        offload: the rank's connector, registered, with its host pool.
        groups: kvpolicy's group names in the order of vLLM's offloaded groups.
        blocks_per_chunk: blocks that vLLM's scheduler offloads together.
        retries: how often a part of a load is tried again.

    vLLM asserts that every job succeeds, so every job is reported as done; what failed is kept
    for `take_failures`, by which the scheduler learns of it.
    """

    def __init__(
        self,
        offload: kvpolicy.Connector,
        groups: Sequence[str],
        blocks_per_chunk: int,
        *,
        retries: int = 0,
    ) -> None:
        self.offload = offload
        self._retries = retries
        self._groups = tuple(groups)
        self._blocks_per_chunk = blocks_per_chunk
        self._jobs: dict[int, _Job] = {}
        self._owners: dict[int, tuple[int, Part]] = {}  # kvpolicy's job id -> vLLM's, and what
        self._failures: list[Failure] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copies blocks to chunks, in the background."""
        return self._submit(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copies chunks to blocks, in the background."""
        return self._submit(job_id, dst_spec, src_spec, is_load=True)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended since the last call, each once."""
        self._absorb(self.offload.poll())
        return list(self._finished())

    def wait(self, job_ids: set[int]) -> None:
        """Blocks until these jobs have ended; `get_finished` reports them."""
        while waited := [own for own, (owner, _) in self._owners.items() if owner in job_ids]:
            self._absorb(self.offload.wait(waited))  # which may try some again

    def shutdown(self) -> None:
        """Waits for what is under way and lets go of the pool."""
        pool = self.offload.host
        self.offload.close()
        if isinstance(pool, kvpolicy.SharedHostPool):
            pool.close()

    def take_failures(self) -> list[Failure]:
        """The jobs that have failed since the last call, each once, after they were reported."""
        failures, self._failures = self._failures, []
        return failures

    def _submit(self, job_id: int, device: Any, host: Any, *, is_load: bool) -> bool:
        job = self._jobs[job_id] = _Job(is_load=is_load)
        try:
            parts = split_job(
                device.block_ids,
                device.group_sizes,
                device.block_indices,
                host.block_ids,
                host.keys,
                self._blocks_per_chunk,
            )
        except kvpolicy.KVPolicyError as error:
            job.failed_blocks.update(device.block_ids.tolist() if is_load else ())
            job.error = str(error)
            return True
        for part in parts:
            self._start(job_id, job, part)
        return True

    def _start(self, job_id: int, job: _Job, part: Part) -> None:
        group = self._groups[part.group]
        try:
            if job.is_load:
                own = self.offload.load(part.slots, part.block_ids, group, keys=part.keys)
            else:
                own = self.offload.store(part.block_ids, part.slots, group, keys=part.keys)
        except kvpolicy.KVPolicyError as error:
            if not self._try_again(job_id, job, part, str(error)):
                job.failed_blocks.update(part.block_ids.tolist() if job.is_load else ())
                job.error = str(error)
            return
        job.pending.add(own)
        self._owners[own] = job_id, part

    def _try_again(self, job_id: int, job: _Job, part: Part, error: str) -> bool:
        """Starts a part of a failed load once more, where nobody else could make up for it."""
        if not job.is_load or job.retries >= self._retries:
            return False
        job.retries += 1
        logger.warning("kvpolicy: load of job %d is tried again after: %s", job_id, error)
        self._start(job_id, job, part)
        return True

    def _absorb(self, results: Sequence[kvpolicy.TransferResult]) -> None:
        for result in results:
            job_id, part = self._owners.pop(result.job_id)
            job = self._jobs[job_id]
            job.pending.discard(result.job_id)
            job.bytes += result.bytes
            job.seconds = max(job.seconds, result.seconds)  # groups of one job run side by side
            if not result.ok and not self._try_again(job_id, job, part, result.error):
                job.error = result.error
                job.failed_blocks.update(result.failed_ids if job.is_load else ())

    def _finished(self) -> Iterator[TransferResult]:
        for job_id, job in list(self._jobs.items()):
            if job.pending:
                continue
            del self._jobs[job_id]
            if job.error:
                what = "load" if job.is_load else "store"
                logger.warning("kvpolicy: %s of job %d failed: %s", what, job_id, job.error)
                self._failures.append(
                    Failure(
                        job_id=job_id,
                        is_load=job.is_load,
                        block_ids=frozenset(job.failed_blocks),
                        error=job.error,
                    )
                )
            yield TransferResult(
                job_id=job_id, success=True, transfer_size=job.bytes, transfer_time=job.seconds
            )
