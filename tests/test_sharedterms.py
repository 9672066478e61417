"""Keys of a shared pool: what they are stored as, and what is known of them afterwards."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.sharedterms import MAX_KEY_BYTES, StoredKey, decoded, stored_key

plain = st.one_of(st.text(), st.binary(), st.integers())
keys = st.recursive(plain, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=8)


@given(keys)
def test_a_key_is_kept_whole_or_as_a_digest_by_its_length(key: object) -> None:
    stored = stored_key(key)
    assert stored == stored_key(key)
    if stored.is_whole:
        assert len(stored.raw) <= MAX_KEY_BYTES
        assert decoded(stored.raw) == key
        assert type(decoded(stored.raw)) is type(key)
        assert StoredKey(stored.raw, is_whole=True) == stored
    else:
        assert len(stored.raw) == hashlib.sha256().digest_size
        assert StoredKey(stored.raw, is_whole=False) == stored  # as another process reads it


@given(keys, keys)
def test_keys_are_equal_where_what_is_stored_is_equal(one: object, other: object) -> None:
    assert (stored_key(one) == stored_key(other)) is (one == other)


@given(st.binary(max_size=80))
def test_bytes_of_at_most_60_are_whole(key: bytes) -> None:
    """ "b", the length in two digits at most, ":" and the bytes themselves."""
    assert stored_key(key).is_whole is (len(key) <= 60)


def test_a_key_whose_bytes_are_another_key_s_digest_is_another_key() -> None:
    digest = stored_key(b"x" * 61).raw
    assert stored_key(digest) != stored_key(b"x" * 61)
    assert StoredKey(digest, is_whole=True) != StoredKey(digest, is_whole=False)


def test_keys_are_shown_as_a_reader_needs_them() -> None:
    long = b"x" * 61
    assert repr(stored_key((b"x", 1))) == "(b'x', 1)"
    digest = hashlib.sha256(b"b61:" + long).hexdigest()[:16]
    assert repr(stored_key(long)) == f"{long!r} (sha256 {digest})"
    assert repr(StoredKey(stored_key(long).raw, is_whole=False)) == f"(sha256 {digest})"
