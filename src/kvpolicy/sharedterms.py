"""What the slots of a shared pool refer to: formats, topologies and the like, and their keys.

Each text stands once in a list in the pool's file, which only grows; slots have its number. Keys,
of which there is no end, are kept as digests.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Hashable
from typing import Any

import attrs

from kvpolicy.errors import OptionError, PoolError
from kvpolicy.grid import ParallelGrid
from kvpolicy.identity import GroupFormat
from kvpolicy.records import Topology
from kvpolicy.sharedfile import BODY_AT, PoolFile
from kvpolicy.slots import Record
from kvpolicy.words import shown

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
        digest: SHA-256 of the key.
        text: the key itself for an error's text, "" where only the digest is known.
    """

    digest: bytes
    text: str = attrs.field(default="", eq=False)

    def __repr__(self) -> str:
        """The key, with the beginning of its digest."""
        short = f"sha256 {self.digest.hex()[:16]}"
        return f"{self.text} ({short})" if self.text else f"({short})"


def stored_key(key: Hashable) -> StoredKey:
    """The digest of a key.

    Raises:
        OptionError: a key that has no stable bytes.
    """
    return StoredKey(hashlib.sha256(_encoded(key)).digest(), shown(key))


def _encoded(key: object) -> bytes:
    """A key's bytes: equal for equal keys, whatever the process and hash seed."""
    if isinstance(key, str):
        kind, body = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        kind, body = b"b", key
    elif isinstance(key, int) and not isinstance(key, bool):
        kind, body = b"i", b"%d" % key
    elif isinstance(key, tuple):
        kind, body = b"t", b"".join(_encoded(one) for one in key)
    else:
        raise OptionError(
            "a key of a shared pool is a str, bytes, an int, or a tuple of these, so that every "
            f"process knows it by the same bytes; not {shown(key)}"
        )
    return b"%s%d:%s" % (kind, len(body), body)


class Terms:
    """The list of texts that slots refer to by number; 0 is the empty text."""

    def __init__(self, file: PoolFile) -> None:
        self._map = file.map
        self._texts = [""]
        self._numbers = {"": 0}
        self._values: dict[int, Any] = {}
        self._made: dict[Hashable, str] = {}

    def _read(self) -> None:
        """Reads what others have added."""
        (count,) = _COUNT.unpack_from(self._map, _TERMS_AT)
        for number in range(len(self._texts), count + 1):
            at, length = _TERM.unpack_from(self._map, self._entry(number))
            text = zlib.decompress(self._map[at : at + length]).decode()
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
        self, fmt: int, topology: int, writers: int, element: int, key: StoredKey | None
    ) -> tuple[Record, frozenset[int]]:
        """The record and the writers of those numbers."""
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
            self._values[number] = read(self._texts[number])
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
