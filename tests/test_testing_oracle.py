"""The kit's oracle says what was worked out by hand; its memory is what an engine's would be."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy as kv
from kvpolicy.testing import memory, oracle, strategies

# Block size 4, 4 heads, head size 8, 2 B an element, packed: a row has (8 + 8) * 2 = 32 B.
SPEC = kv.AttentionSpec(block_size=4, total_kv_heads=4, head_size=8, itemsize=2)
SPLIT = kv.AttentionSpec(
    block_size=4, total_kv_heads=4, head_size=8, itemsize=2, kv_packing="split"
)
LATENT = kv.LatentSpec(block_size=4, row_bytes=8)


def place(grid, rank):
    return oracle.places(grid)[rank]


def runs(spec, grid, rank, heads_first):
    """(offset in the canonical page, bytes) of what a rank holds, neighbouring rows joined."""
    whole = oracle.page_offsets(spec, grid, heads_first)
    heads = list(oracle.heads_of(spec, grid, place(grid, rank)))
    tokens = list(oracle.tokens_of(spec, grid, place(grid, rank)))
    found = []
    for at in sorted(whole[:, heads][:, :, tokens].reshape(-1).tolist()):
        if found and sum(found[-1]) == at:
            found[-1] = (found[-1][0], found[-1][1] + oracle.row_bytes(spec))
        else:
            found.append((at, oracle.row_bytes(spec)))
    return found


# Worked by hand. (canonical offset, bytes); heads 2 and 3 are rank 1's at TP 2.


@pytest.mark.parametrize(
    ("spec", "grid", "rank", "heads_first", "expected"),
    [
        # Token t, head 2 is at (t*4 + 2)*32: 64, 192, 320, 448; head 3 follows it.
        (SPEC, {"tp": 2}, 1, False, [(64, 64), (192, 64), (320, 64), (448, 64)]),
        # Head 2 is at 2*4*32 = 256, then its tokens, then head 3.
        (SPEC, {"tp": 2}, 1, True, [(256, 256)]),
        (SPEC, {}, 0, False, [(0, 512)]),
        (SPEC, {}, 0, True, [(0, 512)]),
        # TP 8 on 4 heads: rank 5 is the second of two that hold head 2.
        (SPEC, {"tp": 8}, 5, False, [(64, 32), (192, 32), (320, 32), (448, 32)]),
        # Rows of one half have 16 B, a half 4*4*16 = 256 B; rank 0 has heads 0 and 1.
        (
            SPLIT,
            {"tp": 2},
            0,
            False,
            [(0, 32), (64, 32), (128, 32), (192, 32), (256, 32), (320, 32), (384, 32), (448, 32)],
        ),
        # TP 4, DCP 2: rank 3 has every second token of 8, from token 1 on.
        (LATENT, {"tp": 4, "dcp": 2}, 3, False, [(8, 8), (24, 8), (40, 8), (56, 8)]),
    ],
)
def test_a_rank_s_part_of_a_canonical_page(spec, grid, rank, heads_first, expected):
    assert runs(spec, kv.ParallelGrid(**grid), rank, heads_first) == expected


@pytest.mark.parametrize(
    ("interleave", "expected"),
    [(1, [(0, 2, 4, 6), (1, 3, 5, 7)]), (2, [(0, 1, 4, 5), (2, 3, 6, 7)])],
)
def test_tokens_are_dealt_out_in_chunks(interleave, expected):
    grid = kv.ParallelGrid(pcp=2, cp_interleave=interleave)
    assert [oracle.tokens_of(LATENT, grid, place(grid, r)) for r in (0, 1)] == expected


def test_heads_are_split_or_replicated():
    four, eight = kv.ParallelGrid(tp=2), kv.ParallelGrid(tp=8)
    assert [oracle.heads_of(SPEC, four, p) for p in oracle.places(four)] == [(0, 1), (2, 3)]
    held = [oracle.heads_of(SPEC, eight, p) for p in oracle.places(eight)]
    assert held == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]


def test_holders_of_the_same_bytes_take_turns_at_writing():
    """TP 8 on 4 heads: ranks 4 and 5 hold head 2; 4 writes even slots, 5 writes odd ones."""
    grid = kv.ParallelGrid(tp=8)
    assert oracle.holders(SPEC, grid, place(grid, 5)) == (4, 5)
    assert [oracle.writes(SPEC, grid, place(grid, 5), slot) for slot in range(4)] == [
        False,
        True,
        False,
        True,
    ]
    latent = kv.ParallelGrid(tp=4, dcp=2)  # ranks 1 and 3 have the odd tokens
    assert oracle.holders(LATENT, latent, place(latent, 3)) == (1, 3)


def test_ranks_are_counted_as_the_library_counts_them():
    grid = kv.ParallelGrid(tp=4, pp=2, dcp=2, pcp=2)
    mine = [(p.rank, p.stage, p.pcp, p.tp) for p in oracle.places(grid)]
    assert mine == [(r.rank, r.pp_rank, r.pcp_rank, r.tp_rank) for r in grid.ranks()]


def context_of(spec, layers=("a", "b"), **wishes):
    geometry = kv.CacheGeometry(layers=dict.fromkeys(layers, spec), num_blocks=3)
    return kv.PolicyContext(geometry=geometry, **wishes)


def test_a_record_of_two_rows_written_out():
    """2 heads of 2 tokens, rows of 2 B: NHD goes token by token, HND head by head."""
    spec = kv.AttentionSpec(block_size=2, total_kv_heads=2, head_size=1, itemsize=1)
    for order, path in (("NHD", ["00", "10", "01", "11"]), ("HND", ["00", "01", "10", "11"])):
        context = context_of(spec, "a", layout=order, canonical=True)
        layer = oracle.number_of("a")
        expected = [
            int(oracle.values(layer, 7, 0, int(head), int(token), byte))
            for head, token in path
            for byte in (0, 1)
        ]
        group = context.geometry.groups[0]
        assert oracle.record(context, group, 7).tolist() == expected
        told = oracle.coordinates(context, group, 3)
        head, token = path[1]
        assert told == f"layer 'a', half 0, head {head}, token {token}, byte 1"


def test_values_of_coordinates_tell_every_coordinate_and_are_never_the_sentinel():
    half, head, token, byte = np.ogrid[:2, :4, :8, :16]
    seen = oracle.values(1, 2, half, head, token, byte)
    assert seen.shape == (2, 4, 8, 16)
    assert seen.max() < 251 <= oracle.SENTINEL
    for axis in range(4):
        assert not np.array_equal(seen, np.roll(seen, 1, axis=axis))
    others = [oracle.values(*n, half, head, token, byte) for n in ((1, 3), (2, 2), (2, 1))]
    assert not any(np.array_equal(seen, other) for other in others)


# The oracle and the library, which share nothing, agree.


@given(strategies.contexts(canonical=True), st.integers(0, 5))
def test_ranks_parts_make_up_the_record(context, slot):
    for group in context.geometry.groups:
        row = np.full(oracle.record_bytes(context, group), oracle.SENTINEL, dtype=np.uint8)
        for one in oracle.places(context.grid):
            oracle.store_part(row, context, group, one, slot, 3)
        np.testing.assert_array_equal(row, oracle.record(context, group, 3))


@given(strategies.contexts())
def test_the_library_s_runs_are_the_oracle_s(context):
    for spec, one in itertools.product(
        {*context.geometry.layers.values()}, oracle.places(context.grid)
    ):
        proof = kv.certify(spec, context.grid, context.layout.order, context.order)
        assert isinstance(proof, kv.Certificate)
        mapping = proof.mapping(one.rank)
        joined = runs(spec, context.grid, one.rank, oracle.stored_order(context))
        mine = [byte for at, size in joined for byte in range(at, at + size)]
        theirs = [b for _, at, size in mapping.byte_runs() for b in range(at, at + size)]
        assert mine == theirs
        turns = oracle.holders(spec, context.grid, one)
        assert (len(turns), turns.index(one.rank)) == (mapping.num_writers, mapping.writer_index)
        names = list(oracle.stage_layers(context, one))
        assert names == list(context.stages[one.stage])


def test_the_oracle_imports_no_more_of_the_library_than_its_values():
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    taken = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("kvpolicy")
        for alias in node.names
    }
    assert taken == {
        "AttentionSpec",
        "CacheGeometry",
        "LatentSpec",
        "LayerGroup",
        "ParallelGrid",
        "PolicyContext",
        "StateSpec",
    }


# Memory.


def decided(context, cross_layer):
    order = context.layout.slab if cross_layer else context.layout.order
    return kv.LayoutDecision(cross_layer_blocks=cross_layer, layout=order)


@pytest.mark.parametrize("slab", ["dimension", "placements", "views", "heads-apart"])
def test_a_slab_s_page_is_where_its_layout_says(slab):
    """Two layers of 2 heads x 2 tokens x 4 B: a page has 16 B, a block of both layers 32 B."""
    spec = kv.AttentionSpec(block_size=2, total_kv_heads=2, head_size=2, itemsize=1)
    context = context_of(spec)
    made = memory.allocate(context, decided(context, True), memory.Allocation(slab=slab, lead=8))
    made.write(context, ["b"], block=1, record=5)
    (whole,) = made.snapshot()
    start = memory.GUARD_BYTES + 8 + 1 * 32
    page = oracle.dense_page(context, "b", made.place, 5)
    if slab == "heads-apart":  # head 0 of a, head 0 of b, head 1 of a, head 1 of b; 8 B each
        places = [*range(start + 8, start + 16), *range(start + 24, start + 32)]
    else:
        places = list(range(start + 16, start + 32))
    expected = np.full(len(whole), oracle.SENTINEL, dtype=np.uint8)
    expected[places] = page
    np.testing.assert_array_equal(whole, expected)


def test_kernel_blocks_and_padding_lie_where_they_should():
    """Blocks of 4 tokens in kernel blocks of 2: rows of 8 B and 2 B of padding, NHD, one head."""
    spec = kv.AttentionSpec(
        block_size=4,
        total_kv_heads=1,
        head_size=2,
        itemsize=1,
        kernel_block_size=2,
        page_padding=4,
    )
    context = context_of(spec, "a", layout="NHD")
    made = memory.allocate(context, decided(context, False))
    made.write(context, ["a"], block=2, record=0)
    page = oracle.dense_page(context, "a", made.place, 0)
    start = memory.GUARD_BYTES + 2 * 20
    whole = made.snapshot()[0]
    np.testing.assert_array_equal(whole[start : start + 8], page[:8])
    assert whole[start + 8 : start + 10].tolist() == [oracle.SENTINEL] * 2
    np.testing.assert_array_equal(whole[start + 10 : start + 18], page[8:])
    assert whole[start + 18 :].tolist() == [oracle.SENTINEL] * (2 + memory.GUARD_BYTES)


def test_differences_are_told_by_coordinates():
    context = context_of(SPEC, "a")
    one, other = (memory.allocate(context, decided(context, False)) for _ in range(2))
    one.write(context, ["a"], 0, 1)
    other.write(context, ["a"], 0, 1)
    assert one.difference(other) is None
    other.views["a"][1, 0, 2, 3, 9] = 0
    assert other.difference(one) == (
        "layer 'a', kernel row 1, half 0, local head 2, local token 3, byte 9 is 0x00, not 0xfd "
        "(sentinel) (1 bytes of the layer differ)"
    )
    one.views["a"][1, 0, 2, 3, 9] = 0
    one.allocations[0][5] = 0
    assert one.difference(other) == (
        "byte 5 of allocation 0, in padding or a guard zone, is 0x00, not 0xfd (sentinel) (1 such "
        "bytes)"
    )


def test_two_byte_elements_are_shown_as_such():
    context = context_of(SPEC, "a", dtype="float16")
    how = memory.Allocation(typed=True, axes=(2, 0, 1, 3))
    made = memory.allocate(context, decided(context, False), how)
    shown = made.caches.tensors["a"]
    assert shown.dtype is torch.float16
    assert list(shown.shape) == [3, 4, 1, 4, 16]  # blocks, tokens, halves, heads, elements
    assert shown.untyped_storage().data_ptr() == made.allocations[0].data_ptr()


# Strategies.


@given(st.data(), strategies.contexts())
def test_the_library_reads_every_cache_that_is_drawn(data, context):
    made = data.draw(strategies.caches(context))
    pages = kv.Registration.from_caches(context, made.caches).pages
    assert list(pages) == list(oracle.stage_layers(context, made.place))


@given(strategies.contexts(certified=False))
def test_what_is_drawn_uncertified_is_a_context_all_the_same(context):
    proofs = [
        kv.certify(spec, context.grid, context.layout.order)
        for spec in context.geometry.layers.values()
    ]
    refused = {proof.code for proof in proofs if isinstance(proof, kv.Refusal)}
    assert refused <= {*kv.REFUSAL_CODES}


@given(strategies.plugin_sets())
def test_plugin_sets_have_the_built_ins_and_voters(plugins):
    names = [info.name for info in plugins.infos if info.status == "active"]
    assert {"canonical", "cross-layer", "direct", "host-copy"} <= {*names}
    assert {name.rsplit("-", 1)[0] for name in names} <= {
        "canonical",
        "cross",
        "direct",
        "host",
        "voter",
    }


def test_a_small_trial_is_told_in_one_line():
    trial = strategies.Trial(
        context=context_of(SPEC, "a", canonical=True, layout="NHD"),
        allocation=memory.Allocation(lead=8),
    )
    assert repr(trial) == (
        "Trial(context=PolicyContext(geometry=CacheGeometry(layers={'a': AttentionSpec("
        "block_size=4, total_kv_heads=4, head_size=8, itemsize=2)}, num_blocks=3), canonical=True, "
        "layout=LBNHC), allocation=Allocation(lead=8))"
    )
