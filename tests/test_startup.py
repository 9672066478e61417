"""Start-up: votes become one decision, plugins that misbehave are out, the winner registers."""

import itertools
import json
import sys
import unittest.mock
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy
from kvpolicy import (
    AttentionSpec,
    BackendCapabilities,
    CacheGeometry,
    CastVote,
    CertificationError,
    Connector,
    KVCacheLayout,
    KVCaches,
    KVPolicyError,
    LatentSpec,
    LayoutDecision,
    OptionError,
    ParallelGrid,
    PluginError,
    PolicyConflictError,
    PolicyContext,
    Registration,
    RegistrationError,
    StateSpec,
    Vote,
    hookimpl,
)
from kvpolicy.decision import decide

DISTS = Path(__file__).parent / "dists"
SPEC = AttentionSpec(block_size=4, total_kv_heads=2, head_size=4, itemsize=2)
BLOCKS = 3


@pytest.fixture
def install(monkeypatch):
    """Installs folders of tests/dists, the first one found first."""

    def put(*cases):
        for case in reversed(cases):
            monkeypatch.syspath_prepend(str(DISTS / case))

    yield put
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def context(layers=3, **changes):
    asked = {
        "geometry": CacheGeometry(
            layers={f"layer.{i}": SPEC for i in range(layers)}, num_blocks=BLOCKS
        ),
        "backend": BackendCapabilities(stride_aware=True),
        "dtype": "bfloat16",
    }
    return PolicyContext(**asked | changes)


def tensors(asked, dtype=torch.bfloat16):
    return {name: torch.zeros(BLOCKS, 2, 4, 8, dtype=dtype) for name in asked.stage_layers}


def slab(asked):
    names = list(asked.stage_layers)
    memory = torch.zeros(BLOCKS, len(names), 2, 4, 8, dtype=torch.bfloat16)
    return KVCaches.from_slab(memory, names, layer_dim=1)


class Voter:
    """Votes; says so in a log."""

    def __init__(self, name, answer, priority=0, log=None):
        self.name = name
        self.answer = answer
        self.priority = priority
        self.log = [] if log is None else log

    @hookimpl
    def prefer_cross_layer_blocks(self):
        self.log.append(("vote", self.name))
        return acted(self.answer)


class Registrar:
    """Registers; says so in a log."""

    def __init__(self, name, answer, priority=0, log=None):
        self.name = name
        self.registers = answer
        self.priority = priority
        self.log = [] if log is None else log

    @hookimpl
    def register_layers(self, context, caches):
        self.log.append(("register", self.name))
        answer = acted(self.registers)
        if answer in ("all", "half"):
            whole = Registration.from_caches(context, caches)
            if answer == "all":
                return whole
            return Registration(pages=dict(list(whole.pages.items())[::2]))
        return answer


class Both(Voter, Registrar):
    def __init__(self, name, answer, registers, priority=0, log=None):
        super().__init__(name, answer, priority, log)
        self.registers = registers


def acted(answer):
    if answer == "raise":
        raise ZeroDivisionError("by zero")
    return answer


def by_plugin(decision):
    return {vote.plugin: vote for vote in decision.votes}


# Votes and their reasons.


def test_every_vote_is_kept_with_its_reason():
    plugins = [
        Voter("a", Vote(None, "a has none"), 900),
        Voter("b", False, 60),
        Voter("c", Vote(True, "c wants one"), 60 - 1),
        Voter("d", None),
        Voter("e", Vote(False)),
    ]
    decision = Connector(context(), plugins).decision
    assert decision.decided_by == "b"
    assert decision.votes == (
        CastVote(plugin="a", priority=900, answer=None, reason="a has none"),
        CastVote(
            plugin="canonical", priority=100, answer=None, reason="canonical is not requested"
        ),
        CastVote(plugin="b", priority=60, answer=False, reason=""),
        CastVote(plugin="c", priority=59, answer=True, reason="c wants one"),
        CastVote(
            plugin="cross-layer",
            priority=50,
            answer=True,
            reason="one group of equal pages and a stride-aware backend",
        ),
        CastVote(plugin="d", priority=0, answer=None, reason=""),
        CastVote(plugin="e", priority=0, answer=False, reason=""),
    )


