"""What a policy's author says of it, and how the contract asks it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import EllipsisType
from typing import Any, ClassVar

import attrs
from hypothesis import reject

from kvpolicy import (
    CertificationError,
    Connector,
    KVCacheLayout,
    KVCaches,
    KVPolicyError,
    LayerPages,
    LayoutDecision,
    PluginSet,
    PolicyContext,
    Registration,
    StateSpec,
    Vote,
)
from kvpolicy.testing import oracle
from kvpolicy.testing.contract import (
    UNDER_TEST,
    VOTE_HOOK,
    Contract,
    broken,
    call,
    check,
    hooks_of,
    plugin_set,
)
from kvpolicy.testing.memory import Allocation, Memory
from kvpolicy.testing.readings import refusals
from kvpolicy.testing.trial import Trial, brief
from kvpolicy.testing.world import World, row_difference


class PolicyCase(Contract):
    """The methods that an author overrides, and those by which `PolicyContract` asks."""

    votes: ClassVar[bool] = True
    registers: ClassVar[bool] = True

    def make_policy(self) -> object:
        """A new plugin object, or the module; called more than once."""
        raise NotImplementedError("return your plugin from make_policy")

    def supports(self, context: PolicyContext, decision: LayoutDecision) -> bool:
        """Whether the plugin registers such layers, once they are certified; else it declines.

        Whatever this says no to must be declined with None or refused with a code: that is P12.
        """
        raise NotImplementedError("say what your plugin registers in supports")

    def expected_vote(self, context: PolicyContext) -> bool | EllipsisType | None:
        """What the plugin votes; ``...`` (the default) leaves it open."""
        del context
        return ...

    def adapt(self, context: PolicyContext) -> PolicyContext:
        """The context as an engine that uses the plugin states it; by default as it is."""
        return context

    def ways(self, allocation: Allocation) -> Allocation:
        """How such an engine allocates, of the ways that there are; by default any."""
        return allocation

    def present(self, context: PolicyContext, decision: LayoutDecision, memory: Memory) -> KVCaches:
        """How such an engine shows its memory; by default as `Allocation` says."""
        del context, decision
        return memory.caches

    # How it is asked.

    def _plugins(self, forced: bool | None = None) -> PluginSet:
        """The plugin, asked first, and the built-ins; made once for a test."""
        made: dict[bool | None, PluginSet] = self.__dict__.setdefault("_made", {})
        if forced not in made:
            made[forced] = plugin_set({UNDER_TEST: self.make_policy()}, forced)
        return made[forced]

    def _vote(self, context: PolicyContext, plugins: PluginSet | None = None) -> object:
        """The plugin's own vote; None if it has none."""
        plugins = plugins or self._plugins()
        if VOTE_HOOK not in hooks_of(plugins):
            return None
        try:
            said = call(plugins, VOTE_HOOK, context=context)
        except Exception as error:  # noqa: BLE001  whatever it is, a vote does not raise it
            broken("P2", f"the vote raised {type(error).__name__}: {error}, for {brief(context)}")
        typed = said is None or isinstance(said, bool | Vote)
        check(typed, "P2", f"voted {said!r}; possible: True, False, None or a Vote")
        return said

    def _probe(self, context: PolicyContext, plugins: PluginSet) -> Connector | CertificationError:
        """A connector that has decided, without tensors; or why start-up is refused."""
        try:
            return Connector(context, plugins)
        except CertificationError as error:
            return error

    def _variants(
        self, trial: Trial, canonical: bool | None = None
    ) -> Iterator[tuple[PolicyContext, PluginSet, Connector | CertificationError]]:
        """The trial's context, then others: canonical or not, under every decision."""
        asked = [trial.context.canonical, not trial.context.canonical]
        for wanted in asked if canonical is None else [canonical]:
            context = self.adapt(attrs.evolve(trial.context, canonical=wanted))
            for forced in dict.fromkeys([trial.forced, None, False, True]):
                plugins = self._plugins(forced)
                yield context, plugins, self._probe(context, plugins)

    def _found(
        self, trial: Trial, canonical: bool | None = None
    ) -> tuple[World, int, PluginSet] | None:
        """An engine whose layers the plugin says it registers, not registered yet, and a rank."""
        for context, plugins, started in self._variants(trial, canonical):
            if isinstance(started, Connector) and self.supports(context, started.decision):
                world = World.start(context, plugins, self.ways(trial.allocation))
                for rank in range(len(world.contexts)):
                    self._show(world, rank)
                return world, trial.rank % len(world.contexts), plugins
        return None

    def _registrable(self, trial: Trial) -> tuple[World, int, PluginSet]:
        """The same; a trial of which the plugin registers nothing is not tried."""
        return self._found(trial) or reject()

    def _show(self, world: World, rank: int) -> None:
        """Has the engine show a rank's memory in its own way."""
        memory, context = world.memories[rank], world.contexts[rank]
        memory.caches = self.present(context, world.decision, memory)

    def _answer(
        self, number: str, world: World, rank: int, plugins: PluginSet, caches: KVCaches
    ) -> Registration | None:
        """The plugin's own answer; a refusal with a code counts as None."""
        try:
            found = call(
                plugins,
                "register_layers",
                context=world.contexts[rank],
                decision=world.decision,
                caches=caches,
            )
        except KVPolicyError as error:
            check(bool(refusals(error)), number, f"refused without a code: {error!r}")
            return None
        except Exception as error:  # noqa: BLE001  whatever it is, it has no code
            broken(number, f"raised {type(error).__name__}: {error}; refuse with a code instead")
        typed = found is None or isinstance(found, Registration)
        check(typed, number, f"answered {found!r}; possible: a Registration or None")
        return found if isinstance(found, Registration) else None

    def _tried(
        self, world: World, rank: int, plugins: PluginSet, caches: KVCaches
    ) -> Registration | None:
        """The plugin's own answer; whatever it raises counts as None."""
        try:
            return self._answer("P13", world, rank, plugins, caches)
        except AssertionError:
            return None

    def _registered(
        self, number: str, world: World, rank: int, plugins: PluginSet
    ) -> dict[str, LayerPages]:
        """What the plugin registers on a rank, as it must."""
        found = self._answer(number, world, rank, plugins, world.memories[rank].caches)
        if found is None:
            broken(
                number,
                f"supports says yes, but rank {rank} was not registered under {world.decision} "
                f"for {brief(world.contexts[rank])}",
            )
        wrong = [name for name, one in found.pages.items() if not isinstance(one, LayerPages)]
        check(not wrong, number, f"layers {wrong} are not registered as LayerPages")
        return dict(found.pages)

    def _stored(self, number: str, world: World, trial: Trial) -> None:
        """Writes records 0, 1, ... into the trial's blocks, stores them and reads the rows."""
        group, records = trial.group_layers, list(range(len(trial.blocks)))
        try:
            world.register()
        except KVPolicyError as error:
            broken(number, f"the registration is refused: {error}")
        world.write(group, trial.blocks, records)
        self._through(number, world.store, trial.blocks, trial.slots, group)
        expected = world.expected_rows(group, trial.slots, records)
        told = row_difference(world.pool.rows.numpy(), expected, world.contexts[0], group)
        check(told is None, number, f"stored by all ranks: {told}")


