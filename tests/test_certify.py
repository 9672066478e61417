"""Certification over every rank: the recorded tables, exact tiling, and every refusal."""

import importlib
import itertools
import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.boxes import Box, Dim
from kvpolicy.certify import Certificate, canonical_order_of, certify
from kvpolicy.errors import REFUSAL_CODES, GeometryError, LayoutError, Refusal
from kvpolicy.grid import ParallelGrid
from kvpolicy.layout import KVCacheLayout
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "canonical-v1.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]


def attention(**changes):
    sizes = {"block_size": 4, "total_kv_heads": 4, "head_size": 8, "itemsize": 2}
    return AttentionSpec(**{**sizes, **changes})


def recorded_spec(case):
    if case["kv_packing"] == "latent":
        return LatentSpec(
            block_size=case["block_size"], row_bytes=case["head_size"] * case["itemsize"]
        )
    sizes = ("kv_packing", "total_kv_heads", "block_size", "head_size", "itemsize")
    return AttentionSpec(**{key: case[key] for key in sizes})


def recorded_certificate(case):
    degrees = ("tp", "dcp", "pcp", "cp_interleave")
    grid = ParallelGrid(**{key: case[key] for key in degrees})
    return certify(recorded_spec(case), grid, case["layout"])


@pytest.fixture
def patch_mappings(monkeypatch):
    """Puts something between the mapping of a page and its proof; nothing proved before counts."""
    module = importlib.import_module("kvpolicy.certify")
    right = module.page_mapping

    def patch(change):
        def mapping(spec, grid, rank, *more):
            return change(right(spec, grid, rank, *more), rank)

        monkeypatch.setattr(module, "page_mapping", mapping)

    module._prove.cache_clear()
    yield patch
    module._prove.cache_clear()


@pytest.fixture
def mapped(patch_mappings):
    """The ranks whose pages were mapped, in order."""
    calls = []
    patch_mappings(lambda found, rank: calls.append(rank) or found)
    return calls


# --- byte-identical to canonical format v1 -------------------------------------------------------


def test_336_tables_are_recorded():
    assert len(RECORDED) == 336
    assert all(case["certified"] for case in RECORDED)


@pytest.mark.parametrize("index", range(0, 336, 12))
def test_recorded_tables_are_ours_byte_for_byte(index):
    """Twelve lines each; ours are portable under context parallelism too."""
    for case in RECORDED[index : index + 12]:
        proof = recorded_certificate(case)
        ours = [
            {
                "local_page_bytes": found.local_page_bytes,
                "canonical_page_bytes": found.canonical_page_bytes,
                "num_writers": found.num_writers,
                "writer_index": found.writer_index,
                "portable": found.portable,
                "runs": [list(run) for run in found.byte_runs()],
            }
            for found in (proof.mapping(rank.rank) for rank in proof.grid.ranks())
        ]
        assert ours == [{**rank, "portable": True} for rank in case["ranks"]]


def test_every_recorded_page_is_a_box_of_at_most_two_outer_dimensions():
    dims = {
        len(found.box.dims) for case in RECORDED for found in recorded_certificate(case).mappings
    }
    assert dims == {0, 1, 2}


# --- invariant 2: exact tiling -------------------------------------------------------------------
# The oracle deals heads and tokens out by hand and numbers every byte by its coordinates (half,
# head, token, byte of the row); it takes nothing from the code that it checks.


