"""One block in memory beside its record: which rank's bytes go where, read off the boxes.

A page is drawn as rows: the inner of its two axes (tokens or heads) runs to the right, the outer
one downwards, so that reading order is memory order. Many rows, layers and ranks are folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import attrs
import numpy as np

from kvpolicy.boxes import Box, compose, normal
from kvpolicy.canonical import shards_of
from kvpolicy.cli.draw import FONT_SIZE, Picture, clipped, colour, text_width
from kvpolicy.context import PolicyContext
from kvpolicy.decision import LayoutDecision
from kvpolicy.errors import Refusal
from kvpolicy.pages import StridedPage
from kvpolicy.records import GroupRecord
from kvpolicy.specs import LatentSpec, LayerSpec, StateSpec
from kvpolicy.words import span_of

_T = TypeVar("_T")

_MARGIN = 16.0
_SMALL = 9.5
_LINE = 16.0
_ROW = 13.0
_LABEL = 96.0  # the words left of a row
_TAIL = 112.0  # the words right of a row
_MEMORY, _RECORD = 220.0, 380.0  # a row's own width
_MOST_CELLS = 64
_ROWS_SHOWN = (5, 2)
_RANKS_SHOWN = (6, 1)
_PARTS_SHOWN = (2, 1)
_RANKS_IN_COLUMN = 4
_INK, _PALE, _FRAME, _PADDING = "#222222", 0.35, "#8a8a8a", "#e4e4e4"


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


def _visible(box: Box, rank: int, windows: Sequence[tuple[int, int]], in_record: bool) -> list[Run]:
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


@attrs.define
class _Column:
    """Draws downwards from the top of one column."""

    picture: Picture
    scene: Scene
    x: float
    y: float
    row_width: float
    in_record: bool

    @property
    def width(self) -> float:
        return _LABEL + self.row_width + _TAIL

    @property
    def _side(self) -> str:
        return "record" if self.in_record else "memory"

    def title(self, text: str, *, bold: bool = False, swatch: str = "") -> None:
        self.y += _LINE
        at = self.x
        if swatch:
            self.picture.rect(at, self.y - 9, 10, 10, fill=swatch, stroke=_FRAME)
            at += 16
        size = FONT_SIZE if bold else _SMALL
        text = clipped(text, self.x + self.width - at, size)
        self.picture.text(at, self.y, text, size=size, bold=bold)
        self.y += 5

    def gap(self) -> None:
        self.y += 8

    def page(self, name: str, rows: Sequence[Row], boxes: Iterable[tuple[int, Box, bool]]) -> None:
        """A layer's rows, with the runs of every rank's box; pale where a peer stores them."""
        shown = folded(rows, _ROWS_SHOWN)
        data = [row for row in rows if not row.padding]
        cells = min(max(row.cells for row in data), _MOST_CELLS)
        drawn = max(row.size // row.cells for row in data) * cells
        windows = [
            (row.start, row.start + min(row.size, drawn)) for row in shown if isinstance(row, Row)
        ]
        runs = [
            (run, stored)
            for rank, box, stored in boxes
            for run in _visible(box, rank, windows, self.in_record)
        ]
        left = self.x + _LABEL
        for row in shown:
            if isinstance(row, Fold):
                self.y += _ROW
                more = f"... {len(row.hidden):,} more rows"
                self.picture.text(left, self.y - 3, more, size=_SMALL, fill=_FRAME)
                continue
            self._row(name, row, drawn, runs, first=row is rows[0])
            self.y += _ROW

    def _row(
        self, name: str, row: Row, drawn: int, runs: Sequence[tuple[Run, bool]], *, first: bool
    ) -> None:
        left, height, scale = self.x + _LABEL, _ROW - 2, self.row_width / drawn
        size = min(row.size, drawn)
        end = left + size * scale
        label = clipped(row.label, _LABEL - 8, _SMALL)
        self.picture.text(left - 6, self.y + 9, label, size=_SMALL, end=True)
        back = _PADDING if row.padding else "#ffffff"
        self.picture.rect(
            left,
            self.y,
            end - left,
            height,
            fill=back,
            stroke=_FRAME,
            row="padding" if row.padding else "bytes",
            layer=name,
            start=row.start,
            bytes=size,
            side=self._side,
        )
        for run, stored in runs:
            self._segment(name, run, stored, row.start, size, scale)
        cell = row.size / row.cells * scale
        if cell >= 4:
            for i in range(1, round(size / (row.size / row.cells))):
                x = left + i * cell
                self.picture.line(x, self.y + height - 3, x, self.y + height, _FRAME)
        told = ["..."] if row.size > size else []
        if first and row.cell:
            told.append(f"{row.cells:,} {row.cell}")
        tail = clipped(" ".join(told), _TAIL - 8, _SMALL)
        self.picture.text(end + 6, self.y + 9, tail, size=_SMALL, fill=_FRAME)

    def _segment(
        self, name: str, run: Run, stored: bool, start: int, size: int, scale: float
    ) -> None:
        """The part of a run that one row shows."""
        begins = run.record if self.in_record else run.memory
        low, high = max(begins, start), min(begins + run.size, start + size)
        if low >= high:
            return
        left, height = self.x + _LABEL + (low - start) * scale, _ROW - 2
        width = (high - low) * scale
        self.picture.rect(
            left,
            self.y,
            width,
            height,
            fill=colour(run.rank),
            opacity=1.0 if stored else _PALE,
            hint=f"rank {run.rank}, run {run.number}: {run.size:,} B, from byte {run.memory:,} of "
            f"its page to byte {run.record:,} of the record",
            layer=name,
            rank=run.rank,
            run=run.number,
            start=low,
            bytes=high - low,
            side=self._side,
            memory=run.memory,
            record=run.record,
            size=run.size,
        )
        if low == begins:
            self.picture.line(left, self.y, left, self.y + height, _INK)
            number = str(run.number)
            if width >= text_width(number, _SMALL) + 4:
                self.picture.text(left + 3, self.y + 8.5, number, size=_SMALL)

    def fold(self, names: Sequence[str]) -> None:
        """A line in place of layers."""
        layers = "1 layer" if len(names) == 1 else f"{len(names):,} layers"
        self.title(f"... {layers}: {span_of(names)}")


def draw_block(scene: Scene) -> Picture:
    """One block of the group: every rank's memory on the left, its record on the right."""
    picture = Picture()
    top = _headline(picture, scene)
    ranks = folded(range(scene.context.grid.size), _RANKS_SHOWN)
    x = _MARGIN
    column: _Column | None = None
    for i, rank in enumerate(ranks):
        if column is None or i % _RANKS_IN_COLUMN == 0:
            x = _MARGIN if column is None else x + column.width
            column = _Column(picture, scene, x, top, _MEMORY, False)
        if isinstance(rank, Fold):
            column.title(f"... ranks {rank.hidden[0]} to {rank.hidden[-1]}")
        else:
            _rank_memory(column, scene, rank)
        column.gap()
    right = x + (column.width if column else 0.0)
    record = _Column(picture, scene, right, top, _RECORD, True)
    if scene.record.canonical:
        _canonical_record(record, scene)
    else:
        _private_record(record, scene, ranks)
    return picture


