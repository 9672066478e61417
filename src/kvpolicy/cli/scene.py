"""What is drawn of one block: its pages as rows, its layers folded, and which runs are seen.

A page is drawn as rows: the inner of its two axes (tokens or heads) runs to the right, the outer
one downwards, so that reading order is memory order. Many rows, layers and ranks are folded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import attrs
import numpy as np

from kvpolicy.boxes import Box, compose, normal
from kvpolicy.canonical import shards_of
from kvpolicy.context import PolicyContext
from kvpolicy.decision import LayoutDecision
from kvpolicy.errors import Refusal
from kvpolicy.pages import StridedPage
from kvpolicy.records import GroupRecord
from kvpolicy.specs import LatentSpec, LayerSpec, StateSpec

_T = TypeVar("_T")

_PARTS_SHOWN = (2, 1)


@attrs.frozen(kw_only=True)
class Row:
    """One line of a page as it is drawn: bytes [start, start + size), in equal cells.

    Attributes:
        label, cell: what the row is, and what each of its cells is.
        start, size: bytes, in the space that is drawn.
        cells: how many.
        padding: whether nobody's bytes lie there.
    """

    label: str
    start: int
    size: int
    cells: int
    cell: str = ""
    padding: bool = False


@attrs.frozen(kw_only=True)
class Run:
    """Contiguous bytes of one rank: where they lie in its memory and in the record."""

    rank: int
    number: int
    memory: int
    record: int
    size: int


@attrs.frozen(kw_only=True)
class Fold(Generic[_T]):
    """What is left out of a row of things."""

    hidden: Sequence[_T]


def folded(things: Sequence[_T], shown: tuple[int, int]) -> list[_T | Fold[_T]]:
    """The first and the last of many things, the rest as one fold that hides at least two."""
    first, last = shown
    if len(things) <= first + last + 1:
        return list(things)
    hidden = Fold(hidden=things[first : len(things) - last])
    return [*things[:first], hidden, *things[len(things) - last :]]


def dense_rows(
    spec: LayerSpec,
    heads: int,
    tokens: int,
    heads_first: bool,
    *,
    start: int = 0,
    first_head: int = 0,
    prefix: str = "",
) -> list[Row]:
    """A dense page's rows in memory order."""
    if isinstance(spec, StateSpec):
        return [Row(label=f"{prefix}state", start=start, size=spec.state_bytes, cells=1)]
    by_head = heads_first or heads == 1  # with one head both orders are the same bytes
    outer, inner = (heads, tokens) if by_head else (tokens, heads)
    size = inner * spec.row_bytes
    if isinstance(spec, LatentSpec):
        return [Row(label=f"{prefix}latent", start=start, size=size, cells=inner, cell="tokens")]
    named = [
        f"{prefix}{half}head {first_head + i}" if by_head else f"{prefix}{half}token {i}"
        for half in (("K ", "V ") if spec.halves == 2 else ("",))
        for i in range(outer)
    ]
    cell = "tokens" if by_head else "heads"
    return [
        Row(label=label, start=start + i * size, size=size, cells=inner, cell=cell)
        for i, label in enumerate(named)
    ]


def memory_rows(spec: LayerSpec, heads: int, heads_first: bool, first_head: int = 0) -> list[Row]:
    """A page's rows as they lie in the engine's memory: kernel blocks one after the other."""
    ratio = spec.block_size // spec.kernel_block_size
    padding = spec.page_padding // ratio
    found: list[Row] = []
    at = 0
    for part in range(ratio):
        found += dense_rows(
            spec,
            heads,
            spec.kernel_block_size,
            heads_first,
            start=at,
            first_head=first_head,
            prefix=f"k{part} " if ratio > 1 else "",
        )
        at = found[-1].start + found[-1].size
        if padding:
            found.append(Row(label="padding", start=at, size=padding, cells=1, padding=True))
            at += padding
    return found


