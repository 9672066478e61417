"""The kernel: the bytes of its runs and no others, at every size and alignment."""

from __future__ import annotations

import platform
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvpolicy_numba.kernel import FAR, LEAST, LINE, NEAR, PIECE, compiled
from kvpolicy_numba.loading import kernel
from kvpolicy_numba.runs import sealed

SENTINEL = 0xA5
GUARD = 192
MANY = 2**40


def aligned(count, shift):
    """Memory whose first byte lies ``shift`` bytes after a line's border, with guards about it."""
    whole = np.full(count + 2 * GUARD + 2 * LINE, SENTINEL, dtype=np.uint8)
    start = GUARD + (-(whole.ctypes.data + GUARD) % LINE) + shift
    return whole, start


def copy(blocks, slots, base, stride, at, size, rows, row_stride, storing, far):
    kernel()(
        *(sealed(numbers) for numbers in (blocks, slots, base, stride, at, size)),
        rows,
        row_stride,
        MANY,
        MANY,
        storing,
        far,
    )


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 7, 8, 31, 33, 56, 63])
def test_every_size_at_every_kind_of_alignment(shift, far):
    source, from_at = aligned(1200, 11)
    source[:] = np.random.default_rng(shift).integers(0, 256, len(source))
    for size in [*range(1, 3 * LINE + 9), 255, 256, 257, 320, 511, 513, 1024, 1091]:
        whole, start = aligned(1200, shift)
        source_address = source.ctypes.data + from_at
        row = whole.ctypes.data + start
        copy([0], [0], [source_address], [0], [0], [size], row, 0, True, far)
        expected = np.full_like(whole, SENTINEL)
        expected[start : start + size] = source[from_at : from_at + size]
        assert np.array_equal(whole, expected), size


@st.composite
def tables(draw):
    """Blocks and rows of some runs, of lengths about the borders at which the kernel changes."""
    borders = [1, 8, LINE, LEAST, PIECE, NEAR]
    near = st.sampled_from(borders).flatmap(lambda n: st.integers(max(1, n - 3), n + 70))
    sizes = draw(st.lists(near, min_size=1, max_size=5))
    gaps = draw(st.lists(st.integers(0, 70), min_size=len(sizes), max_size=len(sizes)))
    outer = draw(st.lists(st.integers(0, 70), min_size=len(sizes), max_size=len(sizes)))
    ids = st.integers(0, 5)
    pairs = draw(
        st.lists(
            st.tuples(ids, ids),
            min_size=1,
            max_size=6,
            unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
        )
    )
    shifts = draw(st.integers(0, 63)), draw(st.integers(0, 63))
    return sizes, gaps, outer, pairs, shifts, draw(st.booleans()), draw(st.booleans())


@settings(derandomize=True, deadline=None, max_examples=300)
@given(tables())
def test_no_byte_outside_the_runs_changes(table):
    sizes, gaps, outer, pairs, (here, there), storing, far = table
    block, row = sum(sizes) + sum(gaps) + 5, sum(sizes) + sum(outer) + 9
    memory, start = aligned(6 * block, here)
    rows, first = aligned(6 * row, there)
    random = np.random.default_rng(len(sizes) + here)
    memory[start : start + 6 * block] = random.integers(0, 256, 6 * block)
    rows[first : first + 6 * row] = random.integers(0, 256, 6 * row)
    expected = {"memory": memory.copy(), "rows": rows.copy()}
    places, at, base = [], 0, 0
    for size, gap, far_gap in zip(sizes, gaps, outer, strict=True):
        places.append((base, at))
        base, at = base + size + gap, at + size + far_gap
    for number, slot in pairs:
        for (held, stored), size in zip(places, sizes, strict=True):
            mine = slice(start + number * block + held, start + number * block + held + size)
            other = slice(first + slot * row + stored, first + slot * row + stored + size)
            if storing:
                expected["rows"][other] = memory[mine]
            else:
                expected["memory"][mine] = rows[other]
    copy(
        [pair[0] for pair in pairs],
        [pair[1] for pair in pairs],
        [memory.ctypes.data + start + held for held, _ in places],
        [block] * len(sizes),
        [stored for _, stored in places],
        sizes,
        rows.ctypes.data + first,
        row,
        storing,
        far,
    )
    assert np.array_equal(memory, expected["memory"])
    assert np.array_equal(rows, expected["rows"])


