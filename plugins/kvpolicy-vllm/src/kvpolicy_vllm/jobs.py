"""Chunks and block offsets of a vLLM job, as pairs of block and slot for each group."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from kvpolicy_vllm.errors import VLLMTransferError

Ids = NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """One group's share of a job.

    Attributes:
        group: which of the offloaded groups.
        block_ids, slots: int64, paired.
        keys: the name of each slot's record.
    """

    group: int
    block_ids: Ids
    slots: Ids
    keys: tuple[bytes, ...]


def record_key(chunk_key: bytes, place: int) -> bytes:
    """The name of a block's record: its chunk's key and its place in the chunk."""
    return chunk_key + place.to_bytes(4, "big")


def split_job(
    block_ids: Sequence[int] | NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    chunk_ids: Sequence[int] | NDArray[np.integer],
    chunk_keys: Sequence[bytes],
    blocks_per_chunk: int,
) -> list[Part]:
    """Pairs the blocks of a job with slots.

    Args:
        block_ids: the engine's blocks, group after group.
        group_sizes: how many of them belong to each group.
        block_indices: each group's first block, counted from the request's start; a group may
            enter its first chunk in the middle.
        chunk_ids: host chunks, group after group.
        chunk_keys: their names.
        blocks_per_chunk: slots of a chunk.

    Raises:
        VLLMTransferError: blocks and chunks that do not fit together.
    """
    blocks = np.asarray(block_ids, dtype=np.int64)
    chunks = np.asarray(chunk_ids, dtype=np.int64)
    parts: list[Part] = []
    first_block = first_chunk = 0
    for group, (size, index) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if not size:
            continue
        places = index % blocks_per_chunk + np.arange(size, dtype=np.int64)
        nth = first_chunk + places // blocks_per_chunk
        last = int(nth[-1]) + 1
        if last > min(len(chunks), len(chunk_keys)):
            break
        offsets = places % blocks_per_chunk
        parts.append(
            Part(
                group=group,
                block_ids=blocks[first_block : first_block + size],
                slots=chunks[nth] * blocks_per_chunk + offsets,
                keys=tuple(
                    record_key(chunk_keys[n], place)
                    for n, place in zip(nth.tolist(), offsets.tolist(), strict=True)
                ),
            )
        )
        first_block, first_chunk = first_block + size, last
    if first_block != len(blocks) or first_chunk != len(chunks) or len(chunks) != len(chunk_keys):
        raise VLLMTransferError(
            f"{len(blocks)} blocks of groups {list(group_sizes)}, from blocks "
            f"{list(block_indices)} on, do not fill {len(chunks)} chunks of {blocks_per_chunk} "
            f"blocks with {len(chunk_keys)} keys"
        )
    return parts
