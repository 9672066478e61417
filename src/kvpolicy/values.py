"""How values are checked at birth, made of others, and handed to other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import attrs

from kvpolicy.errors import GeometryError
from kvpolicy.words import shown


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def int_between(least: int, most: int) -> Any:
    """A validator for a whole number in [least, most]."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        what = f"{type(instance).__name__}.{attribute.name}"
        if not is_whole(value):
            raise GeometryError(f"{what} is a whole number, not {type(value).__name__} {value!r}")
        if not least <= value <= most:
            raise GeometryError(f"{what} lies between {least:,} and {most:,}, not {shown(value)}")

    return check


def seeing_self(convert: Callable[[Any, Any], object]) -> Any:
    """A converter that is also given the instance, whose earlier fields are set.

    mypy's attrs plugin does not know Converter objects, hence the ignores where one is used.
    """
    return attrs.Converter(convert, takes_self=True)


def _remade(cls: type, fields: Mapping[str, Any]) -> object:
    return cls(**fields)


class Picklable:
    """Lets a value that holds read-only mappings be copied and cross process boundaries."""

    __slots__ = ()

    def __reduce__(self: attrs.AttrsInstance) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        plain = {n: dict(v) if isinstance(v, Mapping) else v for n, v in values.items()}
        return _remade, (type(self), plain)
