"""What every byte must be, from its logical coordinates alone; shares no code with the library.

A byte's value follows from (layer, record, half, head, token, byte of its row). Who holds it is
said by ownership, never by an offset: a rank holds the heads and tokens that are its own. Where
it lies in a record is said by the formulas of canonical format v1, coordinate by coordinate.

A *record* is numbered content of one block: all layers of a group, all heads, all
``block_size * dcp * pcp`` tokens. Recurrent state counts as one token of as many heads as a
pipeline stage has ranks, each rank's slice a head of its own.
"""

from __future__ import annotations

import functools
import zlib
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from kvpolicy import (
    AttentionSpec,
    CacheGeometry,
    LatentSpec,
    LayerGroup,
    ParallelGrid,
    PolicyContext,
    StateSpec,
)

Spec: TypeAlias = AttentionSpec | LatentSpec | StateSpec
Bytes: TypeAlias = NDArray[np.uint8]

SENTINEL = 0xFD
"""What memory holds that nobody wrote; no byte of any record has this value."""

_VALUES = 251  # values are below this prime, so that none is the sentinel


# Who holds what.


@attrs.frozen(kw_only=True)
class Place:
    """One rank: its world rank, pipeline stage, and its place in PCP and in TP."""

    rank: int
    stage: int
    pcp: int
    tp: int


@functools.lru_cache(maxsize=256)
def places(grid: ParallelGrid) -> tuple[Place, ...]:
    """Every rank in world order: stages outermost, then PCP, then TP."""
    found = [
        (stage, pcp, tp)
        for stage in range(grid.pp)
        for pcp in range(grid.pcp)
        for tp in range(grid.tp)
    ]
    return tuple(
        Place(rank=rank, stage=stage, pcp=pcp, tp=tp) for rank, (stage, pcp, tp) in enumerate(found)
    )


def all_heads(spec: Spec, grid: ParallelGrid) -> int:
    """Heads of the whole layer: 1 for a latent, one per rank of a stage for recurrent state."""
    if isinstance(spec, StateSpec):
        return grid.tp * grid.pcp
    return spec.total_kv_heads if isinstance(spec, AttentionSpec) else 1


def all_tokens(spec: Spec, grid: ParallelGrid) -> int:
    """Tokens of one record of the layer: those of a block on all context-parallel ranks."""
    return 1 if isinstance(spec, StateSpec) else spec.block_size * grid.dcp * grid.pcp


@functools.lru_cache(maxsize=4096)
def heads_of(spec: Spec, grid: ParallelGrid, place: Place) -> tuple[int, ...]:
    """The heads that a rank holds: those whose share of the model meets the rank's share."""
    if isinstance(spec, StateSpec):
        return (place.pcp * grid.tp + place.tp,)
    total, tp, mine = all_heads(spec, grid), grid.tp, place.tp
    return tuple(
        h for h in range(total) if h * tp < (mine + 1) * total and mine * total < (h + 1) * tp
    )


