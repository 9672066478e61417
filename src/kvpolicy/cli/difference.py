"""``kvpolicy explain --diff``: why the identities of two explanations differ, field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from kvpolicy.errors import OptionError
from kvpolicy.words import span_of

_MAX_BYTES = 256 * 2**20
_NEEDED = ("decision", "grid", "stages", "groups", "plugins", "format_id", "fingerprint")
_GRID = ("tp", "pp", "dcp", "pcp")


@attrs.frozen(kw_only=True)
class Difference:
    """One field that two explanations do not share.

    Attributes:
        field: its name, and of what.
        a, b: its value on either side; None where it has none.
    """

    field: str
    a: Any
    b: Any


def load_explanation(file: str) -> dict[str, Any]:
    """What ``kvpolicy explain --json`` or `Connector.explain` has written.

    Raises:
        OptionError: it cannot be read, or it is something else.
    """
    made = "make it with kvpolicy explain CONFIG.json --json"
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise OptionError(f"{file} is larger than {_MAX_BYTES:,} bytes; {made}")
        found = json.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{file} cannot be read: {error.strerror}; {made}") from None
    except (ValueError, RecursionError):
        raise OptionError(f"{file} is not whole JSON; {made}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{file} is no explanation; {made}")
    if found.get("error"):
        raise OptionError(f"{file} tells of a start-up that was refused, which has no identity")
    missing = [key for key in _NEEDED if key not in found]
    if missing or any("format" not in group for group in found["groups"]):
        lacks = repr(missing[0]) if missing else "the formats of its groups"
        raise OptionError(f"{file} is no explanation of this version, it lacks {lacks}; {made}")
    return found


def explain_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Both identities of two explanations, and the fields that make them differ."""
    return {
        name: {
            "equal": a[name] == b[name],
            "a": a[name],
            "b": b[name],
            "differences": [attrs.asdict(one) for one in found(a, b)],
        }
        for name, found in (("format_id", _of_formats), ("fingerprint", _of_fingerprints))
    }


# Format ids: group by group, whatever the groups are called.


def _of_formats(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    if a["format_id"] == b["format_id"]:
        return
    for one, other in _pairs(a["groups"], b["groups"]):
        names = sorted({group["name"] for group in (one, other) if group is not None})
        prefix = f"group{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        if one is None or other is None:
            yield Difference(field=prefix, a=_span(one), b=_span(other))
        elif one["format_id"] != other["format_id"]:
            for found in _of_fields(one["format"], other["format"]):
                yield attrs.evolve(found, field=f"{prefix}, {found.field}")


_Group = Mapping[str, Any]


def _span(group: _Group | None) -> str | None:
    return None if group is None else span_of(group["layers"])


def _pairs(
    a: Sequence[_Group], b: Sequence[_Group]
) -> Iterator[tuple[_Group | None, _Group | None]]:
    """Groups of one format first, then those of one name, then what is left."""
    left, right = list(a), list(b)
    for key in ("format_id", "name"):
        for one in tuple(left):
            other = next((group for group in right if group[key] == one[key]), None)
            if other is not None:
                left.remove(one)
                right.remove(other)
                yield one, other
    if len(left) == len(right) == 1:
        yield left[0], right[0]
    else:
        yield from ((one, None) for one in left)
        yield from ((None, other) for other in right)


def _of_fields(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*a, *b]):
        if name == "layers":
            yield from _of_layers(a[name], b[name])
        elif a.get(name) != b.get(name):
            yield Difference(field=name, a=a.get(name), b=b.get(name))


def _of_layers(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """Layers by name; those that differ in one way together."""
    left, right = ({layer["name"]: layer for layer in side} for side in (a, b))
    only = [
        [name for name in one if name not in other] for one, other in ((left, right), (right, left))
    ]
    if any(only):
        names = [span_of(side) if side else None for side in only]
        yield Difference(field="layers of one side alone", a=names[0], b=names[1])
    both = [name for name in left if name in right]
    if both != [name for name in right if name in left]:
        yield Difference(field="order of layers", a=list(left), b=list(right))
    alike: dict[str, tuple[Difference, list[str]]] = {}
    for name in both:
        for found in _of_fields(left[name], right[name]):
            key = json.dumps([found.field, found.a, found.b])
            alike.setdefault(key, (found, []))[1].append(name)
    for found, those in alike.values():
        where = f"layer {those[0]}" if len(those) == 1 else f"layers {span_of(those)}"
        yield attrs.evolve(found, field=f"{where}, {found.field}")


# Fingerprints: the format id, the decision, the grid, the plugins that take part.


def _of_fingerprints(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    if a["fingerprint"] == b["fingerprint"]:
        return
    if a["format_id"] != b["format_id"]:
        yield Difference(field="format_id", a=a["format_id"], b=b["format_id"])
    for name in ("cross_layer_blocks", "layout", "decided_by"):
        if a["decision"][name] != b["decision"][name]:
            yield Difference(
                field=f"decision, {name}", a=a["decision"][name], b=b["decision"][name]
            )
    yield from _of_fields(_grid(a), _grid(b))
    yield from _of_fields(_plugins(a), _plugins(b))


def _grid(explained: Mapping[str, Any]) -> dict[str, Any]:
    grid = explained["grid"]
    spread = grid["dcp"] * grid["pcp"] > 1  # else the interleave means nothing
    fields = {name: grid[name] for name in _GRID}
    fields |= {"cp_interleave": grid["cp_interleave"] if spread else 1}
    return {f"grid, {name}": value for name, value in fields.items()} | {
        "layers per stage": explained["stages"]
    }


def _plugins(explained: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"plugin {one['name']}": f"{one['distribution'] or 'an object'} {one['version']}".strip()
        + f" at priority {one['priority']}"
        for one in explained["plugins"]
        if one["status"] == "active"
    }


# For people.


def _told(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    return str(value) if value != "" else '""'


def people(found: Mapping[str, Any], files: tuple[str, str], console: Console) -> None:
    """Prints what differs, as two trees."""
    console.print(escape(f"A is {files[0]}\nB is {files[1]}"))
    for name, title in (("format_id", "format ids"), ("fingerprint", "fingerprints")):
        one = found[name]
        console.print()
        if one["equal"]:
            console.print(f"[bold]equal {title}[/bold]: {one['a']}")
            continue
        tree = Tree(f"[bold]the {title} differ[/bold]: A {_told(one['a'])}, B {_told(one['b'])}")
        for difference in one["differences"]:
            sides = f"A {_told(difference['a'])}\nB {_told(difference['b'])}"
            short = len(sides) + len(difference["field"]) <= 90
            joined = sides.replace("\n", ", ") if short else sides
            tree.add(escape(f"{difference['field']}{': ' if short else chr(10)}{joined}"))
        if not one["differences"]:
            tree.add("no field says why: the two were made by different versions of kvpolicy")
        console.print(tree)
