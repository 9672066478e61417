"""Launches of the copy kernel: which tile, how many thread blocks, and whether there is Triton."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from kvpolicy_cuda.runs import MAX_RUNS, KernelBox

THREAD_BLOCKS = 12
"""At most so many at once: a copy leaves the other processors to the model."""

TILE_ACCESSES = 1_024
"""In flight in each thread block, 16 KiB if they are 16 bytes wide: one run of 1 KiB at a time
would wait for the bus. Four of them for a thread, whose registers hold them and their addresses."""

MAX_TILE_RUNS = 128
WARPS = 8


class Tile(NamedTuple):
    """What a thread block copies at a time: ``runs`` runs, ``words`` words of each."""

    runs: int
    words: int


def word_bytes(unit: int) -> int:
    """Bytes of a kernel's word; two words make a unit of 16."""
    return min(unit, 8)


def tile_of(size: int, unit: int) -> Tile:
    """The tile for runs of ``size`` bytes; both sides powers of two."""
    most = TILE_ACCESSES * unit // word_bytes(unit)
    words = min(most, 1 << (size // word_bytes(unit) - 1).bit_length())
    return Tile(min(most // words, MAX_TILE_RUNS), words)


class Kernels:
    """The kernel, compiled by Triton with the first launch of each tile.

    Args:
        copy_boxes: the kernel, from `load`.
        thread_blocks: the most that a launch takes.
    """

    def __init__(self, copy_boxes: Any, thread_blocks: int = THREAD_BLOCKS) -> None:
        self._copy_boxes = copy_boxes
        self.thread_blocks = thread_blocks

    @classmethod
    def load(cls) -> Kernels | str:
        """The kernels, or why there are none."""
        try:
            return cls(importlib.import_module("kvpolicy_cuda._kernel").copy_boxes)
        except ImportError as error:
            return f"triton cannot be imported ({error})"

    def copy(
        self,
        box: KernelBox,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        tables: torch.Tensor,
        *,
        host: int,
        row_stride: int,
        unit: int,
        to_host: bool,
    ) -> None:
        """Launches the copy of one box for pairs of block and row, on torch's current stream.

        Args:
            box: what to copy of each block.
            blocks: int64 ids on the device.
            rows: as many.
            tables: the box's bases and offsets on the device, of shape (2, number of bases).
            host: address of row 0, in host memory or in a staging buffer.
            row_stride: bytes to the next row.
            unit: bytes that divide every address and size (see `KernelBox.unit`).
            to_host: from the blocks to the rows, or back.
        """
        tile = tile_of(box.size, unit)
        words, of_a_pair = box.size // word_bytes(unit), box.num_runs
        most = max(1, (MAX_RUNS - 1) // of_a_pair)
        for first in range(0, len(blocks), most):
            some = blocks[first : first + most]
            runs = len(some) * of_a_pair
            tiles = -(-runs // tile.runs) * -(-words // tile.words)
            self._copy_boxes[(min(tiles, self.thread_blocks),)](
                some,
                rows[first : first + most],
                tables[0],
                tables[1],
                host,
                row_stride,
                box.block_stride,
                runs,
                words,
                len(box.bases),
                *box.times,
                *box.device_strides,
                *box.host_strides,
                TO_HOST=to_host,
                UNIT=unit,
                RUNS=tile.runs,
                WORDS=tile.words,
                num_warps=WARPS,
                num_stages=1,
                enable_fp_fusion=True,  # there are no floats; left out, Triton 3.9 warns
            )