@attrs.frozen(kw_only=True)
class Scene:
    """What there is to draw of one group.

    Attributes:
        context, decision, record: as a connector has them.
        pages: layer name -> where its pages lie in the memory of every rank that holds it.
    """

    context: PolicyContext
    decision: LayoutDecision
    record: GroupRecord
    pages: Mapping[str, StridedPage]

    def holders(self, name: str) -> range:
        """The world ranks that hold a layer."""
        size = self.context.grid.stage_size
        stage = self.context.geometry.stage_of(self.context.grid.pp)[name]
        return range(stage * size, (stage + 1) * size)

    def box(self, rank: int, name: str) -> Box | None:
        """A rank's page of a layer: memory, from the page's first byte, to the record."""
        return compose(normal(self.pages[name].box), self.record.part(rank, name).box)

    def writes(self, rank: int, name: str) -> bool:
        """Whether the rank stores the layer in slot 0; ranks with equal bytes take turns."""
        return self.record.part(rank, name).writer_index == 0

    def local_rows(self, rank: int, name: str) -> list[Row]:
        """A rank's page of a layer in memory."""
        heads, first = self._heads(rank, name)
        spec = self.context.geometry.layers[name]
        return memory_rows(spec, heads, self.context.layout.heads_first, first)

    def slice_rows(self, rank: int, name: str) -> list[Row]:
        """A rank's page of a layer in a private record."""
        spec = self.context.geometry.layers[name]
        heads, first = self._heads(rank, name)
        return dense_rows(
            spec,
            heads,
            spec.block_size,
            self.context.layout.heads_first,
            start=self.record.part(rank, name).box.to_offset,
            first_head=first,
        )

    def canonical_rows(self, name: str) -> list[Row]:
        """A layer's canonical page in the record."""
        spec, at = self.context.geometry.layers[name], self.record.offsets[name]
        if isinstance(spec, StateSpec):
            size = spec.state_bytes
            return [
                Row(label=f"rank {rank}", start=at + i * size, size=size, cells=1)
                for i, rank in enumerate(self.holders(name))
            ]
        tokens = spec.block_size * self.context.grid.cp
        shards = shards_of(spec, self.context.grid)
        total = 1 if isinstance(shards, Refusal) else shards.total
        return dense_rows(spec, total, tokens, self.context.order.heads_first, start=at)

    def _heads(self, rank: int, name: str) -> tuple[int, int]:
        """KV heads on the rank, and the first of them."""
        shards = shards_of(self.context.geometry.layers[name], self.context.grid)
        if isinstance(shards, Refusal):  # certified, so it is not
            return 1, 0
        return shards.heads, shards.shard(self.context.grid.rank(rank).tp_rank) * shards.heads

    def parts(self) -> list[list[str]]:
        """The group's layers, those that follow each other and are alike together."""
        stage = self.context.geometry.stage_of(self.context.grid.pp)
        found: list[list[str]] = []
        before: object = None
        for name in self.record.group.layer_names:
            alike = stage[name], self.context.geometry.layers[name]
            if alike != before:
                found.append([])
            found[-1].append(name)
            before = alike
        return found

    def shown_layers(self) -> list[str | Fold[str]]:
        """What is drawn of the layers: of a few rows of equal ones the first and the last."""
        found: list[str | Fold[str]] = []
        for part in folded(self.parts(), _PARTS_SHOWN):
            if isinstance(part, Fold):
                found.append(Fold(hidden=[name for names in part.hidden for name in names]))
            else:
                found += folded(part, (1, 1))
        return found


def visible(box: Box, rank: int, windows: Sequence[tuple[int, int]], in_record: bool) -> list[Run]:
    """The runs of a box that meet one of the windows, on the side that is drawn."""
    memory, record = box.offsets()
    side = record if in_record else memory
    wanted = np.zeros(len(side), dtype=bool)
    for start, end in windows:
        wanted |= (side < end) & (side + box.size > start)
    return [
        Run(
            rank=rank,
            number=int(i) + 1,
            memory=int(memory[i]),
            record=int(record[i]),
            size=box.size,
        )
        for i in np.flatnonzero(wanted)
    ]
