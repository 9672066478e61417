"""KVPolicyConnector: vLLM's offloading connector, with kvpolicy deciding and moving.

The scheduler side is vLLM's own. On a worker the engine's tensors go to a `kvpolicy.Connector`;
through it go all transfers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

import kvpolicy
from kvpolicy_vllm import compat, translate
from kvpolicy_vllm.compat import LOGGER
from kvpolicy_vllm.errors import VLLMConfigError, VLLMTransferError
from kvpolicy_vllm.report import paragraph
from kvpolicy_vllm.spec import KVPolicyOffloadingManager, KVPolicyOffloadingSpec
from kvpolicy_vllm.worker import KVPolicyWorker

logger = init_logger(LOGGER)

_SPEC = {
    "spec_name": KVPolicyOffloadingSpec.__name__,
    "spec_module_path": KVPolicyOffloadingSpec.__module__,
}


@dataclass
class KVPolicyWorkerMetadata(OffloadingWorkerMetadata):
    """What a worker reports in a step: finished jobs, and which of them have failed."""

    failed_jobs: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of several workers; a job has failed if it has on any of them."""
        merged = super().aggregate(other)
        failed = self.failed_jobs | getattr(other, "failed_jobs", set())
        return KVPolicyWorkerMetadata(
            completed_jobs=merged.completed_jobs,
            transfer_stats=merged.transfer_stats,
            failed_jobs=failed,
        )


