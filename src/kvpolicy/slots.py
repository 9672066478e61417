"""What the slots of a pool are known to hold, and the rules by which that changes.

The rules are those of every pool; where slots are kept, and who else may be busy with them, is the
table's affair. A slot's record is *complete* for a reader when every rank that had to write the
reader's bytes has finished its store.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import attrs

from kvpolicy.errors import FormatMismatchError, PoolError
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology
from kvpolicy.words import shown

Keys = Mapping[int, Hashable]
RanksOf = Callable[[int], frozenset[int]]
"""Slot -> world ranks: those that write its record, or those whose parts a load reads."""


@attrs.frozen
class Record:
    """What one slot's record is: its format, who stores it, its name and its tensors' dtype."""

    format: GroupFormat
    topology: Topology
    key: Hashable | None = None
    element: str = attrs.field(default="", eq=False)  # layers of a rank may have several


@attrs.frozen(kw_only=True)
class StoredRecord:
    """What a slot of a pool holds; see `HostPool.records`.

    Attributes:
        slot: the row.
        key: the record's name, None if it has none. A `SharedHostPool` gives the key itself where
            its encoded form has at most 64 B, else an object that only its digest tells apart.
        format: the format of its bytes.
        topology: the engine whose ranks store it: its grid and the layers of its stages.
        complete: whether the part of every rank that writes it is there, and nobody is writing.
    """

    slot: int
    key: Hashable | None
    format: GroupFormat
    topology: Topology
    complete: bool


@attrs.define
class Slot:
    """What a slot holds, and who is busy with it.

    Attributes:
        record: what it holds or will hold, None if nothing was ever stored there.
        writers: the ranks that write something of the record.
        stored: the ranks whose part has arrived.
        writing: ranks that store at present -> the owner that they belong to.
        reading: owners that load at present -> how many loads.
        stores: how many stores have begun here, and how often what it held was forgotten.
        given_up: a store failed and the record has no key: what ``stored`` says does not count,
            and the next rank that stores for a second time begins another record.
    """

    record: Record | None = None
    writers: frozenset[int] = frozenset()
    stored: set[int] = attrs.field(factory=set)
    writing: dict[int, int] = attrs.field(factory=dict)
    reading: dict[int, int] = attrs.field(factory=dict)
    stores: int = 0
    given_up: bool = False

    def is_new(self, record: Record, rank: int) -> bool:
        """Whether a rank's store begins another record than the one that the slot holds."""
        return self.record != record or (record.key is None and rank in self.stored)

    def lose(self, rank: int) -> None:
        """A rank's store has failed.

        A record without a key is then given up: nobody could tell a rank that tries again from
        one that stores something new, nor a late part of it from an early one of the next.
        """
        if self.record is None or self.record.key is None:
            self.stored.add(rank)
            self.given_up = True
        else:
            self.stored.discard(rank)

    def forget(self) -> None:
        """What the slot holds no longer counts; who is busy with it stays so.

        While a rank is still writing what was forgotten, every other record is a new one, so
        that nobody writes beside it. Its part is then one of no record, which the next begins
        without. What undoes a store finds that something came after it.
        """
        self.record, self.writers = None, frozenset()
        self.stored, self.given_up = set(), False
        self.stores += 1

    @property
    def there(self) -> set[int]:
        """The ranks whose part counts."""
        return set() if self.given_up else self.stored

    def told(self, slot: int) -> StoredRecord | None:
        """The slot's record, None where a load would find that it holds nothing."""
        record = self.record
        if record is None or not (self.there or self.writing):
            return None
        return StoredRecord(
            slot=slot,
            key=record.key,
            format=record.format,
            topology=record.topology,
            complete=not self.writing and self.writers <= self.there,
        )


class SlotTable(abc.ABC):
    """Where slots are kept. An owner is who may be busy with them: a pool opened by a process."""

    @property
    @abc.abstractmethod
    def owner(self) -> int | None:
        """This owner's number; None if it has no part in the table (any more)."""

    @abc.abstractmethod
    def locked(self) -> AbstractContextManager[int]:
        """Keeps everyone else out; yields this owner's number, which it takes if it has none."""

    @abc.abstractmethod
    def get(self, slot: int) -> Slot:
        """The state of a slot, to be changed and `put` back; only while locked."""

    @abc.abstractmethod
    def put(self, slot: int, state: Slot) -> None:
        """Keeps the state of a slot, all of it or (if this raises) nothing; only while locked."""

    @abc.abstractmethod
    def forget(self, slots: Sequence[int] | None) -> None:
        """`Slot.forget` for these slots (None: all); only while locked."""

    @abc.abstractmethod
    def records(self) -> list[StoredRecord]:
        """What `Slot.told` says of every slot, in order; locks for itself."""

    def name(self, key: Hashable) -> Hashable:
        """A record's key as the table keeps it."""
        return key


