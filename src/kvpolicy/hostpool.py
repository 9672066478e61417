"""HostPool: host rows that hold records, and what each row is known to hold.

One pool may be shared by the connectors of several ranks (each an object with its own tensors).
A slot's record is *complete* for a reader when every rank that had to write the reader's bytes
has finished its store.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping

import attrs
import numpy as np
import torch

from kvpolicy.errors import FormatMismatchError, OptionError, PoolError
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology
from kvpolicy.words import shown

MAX_POOL_BYTES = 2**44
Collect = Callable[[], None]
Keys = Mapping[int, Hashable]
Sources = Callable[[int], frozenset[int]]
"""Slot -> the world ranks that write what is meant."""


@attrs.frozen
class _Record:
    """What one slot's record is: its format, who stores it, its name and its tensors' dtype."""

    format: GroupFormat
    topology: Topology
    key: Hashable | None = None
    element: str = attrs.field(default="", eq=False)  # layers of a rank may have several


@attrs.define
class _Slot:
    """What a slot holds, and who is busy with it."""

    record: _Record | None = None
    writers: frozenset[int] = frozenset()
    stored: set[int] = attrs.field(factory=set)
    writing: set[int] = attrs.field(factory=set)
    reading: set[object] = attrs.field(factory=set)
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
                raise OptionError(f"HostPool {name} is a whole number >= 1, not {shown(value)}")
        if alignment & (alignment - 1):
            raise OptionError(f"HostPool alignment is a power of two, not {alignment}")
        self.num_slots = num_slots
        self.alignment = alignment
        self.record_bytes = 0
        self._rows: torch.Tensor | None = None
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()
        self._members: list[Callable[[], Collect | None]] = []
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

    def join(self, record_bytes: int, collect: Collect) -> None:
        """Joins a connector whose largest record has ``record_bytes``.

        Args:
            record_bytes: bytes of the largest group's record.
            collect: called outside every lock when a slot in use is wanted.

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
            # Weakly, so that a pool keeps no connector and its tensors alive.
            method = inspect.ismethod(collect)
            self._members.append(weakref.WeakMethod(collect) if method else lambda: collect)

    def leave(self, collect: Collect) -> None:
        """Undoes `join`; the rows stay for others."""
        with self._lock:
            self._members = [one for one in self._members if one() not in (None, collect)]

    def collect(self) -> None:
        """Lets every connector notice what has finished."""
        with self._lock:
            members = list(self._members)
        for member in members:
            if (alive := member()) is not None:
                alive()

    def holds(self, slot: int) -> GroupFormat | None:
        """The format of what a slot holds, or None."""
        with self._lock:
            found = self._slots.get(slot)
            return found.record.format if found and found.record and found.stored else None

    def is_busy(self, slots: Iterable[int]) -> bool:
        """Whether some slot is being written or read."""
        with self._lock:
            found = (self._slots.get(slot) for slot in slots)
            return any(state and (state.writing or state.reading) for state in found)

    def begin_store(
        self,
        slots: Iterable[int],
        fmt: GroupFormat,
        topology: Topology,
        rank: int,
        writers: Sources,
        *,
        keys: Keys | None = None,
        element: str = "",
    ) -> Callable[[], None]:
        """Marks slots as being written by a rank; all of them or none.

        A slot begins a new record, and what was stored there no longer counts, when its format,
        engine or key differs, or, without keys, when a rank stores it a second time.

        Args:
            slots: the rows.
            fmt: what is stored.
            topology: the engine that stores it.
            rank: the world rank that stores.
            writers: slot -> the ranks that write its record.
            keys: slot -> the record's name, where the engine names them.
            element: the tensors' dtype, "" if they are opaque bytes or have several.

        Returns:
            What undoes it, instead of `end_store`, where no byte was moved.

        Raises:
            PoolError: a slot is being read, or written by this rank or as another record.
        """
        begun = []
        with self._lock:
            wanted = [
                (
                    slot,
                    self._slots.setdefault(slot, _Slot()),
                    _Record(fmt, topology, keys[slot] if keys else None, element),
                )
                for slot in slots
            ]
            for slot, state, record in wanted:
                self._check_writable(slot, state, record, rank)
            for slot, state, record in wanted:
                state.stores += 1
                begun.append((state, attrs.evolve(state, stored=set(state.stored))))
                if _is_new(state, record, rank):
                    state.stored.clear()
                state.record, state.writers = record, writers(slot)
                state.writing.add(rank)
        return lambda: self._undo_store(begun, rank)

    def _check_writable(self, slot: int, state: _Slot, record: _Record, rank: int) -> None:
        if state.reading:
            raise PoolError(
                f"slot {slot} is being read by {len(state.reading)} pending load(s); wait for "
                "them before storing there"
            )
        if rank in state.writing or (state.writing and _is_new(state, record, rank)):
            raise PoolError(
                f"slot {slot} is being written by a store that has not finished; wait for it "
                "before storing there again"
            )

    def _undo_store(self, begun: Iterable[tuple[_Slot, _Slot]], rank: int) -> None:
        with self._lock:
            for state, before in begun:
                state.writing.discard(rank)
                if state.stores != before.stores:
                    continue  # another rank has joined the new record since
                state.record, state.writers = before.record, before.writers
                state.stored |= before.stored

    def end_store(self, slots: Iterable[int], rank: int, failed: frozenset[int]) -> None:
        """Undoes the mark; slots that did not fail now hold the rank's part.

        A record without a key whose store failed is given up: nobody could tell a rank that
        tries again from one that stores something new.
        """
        with self._lock:
            for slot in slots:
                state = self._slots[slot]
                state.writing.discard(rank)
                if slot not in failed:
                    state.stored.add(rank)
                elif state.record is None or state.record.key is None:
                    state.stored.clear()
                else:
                    state.stored.discard(rank)

    def begin_load(
        self,
        slots: Iterable[int],
        fmt: GroupFormat,
        topology: Topology,
        sources: Sources,
        *,
        keys: Keys | None = None,
        element: str = "",
    ) -> Callable[[], None]:
        """Marks slots as being read; all of them or none.

        Args:
            slots: the rows.
            fmt: what is wanted.
            topology: the engine that wants it.
            sources: slot -> the ranks whose parts are read, if the loader's engine stored it.
            keys: slot -> the record's name, if it must be that one.
            element: the tensors' dtype, "" if they are opaque bytes.

        Returns:
            What undoes it.

        Raises:
            FormatMismatchError: a slot holds another format; the differing fields are named.
            PoolError: a slot is empty, being written, another record, or lacks some rank's part.
        """
        token = object()
        with self._lock:
            found = [(slot, self._slots.get(slot, _Slot())) for slot in slots]
            for slot, state in found:
                key = keys[slot] if keys else None
                self._check_readable(slot, state, _Record(fmt, topology, key, element), sources)
            for _, state in found:
                state.reading.add(token)

        def end() -> None:
            with self._lock:
                for _, state in found:
                    state.reading.discard(token)

        return end

    def _check_readable(self, slot: int, state: _Slot, wanted: _Record, sources: Sources) -> None:
        held = state.record
        if held is None or not (state.stored or state.writing):
            raise PoolError(f"slot {slot} holds nothing; store to it before loading")
        differences = list(held.format.differences(wanted.format))
        if held.element and wanted.element and held.element != wanted.element:
            differences.append(f"tensors: stored {held.element}, wanted {wanted.element}")
        if differences:
            raise FormatMismatchError(
                f"slot {slot} holds format {held.format.format_id}, this load wants "
                f"{wanted.format.format_id}; they differ in",
                differences,
            )
        if wanted.key is not None and held.key != wanted.key:
            raise PoolError(
                f"slot {slot} holds record {shown(held.key)}, this load wants {shown(wanted.key)}"
            )
        if state.writing:
            raise PoolError(f"slot {slot} is being written; wait for the store before loading")
        # Ranks of the writing engine need only their own bytes; anyone else needs them all.
        needed = sources(slot) if held.topology == wanted.topology else state.writers
        missing = sorted(needed - state.stored)
        if missing:
            ranks = ", ".join(str(rank) for rank in missing[:8])
            raise PoolError(
                f"slot {slot} is incomplete: rank(s) {ranks} of the storing engine have not "
                "stored their part"
            )


def _is_new(state: _Slot, record: _Record, rank: int) -> bool:
    """Whether a rank's store begins another record than the one that the slot holds."""
    return state.record != record or (record.key is None and rank in state.stored)


def as_pool(host: HostPool | int | None) -> HostPool | None:
    """The connector's ``host`` argument: a pool, a number of slots, or nothing.

    Raises:
        OptionError: something else.
    """
    if host is None or isinstance(host, HostPool):
        return host
    if isinstance(host, bool) or not isinstance(host, int):
        raise OptionError(f"host is a HostPool, a number of slots or None, not {shown(host)}")
    return HostPool(host)
