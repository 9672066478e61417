"""An engine's cache memory of one rank: real strided tensors, seen by address and by coordinates.

Every allocation has guard zones and is filled with `oracle.SENTINEL`. A layer's *view* is a byte
tensor of shape (rows, halves, heads, tokens, bytes of a row), ``rows`` counting kernel blocks,
through which the oracle writes and reads by ordinary indexing, whatever the strides behind it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs
import numpy as np
import torch

from kvpolicy import KVCaches, LayoutDecision, PolicyContext, SlabPlacement, StateSpec
from kvpolicy.testing import oracle

GUARD_BYTES = 64


@attrs.frozen(kw_only=True)
class Allocation:
    """How an engine allocates and shows its caches, where its context leaves it a choice.

    Attributes:
        slab: a slab cut by its layer dimension, named by placements in bytes, handed over as one
            view per layer, or with heads outside layers (BHLNC). A choice that the specs do not
            allow becomes "placements".
        layers: per-layer caches dense, or with heads outside blocks (LHBNC).
        typed: whether two-byte elements are shown as float16 instead of bytes.
        axes: the order in which a page's dimensions (halves, heads, tokens, row) are shown.
        lead: bytes of the storage before the cache, beside the guard; a multiple of 8.
    """

    slab: Literal["dimension", "placements", "views", "heads-apart"] = "dimension"
    layers: Literal["dense", "heads-apart"] = "dense"
    typed: bool = False
    axes: tuple[int, int, int, int] = (0, 1, 2, 3)
    lead: int = 0


@attrs.define(kw_only=True, eq=False)
class Memory:
    """One rank's memory.

    Attributes:
        place: whose it is.
        allocations: every allocation whole, with its guards: one dimension of bytes.
        views: layer name -> bytes by coordinates (see the module).
        ratios: layer name -> kernel blocks of a block.
        caches: what the engine hands over.
    """

    place: oracle.Place
    allocations: list[torch.Tensor] = attrs.field(factory=list, repr=False)
    views: dict[str, torch.Tensor] = attrs.field(factory=dict, repr=False)
    ratios: dict[str, int] = attrs.field(factory=dict, repr=False)
    caches: KVCaches = attrs.field(factory=KVCaches, repr=False)

    def write(self, context: PolicyContext, names: Iterable[str], block: int, record: int) -> None:
        """Writes what this rank holds of a record into a block, by coordinates."""
        for name in names:
            if name in self.views:
                mine = oracle.held(context, name, self.place, record)
                view = self.views[name]
                halves, heads, _, size = mine.shape
                kernel = view.shape[3]
                rows = mine.reshape(halves, heads, -1, kernel, size).transpose(2, 0, 1, 3, 4)
                ratio = self.ratios[name]
                there = view[block * ratio : (block + 1) * ratio]
                there.copy_(torch.from_numpy(np.ascontiguousarray(rows)))

    def take(self, names: Iterable[str], block: int, other: Memory) -> None:
        """Takes a block's pages over from memory of the same shape."""
        for name in names:
            if name in self.views:
                view, theirs = self.views[name], other.views[name]
                ratio = self.ratios[name]
                rows = slice(block * ratio, (block + 1) * ratio)
                view[rows].copy_(theirs[rows])

    def snapshot(self) -> list[oracle.Bytes]:
        """A copy of all memory, guards too, on the CPU."""
        return [allocation.cpu().numpy().copy() for allocation in self.allocations]

    def difference(self, expected: Memory) -> str | None:
        """The first byte in which this memory is not what it should be, in words; None: equal."""
        for name, view in self.views.items():
            found, wanted = view.cpu().numpy(), expected.views[name].cpu().numpy()
            wrong = np.argwhere(found != wanted)
            if len(wrong):
                row, half, head, token, byte = wrong[0].tolist()
                return (
                    f"layer {name!r}, kernel row {row}, half {half}, local head {head}, local "
                    f"token {token}, byte {byte} is {_hex(found[tuple(wrong[0])])}, not "
                    f"{_hex(wanted[tuple(wrong[0])])} ({len(wrong)} bytes of the layer differ)"
                )
        pairs = zip(self.snapshot(), expected.snapshot(), strict=True)
        for number, (held, should) in enumerate(pairs):
            outside = np.flatnonzero(held != should)
            if len(outside):
                at = int(outside[0])
                return (
                    f"byte {at} of allocation {number}, in padding or a guard zone, is "
                    f"{_hex(held[at])}, not {_hex(should[at])} ({len(outside)} such bytes)"
                )
        return None


def _hex(value: int) -> str:
    return f"0x{int(value):02x}" + (" (sentinel)" if value == oracle.SENTINEL else "")


def allocate(
    context: PolicyContext,
    decision: LayoutDecision,
    how: Allocation | None = None,
    device: str = "cpu",
) -> Memory:
    """Memory of the context's rank as an engine allocates it after a decision.

    Args:
        context: names the rank, its layers and their sizes.
        decision: per-layer caches, or one slab.
        how: the engine's ways.
        device: a torch device.
    """
    how = how or Allocation()
    made = _Maker(context, how, device)
    split = any(spec.kernel_block_size != spec.block_size for spec in made.specs.values())
    if decision.cross_layer_blocks and not split:
        made.slab()
    else:
        made.per_layer()
    return made.memory


@attrs.frozen
class _Cell:
    """One layer's page on this rank; sizes in bytes, ``kernels`` rows to a block."""

    halves: int
    heads: int
    tokens: int
    row: int
    kernels: int
    padding: int

    @property
    def bytes(self) -> int:
        return self.halves * self.heads * self.tokens * self.row


