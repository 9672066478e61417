"""What the ranks of one engine tell one another before the first job.

Every rank calls each of these functions at the same point of start-up. What one rank cannot do, no
rank does: all of them stop, with that rank's reason.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

import kvpolicy
from kvpolicy_vllm import compat, translate
from kvpolicy_vllm.errors import VLLMConfigError

T = TypeVar("T")


def on_all_ranks(compute: Callable[[], T]) -> list[T]:
    """What each rank computes, in the order of ranks.

    Raises:
        VLLMConfigError: another rank has failed.
        Exception: what this rank has raised.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = compute()
    except Exception as raised:  # noqa: BLE001  raised again once the others know
        error = raised
    found = compat.gather((value, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(found):
        if failed is not None:
            raise VLLMConfigError(f"rank {rank} cannot start: {failed}")
    return [value for value, _ in found]


@attrs.frozen(kw_only=True)
class Held:
    """What one rank holds.

    Attributes:
        machine: where it runs.
        num_blocks: blocks of its cache.
        stage: its layers, by cache group.
    """

    machine: str
    num_blocks: int
    stage: translate.Stage

    def _shape(self) -> tuple[object, ...]:
        layers = [(name, list(group.items())) for name, group in self.stage.items()]
        return self.num_blocks, layers

    def is_like(self, other: Held) -> bool:
        """Whether two ranks hold the same layers, in the same order."""
        return self._shape() == other._shape()


def machine() -> str:
    """Names this machine: ranks can share memory only where this is equal."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text("ascii").strip() if boot.exists() else platform.node()


def whole_geometry(held: Sequence[Held], grid: kvpolicy.ParallelGrid) -> kvpolicy.CacheGeometry:
    """The model's cache, from what every rank holds.

    Args:
        held: of all ranks, in their order.
        grid: the ranks.

    Raises:
        VLLMConfigError: ranks that do not fit together, or on several machines.
        CertificationError: layers that cannot be translated, one reason for each.
    """
    if len(held) != grid.size:
        raise VLLMConfigError(
            f"{len(held)} ranks are there, and the parallel sizes of the configuration make "
            f"{grid.size}"
        )
    if len({one.machine for one in held}) > 1:
        raise VLLMConfigError(
            "the ranks run on several machines, which cannot share one host pool; run each engine "
            "on one machine"
        )
    firsts = held[:: grid.stage_size]
    for rank, one in enumerate(held):
        first = rank - rank % grid.stage_size
        if not one.is_like(held[first]) or one.num_blocks != held[0].num_blocks:
            raise VLLMConfigError(
                f"rank {rank} holds other layers or blocks than rank {first}, with which it shares "
                "a pipeline stage; both must run the same vLLM with the same configuration"
            )
    return translate.geometry([one.stage for one in firsts], held[0].num_blocks)


def identity(offload: kvpolicy.Connector) -> Mapping[str, Any]:
    """What every rank must agree on, in parts that can be compared by name."""
    decision = offload.decision
    return {
        "fingerprint": offload.fingerprint,
        "decision": [decision.cross_layer_blocks, str(decision.layout), decision.decided_by],
        "plugins": tuple(
            f"{info.name} {info.version} of {info.distribution} at priority {info.priority}"
            for info in (plugin.info for plugin in offload.plugins.active)
        ),
        "formats": {name: fmt.format_id for name, fmt in offload.formats.items()},
    }


def _beside(value: Any, other: Any) -> str:
    """A value as it is told beside another: of the plugins those that the other has not."""
    if isinstance(value, tuple):
        return ", ".join(one for one in value if one not in other) or "none beside these"
    return str(value)


def check_agreement(identities: Sequence[Mapping[str, Any]]) -> None:
    """Refuses ranks that would store other bytes, or decide otherwise.

    Raises:
        VLLMConfigError: the first rank that differs from rank 0, and in what.
    """
    first = identities[0]
    for rank, other in enumerate(identities):
        if other["fingerprint"] == first["fingerprint"]:
            continue
        differences = [
            f"{name} (rank 0: {_beside(first[name], other[name])}, rank {rank}: "
            f"{_beside(other[name], first[name])})"
            for name in ("decision", "plugins", "formats")
            if first[name] != other[name]
        ] or ["the grid or the pipeline stages"]
        raise VLLMConfigError(
            f"rank {rank} has fingerprint {other['fingerprint']}, rank 0 {first['fingerprint']}; "
            f"they differ in {'; '.join(differences)}; give every rank the same plugins, options "
            "and environment"
        )