def test_false_is_an_answer_and_none_is_not():
    assert Connector(context(), [Voter("v", False, 900)]).decision.decided_by == "v"
    assert Connector(context(), [Voter("v", None, 900)]).decision.decided_by == "cross-layer"
    assert Connector(context(), [Voter("v", Vote(None), 900)]).decision.decided_by == "cross-layer"


def test_nobody_votes_is_per_layer_decided_by_nobody():
    decision = Connector(context(backend=BackendCapabilities()), []).decision
    assert decision.cross_layer_blocks is False
    assert decision.layout is KVCacheLayout.LBHNC
    assert decision.decided_by is None
    assert decide([], KVCacheLayout.BLNHC) == LayoutDecision(
        cross_layer_blocks=False, layout="NHD", decided_by=None, votes=()
    )


def test_of_several_that_agree_the_first_by_name_decided():
    plugins = [Voter("z", True, 70), Voter("m", True, 70), Voter("n", False, 60)]
    decision = Connector(context(), plugins).decision
    assert (decision.cross_layer_blocks, decision.decided_by) == (True, "m")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("yes",), "a vote answers True, False or None, not 'yes'"),
        ((1,), "a vote answers True, False or None, not 1"),
        ((True, None), "a vote's reason is a sentence, not None"),
    ],
)
def test_a_vote_that_cannot_be_is_refused_at_birth(arguments, message):
    with pytest.raises(OptionError) as caught:
        Vote(*arguments)
    assert str(caught.value) == message


# Opposite votes (C6).


def test_opposite_votes_at_the_deciding_priority_are_an_error_that_names_both_c6():
    yes, no = Voter("yes", Vote(True, "one copy"), 60), Voter("no", False, 60)
    for plugins in itertools.permutations([yes, no, Voter("shy", None, 60)]):
        with pytest.raises(PolicyConflictError) as caught:
            Connector(context(), list(plugins))
        assert str(caught.value) == (
            "opposite votes at priority 60: 'no' votes per-layer; 'yes' votes cross-layer (one "
            "copy). Raise one of them, for instance KVPOLICY_PRIORITY=no=61 or --priority no=61, "
            "or, if one is not built in, leave it out of KVPOLICY_PLUGINS"
        )
        assert caught.value.plugin_names == ("no", "yes")
        assert caught.value.priority == 60


def test_what_the_conflict_advises_settles_it_c6():
    plugins = [Voter("yes", True, 60), Voter("no", False, 60)]
    decision = Connector(context(), plugins, priorities={"no": 61}).decision
    assert (decision.cross_layer_blocks, decision.decided_by) == (False, "no")


def test_a_conflict_with_a_built_in_names_it_c6():
    with pytest.raises(PolicyConflictError) as caught:
        Connector(context(), [Voter("no", False, 50)])
    assert caught.value.plugin_names == ("cross-layer", "no")
    with pytest.raises(PolicyConflictError) as caught:
        Connector(context(canonical=True), [Voter("yes", True, 100)])
    assert caught.value.plugin_names == ("canonical", "yes")


def test_disagreement_below_the_deciding_priority_is_recorded_not_an_error_c6():
    plugins = [Voter("yes", True, 60), Voter("no", False, 60), Voter("top", False, 61)]
    decision = Connector(context(), plugins).decision
    assert decision.decided_by == "top"
    assert [by_plugin(decision)[n].answer for n in ("yes", "no")] == [True, False]


def test_abstentions_above_do_not_decide_c6():
    plugins = [Voter("high", None, 900), Voter("yes", True, 60), Voter("no", False, 60)]
    with pytest.raises(PolicyConflictError) as caught:
        Connector(context(), plugins)
    assert caught.value.plugin_names == ("no", "yes")


# Invariant 1, order-free: an oracle, and random plugin sets in random orders.


