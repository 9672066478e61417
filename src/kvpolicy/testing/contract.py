"""What both contracts are made of: numbered properties, fresh for every subclass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvpolicy import KVPolicyError, PluginSet, load_plugins, select
from kvpolicy.testing.fakes import Voter
from kvpolicy.testing.trial import Trial

UNDER_TEST = "under-test"
VOTE_HOOK = "prefer_cross_layer_blocks"
FIRST = 1_000_000
"""The priority at which the plugin under test is asked: before everyone's."""

Body = Callable[[Any, Trial], None]
F = TypeVar("F", bound=Callable[..., None])


def numbered(trials: st.SearchStrategy[Trial], needs: str = "") -> Callable[[F], F]:
    """Marks a method as a numbered property of the examples that a strategy draws.

    Args:
        trials: draws the examples.
        needs: a class attribute that says whether the plugin has what the property is about.
    """

    def mark(function: F) -> F:
        function.__dict__.update(_kvpolicy_trials=trials, _kvpolicy_needs=needs)
        return function

    return mark


def broken(number: str, told: str) -> NoReturn:
    """A numbered property does not hold."""
    __tracebackhide__ = True
    raise AssertionError(f"{number}: {told}")


def check(holds: bool, number: str, told: str) -> None:
    """Raises unless a numbered property holds.

    Raises:
        AssertionError: it does not; the text begins with its number.
    """
    __tracebackhide__ = True
    if not holds:
        broken(number, told)


class Contract:
    """A set of numbered properties; each subclass gets hypothesis tests of its own.

    Attributes:
        examples: how many examples each property is tried on.
        derandomize: whether they are the same in every run.
    """

    examples: ClassVar[int] = 25
    derandomize: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name, (body, trials) in _properties(cls).items():
            setattr(cls, name, _fresh(cls, name, body, trials))

    def _through(self, number: str, move: Callable[..., None], *what: object) -> None:
        """Stores or loads through connectors, which must succeed."""
        __tracebackhide__ = True
        try:
            move(*what)
        except (AssertionError, KVPolicyError) as error:
            broken(number, f"{type(error).__name__}: {error}")


def _properties(cls: type) -> Mapping[str, tuple[Body, st.SearchStrategy[Trial]]]:
    """The marked methods of a class and its parents; one that is overridden is its own."""
    found: dict[str, Any] = {}
    for parent in reversed(cls.__mro__):
        for name, value in vars(parent).items():
            body = getattr(value, "_kvpolicy_body", value)
            trials = getattr(body, "_kvpolicy_trials", None)
            if trials is not None:
                found[name] = body, trials
            else:
                found.pop(name, None)
    return found


def _fresh(
    cls: type, name: str, body: Body, trials: st.SearchStrategy[Trial]
) -> Callable[..., None]:
    """A test that pytest can collect; hypothesis refuses one function in two classes."""
    needs = body.__dict__["_kvpolicy_needs"]

    def run(self: Any, trial: Trial) -> None:
        __tracebackhide__ = True
        if not needs or getattr(self, needs):
            body(self, trial)

    run.__name__, run.__doc__ = name, body.__doc__
    run.__qualname__, run.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
    test: Any = settings(
        max_examples=cls.examples,  # type: ignore[attr-defined]  # cls is a Contract
        derandomize=cls.derandomize,  # type: ignore[attr-defined]
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
            HealthCheck.large_base_example,
            HealthCheck.differing_executors,  # a rerun is another instance, and no worse for it
        ],
    )(given(trial=trials)(run))
    test._kvpolicy_body = body
    return test  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=3)
def built_in(forced: bool | None = None) -> PluginSet:
    """The built-in plugins alone, with a vote that outvotes theirs unless it is None."""
    return plugin_set({}, forced)


def plugin_set(objects: Mapping[str, object], forced: bool | None = None) -> PluginSet:
    """The built-ins, objects that are asked before them, and a vote over all unless it is None.

    Raises:
        PluginError: an object is no plugin.
    """
    found = dict(objects)
    priorities = dict.fromkeys(objects, FIRST)
    if forced is not None:
        found["forced"] = Voter(forced, "the trial forces it")
        priorities["forced"] = 2 * FIRST
    selection = select(names=(), priorities=priorities, strict=True, environ={})
    return load_plugins(selection, found)


def hooks_of(plugins: PluginSet, name: str = UNDER_TEST) -> tuple[str, ...]:
    """The hooks that a plugin of the set implements."""
    return next(plugin.info.hooks for plugin in plugins.active if plugin.info.name == name)


def call(plugins: PluginSet, hook: str, **offered: object) -> object:
    """What the plugin under test answers to a hook, itself, nobody else asked."""
    plugin = next(one for one in plugins.active if one.info.name == UNDER_TEST)
    return plugin.call(hook, **offered)
