"""The slots of a shared pool, kept in its file.

A slot has two places and a byte that says which of them holds: a process that dies while it
changes a slot leaves it as it was. Whoever is busy with a slot is entered there with the owner that
it belongs to: the store of a dead owner has failed, its loads are over.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt

from kvpolicy.errors import ClosedError, PoolError
from kvpolicy.owners import (
    enter_owner,
    leave_owner,
    live_owners,
    owner_lives,
    owners_of,
    remove_owner,
)
from kvpolicy.sharedfile import BODY_AT, PoolFile
from kvpolicy.sharedheader import PoolShape
from kvpolicy.sharedterms import MAX_KEY_BYTES, TERMS_BYTES, StoredKey, Terms, decoded, stored_key
from kvpolicy.slots import Slot, SlotTable, StoredRecord

MAX_BUSY = 32
"""Ranks that store in one slot at once, and owners that load from it, together."""
_SLOTS_AT = BODY_AT + TERMS_BYTES
# What it has, bytes of the key (0: a digest), four terms, busy, stores, key.
_SLOT = struct.Struct(f"<HH16sIQ{MAX_KEY_BYTES}s")
_TERMS = struct.Struct("<IIII")
_DIGEST_BYTES = 32
_BUSY = struct.Struct("<HHI")  # rank, or _READER; owner; loads
_READER = 0xFFFF
_HAS_RECORD, _HAS_KEY, _GIVEN_UP = 1, 2, 4


def slots_size(num_slots: int, max_ranks: int) -> int:
    """Bytes of the file before its rows, without alignment."""
    return _SLOTS_AT + num_slots * _slot_type(max_ranks).itemsize


def _mask_bytes(max_ranks: int) -> int:
    return -(-max_ranks // 64) * 8


def _slot_type(max_ranks: int) -> np.dtype[np.void]:
    """A slot's bytes, as NumPy reads those of many slots at once; `_SLOT` begins each place."""
    place = [
        ("has", "<u2"),
        ("key_bytes", "<u2"),
        ("terms", f"V{_TERMS.size}"),
        ("busy", "<u4"),
        ("stores", "<u8"),
        ("key", f"V{MAX_KEY_BYTES}"),
        ("stored", f"V{_mask_bytes(max_ranks)}"),
        ("users", "V8", (MAX_BUSY,)),
    ]
    return np.dtype([("which", "u1"), ("unused", "V7"), ("places", place, (2,))])


