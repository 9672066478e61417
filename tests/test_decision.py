"""The conflict rule: votes at the highest priority at which somebody does not abstain."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.decision import CastVote, LayoutDecision, Vote, decide
from kvpolicy.errors import LayoutError, OptionError, PolicyConflictError
from kvpolicy.layout import KVCacheLayout

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC


def cast(plugin, priority, answer, reason=""):
    return CastVote(plugin=plugin, priority=priority, answer=answer, reason=reason)


def outcome(votes, layout=HND):
    """A decision, or the error of a conflict as a value that can be compared."""
    try:
        return decide(votes, layout)
    except PolicyConflictError as error:
        return str(error), error.plugin_names, error.priority


ballots = st.lists(
    st.builds(
        CastVote,
        plugin=st.sampled_from("abcdef"),
        priority=st.integers(-1, 1),
        answer=st.sampled_from([True, False, None, None]),
        reason=st.sampled_from(["", "because"]),
    ),
    max_size=6,
    unique_by=lambda vote: vote.plugin,
)


@given(ballots, st.sampled_from(KVCacheLayout))
def test_the_rule(votes, layout):
    """Level by level from the top, as one would count by hand."""
    for priority in (1, 0, -1):
        said = {v.plugin: v.answer for v in votes if v.priority == priority}
        said = {plugin: answer for plugin, answer in said.items() if answer is not None}
        if len(set(said.values())) == 2:
            with pytest.raises(PolicyConflictError) as error:
                decide(votes, layout)
            assert error.value.plugin_names == tuple(sorted(said))
            assert error.value.priority == priority
            return
        if said:
            expected = (said[min(said)], min(said))
            break
    else:
        expected = (False, None)
    decision = decide(votes, layout)
    assert (decision.cross_layer_blocks, decision.decided_by) == expected
    assert decision.layout is (layout.slab if expected[0] else layout.order)
    assert {*decision.votes} == {*votes}  # every vote is kept, abstentions too
    ranks = [(-vote.priority, vote.plugin) for vote in decision.votes]
    assert ranks == sorted(ranks)


@given(ballots, st.data())
def test_c6_invariant_1_the_order_of_votes_decides_nothing(votes, data):
    assert outcome(votes) == outcome(data.draw(st.permutations(votes)))


def test_c6_all_permutations_of_five_votes():
    votes = [
        cast("canonical", 100, None, "not requested"),
        cast("slab", 150, None),
        cast("cross-layer", 50, True, "uniform"),
        cast("theirs", 50, True),
        cast("grumbler", -5, False, "dislikes slabs"),
    ]
    found = {decide(order, HND) for order in itertools.permutations(votes)}
    assert len(found) == 1
    assert found.pop().decided_by == "cross-layer"


def test_c6_opposite_votes_at_one_priority_name_both_and_the_switch():
    votes = [cast("yes-man", 0, True, "copies are faster"), cast("no-man", 0, False)]
    for order in itertools.permutations(votes):
        with pytest.raises(PolicyConflictError) as error:
            decide(order, HND)
        assert str(error.value) == (
            "opposite votes at priority 0: 'no-man' votes per-layer; 'yes-man' votes cross-layer "
            "(copies are faster). Raise one of them, for instance KVPOLICY_PRIORITY=no-man=1 or "
            "--priority no-man=1, or, if one is not built in, leave it out of KVPOLICY_PLUGINS"
        )
        assert error.value.plugin_names == ("no-man", "yes-man")
        assert error.value.priority == 0


def test_the_advice_of_a_conflict_settles_it():
    votes = [cast("a", 3, False), cast("b", 3, True)]
    raised = [cast("a", 4, False), votes[1]]
    with pytest.raises(PolicyConflictError, match="KVPOLICY_PRIORITY=a=4"):
        decide(votes, HND)
    assert decide(raised, HND).decided_by == "a"


def test_c1_canonical_outvotes_a_slab():
    slab, canonical = cast("third", 0, True), cast("canonical", 100, False, "canonical requested")
    with_it = decide([slab, canonical], HND)
    assert (with_it.cross_layer_blocks, with_it.layout) == (False, HND)
    assert with_it.decided_by == "canonical"
    assert slab in with_it.votes  # disagreement below is recorded, not an error
    without = decide([slab, cast("canonical", 100, None, "not requested")], HND)
    assert (without.cross_layer_blocks, without.decided_by) == (True, "third")


@pytest.mark.parametrize("votes", [[], [cast("a", 5, None), cast("b", 0, None, "no opinion")]])
def test_nobody_votes_means_per_layer_decided_by_nobody(votes):
    decision = decide(votes, NHD)
    assert (decision.cross_layer_blocks, decision.layout) == (False, NHD)
    assert decision.decided_by is None
    assert len(decision.votes) == len(votes)


def test_no_is_an_answer_and_not_an_abstention():
    decision = decide([cast("high", 9, False), cast("low", 1, True)], HND)
    assert (decision.cross_layer_blocks, decision.decided_by) == (False, "high")


def test_conflicts_below_the_deciding_priority_are_no_error():
    votes = [cast("top", 9, True), cast("a", 1, True), cast("b", 1, False)]
    assert decide(votes, HND).decided_by == "top"


@pytest.mark.parametrize(
    ("layout", "answer", "expected"),
    [
        (HND, True, KVCacheLayout.BLHNC),
        (NHD, True, KVCacheLayout.BLNHC),
        (KVCacheLayout.BHLNC, True, KVCacheLayout.BLHNC),
        (KVCacheLayout.LHBNC, False, HND),
        (KVCacheLayout.BLNHC, False, NHD),
    ],
)
def test_the_decided_layout_keeps_the_engine_s_order(layout, answer, expected):
    assert decide([cast("a", 0, answer)], layout).layout is expected


def test_a_vote_takes_its_reason_by_position():
    assert Vote(True, "fits") == Vote(answer=True, reason="fits")
    assert Vote(None).reason == ""


@pytest.mark.parametrize("answer", [1, 0, "yes", "", [], Vote])
def test_a_vote_answers_true_false_or_none(answer):
    with pytest.raises(OptionError, match="a vote answers True, False or None, not"):
        Vote(answer)


@pytest.mark.parametrize("reason", [None, 3, ["x"]])
def test_a_reason_is_a_sentence(reason):
    with pytest.raises(OptionError, match="a vote's reason is a sentence, not"):
        Vote(True, reason)


def test_a_decision_s_layout_exists():
    with pytest.raises(LayoutError, match="no KV cache layout"):
        LayoutDecision(cross_layer_blocks=False, layout="XYZ")
    assert LayoutDecision(cross_layer_blocks=False, layout="nhd").layout is NHD
