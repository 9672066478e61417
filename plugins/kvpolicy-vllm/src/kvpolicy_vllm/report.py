"""What people see: the one paragraph that the log shows at start-up, and the metrics' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kvpolicy

METRICS = {
    "vllm:kvpolicy_load_jobs": "KV offload loads that have ended, failed ones too.",
    "vllm:kvpolicy_load_failures": "KV offload loads that failed on some rank.",
    "vllm:kvpolicy_store_jobs": "KV offload stores that have ended, failed ones too.",
    "vllm:kvpolicy_store_failures": "KV offload stores that failed on some rank.",
}
"""Counters beside vLLM's own, which has bytes, seconds and sizes for each direction."""


def paragraph(
    explained: Mapping[str, Any],
    *,
    asked: str,
    resolved: str,
    asks_by_layout: bool,
    fragments: Mapping[str, int],
    pool: kvpolicy.HostPool,
    found: str = "",
) -> str:
    """What start-up came to, in sentences.

    Args:
        explained: `kvpolicy.Connector.explain`.
        asked: the layout that was decided from the configuration alone.
        resolved: the layout that the engine uses.
        asks_by_layout: whether this vLLM asks for a layout by name, rather than for slabs.
        fragments: `kvpolicy.Connector.fragments`, of rank 0.
        pool: the host pool.
        found: what a pool in a file held, in words.
    """
    decision, layers = explained["decision"], explained["layers"]
    portable = sum(layer["portable"] for layer in layers)
    requested = "requested" if explained["canonical"] else "not requested"
    wanted = "cross-layer blocks" if decision["cross_layer_blocks"] else "a cache per layer"
    hook = (
        "get_required_kvcache_layout (a wish)"
        if asks_by_layout
        else "prefer_cross_layer_blocks (its V1 model runner only)"
    )
    order = kvpolicy.KVCacheLayout.parse(resolved).value
    sentences = [
        f"decided for {wanted} ({decision['layout']}){_by(decision)}",
        *_others(decision),
        f"this vLLM consults {hook}",
        f"the engine resolved {order}" + ("" if order == asked else f", not {asked} as asked"),
        f"canonical pages {requested}, {portable} of {len(layers)} layers portable",
        _records(explained, fragments),
        _pool(pool),
        *([found] if found else []),
        "transfers by " + _transfers(explained["plugins"]),
        f"format {explained['format_id']}, fingerprint {explained['fingerprint']}",
    ]
    faults = [
        f"plugin {plugin['name']!r} is out: {plugin['reason']}"
        for plugin in explained["plugins"]
        if plugin["status"] == "failed"
    ]
    return "kvpolicy: " + "; ".join([*sentences, *faults]) + "."


def _pool(pool: kvpolicy.HostPool) -> str:
    size = f"{pool.num_slots:,} slots of the host pool ({pool.num_slots * pool.row_stride:,} B)"
    if isinstance(pool, kvpolicy.SharedHostPool):
        return f"{size}, shared in {pool.path}"
    return size


def _said(vote: Mapping[str, Any]) -> str:
    return f"{vote['plugin']!r} (priority {vote['priority']})"


def _by(decision: Mapping[str, Any]) -> str:
    """Who decided and why."""
    for vote in decision["votes"]:
        if vote["plugin"] == decision["decided_by"]:
            return f" by {_said(vote)}: {vote['reason'] or 'no reason given'}"
    return ": no policy voted"


def _others(decision: Mapping[str, Any]) -> list[str]:
    """Who was outvoted, who abstained and who agreed, and why."""
    said = []
    for vote in decision["votes"]:
        if vote["plugin"] == decision["decided_by"]:
            continue
        if vote["answer"] is None:
            did = "abstained"
        else:
            agreed = vote["answer"] == decision["cross_layer_blocks"]
            did = "agreed" if agreed else "was outvoted"
        said.append(f"{_said(vote)} {did}: {vote['reason'] or 'no reason given'}")
    return said


def _records(explained: Mapping[str, Any], fragments: Mapping[str, int]) -> str:
    said = [
        f"{group['record_bytes']:,} B a record in {fragments[group['name']]} fragment(s) a block"
        + (f" ({group['name']})" if len(explained["groups"]) > 1 else "")
        for group in explained["groups"]
    ]
    return ", ".join(said)


def _transfers(plugins: list[dict[str, Any]]) -> str:
    names = [
        plugin["name"]
        for plugin in plugins
        if plugin["status"] == "active" and "transfer" in plugin["hooks"]
    ]
    first, *others = names or ["nobody"]
    return repr(first) + (f", else {', '.join(map(repr, others))}" if others else "")
