"""The contract of a layout policy: how it votes, and what it makes of the engine's tensors."""

from __future__ import annotations

import os

import attrs
import numpy as np
from hypothesis import reject

from kvpolicy import (
    CastVote,
    CertificationError,
    Connector,
    KVPolicyError,
    PluginError,
    Registration,
    Vote,
)
from kvpolicy.testing import oracle
from kvpolicy.testing.asking import PolicyCase, frozen, other_formats, portable, starts
from kvpolicy.testing.contract import (
    UNDER_TEST,
    VOTE_HOOK,
    broken,
    built_in,
    check,
    hooks_of,
    numbered,
    plugin_set,
)
from kvpolicy.testing.fakes import Voter
from kvpolicy.testing.readings import contradictions, misread, refusals
from kvpolicy.testing.strategies import trials
from kvpolicy.testing.trial import Trial, brief
from kvpolicy.testing.world import World, one_rank

_ANY, _CERTIFIED = trials(certified=False), trials()


def _answer(vote: object) -> tuple[object, str]:
    if isinstance(vote, Vote | CastVote):
        return vote.answer, vote.reason
    return vote, ""


class PolicyContract(PolicyCase):
    """Numbered properties P1 to P14 of a layout policy; subclass it in a test module.

    ``class TestMine(PolicyContract)`` with `make_policy` and `supports` is enough for pytest.

    Attributes:
        votes: whether the plugin implements ``prefer_cross_layer_blocks``.
        registers: whether the plugin implements ``register_layers``.
        examples: examples for each property.
        derandomize: whether they are the same in every run.
    """

    # How it votes.

    @numbered(_ANY)
    def test_p1_the_plugin_loads_and_has_the_hooks_that_are_declared(self, trial: Trial) -> None:
        """P1: rehearsal passes, and ``votes`` and ``registers`` are true."""
        del trial
        try:
            hooks = hooks_of(plugin_set({UNDER_TEST: self.make_policy()}))
        except PluginError as error:
            broken("P1", f"the plugin cannot be loaded: {error}")
        for hook, declared in ((VOTE_HOOK, self.votes), ("register_layers", self.registers)):
            check((hook in hooks) is declared, "P1", f"{hook} is declared {declared}; has {hooks}")

    @numbered(_ANY, needs="votes")
    def test_p2_a_vote_is_true_false_or_an_abstention(self, trial: Trial) -> None:
        """P2: bool, None or Vote, never raised, and what is declared."""
        context = self.adapt(trial.context)
        said = self._vote(context)
        expected = self.expected_vote(context)
        told = f"voted {said!r}, expected_vote says {expected!r}, for {brief(context)}"
        check(expected is ... or _answer(said)[0] is expected, "P2", told)

    @numbered(_ANY, needs="votes")
    def test_p3_a_vote_is_pure_and_deterministic(self, trial: Trial) -> None:
        """P3: the same again, from another instance, after others; nothing is changed."""
        context = self.adapt(trial.context)
        before, environment = frozen(context), dict(os.environ)
        first = self._vote(context)
        self._vote(self.adapt(attrs.evolve(trial.context, canonical=not context.canonical)))
        for whose, again in (
            ("the same plugin, asked again", self._vote(context)),
            ("another instance", self._vote(context, plugin_set({UNDER_TEST: self.make_policy()}))),
        ):
            check(first == again, "P3", f"voted {first!r}, then {again!r} ({whose})")
        check(frozen(context) == before, "P3", f"a vote changed the context {brief(context)}")
        check(dict(os.environ) == environment, "P3", "a vote changed the environment")

    @numbered(_ANY, needs="votes")
    def test_p4_every_rank_votes_alike(self, trial: Trial) -> None:
        """P4: the rank is no ground for a vote."""
        context = self.adapt(trial.context)
        first = self._vote(context)
        for rank in range(1, context.grid.size):
            found = self._vote(attrs.evolve(context, rank=rank))
            told = f"rank 0 votes {first!r} and rank {rank} votes {found!r} for {brief(context)}"
            check(first == found, "P4", told)

    @numbered(_CERTIFIED, needs="votes")
    def test_p5_other_plugins_and_their_order_change_no_vote(self, trial: Trial) -> None:
        """P5: the decision and the plugin's vote are the same in any order of installation."""
        context, alone = self.adapt(trial.context), self._vote(self.adapt(trial.context))
        others = {"above": Voter(None), "below": Voter(None)}
        seen = []
        for names in (["above", UNDER_TEST, "below"], ["below", "above", UNDER_TEST]):
            made = {n: self.make_policy() if n == UNDER_TEST else others[n] for n in names}
            started = self._probe(context, plugin_set(made, trial.forced))
            if isinstance(started, CertificationError):
                reject()
            found = next(v for v in started.decision.votes if v.plugin == UNDER_TEST)
            told = f"alone it votes {alone!r}, among others {found!r}"
            check(_answer(found) == _answer(alone), "P5", told)
            seen.append((started.decision, started.fingerprint))
        check(seen[0] == seen[1], "P5", f"another order, another decision: {seen}")

    # What it registers.

    @numbered(_CERTIFIED, needs="registers")
    def test_p6_a_registration_covers_every_layer_and_no_other(self, trial: Trial) -> None:
        """P6: what is declared is registered, whole."""
        world, rank, plugins = self._registrable(trial)
        context = world.contexts[rank]
        pages = self._registered("P6", world, rank, plugins)
        expected = list(oracle.stage_layers(context, world.memories[rank].place))
        told = f"registered {sorted(pages)}; rank {rank} holds {expected}"
        check(sorted(pages) == sorted(expected), "P6", told)

    @numbered(_CERTIFIED, needs="registers")
    def test_p7_a_registration_never_copies_and_writes_nothing(self, trial: Trial) -> None:
        """P7: pages lie in the engine's own storage, which stays as it was."""
        world, rank, plugins = self._registrable(trial)
        memory = world.memories[rank]
        before = memory.snapshot()
        for name, one in self._registered("P7", world, rank, plugins).items():
            own = {held.untyped_storage().data_ptr() for held in memory.allocations}
            inside = one.tensor.untyped_storage().data_ptr() in own
            check(inside, "P7", f"layer {name!r} is registered in memory that is not the engine's")
        same = all(map(np.array_equal, before, memory.snapshot()))
        check(same, "P7", "registering wrote into the engine's memory")

    @numbered(_CERTIFIED, needs="registers")
    def test_p8_every_byte_of_a_page_is_where_its_coordinates_say(self, trial: Trial) -> None:
        """P8: runs tile the page once, stay in bounds, and read what the oracle wrote later."""
        world, rank, plugins = self._registrable(trial)
        context, memory = world.contexts[rank], world.memories[rank]
        pages = self._registered("P8", world, rank, plugins)
        for block in range(context.geometry.num_blocks):
            memory.write(context, memory.views, block, block)
        for name, one in pages.items():
            told = misread(context, memory, name, one)
            check(told is None, "P8", f"layer {name!r} on rank {rank}: {told}")

    @numbered(_CERTIFIED, needs="registers")
    def test_p9_the_core_accepts_it_and_reads_the_same(self, trial: Trial) -> None:
        """P9: a connector proves the registration; `Registration.from_caches` agrees with it."""
        world, rank, plugins = self._registrable(trial)
        context = world.contexts[rank]
        pages = self._registered("P9", world, rank, plugins)
        try:
            world.register([rank])
        except KVPolicyError as error:
            broken("P9", f"the core refuses the registration on rank {rank}: {error}")
        try:
            core = Registration.from_caches(context, world.memories[rank].caches).pages
        except KVPolicyError:
            return  # memory that only the plugin can read
        for name, one in pages.items():
            told = f"layer {name!r}: the core reads {core[name].page}, the plugin {one.page}"
            check(starts(core[name]) == starts(one), "P9", told)

    # What comes of it.

    @numbered(_CERTIFIED, needs="registers")
    def test_p10_records_are_the_oracle_s_and_come_back(self, trial: Trial) -> None:
        """P10: what all ranks store is the record, to the byte; loaded, it is what was written."""
        world, _, _ = self._registrable(trial)
        group, records = trial.group_layers, range(len(trial.blocks))
        self._stored("P10", world, trial)
        back = [world.contexts[0].geometry.num_blocks - 1 - block for block in trial.blocks]
        world.wipe()
        self._through("P10", world.load, trial.slots, back, group)
        for rank, memory in enumerate(world.memories):
            told = memory.difference(world.fresh(rank, group, back, records))
            check(told is None, "P10", f"loaded on rank {rank}: {told}")

    @numbered(_CERTIFIED, needs="registers")
    def test_p11_canonical_records_move_between_this_engine_and_one_rank(
        self, trial: Trial
    ) -> None:
        """P11: stored by the plugin, loaded by the built-ins on one rank; and the other way."""
        found = self._found(trial, canonical=True)
        group, records = trial.group_layers, list(range(len(trial.blocks)))
        if found is None or not portable(found[0], group.name):
            return  # that it declines canonical pages is P12's
        world = found[0]
        whole = one_rank(world.contexts[0], group)
        other = World.start(whole, built_in(False), trial.allocation, world.pool)
        other.register()
        self._stored("P11", world, trial)
        self._through("P11", other.load, trial.slots, trial.blocks, group)
        told = other.memories[0].difference(other.fresh(0, group, trial.blocks, records))
        check(told is None, "P11", f"loaded on one rank: {told}")
        self._through("P11", other.store, trial.blocks, trial.slots, group)
        back = [whole.geometry.num_blocks - 1 - block for block in trial.blocks]
        world.wipe()
        self._through("P11", world.load, trial.slots, back, group)
        for rank, memory in enumerate(world.memories):
            told = memory.difference(world.fresh(rank, group, back, records))
            check(told is None, "P11", f"stored on one rank, loaded on rank {rank}: {told}")

    # What it leaves alone.

    @numbered(_ANY)
    def test_p12_what_is_not_supported_is_declined_or_refused(self, trial: Trial) -> None:
        """P12: None, or an error with a code for every layer; never an answer, nothing written."""
        for context, plugins, started in self._variants(trial):
            if isinstance(started, CertificationError):
                check(bool(refusals(started)), "P12", f"start-up refuses without a code: {started}")
                continue
            if self.registers and self.supports(context, started.decision):
                continue
            world = World.start(context, plugins, self.ways(trial.allocation))
            rank = trial.rank % len(world.contexts)
            self._show(world, rank)
            before = world.memories[rank].snapshot()
            if self.registers:
                answer = self._answer("P12", world, rank, plugins, world.memories[rank].caches)
                told = f"supports says no, but it registered {brief(context)}"
                check(answer is None, "P12", told)
            try:
                world.register([rank])
            except KVPolicyError as error:
                check(bool(refusals(error)), "P12", f"refused without a code: {error}")
            same = all(map(np.array_equal, before, world.memories[rank].snapshot()))
            check(same, "P12", "what was declined was written to")

    @numbered(_CERTIFIED, needs="registers")
    def test_p13_tensors_that_contradict_the_context_are_refused(self, trial: Trial) -> None:
        """P13: a missing layer, too few blocks, too small pages, memory past the end."""
        world, rank, plugins = self._registrable(trial)
        for what, caches in contradictions(world.memories[rank]):
            if "missing" in what:  # the core asks nobody then; whoever is asked all the same ...
                answer = self._tried(world, rank, plugins, caches)
                check(answer is None, "P13", f"{what}, and yet it registered the rest")
            connector = Connector(world.contexts[rank], plugins, host=world.pool)
            try:
                connector.register(caches)
            except KVPolicyError as error:
                check(bool(refusals(error)), "P13", f"{what}, refused without a code: {error}")
            else:
                broken("P13", f"{what}, and yet it was registered")
            check(connector.registration is None, "P13", f"{what}, and it is half registered")

    @numbered(_CERTIFIED, needs="registers")
    def test_p14_identities_change_when_they_must_and_only_then(self, trial: Trial) -> None:
        """P14: portable formats are those of the built-ins; what bytes depend on changes them."""
        world, _, plugins = self._registrable(trial)
        asked = attrs.evolve(trial.context, canonical=world.contexts[0].canonical)
        context, group = self.adapt(asked), trial.group_layers
        ids = {(one.format_id, one.fingerprint) for one in world.connectors}
        check(len(ids) == 1, "P14", f"ranks compute different identities: {sorted(ids)}")
        own = world.connectors[0].formats[group.name].format_id
        if portable(world, group.name):
            for whose, same in (
                ("the built-ins' per-layer caches", self._probe(context, built_in(False))),
                ("one rank", self._probe(one_rank(context, group), plugins)),
            ):
                if isinstance(same, Connector):
                    found = same.formats[group.name].format_id
                    check(found == own, "P14", f"{whose} have format {found}, the plugin {own}")
        for field, value in other_formats(context).items():
            changed = self._probe(attrs.evolve(context, **{field: value}), plugins)
            if isinstance(changed, Connector):
                found = changed.formats[group.name].format_id
                check(
                    found != own,
                    "P14",
                    f"another {field}, {brief(value)}, and the same format {own}",
                )