def heads_of(tp_rank, total, tp):
    """Heads dealt in order: so many a rank, or so many ranks a head."""
    if total >= tp:
        return [head for head in range(total) if head // (total // tp) == tp_rank]
    return [tp_rank // (tp // total)]


def tokens_of(cp_rank, block_size, cp, interleave):
    """Chunks of ``interleave`` tokens dealt round robin."""
    return [t for t in range(block_size * cp) if t // interleave % cp == cp_rank]


def in_order(coordinates, heads_first):
    """(half, head, token, byte) numbers in the order of a page."""
    return (coordinates if heads_first else coordinates.swapaxes(1, 2)).reshape(-1)


def oracle(spec, grid, layout, order):
    """The canonical page, and each rank's page, as sequences of the numbers of their bytes."""
    cp = grid.dcp * grid.pcp
    shape = (spec.halves, spec.total_kv_heads, spec.block_size * cp, spec.row_bytes)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    pages = []
    for pcp_rank, tp_rank in itertools.product(range(grid.pcp), range(grid.tp)):
        cp_rank = pcp_rank * grid.dcp + tp_rank % grid.dcp
        interleave = grid.cp_interleave if cp > 1 else spec.block_size
        heads = heads_of(tp_rank, spec.total_kv_heads, grid.tp)
        tokens = tokens_of(cp_rank, spec.block_size, cp, interleave)
        pages.append(
            in_order(
                numbers[:, heads][:, :, tokens],
                "HN" in layout or "HBN" in layout or "HLN" in layout,
            )
        )
    return in_order(numbers, order == "LBHNC"), pages


@st.composite
def questions(draw):
    """(spec, grid, layout, canonical order) that can be certified."""
    layout = draw(st.sampled_from(KVCacheLayout))
    kernel, ratio = draw(st.integers(1, 4)), 1
    if layout.layer_compact:
        ratio = draw(st.integers(1, 3))
    block = kernel * ratio
    replicas, shards = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dcp = draw(st.sampled_from([n for n in range(1, 5) if replicas % n == 0]))
    # Chunks that lie inside kernel blocks; any divisor where there is no such thing.
    interleave = draw(st.sampled_from([n for n in range(1, kernel + 1) if kernel % n == 0]))
    grid = ParallelGrid(
        tp=shards * replicas,
        pp=draw(st.integers(1, 2)),
        dcp=dcp,
        pcp=draw(st.integers(1, 3)),
        cp_interleave=interleave,
    )
    padding = draw(st.integers(0, 2)) * ratio if layout.block_compact else 0
    if draw(st.booleans()):
        split = layout.block_compact and draw(st.booleans())
        size = draw(st.integers(1, 3))
        spec = AttentionSpec(
            block_size=block,
            total_kv_heads=shards if replicas > 1 else shards * draw(st.integers(1, 3)),
            head_size=size,
            v_head_size=size if split else draw(st.integers(1, 3)),
            itemsize=draw(st.integers(1, 2)),
            scale_bytes=draw(st.integers(0, 2)),
            kv_packing="split" if split else "packed",
            kernel_block_size=kernel,
            page_padding=padding,
        )
    else:
        grid = attrs.evolve(grid, tp=replicas)
        spec = LatentSpec(
            block_size=block,
            row_bytes=draw(st.integers(1, 4)),
            kernel_block_size=kernel,
            page_padding=padding,
        )
    return spec, grid, layout, draw(st.sampled_from([None, HND, NHD]))


class OfLatent:
    """A latent seen as attention with one head, for the oracle."""

    def __init__(self, spec):
        self.block_size, self.row_bytes = spec.block_size, spec.row_bytes
        self.halves = self.total_kv_heads = 1


@settings(max_examples=5 * settings.default.max_examples)  # the promise of the whole library
@given(questions())
def test_invariant_2_every_byte_once_and_where_its_coordinates_say(question):
    """The elected writers tile the canonical page; a rank's runs are its page, no padding."""
    spec, grid, layout, order = question
    proof = certify(spec, grid, layout, order)
    assert isinstance(proof, Certificate), proof
    assert proof.portable
    plain = OfLatent(spec) if isinstance(spec, LatentSpec) else spec
    canonical, pages = oracle(plain, grid, layout.value, (order or layout.order).value)
    num_writers = {m.num_writers for m in proof.mappings}
    assert len(num_writers) == 1
    written = [np.zeros(len(canonical), int) for _ in range(*num_writers)]
    for rank, local in enumerate(pages):
        mapping = proof.mapping(rank)
        assert mapping.local_page_bytes == len(local)
        assert mapping.canonical_page_bytes == len(canonical)
        read = np.zeros(len(local), int)
        last = None
        for at, to, size in mapping.byte_runs():
            assert local[at : at + size].tolist() == canonical[to : to + size].tolist()
            read[at : at + size] += 1
            written[mapping.writer_index][to : to + size] += 1
            assert last is None or last[1] <= to  # sorted ...
            assert last != (at, to)  # ... and merged
            last = (at + size, to + size)
        assert (read == 1).all()
    for once in written:
        assert (once == 1).all()


@given(st.integers(1, 9), st.integers(0, 4), st.integers(1, 4), st.integers(1, 3))
def test_invariant_2_states_lie_side_by_side(state_bytes, padding, tp, pcp):
    proof = certify(
        StateSpec(state_bytes=state_bytes, page_padding=padding), ParallelGrid(tp=tp, pcp=pcp)
    )
    runs = [run for mapping in proof.mappings for run in mapping.byte_runs()]
    assert runs == [(0, rank * state_bytes, state_bytes) for rank in range(tp * pcp)]
    assert not proof.portable
    assert {(m.num_writers, m.writer_index) for m in proof.mappings} == {(1, 0)}


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 8),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.sampled_from(KVCacheLayout),
    st.sampled_from(["packed", "split", "latent"]),
    st.sampled_from([0, 0, 6]),
)
def test_whatever_is_asked_is_proved_or_refused_with_a_sentence(
    block, kernel, heads, interleave, degrees, layout, packing, padding
):
    tp, dcp, pcp = degrees
    grid = ParallelGrid(tp=tp * dcp, dcp=dcp, pcp=pcp, cp_interleave=interleave)
    sizes = {"block_size": block, "kernel_block_size": kernel, "page_padding": padding}
    if packing == "latent":
        spec = LatentSpec(row_bytes=8, **sizes)
    else:
        spec = attention(total_kv_heads=heads, kv_packing=packing, **sizes)
    answer = certify(spec, grid, layout)
    if isinstance(answer, Refusal):
        assert answer.code in REFUSAL_CODES
        assert answer.code != "not-tiling"
        assert "; " in answer.detail or ", but " in answer.detail  # what was found; what to do
    else:
        assert len(answer.mappings) == grid.tp * grid.pcp


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "grid", "layout", "code", "words"),
    [
        (
            attention(),
            {"tp": 3},
            HND,
            "heads-not-divisible",
            ["4 KV heads", "over tp 3", "possible tp: 1, 2, 4 and multiples of 4"],
        ),
        (
            attention(total_kv_heads=12),
            {"tp": 8},
            HND,
            "heads-not-divisible",
            ["12 KV heads", "over tp 8"],
        ),
        (
            attention(),
            {"tp": 4, "dcp": 2},
            HND,
            "dcp-not-divisible",
            ["dcp 2", "have 1 such rank(s)", "choose a dcp that divides 1"],
        ),
        (
            attention(),
            {"pcp": 2, "cp_interleave": 3},
            HND,
            "interleave-not-dividing",
            ["cp_interleave 3 does not divide block size 4", "choose a divisor of 4"],
        ),
        (
            attention(block_size=12, kernel_block_size=4),
            {"pcp": 2, "cp_interleave": 6},
            HND,
            "interleave-crosses-kernel-block",
            ["cp_interleave 6", "kernel blocks of 4", "one divides the other"],
        ),
        (
            attention(kernel_block_size=3),
            {},
            HND,
            "kernel-block-not-dividing",
            ["a kernel block of 3 tokens does not divide the block of 4"],
        ),
        (
            attention(kernel_block_size=2, page_padding=3),
            {},
            HND,
            "kernel-block-not-dividing",
            ["a padding of 3 B cannot be shared evenly by the 2 kernel blocks"],
        ),
        (
            attention(kv_packing="split"),
            {},
            KVCacheLayout.BHLNC,
            "kv-halves-need-block-compact",
            ["one run of bytes, which BHLNC does not give", "use LBHNC or BLHNC, or packed K/V"],
        ),
        (
            attention(page_padding=8),
            {},
            KVCacheLayout.LHBNC,
            "padding-needs-block-compact",
            ["padded by 8 B", "use LBHNC or BLHNC"],
        ),
        (
            attention(kernel_block_size=2),
            {},
            KVCacheLayout.BLNHC,
            "kernel-split-needs-layer-compact",
            ["blocks of 2 tokens", "use LBNHC, or make the two sizes equal"],
        ),
        (
            attention(block_size=65_536, total_kv_heads=65),
            {},
            HND,
            "proof-too-large",
            ["4,259,840 byte runs", "the limit is 4,194,304", "order that is kept"],
        ),
    ],
)
def test_refusals_say_what_was_found_and_what_to_do(spec, grid, layout, code, words):
    order = NHD if code == "proof-too-large" else None
    refusal = certify(spec, ParallelGrid(**grid), layout, order)
    assert isinstance(refusal, Refusal)
    assert refusal.code == code
    for word in words:
        assert word in refusal.detail