def frozen(context: PolicyContext) -> object:
    """Everything that a context holds, copied."""
    fields = attrs.asdict(context, recurse=False)
    fields["geometry"] = (dict(context.geometry.layers), context.geometry)
    fields["options"] = copy.deepcopy(dict(context.options))
    return fields


def starts(pages: LayerPages) -> tuple[int, int, int]:
    """Where a layer's first and second block begin, and the bytes of its page."""
    page = pages.page
    return page.offset + page.box.from_offset, page.block_stride, page.page_bytes


def portable(world: World, group: str) -> bool:
    """Whether a group's stored bytes are free of topology: canonical, no recurrent state."""
    return "tp" not in world.connectors[0].formats[group].fields


def other_formats(context: PolicyContext) -> dict[str, Any]:
    """Changes to a context, by field, each of which changes what is stored or what it means."""
    other = KVCacheLayout.LBNHC if context.order is KVCacheLayout.LBHNC else KVCacheLayout.LBHNC
    dtype = "float16" if context.dtype != "float16" else "bfloat16"
    layers: dict[str, oracle.Spec] = {}
    for name, spec in context.geometry.layers.items():
        if isinstance(spec, StateSpec):
            layers[name] = attrs.evolve(spec, state_bytes=spec.state_bytes + 1)
        else:
            block, kernel = 2 * spec.block_size, 2 * spec.kernel_block_size
            layers[name] = attrs.evolve(spec, block_size=block, kernel_block_size=kernel)
    return {
        "geometry": attrs.evolve(context.geometry, layers=layers),
        "dtype": dtype,
        "encoding": f"{context.encoding}x",
        "canonical_order" if context.canonical else "layout": other,
    }