def settled(votes):
    """The conflict rule in other words: (cross-layer, decided by), or the names that conflict."""
    loudest = {}
    for name, priority, answer in votes:
        if answer is not None:
            loudest.setdefault(priority, {}).setdefault(answer, []).append(name)
    if not loudest:
        return False, None
    at_the_top = loudest[max(loudest)]
    if len(at_the_top) == 2:
        return sorted(at_the_top[True] + at_the_top[False])
    [(answer, names)] = at_the_top.items()
    return answer, min(names)


priorities = st.sampled_from([-300, -100, 0, 50, 75, 100, 900])
answers = st.sampled_from([True, False, None])
names = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)


@st.composite
def cast_votes(draw):
    return [
        CastVote(plugin=name, priority=draw(priorities), answer=draw(answers), reason=f"{name}!")
        for name in draw(names)
    ]


@given(votes=cast_votes(), data=st.data())
def test_the_conflict_rule_is_the_oracle_s_in_any_order_c6(votes, data):
    expected = settled((vote.plugin, vote.priority, vote.answer) for vote in votes)
    order = data.draw(st.permutations(votes))
    if isinstance(expected, list):
        with pytest.raises(PolicyConflictError) as caught:
            decide(order, KVCacheLayout.LBHNC)
        assert list(caught.value.plugin_names) == expected
        return
    decision = decide(order, KVCacheLayout.LBHNC)
    assert (decision.cross_layer_blocks, decision.decided_by) == expected
    assert decision.layout.value == ("BLHNC" if expected[0] else "LBHNC")
    assert list(decision.votes) == sorted(votes, key=lambda vote: (-vote.priority, vote.plugin))


@attrs.frozen
class Drawn:
    """A plugin to be made."""

    name: str
    priority: int
    vote: object  # "none": no such hook
    registers: object

    def make(self, log):
        if self.vote == "none":
            return Registrar(self.name, self.registers, self.priority, log)
        if self.registers == "none":
            return Voter(self.name, self.vote, self.priority, log)
        return Both(self.name, self.vote, self.registers, self.priority, log)

    @property
    def faulty(self):
        """Whether its vote takes it out."""
        return self.vote in ("raise", "yes")

    @property
    def says(self):
        return self.vote.answer if isinstance(self.vote, Vote) else self.vote


drawn_votes = st.sampled_from(
    [True, False, None, Vote(True, "yes"), Vote(False, "no"), Vote(None, "?"), "none"]
)
faulty_votes = st.sampled_from(["raise", "yes"])
drawn_answers = st.sampled_from([None, None, "all", "half", "text", "raise"])


@st.composite
def plugin_sets(draw):
    found = []
    for name in draw(names):
        vote = draw(st.one_of(drawn_votes, drawn_votes, faulty_votes))
        registers = draw(drawn_answers)
        if vote != "none" and draw(st.booleans()):
            registers = "none"
        found.append(Drawn(name, draw(priorities), vote, registers))
    return found


def outcome(asked, made, log):
    """Everything that can be seen of a start-up and a registration, as comparable values."""
    log.clear()
    try:
        connector = Connector(asked, made)
    except KVPolicyError as error:
        return [type(error).__name__, str(error), json.dumps(error.explanation), list(log)]
    seen = [json.dumps(connector.explain()), connector.fingerprint, connector.format_id]
    try:
        connector.register(slab(asked))
    except KVPolicyError as error:
        told = [type(error).__name__, str(error), json.dumps(error.explanation)]
        return [*seen, *told, list(log)]
    pages = [(name, p.page) for name, p in connector.registration.pages.items()]
    connector.close()
    return [*seen, pages, list(log)]


@given(drawn=plugin_sets(), canonical=st.booleans(), data=st.data())
def test_any_order_gives_one_decision_explanation_and_registration_c6(drawn, canonical, data):
    asked = context(canonical=canonical)
    log = []
    made = [plugin.make(log) for plugin in drawn]
    first = outcome(asked, made, log)
    order = data.draw(st.permutations(made))
    assert outcome(asked, order, log) == first
    assert outcome(asked, {plugin.name: plugin for plugin in order}, log) == first


