"""One example of a contract, and how it is told in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvpolicy import CacheGeometry, KVCacheLayout, LayerGroup, PolicyContext
from kvpolicy.testing.memory import Allocation

SLOTS = 7
"""Slots of the host pool of a `Trial`."""


@attrs.frozen(kw_only=True, repr=False)
class Trial:
    """One example of a contract: a context, an engine's ways, and blocks to move.

    Attributes:
        context: rank 0's.
        allocation: how the engine allocates.
        forced: a vote that outvotes everyone, or None.
        rank: a number from which a rank is chosen, modulo their number.
        group: a number from which a group is chosen, modulo their number.
        blocks, slots: as many of either, no one twice; blocks below the context's, slots below
            `SLOTS`.
    """

    context: PolicyContext
    allocation: Allocation
    forced: bool | None = None
    rank: int = 0
    group: int = 0
    blocks: tuple[int, ...] = (0,)
    slots: tuple[int, ...] = (0,)

    def __repr__(self) -> str:
        """Only what differs from a default, so that a small example looks small."""
        return brief(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same for hypothesis, which prints attrs classes whole."""
        del cycle
        printer.text(repr(self))

    @property
    def group_layers(self) -> LayerGroup:
        """The group that was chosen."""
        groups = self.context.geometry.groups
        return groups[self.group % len(groups)]


def brief(value: object) -> str:
    """A value's ``repr`` without the fields that have their defaults."""
    kind: Any = type(value)
    if attrs.has(kind):
        shown = []
        for field in attrs.fields(kind):
            own = getattr(value, field.name)
            if field.init and not _is_default(value, field, own):
                shown.append(f"{field.name}={brief(own)}")
        return f"{kind.__name__}({', '.join(shown)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {brief(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(brief(one) for one in value) + "]"
    return value.name if isinstance(value, KVCacheLayout) else repr(value)


def _is_default(value: object, field: attrs.Attribute[Any], own: object) -> bool:
    twins = {"v_head_size": "head_size", "kernel_block_size": "block_size"}
    if field.name in twins:
        return bool(own == getattr(value, twins[field.name]))
    if isinstance(value, CacheGeometry) and field.name == "groups":
        return own == CacheGeometry(layers=value.layers, num_blocks=1).groups
    make = getattr(field.default, "factory", None)
    return bool(own == (field.default if make is None else make()))