def _use_our_spec(vllm_config: VllmConfig) -> None:
    """Names our spec in the extra config, from which vLLM's connector takes it.

    Raises:
        VLLMConfigError: the user has named another.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    for name, ours in _SPEC.items():
        if extra.setdefault(name, ours) != ours:
            raise VLLMConfigError(
                f"{name} is {extra[name]!r}; KVPolicyConnector brings its own, so leave it out"
            )


class KVPolicyConnector(OffloadingConnector):
    """The connector that ``"kv_connector": "KVPolicyConnector"`` names.

    Raises:
        VLLMVersionError: a vLLM with which this cannot work.
        VLLMConfigError: settings that cannot be served.
        CertificationError: canonical pages are requested and some layers cannot have them; one
            reason for each.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        compat.check_vllm(logger)
        _use_our_spec(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed_blocks: set[int] = set()
        self._failed_jobs: set[int] = set()
        if self.connector_scheduler is not None:
            compat.check_attributes(self.connector_scheduler, "_jobs", "manager")

    # The layout.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The decided layout by name, from the configuration alone; vLLM takes it as a wish."""
        backend = compat.attention_backend(vllm_config)
        model, cache = vllm_config.model_config, vllm_config.cache_config
        try:
            guess = kvpolicy.models.geometry_from_config(
                model.hf_text_config.to_dict(),
                block_size=cache.block_size,
                dtype=translate.cache_dtype(vllm_config),
            )
        except kvpolicy.KVPolicyError as error:
            layout = translate.engine_order(backend)
            logger.warning(
                "kvpolicy: asking for %s, a cache per layer, since no geometry can be told from "
                "the model's config: %s",
                layout.value,
                error,
            )
            return layout.value
        context = translate.policy_context(
            vllm_config, guess, backend, _instruction_set(vllm_config)
        )
        with kvpolicy.Connector(context) as deciding:
            return deciding.decision.layout.value

    # The worker.

    @property
    def offload(self) -> kvpolicy.Connector:
        """This rank's kvpolicy connector.

        Raises:
            VLLMConfigError: there is none: on the scheduler, or before the caches are registered.
        """
        return self._worker.offload

    @property
    def _worker(self) -> KVPolicyWorker:
        worker = self.connector_worker and self.connector_worker.worker
        if not isinstance(worker, KVPolicyWorker):
            raise VLLMConfigError("no caches are registered here")
        return worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers this rank's tensors with kvpolicy, whatever memory order they have.

        vLLM's own registration makes one opaque tensor of a slab, in which no layer could be
        certified, so it is not used.
        """
        config, cache = self._vllm_config, self._kv_cache_config
        spec = self.connector_worker.spec
        context = self._context(kv_caches)
        pool = kvpolicy.HostPool(spec.num_slots)
        offload = kvpolicy.Connector(context, host=pool)  # which decides how long the rows are
        pool_bytes = pool.row_stride * pool.num_slots
        if pool_bytes > spec.capacity_bytes:
            offload.close()
            raise VLLMConfigError(
                f"records of {offload.record_bytes:,} B in {pool.num_slots:,} slots need "
                f"{pool_bytes:,} B, more than cpu_bytes_to_use={spec.capacity_bytes:,}; this is "
                "a fault of the connector, please report it"
            )
        self._check_own_pool(offload)
        # vLLM also lists layers that share another's cache; those are stored with their owner.
        offload.register({n: t for n, t in kv_caches.items() if n in context.stage_layers})
        if config.parallel_config.rank == 0:
            resolved = config.cache_config.kv_cache_layout
            logger.info("%s", paragraph(offload.explain(), resolved, pool.num_slots))
            if len(cache.kv_cache_groups) == 1 and self._policy_of_failures() != "recompute":
                logger.warning(
                    "kvpolicy: kv_load_failure_policy is %r: a load that fails ends its request; "
                    "set it to 'recompute' to compute such blocks again",
                    self._policy_of_failures(),
                )
        self.connector_worker._init_worker(offload)

    def _context(self, kv_caches: dict[str, torch.Tensor]) -> kvpolicy.PolicyContext:
        config, cache = self._vllm_config, self._kv_cache_config
        group_ids = compat.offloading_group_ids(cache)
        geometry = translate.geometry(
            cache,
            group_ids,
            config.parallel_config.tensor_parallel_size,
            config.model_config.get_total_num_kv_heads(),
            translate.kernel_blocks(cache, group_ids, kv_caches),
        )
        return translate.policy_context(
            config,
            geometry,
            compat.attention_backend(config),
            _instruction_set(config),
            config.cache_config.kv_cache_layout,
        )

    def _check_own_pool(self, offload: kvpolicy.Connector) -> None:
        """Every rank has a pool of its own so far, which cannot hold what another rank wrote."""
        context = offload.context
        for name, spec in context.geometry.layers.items():
            proof = kvpolicy.certify(spec, context.grid, context.layout)
            shared = isinstance(proof, kvpolicy.Certificate) and proof.mapping(0).num_writers > 1
            if context.canonical and shared:
                raise VLLMConfigError(
                    f"layer {name} is the same on several ranks, which would take turns to store "
                    "it; this version of the connector has no pool for several ranks, so leave "
                    "canonical_layout out or lower tensor_parallel_size"
                )

    def _policy_of_failures(self) -> str:
        return str(self._vllm_config.kv_transfer_config.kv_load_failure_policy)

    # Failures: kept out of vLLM's results, which it asserts to be good.

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; failures are kept for the scheduler."""
        finished = super().get_finished(finished_req_ids)
        for failure in self._worker.take_failures():
            self._failed_jobs.add(failure.job_id)
            self._failed_blocks |= failure.block_ids
        if self._failed_blocks and len(self._kv_cache_config.kv_cache_groups) > 1:
            raise VLLMTransferError(
                "a load failed and the model has several cache groups, of which this version of "
                "the connector cannot recompute blocks; see the warning above for why it failed"
            )
        return finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that loads should have filled and did not; each once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """As vLLM's, with the failed jobs."""
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        # Of our type even where nothing failed: the first worker's type merges everybody's.
        failed, self._failed_jobs = self._failed_jobs, set()
        return KVPolicyWorkerMetadata(
            completed_jobs=meta.completed_jobs,
            transfer_stats=meta.transfer_stats,
            failed_jobs=failed,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; chunks of failed jobs become misses first, or they would be hit again."""
        meta = connector_output.kv_connector_worker_meta
        manager = self.scheduler.manager
        if isinstance(meta, KVPolicyWorkerMetadata) and isinstance(
            manager, KVPolicyOffloadingManager
        ):
            for job_id in meta.failed_jobs:
                if (job := self.scheduler._jobs.get(job_id)) is not None:
                    manager.mark_failed(job.keys)
        super().update_connector_output(connector_output)

    # Metrics.

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which reads the extra config on its own."""
        _use_our_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _instruction_set(vllm_config: VllmConfig) -> translate.InstructionSet:
    return lambda block_size, head_size: compat.cpu_instruction_set(
        vllm_config, block_size, head_size
    )
