"""The explanation of a start-up, as the one dict that people and programs read."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvpolicy.certify import Certificate
from kvpolicy.context import PolicyContext
from kvpolicy.decision import CastVote, LayoutDecision
from kvpolicy.errors import Refusal
from kvpolicy.identity import GroupFormat
from kvpolicy.plugins import PluginInfo, PluginSet
from kvpolicy.records import Fragments, GroupRecord, Proofs
from kvpolicy.specs import LayerSpec


def explain_plugin(info: PluginInfo) -> dict[str, Any]:
    """One plugin, as it is listed."""
    return attrs.asdict(info) | {"hooks": list(info.hooks)}


def explain_decision(decision: LayoutDecision) -> dict[str, Any]:
    """The decision with every vote."""
    return {
        "cross_layer_blocks": decision.cross_layer_blocks,
        "layout": decision.layout.value,
        "decided_by": decision.decided_by,
        "votes": [attrs.asdict(vote) for vote in decision.votes],
    }


def explain_conflict(votes: Iterable[CastVote], plugins: PluginSet) -> dict[str, Any]:
    """What is known where opposite votes left no decision."""
    return {
        "decision": {
            "cross_layer_blocks": None,
            "layout": None,
            "decided_by": None,
            "votes": [attrs.asdict(vote) for vote in votes],
        },
        "plugins": [explain_plugin(info) for info in plugins.infos],
    }


def _explain_layer(
    name: str,
    spec: LayerSpec,
    group: str,
    proof: Certificate | Refusal,
    fragments: int | None,
    canonical: bool,
    refusal: Refusal | None,
) -> dict[str, Any]:
    proved = proof if isinstance(proof, Certificate) else None
    why = proof if isinstance(proof, Refusal) else refusal
    return {
        "name": name,
        "kind": spec.kind,
        "group": group,
        "spec": attrs.asdict(spec),
        "local_page_bytes": proved.mappings[0].local_page_bytes if proved else None,
        "canonical_page_bytes": proved.canonical_page_bytes if proved else None,
        "portable": bool(proved and canonical and proved.portable and why is None),
        "fragments_per_block": fragments,
        "refusal": None if why is None else {"code": why.code, "detail": why.detail},
    }


def explain(
    context: PolicyContext,
    decision: LayoutDecision,
    proofs: Proofs,
    plugins: PluginSet,
    *,
    records: Mapping[str, GroupRecord],
    counts: Mapping[str, Fragments],
    formats: Mapping[str, GroupFormat],
    format_id: str | None,
    fingerprint: str | None,
    refusals: Mapping[str, Refusal],
) -> dict[str, Any]:
    """Everything that a start-up came to; refused layers have a reason and no sizes.

    ``records``, ``counts`` and ``formats`` are empty, and the identities None, where some layer
    could not be certified.
    """
    group_of = {name: g.name for g in context.geometry.groups for name in g.layer_names}
    fragments = {name: n for count in counts.values() for name, n in count.layers.items()}
    layers = [
        _explain_layer(
            name,
            spec,
            group_of[name],
            proofs[name],
            fragments.get(name),
            context.canonical,
            refusals.get(name),
        )
        for name, spec in context.geometry.layers.items()
    ]
    groups: list[dict[str, Any]] = [
        {
            "name": name,
            "layers": list(record.group.layer_names),
            "record_bytes": record.record_bytes,
            "fragments_per_block": counts[name].total,
            "portable": record.portable,
            "format_id": formats[name].format_id,
            "format": copy.deepcopy(dict(formats[name].fields)),
        }
        for name, record in records.items()
    ]
    largest = max(groups, key=lambda group: group["record_bytes"], default=None)
    grid = context.grid
    return {
        "canonical": context.canonical,
        "dtype": context.dtype,
        "encoding": context.encoding,
        "grid": attrs.asdict(grid),
        "stages": list(context.geometry.stages_for(grid.pp)),
        "decision": explain_decision(decision),
        "layers": layers,
        "groups": groups,
        "record_bytes": largest["record_bytes"] if largest else None,
        "fragments_per_block": largest["fragments_per_block"] if largest else None,
        "format_id": format_id,
        "fingerprint": fingerprint,
        "plugins": [explain_plugin(info) for info in plugins.infos],
    }
