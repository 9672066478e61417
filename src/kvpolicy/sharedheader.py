"""The first page of a shared pool's file: what the pool is, whose, and whether it was closed.

The shape stays for as long as the file does. A kept pool's nonce and its mark of being open change
with the engine that has it.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from kvpolicy.errors import OptionError
from kvpolicy.words import shown

VERSION = 2
MAX_NONCE_BYTES = 512
MAX_CONTENTS_BYTES = 3_000
HEADER_BYTES = 4096
MAGIC = b"KVPOOL\r\n"
MAKING = b"KVPOOL\r."
"""Stands where `MAGIC` will, until the file is whole."""
_HEADER = struct.Struct("<8sIIQQQQI")  # the last: bytes of the contents
_OPEN_AT = 64
_OPEN = struct.Struct("<I4x16s")  # whether somebody may have written since the last flush; a mark
_NONCE_AT = 96
_LENGTH = struct.Struct("<I")
_CONTENTS_AT = 1024

Contents = Mapping[str, str | int | bool | None]
Page = bytes | bytearray | mmap.mmap


def checked_contents(contents: object) -> Contents:
    """A copy of a pool's ``contents`` argument that nobody changes.

    Raises:
        OptionError: not a flat mapping of names to plain values, or too much of it.
    """
    if contents is None:
        return MappingProxyType({})
    if not isinstance(contents, Mapping):
        raise OptionError(f"a pool's contents are a mapping, not {shown(contents)}")
    for name, value in contents.items():
        if not isinstance(name, str) or not isinstance(value, str | int | None):
            raise OptionError(
                "a pool's contents map names to a str, an int, a bool or None each; not "
                f"{shown(name)} to {shown(value)}"
            )
    try:
        raw = _json(contents)
    except ValueError as error:
        raise OptionError(f"a pool's contents cannot be written as JSON: {error}") from None
    if len(raw) > MAX_CONTENTS_BYTES:
        raise OptionError(
            f"a pool's contents have at most {MAX_CONTENTS_BYTES:,} B as JSON, not {len(raw):,}; "
            "give a digest of what is long"
        )
    return MappingProxyType(json.loads(raw))


def _json(contents: Contents) -> bytes:
    return json.dumps(dict(contents), sort_keys=True, separators=(",", ":")).encode()


@attrs.frozen(kw_only=True)
class PoolShape:
    """What everyone who opens a pool must agree on.

    Attributes:
        num_slots, record_bytes, alignment: as of the pool.
        max_ranks: world ranks that may store, from 0.
        nonce: names the engine whose pool it is.
        contents: what the records' keys mean to their engine.
        size: bytes of the file.
        version: of the file's layout.
    """

    num_slots: int
    record_bytes: int
    alignment: int
    max_ranks: int
    nonce: str
    contents: Contents
    size: int
    version: int = VERSION

    def pack(self, mark: bytes) -> bytes:
        """The page of a pool that is open; it begins with `MAKING`."""
        contents = _json(self.contents)
        numbers = self.num_slots, self.record_bytes, self.alignment, self.size, len(contents)
        page = bytearray(HEADER_BYTES)
        _HEADER.pack_into(page, 0, MAKING, self.version, self.max_ranks, *numbers)
        page[_CONTENTS_AT : _CONTENTS_AT + len(contents)] = contents
        take(page, self.nonce, mark)
        return bytes(page)

    @classmethod
    def unpack(cls, page: bytes) -> PoolShape | None:
        """The shape that a page says, None if it is none or was never finished."""
        if len(page) < HEADER_BYTES or not page.startswith(MAGIC):
            return None
        _, version, ranks, slots, record, alignment, size, length = _HEADER.unpack_from(page)
        raw = page[_CONTENTS_AT : _CONTENTS_AT + length] if version == VERSION else b"{}"
        try:
            contents = json.loads(raw)
        except ValueError:
            return None
        return cls(
            num_slots=slots,
            record_bytes=record,
            alignment=alignment,
            max_ranks=ranks,
            nonce=nonce_of(page),
            contents=contents,
            size=size,
            version=version,
        )

    def differences(self, wanted: PoolShape, *, nonce: bool) -> list[str]:
        """What differs from what a process wants, each in words; the nonce if asked."""
        if self.version != wanted.version:  # then nothing else can be told
            names = ["version"]
        else:
            names = ["num_slots", "record_bytes", "alignment", "max_ranks", *["nonce"] * nonce]
        pairs = [(name, [getattr(self, name)], [getattr(wanted, name)]) for name in names]
        if self.version == wanted.version:
            mine, theirs = self.contents, wanted.contents
            pairs += [
                (f"contents.{name}", _listed(mine, name), _listed(theirs, name))
                for name in sorted({*mine, *theirs})
            ]
        return [
            f"{name} (the pool's {_words(one)}, this process's {_words(other)})"
            for name, one, other in pairs
            if repr(one) != repr(other)  # True is not 1
        ]


def _listed(contents: Contents, name: str) -> list[object]:
    return [contents[name]] if name in contents else []


def _words(value: list[object]) -> str:
    return shown(value[0]) if value else "nothing"


# Of the page, as bytes or as it is mapped.


def nonce_of(page: Page) -> str:
    """Names the engine that has the pool, or had it last."""
    (length,) = _LENGTH.unpack_from(page, _NONCE_AT)
    at = _NONCE_AT + _LENGTH.size
    return page[at : at + min(length, MAX_NONCE_BYTES)].decode(errors="replace")


def open_mark(page: Page) -> bytes | None:
    """The mark of the boot and the file in which it was opened, None if it was closed in order.

    While it is open, the disk may have some of what was written and not the rest.
    """
    is_open, mark = _OPEN.unpack_from(page, _OPEN_AT)
    return mark if is_open else None


def take(page: bytearray | mmap.mmap, nonce: str, mark: bytes) -> None:
    """Says whose the pool is, and that it is open."""
    raw = nonce.encode()
    page[_NONCE_AT : _NONCE_AT + _LENGTH.size + len(raw)] = _LENGTH.pack(len(raw)) + raw
    page[_OPEN_AT : _OPEN_AT + _OPEN.size] = _OPEN.pack(1, mark)


def close(page: mmap.mmap) -> None:
    """Says that all of it is on the disk."""
    page[_OPEN_AT : _OPEN_AT + _OPEN.size] = bytes(_OPEN.size)