def test_chunks_of_whole_kernel_blocks_are_taken():
    """Interleave 4 over kernel blocks of 2: neither straddles the other."""
    spec = attention(block_size=8, kernel_block_size=2)
    assert isinstance(certify(spec, ParallelGrid(pcp=2, cp_interleave=4)), Certificate)


# A proof that cannot fail proves nothing: each of these mappings is wrong in one way.


def shift(m):
    return attrs.evolve(m, box=m.box.moved(to_by=1))


def repeat(m):
    return attrs.evolve(m, box=attrs.evolve(m.box, from_offset=0, to_offset=0))


def halve(m):
    return attrs.evolve(m, box=Box(m.box.size // 2, m.box.dims, m.box.from_offset, m.box.to_offset))


def overlap_here(m):
    dims = tuple(Dim(n, 0, to) for n, _, to in m.box.dims)
    return attrs.evolve(m, box=attrs.evolve(m.box, dims=dims))


@pytest.mark.parametrize(
    "wrong",
    [
        shift,
        repeat,
        halve,
        overlap_here,
        lambda m: attrs.evolve(m, writer_index=0),
        lambda m: attrs.evolve(m, writer_index=m.writer_index + 1),
        lambda m: attrs.evolve(m, num_writers=3),
        lambda m: attrs.evolve(m, canonical_page_bytes=m.canonical_page_bytes * 2),
    ],
)
@pytest.mark.parametrize("ranks", [{7}, set(range(8))], ids=["one rank", "every rank"])
def test_a_wrong_mapping_is_not_proved(patch_mappings, wrong, ranks):
    """4 heads at TP8: two writers of each page."""
    patch_mappings(lambda found, rank: wrong(found) if rank.rank in ranks else found)
    refusal = certify(attention(), ParallelGrid(tp=8), NHD)
    assert isinstance(refusal, Refusal)
    assert refusal.code == "not-tiling"


def test_a_proof_that_fails_says_that_it_is_our_fault(patch_mappings):
    patch_mappings(lambda found, rank: shift(found))
    refusal = certify(attention(), ParallelGrid(tp=2), NHD)
    assert refusal.code == "not-tiling"
    assert "the pages of the 2 ranks do not tile the canonical page of 512 B" in refusal.detail
    assert "please report it" in refusal.detail


@pytest.mark.parametrize("spec", [None, "packed", AttentionSpec, {"block_size": 4}])
def test_only_a_spec_is_certified(spec):
    with pytest.raises(GeometryError, match="certify takes a layer spec, not"):
        certify(spec, ParallelGrid())


@pytest.mark.parametrize("grid", [None, 2, (2, 1), ParallelGrid])
def test_only_on_a_grid(grid):
    with pytest.raises(GeometryError, match="certify takes a ParallelGrid, not"):
        certify(attention(), grid)


@pytest.mark.parametrize("order", ["BLHNC", KVCacheLayout.BHLNC, "LHBNC"])
def test_a_canonical_order_is_hnd_or_nhd(order):
    with pytest.raises(LayoutError, match=r"a canonical order is LBHNC \(HND\) or LBNHC \(NHD\), "):
        certify(attention(), ParallelGrid(), HND, order)
    with pytest.raises(LayoutError, match=f"no KV cache layout '{order}x'"):
        certify(attention(), ParallelGrid(), f"{order}x")


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_no_order_means_the_layout_s(layout):
    assert canonical_order_of(layout, None) is layout.order
    assert canonical_order_of(layout, "nhd") is NHD


# --- once, and for every stage -------------------------------------------------------------------


def test_identical_layers_are_proved_once(mapped):
    """94 layers at TP8: eight pages are mapped, not 752."""
    proofs = [certify(attention(), ParallelGrid(tp=8)) for _ in range(94)]
    assert len(mapped) == 8
    assert len({id(proof.mappings) for proof in proofs}) == 1


def test_cost_grows_with_distinct_specs(mapped):
    for layer in range(94):
        certify(attention(total_kv_heads=[4, 8, 16][layer % 3]), ParallelGrid(tp=4))
    assert len(mapped) == 3 * 4


def test_stages_share_a_proof(mapped):
    one, two = (certify(attention(), ParallelGrid(tp=2, pp=pp)) for pp in (1, 2))
    assert len(mapped) == 2
    assert one.mappings is two.mappings
    assert one != two  # each knows its own ranks
    assert [two.mapping(rank).box for rank in (0, 1, 2, 3)] == [m.box for m in one.mappings] * 2


def test_refusals_are_given_again(mapped):
    refusals = {certify(attention(), ParallelGrid(tp=3)) for _ in range(9)}
    assert len(refusals) == 1
    assert len(mapped) == 1


def test_a_mapping_is_asked_by_number_or_by_rank():
    grid = ParallelGrid(tp=2, pp=2)
    proof = certify(attention(), grid)
    assert proof.mapping(3) is proof.mapping(grid.rank(3)) is proof.mapping(1)


@pytest.mark.parametrize("rank", [-1, 4, True, "0", None])
def test_a_rank_outside_the_grid_is_refused(rank):
    with pytest.raises(GeometryError, match="is not one of this grid's 4 ranks"):
        certify(attention(), ParallelGrid(tp=2, pp=2)).mapping(rank)


def test_head_counts_may_differ_per_layer():
    """16 and 4 heads in one model at TP8: each by itself."""
    grid = ParallelGrid(tp=8)
    wide, narrow = (certify(attention(total_kv_heads=n), grid) for n in (16, 4))
    assert (wide.mapping(7).num_writers, narrow.mapping(7).num_writers) == (1, 2)
    assert wide.portable
    assert narrow.portable