@given(drawn=plugin_sets(), canonical=st.booleans())
def test_what_happens_is_what_the_priorities_say(drawn, canonical):
    asked = context(canonical=canonical)
    log = []
    made = [plugin.make(log) for plugin in drawn]
    ranked = sorted(drawn, key=lambda plugin: (-plugin.priority, plugin.name))
    sane = [plugin for plugin in ranked if not plugin.faulty]
    votes = [(p.name, p.priority, p.says) for p in sane if p.vote != "none"]
    votes += [("canonical", 100, False if canonical else None), ("cross-layer", 50, True)]
    expected = settled(votes)
    asked_to_vote = [("vote", plugin.name) for plugin in ranked if plugin.vote != "none"]
    if isinstance(expected, list):
        with pytest.raises(PolicyConflictError) as caught:
            Connector(asked, made)
        assert list(caught.value.plugin_names) == expected
        assert log == asked_to_vote
        return
    connector = Connector(asked, made)
    decision = connector.decision
    assert (decision.cross_layer_blocks, decision.decided_by) == expected
    assert log == asked_to_vote
    status = {info.name: info.status for info in connector.plugins.infos}
    assert {name for name, found in status.items() if found == "failed"} == {
        plugin.name for plugin in drawn if plugin.faulty
    }
    own = {
        "canonical": (100, canonical and not expected[0]),
        "cross-layer": (50, expected[0] and not canonical),
        "direct": (-100, not canonical),
    }
    queue = [(-p.priority, p.name, p.registers) for p in sane if p.registers != "none"]
    queue += [(-at, name, "all" if mine else None) for name, (at, mine) in own.items()]
    queue.sort(key=lambda entry: entry[:2])
    winner = next((entry for entry in queue if entry[2] is not None), None)
    reached = queue if winner is None else queue[: queue.index(winner) + 1]
    log.clear()
    if winner is None:
        with pytest.raises(CertificationError, match="no policy registers canonical pages"):
            connector.register(slab(asked))
    elif winner[2] == "all":
        connector.register(slab(asked))
        assert list(connector.registration.pages) == list(asked.stage_layers)
    else:
        with pytest.raises(RegistrationError) as refused:
            connector.register(slab(asked))
        assert refused.value.plugin_name == winner[1]
    assert log == [("register", name) for _, name, _ in reached if name not in own]
    connector.close()


def test_installed_plugins_in_any_order_give_one_explanation_c6(install, monkeypatch):
    cases = ("good", "module_plugin", "raises_in_vote", "import_error")
    chosen = [case.replace("_", "-") for case in cases]
    seen = set()
    for order in itertools.permutations(cases):
        with monkeypatch.context() as patched:
            for case in order:
                patched.syspath_prepend(str(DISTS / case))
            connector = Connector(context(), chosen)
            seen.add((json.dumps(connector.explain()), connector.fingerprint))
    assert len(seen) == 1


# A plugin whose vote is faulty is wholly out.


@pytest.mark.parametrize(
    ("case", "shipped", "reason"),
    [
        (
            "raises_in_vote",
            "'raises-in-vote' (acme-raises-in-vote 2.0)",
            "raised an error when asked to vote: KeyError: 'acme'",
        ),
        (
            "wrong_vote",
            "'wrong-vote' (acme-wrong-vote 2.1)",
            "voted 'no'; possible: True, False, None or a Vote",
        ),
    ],
)
def test_a_voter_that_misbehaves_is_wholly_out_and_listed_c25(install, case, shipped, reason):
    name = case.replace("_", "-")
    install(case, "good")
    connector = Connector(context(), [name, "good"])
    assert connector.decision == Connector(context(), ["good"]).decision
    assert name not in by_plugin(connector.decision)
    told = {plugin["name"]: plugin for plugin in connector.explain()["plugins"]}
    assert told[name]["status"] == "failed"
    assert told[name]["reason"] == reason
    assert told[name]["priority"] == 900
    assert f"{told[name]['name']!r} ({told[name]['distribution']} {told[name]['version']})" == (
        shipped
    )
    assert told["good"]["status"] == "active"
    assert name not in [plugin.info.name for plugin in connector.plugins.active]
    connector.register(slab(connector.context))  # at 900 it would have answered first
    assert connector.registration is not None
    connector.close()

    with pytest.raises(PluginError) as caught:
        Connector(context(), [name, "good"], strict=True)
    assert str(caught.value) == f"plugin {shipped} {reason}"
    assert caught.value.plugin_name == name


