"""Ranks that do not fit together are refused on all of them, with the rank that is the reason."""

from __future__ import annotations

import pytest
from kvpolicy_vllm import compat, ranks
from kvpolicy_vllm.errors import VLLMConfigError

import kvpolicy

SPEC = kvpolicy.AttentionSpec(block_size=16, total_kv_heads=4, head_size=8, itemsize=2)


def held(*names, num_blocks=8, machine="here", spec=SPEC):
    layers = dict.fromkeys(names, spec)
    return ranks.Held(machine=machine, num_blocks=num_blocks, stage={"group-0": layers})


def test_two_stages_of_two_ranks_make_one_geometry():
    grid = kvpolicy.ParallelGrid(tp=2, pp=2)
    first, second = held("a.0", "a.1", "a.2"), held("a.3")
    found = ranks.whole_geometry([first, first, second, second], grid)
    assert list(found.layers) == ["a.0", "a.1", "a.2", "a.3"]
    assert (found.stages, found.num_blocks) == ((3, 1), 8)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([held("a.0")], "1 ranks are there.* make 2"),
        ([held("a.0"), held("a.1")], "rank 1 holds other layers or blocks than rank 0"),
        ([held("a.0"), held("a.0", num_blocks=9)], "rank 1 holds other layers or blocks"),
        ([held("a.0"), held("a.0", machine="there")], "run on several machines"),
        (
            [held("a.0", "a.1"), held("a.1", "a.0")],
            "rank 1 holds other layers or blocks than rank 0",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused(others, words):
    with pytest.raises(VLLMConfigError, match=words):
        ranks.whole_geometry(others, kvpolicy.ParallelGrid(tp=2))


def connector(**changes):
    geometry = kvpolicy.CacheGeometry(layers={"a.0": SPEC}, num_blocks=8)
    return kvpolicy.Connector(kvpolicy.PolicyContext(geometry=geometry, **changes), plugins=[])


def test_ranks_that_agree_are_let_through():
    ranks.check_agreement([ranks.identity(connector()), ranks.identity(connector())])


def test_the_rank_that_differs_and_what_differs_are_named():
    one, other = ranks.identity(connector()), ranks.identity(connector(canonical=True))
    with pytest.raises(VLLMConfigError) as refused:
        ranks.check_agreement([one, one, other])
    said = str(refused.value)
    assert f"rank 2 has fingerprint {other['fingerprint']}" in said
    assert (
        "decision (rank 0: [False, 'LBHNC', None], rank 2: [False, 'LBHNC', 'canonical'])" in said
    )
    assert "plugins (" not in said
    assert "formats (rank 0: {'attention': " in said


def test_of_the_plugins_only_those_that_differ_are_named():
    one = ranks.identity(connector())
    other = one | {
        "fingerprint": "other",
        "plugins": (*one["plugins"][1:], "x 1 of x at priority 3"),
    }
    with pytest.raises(VLLMConfigError) as refused:
        ranks.check_agreement([one, other])
    first = one["plugins"][0]
    assert f"plugins (rank 0: {first}, rank 1: x 1 of x at priority 3); give" in str(refused.value)


def test_what_one_rank_cannot_do_no_rank_does(monkeypatch):
    """The other rank's answer comes through the gather; the own error goes there first."""
    told = []

    def gather(value):
        told.append(value)
        return [value, (None, "no memory")]

    monkeypatch.setattr(compat, "gather", gather)
    with pytest.raises(VLLMConfigError, match="rank 1 cannot start: no memory"):
        ranks.on_all_ranks(lambda: 5)
    with pytest.raises(ZeroDivisionError):
        ranks.on_all_ranks(lambda: 1 // 0)
    assert [failed for _, failed in told] == [None, "integer division or modulo by zero"]
