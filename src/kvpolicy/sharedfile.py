"""The file behind a shared pool: made by one process, joined by others, removed by the last.

One lock on the file guards everything, its making and removing too. It is a lock of an open file,
so it also keeps apart two pools of one process, and the kernel releases it when its holder dies.
The file is empty until its maker holds the lock, and without its first bytes until the maker is
done: whoever gets the lock on such a file makes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from kvpolicy.errors import PoolError
from kvpolicy.owners import Owner
from kvpolicy.words import shown

VERSION = 1
PREFIX = "kvpolicy-pool-"
MAX_NONCE_BYTES = 512
MAX_OWNERS = 256
_MAGIC = b"KVPOOL\r\n"
_HEADER = struct.Struct("<8sIIQQQQI")  # the nonce's bytes follow
_OWNERS_AT, _OWNER_BYTES = 4096, 64
BODY_AT = _OWNERS_AT + MAX_OWNERS * _OWNER_BYTES


@attrs.frozen(kw_only=True)
class PoolShape:
    """What everyone who opens a pool must agree on.

    Attributes:
        num_slots, record_bytes, alignment: as of the pool.
        max_ranks: world ranks that may store, from 0.
        nonce: names the engine whose pool it is.
        size: bytes of the file.
        version: of the file's layout.
    """

    num_slots: int
    record_bytes: int
    alignment: int
    max_ranks: int
    nonce: str
    size: int
    version: int = VERSION

    def pack(self) -> bytes:
        """The header, with the first bytes that say that the file is whole."""
        nonce = self.nonce.encode()
        numbers = self.num_slots, self.record_bytes, self.alignment, self.size, len(nonce)
        return _HEADER.pack(_MAGIC, self.version, self.max_ranks, *numbers) + nonce

    @classmethod
    def unpack(cls, raw: bytes) -> PoolShape | None:
        """The shape that a header says, None if the file was never finished."""
        if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
            return None
        _, version, ranks, slots, record, alignment, size, length = _HEADER.unpack_from(raw)
        nonce = raw[_HEADER.size : _HEADER.size + min(length, MAX_NONCE_BYTES)]
        return cls(
            num_slots=slots,
            record_bytes=record,
            alignment=alignment,
            max_ranks=ranks,
            nonce=nonce.decode(errors="replace"),
            size=size,
            version=version,
        )

    def differences(self, wanted: PoolShape) -> list[str]:
        """What differs from what a joining process wants, each in words."""
        names = ["version"]  # of another version nothing else can be told
        if self.version == wanted.version:
            names += ["num_slots", "record_bytes", "alignment", "max_ranks", "nonce"]
        return [
            f"{name} (the pool's {shown(mine)}, this process's {shown(theirs)})"
            for name in names
            if (mine := getattr(self, name)) != (theirs := getattr(wanted, name))
        ]


class PoolFile:
    """An open pool file, mapped whole.

    Args:
        path: where it lies.
        shape: what it must be.
        create: whether to make it where it is not there.
        enter: called while the lock is held and the file is mapped, before anyone can remove it.

    Raises:
        PoolError: another pool, no room for it, none to be joined, or a file that is not ours.
    """

    def __init__(
        self, path: Path, shape: PoolShape, *, create: bool, enter: Callable[[PoolFile], None]
    ) -> None:
        self.path, self.shape = path, shape
        self._thread_lock = threading.Lock()
        try:
            self._fd = self._open(create)
        except OSError as error:
            raise PoolError(f"cannot open the pool {path}: {error.strerror}") from None
        try:
            # Of an open file of its own: a mapping keeps its file open, and with it would keep the
            # lock of a parent that dies for as long as a forked child lives.
            other = _again(self._fd)
            try:
                self.map = mmap.mmap(other, shape.size)
            except OSError as error:
                raise PoolError(f"cannot map the pool {path}: {error.strerror}") from None
            finally:
                os.close(other)
            enter(self)
        except BaseException:
            if not has_live_owner(self._fd):
                self.remove()
            os.close(self._fd)
            raise
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _open(self, create: bool) -> int:
        """A descriptor of a whole file that nobody has removed, with the lock held."""
        while True:
            fd = _opened(self.path, create)
            kept = False
            try:
                if fd is None:
                    raise PoolError(f"there is no pool {self.path} to join; its engine has ended")
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not _is_at(fd, self.path):
                    continue  # removed while we waited
                found = PoolShape.unpack(os.pread(fd, _OWNERS_AT, 0))
                if found is None or (found.version == VERSION and not has_live_owner(fd)):
                    # Never finished, or nobody is left. Whoever may still look at that file is to
                    # keep it, so ours is another one.
                    if os.fstat(fd).st_size or not create:
                        self.path.unlink()
                        continue
                    self._make(fd)
                elif differences := found.differences(self.shape):
                    raise PoolError(
                        f"the pool {self.path} is another one; it differs in "
                        f"{', '.join(differences)}; give each engine's pool a name of its own"
                    )
                elif os.fstat(fd).st_size != self.shape.size:
                    raise PoolError(f"the pool {self.path} was cut short; remove it")
                kept = True
                return fd
            finally:
                if fd is not None and not kept:
                    os.close(fd)

    def _make(self, fd: int) -> None:
        """Takes the room, so that none of it is missing when it is written, then the header."""
        sweep(self.path.parent)
        size = self.shape.size
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            self.path.unlink()
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
                raise
            free = os.statvfs(self.path.parent)
            raise PoolError(
                f"{self.path.parent} has no room for a pool of {size / 2**30:,.2f} GiB "
                f"({free.f_bavail * free.f_frsize / 2**30:,.2f} GiB free); lower the number of "
                "slots, or give that file system more"
            ) from None
        header = self.shape.pack()
        os.pwrite(fd, header[len(_MAGIC) :], len(_MAGIC))
        os.pwrite(fd, _MAGIC, 0)

    @contextlib.contextmanager
    def locked(self, *, blocking: bool = True) -> Iterator[None]:
        """Keeps out other threads and processes.

        Raises:
            PoolError: not to block, and another thread has the lock.
        """
        lock = self._thread_lock
        if not lock.acquire(blocking=blocking):
            raise PoolError(f"the pool {self.path} is in use by another thread")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            lock.release()

    def reopen(self) -> None:
        """In a forked child: another open file, since the parent's lock would be shared."""
        self._thread_lock = threading.Lock()
        parents, self._fd = self._fd, _again(self._fd)
        os.close(parents)

    def close(self) -> None:
        """Closes the descriptor, once; the mapping goes when nobody looks at it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(BufferError):
            self.map.close()

    # Only while locked.

    def is_removed(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0

    def remove(self) -> None:
        """Takes the name away, where it is still this file's."""
        if _is_at(self._fd, self.path):
            self.path.unlink()

    def owners(self) -> dict[int, Owner]:
        """Number -> owner, dead ones too."""
        return _owners(self._fd)

    def owner(self, number: int) -> Owner | None:
        """The owner of that number."""
        at = _OWNERS_AT + number * _OWNER_BYTES
        return Owner.unpack(self.map[at : at + _OWNER_BYTES])

    def set_owner(self, number: int, owner: Owner | None) -> None:
        """Enters an owner, or takes it out; one that dies meanwhile was not entered."""
        at = _OWNERS_AT + number * _OWNER_BYTES
        self.map[at : at + 8] = bytes(8)
        if owner:
            raw = owner.pack()
            self.map[at + 8 : at + len(raw)] = raw[8:]
            self.map[at : at + 8] = raw[:8]


