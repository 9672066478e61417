"""Which processes have a shared pool's file open, and whether they still live (Linux).

A process id alone says little, since ids are used again: an owner is known by its id, the time at
which it started, the namespace that its id belongs to, and the boot of the machine. What an id of
another container means cannot be told here, so each owner also locks a byte of the file, the first
of its entry: the kernel lets go of it when the owner ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import uuid
from collections.abc import Callable
from pathlib import Path

import attrs

from kvpolicy.errors import PoolError
from kvpolicy.sharedheader import HEADER_BYTES

MAX_OWNERS = 256
_OWNERS_AT, _OWNER_BYTES = HEADER_BYTES, 64
OWNERS_END = _OWNERS_AT + MAX_OWNERS * _OWNER_BYTES
_PROC = Path("/proc")
_ENTRY = struct.Struct("<QQQ16s")
_PID_BYTES = 8
_ENDED = frozenset("ZXx")  # a zombie has ended, though nobody has asked for its status yet
_LOCK = struct.Struct("@hhqqi4x")  # struct flock: kind, whence, start, bytes, process
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_NO_SUCH_LOCKS = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # as in some sandboxes


@attrs.frozen
class Owner:
    """A process that has a pool open.

    Attributes:
        pid: its id.
        started: clock ticks from the boot to its start.
        namespace: the inode of the namespace in which the id means it.
        boot: 16 bytes that name the boot.
    """

    pid: int
    started: int
    namespace: int
    boot: bytes

    @classmethod
    def current(cls) -> Owner:
        """This process.

        Raises:
            PoolError: the system has no /proc.
        """
        pid = os.getpid()
        started = _started(pid)
        if started is None:
            raise PoolError("a shared pool needs Linux's /proc to tell live owners from dead ones")
        return cls(pid, started, _namespace(), _boot())

    @classmethod
    def unpack(cls, raw: bytes) -> Owner | None:
        """What `pack` gave, None for an entry that nobody has."""
        found = cls(*_ENTRY.unpack_from(raw))
        return found if found.pid else None

    def pack(self) -> bytes:
        """A fixed number of bytes; the process id comes first."""
        return _ENTRY.pack(self.pid, self.started, self.namespace, self.boot)

    def is_alive(self, is_locked: Callable[[], bool]) -> bool:
        """Whether the process still runs.

        Args:
            is_locked: whether the owner's byte is locked; asked where its id means nothing.
        """
        if self.is_here():
            return _started(self.pid) == self.started
        return is_locked()

    def is_here(self) -> bool:
        """Whether the process's id means the same here."""
        return (self.boot, self.namespace) == (_boot(), _namespace())


# Entries of a file; changed only under its lock.


def owners_of(fd: int) -> dict[int, Owner]:
    """Number -> owner, dead ones too."""
    raw = os.pread(fd, MAX_OWNERS * _OWNER_BYTES, _OWNERS_AT)
    found = {n: Owner.unpack(raw[n * _OWNER_BYTES :]) for n in range(len(raw) // _OWNER_BYTES)}
    return {number: owner for number, owner in found.items() if owner}


def live_owners(fd: int) -> dict[int, Owner]:
    """Those that still run, the one whose open file this is too."""
    return {n: owner for n, owner in owners_of(fd).items() if _lives(fd, n, owner)}


def owner_lives(fd: int, number: int) -> bool:
    """Whether the owner of that number, another than whose open file this is, still runs."""
    owner = Owner.unpack(os.pread(fd, _OWNER_BYTES, _at(number)))
    return owner is not None and _lives(fd, number, owner)


def enter_owner(fd: int) -> int:
    """Enters this process under a free number, for as long as the open file is there.

    Raises:
        PoolError: there is none.
    """
    taken = owners_of(fd)
    for number in range(MAX_OWNERS):
        # A child that kept its parent's descriptor may still have the lock of a free one.
        if number not in taken and lock_byte(fd, _at(number)):
            raw = Owner.current().pack()
            os.pwrite(fd, raw[_PID_BYTES:], _at(number) + _PID_BYTES)
            os.pwrite(fd, raw[:_PID_BYTES], _at(number))  # who dies before this was not entered
            return number
    raise PoolError(
        f"at most {MAX_OWNERS} owners have a pool open at once, and this one has as many; close it "
        "in a process that needs it no more"
    )


def remove_owner(fd: int, number: int) -> None:
    """Its number is free."""
    os.pwrite(fd, bytes(_PID_BYTES), _at(number))


def leave_owner(fd: int, number: int) -> None:
    """This process's own number is free, and its lock."""
    remove_owner(fd, number)
    free_byte(fd, _at(number))


def _at(number: int) -> int:
    return _OWNERS_AT + number * _OWNER_BYTES


def _lives(fd: int, number: int, owner: Owner) -> bool:
    return owner.is_alive(lambda: is_byte_locked(fd, _at(number)))


# Locks of open files.


def lock_byte(fd: int, at: int) -> bool:
    """Locks a byte until it is freed or the open file, which processes may share, is closed.

    Returns:
        False if another open file has it; True where there are no such locks.
    """
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, at)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        if error.errno not in _NO_SUCH_LOCKS:
            raise
    return True


def free_byte(fd: int, at: int) -> None:
    """Undoes `lock_byte`."""
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, at)
    except OSError as error:
        if error.errno not in _NO_SUCH_LOCKS:
            raise


def is_byte_locked(fd: int, at: int) -> bool:
    """Whether another open file has locked it.

    Where there are no such locks, it counts as locked: to keep a dead owner's pool costs memory, to
    take away a live one's costs an engine.
    """
    try:
        return _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, at) != fcntl.F_UNLCK
    except OSError as error:
        if error.errno not in _NO_SUCH_LOCKS:
            raise
        return True


def _lock(fd: int, command: int, kind: int, at: int) -> int:
    """The kind that the kernel answers: of the lock that is in the way, or of none."""
    answer = fcntl.fcntl(fd, command, _LOCK.pack(kind, os.SEEK_SET, at, 1, 0))
    return int(_LOCK.unpack(answer)[0])


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if it has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets, with whatever characters it has.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in _ENDED else int(fields[19])


def _namespace() -> int:
    try:
        return (_PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:  # a kernel without namespaces: there is one
        return 0


def _boot() -> bytes:
    try:
        text = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii")
        return uuid.UUID(text.strip()).bytes
    except (OSError, ValueError):  # some sandboxes hide it
        return bytes(16)
