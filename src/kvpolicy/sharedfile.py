"""The file behind a shared pool: made by one process and joined by others.

The last one removes it, unless it is kept: then it stays, and the next engine takes it over.

One lock on the file guards everything, its making and removing too. It is a lock of an open file,
so it also keeps apart two pools of one process, and the kernel releases it when its holder dies.
The file is empty until its maker holds the lock, and says that it is being made until that is
done: whoever gets the lock on such a file makes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from kvpolicy import sharedheader as header
from kvpolicy.errors import PoolError
from kvpolicy.owners import OWNERS_END, Owner, live_owners
from kvpolicy.sharedheader import HEADER_BYTES, MAGIC, MAKING, VERSION, PoolShape

PREFIX = "kvpolicy-pool-"
_PRIVATE = 0o600
BODY_AT = OWNERS_END
Opened = Literal["made", "joined", "reopened"]


class PoolFile:
    """An open pool file, mapped whole.

    Args:
        path: where it lies.
        shape: what it must be.
        keep: whether it outlives those who have it open.
        create: whether to make it where it is not there, or take it over where nobody has it.
        enter: called while the lock is held and the file is mapped, before anyone can remove it.

    Raises:
        PoolError: another pool, no room for it, none to be joined, or a file that is not ours.

    Attributes:
        opened: how.
        fd: of an open file that is this owner's alone, though threads share it.
    """

    def __init__(
        self,
        path: Path,
        shape: PoolShape,
        *,
        keep: bool,
        create: bool,
        enter: Callable[[PoolFile], None],
    ) -> None:
        self.path, self.shape, self.keep = path, shape, keep
        self._thread_lock = threading.Lock()
        self._boot = Owner.current().boot
        try:
            self.fd, self.opened = self._open(create)
        except OSError as error:
            what = str(error.strerror)
            if error.errno == errno.ENOENT and not path.parent.exists():
                what += f"; make the folder {path.parent} first"
            elif error.errno == errno.ELOOP:
                what = "it is a symbolic link; name the file that it stands for"
            raise PoolError(f"cannot open the pool {path}: {what}") from None
        try:
            # Of an open file of its own: a mapping keeps its file open, and with it would keep the
            # lock of a parent that dies for as long as a forked child lives.
            other = _again(self.fd)
            try:
                self.map = mmap.mmap(other, shape.size)
            except OSError as error:
                raise PoolError(f"cannot map the pool {path}: {error.strerror}") from None
            finally:
                os.close(other)
            try:
                enter(self)
            except OSError as error:
                raise PoolError(f"cannot open the pool {path}: {error.strerror}") from None
        except BaseException:
            if (not keep or self.opened == "made") and not live_owners(self.fd):
                self.remove()
            os.close(self.fd)
            raise
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def _open(self, create: bool) -> tuple[int, Opened]:
        """A descriptor of a whole file that nobody has removed, with the lock held, and how."""
        while True:
            fd = _opened(self.path, create)
            kept = False
            try:
                if fd is None:
                    raise PoolError(f"there is no pool {self.path} to join; its engine has ended")
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not _is_at(fd, self.path):
                    continue  # removed while we waited
                settle = self._settle_kept if self.keep else self._settle
                opened = settle(fd, create)
                if opened is None:
                    continue
                found = os.fstat(fd).st_size
                if opened != "made" and found != self.shape.size:
                    raise PoolError(
                        f"the pool {self.path} has {found:,} B and not the {self.shape.size:,} B "
                        "with which it was made; remove it"
                    )
                kept = True
                return fd, opened
            finally:
                if fd is not None and not kept:
                    os.close(fd)

    def _settle(self, fd: int, create: bool) -> Opened | None:
        """Makes or joins the file; None: it was removed, look again."""
        found = PoolShape.unpack(os.pread(fd, HEADER_BYTES, 0))
        if found is None or (found.version == VERSION and not live_owners(fd)):
            # Never finished, or nobody is left. Whoever may still look at that file is to keep
            # it, so ours is another one.
            if os.fstat(fd).st_size or not create:
                self.path.unlink()
                return None
            self._make(fd)
            return "made"
        self._check(found, "give each engine's pool a name of its own", nonce=True)
        return "joined"

    def _settle_kept(self, fd: int, create: bool) -> Opened:
        """Makes, joins or takes over the file, which is left as it is when it is refused."""
        page = os.pread(fd, HEADER_BYTES, 0)
        found = PoolShape.unpack(page)
        if found is None and page and not page.startswith(MAKING):
            raise PoolError(
                f"{self.path} is no pool, and is left as it is; choose another name, or remove it"
            )
        what_to_do = "give this engine another file, or remove that one"
        if found and found.version != VERSION:
            self._check(found, what_to_do, nonce=False)
        owner = next(iter(live_owners(fd).values()), None) if found else None
        if not owner and not create:
            raise PoolError(
                f"nobody has the pool {self.path} open any more, so there is none to join; "
                "a SharedHostPool with keep=True takes it over"
            )
        if found is None:
            os.ftruncate(fd, 0)  # nobody has mapped what was never finished
            self._make(fd)
            return "made"
        if owner and found.nonce != self.shape.nonce:
            where = "" if owner.is_here() else " of another container"
            raise PoolError(
                f"the pool {self.path} is in use by another engine (process {owner.pid}{where}), "
                "and serves one at a time; give this engine another file, or wait until that one "
                "has ended"
            )
        self._check(found, what_to_do, nonce=False)
        return "joined" if owner else "reopened"

    def _check(self, found: PoolShape, what_to_do: str, *, nonce: bool) -> None:
        if differences := found.differences(self.shape, nonce=nonce):
            raise PoolError(
                f"the pool {self.path} is another one; it differs in {', '.join(differences)}; "
                f"{what_to_do}"
            )

    def _make(self, fd: int) -> None:
        """Takes the room, so that none of it is missing when it is written, then the header."""
        sweep(self.path.parent)
        size = self.shape.size
        os.pwrite(fd, MAKING, 0)
        self._settle_on_disk(fd)
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
        os.pwrite(fd, self.shape.pack(self._mark(fd)), 0)
        self._settle_on_disk(fd)
        os.pwrite(fd, MAGIC, 0)

    def _settle_on_disk(self, fd: int) -> None:
        """What comes later does not reach the disk before what came until now."""
        if self.keep:
            os.fsync(fd)

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
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            lock.release()

    def reopen(self) -> None:
        """In a forked child: another open file, since the parent's locks would be shared."""
        self._thread_lock = threading.Lock()
        parents, self.fd = self.fd, _again(self.fd)
        os.close(parents)

    def close(self) -> None:
        """Closes the descriptor, once; the mapping goes when nobody looks at it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            self.map.close()

    # Only while locked.

    def has_ended(self) -> bool:
        """Whether the last one has left it, or another engine has it by now."""
        if self.keep:
            closed = header.open_mark(self.map) is None
            return closed or header.nonce_of(self.map) != self.shape.nonce
        return os.fstat(self.fd).st_nlink == 0

    def remove(self) -> None:
        """Takes the name away, where it is still this file's."""
        if _is_at(self.fd, self.path):
            self.path.unlink()

    def _mark(self, fd: int) -> bytes:
        """Names this boot and this file, of which a copy is another; zeros: the boot is unknown."""
        found = os.fstat(fd)
        text = f"{self._boot.hex()} {found.st_dev} {found.st_ino}"
        mark = hashlib.sha256(text.encode()).digest()[: len(self._boot)]
        return mark if any(self._boot) else self._boot

    def damaged(self) -> PoolError:
        """The error for an index that says what cannot be."""
        return PoolError(
            f"the index of the pool {self.path} is damaged, as by a bit that flipped on its disk; "
            "remove it"
        )

    def torn(self) -> str:
        """Why what it holds may be half written, "" if it is not."""
        found, mark = header.open_mark(self.map), self._mark(self.fd)
        if found is None or (found == mark and any(mark)):
            return ""
        if any(found) and any(mark):
            return (
                "the machine was restarted, or this copy of it was made, while the pool was open, "
                "and what was written last may be missing here"
            )
        return "it was not closed, and the system does not say whether it was restarted since"

    def take(self) -> None:
        """It is this engine's from now on, and open; on the disk before anything else changes."""
        header.take(self.map, self.shape.nonce, self._mark(self.fd))
        self.flush(BODY_AT)

    def settle(self) -> None:
        """All of it is on the disk, which then says so.

        Raises:
            PoolError: the disk refuses it.
        """
        self.flush()
        header.close(self.map)
        self.flush(BODY_AT)

    def flush(self, size: int = 0) -> None:
        """Writes the first bytes (0: all of them) to the disk.

        Raises:
            PoolError: the disk refuses it.
        """
        try:
            self.map.flush(0, size or len(self.map))
        except OSError as error:
            raise PoolError(
                f"the pool {self.path} cannot be written to its disk ({error.strerror}); what it "
                "holds counts until the machine restarts"
            ) from None


def _opened(path: Path, create: bool) -> int | None:
    """A descriptor of a regular file of this user's, None if there is none."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | (os.O_CREAT if create else 0), _PRIVATE)
    except FileNotFoundError:
        if create:
            raise
        return None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise PoolError(f"{path} is no pool of this user's; choose another name")
    if stat.S_IMODE(found.st_mode) & ~_PRIVATE:
        os.fchmod(fd, _PRIVATE)  # it was there before, or is a copy: prompts are nobody else's
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
            found = PoolShape.unpack(os.pread(fd, HEADER_BYTES, 0))
            if found and (found.version != VERSION or live_owners(fd)):
                continue
            if _is_at(fd, path):
                path.unlink()
                swept.append(path.name.removeprefix(PREFIX))
        except OSError:
            continue
        finally:
            os.close(fd)
    return swept
