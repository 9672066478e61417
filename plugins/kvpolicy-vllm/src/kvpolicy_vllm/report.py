"""The one paragraph that the engine's log shows at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def paragraph(explained: Mapping[str, Any], resolved: str | None, num_slots: int) -> str:
    """What start-up came to, in sentences.

    Args:
        explained: `kvpolicy.Connector.explain`.
        resolved: the layout that the engine uses.
        num_slots: rows of the host pool.
    """
    decision, layers = explained["decision"], explained["layers"]
    portable = sum(layer["portable"] for layer in layers)
    asked = "requested" if explained["canonical"] else "not requested"
    wanted = "cross-layer blocks" if decision["cross_layer_blocks"] else "a cache per layer"
    decided = f"decided for {wanted} ({decision['layout']})"
    sentences = [
        f"{decided}{_by(decision)}",
        *_others(decision),
        f"the engine resolved {resolved}"
        + ("" if resolved == decision["layout"] else f", not {decision['layout']}"),
        f"canonical pages {asked}, {portable} of {len(layers)} layers portable",
        _records(explained),
        f"{num_slots:,} slots of the host pool",
        "transfers by " + _transfers(explained["plugins"]),
        f"format {explained['format_id']}, fingerprint {explained['fingerprint']}",
    ]
    faults = [
        f"plugin {plugin['name']!r} is out: {plugin['reason']}"
        for plugin in explained["plugins"]
        if plugin["status"] == "failed"
    ]
    return "kvpolicy: " + "; ".join([*sentences, *faults]) + "."


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


def _records(explained: Mapping[str, Any]) -> str:
    said = [
        f"{group['record_bytes']:,} B a record in {group['fragments_per_block']} fragment(s)"
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
