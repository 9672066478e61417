"""Page-locked rows: huge pages, touched by several threads, registered in chunks, once.

torch's own pinned memory is not used: it rounds to powers of two, and takes the memory anew where
a pool has its own.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import kvpolicy
from kvpolicy_cuda.driver import Driver
from kvpolicy_cuda.errors import CudaError

CHUNK_BYTES = 2**30
MAX_THREADS = 16
_HUGE_PAGE = 2**21
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14 and newer
_GONE = ("CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_CONTEXT_IS_DESTROYED")

_log = logging.getLogger(__name__)


class PinnedRows:
    """Rows that stay page-locked until `close`, or until nobody has this object any more.

    Made by `pin`. Jobs under way keep it alive.
    """

    def __init__(self, rows: torch.Tensor, driver: Driver, ordinal: int, chunks: list[int]) -> None:
        self.rows = rows
        self._users = 0
        self._lock = threading.Lock()
        # The finalizer keeps the rows: they are freed after they are unregistered.
        self._undo = weakref.finalize(self, _unregister, driver, ordinal, chunks, rows)
        self._undo.atexit = False  # the driver may be gone by then, and the memory goes anyway

    @property
    def closed(self) -> bool:
        """Whether the rows are ordinary memory again."""
        return not self._undo.alive

    def close(self) -> None:
        """Unregisters the rows, once; again does nothing.

        Raises:
            PoolError: a job uses them.
        """
        with self._lock:
            if self._users:
                raise kvpolicy.PoolError(
                    f"{self._users} jobs copy to or from these rows; wait for them, then close"
                )
            self._undo()

    def _take(self) -> bool:
        with self._lock:
            if self.closed:
                return False
            self._users += 1
            return True

    def _give_back(self) -> None:
        with self._lock:
            self._users -= 1


class Borrowed:
    """A job's use of pinned rows, or of rows that are not ours to keep pinned."""

    def __init__(self, rows: PinnedRows | None) -> None:
        self._rows = rows

    def give_back(self) -> None:
        """Ends it; again does nothing."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows._give_back()


_pinned: weakref.WeakValueDictionary[int, PinnedRows] = weakref.WeakValueDictionary()


def borrow(rows: torch.Tensor) -> Borrowed:
    """Keeps rows that `pin` has pinned as they are, until they are given back."""
    found = _pinned.get(rows.data_ptr())
    return Borrowed(found if found is not None and found._take() else None)


def pin(
    rows: torch.Tensor,
    *,
    device: int | None = None,
    driver: Driver | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> PinnedRows:
    """Page-locks a pool's rows where they are, for every CUDA device.

    Do it before the pool is used: untouched memory is first taken, as huge pages where the system
    has them, by several threads.

    Args:
        rows: uint8 of shape (num_slots, row_stride), rows next to each other; of a `HostPool` or
            a `SharedHostPool` (each process pins its own mapping).
        device: the ordinal of a CUDA device that this process uses; by default torch's current
            one.
        driver: the driver; by default the installed one.
        chunk_bytes: registered at a time, about.

    Returns:
        The pinned rows; those that were pinned before, if they still are.

    Raises:
        CudaError: the driver refuses; nothing stays registered.
        OptionError: memory that is not such rows.
    """
    if not isinstance(rows, torch.Tensor):
        raise kvpolicy.OptionError(f"rows to pin are a tensor, not {type(rows).__name__}")
    fits = rows.device.type == "cpu" and rows.dim() == 2 and rows.is_contiguous()
    if not (fits and rows.dtype == torch.uint8 and rows.numel()):
        raise kvpolicy.OptionError(
            "rows to pin are contiguous CPU memory of two dimensions, uint8 and not empty; found "
            f"{rows.dtype} of shape {tuple(rows.shape)} with strides {rows.stride()} on "
            f"{rows.device}"
        )
    start, total = rows.data_ptr(), rows.numel() * rows.element_size()
    known = _pinned.get(start)
    if known is not None and not known.closed and known.rows.shape == rows.shape:
        return known
    driver = driver or Driver.load()
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    done: list[int] = []
    with driver.entered(device):
        # What cannot be pinned at all, as a file on a disk, is not taken whole first.
        driver.register(start, min(total, mmap.PAGESIZE))
        driver.unregister(start)
        prefault(start, total)
        try:
            for address, size in chunks_of(start, len(rows), rows.stride(0), chunk_bytes):
                driver.register(address, size)
                done.append(address)
        except BaseException:
            for address in reversed(done):
                driver.unregister(address)
            raise
    pinned = PinnedRows(rows, driver, device, done)
    _pinned[start] = pinned
    return pinned


def chunks_of(
    start: int, num_rows: int, row_stride: int, chunk_bytes: int
) -> Iterator[tuple[int, int]]:
    """Address and bytes of each part that is registered on its own.

    Each ends where a row and a memory page end together, so that no run lies in two of them and
    no page is registered twice. Rows that never end with a page are one chunk.
    """
    step = mmap.PAGESIZE // math.gcd(
        row_stride, mmap.PAGESIZE
    )  # rows from one such end to the next
    first = next((n for n in range(step) if (start + n * row_stride) % mmap.PAGESIZE == 0), None)
    if first is None:
        yield start, num_rows * row_stride
        return
    rows = max(1, chunk_bytes // row_stride // step) * step
    cuts = [0, *range(first or rows, num_rows, rows), num_rows]
    for begin, end in itertools.pairwise(cuts):
        yield start + begin * row_stride, (end - begin) * row_stride


def prefault(start: int, size: int) -> None:
    """Has the system take memory now, in several threads, as huge pages if it can.

    What the memory holds stays; nobody else may write it meanwhile.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    high = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if low >= high:
        return
    libc.madvise(low, high - low, mmap.MADV_HUGEPAGE)  # refused for files, which is no harm
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    piece = -(-(high - low) // threads // _HUGE_PAGE) * _HUGE_PAGE
    # Pieces begin with huge pages, which only one thread should take.
    cuts = sorted({low, high, *range(-(-low // _HUGE_PAGE) * _HUGE_PAGE, high, piece)})

    def take(both: tuple[int, int]) -> None:
        begin, end = both
        if libc.madvise(begin, end - begin, _POPULATE_WRITE):
            held = (ctypes.c_ubyte * (end - begin)).from_address(begin)
            pages = np.ctypeslib.as_array(held)[:: mmap.PAGESIZE]
            np.bitwise_or(pages, 0, out=pages)  # an older kernel: write what is there already

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(take, itertools.pairwise(cuts)))


def _unregister(driver: Driver, ordinal: int, chunks: list[int], rows: torch.Tensor) -> None:
    """Undoes every registration; a context that is gone has done so itself."""
    del rows  # only held until now
    try:
        with driver.entered(ordinal):
            for address in chunks:
                driver.unregister(address)
    except CudaError as error:
        if error.name not in _GONE:
            raise


class PinnedHostPool(kvpolicy.HostPool):
    """A `HostPool` whose rows are page-locked; without a CUDA driver they are not, and it says so.

    Args:
        num_slots, record_bytes: as for a `HostPool`, but the size must be known.
        alignment: rows begin at multiples of this many bytes; by default a memory page, so that
            they can be registered in parts.
        device: as for `pin`.
        driver: as for `pin`.

    Attributes:
        not_pinned: why the rows are ordinary memory, "" if they are pinned.

    Raises:
        OptionError, PoolError: as for a `HostPool`.
    """

    def __init__(
        self,
        num_slots: int,
        record_bytes: int,
        *,
        alignment: int = mmap.PAGESIZE,
        device: int | None = None,
        driver: Driver | None = None,
    ) -> None:
        super().__init__(num_slots, record_bytes, alignment=alignment)
        self.not_pinned = ""
        self._pinned_rows: PinnedRows | None = None
        try:
            self._pinned_rows = pin(self.rows, device=device, driver=driver)
        except CudaError as error:
            self.not_pinned = str(error)
            _log.warning("host rows are not pinned, copies will be slower: %s", error)

    def close(self) -> None:
        """Makes the rows ordinary memory again; the pool goes on with them.

        Raises:
            PoolError: a job uses them.
        """
        if self._pinned_rows is not None:
            self._pinned_rows.close()
            self.not_pinned = "closed"
