"""The kernel, in Triton's interpreter, moves exactly the runs of a box."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need triton")

from kvpolicy_cuda import kernels as module
from kvpolicy_cuda.kernels import Kernels, Tile, tile_of
from kvpolicy_cuda.runs import KernelBox

SENTINEL = 0xA5
BLOCKS, ROWS = 4, 3


def copy(box, blocks, rows, *, kernels=None, **more):
    tables = torch.from_numpy(np.stack([box.bases, box.offsets]))
    (kernels or Kernels.load()).copy(box, torch.tensor(blocks), torch.tensor(rows), tables, **more)


@pytest.mark.parametrize(
    ("size", "unit", "tile"),
    [
        (1_024, 16, Tile(16, 128)),  # 16 fragments of 1 KiB in flight
        (8_192, 16, Tile(2, 1024)),
        (2**21, 16, Tile(1, 2048)),
        (1_040, 16, Tile(8, 256)),  # 130 words in tiles of 256
        (264, 8, Tile(16, 64)),
        (12, 4, Tile(128, 4)),
        (4, 4, Tile(128, 1)),
        (32, 16, Tile(128, 4)),
    ],
)
def test_a_tile_holds_1_024_accesses_in_powers_of_two(size, unit, tile):
    assert tile_of(size, unit) == tile
    assert tile.runs * tile.words * min(unit, 8) <= 1_024 * unit


def aligned(size, by=16):
    room = torch.full((size + 64,), SENTINEL, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + by % 16
    return room, room[start : start + size]


@st.composite
def copies(draw):
    """A box whose runs lie apart on both sides, with ids and a way."""
    unit = draw(st.sampled_from([16, 8, 4]))
    size = unit * draw(st.integers(1, 9))
    times = tuple(draw(st.integers(1, 3)) for _ in range(4))
    strides = []
    for _ in range(2):
        order, at, found = draw(st.permutations(range(4))), size, [0] * 4
        for i in order:
            at += unit * draw(st.integers(0, 2))
            found[i] = at
            at *= times[i]
        strides.append((tuple(found), at + unit * draw(st.integers(0, 2))))
    pairs = draw(st.integers(1, 3))
    return {
        "unit": unit,
        "size": size,
        "times": times,
        "strides": strides,
        "bases": draw(st.permutations(range(draw(st.integers(1, 3))))),
        "to_host": draw(st.booleans()),
        "blocks": draw(st.permutations(range(BLOCKS)))[:pairs],
        "rows": draw(st.permutations(range(ROWS)))[:pairs],
        "grid": draw(st.integers(1, 5)),
        "most": draw(st.sampled_from([1, 40, 2**30])),
    }


@given(copies())
@settings(max_examples=80)
def test_every_run_moves_and_nothing_else(made):
    unit, size, times, bases = (made[name] for name in ("unit", "size", "times", "bases"))
    ((there, block), (here, row)) = made["strides"]
    lead, to_host = unit * 3, made["to_host"]
    device_room, device = aligned(len(bases) * BLOCKS * block + lead, by=unit)
    host_room, host = aligned(len(bases) * ROWS * row + lead, by=unit)
    source, target = (device, host) if to_host else (host, device)
    source.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, len(source))))
    before = (device_room.clone(), host_room.clone())
    # Each base is a layer with memory of its own, in another order than in the row.
    apart = [lead + number * BLOCKS * block for number in bases]
    places = [lead + number * row for number in range(len(bases))]
    box = KernelBox(
        bases=device.data_ptr() + np.array(apart),
        offsets=np.array(places),
        block_stride=block,
        size=size,
        times=times,
        device_strides=there,
        host_strides=here,
    )
    kernels = Kernels.load()
    kernels.thread_blocks = made["grid"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_RUNS", made["most"])  # several launches
        copy(
            box,
            made["blocks"],
            made["rows"],
            kernels=kernels,
            host=host.data_ptr(),
            row_stride=len(bases) * row,
            unit=unit,
            to_host=to_host,
        )
    expected = target.clone()
    for one, other in zip(made["blocks"], made["rows"], strict=True):
        for layer, place in zip(apart, places, strict=True):
            for index in np.ndindex(*times):
                at = layer + one * block + sum(i * s for i, s in zip(index, there, strict=True))
                to = place + other * len(bases) * row
                to += sum(i * s for i, s in zip(index, here, strict=True))
                frm, to = (at, to) if to_host else (to, at)
                expected[to : to + size] = source[frm : frm + size]
    assert torch.equal(target, expected)
    # The guards around both, and the source, are as they were.
    outside = (host_room, before[1]) if to_host else (device_room, before[0])
    start = target.data_ptr() - outside[0].data_ptr()
    outside[0][start : start + len(target)] = outside[1][start : start + len(target)]
    assert torch.equal(outside[0], outside[1])
    untouched = (device_room, before[0]) if to_host else (host_room, before[1])
    assert torch.equal(*untouched)


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("size", [8 * 2048 + 16, 3 * 16_384, 1_040])
def test_runs_longer_than_a_tile_have_no_tail_left_over(size, to_host):
    """Several columns of a tile, the last of them not full."""
    _, device = aligned(2 * size)
    _, host = aligned(2 * size)
    source, target = (device, host) if to_host else (host, device)
    source.copy_(torch.from_numpy(np.random.default_rng(2).integers(0, 256, 2 * size)))
    box = KernelBox(
        bases=np.array([device.data_ptr()]),
        offsets=np.array([0]),
        block_stride=size,
        size=size,
        times=(1, 1, 1, 1),
        device_strides=(0,) * 4,
        host_strides=(0,) * 4,
    )
    copy(
        box,
        [1, 0],
        [0, 1],
        host=host.data_ptr(),
        row_stride=size,
        unit=16,
        to_host=to_host,
    )
    assert torch.equal(target[:size], source[size:])
    assert torch.equal(target[size:], source[:size])


def test_an_id_times_a_stride_may_pass_32_bits():
    """Block 3 lies 6 GiB on, a second step 4 GiB more; untouched memory costs nothing."""
    stride, step = 2**31, 2**32
    with mmap.mmap(-1, 12 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON | 0x4000) as reserved:
        memory = np.frombuffer(reserved, dtype=np.uint8)
        for at in (3 * stride, 3 * stride + step):
            memory[at : at + 16] = np.arange(16) + (at == 3 * stride)
        box = KernelBox(
            bases=np.array([memory.ctypes.data]),
            offsets=np.array([0]),
            block_stride=stride,
            size=16,
            times=(1, 1, 1, 2),
            device_strides=(0, 0, 0, step),
            host_strides=(0, 0, 0, 16),
        )
        _, host = aligned(64)
        copy(
            box,
            [3],
            [1],
            host=host.data_ptr(),
            row_stride=32,
            unit=16,
            to_host=True,
        )
        assert host[32:].tolist() == [*range(1, 17), *range(16)]
        assert (host[:32] == SENTINEL).all()
        del memory
