"""What the slots of a shared pool refer to: formats, topologies and the like, and their keys.

Each text stands once in a list in the pool's file, which only grows; slots have its number. Keys,
of which there is no end, stand in the slots: whole where they are short, else as digests.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import attrs

from kvpolicy.errors import KVPolicyError, OptionError, PoolError
from kvpolicy.grid import ParallelGrid
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology
from kvpolicy.sharedfile import BODY_AT, PoolFile
from kvpolicy.slots import Record
from kvpolicy.values import is_whole
from kvpolicy.words import shown

MAX_KEY_BYTES = 64
"""Keys whose encoded form is longer are kept as digests."""
TERMS_BYTES = 2**20
_TERMS_AT = BODY_AT
_TERM = struct.Struct("<QQ")  # where its text begins, and its bytes
_COUNT = struct.Struct("<Q")
_MAX_TERMS = 2_048
_TEXTS_AT = _TERMS_AT + 8 + _MAX_TERMS * _TERM.size
_TERMS_END = _TERMS_AT + TERMS_BYTES


@attrs.frozen
class StoredKey:
    """A record's key as the file has it.

    Attributes:
        raw: the key's bytes, or their SHA-256.
        is_whole: which of them.
        text: the key itself for an error's text, "" where it is not known or ``raw`` has it.
    """

    raw: bytes
    is_whole: bool
    text: str = attrs.field(default="", eq=False)

    def __repr__(self) -> str:
        """The key, or the beginning of its digest."""
        if self.is_whole:
            return shown(decoded(self.raw))
        short = f"sha256 {self.raw.hex()[:16]}"
        return f"{self.text} ({short})" if self.text else f"({short})"


def stored_key(key: Hashable) -> StoredKey:
    """A key as the file has it.

    Raises:
        OptionError: a key that has no stable bytes.
    """
    raw = _encoded(key)
    if len(raw) <= MAX_KEY_BYTES:
        return StoredKey(raw, is_whole=True)
    return StoredKey(hashlib.sha256(raw).digest(), is_whole=False, text=shown(key))


def _encoded(key: object) -> bytes:
    """A key's bytes: equal for equal keys, whatever the process and hash seed."""
    if isinstance(key, str):
        kind, body = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        kind, body = b"b", key
    elif is_whole(key):
        kind, body = b"i", b"%d" % key
    elif isinstance(key, tuple):
        kind, body = b"t", b"".join(_encoded(one) for one in key)
    else:
        raise OptionError(
            "a key of a shared pool is a str, bytes, an int, or a tuple of these, so that every "
            f"process knows it by the same bytes; not {shown(key)}"
        )
    return b"%s%d:%s" % (kind, len(body), body)


def decoded(raw: bytes) -> Hashable:
    """The key that `_encoded` gave these bytes."""
    kind, (_, _, body) = raw[:1], raw[1:].partition(b":")
    if kind == b"b":
        return body
    if kind == b"s":
        return body.decode("utf-8", "surrogatepass")
    if kind == b"i":
        return int(body)
    parts, at = [], 0
    while at < len(body):
        length, _, _ = body[at + 1 :].partition(b":")
        end = at + 2 + len(length) + int(length)
        parts.append(decoded(body[at:end]))
        at = end
    return tuple(parts)


class Terms:
    """The list of texts that slots refer to by number; 0 is the empty text."""

    def __init__(self, file: PoolFile) -> None:
        self._map, self._damaged = file.map, file.damaged
        self._texts = [""]
        self._numbers = {"": 0}
        self._values: dict[int, Any] = {}
        self._made: dict[Hashable, str] = {}

    def _read(self) -> None:
        """Reads what others have added."""
        (count,) = _COUNT.unpack_from(self._map, _TERMS_AT)
        for number in range(len(self._texts), count + 1):
            try:
                at, length = _TERM.unpack_from(self._map, self._entry(number))
                text = zlib.decompress(self._map[at : at + length]).decode()
            except (struct.error, zlib.error, UnicodeDecodeError):
                raise self._damaged() from None
            self._numbers[text] = number
            self._texts.append(text)

    def _entry(self, number: int) -> int:
        return _TERMS_AT + 8 + (number - 1) * _TERM.size

    def number(self, text: str) -> int:
        """The number of a text, which is added if need be."""
        if text not in self._numbers:
            self._read()
        if text not in self._numbers:
            number, raw = len(self._texts), zlib.compress(text.encode())
            at = _TEXTS_AT
            if number > 1:
                at = sum(_TERM.unpack_from(self._map, self._entry(number - 1)))
            if number > _MAX_TERMS or at + len(raw) > _TERMS_END:
                raise PoolError(
                    "the shared pool has seen too many formats and topologies; make a new one"
                )
            self._map[at : at + len(raw)] = raw
            _TERM.pack_into(self._map, self._entry(number), at, len(raw))
            _COUNT.pack_into(self._map, _TERMS_AT, number)  # last: it says that the rest is there
            self._read()
        return self._numbers[text]

    def numbers(self, record: Record, writers: frozenset[int]) -> tuple[int, int, int, int]:
        """The numbers of a record's format, topology, writers and dtype.

        Raises:
            PoolError: the list is full.
        """
        return (
            self._number_of(record.format, lambda: _json(dict(record.format.fields))),
            self._number_of(record.topology, lambda: _json(attrs.asdict(record.topology))),
            self._number_of(writers, lambda: _json(sorted(writers))),
            self.number(record.element),
        )

    def _number_of(self, value: Hashable, text: Callable[[], str]) -> int:
        """The number of a value's text, which is made once."""
        if value not in self._made:
            self._made[value] = text()
        return self.number(self._made[value])

    def record(
        self, numbers: Iterable[int], key: StoredKey | None
    ) -> tuple[Record, frozenset[int]]:
        """The record and the writers of what `numbers` gave."""
        fmt, topology, writers, element = numbers
        record = Record(
            self._value(fmt, _format),
            self._value(topology, _topology),
            key,
            self._value(element, str),
        )
        return record, self._value(writers, _ranks)

    def _value(self, number: int, read: Callable[[str], Any]) -> Any:
        """What a text says, read once."""
        if number not in self._values:
            if number >= len(self._texts):
                self._read()
            try:
                self._values[number] = read(self._texts[number])
            except (IndexError, ValueError, KeyError, TypeError, KVPolicyError):
                raise self._damaged() from None
        return self._values[number]


def _format(text: str) -> GroupFormat:
    return GroupFormat(fields=json.loads(text))


def _topology(text: str) -> Topology:
    fields = json.loads(text)
    return Topology(grid=ParallelGrid(**fields["grid"]), stages=tuple(fields["stages"]))


def _ranks(text: str) -> frozenset[int]:
    return frozenset(json.loads(text))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
