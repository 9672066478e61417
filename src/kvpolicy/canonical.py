"""Maps a rank's dense page into the canonical page: the only room that knows layout and ranks.

Canonical format v1. T is ``block_size * cp`` tokens, H the model's KV heads, R a row's bytes:

* NHD: ``half*T*H*R + (token*H + head)*R``; HND: ``half*H*T*R + (head*T + token)*R``;
  packed K/V has one half.
* a latent is attention with one head; recurrent state lies side by side, a slice per rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvpolicy.boxes import Box, Dim, box, joined
from kvpolicy.errors import Refusal
from kvpolicy.grid import HeadShards, ParallelGrid, Rank, head_shards
from kvpolicy.layout import KVCacheLayout
from kvpolicy.pages import page_shape
from kvpolicy.specs import LayerSpec, PagedSpec, StateSpec


@attrs.frozen(kw_only=True)
class PageMapping:
    """One rank's dense page of one layer inside the canonical page.

    Attributes:
        local_page_bytes: bytes of the dense page, without padding.
        canonical_page_bytes: bytes of the canonical page.
        num_writers: ranks that hold the same bytes; for slot s, rank ``s % num_writers`` of them
            writes.
        writer_index: this rank's place among them.
        portable: whether the canonical page means the same under any grid.
        box: dense page -> canonical page.
    """

    local_page_bytes: int
    canonical_page_bytes: int
    num_writers: int
    writer_index: int
    portable: bool
    box: Box

    def byte_runs(self) -> Iterable[tuple[int, int, int]]:
        """``(local_offset, canonical_offset, size)``, merged, sorted by canonical offset."""
        return joined(self.box.runs())


def local_heads(spec: LayerSpec, grid: ParallelGrid) -> int | Refusal:
    """KV heads of the layer on one rank; 1 for a latent and for recurrent state."""
    shards = shards_of(spec, grid)
    return shards if isinstance(shards, Refusal) else shards.heads


def shards_of(spec: LayerSpec, grid: ParallelGrid) -> HeadShards | Refusal:
    """How the layer's heads lie over TP; recurrent state counts as one head of its own."""
    if isinstance(spec, StateSpec):
        return HeadShards(total=1, count=1, replicas=1)
    return head_shards(spec.total_kv_heads, grid)


def page_mapping(
    spec: LayerSpec,
    grid: ParallelGrid,
    rank: Rank,
    layout: KVCacheLayout,
    canonical_order: KVCacheLayout,
) -> PageMapping | Refusal:
    """The mapping of one rank's page, not yet proved."""
    if isinstance(spec, StateSpec):
        place = rank.rank % grid.stage_size
        return PageMapping(
            local_page_bytes=spec.state_bytes,
            canonical_page_bytes=spec.state_bytes * grid.stage_size,
            num_writers=1,
            writer_index=0,
            portable=False,
            box=Box(spec.state_bytes, (), 0, place * spec.state_bytes),
        )
    if grid.cp > 1 and spec.block_size % grid.cp_interleave:
        return Refusal(
            "interleave-not-dividing",
            f"cp_interleave {grid.cp_interleave} does not divide block size {spec.block_size}; "
            f"choose a divisor of {spec.block_size}",
        )
    shards = head_shards(spec.total_kv_heads, grid)
    if isinstance(shards, Refusal):
        return shards
    return _paged(spec, grid, rank, layout, canonical_order, shards)


def _paged(
    spec: PagedSpec,
    grid: ParallelGrid,
    rank: Rank,
    layout: KVCacheLayout,
    canonical_order: KVCacheLayout,
    shards: HeadShards,
) -> PageMapping:
    local = page_shape(spec, shards.heads, spec.block_size, layout)
    whole = page_shape(spec, shards.total, spec.block_size * grid.cp, canonical_order)
    chunk = grid.cp_interleave if grid.cp > 1 else spec.block_size
    at = (
        shards.shard(rank.tp_rank) * shards.heads * whole.head_stride
        + rank.cp_rank * chunk * whole.token_stride
    )
    mapped = box(
        local.row_bytes,
        [
            Dim(local.halves, local.half_stride, whole.half_stride),
            Dim(shards.heads, local.head_stride, whole.head_stride),
            Dim(
                spec.block_size // chunk,
                chunk * local.token_stride,
                chunk * grid.cp * whole.token_stride,
            ),
            Dim(chunk, local.token_stride, whole.token_stride),
        ],
        0,
        at,
    )
    return PageMapping(
        local_page_bytes=local.page_bytes,
        canonical_page_bytes=whole.page_bytes,
        num_writers=shards.replicas // grid.dcp,
        writer_index=(rank.tp_rank % shards.replicas) // grid.dcp,
        portable=True,
        box=mapped,
    )
