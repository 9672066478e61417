# mypy: ignore-errors
# The kernel is in Triton's language, not in Python; only `kernels` imports it.
"""The one kernel: the runs of strided boxes, between device memory and rows, either way."""

import triton
import triton.language as tl

_TABLES, _NUMBERS = list(range(4)), list(range(4, 22))


# Not specialised on values, else a new number of pairs could compile in the middle of serving.
@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_TABLES + _NUMBERS)
def copy_boxes(
    blocks,
    rows,
    bases,
    offsets,
    host: tl.int64,
    row_stride: tl.int64,
    block_stride: tl.int64,
    runs: tl.int32,
    words: tl.int32,
    num_bases: tl.int32,
    times_0: tl.int32,
    times_1: tl.int32,
    times_2: tl.int32,
    times_3: tl.int32,
    device_0: tl.int64,
    device_1: tl.int64,
    device_2: tl.int64,
    device_3: tl.int64,
    host_0: tl.int64,
    host_1: tl.int64,
    host_2: tl.int64,
    host_3: tl.int64,
    TO_HOST: tl.constexpr,
    UNIT: tl.constexpr,
    RUNS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copies ``runs`` runs of ``words`` words: of every pair, every base, every index of the box.

    A program takes tiles of RUNS runs by WORDS words, every num_programs-th tile.

    ``blocks``, ``rows``, ``bases`` and ``offsets`` are int64 tables on the device: ids, addresses
    of block 0's first run, and its places in a row. ``host`` is the address of row 0. Dimensions
    stand outermost first. ``UNIT`` is 16, 8 or 4 bytes, and divides every address, stride and run.
    """
    word = tl.int64 if UNIT >= 8 else tl.int32
    WORDS_OF_UNIT: tl.constexpr = 2 if UNIT == 16 else 1
    columns = (words + WORDS - 1) // WORDS
    tiles = ((runs + RUNS - 1) // RUNS).to(tl.int64) * columns
    first = tl.program_id(0).to(tl.int64)
    for tile in range(first, tiles, tl.num_programs(0).to(tl.int64)):
        row_of_tiles = tile // columns
        run = row_of_tiles.to(tl.int32) * RUNS + tl.arange(0, RUNS)
        at = (tile - row_of_tiles * columns).to(tl.int32) * WORDS + tl.arange(0, WORDS)
        here = run < runs
        # Indices have 32 bits, and all that they are multiplied with 64: products may pass 2**31.
        i_3 = run % times_3
        left = run // times_3
        i_2 = left % times_2
        left = left // times_2
        i_1 = left % times_1
        left = left // times_1
        i_0 = left % times_0
        left = left // times_0
        base = left % num_bases
        pair = left // num_bases
        near = tl.load(bases + base, mask=here, other=0)
        near += tl.load(blocks + pair, mask=here, other=0) * block_stride
        near += i_0 * device_0 + i_1 * device_1 + i_2 * device_2 + i_3 * device_3
        far = host + tl.load(offsets + base, mask=here, other=0)
        far += tl.load(rows + pair, mask=here, other=0) * row_stride
        far += i_0 * host_0 + i_1 * host_1 + i_2 * host_2 + i_3 * host_3
        # Both of these are needed for accesses of 16 bytes: the hint on the pointer itself, and a
        # mask that is visibly the same for both words of a unit.
        near = tl.multiple_of(near.to(tl.pointer_type(word)), UNIT)
        far = tl.multiple_of(far.to(tl.pointer_type(word)), UNIT)
        inside = at // WORDS_OF_UNIT < words // WORDS_OF_UNIT
        mask = here[:, None] & inside[None, :]
        near = near[:, None] + at[None, :]
        far = far[:, None] + at[None, :]
        if TO_HOST:
            tl.store(far, tl.load(near, mask=mask), mask=mask)
        else:
            tl.store(near, tl.load(far, mask=mask), mask=mask)
