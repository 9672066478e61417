"""Host memory in huge pages where the system gives them, and the page size that it got."""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_PMD_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_FIELD = re.compile(r"(\w+): +(\d+) kB")
_HUGE_FIELDS = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")


def huge_page_bytes() -> int:
    """The size of a transparent huge page; that of an ordinary page where there are none."""
    try:
        return int(_PMD_SIZE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return mmap.PAGESIZE


def allocate(count: int, alignment: int = 64) -> Bytes:
    """Zeroed memory of this process, in huge pages where it is long enough and the system agrees.

    Args:
        count: bytes.
        alignment: of the first byte, a power of two.

    Raises:
        MemoryError: there is not enough.
    """
    huge = huge_page_bytes()
    asks = hasattr(mmap, "MADV_HUGEPAGE") and count >= huge > mmap.PAGESIZE
    # Only what begins and ends at a huge page's border lies in huge pages wholly.
    alignment = max(alignment, huge) if asks else alignment
    memory = _mapped(count + alignment) if asks else np.zeros(count + alignment, dtype=np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + count]


def _mapped(count: int) -> Bytes:
    """Private memory: what is shared, as an anonymous mapping is by default, has its own rules."""
    try:
        mapped = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from None
    with contextlib.suppress(OSError):  # a system that has none goes on with small pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, dtype=np.uint8)


def page_bytes(address: int, count: int) -> int | None:
    """The page size behind most of a range's resident bytes.

    Args:
        address: where the range begins.
        count: its bytes.

    Returns:
        Bytes of a page; None where the system does not tell, or nothing was touched so far.
    """
    try:
        lines = _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return read_smaps(lines, address, count)


def read_smaps(lines: list[str], address: int, count: int) -> int | None:
    """As `page_bytes`, from the lines of a ``smaps`` file."""
    resident: dict[int, int] = {}
    inside, page = False, mmap.PAGESIZE
    for line in lines:
        if mapping := _MAPPING.match(line):
            low, high = (int(end, 16) for end in mapping.groups())
            inside = low < address + count and address < high
        elif inside and (field := _FIELD.match(line)):
            name, size = field[1], int(field[2]) * 1024
            if name == "KernelPageSize":
                page = size
            elif name == "Rss":
                resident[page] = resident.get(page, 0) + size
            elif name in _HUGE_FIELDS and size:
                huge = huge_page_bytes()
                resident[page] = resident.get(page, 0) - size
                resident[huge] = resident.get(huge, 0) + size
    if not any(resident.values()):
        return None
    return max(resident, key=lambda one: resident[one])
