"""Where a rank's dense page lies in memory, as a layout says.

A *dense page* is one layer of one block on one rank without padding, in the head/token order of
the layout; for split K/V the K half, then the V half. `StridedPage` places it.
"""

from __future__ import annotations

import attrs

from kvpolicy.boxes import Box, Dim, box, disjoint
from kvpolicy.errors import Refusal
from kvpolicy.layout import KVCacheLayout
from kvpolicy.specs import LayerSpec, StateSpec


@attrs.frozen(kw_only=True)
class PageShape:
    """The axes of a dense page: counts, and the bytes of one (token, head) row."""

    halves: int
    heads: int
    tokens: int
    row_bytes: int
    heads_first: bool

    @property
    def page_bytes(self) -> int:
        """Bytes of the page."""
        return self.halves * self.heads * self.tokens * self.row_bytes

    @property
    def head_stride(self) -> int:
        """Bytes from one head to the next."""
        return self.row_bytes * (self.tokens if self.heads_first else 1)

    @property
    def token_stride(self) -> int:
        """Bytes from one token to the next."""
        return self.row_bytes * (1 if self.heads_first else self.heads)

    @property
    def half_stride(self) -> int:
        """Bytes from the K half to the V half."""
        return self.row_bytes * self.heads * self.tokens


def page_shape(spec: LayerSpec, heads: int, tokens: int, layout: KVCacheLayout) -> PageShape:
    """The dense page of ``tokens`` tokens of ``heads`` heads in the layout's head/token order."""
    row = spec.state_bytes if isinstance(spec, StateSpec) else spec.row_bytes
    return PageShape(
        halves=spec.halves,
        heads=heads,
        tokens=tokens,
        row_bytes=row,
        heads_first=layout.heads_first,
    )


@attrs.frozen(kw_only=True)
class StridedPage:
    """The dense pages of every block of a layer, as they lie in one tensor's storage.

    Attributes:
        offset: bytes from the start of the storage to block 0's page.
        block_stride: bytes from one block's page to the next one's.
        box: memory (relative to the page's start) -> dense page.
    """

    offset: int
    block_stride: int
    box: Box

    @property
    def page_bytes(self) -> int:
        """Bytes of one dense page."""
        return self.box.bytes

    def span_bytes(self, num_blocks: int) -> int:
        """Bytes from block 0's first byte to one past the last block's last byte."""
        return (num_blocks - 1) * self.block_stride + self.box.from_end

    def end(self, num_blocks: int) -> int:
        """One past the last byte, from the start of the storage."""
        return self.offset + self.span_bytes(num_blocks)

    def is_disjoint(self, num_blocks: int) -> bool:
        """Whether no two runs of any blocks share a byte."""
        dims = [(d.times, d.from_stride) for d in self.box.dims]
        return disjoint(self.box.size, [*dims, (num_blocks, self.block_stride)])


def unplaceable(spec: LayerSpec, layout: KVCacheLayout) -> Refusal | None:
    """Why pages of this spec cannot lie in this layout, or None."""
    if spec.split and not layout.block_compact:
        return Refusal(
            "kv-halves-need-block-compact",
            f"split K/V needs a page that is one run of bytes, which {layout} does not give; use "
            f"{layout.order} or {layout.slab}, or packed K/V",
        )
    if spec.page_padding and not layout.block_compact:
        return Refusal(
            "padding-needs-block-compact",
            f"a page padded by {spec.page_padding} B must be one run of bytes, which {layout} does "
            f"not give; use {layout.order} or {layout.slab}",
        )
    ratio, rest = divmod(spec.block_size, spec.kernel_block_size)
    if rest:
        return Refusal(
            "kernel-block-not-dividing",
            f"a kernel block of {spec.kernel_block_size} tokens does not divide the block of "
            f"{spec.block_size}; choose a divisor of {spec.block_size}",
        )
    if ratio > 1 and not layout.layer_compact:
        return Refusal(
            "kernel-split-needs-layer-compact",
            f"the kernel addresses blocks of {spec.kernel_block_size} tokens, so a block of "
            f"{spec.block_size} is {ratio} kernel blocks, which {layout} spreads among the other "
            f"layers; use {layout.order}, or make the two sizes equal",
        )
    if spec.page_padding % ratio:
        return Refusal(
            "kernel-block-not-dividing",
            f"a padding of {spec.page_padding} B cannot be shared evenly by the {ratio} kernel "
            f"blocks of a block; choose a multiple of {ratio}",
        )
    return None


def kernel_page(shape: PageShape, ratio: int) -> PageShape:
    """The part of a page that one of the ``ratio`` kernel blocks of a block holds."""
    return attrs.evolve(shape, tokens=shape.tokens // ratio)


def placed_box(
    shape: PageShape, ratio: int, row_stride: int, half: int, head: int, token: int
) -> Box:
    """Memory -> dense, for axes at the given byte strides inside each of ``ratio`` kernel rows."""
    kernel_tokens = shape.tokens // ratio
    return box(
        shape.row_bytes,
        [
            Dim(shape.halves, half, shape.half_stride),
            Dim(shape.heads, head, shape.head_stride),
            Dim(ratio, row_stride, kernel_tokens * shape.token_stride),
            Dim(kernel_tokens, token, shape.token_stride),
        ],
    )


def page_in_layout(
    spec: LayerSpec,
    heads: int,
    layout: KVCacheLayout,
    *,
    num_blocks: int,
    offset: int = 0,
    num_layers: int = 1,
    slab_block_bytes: int | None = None,
) -> StridedPage | Refusal:
    """Where an engine that follows the layout puts the pages.

    Args:
        spec: what the layer holds.
        heads: KV heads on this rank.
        layout: the physical order.
        num_blocks: blocks of the cache.
        offset: bytes from the start of the storage to the layer's first byte.
        num_layers: layers that lie together where the layout interleaves them.
        slab_block_bytes: bytes of one block of all layers, where pages differ in size.
    """
    if (refusal := unplaceable(spec, layout)) is not None:
        return refusal
    shape = page_shape(spec, heads, spec.block_size, layout)
    ratio = spec.block_size // spec.kernel_block_size
    row = kernel_page(shape, ratio)
    row_stride = row.page_bytes + spec.page_padding // ratio
    block_stride, half, head, token = (
        row_stride * ratio,
        row.half_stride,
        row.head_stride,
        row.token_stride,
    )
    if layout is KVCacheLayout.LHBNC:
        block_stride, row_stride = shape.head_stride, row.head_stride
        head = num_blocks * shape.head_stride
    elif layout.block_outermost:
        if layout is KVCacheLayout.BHLNC:
            head *= num_layers
        block_stride = slab_block_bytes or block_stride * num_layers
    placed = placed_box(shape, ratio, row_stride, half, head, token)
    return StridedPage(offset=offset, block_stride=block_stride, box=placed)
