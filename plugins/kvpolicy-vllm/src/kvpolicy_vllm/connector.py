"""KVPolicyConnector: vLLM's offloading connector, with kvpolicy deciding and moving.

The scheduler side is vLLM's own. On a worker the engine's tensors go to a `kvpolicy.Connector`;
through it go all transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
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
import kvpolicy_vllm
from kvpolicy_vllm import compat, translate
from kvpolicy_vllm.compat import LOGGER
from kvpolicy_vllm.errors import VLLMConfigError, VLLMTransferError
from kvpolicy_vllm.pools import forget_others, open_pool
from kvpolicy_vllm.ranks import (
    Held,
    check_agreement,
    identity,
    machine,
    on_all_ranks,
    whole_geometry,
)
from kvpolicy_vllm.report import paragraph
from kvpolicy_vllm.spec import IN_PROCESS, KVPolicyOffloadingSpec
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
    parallel = vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    extra[IN_PROCESS] = parallel.world_size == 1 and executor in (None, "uni")


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
        translate.extra_config(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failed_jobs: set[int] = set()
        if self.connector_scheduler is not None:
            compat.check_attributes(self.connector_scheduler, "_jobs", "manager")
        if self.connector_worker is not None:
            compat.check_attributes(self.connector_worker, "_load_jobs", "spec")

    # The layout.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The decided layout by name, from the configuration alone; vLLM takes it as a wish."""
        layout = _wish(vllm_config).layout
        if compat.has_layout_names():
            return layout.value
        return "HND" if layout.heads_first else "NHD"

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """What vLLM 0.28 asks before it allocates; the decision, from the configuration alone."""
        return _wish(self._vllm_config).cross_layer_blocks

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
        self._register(kv_caches, compat.resolved_layout(self._vllm_config))

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """What vLLM 0.28 calls instead, with one slab: each layer is a strided view of it."""
        order = compat.slab_order(attn_backend)
        views = kv_cache.permute([order.index(axis) for axis in "LBHNC"])
        tensors = self._kv_cache_config.kv_cache_tensors
        named = {
            name: view
            for view, tensor in zip(views, tensors, strict=True)
            for name in tensor.shared_by
        }
        self._register(named, order)

    def _register(self, kv_caches: Mapping[str, torch.Tensor], resolved: str) -> None:
        config, rank = self._vllm_config, self._vllm_config.parallel_config.rank
        backend = compat.attention_backend(config)
        grid = translate.grid(config, backend.platform)
        spec: KVPolicyOffloadingSpec = self.connector_worker.spec
        wish, is_slab = _wish(config), kvpolicy.KVCacheLayout.parse(resolved).block_outermost
        held = on_all_ranks(lambda: self._held(kv_caches))

        def start() -> Mapping[str, Any]:
            nonlocal offload
            context = translate.policy_context(
                config,
                whole_geometry(held, grid),
                backend,
                _instruction_set(config),
                resolved,
                is_as_asked=wish.cross_layer_blocks == is_slab,
            )
            offload = kvpolicy.Connector(context)
            _check_copy_engine(offload, kv_caches)
            return identity(offload)

        offload: kvpolicy.Connector | None = None
        check_agreement(on_all_ranks(start))
        contents = self._contents(offload) if spec.pool.file else {}
        pool = open_pool(spec.pool, rank, offload, contents)
        offload.use_host(pool)
        found = ""
        if rank == 0 and isinstance(pool, kvpolicy.SharedHostPool):
            found = forget_others(pool, offload.formats)
        # vLLM also lists layers that share another's cache; those are stored with their owner.
        own = {n: t for n, t in kv_caches.items() if n in offload.context.stage_layers}
        on_all_ranks(lambda: offload.register(own))
        if rank == 0:
            said = paragraph(
                offload.explain(),
                asked=wish.layout.value,
                resolved=resolved,
                asks_by_layout=compat.has_layout_names(),
                fragments=offload.fragments,
                pool=pool,
                found=found,
            )
            logger.info("%s", said)
            self._warn_of_failures()
        self.connector_worker._init_worker(offload)

    def _held(self, kv_caches: Mapping[str, torch.Tensor]) -> Held:
        config, cache = self._vllm_config, self._kv_cache_config
        group_ids = compat.offloading_group_ids(cache)
        return Held(
            machine=machine(),
            num_blocks=cache.num_blocks,
            stage=translate.stage(
                cache,
                group_ids,
                config.parallel_config.tensor_parallel_size,
                config.model_config.get_total_num_kv_heads(),
                translate.kernel_blocks(cache, group_ids, kv_caches),
            ),
        )

    def _contents(self, offload: kvpolicy.Connector) -> Mapping[str, str | int]:
        """What the keys of a pool in a file mean, beside the format of their records."""
        cache = self.connector_worker.spec.config.cache
        groups = [",".join(group.layer_names) for group in offload.context.geometry.groups]
        return {
            **compat.key_meaning(self._vllm_config),
            "tokens_per_hash": cache.tokens_per_hash,
            "blocks_per_chunk": cache.blocks_per_chunk,
            "groups": compat.short_digest("\n".join(groups)),
        }

    def _warn_of_failures(self) -> None:
        policy = str(self._vllm_config.kv_transfer_config.kv_load_failure_policy)
        if policy != "recompute":
            logger.warning(
                "kvpolicy: kv_load_failure_policy is %r: a load that fails ends its request; set "
                "it to 'recompute' to compute such blocks again (under MultiConnector, the "
                "outermost one counts)",
                policy,
            )
        if len(self._kv_cache_config.kv_cache_groups) > 1 and not compat.has_request_failures():
            logger.warning(
                "kvpolicy: vLLM %s cannot compute blocks of several cache groups again: a load "
                "that fails three times ends the engine",
                compat.vllm_version(),
            )

    # Failures: kept out of vLLM's results, which it asserts to be good.

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; failures are kept for the scheduler."""
        loads = dict(self.connector_worker._load_jobs)
        finished = super().get_finished(finished_req_ids)
        several = len(self._kv_cache_config.kv_cache_groups) > 1
        for failure in self._worker.take_failures():
            self._failed_jobs.add(failure.job_id)
            if not failure.is_load:
                continue
            if not several:
                self._failed_blocks |= failure.block_ids
            elif compat.has_request_failures():
                self._failed_requests.add(loads[failure.job_id])
            else:
                raise VLLMTransferError(
                    f"a load failed ({failure.error}), and vLLM {compat.vllm_version()} has no "
                    "way to compute blocks of several cache groups again; use vLLM 0.30 or newer, "
                    "or start again without the connector"
                )
        return finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As vLLM's (0.30+), with the requests whose loads failed."""
        results = super().get_transfer_results(finished_req_ids)
        failed, self._failed_requests = self._failed_requests, set()
        results.failed_recving.update(failed)
        return results

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
        scheduler = self.connector_scheduler
        if isinstance(meta, KVPolicyWorkerMetadata):
            for job_id in meta.failed_jobs:
                # A job from before a reset is gone, and so are its chunks.
                if (job := scheduler._jobs.get(job_id)) is not None:
                    scheduler.manager.mark_failed(job_id, job.keys, is_store=job.is_store)
        super().update_connector_output(connector_output)

    # Metrics.

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which reads the extra config on its own, and finds our class by its name."""
        kvpolicy_vllm.register()  # where VLLM_PLUGINS hides it, nobody else has
        _use_our_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _check_copy_engine(offload: kvpolicy.Connector, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Refuses caches on a device for which only the built-in host copy is there."""
    names = [plugin.info.name for plugin in offload.plugins.having("transfer")]
    device = next(iter(kv_caches.values())).device
    if device.type != "cpu" and names == ["host-copy"]:
        raise VLLMConfigError(
            f"the caches lie on {device}, and the only transfer plugin is host-copy, which copies "
            "between host memories; install a transfer plugin for that device, such as "
            "kvpolicy-cuda"
        )


def _instruction_set(vllm_config: VllmConfig) -> translate.InstructionSet:
    return lambda block_size, head_size: compat.cpu_instruction_set(
        vllm_config, block_size, head_size
    )


def _wish(vllm_config: VllmConfig) -> kvpolicy.LayoutDecision:
    """The decision from the configuration alone, before vLLM has a cache."""
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
            "kvpolicy: asking for %s, a cache per layer, since no geometry can be told from the "
            "model's config: %s",
            layout.value,
            error,
        )
        return kvpolicy.LayoutDecision(cross_layer_blocks=False, layout=layout)
    context = translate.policy_context(vllm_config, guess, backend, _instruction_set(vllm_config))
    with kvpolicy.Connector(context) as deciding:
        return deciding.decision
