"""HostPool: host rows that hold records, and what each row is known to hold.

One pool may be shared by the connectors of several ranks (each an object with its own tensors) of
one process; `kvpolicy.sharedpool` has the pool that several processes share.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from kvpolicy.errors import BlockIdError, OptionError, PoolError
from kvpolicy.hostmemory import allocate, page_bytes
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology
from kvpolicy.slots import Keys, Ledger, LocalTable, RanksOf, StoredRecord
from kvpolicy.values import is_whole
from kvpolicy.words import shown

MAX_POOL_BYTES = 2**44
Collect = Callable[[], None]


class HostPool:
    """Rows of host memory; row s is slot s.

    Args:
        num_slots: rows.
        record_bytes: bytes that a row can hold; None: the first connector that joins decides.
        alignment: rows begin at multiples of this many bytes, a power of two.

    Raises:
        OptionError: sizes that cannot be.
        PoolError: not enough memory.

    Thread-safe. Memory is zeroed, in huge pages where the system gives them, and taken as it is
    touched.
    """

    def __init__(
        self, num_slots: int, record_bytes: int | None = None, *, alignment: int = 64
    ) -> None:
        sizes = {"num_slots": num_slots, "alignment": alignment}
        if record_bytes is not None:
            sizes["record_bytes"] = record_bytes
        check_sizes("HostPool", sizes)
        self.num_slots = num_slots
        self.alignment = alignment
        self.record_bytes = 0
        self._rows: torch.Tensor | None = None
        self._ledger = Ledger(LocalTable())
        self._lock = threading.Lock()
        self._members: list[Collect] = []
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

    @property
    def page_bytes(self) -> int | None:
        """The page size of the memory that was touched; None where the system does not tell."""
        rows = self.rows
        return page_bytes(rows.data_ptr(), rows.numel())

    def _allocate(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        total = self.num_slots * self.row_stride
        try:
            if total > MAX_POOL_BYTES:
                raise MemoryError
            memory = allocate(total, self.alignment)
        except MemoryError:
            self.record_bytes = 0
            raise PoolError(
                f"no memory for {self.num_slots:,} slots of {record_bytes:,} B "
                f"({total / 2**30:,.1f} GiB); lower the number of slots"
            ) from None
        self._rows = torch.from_numpy(memory.reshape(self.num_slots, self.row_stride))

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
            self._members.append(collect)

    def leave(self, collect: Collect) -> None:
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
        return self._ledger.holds(slot)

    def is_busy(self, slots: Iterable[int]) -> bool:
        """Whether some slot is being written or read."""
        return self._ledger.is_busy(slots)

    def records(self) -> list[StoredRecord]:
        """What the slots hold, in order; those of which a load would find nothing are left out.

        It is what they held at one moment; a load says for itself whether it still is so.
        """
        return self._ledger.records()

    def forget(self, slots: Iterable[int] | None = None) -> None:
        """What these slots hold no longer counts: a load finds that they hold nothing.

        Nobody is disturbed: a load under way ends as it would have, and a slot that is being
        written stays closed to others until that store ends, but holds nothing then either.

        Args:
            slots: the rows; None: all.

        Raises:
            BlockIdError: a slot that the pool does not have.
        """
        self._ledger.forget(None if slots is None else _checked_slots(slots, self.num_slots))

    def begin_store(
        self,
        slots: Iterable[int],
        fmt: GroupFormat,
        topology: Topology,
        rank: int,
        writers: RanksOf,
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
        return self._ledger.begin_store(slots, fmt, topology, rank, writers, keys, element)

    def end_store(self, slots: Iterable[int], rank: int, failed: frozenset[int]) -> None:
        """Undoes the mark; slots that did not fail now hold the rank's part.

        A record without a key whose store failed is given up: nobody could tell a rank that
        tries again from one that stores something new.
        """
        self._ledger.end_store(slots, rank, failed)

    def begin_load(
        self,
        slots: Iterable[int],
        fmt: GroupFormat,
        topology: Topology,
        sources: RanksOf,
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
        return self._ledger.begin_load(slots, fmt, topology, sources, keys, element)


def _checked_slots(slots: Iterable[int], num_slots: int) -> list[int]:
    try:
        given = list(slots)
        if any(isinstance(slot, bool) for slot in given):
            raise TypeError("True and False are not numbers")
        found = [operator.index(slot) for slot in given]
    except TypeError as error:
        raise BlockIdError(f"slots are a sequence of integers: {error}") from None
    for slot in found:
        if not 0 <= slot < num_slots:
            raise BlockIdError(f"slot {slot} is out of range; possible: 0 to {num_slots - 1}")
    return found


def check_sizes(kind: str, sizes: Mapping[str, object]) -> None:
    """Refuses sizes that cannot be.

    Raises:
        OptionError: not whole numbers >= 1, or an alignment that is no power of two.
    """
    for name, value in sizes.items():
        if not is_whole(value) or value < 1:
            raise OptionError(f"{kind} {name} is a whole number >= 1, not {shown(value)}")
    alignment = sizes["alignment"]
    if isinstance(alignment, int) and alignment & (alignment - 1):
        raise OptionError(f"{kind} alignment is a power of two, not {alignment}")


def as_pool(host: HostPool | int) -> HostPool:
    """The connector's ``host`` argument: a pool, or a number of slots.

    Raises:
        OptionError: something else.
    """
    if isinstance(host, HostPool):
        return host
    if not is_whole(host):
        raise OptionError(f"host is a HostPool, a number of slots or None, not {shown(host)}")
    return HostPool(host)
