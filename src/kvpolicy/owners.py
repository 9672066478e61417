"""Which processes have a shared pool open, and whether they still live (Linux: from /proc).

A process id alone says little, since ids are used again: an owner is known by its id, the time at
which it started, the namespace that its id belongs to, and the boot of the machine.
"""

from __future__ import annotations

import os
import struct
import uuid
from pathlib import Path

import attrs

from kvpolicy.errors import PoolError

_PROC = Path("/proc")
_ENTRY = struct.Struct("<QQQ16s")
_ENDED = frozenset("ZXx")  # a zombie has ended, though nobody has asked for its status yet


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

    def is_alive(self) -> bool:
        """Whether the process still runs.

        An owner in another container, whose id means nothing here, counts as alive: to keep a
        dead pool costs memory, to take away a live one costs an engine.
        """
        if self.boot != _boot():
            return False
        return self.namespace != _namespace() or _started(self.pid) == self.started


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
