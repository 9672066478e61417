"""Reads where a layer's pages lie off its tensor's shape and strides. Knows nothing of torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import attrs

from kvpolicy.errors import Refusal
from kvpolicy.layout import KVCacheLayout
from kvpolicy.pages import (
    PageShape,
    StridedPage,
    kernel_page,
    page_shape,
    placed_box,
    unplaceable,
)
from kvpolicy.specs import AttentionSpec, LayerSpec, StateSpec


@attrs.frozen(kw_only=True)
class TensorFacts:
    """What is read off a tensor; strides and offset in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    offset: int

    def dims(self) -> list[tuple[int, int]]:
        """``(count, stride)`` of the dimensions after the blocks that hold more than one."""
        pairs = zip(self.shape[1:], self.strides[1:], strict=True)
        return [(count, stride) for count, stride in pairs if count != 1]

    def flat_bytes(self) -> int | None:
        """Bytes of one block's tail if that is one run, else None."""
        extent = self.itemsize
        for count, stride in reversed(self.dims()):
            if stride != extent:
                return None
            extent *= count
        return extent


_Axes = Mapping[str, int]
"""Axis -> elements, in no order: K halves, H heads, N tokens, P the two parts of a packed row,
C elements of a row, X elements of all heads' rows of a token."""


def _templates(spec: LayerSpec, row: PageShape, itemsize: int, row_bytes: int) -> list[_Axes]:
    """The shapes in which an engine may hand a page, as axes of tensor elements."""
    if row_bytes % itemsize:
        return []
    content = row_bytes // itemsize
    whole = {"K": row.halves, "H": row.heads, "N": row.tokens, "C": content}
    found: list[_Axes] = [whole]
    if not row.heads_first or row.heads == 1:
        found.append({"K": row.halves, "N": row.tokens, "X": row.heads * content})
    even = isinstance(spec, AttentionSpec) and spec.head_size == spec.v_head_size
    if even and not spec.split and content % 2 == 0:
        found.append({"H": row.heads, "N": row.tokens, "P": 2, "C": content // 2})
    return [{axis: n for axis, n in axes.items() if n != 1} for axes in found]


def _assignments(axes: _Axes, dims: Sequence[tuple[int, int]]) -> list[dict[str, int]]:
    """Axis -> stride, for every way to name the dims whose sizes agree."""
    if len(axes) != len(dims):
        return []
    return [
        {axis: stride for axis, (_, stride) in zip(names, dims, strict=True)}
        for names in itertools.permutations(axes)
        if all(axes[axis] == count for axis, (count, _) in zip(names, dims, strict=True))
    ]


def _in_order(strides: Mapping[str, int], row: PageShape, itemsize: int) -> bool:
    """Whether strides are those of the declared head/token order.

    The content is one run, tokens follow each other with nothing between them, and between the
    heads of an HND page, or the halves of a split one, only whole pages of others may lie.
    """
    half_page, head_page = row.half_stride, row.tokens * row.row_bytes
    if strides.get("C", itemsize) != itemsize or strides.get("X", itemsize) != itemsize:
        return False
    if "P" in strides and strides["P"] * 2 != row.row_bytes:
        return False
    if strides.get("N", row.token_stride) != row.token_stride:
        return False
    head = strides.get("H", row.head_stride)
    if row.heads_first:
        if head < head_page or head % head_page:
            return False
    elif head != row.head_stride:
        return False
    half = strides.get("K", half_page)
    return half >= half_page and half % head_page == 0


def _read(strides: Mapping[str, int], row: PageShape) -> tuple[int, int, int]:
    """The byte strides of halves, heads and tokens; an axis that is not named is dense."""
    return (
        strides.get("K", row.half_stride),
        strides.get("H", row.head_stride),
        strides.get("N", row.token_stride),
    )


def _fits(
    facts: TensorFacts, spec: LayerSpec, row: PageShape, row_bytes: int
) -> list[dict[str, int]]:
    dims = facts.dims()
    return [
        found
        for axes in _templates(spec, row, facts.itemsize, row_bytes)
        for found in _assignments(axes, dims)
    ]


def _is_raw_page(facts: TensorFacts, spec: LayerSpec, row: PageShape, ratio: int) -> bool:
    """Whether the tail is one run: a row of bytes, or any shape of an opaque state."""
    one_dim = len(facts.dims()) <= 1 or isinstance(spec, StateSpec)
    padded = row.page_bytes + spec.page_padding // ratio
    return one_dim and facts.flat_bytes() in (row.page_bytes, padded)


def bare_row_bytes(spec: LayerSpec, shape: PageShape) -> int:
    """Bytes of a row without its inline scales."""
    return shape.row_bytes - (1 if spec.split else 2) * spec.scale_bytes


def _describe(spec: LayerSpec, row: PageShape, rows: int, itemsize: int) -> str:
    count, rest = divmod(row.row_bytes, itemsize)
    content = f"rows of {row.row_bytes} B" if rest else f"{count} elements of {itemsize} B"
    order = (
        f"{row.heads} heads x {row.tokens} tokens"
        if row.heads_first
        else f"{row.tokens} tokens x {row.heads} heads"
    )
    return " x ".join([f"{rows} rows", *(["2 halves"] if spec.split else []), order, content])


def page_of_tensor(
    facts: TensorFacts, spec: LayerSpec, heads: int, layout: KVCacheLayout, num_blocks: int
) -> StridedPage | Refusal:
    """Reads where the pages of a layer lie off its tensor, or says what contradicts the spec.

    Dimension 0 counts blocks (kernel blocks, where those are smaller). The other dimensions may
    come in any order and are told apart by their sizes and, where sizes are equal, by the
    declared layout; a tail that is one run of bytes is taken as the dense page.
    """
    ratio, rest = divmod(spec.block_size, spec.kernel_block_size)
    if rest:
        return unplaceable(spec, layout) or Refusal("kernel-block-not-dividing", str(spec))
    shape = page_shape(spec, heads, spec.block_size, layout)
    row = kernel_page(shape, ratio)
    rows = num_blocks * ratio
    found = f"found shape {list(facts.shape)} of {facts.itemsize} B elements"
    expected = f"expected {_describe(spec, row, rows, facts.itemsize)}"
    if not facts.shape or facts.shape[0] != rows:
        halves_first = len(facts.shape) > 1 and facts.shape[0] == 2 and facts.shape[1] == rows
        declare = "" if spec.split else "declare kv_packing='split' and "
        advice = f"; K and V lie outermost: {declare}pass tensor.movedim(1, 0)"
        hint = advice if halves_first else ""
        if ratio > 1 and facts.shape and facts.shape[0] == num_blocks:
            hint = f"; a block of {spec.block_size} tokens is {ratio} kernel blocks, a row each"
        return Refusal("shape-contradicts-spec", f"{found}, {expected}{hint}")
    row_stride = facts.strides[0] if rows > 1 else row.page_bytes + spec.page_padding // ratio
    named = _fits(facts, spec, row, row.row_bytes)
    readings = {_read(s, row) for s in named if _in_order(s, row, facts.itemsize)}
    if len(readings) > 1:
        return Refusal(
            "stride-contradicts-layout",
            f"{found} and strides {list(facts.strides)} B, which tell the 2 halves and the 2 heads "
            "apart in two ways; allocate each page as one run of bytes",
        )
    strides = next(iter(readings), None)
    if strides is None and _is_raw_page(facts, spec, row, ratio):
        strides = _read({}, row)
    if strides is None:
        if named:
            return Refusal(
                "stride-contradicts-layout",
                f"{found} and strides {list(facts.strides)} B, which is not the order "
                f"{layout.order} with nothing between tokens; {expected}; declare the engine's "
                "layout and its padding",
            )
        bare = bare_row_bytes(spec, row)
        short = attrs.evolve(row, row_bytes=bare)
        if spec.scale_bytes and (
            _fits(facts, spec, short, bare) or _is_raw_page(facts, spec, short, ratio)
        ):
            return Refusal(
                "scale-does-not-fit",
                f"rows of {bare} B in memory cannot hold the spec's rows of {row.row_bytes} B with "
                "inline scales; allocate the scales inside the rows or declare scale_bytes=0",
            )
        return Refusal("shape-contradicts-spec", f"{found}, {expected}")
    page = StridedPage(
        offset=facts.offset,
        block_stride=row_stride * ratio,
        box=placed_box(shape, ratio, row_stride, *strides),
    )
    return _checked(page, spec, layout, num_blocks, ratio)


def _checked(
    page: StridedPage, spec: LayerSpec, layout: KVCacheLayout, num_blocks: int, ratio: int
) -> StridedPage | Refusal:
    padded = page.page_bytes + spec.page_padding
    if num_blocks * ratio > 1 and spec.page_padding and page.block_stride < padded:
        return Refusal(
            "stride-contradicts-layout",
            f"block stride {page.block_stride} B is less than the declared page of "
            f"{page.page_bytes} B with its padding of {spec.page_padding} B",
        )
    if ratio > 1 and page.block_stride > padded:
        return Refusal(
            "kernel-split-needs-layer-compact",
            f"the {ratio} kernel blocks of a block lie {page.block_stride // ratio} B apart, among "
            f"other layers; allocate the layer by itself ({layout.order}), or make the block and "
            "the kernel block equal",
        )
    if not page.is_disjoint(num_blocks):
        return Refusal(
            "overlapping",
            f"pages of {page.page_bytes} B at a block stride of {page.block_stride} B share bytes; "
            "give each block memory of its own",
        )
    return page
