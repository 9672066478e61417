"""What a job costs through a connector besides its copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvpolicy.caches import KVCaches
from kvpolicy.connector import Connector
from kvpolicy.context import PolicyContext
from kvpolicy.errors import KVPolicyError, NoTransferError, OptionError
from kvpolicy.geometry import CacheGeometry
from kvpolicy.plugins import PluginSet
from kvpolicy.specs import LatentSpec

_FIXED_JOBS = 200
_FIXED_BLOCKS = 256
_POLICIES = ("canonical", "cross-layer", "direct")


def only(plugins: PluginSet, name: str) -> PluginSet:
    """The built-in policies and one plugin, which nobody else's policy or copies stand beside."""
    kept = (*_POLICIES, name)
    return attrs.evolve(
        plugins, active=tuple(plugin for plugin in plugins.active if plugin.info.name in kept)
    )


def fixed_costs(plugins: PluginSet, name: str) -> dict[str, Any]:
    """What a job costs through a connector however little it moves, in microseconds.

    Returns:
        ``submit_us`` and ``fixed_us``, medians for jobs of one block: until `store` returns, and
        until its result is there. ``block_us``: what each further block of a job adds.

    Raises:
        KVPolicyError: the plugin does not take the job, or fails it.
    """
    spec = LatentSpec(block_size=16, row_bytes=4)
    geometry = CacheGeometry(layers={"layer": spec}, num_blocks=_FIXED_BLOCKS)
    context = PolicyContext(geometry=geometry, canonical=True)
    cache = torch.zeros(_FIXED_BLOCKS, 1, 16, 4, dtype=torch.uint8)
    with Connector(context, only(plugins, name), host=_FIXED_BLOCKS) as connector:
        connector.register(KVCaches(tensors={"layer": cache}))

        def timed(blocks: Sequence[int]) -> tuple[float, float]:
            begun = time.perf_counter()
            job = connector.store(blocks, blocks)
            submitted = time.perf_counter()
            (result,) = connector.wait([job])
            if not result.ok:
                raise OptionError(f"plugin {name!r} failed to store: {result.error}")
            return submitted - begun, time.perf_counter() - begun

        def medians(blocks: Sequence[int], jobs: int) -> list[float]:
            timed(blocks)  # the first time, threads and views are made
            found = [timed(blocks) for _ in range(jobs)]
            return [statistics.median(column) * 1e6 for column in zip(*found, strict=True)]

        submit, whole = medians([0], _FIXED_JOBS)
        _, many = medians(range(_FIXED_BLOCKS), _FIXED_JOBS // 10)
    return {
        "plugin": name,
        "submit_us": round(submit, 1),
        "fixed_us": round(whole, 1),
        "block_us": round(max(0.0, many - whole) / (_FIXED_BLOCKS - 1), 2),
    }


def taken_by(plugins: PluginSet, names: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The fixed costs of the plugins that copy on the CPU, and the plugins that do not."""
    costs, others = [], []
    for name in names:
        try:
            costs.append(fixed_costs(plugins, name))
        except NoTransferError:
            others.append(name)
        except KVPolicyError as error:
            raise OptionError(f"plugin {name!r} cannot be measured: {error}") from None
    return costs, others