class SharedTable(SlotTable):
    """Slots in a pool's file, as one owner sees them. Thread-safe; a forked child is another owner.

    Args:
        path: the file.
        shape: what it must be.
        keep, create: as for a `PoolFile`.

    Raises:
        PoolError: as `PoolFile` says, or too many owners.
    """

    def __init__(self, path: Path, shape: PoolShape, *, keep: bool, create: bool) -> None:
        self._owner: int | None = None
        self._alive: dict[int, bool] = {}
        self._shape = shape
        self._type = _slot_type(shape.max_ranks)
        self._stride = self._type.itemsize
        self._place = self._type["places"].base.itemsize
        self._mask = _mask_bytes(shape.max_ranks)
        self._closed = False
        self.dropped = ""
        self.file = PoolFile(path, shape, keep=keep, create=create, enter=self._set_up)

    def _set_up(self, file: PoolFile) -> None:
        self.file = file
        if file.opened == "reopened":
            self.dropped = file.torn()
            if self.dropped:
                self._empty()
            file.take()
        self._terms = Terms(file)
        self._enter()

    def _empty(self) -> None:
        """As if nothing was ever stored; on the disk before the file says that it is in order."""
        size = slots_size(self._shape.num_slots, self._shape.max_ranks)
        np.frombuffer(self.file.map, np.uint8, size - BODY_AT, BODY_AT)[:] = 0
        self.file.flush(size)

    @property
    def is_closed(self) -> bool:
        """Whether it was left."""
        return self._closed

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
        if self.file.has_ended():
            raise PoolError(f"the pool {self.file.path} is gone: its last process has left it")
        dead = owners_of(self.file.fd).keys() - live_owners(self.file.fd).keys()
        if dead:
            # Before their numbers go to others, what they were busy with has failed.
            self._alive.update(dict.fromkeys(dead, False))
            for slot in self._busy():
                self.get(slot)
        for number in dead:
            remove_owner(self.file.fd, number)
        self._alive.clear()
        self._owner = enter_owner(self.file.fd)
        return self._owner

    def after_fork(self) -> None:
        """In the child: it is an owner of its own, once it does something."""
        if not self._closed:
            self._owner = None
            self.file.reopen()

    def leave(self, *, blocking: bool = True) -> None:
        """Leaves the pool; whoever leaves last removes the file, or sees that its disk has it.

        Args:
            blocking: whether to wait for this process's other threads.

        Raises:
            PoolError: this owner is still busy with some slot, or another thread has the lock, and
                nothing was left; or the pool was left and its disk has not all of it.
        """
        if self._closed:
            return
        with self.file.locked(blocking=blocking):
            if self._owner is None:
                self._closed = True
                return
            if busy := self._busy_of(self._owner):
                raise PoolError(
                    f"{len(busy)} slot(s) of the pool {self.file.path} are being stored or "
                    "loaded here; close the connectors first"
                )
            is_last = not live_owners(self.file.fd).keys() - {self._owner}
            self._closed = True
            try:
                if is_last and self.file.keep:
                    self.file.settle()
            finally:
                leave_owner(self.file.fd, self._owner)
                self._owner = None
                if is_last and not self.file.keep:
                    self.file.remove()

    def unlink(self) -> None:
        """Takes the file's name away; whoever has it open goes on."""
        with self.locked():
            self.file.remove()

    def release(self) -> None:
        """After `leave`: closes the file; the memory goes when nobody looks at it any more."""
        self.file.close()

    def abandon(self) -> None:
        """Leaves it if nobody did; what is busy stays marked until the process has ended."""
        with contextlib.suppress(PoolError, OSError):
            # A collector may come at any time, inside this lock too.
            self.leave(blocking=False)
        if self._closed:
            self.release()

    # Owners and what they are busy with; only while locked.

    def _lives(self, owner: int) -> bool:
        if owner not in self._alive:
            self._alive[owner] = owner == self._owner or owner_lives(self.file.fd, owner)
        return self._alive[owner]

    def _busy(self) -> list[int]:
        """The slots that somebody is busy with, dead ones too."""
        slots = self._slots()
        busy = slots["places"]["busy"]
        return np.flatnonzero(np.where(slots["which"], busy[:, 1], busy[:, 0])).tolist()

    def _busy_of(self, owner: int) -> list[int]:
        """The slots that an owner is busy with."""
        found = []
        for slot in self._busy():
            state = self._decode(slot)
            if owner in state.reading or owner in state.writing.values():
                found.append(slot)
        return found

    # All slots at once.

    def _slots(self) -> npt.NDArray[np.void]:
        """The slots themselves, as `_slot_type` says; let go of it before the file is closed."""
        return np.frombuffer(self.file.map, self._type, self._shape.num_slots, _SLOTS_AT)

    def forget(self, slots: Sequence[int] | None) -> None:
        """`Slot.forget`; as with `put`, each slot is changed wholly or not at all."""
        all_slots = self._slots()
        chosen = np.arange(len(all_slots)) if slots is None else np.array(slots, dtype=np.int64)
        which = all_slots["which"][chosen]
        has = all_slots["places"]["has"][chosen, which]
        chosen, which = chosen[has != 0], which[has != 0]
        left = np.zeros(len(chosen), all_slots["places"].dtype)
        for field in ("busy", "stores", "users"):
            left[field] = all_slots["places"][field][chosen, which]
        left["stores"] += 1
        all_slots["places"][chosen, 1 - which] = left
        all_slots["which"][chosen] = 1 - which

    def records(self) -> list[StoredRecord]:
        """What `Slot.told` says, of all slots that nobody is busy with at once."""
        with self.locked():
            all_slots = self._slots()
            which, has = all_slots["which"], all_slots["places"]["has"]
            used = np.flatnonzero(np.where(which, has[:, 1], has[:, 0]) & _HAS_RECORD)
            places = all_slots["places"][used, which[used]]
            busy = {slot: self.get(slot) for slot in used[places["busy"] > 0].tolist()}
            fields = ("has", "terms", "key_bytes", "key", "stored")
            columns = [used.tolist(), *(places[field].tolist() for field in fields)]
            distinct = dict.fromkeys(columns[2])
            meant = {raw: self._terms.record(_TERMS.unpack(raw), None) for raw in distinct}
        needed = {raw: _mask_of(writers) for raw, (_, writers) in meant.items()}
        found = []
        for slot, flags, terms, key_bytes, key, stored in zip(*columns, strict=True):
            there = 0 if flags & _GIVEN_UP else int.from_bytes(stored, "little")
            if slot in busy:
                if told := busy[slot].told(slot):
                    plain = _plain_key(key, key_bytes) if flags & _HAS_KEY else None
                    found.append(attrs.evolve(told, key=plain))
            elif there:
                record, _ = meant[terms]
                found.append(
                    StoredRecord(
                        slot=slot,
                        key=_plain_key(key, key_bytes) if flags & _HAS_KEY else None,
                        format=record.format,
                        topology=record.topology,
                        complete=there & needed[terms] == needed[terms],
                    )
                )
        return found

    # Slots; only while locked.

    def name(self, key: Hashable) -> Hashable:
        """A key as `stored_key` makes it."""
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
        has, key_bytes, terms, busy, stores, key = _SLOT.unpack_from(self.file.map, at)
        if busy > MAX_BUSY:
            raise self.file.damaged()
        state = Slot(stores=stores, given_up=bool(has & _GIVEN_UP))
        if has & _HAS_RECORD:
            named = _key(key, key_bytes) if has & _HAS_KEY else None
            state.record, state.writers = self._terms.record(_TERMS.unpack(terms), named)
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
        has, terms, key, key_bytes = _GIVEN_UP if state.given_up else 0, (0, 0, 0, 0), b"", 0
        if record := state.record:
            has |= _HAS_RECORD
            terms = self._terms.numbers(record, state.writers)
            if isinstance(record.key, StoredKey):
                has, key = has | _HAS_KEY, record.key.raw
                key_bytes = len(key) if record.key.is_whole else 0
        return b"".join(
            (
                _SLOT.pack(has, key_bytes, _TERMS.pack(*terms), len(busy), state.stores, key),
                _mask_of(state.stored).to_bytes(self._mask, "little"),
                *busy,
            )
        )


def _mask_of(ranks: Iterable[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _plain_key(field: bytes, key_bytes: int) -> Hashable:
    return decoded(field[:key_bytes]) if key_bytes else _key(field, 0)


def _key(field: bytes, key_bytes: int) -> StoredKey:
    """A slot's key, of the field that it stands in."""
    return StoredKey(field[: key_bytes or _DIGEST_BYTES], is_whole=key_bytes > 0)
