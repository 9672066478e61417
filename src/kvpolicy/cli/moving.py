"""What one rank of a simulated engine does in a round trip: stores, or loads and compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from kvpolicy.cli.engine import SimulatedRank
from kvpolicy.connector import Connector
from kvpolicy.context import PolicyContext
from kvpolicy.transfer import Direction

_SEED = 20


@attrs.define
class Side:
    """What one side, or one rank of it, moved."""

    bytes: int = 0
    seconds: float = 0.0
    mismatched: int = 0
    changed: int = 0
    errors: list[str] = attrs.field(factory=list)

    def wait(self, connector: Connector, job_id: int, what: str, rank: int) -> None:
        """Waits for a job and adds what it moved."""
        (result,) = connector.wait([job_id])
        self.bytes += result.bytes
        self.seconds += result.seconds
        if not result.ok:
            self.errors.append(f"{what} on rank {rank}: {result.error}")

    def add(self, other: Side) -> None:
        """Adds what another rank moved."""
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.mismatched += other.mismatched
        self.changed += other.changed
        self.errors += other.errors


def move_rank(
    direction: Direction, connector: Connector, moved: Sequence[str], blocks: int
) -> Side:
    """Makes the rank's caches; stores the logical blocks, or loads and compares every byte.

    Args:
        direction: what to do.
        connector: the rank's, with a host pool, not registered yet.
        moved: the groups.
        blocks: of each group.
    """
    side, context = Side(), connector.context
    storing = direction == "store"
    engine = SimulatedRank(context, connector.decision)
    engine.clear()
    connector.register(engine.caches)
    slots, rank = _slots_of(blocks, moved), context.rank
    untouched = {*engine.layers}
    for group, layers in engine.groups(moved):
        # Other block ids on either side: a slot does not care where a block lies.
        block_ids = _block_ids(context, rank + (0 if storing else context.grid.size), blocks)
        untouched -= {*layers}
        if storing:
            for name in layers:
                engine.fill(name, block_ids, range(blocks))
            job = connector.store(block_ids, slots[group], group)
        else:
            job = connector.load(slots[group], block_ids, group)
        side.wait(connector, job, direction, rank)
        if not storing:
            for name in layers:
                side.mismatched += engine.mismatches(name, block_ids, range(blocks))
                side.changed += engine.changed(name, block_ids)
    side.changed += sum(engine.changed(name, ()) for name in untouched)
    return side


def _slots_of(blocks: int, groups: Iterable[str]) -> dict[str, list[int]]:
    """Group -> its slots, scattered over the pool; the same on every rank."""
    names = list(groups)
    shuffled = np.random.default_rng(_SEED).permutation(blocks * len(names)).tolist()
    return {name: shuffled[i * blocks : (i + 1) * blocks] for i, name in enumerate(names)}


def _block_ids(context: PolicyContext, seed: int, blocks: int) -> list[int]:
    """Scattered block ids, others on every rank: a slot does not care where a block lies."""
    shuffled = np.random.default_rng((_SEED, seed)).permutation(context.geometry.num_blocks)
    return [int(block) for block in shuffled[:blocks]]