def _headline(picture: Picture, scene: Scene) -> float:
    context, record = scene.context, scene.record
    grid = ", ".join(f"{name} {n}" for name, n in _grid(context) if n > 1) or "one rank"
    form = "canonical" if record.canonical else "as it lies, a slice per rank"
    order = "HND" if context.order.heads_first else "NHD"
    layers = len(record.group.layer_names)
    portable = "portable" if record.portable else "not portable"
    lines = [
        f"group {record.group.name}: {layers} layers, {grid}, {scene.decision.layout} in memory",
        f"record: {form}, {order}, {record.record_bytes:,} B, {portable}",
        "A colour is a rank, and a dark edge begins a run of bytes.",
        "Equal numbers of one layer and colour are the same bytes.",
    ]
    if any(not scene.writes(r, n) for n in scene.record.offsets for r in scene.holders(n)):
        lines.append("Pale: a peer has the same bytes and stores them; they take turns by slot.")
    picture.text(_MARGIN, 26, "One block in memory, and its record", size=15, bold=True)
    for i, line in enumerate(lines):
        picture.text(_MARGIN, 46 + i * _LINE, line)
    return 46 + len(lines) * _LINE


def _grid(context: PolicyContext) -> Iterator[tuple[str, int]]:
    grid = context.grid
    yield from (("tp", grid.tp), ("pp", grid.pp), ("dcp", grid.dcp), ("pcp", grid.pcp))


def _held(scene: Scene, rank: int) -> list[str | Fold[str]]:
    """Of the layers that are shown, those that a rank holds."""
    found: list[str | Fold[str]] = []
    for one in scene.shown_layers():
        names = one.hidden if isinstance(one, Fold) else [one]
        mine = [name for name in names if rank in scene.holders(name)]
        if mine:
            found.append(Fold(hidden=mine) if isinstance(one, Fold) else one)
    return found


def _rank_memory(column: _Column, scene: Scene, rank: int) -> None:
    layers = _held(scene, rank)
    column.title(f"rank {rank}: {_where(scene)}", bold=True, swatch=colour(rank))
    if not layers:
        column.title("holds no layer of this group")
    for one in layers:
        if isinstance(one, Fold):
            column.fold(one.hidden)
            continue
        page, box = scene.pages[one], scene.box(rank, one)
        slab = scene.decision.cross_layer_blocks
        column.title(f"{one}, from byte {page.offset:,}" if slab else one)
        if box is not None:
            column.page(one, scene.local_rows(rank, one), [(rank, box, scene.writes(rank, one))])


def _where(scene: Scene) -> str:
    if not scene.decision.cross_layer_blocks:
        return "a tensor per layer"
    stride = next(iter(scene.pages.values())).block_stride
    return f"one slab, {stride:,} B a block"


def _canonical_record(column: _Column, scene: Scene) -> None:
    column.title("canonical record", bold=True)
    for one in scene.shown_layers():
        if isinstance(one, Fold):
            column.fold(one.hidden)
            continue
        column.title(f"{one}, from byte {scene.record.offsets[one]:,}")
        boxes = [
            (rank, box, True)
            for rank in scene.holders(one)
            if scene.writes(rank, one) and (box := scene.box(rank, one)) is not None
        ]
        column.page(one, scene.canonical_rows(one), boxes)


def _private_record(column: _Column, scene: Scene, ranks: Sequence[int | Fold[int]]) -> None:
    column.title("record, a slice per rank", bold=True)
    for rank in ranks:
        if isinstance(rank, Fold):
            column.title(f"... ranks {rank.hidden[0]} to {rank.hidden[-1]}")
            continue
        for one in _held(scene, rank):
            if isinstance(one, Fold):
                column.fold(one.hidden)
                continue
            rows, box = scene.slice_rows(rank, one), scene.box(rank, one)
            column.title(f"rank {rank}, {one}, from byte {rows[0].start:,}")
            if box is not None:
                column.page(one, rows, [(rank, box, True)])
        column.gap()
