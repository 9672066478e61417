"""The first page of a shared pool's file."""

from __future__ import annotations

from types import MappingProxyType

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.sharedheader import (
    HEADER_BYTES,
    MAGIC,
    MAKING,
    MAX_CONTENTS_BYTES,
    MAX_NONCE_BYTES,
    PoolShape,
    checked_contents,
    nonce_of,
    open_mark,
    take,
)

BOOT = bytes(range(1, 17))
SHAPE = PoolShape(
    num_slots=4,
    record_bytes=100,
    alignment=64,
    max_ranks=256,
    nonce="A",
    contents={"model": "m", "n": 1},
    size=2**20,
)
big = st.integers(1, 2**63)
nonces = st.text(st.characters(min_codepoint=32, max_codepoint=0x1F600, exclude_categories=["Cs"]))
values = st.one_of(st.text(max_size=9), st.integers(-(2**70), 2**70), st.booleans(), st.none())
contents = st.dictionaries(st.text(max_size=9), values, max_size=20)
shapes = st.builds(
    PoolShape,
    num_slots=big,
    record_bytes=big,
    alignment=big,
    max_ranks=st.integers(1, 4096),
    nonce=nonces.filter(lambda text: len(text.encode()) <= MAX_NONCE_BYTES),
    contents=contents,
    size=big,
)


@given(shapes, st.binary(min_size=16, max_size=16))
def test_a_shape_is_read_as_it_was_written(shape: PoolShape, boot: bytes) -> None:
    page = shape.pack(boot)
    assert len(page) == HEADER_BYTES
    assert page.startswith(MAKING)
    assert PoolShape.unpack(page) is None  # not finished
    finished = MAGIC + page[len(MAGIC) :]
    found = PoolShape.unpack(finished)
    assert found == shape
    kinds = {name: type(value) for name, value in found.contents.items()}
    assert kinds == {name: type(value) for name, value in shape.contents.items()}
    assert found.differences(shape, nonce=True) == []
    assert open_mark(finished) == boot


@given(shapes, nonces.filter(lambda text: len(text.encode()) <= MAX_NONCE_BYTES))
def test_another_engine_takes_it_and_the_shape_stays(shape: PoolShape, nonce: str) -> None:
    page = bytearray(MAGIC + shape.pack(BOOT)[len(MAGIC) :])
    take(page, nonce, bytes(16))
    assert nonce_of(page) == nonce
    assert open_mark(page) == bytes(16)
    assert PoolShape.unpack(bytes(page)) == attrs.evolve(shape, nonce=nonce)


@pytest.mark.parametrize("size", [0, 7, 8, 64, HEADER_BYTES - 1])
def test_a_page_that_is_none_has_no_shape(size: int) -> None:
    page = MAGIC + SHAPE.pack(BOOT)[len(MAGIC) :]
    assert PoolShape.unpack(page[:size]) is None
    assert PoolShape.unpack(bytes(HEADER_BYTES)) is None
    at = page.index(b'{"model"')
    assert PoolShape.unpack(page[:at] + b"(" + page[at + 1 :]) is None  # contents that are none


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, ["version (the pool's 2, this process's 9)"]),
        (
            {"version": 9, "num_slots": 5, "contents": {}},
            ["version (the pool's 2, this process's 9)"],
        ),
        ({"nonce": "B"}, []),
        ({"size": 1}, []),  # which the others tell
        (
            {"contents": {"model": "m", "n": True}},
            ["contents.n (the pool's 1, this process's True)"],
        ),
    ],
)
def test_differences_are_told_in_words(change: dict, words: list[str]) -> None:
    assert SHAPE.differences(attrs.evolve(SHAPE, **change), nonce=False) == words


def test_the_nonce_is_told_where_it_counts() -> None:
    other = attrs.evolve(SHAPE, nonce="B")
    assert SHAPE.differences(other, nonce=True) == ["nonce (the pool's 'A', this process's 'B')"]


@given(contents)
def test_contents_are_copied(given_contents: dict) -> None:
    before = dict(given_contents)
    checked = checked_contents(given_contents)
    given_contents["another"] = 1
    assert checked == before
    assert isinstance(checked, MappingProxyType)


def test_contents_are_as_long_as_their_json() -> None:
    most = MAX_CONTENTS_BYTES - len('{"m":""}')
    assert checked_contents({"m": "x" * most})["m"] == "x" * most
    assert checked_contents(None) == {}
