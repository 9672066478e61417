"""The slots of a shared pool, kept in its file.

A slot has two places and a byte that says which of them holds: a process that dies while it
changes a slot leaves it as it was. Whoever is busy with a slot is entered there with the owner that
it belongs to: the store of a dead owner has failed, its loads are over.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Hashable, Iterator
from pathlib import Path

import numpy as np

from kvpolicy.errors import ClosedError, PoolError
from kvpolicy.owners import Owner
from kvpolicy.sharedfile import BODY_AT, MAX_OWNERS, PoolFile, PoolShape
from kvpolicy.sharedterms import TERMS_BYTES, StoredKey, Terms, stored_key
from kvpolicy.slots import Slot, SlotTable

MAX_BUSY = 32
"""Ranks that store in one slot at once, and owners that load from it, together."""
_SLOTS_AT = BODY_AT + TERMS_BYTES
_SLOT = struct.Struct("<IIIIIIQ32s")  # what it has, four terms, busy, stores, key
_BUSY = struct.Struct("<HHI")  # rank, or _READER; owner; loads
_READER = 0xFFFF
_HAS_RECORD, _HAS_KEY, _GIVEN_UP = 1, 2, 4


def slots_size(num_slots: int, max_ranks: int) -> int:
    """Bytes of the file before its rows, without alignment."""
    return _SLOTS_AT + num_slots * _stride(max_ranks)


def _mask_bytes(max_ranks: int) -> int:
    return -(-max_ranks // 64) * 8


def _place_bytes(max_ranks: int) -> int:
    return _SLOT.size + _mask_bytes(max_ranks) + MAX_BUSY * _BUSY.size


def _stride(max_ranks: int) -> int:
    return 8 + 2 * _place_bytes(max_ranks)


class SharedTable(SlotTable):
    """Slots in a pool's file, as one owner sees them. Thread-safe; a forked child is another owner.

    Args:
        path: the file.
        shape: what it must be.
        create: whether to make it where it is not there.

    Raises:
        PoolError: as `PoolFile` says, or too many owners.
    """

    def __init__(self, path: Path, shape: PoolShape, *, create: bool) -> None:
        self._owner: int | None = None
        self._alive: dict[int, bool] = {}
        self._shape = shape
        self._stride = _stride(shape.max_ranks)
        self._place = _place_bytes(shape.max_ranks)
        self._mask = _mask_bytes(shape.max_ranks)
        self._closed = False
        self.file = PoolFile(path, shape, create=create, enter=self._set_up)

    def _set_up(self, file: PoolFile) -> None:
        self.file = file
        self._terms = Terms(file)
        self._enter()

    @property
    def owner(self) -> int | None:
        """This owner's number."""
        return self._owner

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Keeps out other threads and processes.

        Raises:
            ClosedError: it was closed.
            PoolError: a forked child comes when the pool is gone.
        """
        if self._closed:
            raise ClosedError(f"the pool {self.file.path} is closed here; open it again")
        with self.file.locked():
            self._alive.clear()
            yield self._enter() if self._owner is None else self._owner

    def _enter(self) -> int:
        if self.file.is_removed():
            raise PoolError(f"the pool {self.file.path} is gone: its last process has left it")
        owners = self.file.owners()
        for number, owner in owners.items():
            if not owner.is_alive():
                self._forget(number)
                self.file.set_owner(number, None)
        free = next((n for n in range(MAX_OWNERS) if self.file.owner(n) is None), None)
        if free is None:
            raise PoolError(f"at most {MAX_OWNERS} owners have a pool open at once")
        self.file.set_owner(free, Owner.current())
        self._owner = free
        return free

    def after_fork(self) -> None:
        """In the child: it is an owner of its own, once it does something."""
        if not self._closed:
            self._owner = None
            self.file.reopen()

    def leave(self, *, blocking: bool = True) -> None:
        """Leaves the pool; whoever leaves last removes the file.

        Args:
            blocking: whether to wait for this process's other threads.

        Raises:
            PoolError: this owner is still busy with some slot, or another thread has the lock.
        """
        if self._closed:
            return
        with self.file.locked(blocking=blocking):
            if self._owner is not None:
                if busy := self._busy_of(self._owner):
                    raise PoolError(
                        f"{len(busy)} slot(s) of the pool {self.file.path} are being stored or "
                        "loaded here; close the connectors first"
                    )
                self.file.set_owner(self._owner, None)
                self._owner = None
                if not any(owner.is_alive() for owner in self.file.owners().values()):
                    self.file.remove()
            self._closed = True

    def release(self) -> None:
        """After `leave`: closes the file; the memory goes when nobody looks at it any more."""
        self.file.close()

    def abandon(self) -> None:
        """Leaves it if nobody did; what is busy stays marked until the process has ended."""
        with contextlib.suppress(PoolError, OSError):
            # A collector may come at any time, inside this lock too.
            self.leave(blocking=False)
            self.release()

    # Owners and what they are busy with; only while locked.

    def _lives(self, owner: int) -> bool:
        if owner not in self._alive:
            found = self.file.owner(owner)
            self._alive[owner] = owner == self._owner or bool(found and found.is_alive())
        return self._alive[owner]

    def _busy_of(self, owner: int) -> list[int]:
        """The slots that an owner is busy with."""
        count = self._shape.num_slots
        raw = np.frombuffer(self.file.map, np.uint8, count * self._stride, _SLOTS_AT)
        places = raw.reshape(count, self._stride)
        which = places[:, 0]
        busy = [places[:, 8 + n * self._place + 20].copy() for n in (0, 1)]
        marked = np.flatnonzero(np.where(which == 0, *busy))
        found = []
        for slot in marked.tolist():
            state = self._decode(slot)
            if owner in state.reading or owner in state.writing.values():
                found.append(slot)
        return found

    def _forget(self, owner: int) -> None:
        """Before a dead owner's number is given to another."""
        self._alive[owner] = False
        for slot in self._busy_of(owner):
            self.get(slot)

    # Slots; only while locked.

    def name(self, key: Hashable) -> Hashable:
        """The digest of a key, as `stored_key` makes it."""
        return stored_key(key)

    def get(self, slot: int) -> Slot:
        """The state, with dead owners taken out."""
        state = self._decode(slot)
        lost = [rank for rank, owner in state.writing.items() if not self._lives(owner)]
        gone = [owner for owner in state.reading if not self._lives(owner)]
        for rank in lost:
            del state.writing[rank]
            state.lose(rank)
        for owner in gone:
            del state.reading[owner]
        if lost or gone:
            self.put(slot, state)
        return state

    def _at(self, slot: int) -> int:
        return _SLOTS_AT + slot * self._stride

    def _decode(self, slot: int) -> Slot:
        at = self._at(slot)
        at += 8 + (self._place if self.file.map[at] else 0)
        has, fmt, topology, writers, element, busy, stores, key = _SLOT.unpack_from(
            self.file.map, at
        )
        state = Slot(stores=stores, given_up=bool(has & _GIVEN_UP))
        if has & _HAS_RECORD:
            named = StoredKey(key) if has & _HAS_KEY else None
            state.record, state.writers = self._terms.record(fmt, topology, writers, element, named)
        at += _SLOT.size
        mask = int.from_bytes(self.file.map[at : at + self._mask], "little")
        while mask:
            lowest = mask & -mask
            state.stored.add(lowest.bit_length() - 1)
            mask ^= lowest
        at += self._mask
        for number in range(busy):
            rank, owner, loads = _BUSY.unpack_from(self.file.map, at + number * _BUSY.size)
            if rank == _READER:
                state.reading[owner] = loads
            else:
                state.writing[rank] = owner
        return state

    def put(self, slot: int, state: Slot) -> None:
        """Writes the place that does not hold, then says that it does.

        Raises:
            PoolError: a rank that the pool has no place for, or too many that are busy.
        """
        at = self._at(slot)
        other = 1 - self.file.map[at]
        place = at + 8 + other * self._place
        raw = self._encode(slot, state)
        self.file.map[place : place + len(raw)] = raw
        self.file.map[at] = other

    def _encode(self, slot: int, state: Slot) -> bytes:
        ranks = state.stored | {*state.writing}
        if max(ranks, default=0) >= self._shape.max_ranks:
            raise PoolError(
                f"rank {max(ranks)} cannot store in a pool made with "
                f"max_ranks={self._shape.max_ranks}; make it with more"
            )
        busy = [_BUSY.pack(rank, owner, 1) for rank, owner in state.writing.items()]
        busy += [_BUSY.pack(_READER, owner, loads) for owner, loads in state.reading.items()]
        if len(busy) > MAX_BUSY:
            raise PoolError(
                f"slot {slot} is in use by {MAX_BUSY} others, as many as there is room for; try "
                "again when one has ended"
            )
        has, terms, key = _GIVEN_UP if state.given_up else 0, (0, 0, 0, 0), b""
        if record := state.record:
            has |= _HAS_RECORD
            terms = self._terms.numbers(record, state.writers)
            if isinstance(record.key, StoredKey):
                has, key = has | _HAS_KEY, record.key.digest
        stored = sum(1 << rank for rank in state.stored)
        return b"".join(
            (
                _SLOT.pack(has, *terms, len(busy), state.stores, key),
                stored.to_bytes(self._mask, "little"),
                *busy,
            )
        )