def test_a_voter_that_wants_to_exit_is_out_and_start_up_goes_on():
    class Leaver:
        name = "leaver"

        @hookimpl
        def prefer_cross_layer_blocks(self):
            raise SystemExit("usage: acme COMMAND")

    connector = Connector(context(), [Leaver()])
    assert connector.decision.decided_by == "cross-layer"
    info = next(info for info in connector.plugins.infos if info.name == "leaver")
    assert info.status == "failed"
    assert info.reason == "raised an error when asked to vote: SystemExit: usage: acme COMMAND"


def test_a_voter_that_is_out_is_not_asked_to_register():
    log = []
    plugins = [Both("bad", "raise", "all", 900, log)]
    connector = Connector(context(), plugins)
    connector.register(slab(connector.context))
    assert log == [("vote", "bad")]
    connector.close()


def test_a_voter_that_is_out_does_not_change_the_fingerprint():
    with_it = Connector(context(), [Voter("bad", "raise", 900)])
    assert with_it.fingerprint == Connector(context(), []).fingerprint
    assert with_it.fingerprint != Connector(context(), [Voter("bad", None, 900)]).fingerprint


@pytest.mark.parametrize("answer", ["yes", 1, 0, [], "", Vote, len], ids=repr)
def test_only_a_bool_a_vote_or_none_is_a_vote(answer):
    connector = Connector(context(), [Voter("odd", answer, 900)])
    assert connector.decision.decided_by == "cross-layer"
    info = next(info for info in connector.plugins.infos if info.name == "odd")
    assert info.status == "failed"
    assert info.reason == f"voted {answer!r}; possible: True, False, None or a Vote"


# Certification at start-up.


def test_a_cross_layer_win_over_canonical_is_refused_if_nobody_certifies_the_slab():
    connector = Connector(context(canonical=True), [], priorities={"cross-layer": 101})
    decision = connector.decision
    assert decision.cross_layer_blocks is True
    assert decision.decided_by == "cross-layer"
    with pytest.raises(CertificationError) as caught:
        connector.register(slab(connector.context))
    error = caught.value
    assert list(error.refusals) == ["layer.0", "layer.1", "layer.2"]
    assert {refusal.code for refusal in error.refusals.values()} == {"uncertified"}
    [detail] = {refusal.detail for refusal in error.refusals.values()}
    assert detail == (
        "no policy takes canonical pages in BLHNC, which cross-layer decided; lower that plugin's "
        "priority, or install a plugin that registers them"
    )
    assert str(error).startswith("no policy registers canonical pages in BLHNC\n  layer.0")
    assert f"uncertified: {detail}" in str(error)
    assert error.explanation["decision"]["decided_by"] == "cross-layer"
    for layer in error.explanation["layers"]:
        assert layer["refusal"]["code"] == "uncertified"
        assert layer["portable"] is False
    assert connector.registration is None
    assert [layer["refusal"] for layer in connector.explain()["layers"]] == [None] * 3
    connector.close()


def test_a_policy_that_certifies_the_slab_makes_that_win_good():
    asked = context(canonical=True)
    connector = Connector(asked, [Registrar("inside", "all", 150)], priorities={"cross-layer": 101})
    connector.register(slab(asked))
    assert list(connector.registration.pages) == list(asked.stage_layers)
    connector.close()


