"""Chunks and first-block offsets as slots."""

from __future__ import annotations

import pytest
from kvpolicy_vllm.errors import VLLMTransferError
from kvpolicy_vllm.jobs import record_key, split_job


def pairs(parts):
    return [(p.group, p.block_ids.tolist(), p.slots.tolist()) for p in parts]


def test_one_block_per_chunk():
    parts = split_job([7, 3], [2], [4], [10, 2], [b"a", b"b"], 1)
    assert pairs(parts) == [(0, [7, 3], [10, 2])]
    assert parts[0].keys == (record_key(b"a", 0), record_key(b"b", 0))


def test_a_group_may_enter_its_first_chunk_in_the_middle():
    """Block 5 of the request is place 1 of a chunk of 4; chunk 9 has slots 36 to 39."""
    parts = split_job([11, 12, 13, 14], [4], [5], [9, 2], [b"a", b"b"], 4)
    assert pairs(parts) == [(0, [11, 12, 13, 14], [37, 38, 39, 8])]
    assert parts[0].keys[-1] == record_key(b"b", 0)


def test_groups_follow_each_other_and_may_be_empty():
    parts = split_job([1, 2, 3], [1, 0, 2], [0, 5, 3], [4, 5, 6], [b"a", b"b", b"c"], 2)
    assert pairs(parts) == [(0, [1], [8]), (2, [2, 3], [11, 12])]


def test_nothing_is_no_part():
    assert split_job([], [0], [0], [], [], 2) == []


@pytest.mark.parametrize(
    ("blocks", "sizes", "chunks", "keys"),
    [
        ([1, 2, 3], [3], [0], [b"a"]),  # too few chunks
        ([1], [1], [0, 1], [b"a", b"b"]),  # too many
        ([1, 2], [1], [0], [b"a"]),  # blocks of no group
        ([1], [1], [0], []),  # chunks without names
    ],
)
def test_blocks_and_chunks_that_do_not_fit_are_refused(blocks, sizes, chunks, keys):
    with pytest.raises(VLLMTransferError, match="do not fill"):
        split_job(blocks, sizes, [0], chunks, keys, 2)


def test_a_chunks_records_have_names_of_their_own():
    assert len({record_key(b"a", 0), record_key(b"a", 1), record_key(b"b", 0)}) == 3
