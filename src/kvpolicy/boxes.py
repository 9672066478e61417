"""Strided byte boxes: the one shape in which bytes are mapped, proved and copied.

A `Box` says that ``size`` contiguous bytes, repeated over a few dimensions, lie at one place in
a *from* space and at another in a *to* space. It knows nothing of heads, tokens or ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from kvpolicy.errors import Refusal

MAX_PROOF_RUNS = 4_194_304

Offsets = NDArray[np.int64]


class Dim(NamedTuple):
    """One repetition: ``times`` times, ``from_stride`` bytes apart here and ``to_stride`` there."""

    times: int
    from_stride: int
    to_stride: int


@attrs.frozen
class Box:
    """``size`` bytes at ``from_offset + sum(i*from_stride)`` and ``to_offset + sum(i*to_stride)``.

    Attributes:
        size: bytes of one contiguous run, the same on both sides.
        dims: the repetitions, sorted by ``to_stride``, largest first, nothing left to merge
            (see `box`).
    """

    size: int
    dims: tuple[Dim, ...] = ()
    from_offset: int = 0
    to_offset: int = 0

    @property
    def num_runs(self) -> int:
        """Contiguous runs of the box."""
        return math.prod(dim.times for dim in self.dims)

    @property
    def bytes(self) -> int:
        """Bytes that the box maps."""
        return self.size * self.num_runs

    @property
    def from_end(self) -> int:
        """One past the last byte on the *from* side."""
        return self.from_offset + self.size + sum((n - 1) * s for n, s, _ in self.dims)

    def inverse(self) -> Box:
        """The same bytes with the two sides exchanged."""
        swapped = [Dim(n, to, frm) for n, frm, to in self.dims]
        return box(self.size, swapped, self.to_offset, self.from_offset)

    def moved(self, from_by: int = 0, to_by: int = 0) -> Box:
        """The box with its offsets shifted."""
        return attrs.evolve(
            self, from_offset=self.from_offset + from_by, to_offset=self.to_offset + to_by
        )

    def offsets(self) -> tuple[Offsets, Offsets]:
        """Every run's offset on either side, sorted by the *to* side."""
        frm = np.array([self.from_offset], dtype=np.int64)
        to = np.array([self.to_offset], dtype=np.int64)
        for count, from_stride, to_stride in self.dims:
            step = np.arange(count, dtype=np.int64)
            frm = (frm[:, None] + step * from_stride).reshape(-1)
            to = (to[:, None] + step * to_stride).reshape(-1)
        order = np.argsort(to, kind="stable")
        return frm[order], to[order]

    def runs(self) -> Iterable[tuple[int, int, int]]:
        """``(from_offset, to_offset, size)`` of every run, sorted by the *to* side."""
        frm, to = self.offsets()
        return zip(frm.tolist(), to.tolist(), [self.size] * len(to), strict=True)


def joined(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """The same bytes, runs that follow each other on both sides as one.

    A box is merged dimension by dimension. Where a transposition repeats (the two halves of split
    K/V whose order is converted), the last run of one may still meet the first of the next.
    """
    last: tuple[int, int, int] | None = None
    for frm, to, size in runs:
        if last is not None and (last[0] + last[2], last[1] + last[2]) == (frm, to):
            last = (last[0], last[1], last[2] + size)
            continue
        if last is not None:
            yield last
        last = (frm, to, size)
    if last is not None:
        yield last


def box(size: int, dims: Iterable[Dim], from_offset: int = 0, to_offset: int = 0) -> Box:
    """A `Box` in normal form: repetitions of one dropped, contiguous ones merged."""
    left = sorted((d for d in dims if d.times > 1), key=lambda d: (-d.to_stride, -d.from_stride))
    merged: list[Dim] = []
    while left:
        inner = left.pop()
        if inner.from_stride == inner.to_stride == size and not merged:
            size *= inner.times
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and inner.from_stride == last.times * last.from_stride
            and inner.to_stride == last.times * last.to_stride
        ):
            merged[-1] = Dim(inner.times * last.times, last.from_stride, last.to_stride)
        else:
            merged.append(inner)
    return Box(size, tuple(reversed(merged)), from_offset, to_offset)