def _opened(path: Path, create: bool) -> int | None:
    """A descriptor of a regular file of this user's, None if there is none."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        if create:
            raise
        return None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise PoolError(f"{path} is no pool of this user's; choose another name")
    return fd


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is the one of that name."""
    mine = os.fstat(fd)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _again(fd: int) -> int:
    """Another open file of the same, which may have no name any more."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _owners(fd: int) -> dict[int, Owner]:
    raw = os.pread(fd, MAX_OWNERS * _OWNER_BYTES, _OWNERS_AT)
    found = {n: Owner.unpack(raw[n * _OWNER_BYTES :]) for n in range(len(raw) // _OWNER_BYTES)}
    return {number: owner for number, owner in found.items() if owner}


def has_live_owner(fd: int) -> bool:
    """Whether some process that still runs has the pool open."""
    return any(owner.is_alive() for owner in _owners(fd).values())


def sweep(directory: Path) -> list[str]:
    """Removes the pools of that directory whose owners are all dead; returns their names.

    Those in use, of other users and of versions that this one cannot read are left.
    """
    swept = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            fd = _opened(path, create=False)
        except (OSError, PoolError):
            continue
        if fd is None:
            continue
        try:
            # Who holds the lock lives, and a file being made is locked until it has an owner.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = PoolShape.unpack(os.pread(fd, _OWNERS_AT, 0))
            if found and (found.version != VERSION or has_live_owner(fd)):
                continue
            if _is_at(fd, path):
                path.unlink()
                swept.append(path.name.removeprefix(PREFIX))
        except OSError:
            continue
        finally:
            os.close(fd)
    return swept