@functools.lru_cache(maxsize=4096)
def tokens_of(spec: Spec, grid: ParallelGrid, place: Place) -> tuple[int, ...]:
    """The tokens that a rank holds: chunks of ``cp_interleave`` are dealt out in turn."""
    ranks, mine = grid.dcp * grid.pcp, place.pcp * grid.dcp + place.tp % grid.dcp
    tokens = range(all_tokens(spec, grid))
    if ranks == 1 or isinstance(spec, StateSpec):
        return tuple(tokens)
    return tuple(token for token in tokens if token // grid.cp_interleave % ranks == mine)


@functools.lru_cache(maxsize=4096)
def holders(spec: Spec, grid: ParallelGrid, place: Place) -> tuple[int, ...]:
    """The world ranks of a stage that hold exactly what this one holds, itself too, in order."""
    mine = heads_of(spec, grid, place), tokens_of(spec, grid, place)
    return tuple(
        other.rank
        for other in places(grid)
        if other.stage == place.stage
        and (heads_of(spec, grid, other), tokens_of(spec, grid, other)) == mine
    )


def writes(spec: Spec, grid: ParallelGrid, place: Place, slot: int) -> bool:
    """Whether a rank writes its part of a canonical page to a slot: holders take turns."""
    turns = holders(spec, grid, place)
    return turns[slot % len(turns)] == place.rank


def stage_layers(context: PolicyContext, place: Place) -> dict[str, Spec]:
    """The layers that a rank holds, in the model's order."""
    counts = context.geometry.stages or _even(len(context.geometry.layers), context.grid.pp)
    first = sum(counts[: place.stage])
    names = list(context.geometry.layers)[first : first + counts[place.stage]]
    return {name: context.geometry.layers[name] for name in names}


def _even(layers: int, stages: int) -> list[int]:
    """As even as can be; what is left over goes to the stages before the last, from the back."""
    counts, extra = [layers // stages] * stages, layers % stages
    return [n + (1 if stages - 1 - extra <= i < stages - 1 else 0) for i, n in enumerate(counts)]


def record_layers(geometry: CacheGeometry, group: LayerGroup) -> list[str]:
    """A group's layers in the model's order, in which a record has them."""
    return [name for name in geometry.layers if name in group.layer_names]


# What it is.


def row_bytes(spec: Spec) -> int:
    """Bytes of one (token, head) row, of one half where K and V are split."""
    if isinstance(spec, StateSpec):
        return spec.state_bytes
    if isinstance(spec, LatentSpec):
        return spec.row_bytes
    key = spec.head_size * spec.itemsize + spec.scale_bytes
    value = spec.v_head_size * spec.itemsize + spec.scale_bytes
    return key if spec.kv_packing == "split" else key + value


def half_count(spec: Spec) -> int:
    """2 where a page is a K half and a V half, else 1."""
    return 2 if isinstance(spec, AttentionSpec) and spec.kv_packing == "split" else 1


def values(
    layer: int, record: int, half: object, head: object, token: object, byte: object
) -> Bytes:
    """The values of bytes by their coordinates: a splitmix64 hash, so that neighbours differ.

    Args:
        layer: its number, see `number_of`.
        record: the record's number.
        half: 0 for packed rows and for K, 1 for V.
        head: of the whole model's layer.
        token: of the record.
        byte: of the row. These four are numbers or arrays that broadcast together.
    """
    with np.errstate(over="ignore"):  # numbers wrap around, as the hash wants them to
        number = np.asarray(record * 4096 + layer, dtype=np.uint64)
        for part, base in ((half, 2), (head, 4096), (token, 65_536), (byte, 65_536)):
            number = number * np.uint64(base) + np.asarray(part, dtype=np.uint64)
        z = number + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) % np.uint64(_VALUES)).astype(np.uint8)


@functools.lru_cache(maxsize=2048)
def _content(spec: Spec, heads: int, tokens: int, layer: int, record: int) -> Bytes:
    half, head, token, byte = np.ogrid[: half_count(spec), :heads, :tokens, : row_bytes(spec)]
    found = values(layer, record, half, head, token, byte)
    found.flags.writeable = False
    return found


def content(context: PolicyContext, name: str, record: int) -> Bytes:
    """What a layer of a record holds: shape (halves, heads, tokens, bytes of a row)."""
    spec, grid = context.geometry.layers[name], context.grid
    return _content(spec, all_heads(spec, grid), all_tokens(spec, grid), number_of(name), record)


def number_of(name: str) -> int:
    """A layer's number for `values`: of its name alone, so that any model may hold it."""
    return zlib.crc32(name.encode()) % 4096


def held(context: PolicyContext, name: str, place: Place, record: int) -> Bytes:
    """What a rank holds of a layer of a record: shape (halves, heads, tokens, bytes of a row)."""
    spec, grid = context.geometry.layers[name], context.grid
    heads, tokens = list(heads_of(spec, grid, place)), list(tokens_of(spec, grid, place))
    return content(context, name, record)[:, heads][:, :, tokens]


def dense_page(context: PolicyContext, name: str, place: Place, record: int) -> Bytes:
    """A rank's page of a record without padding, in the engine's head/token order, flat."""
    mine = held(context, name, place, record)
    return (mine if _heads_first(context.layout.value) else mine.swapaxes(1, 2)).reshape(-1)


# Where it lies in a record.