class _Maker:
    def __init__(self, context: PolicyContext, how: Allocation, device: str) -> None:
        self.context, self.how, self.device = context, how, device
        place = oracle.places(context.grid)[context.rank]
        self.memory = Memory(place=place)
        self.blocks = context.geometry.num_blocks
        self.specs = oracle.stage_layers(context, place)
        self.memory.ratios = {n: s.block_size // s.kernel_block_size for n, s in self.specs.items()}
        self.heads_first = oracle.stored_order(attrs.evolve(context, canonical=False))

    def cell(self, spec: oracle.Spec) -> _Cell:
        kernels = spec.block_size // spec.kernel_block_size
        return _Cell(
            oracle.half_count(spec),
            len(oracle.heads_of(spec, self.context.grid, self.memory.place)),
            1 if isinstance(spec, StateSpec) else spec.kernel_block_size,
            oracle.row_bytes(spec),
            kernels,
            spec.page_padding // kernels,
        )

    def room(self, *sizes: int) -> torch.Tensor:
        """A cache inside an allocation of its own, filled with the sentinel."""
        total, before = math.prod(sizes), GUARD_BYTES + self.how.lead
        whole = torch.full(
            (before + total + GUARD_BYTES,), oracle.SENTINEL, dtype=torch.uint8, device=self.device
        )
        self.memory.allocations.append(whole)
        return whole[before : before + total].view(sizes)

    def page_sizes(self, cell: _Cell) -> tuple[int, int, int, int]:
        inner = (cell.heads, cell.tokens) if self.heads_first else (cell.tokens, cell.heads)
        return (cell.halves, *inner, cell.row)

    def pages_at(self, whole: torch.Tensor, at: int, cell: _Cell) -> torch.Tensor:
        """The pages that begin at a byte of every row of a two-dimensional cache."""
        return whole[:, at : at + cell.bytes].view(whole.shape[0], *self.page_sizes(cell))

    def headed(self, pages: torch.Tensor) -> torch.Tensor:
        """Pages with heads before tokens, whatever the order in memory."""
        return pages if self.heads_first else pages.transpose(2, 3)

    def shown(self, spec: oracle.Spec, pages: torch.Tensor) -> torch.Tensor:
        """Pages as the engine shows them: typed, and with dimensions in its own order."""
        if self.how.typed and not isinstance(spec, StateSpec):
            itemsize = getattr(spec, "itemsize", 2)
            even = all(n % 2 == 0 for n in (pages.shape[-1], pages.storage_offset()))
            even = even and all(stride % 2 == 0 for stride in pages.stride()[:-1])
            if itemsize == 2 and even and self.context.dtype in ("", "float16"):
                pages = pages.view(torch.float16)
        return pages.permute(0, *(1 + axis for axis in self.how.axes))

    def per_layer(self) -> None:
        tensors = {}
        for name, spec in self.specs.items():
            cell = self.cell(spec)
            rows = self.blocks * cell.kernels
            apart = self.how.layers == "heads-apart" and self.heads_first
            if apart and cell.halves == 1 and not cell.padding and not isinstance(spec, StateSpec):
                whole = self.room(cell.heads, rows, cell.tokens, cell.row)
                pages = whole.permute(1, 0, 2, 3).unsqueeze(1)
            else:
                whole = self.room(rows, cell.bytes + cell.padding)
                pages = self.pages_at(whole, 0, cell)
            self.memory.views[name] = self.headed(pages)
            tensors[name] = self.shown(spec, pages)
        self.memory.caches = KVCaches(tensors=tensors)

    def slab(self) -> None:
        cells = [self.cell(spec) for spec in self.specs.values()]
        uniform = len({*self.specs.values()}) == 1
        one = cells[0]
        dense = one.halves == 1 and not one.padding and self.heads_first
        if not uniform or self.how.slab == "placements":
            self.placed(cells)
        elif self.how.slab == "heads-apart" and dense:
            whole = self.room(self.blocks, one.heads, len(cells), one.tokens, one.row)
            self.cut(whole, [whole[:, :, i].unsqueeze(1) for i in range(len(cells))], 2)
        else:
            whole = self.room(self.blocks, len(cells), one.bytes + one.padding)
            sizes = (self.blocks, len(cells), *self.page_sizes(one))
            pages = whole[:, :, : one.bytes].view(sizes)
            self.cut(pages, [pages[:, i] for i in range(len(cells))], 1)

    def cut(self, slab: torch.Tensor, pages: Sequence[torch.Tensor], layer_dim: int) -> None:
        tensors = {}
        for (name, spec), page in zip(self.specs.items(), pages, strict=True):
            heads_apart = layer_dim == 2
            self.memory.views[name] = page if heads_apart else self.headed(page)
            tensors[name] = self.shown(spec, page)
        if self.how.slab == "views":
            self.memory.caches = KVCaches(tensors=tensors)
        else:
            self.memory.caches = KVCaches.from_slab(slab, list(self.specs), layer_dim=layer_dim)

    def placed(self, cells: Sequence[_Cell]) -> None:
        ends = list(itertools.accumulate(cell.bytes + cell.padding for cell in cells))
        whole = self.room(self.blocks, ends[-1])
        placements = {}
        for name, cell, at in zip(self.specs, cells, [0, *ends[:-1]], strict=True):
            pages = self.pages_at(whole, at, cell)
            self.memory.views[name] = self.headed(pages)
            placements[name] = SlabPlacement(offset=at, block_stride=ends[-1])
        self.memory.caches = KVCaches(slab=whole, placements=placements)
