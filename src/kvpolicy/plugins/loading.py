"""Finds, loads and rehearses plugins; whatever goes wrong with one stays with that one."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Literal

import attrs
import pluggy

import kvpolicy.hooks as specifications
from kvpolicy.errors import (
    PLUGIN_FAULTS,
    DuplicatePluginError,
    OptionError,
    PluginError,
    UnknownPluginError,
    close_names,
)
from kvpolicy.hooks import API_VERSION, HOOKS, PROJECT
from kvpolicy.plugins.selection import Selection

Status = Literal["active", "failed", "not-selected"]
_REFUSED_MARKS = ("hookwrapper", "wrapper", "tryfirst", "trylast")


@attrs.frozen(kw_only=True)
class PluginInfo:
    """What is known of one plugin, loaded or not.

    Attributes:
        name: its entry point's name.
        distribution, version: what ships it; "" for an object that was handed over.
        priority: high is asked first.
        hooks: the hooks that it implements; empty while it is not loaded.
        status: active, failed or not-selected.
        reason: why it is not active, "" if it is.
    """

    name: str
    distribution: str = ""
    version: str = ""
    priority: int = 0
    hooks: tuple[str, ...] = ()
    status: Status = "active"
    reason: str = ""

    @property
    def described(self) -> str:
        """Name, distribution and version, for messages."""
        shipped = f" ({self.distribution} {self.version})" if self.distribution else ""
        return f"{self.name!r}{shipped}"

    def error(self, message: str) -> PluginError:
        """The error that names this plugin."""
        return PluginError(
            f"plugin {self.described} {message}",
            plugin_name=self.name,
            distribution=self.distribution,
            version=self.version,
        )


@attrs.frozen(kw_only=True)
class _Implementation:
    function: Callable[..., object]
    argnames: tuple[str, ...]


@attrs.frozen(kw_only=True, eq=False)
class Plugin:
    """An active plugin: what is known of it, and its hooks by name."""

    info: PluginInfo
    implementations: Mapping[str, _Implementation] = attrs.field(repr=False)

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


@attrs.frozen(kw_only=True)
class _Candidate:
    """A plugin before it is loaded."""

    name: str
    load: Callable[[], object]
    distribution: str = ""
    version: str = ""

    def info(self, **changes: Any) -> PluginInfo:
        known = PluginInfo(name=self.name, distribution=self.distribution, version=self.version)
        return attrs.evolve(known, **changes)


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _installed() -> list[_Candidate]:
    """Every entry point of the group, read from metadata; nothing is imported."""
    return [_candidate(entry) for entry in importlib.metadata.entry_points(group=PROJECT)]


def _candidate(entry: importlib.metadata.EntryPoint) -> _Candidate:
    dist = entry.dist
    distribution: object = ""
    version: object = ""
    try:
        if dist is not None:
            distribution, version = dist.name, dist.version
    except Exception:  # noqa: BLE001  METADATA that is missing or broken raises anything
        distribution = None
    if not isinstance(distribution, str) or not isinstance(version, str):
        return _Candidate(name=entry.name, load=partial(_damaged, entry))
    return _Candidate(
        name=entry.name, load=partial(_resolve, entry), distribution=distribution, version=version
    )


def _damaged(entry: importlib.metadata.EntryPoint) -> object:
    raise _Fault(
        f"has an installation whose METADATA lacks a name or version; install again what provides "
        f"{entry.value!r}"
    )


def _resolve(entry: importlib.metadata.EntryPoint) -> object:
    if entry.pattern.match(entry.value) is None:
        raise _Fault(
            f"has an entry point {entry.value!r}, which is no reference; possible: module or "
            "module:object"
        )
    return entry.load()


def _own_name(plugin: object) -> str:
    """What the object calls itself, "" if nothing."""
    try:
        name = getattr(plugin, "name", None)
    except Exception:  # noqa: BLE001  a property may raise anything
        return ""
    return name if isinstance(name, str) else ""


def _object_name(plugin: object) -> str:
    if name := _own_name(plugin):
        return name
    if isinstance(plugin, ModuleType):
        return plugin.__name__
    return plugin.__name__ if isinstance(plugin, type) else type(plugin).__name__


def _handed(plugin: object, name: str | None = None) -> _Candidate:
    return _Candidate(name=name or _object_name(plugin), load=lambda: plugin)


def _split(plugins: object) -> tuple[list[_Candidate], list[str] | None]:
    """The objects and the names of a ``plugins`` argument."""
    if plugins is None:
        return [], None
    if isinstance(plugins, Mapping):
        return [_handed(plugin, str(name)) for name, plugin in plugins.items()], []
    if isinstance(plugins, str):
        return [], [part for part in plugins.split(",") if part.strip()]
    if not isinstance(plugins, Iterable):
        raise OptionError(
            "plugins is a PluginSet, a list of names and objects, or a mapping of names to "
            f"objects, not {plugins!r}"
        )
    items = list(plugins)
    names = [item for item in items if isinstance(item, str)]
    objects: list[_Candidate] = []
    taken: dict[str, int] = {}
    for item in items:
        if isinstance(item, str):
            continue
        candidate = _handed(item)
        taken[candidate.name] = count = taken.get(candidate.name, 0) + 1
        if count > 1 and not _own_name(item):
            candidate = attrs.evolve(candidate, name=f"{candidate.name}-{count}")
        objects.append(candidate)
    return objects, names


def plugin_names(plugins: object) -> list[str] | None:
    """The names in a ``plugins`` argument; None if it leaves the choice to other sources."""
    return _split(plugins)[1]


def _check_duplicates(candidates: Iterable[_Candidate]) -> None:
    by_name: dict[str, list[str]] = {}
    for one in candidates:
        shipped = f"{one.distribution} {one.version}" if one.distribution else "an object"
        by_name.setdefault(one.name, []).append(shipped)
    for name, sources in by_name.items():
        if len(sources) > 1:
            sources.sort()
            count = "two" if len(sources) == 2 else str(len(sources))
            raise DuplicatePluginError(
                f"{count} plugins are named {name!r}: from {' and from '.join(sources)}; "
                "keep one of them, uninstall or rename the others",
                plugin_name=name,
                distribution=" and ".join(sources),
            )


def _check_known(names: Iterable[str], known: Iterable[str], source: str) -> None:
    known = set(known)
    for name in names:
        if name not in known:
            raise UnknownPluginError(
                f"{source} names plugin {name!r}, which is not installed; "
                f"{close_names(name, known)}",
                name,
            )


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
    objects, _ = _split(plugins)
    candidates = sorted([*_installed(), *objects], key=lambda c: c.name)
    _check_duplicates(candidates)
    known = {candidate.name for candidate in candidates}
    _check_known(selection.names or (), known, selection.source)
    _check_known(selection.priorities, known, "a priority")
    wanted = set(known if selection.names is None else selection.names)
    wanted |= {one.name for one in candidates if _normal(one.distribution) == PROJECT}
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


def _load(candidate: _Candidate, priority: int | None) -> Plugin | PluginInfo:
    """The plugin, ready to be asked; or what is known of it, with the reason why it is out."""
    placed: dict[str, Any] = {} if priority is None else {"priority": priority}
    try:
        plugin = candidate.load()
    except _Fault as fault:
        return candidate.info(status="failed", reason=str(fault), **placed)
    except PLUGIN_FAULTS as error:
        reason = f"cannot be imported: {_told(error)}"
        return candidate.info(status="failed", reason=reason, **placed)
    try:
        implementations = _rehearse(plugin, candidate.name)
        placed.setdefault("priority", _own_priority(plugin))
    except _Fault as fault:
        return candidate.info(status="failed", reason=str(fault), **placed)
    except PLUGIN_FAULTS as error:
        return candidate.info(
            status="failed", reason=f"fails its rehearsal: {_told(error)}", **placed
        )
    hooks = tuple(hook for hook in HOOKS if hook in implementations)
    return Plugin(info=candidate.info(hooks=hooks, **placed), implementations=implementations)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


class _Fault(Exception):
    """Why a plugin is out; ends the sentence that begins with its name."""


def _own_priority(plugin: object) -> int:
    priority = getattr(plugin, "priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise _Fault(f"has priority {priority!r}, which is not a whole number")
    return priority


def _rehearse(plugin: object, name: str) -> Mapping[str, _Implementation]:
    """Registers the plugin in a manager that is thrown away, since registering is not atomic."""
    if inspect.isclass(plugin):
        raise _Fault("is a class; give an instance or a module")
    needed = getattr(plugin, "requires_api", API_VERSION)
    if isinstance(needed, bool) or not isinstance(needed, int):
        raise _Fault(f"has requires_api {needed!r}, which is not a whole number")
    if needed > API_VERSION:
        raise _Fault(
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
        raise _Fault(f"does not fit the hooks: {misfits}") from None
    found: dict[str, _Implementation] = {}
    for caller in manager.get_hookcallers(plugin) or []:
        if caller.name not in HOOKS:
            raise _Fault(f"does not fit the hooks: {_misfits(plugin, name)}")
        for implementation in caller.get_hookimpls():
            marks = [mark for mark in _REFUSED_MARKS if getattr(implementation, mark)]
            if marks:
                raise _Fault(
                    f"marks {caller.name!r} as {marks[0]}; wrappers, tryfirst and trylast are "
                    "refused, set its priority instead"
                )
            if caller.name in found:
                raise _Fault(f"implements {caller.name!r} twice; keep one of the two functions")
            found[caller.name] = _Implementation(
                function=implementation.function, argnames=tuple(implementation.argnames)
            )
    if not found:
        raise _Fault(
            f"has no hook; mark one of {', '.join(HOOKS)} with @kvpolicy.hookimpl (another "
            "project's marker does not count)"
        )
    return found


def _misfits(plugin: object, name: str) -> str:
    """Which hooks pluggy refuses and why, in words that are the same in every process."""
    bare = pluggy.PluginManager(PROJECT)
    bare.register(plugin, name)
    told = []
    for caller in bare.get_hookcallers(plugin) or []:
        if caller.name not in HOOKS:
            told.append(f"{caller.name!r} is no hook; {close_names(caller.name, HOOKS)}")
            continue
        offered = inspect.signature(getattr(specifications, caller.name)).parameters
        asked = dict.fromkeys(a for i in caller.get_hookimpls() for a in i.argnames)
        extra = ", ".join(repr(name) for name in asked if name not in offered)
        if extra:
            told.append(f"{caller.name!r} asks for {extra}; possible: {', '.join(offered)}")
    return "; ".join(told)