@pytest.mark.parametrize("canonical", [False, True])
def test_layers_that_cannot_be_certified_stop_start_up_one_reason_each(canonical):
    odd = attrs.evolve(SPEC, total_kv_heads=6)
    geometry = CacheGeometry(layers={"a": SPEC, "b": odd, "c": odd}, num_blocks=BLOCKS)
    with pytest.raises(CertificationError) as caught:
        Connector(context(geometry=geometry, canonical=canonical, grid=ParallelGrid(tp=4)), [])
    error = caught.value
    assert list(error.refusals) == ["b", "c"]
    layout = "LBHNC" if canonical else "BLHNC"
    first, *rest = str(error).splitlines()
    assert first == f"2 of 3 layers cannot be certified for {layout} at tp 4, dcp 1, pcp 1"
    assert rest[0].startswith("  b")
    assert all("heads-not-divisible: 6 KV heads can be neither split" in line for line in rest)
    told = json.loads(json.dumps(error.explanation))
    assert told["format_id"] is told["fingerprint"] is told["record_bytes"] is None
    assert told["fragments_per_block"] is None
    assert told["groups"] == []
    layers = {layer["name"]: layer for layer in told["layers"]}
    assert layers["a"]["refusal"] is None
    assert layers["a"]["local_page_bytes"] == 64
    assert layers["b"]["refusal"]["code"] == "heads-not-divisible"
    assert layers["b"]["refusal"]["detail"] == error.refusals["b"].detail
    assert layers["b"]["local_page_bytes"] is layers["b"]["canonical_page_bytes"] is None
    assert layers["b"]["portable"] is False


def test_a_decision_that_no_page_fits_is_refused_in_its_own_words():
    split = attrs.evolve(SPEC, kernel_block_size=2)
    geometry = CacheGeometry(layers={"a": split, "b": split}, num_blocks=BLOCKS)
    with pytest.raises(CertificationError) as caught:
        Connector(context(geometry=geometry), [Voter("forced", True, 900)])
    assert {r.code for r in caught.value.refusals.values()} == {"kernel-split-needs-layer-compact"}
    assert caught.value.explanation["decision"]["decided_by"] == "forced"


def test_recurrent_state_is_certified_but_not_portable():
    geometry = CacheGeometry(
        layers={"attn": SPEC, "ssm": StateSpec(state_bytes=96)}, num_blocks=BLOCKS
    )
    told = Connector(context(geometry=geometry, canonical=True), []).explain()
    assert [(x["kind"], x["portable"], x["refusal"]) for x in told["layers"]] == [
        ("attention", True, None),
        ("state", False, None),
    ]
    assert {g["name"]: g["portable"] for g in told["groups"]} == {"attention": True, "state": False}


# Registration: by priority, then name; a wrong one is blamed on its plugin.


def test_policies_are_asked_to_register_by_priority_then_name_until_one_answers():
    log = []
    plugins = [
        Registrar("low", "all", 60, log),
        Registrar("b", None, 70, log),
        Registrar("a", None, 70, log),
        Registrar("never", "all", 59, log),
    ]
    connector = Connector(context(), plugins)
    assert log == []
    connector.register(slab(connector.context))
    assert log == [("register", "a"), ("register", "b"), ("register", "low")]
    connector.close()


BLAME = {
    "half_registration": ("0.5", "made a registration that cannot be proved"),
    "raising_registration": ("0.6", "raised KeyError: 'model.layers.0'"),
    "wrong_registration": (
        "0.7",
        "answered 'layer.0, layer.1, layer.2', not a Registration or None",
    ),
}


