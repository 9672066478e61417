"""Memory in huge pages where the system gives them, and what ``smaps`` says of it."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy as kv
from kvpolicy import hostmemory

SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                4096 kB
AnonHugePages:      {huge} kB
ShmemPmdMapped:        0 kB
VmFlags: rd wr mr mw me ac hg
7f0000400000-7f0000800000 rw-s 00000000 00:01 77                         /dev/shm/pool
Size:               4096 kB
KernelPageSize:        4 kB
Rss:                {shared} kB
AnonHugePages:         0 kB
ShmemPmdMapped:        0 kB
7f0000800000-7f0000c00000 rw-s 00000000 00:0f 12                         /dev/hugepages/x
Size:               4096 kB
KernelPageSize:     2048 kB
Rss:                4096 kB
AnonHugePages:         0 kB
"""
FIRST, SECOND, THIRD = 0x7F0000000000, 0x7F0000400000, 0x7F0000800000
MIB = 2**20


@pytest.mark.parametrize(
    ("huge", "shared", "address", "count", "expected"),
    [
        (4096, 4096, FIRST, 4 * MIB, 2 * MIB),
        (2048, 4096, FIRST, 4 * MIB, 4096),  # half and half counts as small
        (0, 4096, FIRST, 4 * MIB, 4096),
        (4096, 4096, SECOND, 4 * MIB, 4096),
        (4096, 0, SECOND, 4 * MIB, None),  # not touched so far
        (0, 0, THIRD, 100, 2 * MIB),  # hugetlbfs
        (4096, 64, FIRST, 8 * MIB, 2 * MIB),  # most of two mappings
        (4096, 4096, FIRST - MIB, 100, None),  # no mapping at all
        (4096, 4096, FIRST - 1, 2, 2 * MIB),
    ],
)
def test_the_page_size_is_that_of_most_resident_bytes(
    monkeypatch, huge, shared, address, count, expected
):
    monkeypatch.setattr(hostmemory, "huge_page_bytes", lambda: 2 * MIB)
    monkeypatch.setattr(hostmemory.mmap, "PAGESIZE", 4096)
    lines = SMAPS.format(huge=huge, shared=shared).splitlines()
    assert hostmemory.read_smaps(lines, address, count) == expected


def test_a_system_that_does_not_tell_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(hostmemory, "_SMAPS", tmp_path / "smaps")
    assert hostmemory.page_bytes(0, 1) is None


@pytest.mark.parametrize("text", [None, "many"])
def test_a_system_without_huge_pages_has_ordinary_ones(monkeypatch, tmp_path, text):
    sizes = tmp_path / "hpage_pmd_size"
    if text is not None:
        sizes.write_text(text)
    monkeypatch.setattr(hostmemory, "_PMD_SIZE", sizes)
    assert hostmemory.huge_page_bytes() == mmap.PAGESIZE
    assert not hostmemory.allocate(4 * MIB).any()


@given(st.integers(1, 3 * MIB), st.sampled_from([1, 2, 64, 4096, 2 * MIB]))
def test_memory_is_zeroed_aligned_and_as_long_as_asked(count, alignment):
    memory = hostmemory.allocate(count, alignment)
    assert (len(memory), memory.ctypes.data % alignment) == (count, 0)
    assert not memory.any()
    memory[:] = 1
    assert memory.sum() == count


def test_memory_belongs_to_this_process(monkeypatch):
    """An anonymous mapping is shared unless it says otherwise, and shared ones get small pages."""
    made = []
    real = mmap.mmap

    def watched(*args, **how):
        made.append(how["flags"])
        return real(*args, **how)

    monkeypatch.setattr(hostmemory.mmap, "mmap", watched)
    monkeypatch.setattr(hostmemory, "huge_page_bytes", lambda: 2 * MIB)
    hostmemory.allocate(4 * MIB)
    assert made == [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS]


def test_too_much_memory_is_a_memory_error():
    with pytest.raises(MemoryError):
        hostmemory.allocate(2**60)


def test_a_pool_says_which_pages_it_got():
    pool = kv.HostPool(4, MIB)
    pool.rows.fill_(1)
    rows = pool.rows.numpy()
    assert pool.page_bytes == hostmemory.page_bytes(rows.ctypes.data, rows.nbytes)
    assert pool.page_bytes in (None, mmap.PAGESIZE, hostmemory.huge_page_bytes())
    with pytest.raises(kv.PoolError, match="the pool has no rows yet"):
        kv.HostPool(4).page_bytes  # noqa: B018  looking it up is what is tested


def test_what_is_allocated_is_all_in_pages_of_one_size():
    """Where the system gives huge pages, a pool of several of them has nothing else."""
    memory = hostmemory.allocate(8 * MIB)
    memory.fill(1)
    found = hostmemory.page_bytes(memory.ctypes.data, memory.nbytes)
    parts = {hostmemory.page_bytes(memory.ctypes.data + at, 1) for at in range(0, 8 * MIB, MIB)}
    assert parts == {found}
    assert np.array_equal(memory, np.ones(8 * MIB, dtype=np.uint8))
