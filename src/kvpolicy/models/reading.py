"""Reading a ``config.json``: the file, its levels, and typed access that blames a key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import ConfigError
from kvpolicy.specs import MAX_SIZE
from kvpolicy.values import is_whole

MAX_CONFIG_BYTES = 64 * 2**20
# Where composite models keep their decoder; thinker_config holds a text_config of its own.
_DECODER_SECTIONS = ("text_config", "language_config", "llm_config", "thinker_config")


def load_config(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file of at most 64 MiB.

    Raises:
        ConfigError: no such file, a directory, unreadable, too large, not UTF-8, not JSON (cut
            off, too deep), or JSON that is not an object: ``key`` is "". Or an object that has one
            key twice: ``key`` is that one.
    """
    if not str(path):
        raise ConfigError("the path of the config.json is empty; give that of a file")
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a config.json") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a directory; give the path of the config.json in it"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!s} cannot be read: {error}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes, so it is no config.json; "
            "did you give the weights?"
        )
    if not data.strip():
        raise ConfigError(f"{path} is empty; give a model's config.json")
    try:
        found = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once)
    except _Repeated as repeated:
        key = str(repeated)
        raise ConfigError(f"{path} has the key {key!r} twice; drop one of them", key=key) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start:,})") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not whole JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a JSON {_kind(found)}; a config.json is an object")
    return found


class _Repeated(Exception):
    """A key that an object has twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Repeated(key)
        found[key] = value
    return found


def _kind(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(
        type(value), "number"
    )


def shown(value: object) -> str:
    """A value for an error's text: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length():,} bits"  # str() refuses huge ones
    if isinstance(value, Mapping):
        return f"an object of {len(value):,} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value):,}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@attrs.frozen
class Keys:
    """One object of a config: values by key, and errors that name the key with its path.

    A null counts as absent, as it does for the configuration classes.

    Attributes:
        values: the object.
        path: how its keys are prefixed in messages, "" or "text_config." and the like.
        model_type: this level's ``model_type``, else that of the level outside, else "".
    """

    values: Mapping[str, Any]
    path: str = ""
    model_type: str = ""

    def get(self, key: str) -> Any:
        """The raw value, None when absent."""
        return self.values.get(key)

    def error(self, key: str, sentence: str) -> ConfigError:
        """An error for ``key``: its path, what was found, then the sentence."""
        name = f"{self.path}{key}"
        found = self.get(key)
        what = f"is {shown(found)}" if found is not None else "is missing"
        return ConfigError(f"{name} {what}: {sentence}", key=name)

    def whole(self, key: str, most: int = MAX_SIZE, least: int = 1) -> int | None:
        """A whole number in [least, most], or None.

        Raises:
            ConfigError: anything else, True and 128.0 included.
        """
        value = self.get(key)
        if value is None:
            return None
        if not is_whole(value):
            raise self.error(key, "it must be a whole number")
        if not least <= value <= most:
            raise self.error(key, f"it must lie between {least:,} and {most:,}")
        return value

    def alias(self, names: Sequence[str], most: int = MAX_SIZE) -> int | None:
        """The one number that stands under any of several spellings, or None.

        Raises:
            ConfigError: two spellings with different values; names both.
        """
        found = {name: value for name in names if (value := self.whole(name, most)) is not None}
        if len(set(found.values())) > 1:
            (one, first), (other, second) = next(
                (a, b) for a in found.items() for b in found.items() if a[1] != b[1]
            )
            raise self.error(
                one,
                f"but {self.path}{other} is {second}, and both mean the same thing; "
                f"make them {first} or {second}, or drop one",
            )
        return next(iter(found.values()), None)

    def need(self, names: Sequence[str], why: str, most: int = MAX_SIZE) -> int:
        """As `alias`, but it must be there.

        Raises:
            ConfigError: none of the spellings is there; ``key`` is the first.
        """
        value = self.alias(names, most)
        if value is None:
            raise self.missing(names, why)
        return value

    def missing(self, names: Sequence[str], why: str) -> ConfigError:
        """An error for an absent key, naming its other spellings."""
        others = f" (also spelled {', '.join(names[1:])})" if names[1:] else ""
        key = f"{self.path}{names[0]}"
        return ConfigError(f"{key} is missing{others}: {why}", key=key)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean, or the default.

        Raises:
            ConfigError: something else.
        """
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, or None.

        Raises:
            ConfigError: something else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "it must be a string")
        return value

    def items(self, key: str, length: int | None = None) -> list[Any] | None:
        """A list, of one item per layer where ``length`` is given, or None.

        Raises:
            ConfigError: something else, or another length.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.error(key, "it must be a list")
        if length is not None and len(value) != length:
            raise self.error(key, f"but the model has {length:,} layers; it needs one item a layer")
        return list(value)

    def section(self, key: str) -> Keys | None:
        """The object under ``key``, or None where there is none or it is empty.

        Raises:
            ConfigError: something else.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "it must be an object")
        return Keys(value, f"{self.path}{key}.", self.model_type) if value else None


def levels(mapping: Mapping[str, Any]) -> list[Keys]:
    """The config itself and the sections that lead to its decoder, outermost first.

    Raises:
        ConfigError: not an object, or a section or a ``model_type`` of the wrong type.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"a model's config is a JSON object, not {shown(mapping)}")
    found: list[Keys] = []
    level: Keys | None = Keys(mapping)
    while level is not None:
        found.append(attrs.evolve(level, model_type=level.text("model_type") or level.model_type))
        sections = (found[-1].section(key) for key in _DECODER_SECTIONS)
        level = next((section for section in sections if section is not None), None)
        if level is not None and len(found) > len(_DECODER_SECTIONS):
            raise found[-1].error("text_config", "sections are nested too deeply")
    return found
