"""All ranks of one engine in one process: memories, connectors and the host pool they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from kvpolicy import (
    CacheGeometry,
    Connector,
    HostPool,
    LayerGroup,
    LayoutDecision,
    ParallelGrid,
    PluginSet,
    PolicyContext,
    StateSpec,
    TransferHandle,
    TransferJob,
    TransferResult,
    hookimpl,
)
from kvpolicy.testing import oracle
from kvpolicy.testing.memory import Allocation, Memory, allocate
from kvpolicy.testing.trial import SLOTS

TAIL_BYTES = 24
WAIT_SECONDS = 60


class Recorder:
    """A transfer plugin that moves nothing and keeps the jobs it is offered."""

    def __init__(self) -> None:
        self.jobs: list[TransferJob] = []

    @hookimpl
    def transfer(self, job: TransferJob) -> TransferHandle:
        """Takes the job and calls it done, so that the pool's books go on."""
        self.jobs.append(job)
        return TransferHandle.finished(
            TransferResult(job_id=job.job_id, ok=True, bytes=job.bytes, seconds=0.0)
        )


@attrs.define(kw_only=True, eq=False)
class World:
    """The ranks of one engine.

    Attributes:
        contexts, connectors, memories: by world rank.
        pool: the host pool that they share.
        allocation, device: how and where memory is allocated.
    """

    contexts: list[PolicyContext]
    connectors: list[Connector]
    memories: list[Memory]
    pool: HostPool
    allocation: Allocation
    device: str

    @classmethod
    def start(
        cls,
        context: PolicyContext,
        plugins: PluginSet,
        allocation: Allocation,
        pool: HostPool | None = None,
        device: str = "cpu",
    ) -> World:
        """Starts every rank; nothing is registered yet.

        Raises:
            KVPolicyError: start-up is refused.
        """
        groups = context.geometry.groups
        if pool is None:
            longest = max(oracle.record_bytes(context, group) for group in groups)
            pool = sentinel_pool(longest)
        contexts = [attrs.evolve(context, rank=rank) for rank in range(context.grid.size)]
        connectors = [Connector(one, plugins, host=pool) for one in contexts]
        memories = [
            allocate(one, connector.decision, allocation, device)
            for one, connector in zip(contexts, connectors, strict=True)
        ]
        return cls(
            contexts=contexts,
            connectors=connectors,
            memories=memories,
            pool=pool,
            allocation=allocation,
            device=device,
        )

    @property
    def decision(self) -> LayoutDecision:
        """Rank 0's decision."""
        return self.connectors[0].decision

    def register(self, ranks: Iterable[int] | None = None) -> None:
        """Registers the memories as they are shown.

        Raises:
            KVPolicyError: a rank is refused.
        """
        for rank in range(len(self.contexts)) if ranks is None else ranks:
            self.connectors[rank].register(self.memories[rank].caches)

    def names(self, group: LayerGroup) -> list[str]:
        """The group's layers."""
        return oracle.record_layers(self.contexts[0].geometry, group)

    def write(self, group: LayerGroup, blocks: Sequence[int], records: Sequence[int]) -> None:
        """Writes records into blocks of every rank, by the oracle."""
        for context, memory in zip(self.contexts, self.memories, strict=True):
            for block, record in zip(blocks, records, strict=True):
                memory.write(context, self.names(group), block, record)

    def fresh(
        self, rank: int, group: LayerGroup, blocks: Sequence[int], records: Sequence[int]
    ) -> Memory:
        """New memory of a rank in which the oracle alone has written."""
        context = self.contexts[rank]
        memory = allocate(context, self.decision, self.allocation, self.device)
        for block, record in zip(blocks, records, strict=True):
            memory.write(context, self.names(group), block, record)
        return memory

    def wipe(self) -> None:
        """Fills all memory with the sentinel again."""
        for memory in self.memories:
            for allocation in memory.allocations:
                allocation.fill_(oracle.SENTINEL)

    def store(self, blocks: Sequence[int], slots: Sequence[int], group: LayerGroup) -> None:
        """Stores with every rank, and waits.

        Raises:
            AssertionError: a transfer failed.
        """
        for connector in self.connectors:
            finish(connector, connector.store(blocks, slots, group.name))

    def load(self, slots: Sequence[int], blocks: Sequence[int], group: LayerGroup) -> None:
        """Loads with every rank, and waits.

        Raises:
            AssertionError: a transfer failed.
        """
        for connector in self.connectors:
            finish(connector, connector.load(slots, blocks, group.name))

    def expected_rows(
        self, group: LayerGroup, slots: Sequence[int], records: Sequence[int]
    ) -> oracle.Bytes:
        """The pool's rows with whole records in the slots and the sentinel everywhere else."""
        rows = np.full(tuple(self.pool.rows.shape), oracle.SENTINEL, dtype=np.uint8)
        for slot, number in zip(slots, records, strict=True):
            whole = oracle.record(self.contexts[0], group, number)
            rows[slot, : len(whole)] = whole
        return rows

    def close(self) -> None:
        """Closes every connector."""
        for connector in self.connectors:
            connector.close()


def finish(connector: Connector, job_id: int) -> TransferResult:
    """A job's result, which must be a success.

    Raises:
        AssertionError: it is late, or failed.
    """
    results = connector.wait([job_id], timeout=WAIT_SECONDS)
    if not results or not results[0].ok:
        raise AssertionError(f"job {job_id}: {results or 'no result in time'}")
    return results[0]


def sentinel_pool(record_bytes: int, tail: int = TAIL_BYTES) -> HostPool:
    """A pool of `SLOTS` rows filled with the sentinel, each with ``tail`` bytes to spare."""
    pool = HostPool(SLOTS, record_bytes=record_bytes + tail)
    pool.rows.fill_(oracle.SENTINEL)
    return pool


def one_rank(context: PolicyContext, group: LayerGroup) -> PolicyContext:
    """The same group on one rank: its blocks have the tokens of a canonical page, unpadded."""
    grid, layers = context.grid, {}
    for name in oracle.record_layers(context.geometry, group):
        spec = context.geometry.layers[name]
        if not isinstance(spec, StateSpec):
            tokens = oracle.all_tokens(spec, grid)
            spec = attrs.evolve(spec, block_size=tokens, kernel_block_size=tokens, page_padding=0)
        layers[name] = spec
    geometry = CacheGeometry(layers=layers, num_blocks=context.geometry.num_blocks, groups=[group])
    return attrs.evolve(context, geometry=geometry, grid=ParallelGrid(), rank=0)


def row_difference(
    found: oracle.Bytes, expected: oracle.Bytes, context: PolicyContext, group: LayerGroup
) -> str | None:
    """The first byte in which rows differ from what they should be, in words; None: equal."""
    wrong = np.argwhere(found != expected)
    if not len(wrong):
        return None
    slot, at = wrong[0].tolist()
    where = oracle.coordinates(context, group, at)
    untouched = " (sentinel)" if found[slot, at] == oracle.SENTINEL else ""
    should = "untouched" if expected[slot, at] == oracle.SENTINEL else f"0x{expected[slot, at]:02x}"
    return (
        f"slot {slot}, byte {at} ({where}) is 0x{found[slot, at]:02x}{untouched}, should be "
        f"{should} ({len(wrong)} bytes of the rows differ)"
    )
