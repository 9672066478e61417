"""Strided boxes against byte maps: every byte of a box spelt out, one by one."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.boxes import (
    MAX_PROOF_RUNS,
    Box,
    Dim,
    box,
    boxes_tile,
    compose,
    disjoint,
    joined,
    tiles_exactly,
)
from kvpolicy.errors import Refusal

strides = st.integers(0, 40)
dims = st.lists(st.builds(Dim, st.integers(1, 4), strides, strides), max_size=4)


def byte_pairs(size, dims, from_offset=0, to_offset=0):
    """(from, to) of every byte, sorted."""
    steps = itertools.product(*(range(times) for times, _, _ in dims))
    return sorted(
        (
            from_offset + sum(i * d[1] for i, d in zip(at, dims, strict=True)) + j,
            to_offset + sum(i * d[2] for i, d in zip(at, dims, strict=True)) + j,
        )
        for at in steps
        for j in range(size)
    )


def pairs_of(b):
    return byte_pairs(b.size, b.dims, b.from_offset, b.to_offset)


def longest_runs(pairs):
    """The maximal runs of a one-to-one byte map, sorted by the to side."""
    runs = []
    for frm, to in sorted(pairs, key=lambda pair: pair[1]):
        last = runs[-1] if runs else None
        if last and (last[0] + last[2], last[1] + last[2]) == (frm, to):
            last[2] += 1
        else:
            runs.append([frm, to, 1])
    return [tuple(run) for run in runs]


def dense_strides(counts, order, size):
    """Strides of axes that fill [0, size * product) exactly, innermost last in ``order``."""
    found, at = [0] * len(counts), size
    for axis in reversed(order):
        found[axis] = at
        at *= counts[axis]
    return found


@st.composite
def transpositions(draw):
    """A box whose two sides are both dense: the axes of a page in two orders."""
    counts = draw(st.lists(st.integers(1, 4), max_size=4))
    size = draw(st.integers(1, 4))
    frm = dense_strides(counts, draw(st.permutations(range(len(counts)))), size)
    to = dense_strides(counts, draw(st.permutations(range(len(counts)))), size)
    return size, [Dim(*dim) for dim in zip(counts, frm, to, strict=True)]


@given(st.integers(1, 6), dims, st.integers(0, 9), st.integers(0, 9))
def test_merging_keeps_every_byte_where_it_was(size, dims, from_offset, to_offset):
    merged = box(size, dims, from_offset, to_offset)
    assert pairs_of(merged) == byte_pairs(size, dims, from_offset, to_offset)
    assert merged.bytes == size * math.prod(d.times for d in dims)
    assert merged.num_runs == len(list(merged.runs()))
    assert merged.from_end == max(frm for frm, _ in pairs_of(merged)) + 1
    assert len(merged.dims) <= sum(d.times > 1 for d in dims)


@given(transpositions())
def test_nothing_that_a_box_can_say_shorter_is_left(transposition):
    """Where both sides are dense, as in every page."""
    size, dims = transposition
    merged = box(size, dims)
    longest = longest_runs(byte_pairs(size, dims))
    assert merged.size == longest[0][2]
    assert list(joined(merged.runs())) == longest
    for outer, inner in itertools.permutations(merged.dims, 2):
        assert outer[1:] != (inner.times * inner.from_stride, inner.times * inner.to_stride)


@given(st.integers(1, 6), dims, st.integers(0, 9))
def test_runs_are_sorted_by_the_to_side(size, dims, to_offset):
    found = [to for _, to, _ in box(size, dims, 0, to_offset).runs()]
    assert found == sorted(found)


def test_runs_that_adjoin_on_both_sides_are_joined_and_others_are_not():
    """Two halves of 2 x 2 transposed bytes: the last byte of one meets the first of the next."""
    halves = Box(1, (Dim(2, 4, 4), Dim(2, 1, 2), Dim(2, 2, 1)))
    assert list(joined(halves.runs())) == [
        (0, 0, 1), (2, 1, 1), (1, 2, 1), (3, 3, 2), (6, 5, 1), (5, 6, 1), (7, 7, 1)
    ]  # fmt: skip
    assert list(joined([])) == []


def test_merging_by_hand():
    """2 heads x 4 tokens of 8 B, the heads 32 B apart here and 64 B there: two runs of 32 B."""
    assert box(8, [Dim(2, 32, 64), Dim(4, 8, 8)]) == Box(32, (Dim(2, 32, 64),))
    assert box(8, [Dim(4, 8, 8), Dim(2, 32, 32)], 5, 6) == Box(64, (), 5, 6)
    assert box(8, [Dim(2, 0, 0), Dim(1, 3, 4)]).dims == (Dim(2, 0, 0),)
    assert list(box(8, [Dim(2, 32, 64), Dim(4, 8, 8)]).runs()) == [(0, 0, 32), (32, 64, 32)]


@given(st.integers(1, 6), dims, st.integers(0, 9), st.integers(0, 9))
def test_the_inverse_exchanges_the_sides(size, dims, from_offset, to_offset):
    here = box(size, dims, from_offset, to_offset)
    assert pairs_of(here.inverse()) == sorted((to, frm) for frm, to in pairs_of(here))


@given(st.integers(1, 6), dims, st.integers(0, 9), st.integers(0, 9))
def test_moving_shifts_every_byte(size, dims, from_by, to_by):
    here = box(size, dims)
    shifted = [(frm + from_by, to + to_by) for frm, to in pairs_of(here)]
    assert pairs_of(here.moved(from_by, to_by)) == shifted


def grouped(draw, primes):
    """A factorisation: the primes, shuffled and multiplied in groups."""
    shuffled = draw(st.permutations(primes))
    cuts = sorted(draw(st.sets(st.integers(0, len(primes)))) | {0, len(primes)})
    return [math.prod(shuffled[low:high]) for low, high in itertools.pairwise(cuts)]


@st.composite
def chains(draw):
    """Two boxes that meet in a middle which both cover exactly, each with its cut points there."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3]), max_size=6))
    total = math.prod(primes)
    found = []
    for _ in range(2):
        size, *counts = grouped(draw, primes) or [1]
        middle = dense_strides(counts, range(len(counts)), size)
        gaps = draw(st.booleans())
        outer_size = size + draw(st.integers(0, 3)) * gaps
        outer = dense_strides(counts, draw(st.permutations(range(len(counts)))), outer_size)
        cuts = {total, *middle, size}
        found.append((size, counts, middle, outer, cuts))
    return total, *found