def _heads_first(layout: str) -> bool:
    return layout.index("H") < layout.index("N")


def page_offsets(spec: Spec, grid: ParallelGrid, heads_first: bool) -> NDArray[np.int64]:
    """Canonical format v1: where each row begins in its page, by (half, head, token)."""
    heads, tokens, size = all_heads(spec, grid), all_tokens(spec, grid), row_bytes(spec)
    half, head, token = np.ogrid[: half_count(spec), :heads, :tokens]
    place = head * tokens + token if heads_first else token * heads + head
    found: NDArray[np.int64] = half * (tokens * heads * size) + place * size
    return found


def page_bytes(spec: Spec, grid: ParallelGrid) -> int:
    """Bytes of a canonical page."""
    return half_count(spec) * all_heads(spec, grid) * all_tokens(spec, grid) * row_bytes(spec)


def stored_order(context: PolicyContext) -> bool:
    """Whether stored pages have heads first: the canonical order asked for, else the engine's."""
    asked = context.canonical_order if context.canonical else None
    return _heads_first((asked or context.layout).value)


def record_bytes(context: PolicyContext, group: LayerGroup) -> int:
    """Bytes of a group's record."""
    return len(record(context, group, 0))


def record(context: PolicyContext, group: LayerGroup, number: int) -> Bytes:
    """A whole record as it must be stored, canonical or private, as the context asks.

    A canonical record is the canonical pages of the group's layers, in the model's order; a
    private one is each rank's dense pages, in world order.
    """
    grid, names = context.grid, record_layers(context.geometry, group)
    parts: list[Bytes] = []
    if not context.canonical:
        for place in places(grid):
            mine = [name for name in stage_layers(context, place) if name in names]
            parts += [dense_page(context, name, place, number) for name in mine]
        return np.concatenate(parts)
    for name in names:
        spec = context.geometry.layers[name]
        page = np.empty(page_bytes(spec, grid), dtype=np.uint8)
        at = page_offsets(spec, grid, stored_order(context))
        page[at[..., None] + np.arange(row_bytes(spec))] = content(context, name, number)
        parts.append(page)
    return np.concatenate(parts)


def store_part(
    row: Bytes, context: PolicyContext, group: LayerGroup, place: Place, slot: int, number: int
) -> None:
    """Writes into a row what one rank stores of a record, and nothing else."""
    grid, names, at = context.grid, record_layers(context.geometry, group), 0
    mine = stage_layers(context, place)
    if not context.canonical:
        for other in places(grid):
            for name in (n for n in stage_layers(context, other) if n in names):
                page = dense_page(context, name, other, number)
                if other == place:
                    row[at : at + len(page)] = page
                at += len(page)
        return
    for name in names:
        spec = context.geometry.layers[name]
        if name in mine and writes(spec, grid, place, slot):
            offsets = at + page_offsets(spec, grid, stored_order(context))
            heads, tokens = list(heads_of(spec, grid, place)), list(tokens_of(spec, grid, place))
            own = offsets[:, heads][:, :, tokens]
            row[own[..., None] + np.arange(row_bytes(spec))] = held(context, name, place, number)
        at += page_bytes(spec, grid)


def coordinates(context: PolicyContext, group: LayerGroup, offset: int) -> str:
    """What lies at a byte of a group's record, in words."""
    grid, names, at = context.grid, record_layers(context.geometry, group), 0
    if not context.canonical:
        for place in places(grid):
            for name in (n for n in stage_layers(context, place) if n in names):
                size = len(dense_page(context, name, place, 0))
                if offset < at + size:
                    return f"byte {offset - at} of the page of layer {name!r} on rank {place.rank}"
                at += size
        return "past the record's end"
    for name in names:
        spec = context.geometry.layers[name]
        inside, size = offset - at, row_bytes(spec)
        if inside < page_bytes(spec, grid):
            starts = page_offsets(spec, grid, stored_order(context))
            half, head, token = np.argwhere((starts <= inside) & (inside < starts + size))[0]
            return (
                f"layer {name!r}, half {half}, head {head}, token {token}, byte "
                f"{inside - starts[half, head, token]}"
            )
        at += page_bytes(spec, grid)
    return "past the record's end"