@pytest.mark.parametrize("storing", [False, True])
@pytest.mark.parametrize("size", [40, 192, 3 * FAR + 128])
def test_pairs_that_follow_one_another_on_dense_rows_are_one_run(size, storing):
    """Blocks 3, 4, 5 -> slots 0, 1, 2; then one apart, then two that go down."""
    memory, start = aligned(8 * size, 24)
    rows, first = aligned(8 * size, 40)
    random = np.random.default_rng(size)
    memory[:], rows[:] = (random.integers(0, 256, len(one)) for one in (memory, rows))
    blocks, slots = [3, 4, 5, 0, 2, 1], [0, 1, 2, 4, 7, 6]
    wanted = (rows if storing else memory).copy()
    for block, slot in zip(blocks, slots, strict=True):
        mine = slice(start + block * size, start + (block + 1) * size)
        other = slice(first + slot * size, first + (slot + 1) * size)
        if storing:
            wanted[other] = memory[mine]
        else:
            wanted[mine] = rows[other]
    addresses = memory.ctypes.data + start, rows.ctypes.data + first
    copy(blocks, slots, [addresses[0]], [size], [0], [size], addresses[1], size, storing, True)
    assert np.array_equal(rows if storing else memory, wanted)


@pytest.mark.parametrize(
    ("blocks", "slots", "wrong"),
    [([0, 1, 2], [0, 1, 1], 2), ([0, 1], [0, 2], 1), ([-1], [0], 0), ([1, 0], [1, -(2**62)], 1)],
)
def test_an_id_out_of_range_is_told_and_nothing_is_copied(blocks, slots, wrong):
    """Two blocks, two slots."""
    memory, rows = np.ones(128, dtype=np.uint8), np.zeros(128, dtype=np.uint8)
    runs = [[memory.ctypes.data], [64], [0], [64]]
    ids = sealed(blocks), sealed(slots)
    places = rows.ctypes.data, 64, 2, 2
    assert kernel()(*ids, *(sealed(one) for one in runs), *places, True, True) == wrong
    assert not rows.any()


def test_no_pairs_are_nothing_to_do():
    copy([], [], [0], [0], [0], [64], 0, 64, True, True)


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="reads x86 instructions"
)
def test_whole_lines_are_streamed_and_fenced_before_the_kernel_returns():
    fresh = compiled(cache=False)
    (code,) = fresh.inspect_asm().values()
    own = code[: code.index("cpython")]  # the wrappers for the interpreter come after it
    lines = [line.strip() for line in own.splitlines()]
    streams = [i for i, line in enumerate(lines) if re.match(r"v?movnt", line)]
    assert streams
    assert any(line.startswith("prefetch") for line in lines)
    for start in streams:
        assert not reaches_return(lines, start), "a return without a fence before it"
    without = [line for line in lines if line != "sfence"]
    (start,) = (i for i, line in enumerate(without) if re.match(r"v?movnt", line))
    assert reaches_return(without, start)  # the walk finds returns where there is no fence


def reaches_return(lines, start):
    """Whether the code can come from a line to a return past no fence, whatever branches it takes.

    A label is "name:"; a jump is "jmp name" or, if it may also go on, "jne name" and the like.
    """
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if re.match(r"\.?\w+:", line)}
    seen, waiting = set(), [start]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        line = lines[at]
        if line == "sfence":
            continue
        if re.match(r"retq?\b", line):
            return True
        jump = re.match(r"(j[a-z]+)\s+(\S+)", line)
        if jump:
            waiting.append(labels[jump[2]])
        if jump is None or jump[1] not in ("jmp", "jmpq"):
            waiting.append(at + 1)
    return False
