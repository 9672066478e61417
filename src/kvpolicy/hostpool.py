"""HostPool: host rows that hold records, and what each row is known to hold.

One pool may be shared by the connectors of several ranks (each an object with its own tensors).
A slot's record is *complete* for a reader when every rank that had to write the reader's bytes
has finished its store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import attrs
import numpy as np
import torch

from kvpolicy.errors import FormatMismatchError, OptionError, PoolError
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology

MAX_POOL_BYTES = 2**44
Sources = Callable[[int], frozenset[int]]
"""Slot -> the world ranks that write what is meant."""


@attrs.define
class _Slot:
    """What a slot holds, and who is busy with it."""

    format: GroupFormat | None = None
    topology: Topology | None = None
    writers: frozenset[int] = frozenset()
    stored: set[int] = attrs.field(factory=set)
    writing: set[int] = attrs.field(factory=set)
    reading: int = 0
    stores: int = 0  # how many have begun here


class HostPool:
    """Rows of host memory; row s is slot s.

    Args:
        num_slots: rows.
        record_bytes: bytes that a row can hold; None: the first connector that joins decides.
        alignment: rows begin at multiples of this many bytes, a power of two.

    Raises:
        OptionError: sizes that cannot be.
        PoolError: not enough memory.

    Thread-safe. Memory is zeroed and, where the system does so, taken as it is touched.
    """

    def __init__(
        self, num_slots: int, record_bytes: int | None = None, *, alignment: int = 64
    ) -> None:
        sizes = {"num_slots": num_slots, "record_bytes": record_bytes, "alignment": alignment}
        for name, value in sizes.items():
            if value is None and name == "record_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"HostPool {name} is a whole number >= 1, not {value!r}")
        if alignment & (alignment - 1):
            raise OptionError(f"HostPool alignment is a power of two, not {alignment}")
        self.num_slots = num_slots
        self.alignment = alignment
        self.record_bytes = 0
        self._rows: torch.Tensor | None = None
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()
        self._members: list[Callable[[], None]] = []
        if record_bytes is not None:
            self._allocate(record_bytes)

    def __repr__(self) -> str:
        """Sizes, for people."""
        return f"HostPool(num_slots={self.num_slots}, record_bytes={self.record_bytes})"

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next; 0 while the record's size is not known."""
        return -(-self.record_bytes // self.alignment) * self.alignment

    @property
    def rows(self) -> torch.Tensor:
        """The memory, uint8 of shape (num_slots, row_stride).

        Raises:
            PoolError: no connector has joined a pool made without ``record_bytes``.
        """
        if self._rows is None:
            raise PoolError(
                "the pool has no rows yet: give record_bytes, or join it to a connector"
            )
        return self._rows

    def _allocate(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        total = self.num_slots * self.row_stride
        try:
            if total > MAX_POOL_BYTES:
                raise MemoryError
            memory = np.zeros(total + self.alignment, dtype=np.uint8)
        except MemoryError:
            self.record_bytes = 0
            raise PoolError(
                f"no memory for {self.num_slots:,} slots of {record_bytes:,} B "
                f"({total / 2**30:,.1f} GiB); lower the number of slots"
            ) from None
        start = -memory.ctypes.data % self.alignment
        rows = memory[start : start + total].reshape(self.num_slots, self.row_stride)
        self._rows = torch.from_numpy(rows)

    def join(self, record_bytes: int, collect: Callable[[], None]) -> None:
        """Joins a connector whose largest record has ``record_bytes``.

        Args:
            record_bytes: bytes of the largest group's record.
            collect: called, outside every lock, when a slot that is being written is wanted.

        Raises:
            PoolError: the rows are shorter.
        """
        with self._lock:
            if self._rows is None:
                self._allocate(record_bytes)
            if record_bytes > self.record_bytes:
                raise PoolError(
                    f"the pool's rows hold {self.record_bytes:,} B, this connector's records have "
                    f"{record_bytes:,}; make the pool with record_bytes={record_bytes}"
                )
            self._members.append(collect)

    def leave(self, collect: Callable[[], None]) -> None:
        """Undoes `join`; the rows stay for others."""
        with self._lock:
            self._members = [member for member in self._members if member != collect]

    def collect(self) -> None:
        """Lets every connector notice what has finished."""
        with self._lock:
            members = list(self._members)
        for member in members:
            member()

    def holds(self, slot: int) -> GroupFormat | None:
        """The format of what a slot holds, or None."""
        with self._lock:
            found = self._slots.get(slot)
            return found.format if found is not None and found.stored else None

    def begin_store(
        self,
        slots: Iterable[int],
        fmt: GroupFormat,
        topology: Topology,
        rank: int,
        writers: Sources,
    ) -> Callable[[], None]:
        """Marks slots as being written by a rank; all of them or none.

        A rank that stores a slot which it has already stored begins a new record there: what the
        other ranks stored before no longer counts.

        Returns:
            What undoes it, instead of `end_store`, where no byte was moved.

        Raises:
            PoolError: a slot is being read, or written by this rank or another engine.
        """
        begun = []
        with self._lock:
            wanted = [(slot, self._slots.setdefault(slot, _Slot())) for slot in slots]
            for slot, state in wanted:
                if state.reading:
                    raise PoolError(
                        f"slot {slot} is being read by {state.reading} pending load(s); wait for "
                        "them before storing there"
                    )
                other = (state.format, state.topology) != (fmt, topology)
                if rank in state.writing or (state.writing and other):
                    raise PoolError(
                        f"slot {slot} is being written by a store that has not finished; wait for "
                        "it before storing there again"
                    )
            for slot, state in wanted:
                state.stores += 1
                begun.append((state, attrs.evolve(state, stored=set(state.stored))))
                same = state.format == fmt and state.topology == topology
                if not same or rank in state.stored:
                    state.stored.clear()
                state.format, state.topology = fmt, topology
                state.writers = writers(slot)
                state.writing.add(rank)
        return lambda: self._undo_store(begun, rank)

    def _undo_store(self, begun: Iterable[tuple[_Slot, _Slot]], rank: int) -> None:
        with self._lock:
            for state, before in begun:
                state.writing.discard(rank)
                if state.stores != before.stores:
                    continue  # another rank has joined the new record since
                state.format, state.topology = before.format, before.topology
                state.writers = before.writers
                state.stored |= before.stored

    def end_store(self, slots: Iterable[int], rank: int, failed: frozenset[int]) -> None:
        """Undoes the mark; slots that did not fail now hold the rank's part."""
        with self._lock:
            for slot in slots:
                state = self._slots[slot]
                state.writing.discard(rank)
                if slot not in failed:
                    state.stored.add(rank)

    def begin_load(
        self, slots: Iterable[int], fmt: GroupFormat, topology: Topology, sources: Sources
    ) -> None:
        """Marks slots as being read; all of them or none.

        Raises:
            FormatMismatchError: a slot holds another format; the differing fields are named.
            PoolError: a slot is empty, being written, or lacks some rank's part.
        """
        with self._lock:
            found = [(slot, self._slots.get(slot, _Slot())) for slot in slots]
            for slot, state in found:
                self._check_readable(slot, state, fmt, topology, sources)
            for _, state in found:
                state.reading += 1

    def _check_readable(
        self, slot: int, state: _Slot, fmt: GroupFormat, topology: Topology, sources: Sources
    ) -> None:
        if state.format is None or not (state.stored or state.writing):
            raise PoolError(f"slot {slot} holds nothing; store to it before loading")
        if state.format != fmt:
            raise FormatMismatchError(
                f"slot {slot} holds format {state.format.format_id}, this load wants "
                f"{fmt.format_id}; they differ in",
                state.format.differences(fmt),
            )
        if state.writing:
            raise PoolError(f"slot {slot} is being written; wait for the store before loading")
        # Ranks of the writing engine need only their own bytes; anyone else needs them all.
        needed = sources(slot) if state.topology == topology else state.writers
        missing = sorted(needed - state.stored)
        if missing:
            shown = ", ".join(str(rank) for rank in missing[:8])
            raise PoolError(
                f"slot {slot} is incomplete: rank(s) {shown} of the storing engine have not "
                "stored their part"
            )

    def end_load(self, slots: Iterable[int]) -> None:
        """Undoes `begin_load`."""
        with self._lock:
            for slot in slots:
                self._slots[slot].reading -= 1


def as_pool(host: HostPool | int | None) -> HostPool | None:
    """The connector's ``host`` argument: a pool, a number of slots, or nothing.

    Raises:
        OptionError: something else.
    """
    if host is None or isinstance(host, HostPool):
        return host
    if isinstance(host, bool) or not isinstance(host, int):
        raise OptionError(f"host is a HostPool, a number of slots or None, not {host!r}")
    return HostPool(host)
