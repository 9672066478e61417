"""A simulated engine: real tensors with real strides, filled and read by logical coordinates.

What is written here shares no code with what it checks: which tokens and heads a rank holds is
derived from ownership, not from byte offsets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.caches import KVCaches, SlabPlacement
from kvpolicy.context import PolicyContext
from kvpolicy.decision import LayoutDecision
from kvpolicy.errors import CertificationError, OptionError, Refusal
from kvpolicy.specs import AttentionSpec, LayerSpec, StateSpec

SENTINEL = 0xA5
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FOLD = np.uint64(0xBF58476D1CE4E5B9)

Bytes = NDArray[np.uint8]


def _row_bytes(spec: LayerSpec) -> int:
    return spec.state_bytes if isinstance(spec, StateSpec) else spec.row_bytes


def owned_heads(context: PolicyContext, spec: LayerSpec) -> list[int]:
    """The KV heads of the whole model that this rank holds."""
    if not isinstance(spec, AttentionSpec):
        return [0]
    total, tp, tp_rank = spec.total_kv_heads, context.grid.tp, context.place.tp_rank
    if tp > total:
        return [tp_rank * total // tp]
    return [head for head in range(total) if head * tp // total == tp_rank]


def owned_tokens(context: PolicyContext, spec: LayerSpec) -> list[int]:
    """The tokens of a whole (canonical) block that this rank holds, in order."""
    if isinstance(spec, StateSpec):
        return [0]
    grid = context.grid
    return (
        [
            token
            for token in range(spec.block_size * grid.cp)
            if token // grid.cp_interleave % grid.cp == context.place.cp_rank
        ]
        if grid.cp > 1
        else list(range(spec.block_size))
    )


def expected_rows(
    layer: int, spec: LayerSpec, blocks: Sequence[int], heads: Sequence[int], tokens: Sequence[int]
) -> Bytes:
    """The bytes at (block, half, head, token), of shape (blocks, halves, heads, tokens, row).

    Every byte depends on all of its logical coordinates and on its place in the row.
    """
    row = _row_bytes(spec)
    words = -(-row // 8)
    at = np.zeros((len(blocks), spec.halves, len(heads), len(tokens), words), dtype=np.uint64)
    for axis, coordinates in enumerate(
        (blocks, range(spec.halves), heads, tokens, range(words)), start=0
    ):
        shape = [1] * 5
        shape[axis] = -1
        column = np.asarray(list(coordinates), dtype=np.uint64).reshape(shape)
        at *= np.uint64(1_000_003)
        at += column
    at += np.uint64(layer * int(_FOLD) % 2**64)
    at *= _MIX
    at ^= at >> np.uint64(29)
    at *= _FOLD
    at ^= at >> np.uint64(32)
    return at.view(np.uint8).reshape(*at.shape[:-1], words * 8)[..., :row]


class SimulatedRank:
    """One rank of the simulated engine, with caches as the decision asks.

    Args:
        context: the rank.
        decision: gives the layout: a tensor per layer, or one slab.

    Attributes:
        caches: what the engine hands to the connector.
        views: layer name -> its cache as bytes of shape
            (blocks, kernel blocks, halves, heads, tokens, row).

    Raises:
        OptionError: the caches do not fit in memory.
        CertificationError: the backend does not take the decided layout.
    """

    def __init__(self, context: PolicyContext, decision: LayoutDecision) -> None:
        taken, heads_first = context.backend.layouts, decision.layout.heads_first
        if taken is not None and decision.layout not in taken:
            fits = sorted({"NHD" if layout.order.value == "LBNHC" else "HND" for layout in taken})
            other = [order for order in fits if order != ("HND", "NHD")[not heads_first]]
            why = Refusal(
                "uncertified",
                f"the engine takes {', '.join(sorted(one.value for one in taken)) or 'nothing'}, "
                f"not {decision.layout}; "
                + (
                    f"its head/token order is given by --layout {other[0]}"
                    if other
                    else f"add {decision.layout} to --backend-layouts"
                ),
            )
            raise CertificationError(
                f"the simulated engine does not take {decision.layout}",
                dict.fromkeys(context.stage_layers, why),
            )
        self.context = context
        self.layers = context.stage_layers
        self._index = {name: i for i, name in enumerate(context.geometry.layers)}
        self._heads = {name: owned_heads(context, spec) for name, spec in self.layers.items()}
        self.views: dict[str, Bytes] = {}
        try:
            self.caches = self._slab() if decision.cross_layer_blocks else self._tensors()
        except (RuntimeError, MemoryError) as error:
            raise OptionError(
                f"no memory for the simulated caches of rank {context.rank}: {error}"
            ) from None

    def _page(self, name: str) -> tuple[int, ...]:
        """The shape of one kernel block in bytes, in the engine's order."""
        spec = self.layers[name]
        order = [len(self._heads[name]), spec.kernel_block_size]
        if not self.context.layout.heads_first:
            order.reverse()
        return (spec.halves, *order, _row_bytes(spec))

    def _block(self, name: str) -> tuple[int, ...]:
        """The shape of one block in bytes: kernel blocks, then what each holds."""
        spec = self.layers[name]
        return (spec.block_size // spec.kernel_block_size, *self._page(name))

    def _view(self, name: str, raw: Bytes) -> None:
        """Keeps (blocks, kernel blocks, halves, heads, tokens, row) of one layer's bytes."""
        split = raw.reshape(self.context.geometry.num_blocks, *self._block(name))
        self.views[name] = split if self.context.layout.heads_first else split.swapaxes(3, 4)

    def _tensors(self) -> KVCaches:
        tensors = {}
        for name, spec in self.layers.items():
            rows = self.context.geometry.num_blocks * self._block(name)[0]
            base = torch.empty((rows, *self._page(name)), dtype=torch.uint8)
            self._view(name, base.numpy())
            tensors[name] = self._as_engine(spec, base)
        return KVCaches(tensors=tensors)

    def _as_engine(self, spec: LayerSpec, base: torch.Tensor) -> torch.Tensor:
        """The shape and dtype that an engine would have."""
        if isinstance(spec, StateSpec):
            return base.flatten(1)
        shaped = base if spec.split else base.squeeze(1)
        dtype = getattr(torch, self.context.dtype, torch.uint8)
        return shaped.view(dtype) if shaped.shape[-1] % dtype.itemsize == 0 else shaped

    def _slab(self) -> KVCaches:
        sizes = {name: math.prod(self._block(name)) for name in self.layers}
        num_blocks, block = self.context.geometry.num_blocks, sum(sizes.values())
        slab = torch.empty((num_blocks, block), dtype=torch.uint8)
        placements, at = {}, 0
        for name, page in sizes.items():
            self._view(name, slab.numpy()[:, at : at + page])
            placements[name] = SlabPlacement(offset=at, block_stride=block)
            at += page
        return KVCaches(slab=slab, placements=placements)

    def clear(self) -> None:
        """Fills everything with the sentinel."""
        for view in self.views.values():
            view[...] = SENTINEL

    def _expected(self, name: str, blocks: Sequence[int]) -> Bytes:
        spec = self.layers[name]
        heads = [self.context.rank] if isinstance(spec, StateSpec) else self._heads[name]
        tokens = owned_tokens(self.context, spec)
        found = expected_rows(self._index[name], spec, blocks, heads, tokens)
        ratio = spec.block_size // spec.kernel_block_size
        split = found.reshape(*found.shape[:3], ratio, spec.kernel_block_size, found.shape[-1])
        return split.transpose(0, 3, 1, 2, 4, 5)

    def fill(self, name: str, block_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Writes the logical blocks into the engine's blocks."""
        self.views[name][list(block_ids)] = self._expected(name, blocks)

    def mismatches(self, name: str, block_ids: Sequence[int], blocks: Sequence[int]) -> int:
        """Bytes of the engine's blocks that are not what the logical blocks say."""
        found = self.views[name][list(block_ids)]
        return int(np.count_nonzero(found != self._expected(name, blocks)))

    def changed(self, name: str, block_ids: Sequence[int]) -> int:
        """Bytes outside those blocks that are no longer the sentinel."""
        others = np.setdiff1d(np.arange(self.context.geometry.num_blocks), block_ids)
        return int(np.count_nonzero(self.views[name][others] != SENTINEL))

    def groups(self, moved: Collection[str]) -> Iterator[tuple[str, Mapping[str, LayerSpec]]]:
        """Of the groups that are moved, name -> the layers that this rank holds, where any."""
        for group in self.context.geometry.groups:
            held = {n: self.layers[n] for n in group.layer_names if n in self.layers}
            if held and group.name in moved:
                yield group.name, held
