"""One block in memory beside its record: which rank's bytes go where, read off the boxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvpolicy.boxes import Box
from kvpolicy.cli.draw import FONT_SIZE, Picture, clipped, colour, text_width
from kvpolicy.cli.scene import Fold, Row, Run, Scene, folded, visible
from kvpolicy.context import PolicyContext
from kvpolicy.words import span_of

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
_RANKS_IN_COLUMN = 4
_INK, _PALE, _FRAME, _PADDING = "#222222", 0.35, "#8a8a8a", "#e4e4e4"


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
            for run in visible(box, rank, windows, self.in_record)
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