@given(chains(), st.integers(0, 9), st.integers(0, 9))
def test_composition_maps_bytes_as_two_steps_do(chain, from_offset, to_offset):
    """None only where the cut points of the two do not divide one another."""
    _, (size, counts, middle, outer, cuts), (size2, counts2, middle2, outer2, cuts2) = chain
    first = box(size, [*map(Dim, counts, outer, middle)], from_offset, 0)
    second = box(size2, [*map(Dim, counts2, middle2, outer2)], 0, to_offset)
    composed = compose(first, second)
    if composed is None:
        both = sorted(cuts | cuts2)
        assert any(high % low for low, high in itertools.pairwise(both))
        return
    onwards = dict(pairs_of(second))
    assert pairs_of(composed) == sorted((frm, onwards[mid]) for frm, mid in pairs_of(first))


def test_composition_by_hand():
    """A page that is one run, spread in steps of 10 B; and one that stays as it is."""
    assert compose(Box(16), box(4, [Dim(4, 4, 10)], 0, 3)) == Box(4, (Dim(4, 4, 10),), 0, 3)
    assert compose(Box(16), Box(16, (), 0, 7)) == Box(16, (), 0, 7)
    spread = Box(4, (Dim(4, 10, 4),))  # gaps of 6 B, read as dense
    assert compose(spread, Box(16)) == spread


