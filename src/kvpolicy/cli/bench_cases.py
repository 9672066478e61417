"""What the bench copies: a model's caches in each way of lying in memory, and who checks the bytes.

The check derives what a row must hold from layers, heads and tokens, by ordinary indexing; it
shares no code with the plans that it checks.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.caches import KVCaches, SlabPlacement
from kvpolicy.certify import Certificate, certify
from kvpolicy.cli.engine import SENTINEL, owned_heads
from kvpolicy.cli.options import context_of
from kvpolicy.context import PolicyContext
from kvpolicy.errors import OptionError, Refusal
from kvpolicy.geometry import CacheGeometry
from kvpolicy.hostmemory import allocate
from kvpolicy.specs import AttentionSpec, LayerSpec, StateSpec
from kvpolicy.words import close_names

Kind = Literal["slab", "pages", "pages-irregular", "canonical-hnd", "canonical-nhd"]
Ids = Literal["scattered", "consecutive"]
Bytes = NDArray[np.uint8]

KINDS: tuple[Kind, ...] = ("slab", "pages", "pages-irregular", "canonical-hnd", "canonical-nhd")
IDS: tuple[Ids, ...] = ("scattered", "consecutive")
_USUAL_TP: Mapping[Kind, int] = {"canonical-hnd": 4, "canonical-nhd": 2}
_SEED = 29
_WORD = np.uint64(0x9E3779B97F4A7C15)
_GAP_BYTES = 4096 + 64


@attrs.frozen(kw_only=True)
class Case:
    """One way of lying in memory, one order of ids.

    Attributes:
        kind: the caches: one slab; per-layer pages at a constant distance or at irregular places,
            stored as they are; per-layer pages stored as canonical ones, head- or token-major.
        ids: whether blocks and slots are scattered or follow one another.
        context: rank 0 of an engine that has such caches.
    """

    kind: Kind
    ids: Ids
    context: PolicyContext

    @property
    def name(self) -> str:
        """The kind alone where the ids are scattered."""
        return self.kind if self.ids == "scattered" else f"{self.kind}-{self.ids}"


def cases_of(
    args: argparse.Namespace,
    config: Mapping[str, Any],
    kinds: Sequence[str],
    orders: Sequence[str],
) -> tuple[list[Case], dict[str, str]]:
    """The cases that the model allows, and the kinds that it does not, with the reason.

    Raises:
        KVPolicyError: the options describe nothing that can be.
    """
    found, left_out = [], {}
    for kind in (one for one in KINDS if one in kinds):
        context = _context(args, config, kind)
        if isinstance(context, str):
            left_out[str(kind)] = context
            continue
        found += [Case(kind=kind, ids=ids, context=context) for ids in IDS if ids in orders]
    return found, left_out


def _context(
    args: argparse.Namespace, config: Mapping[str, Any], kind: Kind
) -> PolicyContext | str:
    """The context at the tensor parallel size that was asked for, or the first that can be."""
    tries = [args.tp] if args.tp is not None else [_USUAL_TP.get(kind, 1), 2, 1]
    order = "NHD" if kind == "canonical-nhd" else "HND"
    why: str | None = None
    for tp in tries:
        values = {
            **vars(args),
            "tp": tp,
            "canonical": kind.startswith("canonical"),
            "canonical_order": order,
            "layout": order,
            "no_stride_aware": kind != "slab",
        }
        context = context_of(argparse.Namespace(**values), config, num_blocks=1)
        context = attrs.evolve(context, geometry=_one_group(context.geometry, args.group))
        proofs = [
            certify(spec, context.grid, context.layout, context.order)
            for spec in dict.fromkeys(context.geometry.layers.values())
        ]
        why = next((one for p in proofs if (one := _obstacle(p, context.canonical))), None)
        if why is None:
            return context
    return why or "no tensor parallel size was tried"


def _obstacle(proof: Certificate | Refusal, canonical: bool) -> str | None:
    """Why a layer's pages are not measured."""
    if isinstance(proof, Refusal):
        return f"{proof.code}: {proof.detail}"
    writers = proof.mapping(0).num_writers
    if canonical and writers > 1:
        return f"{writers} ranks hold the same bytes and take turns at storing them; lower --tp"
    return None


def _one_group(geometry: CacheGeometry, name: str | None) -> CacheGeometry:
    """The geometry of one group alone: the one that is named, or the largest."""
    groups = {
        group.name: group
        for group in geometry.groups
        if not any(isinstance(geometry.layers[one], StateSpec) for one in group.layer_names)
    }
    if not groups:
        raise OptionError("the bench copies attention and latent layers; the model has neither")
    if name is not None and name not in groups:
        raise OptionError(
            f"--group names {name!r}, which is no group of attention or latent layers; "
            f"{close_names(name, groups)}"
        )
    chosen = groups[name] if name else max(groups.values(), key=lambda one: len(one.layer_names))
    layers = {one: geometry.layers[one] for one in chosen.layer_names}
    return CacheGeometry(layers=layers, num_blocks=1, groups=[chosen])


def shape_of(context: PolicyContext, spec: LayerSpec, heads: int) -> tuple[int, ...]:
    """A page's shape in bytes, in the engine's order; K/V halves first."""
    if isinstance(spec, StateSpec):
        raise OptionError("the bench copies attention and latent layers, no recurrent state")
    order = [heads, spec.block_size]
    if not context.layout.heads_first:
        order.reverse()
    return (spec.halves, *order, spec.row_bytes)


