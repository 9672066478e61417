"""The kernel: runs of bytes copied with streaming stores, and the reads that follow prefetched.

A store that streams goes past the caches, so the line is not read before it is written. Each one
fills a whole line of 64 bytes at an address that 64 divides; what lies before the first such line
of a run and after its last is written by ordinary stores. Addresses are numbers: who calls this
has checked them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # it has no types
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Their own types do not tell what is called from what is written: an intrinsic lacks its first
# argument when it is called, and a compiled function takes what it takes.
_Made = Callable[[Callable[..., Any]], Any]
_intrinsic: _Made = intrinsic
_inner: _Made = njit(inline="always")
_function: Callable[..., Any] = cgutils.get_or_insert_function

LINE = 64
PIECE = 256
"""Bytes between two looks at how far the prefetches are ahead."""
LEAST = 2 * LINE
"""Shorter runs have too few whole lines to stream."""
FAR = 16_384
"""How far prefetches lead where runs are short: the processor's own stop at a run's end."""
NEAR = 1_024

_X86 = platform.machine().lower() in ("x86_64", "amd64")
_WORD, _INT, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_LINE_TYPE = ir.VectorType(_WORD, LINE // 8)


def _copier(kind: ir.Type, source_align: int, target_align: int, streams: bool) -> Any:
    """The code of one load and one store."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        into, out_of = (builder.inttoptr(one, kind.as_pointer()) for one in args)
        store = builder.store(builder.load(out_of, align=source_align), into, align=target_align)
        if streams:
            mark = builder.module.add_metadata([ir.Constant(_INT, 1)])
            store.set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def _stream_line(_typing: Any, _into: Any, _out_of: Any) -> Any:
    return _copier(_LINE_TYPE, 1, LINE, streams=True)


@_intrinsic
def _copy_word(_typing: Any, _into: Any, _out_of: Any) -> Any:
    return _copier(_WORD, 1, 1, streams=False)


@_intrinsic
def _copy_byte(_typing: Any, _into: Any, _out_of: Any) -> Any:
    return _copier(_BYTE, 1, 1, streams=False)


def _prefetcher(locality: int) -> Any:
    """The code of a prefetch for reading."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = _BYTE.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, _INT, _INT, _INT])
        prefetch = _function(builder.module, kind, "llvm.prefetch.p0")
        how = [ir.Constant(_INT, value) for value in (0, locality, 1)]
        builder.call(prefetch, [builder.inttoptr(args[0], place), *how])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@_intrinsic
def _prefetch_far(_typing: Any, _address: Any) -> Any:
    return _prefetcher(2)


@_intrinsic
def _prefetch_near(_typing: Any, _address: Any) -> Any:
    return _prefetcher(3)


@_intrinsic
def _fence(_typing: Any) -> Any:
    """Everything streamed so far is seen before what is written after it."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse.sfence"
            builder.call(_function(builder.module, kind, name), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_inner
def _copy_some(into: int, out_of: int, count: int) -> None:
    """A few bytes by ordinary stores."""
    end = into + count
    while into + 8 <= end:
        _copy_word(into, out_of)
        into += 8
        out_of += 8
    while into < end:
        _copy_byte(into, out_of)
        into += 1
        out_of += 1


def copy_pairs(
    blocks: Any,
    slots: Any,
    base: Any,
    stride: Any,
    at: Any,
    size: Any,
    rows: int,
    row_stride: int,
    num_blocks: int,
    num_slots: int,
    storing: bool,
    far: bool,
) -> int:
    """Copies every run of every pair, or nothing where an id is out of range.

    Args:
        blocks: int64, read-only, as all arrays here.
        slots: paired with them.
        base: of each run, its address in block 0.
        stride: of each run, bytes from one block to the next.
        at: of each run, its offset in a row.
        size: of each run, its bytes.
        rows: the address of row 0.
        row_stride: bytes from one row to the next.
        num_blocks: blocks lie below.
        num_slots: slots lie below.
        storing: from blocks to rows; else back.
        far: whether prefetches lead by `FAR` or by `NEAR`.

    Returns:
        The first pair with an id that is out of range; -1 where there is none.
    """
    pairs, runs = len(blocks), len(base)
    dense = runs == 1 and size[0] == stride[0] and size[0] == row_stride
    for pair in range(pairs):
        low = min(blocks[pair], slots[pair])
        if low < 0 or blocks[pair] >= num_blocks or slots[pair] >= num_slots:
            return pair
    lead = FAR if far else NEAR
    # The run that is prefetched, how much of it was, and how far that is ahead of the copy.
    next_pair, next_run, done, ahead = 0, 0, 0, 0
    source = 0
    pair = 0
    while pair < pairs:
        count = 1
        if dense:  # pairs that follow one another on both sides are one run
            while (
                pair + count < pairs
                and blocks[pair + count] == blocks[pair] + count
                and slots[pair + count] == slots[pair] + count
            ):
                count += 1
        for run in range(runs):
            here = base[run] + blocks[pair] * stride[run]
            there = rows + slots[pair] * row_stride + at[run]
            into, out_of = (there, here) if storing else (here, there)
            left = size[run] * count
            if left < LEAST:
                _copy_some(into, out_of, left)
                ahead -= left
                continue
            head = -into & (LINE - 1)
            _copy_some(into, out_of, head)
            into += head
            out_of += head
            left -= head
            ahead -= head
            while left >= LINE:
                piece = min(left & -LINE, PIECE)
                while ahead < lead + piece and next_pair < pairs:
                    if done == 0:
                        if storing:
                            source = base[next_run] + blocks[next_pair] * stride[next_run]
                        else:
                            source = rows + slots[next_pair] * row_stride + at[next_run]
                    part = min(size[next_run] - done, PIECE)
                    if far:
                        for line in range(source + done, source + done + part, LINE):
                            _prefetch_far(line)
                    else:
                        for line in range(source + done, source + done + part, LINE):
                            _prefetch_near(line)
                    done += part
                    ahead += part
                    if done == size[next_run]:
                        done = 0
                        next_run += 1
                        if next_run == runs:
                            next_run = 0
                            next_pair += 1
                end = into + piece
                while into < end:
                    _stream_line(into, out_of)
                    into += LINE
                    out_of += LINE
                left -= piece
                ahead -= piece
            _copy_some(into, out_of, left)
            ahead -= left
        pair += count
    _fence()
    return -1


_ARRAY = types.Array(types.int64, 1, "C", readonly=True)
SIGNATURE = types.int64(*([_ARRAY] * 6), *([types.int64] * 4), types.boolean, types.boolean)


def compiled(cache: bool) -> Any:
    """The kernel, ready to be called; it lets go of the interpreter's lock.

    Raises:
        RuntimeError, OSError: ``cache``, and there is no place to keep it.
    """
    return njit(SIGNATURE, nogil=True, cache=cache, error_model="numpy")(copy_pairs)
