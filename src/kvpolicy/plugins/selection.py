"""Which plugins take part, and in which order: argument, then options, then environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvpolicy.errors import OptionError
from kvpolicy.hooks import PROJECT
from kvpolicy.values import is_whole
from kvpolicy.words import close_names

PLUGINS_VARIABLE = "KVPOLICY_PLUGINS"
PRIORITY_VARIABLE = "KVPOLICY_PRIORITY"
STRICT_VARIABLE = "KVPOLICY_STRICT"
_OPTION_KEYS = ("plugins", "priority", "priorities", "strict")
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@attrs.frozen(kw_only=True)
class Selection:
    """What the sources came to.

    Attributes:
        names: installed plugins that join the built-ins; None: all of them.
        source: where ``names`` was said, for messages.
        priorities: plugin name -> priority, over the plugin's own.
        strict: whether any plugin fault stops start-up.
    """

    names: tuple[str, ...] | None = None
    source: str = ""
    priorities: Mapping[str, int] = attrs.field(factory=dict)
    strict: bool = False


def _parse_names(value: object, source: str) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Iterable):
        raise OptionError(f"{source} is a list of plugin names, not {value!r}")
    found = []
    for name in names:
        if not isinstance(name, str):
            raise OptionError(f"{source} is a list of plugin names; {name!r} is none")
        if name.strip():
            found.append(name.strip())
    return tuple(dict.fromkeys(found))


def parse_priorities(value: object, source: str) -> dict[str, int]:
    """Priorities by plugin name, from a mapping or from ``name=int,name=int``.

    Raises:
        OptionError: another form, or a priority that is not a whole number.
    """
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, str):
        pairs = []
        for item in filter(None, (part.strip() for part in value.split(","))):
            name, equals, number = item.partition("=")
            if not equals or not name.strip():
                raise OptionError(f"{source} is NAME=INTEGER, as in canonical=200; found {item!r}")
            pairs.append((name.strip(), number.strip()))
    else:
        raise OptionError(f"{source} maps plugin names to integers; found {value!r}")
    found: dict[str, int] = {}
    for name, number in pairs:
        if not isinstance(name, str) or name in found:
            raise OptionError(f"{source} gives each plugin one priority, by name; found {name!r}")
        try:
            plain = isinstance(number, str) and _WHOLE.fullmatch(number)
            if not plain and not is_whole(number):
                raise ValueError
            found[name] = int(number)
        except ValueError:
            raise OptionError(
                f"{source}: the priority of {name!r} is a whole number, not {number!r}"
            ) from None
    return found


def _parse_strict(value: object, source: str) -> bool:
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else None
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise OptionError(f"{source} is 1 or 0, not {value!r}")


def select(
    options: Mapping[str, Any] | None = None,
    *,
    names: Iterable[str] | None = None,
    priorities: Mapping[str, int] | str | None = None,
    strict: bool | None = None,
    environ: Mapping[str, str] | None = None,
    source: str = "the plugins argument",
) -> Selection:
    """Merges the sources, highest first: arguments, ``options["kvpolicy"]``, environment.

    A higher source's list of names replaces the whole list; priorities merge per name. Messages
    call the source of ``names`` what ``source`` says.

    Raises:
        OptionError: a value that cannot be, or an unknown key in ``options["kvpolicy"]``.
    """
    environ = os.environ if environ is None else environ
    own = (options or {}).get(PROJECT)
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        raise OptionError(f"options[{PROJECT!r}] is a mapping, not {own!r}")
    for key in own:
        if key not in _OPTION_KEYS:
            raise OptionError(
                f"options[{PROJECT!r}] has no key {key!r}; {close_names(str(key), _OPTION_KEYS)}"
            )
    chosen, said = None, ""
    for value, where in (
        (names, source),
        (own.get("plugins"), f"options[{PROJECT!r}]['plugins']"),
        (environ.get(PLUGINS_VARIABLE), PLUGINS_VARIABLE),
    ):
        if value is not None:
            chosen, said = _parse_names(value, where), where
            break
    merged: dict[str, int] = {}
    for value, where in (
        (environ.get(PRIORITY_VARIABLE), PRIORITY_VARIABLE),
        (own.get("priorities"), f"options[{PROJECT!r}]['priorities']"),
        (own.get("priority"), f"options[{PROJECT!r}]['priority']"),
        (priorities, "the priorities argument"),
    ):
        if value is not None:
            merged |= parse_priorities(value, where)
    for value, where in (
        (strict, "the strict argument"),
        (own.get("strict"), f"options[{PROJECT!r}]['strict']"),
        (environ.get(STRICT_VARIABLE), STRICT_VARIABLE),
    ):
        if value is not None:
            return Selection(
                names=chosen,
                source=said,
                priorities=merged,
                strict=_parse_strict(value, where),
            )
    return Selection(names=chosen, source=said, priorities=merged)