def block_bytes(context: PolicyContext) -> int:
    """Bytes of all layers of one block on this rank."""
    return sum(
        math.prod(shape_of(context, spec, len(owned_heads(context, spec))))
        for spec in context.geometry.layers.values()
    )


@attrs.define(kw_only=True, eq=False)
class BenchMemory:
    """The caches of a case, every word of them another value.

    Attributes:
        case: with the number of blocks.
        caches: what the engine hands over.
        views: layer name -> (blocks, *shape of a page).
        whole: the memory behind them.
    """

    case: Case
    caches: KVCaches
    views: dict[str, Bytes]
    whole: Bytes

    @classmethod
    def of(cls, case: Case) -> BenchMemory:
        """Allocates and fills the caches.

        Raises:
            OptionError: not enough memory.
        """
        context = case.context
        blocks = context.geometry.num_blocks
        shapes = {
            name: shape_of(context, spec, len(owned_heads(context, spec)))
            for name, spec in context.geometry.layers.items()
        }
        try:
            whole, views, caches = _placed(case.kind, blocks, shapes)
        except MemoryError as error:
            raise OptionError(f"no memory for the caches: {error}; lower --megabytes") from None
        made = cls(case=case, caches=caches, views=views, whole=whole)
        made.fill()
        return made

    def fill(self) -> None:
        """Gives every word a value of its own."""
        words = self.whole[: len(self.whole) // 8 * 8].view(np.uint64)
        for start in range(0, len(words), 2**20):
            part = words[start : start + 2**20]
            np.multiply(np.arange(start + 1, start + 1 + len(part), dtype=np.uint64), _WORD, part)

    def wipe(self, blocks: Sequence[int]) -> None:
        """Fills blocks with the sentinel."""
        for view in self.views.values():
            view[blocks] = SENTINEL

    def checksum(self, blocks: Sequence[int]) -> int:
        """Of the content of some blocks."""
        found = 0
        for view in self.views.values():
            for block in blocks:
                found = zlib.crc32(view[block].tobytes(), found)
        return found

    def _record_views(self, row: Bytes) -> Iterator[tuple[str, Bytes]]:
        """Where each layer's page of this rank lies in a row, shaped as in the engine."""
        context, at = self.case.context, 0
        for name, spec in context.geometry.layers.items():
            heads = owned_heads(context, spec)
            page: Bytes
            if not context.canonical:
                shape = shape_of(context, spec, len(heads))
                page = row[at : at + math.prod(shape)].reshape(shape)
                yield name, page
            else:
                total = spec.total_kv_heads if isinstance(spec, AttentionSpec) else 1
                shape = shape_of(context, spec, total)
                page = row[at : at + math.prod(shape)].reshape(shape)
                first, end = heads[0], heads[-1] + 1
                yield (
                    name,
                    page[:, first:end] if context.layout.heads_first else (page[:, :, first:end]),
                )
            at += math.prod(shape)

    def wrong_rows(self, rows: Bytes, stored: Mapping[int, int]) -> int:
        """Rows that are not what they must be.

        Args:
            rows: the pool's, which held the sentinel before.
            stored: slot -> the block that was stored there.
        """
        wrong = 0
        expected = np.empty(rows.shape[1], dtype=np.uint8)
        for slot, row in enumerate(rows):
            expected.fill(SENTINEL)
            if slot in stored:
                for name, part in self._record_views(expected):
                    part[...] = self.views[name][stored[slot]]
            wrong += not np.array_equal(row, expected)
        return wrong

    def wrong_blocks(self, loaded: Mapping[int, int], untouched: Sequence[int]) -> int:
        """Blocks that are not what they must be.

        Args:
            loaded: block -> the block whose content it must have.
            untouched: blocks that must hold the sentinel.
        """
        wrong = 0
        for view in self.views.values():
            wrong += sum(not np.array_equal(view[to], view[frm]) for to, frm in loaded.items())
            wrong += sum(not (view[block] == SENTINEL).all() for block in untouched)
        return wrong


def _placed(
    kind: Kind, blocks: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Bytes, dict[str, Bytes], KVCaches]:
    """The memory, each layer's view of it, and what the engine hands over."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    block = sum(sizes.values())
    views: dict[str, Bytes] = {}
    if kind == "slab":
        whole = allocate(blocks * block)
        slab, placements, at = whole.reshape(blocks, block), {}, 0
        for name, shape in shapes.items():
            views[name] = slab[:, at : at + sizes[name]].reshape(blocks, *shape)
            placements[name] = SlabPlacement(offset=at, block_stride=block)
            at += sizes[name]
        return whole, views, KVCaches(slab=torch.from_numpy(slab), placements=placements)
    irregular = kind == "pages-irregular"
    gap = _GAP_BYTES if irregular else 0
    # No two neighbours have equal gaps, and every layer begins at a cache line.
    gaps = [gap * (1 + 7 * i % 13) for i in range(len(shapes))]
    whole = allocate(blocks * block + sum(gaps) + 64 * len(shapes))
    joint = torch.from_numpy(whole)
    at, tensors = 0, {}
    for (name, shape), space in zip(shapes.items(), gaps, strict=True):
        at += space
        end = at + blocks * sizes[name]
        views[name] = whole[at:end].reshape(blocks, *shape)
        # An engine that allocates layer by layer has a storage for each.
        flat = torch.from_numpy(whole[at:end]) if irregular else joint[at:end]
        shown = flat.view(blocks, *shape)
        tensors[name] = shown if shape[0] > 1 else shown.squeeze(1)
        at = -(-end // 64) * 64 if irregular else end
    return whole, views, KVCaches(tensors=tensors)
