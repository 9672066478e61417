"""One rank's job on the bench: what it is to change, and what it changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np
import torch

from kvpolicy import LayerGroup, PolicyContext, Span, TransferJob, TransferPart
from kvpolicy.testing import oracle
from kvpolicy.testing.memory import Memory
from kvpolicy.testing.trial import SLOTS
from kvpolicy.testing.world import World, row_difference

_NEXT_RECORDS = 16


def told(job: TransferJob) -> str:
    """A job in words."""
    return (
        f"{job.direction} of blocks {job.block_ids.tolist()}, slots {job.slots.tolist()} "
        f"({job.bytes} B)"
    )


def written_bytes(job: TransferJob, kept: set[int]) -> int:
    """The bytes of the destinations that are not said to have failed."""
    return sum(
        part.plan.block_bytes
        for part in job.parts
        for block, slot in zip(part.block_ids.tolist(), part.slots.tolist(), strict=True)
        if (slot if job.direction == "store" else block) in kept
    )


@attrs.define(kw_only=True, eq=False)
class Bench:
    """One rank's job, not run yet, with the memory and the rows that it is to change.

    Attributes:
        world: the engine; the job moves between its pool's rows and this rank's memory.
        rank: whose job it is.
        group: the layers that it moves.
        job: as the core made it.
        blocks, slots: the job's pairs.
        records: what each pair's source holds.
        contents: block -> the record that the rank's memory holds before the job.
    """

    world: World
    rank: int
    group: LayerGroup
    job: TransferJob
    blocks: Sequence[int]
    slots: Sequence[int]
    records: Sequence[int]
    contents: dict[int, int]

    @property
    def context(self) -> PolicyContext:
        """The rank's context."""
        return self.world.contexts[self.rank]

    @property
    def memory(self) -> Memory:
        """The rank's memory."""
        return self.world.memories[self.rank]

    @property
    def storing(self) -> bool:
        """Whether the job is a store."""
        return self.job.direction == "store"

    @property
    def destinations(self) -> set[int]:
        """What the job writes: slots of a store, blocks of a load."""
        return {int(one) for one in self.job.destinations}

    def rows(self) -> oracle.Bytes:
        """A copy of the pool's rows."""
        return self.world.pool.rows.numpy().copy()

    def _pairs(self, kept: set[int]) -> list[tuple[int, int, int]]:
        """(block, slot, record) of every pair whose destination is kept."""
        ends = self.slots if self.storing else self.blocks
        found = zip(self.blocks, self.slots, self.records, ends, strict=True)
        return [(block, slot, record) for block, slot, record, end in found if end in kept]

    def _stored(self, rows: oracle.Bytes, kept: set[int]) -> oracle.Bytes:
        """Rows in which the kept slots of a store are written."""
        rows = rows.copy()
        for _, slot, record in self._pairs(kept):
            place = self.memory.place
            oracle.store_part(rows[slot], self.context, self.group, place, slot, record)
        return rows

    def wrong(self, before: oracle.Bytes, kept: set[int] | None = None) -> str | None:
        """The first byte that is not as the job should leave it, in words; None: all are.

        Args:
            before: the rows before the job.
            kept: the destinations that must be written; None: all. What was to be written to the
                others may be anything; everything else must be as it was.
        """
        kept = self.destinations if kept is None else kept
        lost = self.destinations - kept
        rows, contents = self.rows(), dict(self.contents)
        expected = self._stored(before, kept) if self.storing else before
        if self.storing:
            free = self._stored(np.full_like(before, oracle.SENTINEL), lost) != oracle.SENTINEL
            rows = np.where(free, expected, rows)
        else:
            contents |= {block: record for block, _, record in self._pairs(kept)}
        where = row_difference(rows, expected, self.context, self.group)
        if where is not None:
            return where
        fresh = self.world.fresh(self.rank, self.group, list(contents), list(contents.values()))
        for block in set() if self.storing else lost:
            fresh.take(self.world.names(self.group), block, self.memory)
        return self.memory.difference(fresh)

    def renew(self) -> None:
        """Gives every source other content."""
        self.records = [record + _NEXT_RECORDS for record in self.records]
        if self.storing:
            self.contents = {b: record + _NEXT_RECORDS for b, record in self.contents.items()}
            for block, record in self.contents.items():
                self.memory.write(self.context, self.world.names(self.group), block, record)
        else:
            fill_rows(self.world, self.group, _NEXT_RECORDS)


def fill_rows(world: World, group: LayerGroup, first: int = 0) -> None:
    """Writes a record into every slot by the oracle, slot 0 holding the record ``first``."""
    slots = range(SLOTS)
    rows = world.expected_rows(group, slots, [first + slot for slot in slots])
    world.pool.rows.copy_(torch.from_numpy(rows))


def some(job: TransferJob, chosen: Sequence[int], job_id: int | None = None) -> TransferJob:
    """The job of some of its pairs, given by their numbers."""
    pairs = {(int(job.block_ids[i]), int(job.slots[i])) for i in chosen}
    parts = []
    for part in job.parts:
        kept = [
            i
            for i, pair in enumerate(zip(part.block_ids.tolist(), part.slots.tolist(), strict=True))
            if pair in pairs
        ]
        if kept:
            parts.append(attrs.evolve(part, block_ids=part.block_ids[kept], slots=part.slots[kept]))
    return attrs.evolve(
        job,
        job_id=job.job_id if job_id is None else job_id,
        parts=tuple(parts),
        bytes=sum(len(part.block_ids) * part.plan.block_bytes for part in parts),
        block_ids=job.block_ids[list(chosen)],
        slots=job.slots[list(chosen)],
    )


def one_by_one(job: TransferJob) -> list[TransferJob]:
    """A job for each of its pairs that moves anything, under ids of their own."""
    singles = [some(job, [i], job.job_id + i) for i in range(len(job.block_ids))]
    return [single for single in singles if single.parts]


class InjectedFailure(RuntimeError):
    """What goes wrong on purpose."""


class BrokenTensor(torch.Tensor):
    """A tensor that raises `InjectedFailure` whatever is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, *rest: object, **more: object) -> NoReturn:
        """Raises."""
        del rest, more
        raise InjectedFailure(f"{getattr(func, '__name__', func)} on memory that has failed")


class _FailingPart(TransferPart):
    """A part whose spans end in an error half-way."""

    def spans(self) -> Iterator[Span]:
        found = list(super().spans())
        yield from found[: len(found) // 2]
        raise InjectedFailure("the blocks that follow cannot be named")


def injured(job: TransferJob) -> Iterator[tuple[str, TransferJob]]:
    """The job with a failure in it, and in words where: no engine can do all of it by rights.

    An engine that does not ask for spans is not hurt by the second one, and does it all.
    """
    half = len(job.block_ids) // 2
    good, bad = some(job, range(half)), some(job, range(half, len(job.block_ids)))
    parts = []
    for part in bad.parts:
        *whole, last = part.plan.copies
        torn = attrs.evolve(
            last, storage=torch.empty(0, dtype=torch.uint8).as_subclass(BrokenTensor)
        )
        plan = attrs.evolve(part.plan, copies=(*whole, torn))
        parts.append(attrs.evolve(part, plan=plan))
    yield (
        f"memory that fails from pair {half} on",
        attrs.evolve(job, parts=(*good.parts, *parts)),
    )
    failing = tuple(
        _FailingPart(plan=part.plan, block_ids=part.block_ids, slots=part.slots)
        for part in job.parts
    )
    yield "spans that end in an error half-way", attrs.evolve(job, parts=failing)