class LocalTable(SlotTable):
    """Slots of one process. Thread-safe."""

    owner = 0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[int, Slot] = {}

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Keeps other threads out."""
        with self._lock:
            yield self.owner

    def get(self, slot: int) -> Slot:
        """The state itself."""
        return self._slots.get(slot) or Slot()

    def put(self, slot: int, state: Slot) -> None:
        """Keeps the state itself."""
        self._slots[slot] = state

    def forget(self, slots: Sequence[int] | None) -> None:
        """Only slots that were used have anything to forget."""
        for slot in self._slots if slots is None else self._slots.keys() & {*slots}:
            self._slots[slot].forget()

    def records(self) -> list[StoredRecord]:
        """Read slot by slot."""
        with self._lock:
            told = (state.told(slot) for slot, state in sorted(self._slots.items()))
            return [record for record in told if record]


Begun = list[tuple[int, Slot]]
"""The slots of a store that has begun, each as it was before and with its new count of stores."""


class Ledger:
    """The rules, over one table. `HostPool` says what each method takes and raises."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def holds(self, slot: int) -> GroupFormat | None:
        """The format of what a slot holds, or None."""
        with self._table.locked():
            state = self._table.get(slot)
        return state.record.format if state.record and state.there else None

    def is_busy(self, slots: Iterable[int]) -> bool:
        """Whether some slot is being written or read."""
        with self._table.locked():
            found = (self._table.get(slot) for slot in slots)
            return any(state.writing or state.reading for state in found)

    def records(self) -> list[StoredRecord]:
        """What the slots hold, in order."""
        return self._table.records()

    def forget(self, slots: Sequence[int] | None) -> None:
        """What these slots (None: all) hold no longer counts."""
        with self._table.locked():
            self._table.forget(slots)

    def _record(
        self, slot: int, fmt: GroupFormat, topology: Topology, keys: Keys | None, element: str
    ) -> Record:
        key = self._table.name(keys[slot]) if keys else None
        return Record(fmt, topology, key, element)

    def begin_store(
        self,
        slots: Iterable[int],
        fmt: GroupFormat,
        topology: Topology,
        rank: int,
        writers: RanksOf,
        keys: Keys | None,
        element: str,
    ) -> Callable[[], None]:
        """Marks slots as being written; returns what undoes it."""
        wanted = {slot: self._record(slot, fmt, topology, keys, element) for slot in slots}
        begun: Begun = []
        with self._table.locked() as owner:
            found = {slot: self._table.get(slot) for slot in wanted}
            for slot, state in found.items():
                _check_writable(slot, state, wanted[slot], rank)
            try:
                for slot, state in found.items():
                    record = wanted[slot]
                    begun.append((slot, attrs.evolve(state, stored={*state.stored})))
                    begun[-1][1].stores += 1
                    state.stores += 1
                    if state.is_new(record, rank):
                        state.stored.clear()
                        state.given_up = False
                    state.record, state.writers = record, writers(slot)
                    state.writing[rank] = owner
                    self._table.put(slot, state)
            except BaseException:
                self._undo(begun, rank, owner)
                raise

        def undo() -> None:
            if self._table.owner is not None:
                with self._table.locked() as current:
                    self._undo(begun, rank, current)

        return undo

    def _undo(self, begun: Begun, rank: int, owner: int) -> None:
        for slot, before in begun:
            state = self._table.get(slot)
            if state.writing.get(rank) != owner:
                continue  # it was not marked, or is no longer ours
            del state.writing[rank]
            if state.stores == before.stores:  # else another rank has joined the new record
                state.record, state.writers = before.record, before.writers
                state.stored |= before.stored
                state.given_up = before.given_up
            self._table.put(slot, state)

    def end_store(self, slots: Iterable[int], rank: int, failed: frozenset[int]) -> None:
        """Undoes the mark; slots that did not fail now hold the rank's part."""
        if self._table.owner is None:
            return
        with self._table.locked() as owner:
            for slot in slots:
                state = self._table.get(slot)
                if state.writing.get(rank) != owner:
                    continue  # a forked child has no part in what its parent began
                del state.writing[rank]
                if slot in failed:
                    state.lose(rank)
                else:
                    state.stored.add(rank)
                self._table.put(slot, state)

    def begin_load(
        self,
        slots: Iterable[int],
        fmt: GroupFormat,
        topology: Topology,
        sources: RanksOf,
        keys: Keys | None,
        element: str,
    ) -> Callable[[], None]:
        """Marks slots as being read; returns what undoes it."""
        wanted = {slot: self._record(slot, fmt, topology, keys, element) for slot in slots}
        marked: list[int] = []
        with self._table.locked() as owner:
            found = {slot: self._table.get(slot) for slot in wanted}
            for slot, state in found.items():
                _check_readable(slot, state, wanted[slot], sources)
            try:
                for slot, state in found.items():
                    state.reading[owner] = state.reading.get(owner, 0) + 1
                    self._table.put(slot, state)
                    marked.append(slot)
            except BaseException:
                self._end_load(marked, owner)
                raise

        def end() -> None:
            if self._table.owner != owner:
                return  # closed since, or a forked child: its parent reads
            with self._table.locked():
                self._end_load(marked, owner)
                marked.clear()

        return end

    def _end_load(self, slots: Iterable[int], owner: int) -> None:
        for slot in slots:
            state = self._table.get(slot)
            left = state.reading.pop(owner, 0) - 1
            if left > 0:
                state.reading[owner] = left
            self._table.put(slot, state)


def _check_writable(slot: int, state: Slot, record: Record, rank: int) -> None:
    if state.reading:
        raise PoolError(
            f"slot {slot} is being read by {sum(state.reading.values())} pending load(s); wait "
            "for them before storing there"
        )
    if rank in state.writing or (state.writing and state.is_new(record, rank)):
        raise PoolError(
            f"slot {slot} is being written by a store that has not finished; wait for it "
            "before storing there again"
        )


def _check_readable(slot: int, state: Slot, wanted: Record, sources: RanksOf) -> None:
    held = state.record
    if held is None or not (state.there or state.writing):
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
    missing = sorted(needed - state.there)
    if missing:
        ranks = ", ".join(str(rank) for rank in missing[:8])
        raise PoolError(
            f"slot {slot} is incomplete: rank(s) {ranks} of the storing engine have not "
            "stored their part"
        )
