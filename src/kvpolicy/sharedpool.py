"""SharedHostPool: host rows that the ranks of one node share, each in a process of its own.

The rows and what is known of each slot lie in one mapped file. Copies do not lock anything: the
lock is held while slots are marked, before a job and after it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
import numpy as np
import torch

from kvpolicy.errors import ClosedError, OptionError, PoolError
from kvpolicy.grid import MAX_RANKS
from kvpolicy.hostpool import MAX_POOL_BYTES, HostPool, check_sizes
from kvpolicy.sharedfile import PREFIX, Opened, sweep
from kvpolicy.sharedheader import (
    HEADER_BYTES,
    MAX_NONCE_BYTES,
    VERSION,
    Contents,
    PoolShape,
    checked_contents,
)
from kvpolicy.sharedslots import SharedTable, slots_size
from kvpolicy.slots import Ledger
from kvpolicy.words import shown

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _path(directory: str, name: str, *, keep: bool) -> Path:
    return Path(directory) / (name if keep else f"{PREFIX}{name}")


def _as_dict(contents: Contents) -> Contents:
    """A copy that can be pickled."""
    return dict(contents)


@attrs.frozen(kw_only=True)
class PoolAddress:
    """What another process of the node needs in order to open a pool; can be pickled.

    Attributes:
        name, num_slots, record_bytes, nonce, directory, alignment, max_ranks, keep, contents: as
            `SharedHostPool` takes them.
    """

    name: str
    num_slots: int
    record_bytes: int
    nonce: str | None
    directory: str
    alignment: int
    max_ranks: int
    keep: bool = False
    contents: Contents = attrs.field(factory=dict, converter=_as_dict, hash=False)

    @classmethod
    def find(
        cls, name: str, *, directory: str | os.PathLike[str] = "/dev/shm", keep: bool = False
    ) -> PoolAddress:
        """The address of a pool that some process has made, as its file says it.

        Args:
            name: the pool's.
            directory: where it lies.
            keep: whether it is a kept one.

        Raises:
            PoolError: there is none.
        """
        path = _path(os.fsdecode(directory), name, keep=keep)
        try:
            with path.open("rb") as file:
                shape = PoolShape.unpack(file.read(HEADER_BYTES))
        except OSError as error:
            raise PoolError(f"there is no pool {path}: {error.strerror}") from None
        if shape is None or shape.version != VERSION:
            raise PoolError(f"{path} is no pool that this version can read")
        return cls(
            name=name,
            num_slots=shape.num_slots,
            record_bytes=shape.record_bytes,
            nonce=shape.nonce or None,
            directory=os.fsdecode(directory),
            alignment=shape.alignment,
            max_ranks=shape.max_ranks,
            keep=keep,
            contents=shape.contents,
        )

    def open(self) -> SharedHostPool:
        """Joins the pool; never makes it, nor takes it over.

        Raises:
            PoolError: it is gone, nobody has it open, or it is another one.
        """
        return _join(self)


class SharedHostPool(HostPool):
    """Rows of host memory that several processes of one machine share; row s is slot s.

    The first process makes the pool, the others join it; the last one that closes it removes it,
    unless it is kept. Connectors use it as they do a `HostPool`, and its rules are the same across
    processes.

    A kept pool serves one engine at a time, and when nobody has it open, the next engine takes it
    over with the records that it holds, also with another nonce and another topology.

    Args:
        name: the pool's, in the directory; letters, digits, ".", "_" and "-".
        num_slots: rows.
        record_bytes: bytes that a row can hold.
        nonce: what every process of the engine knows and no other engine does, such as the
            engine's instance id; at most 512 B. It must be that of the process that made the pool.
        directory: where the file lies, on memory (or on a disk).
        alignment: rows begin at multiples of this many bytes, a power of two, at most a page.
        max_ranks: world ranks that may store, from 0; at most 4,096.
        keep: whether the pool stays when the last process leaves it. Its file is then the name in
            the directory, which is to be of this machine; it needs a nonce.
        contents: what the records' keys mean to the engine (its model, revision, hashes, ...): a
            mapping of names to a str, an int, a bool or None each, at most 3,000 B as JSON. All
            who open the pool must give the same.

    Attributes:
        opened: "made", "joined", or "reopened" if it was kept and this process has taken it over.
        dropped: why the records of a reopened pool do not count, "" if they do.

    Raises:
        OptionError: arguments that cannot be.
        PoolError: a pool of that name with other sizes, contents or another nonce; a kept one that
            another engine has open; no room in the directory; a file that is not this user's, or
            for a kept pool a file that is none.

    Thread-safe. A forked child may go on with the pool, as an owner of its own and with connectors
    of its own; a pool is pickled as its `address`. When a process dies, what it was storing counts
    as failed and what it was loading as ended.
    """

    def __init__(
        self,
        name: str,
        num_slots: int,
        record_bytes: int,
        *,
        nonce: str | None = None,
        directory: str | os.PathLike[str] = "/dev/shm",
        alignment: int = 64,
        max_ranks: int = 256,
        keep: bool = False,
        contents: Contents | None = None,
    ) -> None:
        sizes = {"num_slots": num_slots, "record_bytes": record_bytes, "alignment": alignment}
        check_sizes("SharedHostPool", {**sizes, "max_ranks": max_ranks})
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionError(
                "a pool's name is up to 128 letters, digits, dots, underscores and hyphens, the "
                f"first a letter or digit; not {shown(name)}"
            )
        printable = isinstance(nonce, str) and nonce != "" and nonce.isprintable()
        if nonce is not None and not (printable and len(nonce.encode()) <= MAX_NONCE_BYTES):
            raise OptionError(
                f"a nonce is 1 to {MAX_NONCE_BYTES} B of printable text, not {shown(nonce)}"
            )
        if not isinstance(keep, bool):
            raise OptionError(f"SharedHostPool keep is True or False, not {shown(keep)}")
        if keep and nonce is None:
            raise OptionError(
                "a kept pool needs a nonce, which tells the ranks of one engine from another engine"
            )
        if keep and name.startswith(PREFIX):
            raise OptionError(
                f"a kept pool's name does not begin with {PREFIX}, as those of others do: they are "
                "swept"
            )
        if alignment > mmap.PAGESIZE:
            raise OptionError(
                f"SharedHostPool alignment is at most a page, {mmap.PAGESIZE} B, not {alignment}"
            )
        if max_ranks > MAX_RANKS:
            raise OptionError(
                f"SharedHostPool max_ranks is at most {MAX_RANKS:,}, not {max_ranks:,}"
            )
        self._open(
            PoolAddress(
                name=name,
                nonce=nonce,
                directory=os.fsdecode(directory),
                max_ranks=max_ranks,
                keep=keep,
                contents=checked_contents(contents),
                **sizes,
            ),
            create=True,
        )

    def _open(self, address: PoolAddress, *, create: bool) -> None:
        super().__init__(address.num_slots, alignment=address.alignment)
        self.record_bytes = address.record_bytes
        self._address = address
        before = slots_size(address.num_slots, address.max_ranks)
        at = -(-before // mmap.PAGESIZE) * mmap.PAGESIZE
        total = address.num_slots * self.row_stride
        if total > MAX_POOL_BYTES:
            raise PoolError(
                f"a pool has at most {MAX_POOL_BYTES:,} B of rows, not {total:,}; lower the number "
                "of slots"
            )
        shape = PoolShape(
            num_slots=address.num_slots,
            record_bytes=address.record_bytes,
            alignment=address.alignment,
            max_ranks=address.max_ranks,
            nonce=address.nonce or "",
            contents=address.contents,
            size=at + total,
        )
        self._table = SharedTable(self.path, shape, keep=address.keep, create=create)
        self.opened: Opened = self._table.file.opened
        self.dropped = self._table.dropped
        self._ledger = Ledger(self._table)
        mapped = self._table.file.map
        # What the system refuses to do with shared memory, it does with small pages.
        with contextlib.suppress(OSError, AttributeError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        rows = np.frombuffer(mapped, np.uint8, total, at)
        self._rows = torch.from_numpy(rows.reshape(address.num_slots, self.row_stride))
        self._finalizer = weakref.finalize(self, self._table.abandon)
        _watch_forks(self._table)

    def __repr__(self) -> str:
        """Name and sizes, for people."""
        return (
            f"SharedHostPool({self._address.name!r}, num_slots={self.num_slots}, "
            f"record_bytes={self.record_bytes})"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled by name: whoever loads it joins the pool."""
        return _join, (self._address,)

    @property
    def path(self) -> Path:
        """The file."""
        address = self._address
        return _path(address.directory, address.name, keep=address.keep)

    @property
    def rows(self) -> torch.Tensor:
        """The memory, uint8 of shape (num_slots, row_stride).

        Raises:
            ClosedError: the pool is closed here.
        """
        if self._rows is None:
            raise ClosedError(f"the pool {self.path} is closed here; open it again")
        return self._rows

    def address(self) -> PoolAddress:
        """What another process of this machine opens the pool by."""
        return self._address

    def unlink(self) -> None:
        """Takes the file's name away, when everybody who is to join has joined.

        Nobody else joins after that, forked children neither, and the memory goes with the last
        process, however it ends. Again does no harm.

        Raises:
            PoolError: a kept pool, which the next engine finds by its name.
        """
        if self._address.keep:
            raise PoolError(f"the pool {self.path} is kept, so it keeps its name")
        self._table.unlink()

    def close(self) -> None:
        """Leaves the pool; the last one removes it. Again does no harm.

        The last one to leave a kept pool waits until the disk has all of it. Close the connectors
        first. Memory that is still looked at goes when nobody does any more.

        Raises:
            PoolError: this process is still storing or loading, and the pool stays open; or the
                disk refuses what a kept pool holds, and it was closed.
        """
        self.collect()
        try:
            self._table.leave()
        finally:
            if self._table.is_closed:
                self._rows = None  # before the mapping goes
                self._table.release()
                self._finalizer.detach()

    def __enter__(self) -> Self:
        """The pool itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    @staticmethod
    def sweep(directory: str | os.PathLike[str] = "/dev/shm") -> list[str]:
        """Removes pools whose processes have all died without closing them.

        The process that makes a pool does so too. Pools in use and those of other users are left;
        one that is to be kept is never removed.

        Args:
            directory: where the pools lie.

        Returns:
            The names of the pools that were removed.
        """
        return sweep(Path(os.fsdecode(directory)))


def _join(address: PoolAddress) -> SharedHostPool:
    pool = SharedHostPool.__new__(SharedHostPool)
    pool._open(address, create=False)
    return pool


_tables: weakref.WeakSet[SharedTable] = weakref.WeakSet()
_watching = False


def _watch_forks(table: SharedTable) -> None:
    """From the first pool on, forked children are told that they are owners of their own."""
    global _watching
    _tables.add(table)
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for table in list(_tables):
        table.after_fork()