@pytest.mark.parametrize(
    "case", ["half_registration", "raising_registration", "wrong_registration"]
)
def test_a_wrong_registration_names_plugin_distribution_and_version(install, case):
    version, told = BLAME[case]
    name, distribution = case.replace("_", "-"), f"acme-{case.replace('_', '-')}"
    install(case)
    connector = Connector(context(), [name])
    with pytest.raises(RegistrationError) as caught:
        connector.register(slab(connector.context))
    error = caught.value
    assert str(error).splitlines()[0] == f"plugin {name!r} ({distribution} {version}) {told}"
    assert (error.plugin_name, error.distribution, error.version) == (name, distribution, version)
    assert connector.registration is None
    assert error.explanation["decision"]["decided_by"] == "cross-layer"
    if case == "half_registration":
        assert {n: r.code for n, r in error.refusals.items()} == {"layer.1": "layer-missing"}
        refused = {x["name"]: x["refusal"] for x in error.explanation["layers"]}
        assert refused["layer.0"] is refused["layer.2"] is None
        assert refused["layer.1"]["code"] == "layer-missing"
    connector.close()


def test_a_registration_that_the_plugin_itself_refuses_keeps_its_reasons():
    class Fussy:
        name = "fussy"
        priority = 900

        @hookimpl
        def register_layers(self, context):
            why = kvpolicy.Refusal("out-of-bounds", "it is too small")
            raise RegistrationError("not this one", {"layer.1": why})

    connector = Connector(context(), [Fussy()])
    with pytest.raises(RegistrationError) as caught:
        connector.register(slab(connector.context))
    assert str(caught.value).splitlines() == [
        "plugin 'fussy' refuses: not this one",
        "  layer.1: out-of-bounds: it is too small",
    ]
    assert caught.value.plugin_name == "fussy"


def test_tensors_that_no_policy_could_mend_are_refused_before_any_is_asked():
    log = []
    asked = context()
    connector = Connector(asked, [Registrar("a", "all", 900, log)])
    given_ = tensors(asked, torch.float16)
    del given_["layer.2"]
    given_["layer.9"] = given_["layer.0"]
    with pytest.raises(RegistrationError) as caught:
        connector.register(given_)
    assert log == []
    assert caught.value.plugin_name == ""
    assert str(caught.value).splitlines()[0] == "the engine's tensors are refused"
    assert {name: refusal.code for name, refusal in caught.value.refusals.items()} == {
        "layer.0": "dtype-contradicts-context",
        "layer.1": "dtype-contradicts-context",
        "layer.2": "layer-missing",
        "layer.9": "layer-unknown",
    }
    assert len(caught.value.explanation["layers"]) == 3


# Transfers that misbehave, as installed.


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            "string_transfer",
            (
                "plugin 'string-transfer' (acme-string-transfer 0.8) answered 'done', not a "
                "TransferHandle or None"
            ),
        ),
        (
            "raising_transfer",
            "plugin 'raising-transfer' (acme-raising-transfer 0.9) raised OSError: the bus is full",
        ),
    ],
)
def test_a_transfer_that_misbehaves_is_a_failed_result_that_names_the_plugin(install, case, told):
    install(case)
    with Connector(context(), [case.replace("_", "-")], host=4) as connector:
        connector.register(slab(connector.context))
        job = connector.store([0, 2], [3, 1])
        [result] = connector.wait()
        assert (result.job_id, result.ok, result.bytes) == (job, False, 0)
        assert result.error == told
        assert sorted(result.failed_ids) == [1, 3]


def test_poll_returns_while_a_transfer_sleeps(install):
    install("sleeping_transfer")
    with Connector(context(), ["sleeping-transfer"], host=4) as connector:
        import acme_sleeping_transfer

        connector.register(slab(connector.context))
        job = connector.store([0], [1])
        assert connector.poll() == []
        assert connector.wait(timeout=0) == []
        acme_sleeping_transfer.release.set()
        [result] = connector.wait([job])
        assert (result.job_id, result.ok, result.error) == (job, False, "slept over it")


# The explanation: what the architecture promises, and that it is JSON.