def normal(b: Box) -> Box:
    """The same bytes in normal form, for a box that was made by hand."""
    return box(b.size, b.dims, b.from_offset, b.to_offset)


def tiles_exactly(starts: Offsets, sizes: Offsets, total: int) -> bool:
    """Whether the intervals cover [0, total) with no gap and no byte twice."""
    order = np.argsort(starts, kind="stable")
    starts, sizes = starts[order], sizes[order]
    ends = starts + sizes
    return bool(
        len(starts)
        and starts[0] == 0
        and ends[-1] == total
        and np.array_equal(starts[1:], ends[:-1])
    )


def boxes_tile(boxes: Sequence[Box], total: int) -> bool | Refusal:
    """Whether the *to* sides of the boxes cover [0, total) exactly once."""
    if (runs := sum(b.num_runs for b in boxes)) > MAX_PROOF_RUNS:
        return Refusal(
            "proof-too-large",
            f"{runs:,} byte runs would have to be proved for one page; the limit is "
            f"{MAX_PROOF_RUNS:,}; use smaller blocks or a head/token order that is kept",
        )
    starts = np.concatenate([b.offsets()[1] for b in boxes])
    sizes = np.concatenate([np.full(b.num_runs, b.size, dtype=np.int64) for b in boxes])
    return tiles_exactly(starts, sizes, total)


def disjoint(size: int, dims: Iterable[tuple[int, int]]) -> bool:
    """Whether runs of ``size`` repeated over ``(count, stride)`` dims never share a byte.

    Sufficient and, where every stride divides the next, necessary.
    """
    extent = size
    for count, stride in sorted(((c, s) for c, s in dims if c > 1), key=lambda d: d[1]):
        if stride < extent:
            return False
        extent += (count - 1) * stride
    return True


def _cuts(size: int, strides: Iterable[tuple[int, int]], total: int) -> set[int] | None:
    """The mixed-radix cut points of a side that covers [0, total) exactly, or None."""
    cuts, at = {size}, size
    for count, stride in sorted(strides, key=lambda d: d[1]):
        if stride != at:
            return None
        at *= count
        cuts.add(at)
    return cuts if at == total else None


def _refined(b: Box, cuts: Sequence[int], to_side: bool) -> list[tuple[int, int]]:
    """(middle stride, outer stride) for every cut step of a side that covers [0, total)."""
    steps = []
    for low, high in itertools.pairwise(cuts):
        if low < b.size:
            steps.append((high // low, low))
            continue
        for count, from_stride, to_stride in b.dims:
            mid, far = (to_stride, from_stride) if to_side else (from_stride, to_stride)
            if mid <= low < mid * count:
                steps.append((high // low, far * (low // mid)))
                break
    return steps


def compose(first: Box, second: Box) -> Box | None:
    """The box from ``first``'s *from* side to ``second``'s *to* side through their common middle.

    Both must cover the middle [0, bytes) exactly, else None. None too if the two cut it at points
    that do not divide one another, so that no single box exists.
    """
    total = first.bytes
    mine = _cuts(first.size, ((d.times, d.to_stride) for d in first.dims), total)
    other = _cuts(second.size, ((d.times, d.from_stride) for d in second.dims), total)
    if mine is None or other is None or first.to_offset or second.from_offset:
        return None
    cuts = sorted(mine | other)
    if any(high % low for low, high in itertools.pairwise(cuts)):
        return None
    near = _refined(first, cuts, to_side=True)
    far = _refined(second, cuts, to_side=False)
    dims = [Dim(n, frm, to) for (n, frm), (_, to) in zip(near, far, strict=True)]
    return box(cuts[0], dims, first.from_offset, second.to_offset)
