"""World ranks, head shards and token places."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import GeometryError, Refusal
from kvpolicy.grid import MAX_RANKS, ParallelGrid, head_shards


@st.composite
def grids(draw):
    dcp = draw(st.integers(1, 4))
    return ParallelGrid(
        tp=dcp * draw(st.integers(1, 4)),
        pp=draw(st.integers(1, 3)),
        dcp=dcp,
        pcp=draw(st.integers(1, 3)),
        cp_interleave=draw(st.integers(1, 8)),
    )


def test_world_rank_order_is_stages_then_pcp_then_tp():
    """tp 2, pcp 2, pp 2: tp moves fastest, stages outermost."""
    places = [(r.pp_rank, r.pcp_rank, r.tp_rank) for r in ParallelGrid(tp=2, pp=2, pcp=2).ranks()]
    assert places == list(itertools.product(range(2), range(2), range(2)))


def test_dcp_ranks_lie_inside_the_tp_group():
    ranks = ParallelGrid(tp=4, dcp=2, pcp=2).ranks()
    assert [r.dcp_rank for r in ranks] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [r.cp_rank for r in ranks] == [0, 1, 0, 1, 2, 3, 2, 3]


@given(grids())
def test_every_rank_has_a_place_of_its_own(grid):
    ranks = grid.ranks()
    assert [r.rank for r in ranks] == list(range(grid.size))
    assert len({(r.pp_rank, r.pcp_rank, r.tp_rank) for r in ranks}) == grid.size
    assert grid.size == grid.tp * grid.pp * grid.pcp == grid.pp * grid.stage_size
    assert {r.cp_rank for r in ranks} == set(range(grid.cp))
    assert all(grid.rank(r.rank) == r for r in ranks)


@pytest.mark.parametrize("field", ["tp", "pp", "dcp", "pcp", "cp_interleave"])
@pytest.mark.parametrize("value", [True, False, 0, -1, 1.0, "2", None, 10**9])
def test_a_degree_that_cannot_be_is_refused(field, value):
    with pytest.raises(GeometryError, match=rf"ParallelGrid\.{field} "):
        ParallelGrid(**{field: value})


def test_a_number_too_long_to_print_is_refused_all_the_same():
    with pytest.raises(GeometryError, match="not a number of 16,610 bits"):
        ParallelGrid(tp=10**5000)
    with pytest.raises(GeometryError, match="rank a number of 16,610 bits is not one of"):
        ParallelGrid().rank(10**5000)


def test_dcp_that_does_not_divide_tp_is_refused():
    with pytest.raises(GeometryError, match="dcp 3 does not divide tp 4: DCP lives inside the TP"):
        ParallelGrid(tp=4, dcp=3)


def test_a_grid_of_too_many_ranks_is_refused():
    assert ParallelGrid(tp=64, pp=8, pcp=8).size == MAX_RANKS
    with pytest.raises(GeometryError, match="at most 4,096 ranks, not 4,160"):
        ParallelGrid(tp=64, pp=65)


@pytest.mark.parametrize("rank", [-1, 4, True, False, "0", 1.0, None])
def test_what_is_no_rank_is_refused(rank):
    with pytest.raises(GeometryError, match="is not one of this grid's 4 ranks"):
        ParallelGrid(tp=4).rank(rank)


@pytest.mark.parametrize(
    ("heads", "tp", "held"),
    [
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 1, [[0, 1, 2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),  # C17
        (8, 16, [[n // 2] for n in range(16)]),  # C17: replication 2, one head a rank
        (1, 4, [[0], [0], [0], [0]]),  # multi-query, and a latent
    ],
)
def test_c17_which_heads_a_rank_holds(heads, tp, held):
    shards = head_shards(heads, ParallelGrid(tp=tp))
    found = [
        [shards.shard(t) * shards.heads + head for head in range(shards.heads)] for t in range(tp)
    ]
    assert found == held
    assert shards.count * shards.replicas == tp


@given(st.integers(1, 64), st.integers(1, 64))
def test_heads_are_split_or_replicated_evenly_or_refused(heads, tp):
    shards = head_shards(heads, ParallelGrid(tp=tp))
    if heads % tp and tp % heads:
        assert isinstance(shards, Refusal)
        assert shards.code == "heads-not-divisible"
        return
    held = [shards.shard(t) * shards.heads + h for t in range(tp) for h in range(shards.heads)]
    assert sorted(held) == sorted([*range(heads)] * shards.replicas)
    assert shards.replicas == max(1, tp // heads)


def test_a_refusal_of_heads_says_what_was_found_and_what_is_possible():
    refusal = head_shards(12, ParallelGrid(tp=8))
    assert refusal == Refusal(
        "heads-not-divisible",
        "12 KV heads can be neither split nor replicated evenly over tp 8; possible tp: "
        "1, 2, 3, 4, 6, 12 and multiples of 12",
    )


def test_a_refusal_of_dcp_says_what_was_found_and_what_is_possible():
    refusal = head_shards(2, ParallelGrid(tp=4, dcp=4))
    assert refusal.code == "dcp-not-divisible"
    assert "2 KV heads at tp 4 have 2 such rank(s); choose a dcp that divides 2" in refusal.detail


@pytest.mark.parametrize(("heads", "tp", "dcp"), [(1, 4, 2), (1, 4, 4), (2, 4, 2), (4, 4, 1)])
def test_dcp_within_the_replicas_is_taken(heads, tp, dcp):
    assert head_shards(heads, ParallelGrid(tp=tp, dcp=dcp)).replicas % dcp == 0
