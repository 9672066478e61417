"""What a slot holds: the record of one block of one group, and each rank's part in it.

A *canonical* record is the group's canonical pages one after the other, in the model's order. A
*private* record (canonical not requested) is one slice per rank, side by side, in world-rank
order: the dense pages of that rank's layers, in the model's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import attrs

from kvpolicy.boxes import Box, compose
from kvpolicy.canonical import PageMapping, local_heads
from kvpolicy.certify import Certificate, certify
from kvpolicy.context import PolicyContext
from kvpolicy.decision import LayoutDecision
from kvpolicy.errors import Refusal
from kvpolicy.geometry import LayerGroup
from kvpolicy.grid import ParallelGrid
from kvpolicy.pages import StridedPage, page_in_layout

Proofs = Mapping[str, Certificate | Refusal]


def prove_layers(context: PolicyContext, decision: LayoutDecision) -> Proofs:
    """Certifies every layer of the model for the decided layout; equal layers are proved once."""
    geometry = context.geometry
    # With one layer, block-outermost and layer-compact are the same bytes.
    layout = decision.layout if len(geometry.layers) > 1 else decision.layout.order
    return {
        name: certify(spec, context.grid, layout, context.order)
        for name, spec in geometry.layers.items()
    }


@attrs.frozen(kw_only=True)
class RecordPart:
    """One rank's page of one layer inside the record.

    Attributes:
        box: dense page -> record.
        num_writers, writer_index: slot s is stored by the rank with
            ``s % num_writers == writer_index``.
    """

    box: Box
    num_writers: int
    writer_index: int


@attrs.frozen(kw_only=True)
class Topology:
    """The ranks of one engine and the layers of its stages."""

    grid: ParallelGrid
    stages: tuple[int, ...]


@attrs.frozen(kw_only=True)
class GroupRecord:
    """The record of one group of layers.

    Attributes:
        group: its name and layers.
        canonical: whether it is made of canonical pages.
        portable: whether its bytes mean the same under any grid.
        record_bytes: bytes of one block's record, without row alignment.
        certificates: layer name -> its proof.
        offsets: where a layer's canonical page begins, by layer name; in a private record where
            a rank's dense page begins, by (world rank, layer name).
        topology: the engine whose ranks store it.
        stage_of: layer name -> the stage that holds it.
    """

    group: LayerGroup
    canonical: bool
    portable: bool
    record_bytes: int
    certificates: Mapping[str, Certificate] = attrs.field(repr=False)
    offsets: Mapping[str | tuple[int, str], int] = attrs.field(repr=False)
    topology: Topology
    stage_of: Mapping[str, int] = attrs.field(repr=False)
    _elections: dict[tuple[int, int | None], frozenset[int]] = attrs.field(
        factory=dict, init=False, repr=False, eq=False
    )

    def part(self, rank: int, layer_name: str) -> RecordPart:
        """What a rank stores and loads of a layer that it holds."""
        mapping: PageMapping = self.certificates[layer_name].mapping(rank)
        if self.canonical:
            return RecordPart(
                box=mapping.box.moved(to_by=self.offsets[layer_name]),
                num_writers=mapping.num_writers,
                writer_index=mapping.writer_index,
            )
        at = self.offsets[rank, layer_name]
        return RecordPart(
            box=Box(mapping.local_page_bytes, (), 0, at), num_writers=1, writer_index=0
        )

    def _proofs(self, stage: int) -> set[Certificate]:
        """The distinct certificates of a stage's layers; equal layers share one."""
        return {c for name, c in self.certificates.items() if self.stage_of[name] == stage}

    def writers(self, slot: int) -> frozenset[int]:
        """The world ranks that write something of a slot's record."""
        return self._elect(slot, None)

    def sources(self, rank: int, slot: int) -> frozenset[int]:
        """The world ranks that write what a rank reads of a slot's record."""
        return self._elect(slot, rank)

    def _elect(self, slot: int, reader: int | None) -> frozenset[int]:
        # Elections repeat with the writers of the layers, of which there are few.
        period = math.lcm(*(c.mappings[0].num_writers for c in set(self.certificates.values())))
        key = (slot % period, reader)
        if key not in self._elections:
            self._elections[key] = frozenset(self._elected_for(*key))
        return self._elections[key]

    def _elected_for(self, slot: int, reader: int | None) -> Iterable[int]:
        size = self.topology.grid.stage_size
        if not self.canonical and reader is not None:
            return [reader]
        stages = set(self.stage_of.values()) if reader is None else {reader // size}
        return {
            rank
            for stage in stages
            for proof in self._proofs(stage)
            for rank in range(stage * size, (stage + 1) * size)
            if not self.canonical
            or (
                _elected(proof.mapping(rank), slot)
                and (reader is None or proof.mapping(rank).box == proof.mapping(reader).box)
            )
        }


def _elected(mapping: PageMapping, slot: int) -> bool:
    return slot % mapping.num_writers == mapping.writer_index


def group_records(
    context: PolicyContext, certificates: Mapping[str, Certificate]
) -> Mapping[str, GroupRecord]:
    """Group name -> its record, of the whole model."""
    owners = context.geometry.stage_of(context.grid.pp)
    found = {}
    for group in context.geometry.groups:
        names = [name for name in context.geometry.layers if name in set(group.layer_names)]
        offsets: dict[str | tuple[int, str], int] = {}
        at = 0
        if context.canonical:
            for name in names:
                offsets[name] = at
                at += certificates[name].canonical_page_bytes
        else:
            for rank in context.grid.ranks():
                for name in names:
                    if owners[name] == rank.pp_rank:
                        offsets[rank.rank, name] = at
                        at += certificates[name].mapping(rank).local_page_bytes
        found[group.name] = GroupRecord(
            group=attrs.evolve(group, layer_names=names),
            canonical=context.canonical,
            portable=context.canonical and all(certificates[name].portable for name in names),
            record_bytes=at,
            certificates={name: certificates[name] for name in names},
            offsets=offsets,
            topology=Topology(
                grid=context.grid, stages=context.geometry.stages_for(context.grid.pp)
            ),
            stage_of={name: owners[name] for name in names},
        )
    return found


def _pages_of_stage(
    context: PolicyContext,
    certificates: Mapping[str, Certificate],
    stage: int,
) -> Mapping[str, StridedPage]:
    """Where the decided layout puts the pages of a stage's ranks, all layers of the slab."""
    layers = context.layers_of_stage(stage)
    padded = {
        name: certificates[name].mappings[0].local_page_bytes + spec.page_padding
        for name, spec in layers.items()
    }
    pages, at = {}, 0
    for name, spec in layers.items():
        heads = local_heads(spec, context.grid)
        page = (
            heads
            if isinstance(heads, Refusal)
            else page_in_layout(
                spec,
                heads,
                certificates[name].layout,
                num_blocks=context.geometry.num_blocks,
                offset=at,
                slab_block_bytes=sum(padded.values()),
            )
        )
        if isinstance(page, StridedPage):  # certified, so it is
            pages[name] = page
        at += padded[name]
    return pages


def _joined(first: Box, second: Box) -> bool:
    """Whether the last run of one box and the first of the next are one run on both sides."""
    last_to = first.to_offset + first.size + sum((n - 1) * s for n, _, s in first.dims)
    return first.from_end == second.from_offset and last_to == second.to_offset


@attrs.frozen(kw_only=True)
class Fragments:
    """Contiguous copies of one block: per layer, and in all as the decided layout places them."""

    layers: Mapping[str, int]
    total: int


def fragments(
    context: PolicyContext,
    decision: LayoutDecision,
    certificates: Mapping[str, Certificate],
    record: GroupRecord,
) -> Fragments:
    """Counts a group's copies per block, for the first rank of each stage."""
    per_layer: dict[str, int] = {}
    total = 0
    for stage in range(context.grid.pp):
        rank = stage * context.grid.stage_size
        pages = _pages_of_stage(context, certificates, stage)
        before: Box | None = None
        for name, page in pages.items():
            if name not in record.certificates:
                before = None
                continue
            copied = compose(page.box, record.part(rank, name).box)
            if copied is None:  # refused by certify: see interleave-crosses-kernel-block
                continue
            per_layer[name] = copied.num_runs
            total += copied.num_runs
            copied = copied.moved(from_by=page.offset)
            if decision.cross_layer_blocks and before is not None and _joined(before, copied):
                total -= 1
            before = copied
    return Fragments(layers=per_layer, total=total)