def test_cut_points_that_do_not_divide_have_no_single_box():
    fours = Box(4, (Dim(3, 8, 4),))  # memory with gaps -> 12 dense bytes, cut every 4
    sixes = Box(6, (Dim(2, 6, 10),))  # 12 dense bytes, cut every 6 -> somewhere
    assert compose(fours, sixes) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Box(4, (Dim(2, 4, 8),)), Box(16)),  # the middle has a gap
        (Box(8), Box(16)),  # the middles differ in size
        (Box(16), Box(8)),
        (Box(8, (), 0, 4), Box(8)),  # the middle does not begin at 0
        (Box(8), Box(8, (), 4, 0)),
        (Box(4, (Dim(2, 4, 0),)), Box(8)),  # the middle is written twice
    ],
)
def test_what_does_not_cover_the_middle_is_not_composed(first, second):
    assert compose(first, second) is None


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), max_size=6), st.integers(0, 16))
def test_tiling_covers_each_byte_once(intervals, total):
    counts = np.zeros(17, dtype=int)
    for start, size in intervals:
        counts[start : start + size] += 1
    exact = bool(total) and (counts[:total] == 1).all() and not counts[total:].any()
    starts, sizes = (np.array([i[k] for i in intervals], dtype=np.int64) for k in (0, 1))
    assert tiles_exactly(starts, sizes, total) == exact


@pytest.mark.parametrize(
    ("intervals", "total", "tiles"),
    [
        ([(0, 4)], 4, True),
        ([(2, 2), (0, 2)], 4, True),
        ([(1, 3)], 4, False),  # begins late
        ([(-1, 5)], 4, False),  # begins early
        ([(0, 3)], 4, False),  # ends early
        ([(0, 5)], 4, False),  # ends late
        ([(0, 1), (2, 2)], 4, False),  # a gap
        ([(0, 3), (2, 2)], 4, False),  # a byte twice
        ([(0, 4), (0, 4)], 4, False),
        ([], 0, False),
    ],
)
def test_tiling_by_hand(intervals, total, tiles):
    starts, sizes = (np.array([i[k] for i in intervals], dtype=np.int64) for k in (0, 1))
    assert tiles_exactly(starts, sizes, total) is tiles


@given(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=6), st.randoms())
def test_a_cut_and_shuffled_interval_tiles_and_no_longer_when_one_byte_moves(first, more, random):
    sizes = [first, *more]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    order = random.sample(range(len(sizes)), len(sizes))
    starts, sizes = np.array(starts)[order], np.array(sizes)[order]
    total = int(sizes.sum())
    assert tiles_exactly(starts, sizes, total)
    assert not tiles_exactly(starts, sizes, total + 1)
    moved = starts.copy()
    moved[random.randrange(len(moved))] += random.choice([-1, 1])
    assert not tiles_exactly(moved, sizes, total)


@given(transpositions())
def test_a_dense_box_tiles_and_half_of_it_does_not(transposition):
    size, dims = transposition
    whole = box(size, dims)
    assert boxes_tile([whole], whole.bytes) is True
    assert boxes_tile([whole, whole], whole.bytes) is False
    assert boxes_tile([whole, whole.moved(to_by=whole.bytes)], 2 * whole.bytes) is True
    assert boxes_tile([whole.moved(to_by=1)], whole.bytes) is False


def test_more_runs_than_can_be_proved_are_refused():
    refusal = boxes_tile([Box(1, (Dim(MAX_PROOF_RUNS + 1, 2, 2),))], 1)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "proof-too-large"
    assert "4,194,305 byte runs would have to be proved" in refusal.detail
    assert "use smaller blocks" in refusal.detail


def share_no_byte(size, dims):
    touched = [
        sum(i * stride for i, (_, stride) in zip(at, dims, strict=True)) + j
        for at in itertools.product(*(range(count) for count, _ in dims))
        for j in range(size)
    ]
    return len(set(touched)) == len(touched)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-20, 40)), max_size=4),
)
def test_disjoint_is_never_said_of_runs_that_share_a_byte(size, dims):
    if disjoint(size, dims):
        assert share_no_byte(size, dims)


def test_disjoint_counts_to_the_last_byte_and_no_further():
    """Three runs of 4 B, 10 B apart, end at byte 24: the next three may begin there."""
    assert disjoint(4, [(3, 10), (2, 24)])
    assert not disjoint(4, [(3, 10), (2, 23)])


@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3),
    st.randoms(),
)
def test_disjoint_is_exact_where_strides_divide_one_another(size, stride, steps, random):
    dims = []
    for count, factor in steps:
        stride *= factor
        dims.append((count, stride))
    random.shuffle(dims)
    assert disjoint(size, dims) == share_no_byte(size, dims)
