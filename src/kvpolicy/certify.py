"""Proof that the ranks' pages are the canonical page, every byte once; or the reason why not."""

from __future__ import annotations

from functools import lru_cache

import attrs

from kvpolicy.boxes import Box, boxes_tile, compose
from kvpolicy.canonical import PageMapping, local_heads, page_mapping
from kvpolicy.errors import GeometryError, LayoutError, Refusal
from kvpolicy.grid import ParallelGrid, Rank
from kvpolicy.layout import KVCacheLayout
from kvpolicy.pages import page_in_layout, unplaceable
from kvpolicy.specs import SPEC_TYPES, LayerSpec


@attrs.frozen(kw_only=True)
class Certificate:
    """A proof for one (spec, grid, layout, canonical order), over every rank of a stage.

    Attributes:
        spec, grid, layout, canonical_order: what was proved.
        mappings: one `PageMapping` per rank of a pipeline stage.
    """

    spec: LayerSpec
    grid: ParallelGrid
    layout: KVCacheLayout
    canonical_order: KVCacheLayout
    mappings: tuple[PageMapping, ...] = attrs.field(repr=False, eq=False)

    @property
    def portable(self) -> bool:
        """Whether the canonical page means the same under any grid."""
        return self.mappings[0].portable

    @property
    def canonical_page_bytes(self) -> int:
        """Bytes of the canonical page."""
        return self.mappings[0].canonical_page_bytes

    def mapping(self, rank: int | Rank) -> PageMapping:
        """The mapping of a rank, given by world rank (any stage) or as a `Rank`.

        Raises:
            GeometryError: not a rank of this grid.
        """
        if isinstance(rank, Rank):
            rank = rank.rank
        return self.mappings[self.grid.rank(rank).rank % self.grid.stage_size]


def certify(
    spec: LayerSpec,
    grid: ParallelGrid,
    layout: KVCacheLayout = KVCacheLayout.LBHNC,
    canonical_order: KVCacheLayout | None = None,
) -> Certificate | Refusal:
    """Proves one layer's pages for every rank of a grid, or says why they cannot be proved.

    Args:
        spec: what the layer holds.
        grid: the ranks; pp plays no part, since each stage has its own layers.
        layout: where the pages lie; gives the head/token order of the dense page.
        canonical_order: LBHNC or LBNHC, the order of the canonical page; None: the layout's.

    Returns:
        A `Certificate`, or a `Refusal` with one of `REFUSAL_CODES`. Equal arguments are proved
        once per process.

    Raises:
        GeometryError: not a spec or not a grid.
        LayoutError: not a layout, or a canonical order other than LBHNC and LBNHC.
    """
    if not isinstance(spec, SPEC_TYPES):
        raise GeometryError(f"certify takes a layer spec, not {type(spec).__name__}")
    if not isinstance(grid, ParallelGrid):
        raise GeometryError(f"certify takes a ParallelGrid, not {type(grid).__name__}")
    layout = KVCacheLayout.parse(layout)
    order = canonical_order_of(layout, canonical_order)
    proof = _prove(spec, attrs.evolve(grid, pp=1), layout, order)
    if isinstance(proof, Refusal):
        return proof
    return Certificate(spec=spec, grid=grid, layout=layout, canonical_order=order, mappings=proof)


def canonical_order_of(
    layout: KVCacheLayout, canonical_order: KVCacheLayout | None
) -> KVCacheLayout:
    """The order of the canonical page: the one that is asked for, else the layout's.

    Raises:
        LayoutError: an order other than LBHNC and LBNHC.
    """
    if canonical_order is None:
        return layout.order
    order = KVCacheLayout.parse(canonical_order)
    if order is not order.order:
        raise LayoutError(f"a canonical order is LBHNC (HND) or LBNHC (NHD), not {order}")
    return order


@lru_cache(maxsize=1024)
def _prove(
    spec: LayerSpec, grid: ParallelGrid, layout: KVCacheLayout, order: KVCacheLayout
) -> tuple[PageMapping, ...] | Refusal:
    if (refusal := unplaceable(spec, layout)) is not None:
        return refusal
    mappings = []
    for rank in grid.ranks():
        mapping = page_mapping(spec, grid, rank, layout, order)
        if isinstance(mapping, Refusal):
            return mapping
        mappings.append(mapping)
    return _proved(spec, grid, layout, tuple(mappings))


def _proved(
    spec: LayerSpec, grid: ParallelGrid, layout: KVCacheLayout, mappings: tuple[PageMapping, ...]
) -> tuple[PageMapping, ...] | Refusal:
    heads = local_heads(spec, grid)
    if isinstance(heads, Refusal):
        return heads
    page = page_in_layout(spec, heads, layout, num_blocks=2)
    if isinstance(page, Refusal):
        return page
    local_boxes: set[Box] = set()
    writers: dict[int, list[Box]] = {}
    for mapping in mappings:
        local_boxes.add(attrs.evolve(mapping.box, to_offset=0))
        writers.setdefault(mapping.writer_index, []).append(mapping.box)
    local_bytes, whole_bytes = mappings[0].local_page_bytes, mappings[0].canonical_page_bytes
    proofs: list[bool | Refusal] = [
        sorted(writers) == list(range(mappings[0].num_writers))
        and len({(m.num_writers, m.canonical_page_bytes) for m in mappings}) == 1
    ]
    proofs += [boxes_tile([b.inverse()], local_bytes) for b in local_boxes]
    # Each writer's ranks hold the same boxes in the same order: most often one proof for all.
    proofs += [boxes_tile(b, whole_bytes) for b in {*map(tuple, writers.values())}]
    for proof in proofs:
        if isinstance(proof, Refusal):
            return proof
        if not proof:
            return Refusal(
                "not-tiling",
                f"the pages of the {len(mappings)} ranks do not tile the canonical page of "
                f"{whole_bytes} B exactly once; this is a fault of kvpolicy, please report it",
            )
    if compose(page.box, mappings[0].box) is None:
        return Refusal(
            "interleave-crosses-kernel-block",
            f"chunks of cp_interleave {grid.cp_interleave} tokens straddle kernel blocks of "
            f"{spec.kernel_block_size}; choose sizes of which one divides the other",
        )
    return mappings
