"""Loads and rehearses plugins; whatever goes wrong with one stays with that one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import pluggy

import kvpolicy.hooks as specifications
from kvpolicy.hooks import API_VERSION, FUNCTIONS, HOOKS, PROJECT
from kvpolicy.plugins.discovery import (
    Candidate,
    Fault,
    PluginInfo,
    check_duplicates,
    check_known,
    installed,
    normal_name,
    split_plugins,
)
from kvpolicy.plugins.selection import Selection
from kvpolicy.values import is_whole
from kvpolicy.words import close_names, shown, spare, told

_REFUSED_MARKS = ("hookwrapper", "wrapper", "tryfirst", "trylast")


@attrs.frozen(kw_only=True)
class _Implementation:
    function: Callable[..., object]
    argnames: tuple[str, ...]


@attrs.frozen(kw_only=True, eq=False)
class Plugin:
    """An active plugin: what is known of it, its hooks by name, and its other functions."""

    info: PluginInfo
    implementations: Mapping[str, _Implementation] = attrs.field(repr=False)
    functions: Mapping[str, Callable[..., object]] = attrs.field(factory=dict, repr=False)

    def call(self, hook: str, **offered: object) -> object:
        """Calls a hook with those of the offered arguments that it takes."""
        found = self.implementations[hook]
        return found.function(**{name: offered[name] for name in found.argnames})


def _by_rank(info: PluginInfo) -> tuple[int, str]:
    return -info.priority, info.name


@attrs.frozen(kw_only=True, eq=False)
class PluginSet:
    """Every plugin that was found; the active ones in the order in which they are asked.

    Attributes:
        active: by priority, high first, then by name.
        infos: every plugin, failed and not selected ones too, in the same order.
        strict: whether a fault stops start-up.
    """

    active: tuple[Plugin, ...] = attrs.field(repr=False)
    infos: tuple[PluginInfo, ...]
    strict: bool = False

    def having(self, hook: str) -> Iterable[Plugin]:
        """The active plugins that implement a hook, in order."""
        return (plugin for plugin in self.active if hook in plugin.implementations)

    def without(self, name: str, reason: str) -> PluginSet:
        """The set with a plugin wholly out, listed as failed with its reason.

        Raises:
            PluginError: the set is strict.
        """
        infos = []
        for info in self.infos:
            if info.name == name:
                if self.strict:
                    raise info.error(reason)
                info = attrs.evolve(info, status="failed", reason=reason)
            infos.append(info)
        active = tuple(plugin for plugin in self.active if plugin.info.name != name)
        return attrs.evolve(self, active=active, infos=tuple(infos))


def load_plugins(selection: Selection, plugins: object = None) -> PluginSet:
    """Finds, loads and rehearses plugins, each on its own.

    Args:
        selection: which to load, at which priorities, how strictly (see `select`).
        plugins: None, or what the connector was given: names and objects, or names to objects.
            Objects join the built-ins beside the selected names.

    Raises:
        DuplicatePluginError: two plugins under one name.
        UnknownPluginError: a selected name, or a priority's, that is not installed.
        PluginError: strict, and a plugin is faulty.
    """
    objects, _ = split_plugins(plugins)
    candidates = sorted([*installed(), *objects], key=lambda c: c.name)
    check_duplicates(candidates)
    known = {candidate.name for candidate in candidates}
    check_known(selection.names or (), known, selection.source)
    check_known(selection.priorities, known, "a priority")
    wanted = set(known if selection.names is None else selection.names)
    wanted |= {one.name for one in candidates if normal_name(one.distribution) == PROJECT}
    wanted |= {one.name for one in objects}
    active, infos = [], []
    for candidate in candidates:
        if candidate.name not in wanted:
            reason = f"not named by {selection.source}"
            infos.append(candidate.info(status="not-selected", reason=reason))
            continue
        found = _load(candidate, selection.priorities.get(candidate.name))
        if isinstance(found, PluginInfo):
            if selection.strict:
                raise found.error(found.reason)
            infos.append(found)
        else:
            active.append(found)
            infos.append(found.info)
    return PluginSet(
        active=tuple(sorted(active, key=lambda plugin: _by_rank(plugin.info))),
        infos=tuple(sorted(infos, key=_by_rank)),
        strict=selection.strict,
    )


def _load(candidate: Candidate, priority: int | None) -> Plugin | PluginInfo:
    """The plugin, ready to be asked; or what is known of it, with the reason why it is out."""
    placed: dict[str, Any] = {} if priority is None else {"priority": priority}
    try:
        plugin = candidate.load()
    except Fault as fault:
        return candidate.info(status="failed", reason=str(fault), **placed)
    except BaseException as error:  # noqa: BLE001  see spare
        spare(error)
        reason = f"cannot be imported: {told(error)}"
        return candidate.info(status="failed", reason=reason, **placed)
    try:
        implementations = _rehearse(plugin, candidate.name)
        placed.setdefault("priority", _own_priority(plugin))
        functions = _own_functions(plugin)
        reason = _own_status(functions)
    except Fault as fault:
        return candidate.info(status="failed", reason=str(fault), **placed)
    except BaseException as error:  # noqa: BLE001  see spare
        spare(error)
        return candidate.info(
            status="failed", reason=f"fails its rehearsal: {told(error)}", **placed
        )
    hooks = tuple(hook for hook in HOOKS if hook in implementations)
    return Plugin(
        info=candidate.info(hooks=hooks, reason=reason, **placed),
        implementations=implementations,
        functions=functions,
    )


def _own_priority(plugin: object) -> int:
    priority = getattr(plugin, "priority", 0)
    if not is_whole(priority):
        raise Fault(f"has priority {shown(priority)}, which is not a whole number")
    return priority


def _own_functions(plugin: object) -> dict[str, Callable[..., object]]:
    named = {name: getattr(plugin, name, None) for name in FUNCTIONS}
    found = {name: value for name, value in named.items() if value is not None}
    for name, value in found.items():
        if not callable(value):
            raise Fault(f"has {name} {shown(value)}, which is no function")
    return found


def _own_status(functions: Mapping[str, Callable[..., object]]) -> str:
    said = functions["status"]() if "status" in functions else ""
    if not isinstance(said, str):
        raise Fault(f"has a status() that answers {shown(said)}, which is no string")
    return "".join(c if c.isprintable() else " " for c in str.__str__(said))


def _rehearse(plugin: object, name: str) -> Mapping[str, _Implementation]:
    """Registers the plugin in a manager that is thrown away, since registering is not atomic."""
    if inspect.isclass(plugin):
        raise Fault("is a class; give an instance or a module")
    needed = getattr(plugin, "requires_api", API_VERSION)
    if not is_whole(needed):
        raise Fault(f"has requires_api {shown(needed)}, which is not a whole number")
    if needed > API_VERSION:
        raise Fault(
            f"requires plugin API {needed}, but this kvpolicy has {API_VERSION}; upgrade kvpolicy "
            "or install an older version of the plugin"
        )
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specifications)
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        misfits = _misfits(plugin, name) or " ".join(str(error).split())
        raise Fault(f"does not fit the hooks: {misfits}") from None
    found: dict[str, _Implementation] = {}
    for caller in manager.get_hookcallers(plugin) or []:
        if caller.name not in HOOKS:
            raise Fault(f"does not fit the hooks: {_misfits(plugin, name)}")
        for implementation in caller.get_hookimpls():
            marks = [mark for mark in _REFUSED_MARKS if getattr(implementation, mark)]
            if marks:
                raise Fault(
                    f"marks {caller.name!r} as {marks[0]}; wrappers, tryfirst and trylast are "
                    "refused, set its priority instead"
                )
            if caller.name in found:
                raise Fault(f"implements {caller.name!r} twice; keep one of the two functions")
            offered = inspect.signature(getattr(specifications, caller.name)).parameters
            # pluggy leaves out arguments with defaults; who names one of ours wants it.
            wanted = [*implementation.argnames, *implementation.kwargnames]
            found[caller.name] = _Implementation(
                function=implementation.function,
                argnames=tuple(name for name in wanted if name in offered),
            )
    if not found:
        raise Fault(
            f"has no hook; mark one of {', '.join(HOOKS)} with @kvpolicy.hookimpl (another "
            "project's marker does not count)"
        )
    return found


def _misfits(plugin: object, name: str) -> str:
    """Which hooks pluggy refuses and why, in words that are the same in every process."""
    bare = pluggy.PluginManager(PROJECT)
    bare.register(plugin, name)
    said = []
    for caller in bare.get_hookcallers(plugin) or []:
        if caller.name not in HOOKS:
            said.append(f"{caller.name!r} is no hook; {close_names(caller.name, HOOKS)}")
            continue
        offered = inspect.signature(getattr(specifications, caller.name)).parameters
        asked = dict.fromkeys(a for i in caller.get_hookimpls() for a in i.argnames)
        extra = ", ".join(repr(name) for name in asked if name not in offered)
        if extra:
            said.append(f"{caller.name!r} asks for {extra}; possible: {', '.join(offered)}")
    return "; ".join(said)
