"""Two identities: ``format_id`` names stored bytes, ``fingerprint`` what peers of one engine share.

Both are SHA-256 digests of canonical JSON, so that they are the same in every process, hash seed
and role.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvpolicy.context import PolicyContext
from kvpolicy.decision import LayoutDecision
from kvpolicy.records import GroupRecord
from kvpolicy.specs import AttentionSpec, LatentSpec, LayerSpec
from kvpolicy.words import span_of

FORMAT_VERSION = 1
_DIGEST_CHARS = 32
_DIFFERENCES_SHOWN = 8


def digest(value: object) -> str:
    """The first 128 bits of the SHA-256 of a JSON value, in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]


def _frozen(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(copy.deepcopy(dict(fields)))


@attrs.frozen(kw_only=True)
class GroupFormat:
    """What names the stored bytes of one group.

    Attributes:
        fields: everything that the bytes depend on, as JSON values.
        format_id: their digest.
    """

    fields: Mapping[str, Any] = attrs.field(eq=False, repr=False, converter=_frozen)
    format_id: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "format_id", digest(dict(self.fields)))

    def differences(self, wanted: GroupFormat) -> tuple[str, ...]:
        """What differs, field by field: "field: stored X, wanted Y"; empty if nothing does."""
        found = list(_differences("", self.fields, wanted.fields))
        if len(found) > _DIFFERENCES_SHOWN:
            more = len(found) - _DIFFERENCES_SHOWN
            found = [*found[:_DIFFERENCES_SHOWN], f"... and {more} more"]
        return tuple(found)


def _differences(where: str, stored: Any, wanted: Any) -> Iterable[str]:
    if stored == wanted:
        return
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*stored, *wanted}):
            inner = f"{where}.{key}" if where else str(key)
            yield from _differences(inner, stored.get(key), wanted.get(key))
    elif where == "layers" and len(stored) == len(wanted):
        yield from _layer_differences(stored, wanted)
    elif isinstance(stored, list) and isinstance(wanted, list) and len(stored) != len(wanted):
        yield f"{where}: stored {len(stored)} of them, wanted {len(wanted)}"
    else:
        yield f"{where}: stored {stored!r}, wanted {wanted!r}"


def _layer_differences(stored: list[Any], wanted: list[Any]) -> Iterable[str]:
    """Layers with the same difference together."""
    found: dict[str, list[str]] = {}
    for one, other in zip(stored, wanted, strict=True):
        for line in _differences("", one, other):
            found.setdefault(line, []).append(one["name"])
    for line, names in found.items():
        field, _, values = line.partition(": ")
        count = f" ({len(names)} layers)" if len(names) > 1 else ""
        yield f"layers {span_of(names)}{count}, {field}: {values}"


def _layer_fields(name: str, spec: LayerSpec) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": name, "kind": spec.kind}
    if isinstance(spec, AttentionSpec):
        sizes = ("kv_packing", "total_kv_heads", "head_size", "v_head_size", "itemsize")
        return fields | {key: getattr(spec, key) for key in (*sizes, "scale_bytes")}
    if isinstance(spec, LatentSpec):
        return fields | {"row_bytes": spec.row_bytes}
    return fields | {"state_bytes": spec.state_bytes}


def _grid_fields(context: PolicyContext) -> dict[str, Any]:
    grid = context.grid
    return attrs.asdict(grid) | {
        "cp_interleave": grid.cp_interleave if grid.cp > 1 else 1,
        "stages": list(context.geometry.stages_for(grid.pp)),
    }


def group_format(
    context: PolicyContext, decision: LayoutDecision, record: GroupRecord
) -> GroupFormat:
    """The format of a group's stored bytes; a portable one is free of topology and plugins."""
    layers = context.geometry.layers
    names = record.group.layer_names
    fields: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "form": "canonical" if record.canonical else "private",
        "order": context.order.value,
        "tokens": max(layers[name].block_size for name in names) * context.grid.cp,
        "dtype": context.dtype,
        "encoding": context.encoding,
        "layers": [_layer_fields(name, layers[name]) for name in names],
    }
    if not record.portable:
        fields |= {"layout": decision.layout.value, **_grid_fields(context)}
    return GroupFormat(fields=fields)


def format_id(formats: Mapping[str, GroupFormat]) -> str:
    """The digest over all groups, whatever the order in which they are given."""
    return digest(sorted(one.format_id for one in formats.values()))


def fingerprint(
    context: PolicyContext,
    decision: LayoutDecision,
    formats: Mapping[str, GroupFormat],
    plugins: Iterable[tuple[str, str, str, int]],
) -> str:
    """What every rank of one engine must agree on at start; never the rank.

    Args:
        context: the rank's context.
        decision: what was decided.
        formats: the groups' formats.
        plugins: (name, distribution, version, priority) of every active plugin.
    """
    return digest(
        {
            "format_id": format_id(formats),
            "decision": [
                decision.cross_layer_blocks,
                decision.layout.value,
                decision.decided_by,
            ],
            "grid": _grid_fields(context),
            "plugins": sorted(list(plugin) for plugin in plugins),
        }
    )
