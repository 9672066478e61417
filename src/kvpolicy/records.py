"""What a slot holds: the record of one block of one group, and each rank's part in it.

A *canonical* record is the group's canonical pages one after the other, in the model's order. A
*private* record (canonical not requested) is one slice per rank, side by side, in world-rank
order: the dense pages of that rank's layers, in the model's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import attrs

from kvpolicy.boxes import Box, compose
from kvpolicy.canonical import local_heads
from kvpolicy.certify import Certificate, certify
from kvpolicy.context import PolicyContext
from kvpolicy.decision import LayoutDecision
from kvpolicy.errors import Refusal
from kvpolicy.geometry import LayerGroup
from kvpolicy.grid import ParallelGrid
from kvpolicy.pages import StridedPage, page_in_layout
from kvpolicy.specs import LayerSpec

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
class Stage:
    """One pipeline stage's part in a group's record.

    Attributes:
        base: where the slice of the stage's first rank begins; 0 in a canonical record.
        slice_bytes: bytes of one rank's slice, the same for each; 0 in a canonical record.
        proofs: the distinct certificates of its layers in the group; equal layers share one.
    """

    base: int
    slice_bytes: int
    proofs: tuple[Certificate, ...] = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class GroupRecord:
    """The record of one group of layers.

    Attributes:
        group: its name and layers.
        canonical: whether it is made of canonical pages.
        portable: whether its bytes mean the same under any grid.
        record_bytes: bytes of one block's record, without row alignment.
        certificates: layer name -> its proof.
        offsets: layer name -> where its canonical page begins; in a private record where its
            dense page begins inside its rank's slice.
        stages: the pipeline stages, in order.
        topology: the engine whose ranks store it.
    """

    group: LayerGroup
    canonical: bool
    portable: bool
    record_bytes: int
    certificates: Mapping[str, Certificate] = attrs.field(repr=False)
    offsets: Mapping[str, int] = attrs.field(repr=False)
    stages: tuple[Stage, ...] = attrs.field(repr=False)
    topology: Topology
    _elections: dict[int | None, dict[int, list[frozenset[int]]]] = attrs.field(
        factory=dict, init=False, repr=False, eq=False
    )

    def part(self, rank: int, layer_name: str) -> RecordPart:
        """What a rank stores and loads of a layer that it holds."""
        mapping = self.certificates[layer_name].mapping(rank)
        at = self.offsets[layer_name]
        if self.canonical:
            return RecordPart(
                box=mapping.box.moved(to_by=at),
                num_writers=mapping.num_writers,
                writer_index=mapping.writer_index,
            )
        number, place = divmod(rank, self.topology.grid.stage_size)
        stage = self.stages[number]
        at += stage.base + place * stage.slice_bytes
        return RecordPart(
            box=Box(mapping.local_page_bytes, (), 0, at), num_writers=1, writer_index=0
        )

    def writers(self, slot: int) -> frozenset[int]:
        """The world ranks that write something of a slot's record."""
        return self._elect(slot, None)

    def sources(self, rank: int, slot: int) -> frozenset[int]:
        """The world ranks that write what a rank reads of a slot's record."""
        return self._elect(slot, rank)

    def _elect(self, slot: int, reader: int | None) -> frozenset[int]:
        if not self.canonical and reader is not None:
            number = reader // self.topology.grid.stage_size
            return frozenset({reader}) if self.stages[number].proofs else frozenset()
        if reader not in self._elections:
            self._elections[reader] = self._writers_by_residue(reader)
        # Layers elect by their own number of writers, of which there are few; often it is one.
        found = self._elections[reader]
        if len(found) == 1:
            ((count, ranks),) = found.items()
            return ranks[slot % count]
        return frozenset().union(*(ranks[slot % count] for count, ranks in found.items()))

    def _writers_by_residue(self, reader: int | None) -> dict[int, list[frozenset[int]]]:
        """Number of writers -> for each residue of a slot, who writes (what the reader reads)."""
        size = self.topology.grid.stage_size
        found: dict[int, list[set[int]]] = {}
        numbers = range(len(self.stages)) if reader is None else [reader // size]
        for number in numbers:
            for proof in self.stages[number].proofs:
                read = None if reader is None else proof.mapping(reader).box
                for place, mapping in enumerate(proof.mappings):
                    if read is not None and mapping.box != read:
                        continue
                    rank = number * size + place
                    count = mapping.num_writers if self.canonical else 1
                    ranks = found.setdefault(count, [set() for _ in range(count)])
                    ranks[mapping.writer_index if self.canonical else 0].add(rank)
        return {count: [frozenset(one) for one in ranks] for count, ranks in found.items()}


def group_records(
    context: PolicyContext, certificates: Mapping[str, Certificate]
) -> Mapping[str, GroupRecord]:
    """Group name -> its record, of the whole model."""
    grid = context.grid
    topology = Topology(grid=grid, stages=context.geometry.stages_for(grid.pp))
    found = {}
    for group in context.geometry.groups:
        members = set(group.layer_names)
        offsets: dict[str, int] = {}
        stages: list[Stage] = []
        at = base = 0
        for layers in context.stages:
            names = [name for name in layers if name in members]
            at = at if context.canonical else 0
            for name in names:
                offsets[name] = at
                proof = certificates[name]
                pages = proof.canonical_page_bytes, proof.mappings[0].local_page_bytes
                at += pages[0] if context.canonical else pages[1]
            proofs = tuple(dict.fromkeys(certificates[name] for name in names))
            held = 0 if context.canonical else at
            stages.append(Stage(base=base, slice_bytes=held, proofs=proofs))
            base += held * grid.stage_size
        found[group.name] = GroupRecord(
            group=attrs.evolve(group, layer_names=offsets),
            canonical=context.canonical,
            portable=context.canonical and all(certificates[name].portable for name in offsets),
            record_bytes=at if context.canonical else base,
            certificates={name: certificates[name] for name in offsets},
            offsets=offsets,
            stages=tuple(stages),
            topology=topology,
        )
    return found


def _pages_of_stage(
    context: PolicyContext,
    certificates: Mapping[str, Certificate],
    layers: Mapping[str, LayerSpec],
) -> Mapping[str, StridedPage]:
    """Where the decided layout puts the pages of a stage's ranks, all layers of the slab."""
    ends = list(
        itertools.accumulate(
            certificates[name].mappings[0].local_page_bytes + spec.page_padding
            for name, spec in layers.items()
        )
    )
    pages = {}
    for (name, spec), at in zip(layers.items(), [0, *ends[:-1]], strict=True):
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
                slab_block_bytes=ends[-1],
            )
        )
        if isinstance(page, StridedPage):  # certified, so it is
            pages[name] = page
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
    for stage, layers in enumerate(context.stages):
        rank = stage * context.grid.stage_size
        pages = _pages_of_stage(context, certificates, layers)
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