def test_the_explanation_has_what_the_architecture_promises():
    connector = Connector(context(), [Voter("v", Vote(None, "shy"))])
    told = connector.explain()
    assert json.loads(json.dumps(told)) == told
    assert set(told) >= {
        "decision",
        "layers",
        "record_bytes",
        "fragments_per_block",
        "format_id",
        "fingerprint",
        "plugins",
        "groups",
    }
    assert set(told["decision"]) == {"cross_layer_blocks", "layout", "decided_by", "votes"}
    for vote in told["decision"]["votes"]:
        assert set(vote) == {"plugin", "priority", "answer", "reason"}
    for layer in told["layers"]:
        assert set(layer) == {
            "name",
            "kind",
            "group",
            "spec",
            "local_page_bytes",
            "canonical_page_bytes",
            "portable",
            "fragments_per_block",
            "refusal",
        }
    for plugin in told["plugins"]:
        assert set(plugin) == {
            "name",
            "distribution",
            "version",
            "priority",
            "hooks",
            "status",
            "reason",
        }
    for group in told["groups"]:
        assert set(group) >= {"name", "layers", "record_bytes", "fragments_per_block"}
    assert told["format_id"] == connector.format_id
    assert told["fingerprint"] == connector.fingerprint
    assert [plugin["name"] for plugin in told["plugins"]] == [
        info.name for info in connector.plugins.infos
    ]


def test_the_explanation_s_figures_are_those_of_the_issue():
    spec = AttentionSpec(block_size=16, total_kv_heads=4, head_size=128, itemsize=2)
    geometry = CacheGeometry(layers={f"l{i}": spec for i in range(48)}, num_blocks=4)
    asked = context(geometry=geometry, grid=ParallelGrid(tp=2))
    page = 16 * 4 * 2 * 128 * 2
    for canonical in (False, True):
        told = Connector(attrs.evolve(asked, canonical=canonical), []).explain()
        for layer in told["layers"]:
            assert layer["local_page_bytes"] == page // 2
            assert layer["canonical_page_bytes"] == page
            assert layer["portable"] is canonical
            assert layer["fragments_per_block"] == 1  # heads outermost: two of four, one run
        assert told["record_bytes"] == 48 * page
        assert told["fragments_per_block"] == (48 if canonical else 1)
        assert [group["name"] for group in told["groups"]] == ["attention"]


def test_the_top_level_figures_are_the_largest_group_s():
    geometry = CacheGeometry(
        layers={"attn": SPEC, "mla": LatentSpec(block_size=4, row_bytes=100)}, num_blocks=BLOCKS
    )
    told = Connector(context(geometry=geometry), []).explain()
    sizes = {group["name"]: group["record_bytes"] for group in told["groups"]}
    assert sizes == {"attention": 128, "latent": 400}
    assert told["record_bytes"] == 400
    assert told["groups"][1]["layers"] == ["mla"]


def test_every_rank_gives_one_explanation():
    asked = context(grid=ParallelGrid(tp=2, pp=2))
    for canonical in (False, True):
        told = {
            json.dumps(Connector(attrs.evolve(asked, canonical=canonical, rank=r), []).explain())
            for r in range(4)
        }
        assert len(told) == 1


@pytest.mark.parametrize("kind", [Vote, LayoutDecision])
def test_a_stand_in_for_a_vote_is_no_vote(kind):
    answer = unittest.mock.Mock(spec=kind)
    connector = Connector(context(), [Voter("mock", answer)])
    assert connector.decision.decided_by == "cross-layer"
    (info,) = [info for info in connector.plugins.infos if info.name == "mock"]
    assert info.status == "failed"
    assert "possible: True, False, None or a Vote" in info.reason


def test_formats_cannot_be_changed_from_outside():
    connector = Connector(context())
    before = connector.format_id
    with pytest.raises(TypeError):
        connector.formats["attention"] = None
    with pytest.raises(TypeError):
        connector.formats["attention"].fields["dtype"] = "float16"
    connector.formats["attention"].fields["layers"].clear()
    assert connector.format_id == before


def test_options_are_the_contexts_own():
    given = {"kvpolicy": {"plugins": [], "priority": {"direct": 1}}}
    asked = context(options=given)
    given["kvpolicy"]["plugins"].append("no-such-plugin")
    given["kvpolicy"]["priority"]["direct"] = 2
    (direct,) = [p for p in Connector(asked).explain()["plugins"] if p["name"] == "direct"]
    assert direct["priority"] == 1
