"""Finds plugins without importing them: entry points, and objects that were handed over."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Literal

import attrs

from kvpolicy.errors import DuplicatePluginError, OptionError, PluginError, UnknownPluginError
from kvpolicy.hooks import PROJECT
from kvpolicy.words import close_names

Status = Literal["active", "failed", "not-selected"]


@attrs.frozen(kw_only=True)
class PluginInfo:
    """What is known of one plugin, loaded or not.

    Attributes:
        name: its entry point's name.
        distribution, version: what ships it; "" for an object that was handed over.
        priority: high is asked first.
        hooks: the hooks that it implements; empty while it is not loaded.
        status: active, failed or not-selected.
        reason: why it is not active; of an active one, what its ``status()`` says.
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


class Fault(Exception):
    """Why a plugin is out; ends the sentence that begins with its name."""


@attrs.frozen(kw_only=True)
class Candidate:
    """A plugin before it is loaded."""

    name: str
    load: Callable[[], object]
    distribution: str = ""
    version: str = ""

    def info(self, **changes: Any) -> PluginInfo:
        """What is known of it, with changes."""
        known = PluginInfo(name=self.name, distribution=self.distribution, version=self.version)
        return attrs.evolve(known, **changes)


def normal_name(distribution: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed() -> list[Candidate]:
    """Every entry point of the group, read from metadata; nothing is imported.

    Distribution by distribution, so that one broken installation is one broken plugin.
    """
    found: list[Candidate] = []
    seen: set[str] = set()
    for dist in importlib.metadata.distributions():
        try:
            entries = list(dist.entry_points.select(group=PROJECT))
        except Exception:  # noqa: BLE001  a file that is broken raises anything
            found += _broken(dist)
            continue
        for candidate in [_candidate(entry, dist) for entry in entries]:
            name = normal_name(candidate.distribution)
            # A distribution further back on the path is not the one that is imported.
            if not name or f"{name}:{candidate.name}" not in seen:
                found.append(candidate)
            seen.add(f"{name}:{candidate.name}")
    return found


def _broken(dist: importlib.metadata.Distribution) -> list[Candidate]:
    """An installation that cannot be read, if it speaks of this group at all."""
    try:
        text = dist.read_text("entry_points.txt") or ""
    except Exception:  # noqa: BLE001  it is broken
        return []
    section = re.search(rf"^\[{PROJECT}\]\s*\n\s*([^\s=\[]+)", text, re.MULTILINE)
    if section is None:
        return []
    return [Candidate(name=section[1], load=partial(_damaged, section[1]))]


def _candidate(
    entry: importlib.metadata.EntryPoint, dist: importlib.metadata.Distribution
) -> Candidate:
    distribution: object
    version: object
    try:
        distribution, version = dist.name, dist.version
    except Exception:  # noqa: BLE001  METADATA that is missing or broken raises anything
        distribution = version = None
    if not isinstance(distribution, str) or not isinstance(version, str):
        return Candidate(name=entry.name, load=partial(_damaged, entry.value))
    return Candidate(
        name=entry.name, load=partial(_resolve, entry), distribution=distribution, version=version
    )


def _damaged(provided: str) -> object:
    raise Fault(
        "has an installation whose metadata cannot be read; install again what provides "
        f"{provided!r}"
    )


def _resolve(entry: importlib.metadata.EntryPoint) -> object:
    if entry.pattern.match(entry.value) is None:
        raise Fault(
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


def _asked_before(plugin: object) -> int:
    """Sorts by priority, high first, where it can be read; what is wrong with it is found later."""
    try:
        priority = getattr(plugin, "priority", 0)
    except Exception:  # noqa: BLE001  a property may raise anything
        return 0
    return -priority if isinstance(priority, int) else 0


def _object_name(plugin: object) -> str:
    if name := _own_name(plugin):
        return name
    if isinstance(plugin, ModuleType):
        return plugin.__name__
    return plugin.__name__ if isinstance(plugin, type) else type(plugin).__name__


def _handed(plugin: object, name: str | None = None) -> Candidate:
    return Candidate(name=name or _object_name(plugin), load=lambda: plugin)


def split_plugins(plugins: object) -> tuple[list[Candidate], list[str] | None]:
    """The objects and the names of a ``plugins`` argument."""
    if plugins is None:
        return [], None
    if isinstance(plugins, Mapping):
        for name in plugins:
            if not isinstance(name, str) or not name:
                raise OptionError(f"a plugin's name is a non-empty string, not {name!r}")
        return [_handed(plugin, name) for name, plugin in plugins.items()], []
    if isinstance(plugins, str):
        return [], [part for part in plugins.split(",") if part.strip()]
    if not isinstance(plugins, Iterable):
        raise OptionError(
            "plugins is a PluginSet, a list of names and objects, or a mapping of names to "
            f"objects, not {plugins!r}"
        )
    # Nameless objects of one type are told apart by priority before they are by position.
    items = sorted(plugins, key=_asked_before)
    names = [item for item in items if isinstance(item, str)]
    objects: list[Candidate] = []
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
    return split_plugins(plugins)[1]


def check_duplicates(candidates: Iterable[Candidate]) -> None:
    """Refuses two plugins under one name.

    Raises:
        DuplicatePluginError: names both distributions.
    """
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


def check_known(names: Iterable[str], known: Iterable[str], source: str) -> None:
    """Refuses a name that is no plugin's.

    Raises:
        UnknownPluginError: the first such name, with close ones.
    """
    known = set(known)
    for name in names:
        if name not in known:
            raise UnknownPluginError(
                f"{source} names plugin {name!r}, which is not installed; "
                f"{close_names(name, known)}",
                name,
            )
