"""The handle of a job in pieces: done when all have ended, in whatever order."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy as kv


class Job:
    job_id = 7


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_what_comes_of_the_pieces_is_the_same_in_any_order(order, failing):
    handle = kv.PiecewiseHandle(Job(), 4)
    for piece in order:
        assert not handle.done()
        if piece in failing:
            handle.ended(piece, 10, (piece, 100), f"piece {piece} failed")
        else:
            handle.ended(piece, 20)
    assert handle.done()
    assert handle.wait(0)
    result = handle.result()
    assert (result.job_id, result.ok) == (7, not failing)
    assert result.bytes == 80 - 10 * len(failing)
    assert result.failed_ids == tuple(sorted({*failing, *([100] if failing else [])}))
    assert result.error == (f"piece {min(failing)} failed" if failing else "")


def test_a_job_without_pieces_is_done():
    handle = kv.PiecewiseHandle(Job(), 0)
    assert handle.done()
    assert (handle.wait(0), handle.result().ok, handle.result().seconds) == (True, True, 0.0)


@pytest.mark.parametrize("pieces", [-1, 1.5, "2", None, True])
def test_pieces_that_cannot_be_are_refused(pieces):
    with pytest.raises(kv.OptionError, match="PiecewiseHandle pieces is a whole number >= 0"):
        kv.PiecewiseHandle(Job(), pieces)


@pytest.mark.parametrize("piece", [-1, 2, 0])
def test_a_piece_ends_once(piece):
    handle = kv.PiecewiseHandle(Job(), 2)
    handle.ended(0, 1)
    with pytest.raises(kv.OptionError, match=f"piece {piece} of 2 has ended already, or is none"):
        handle.ended(piece, 1)
    assert not handle.done()


@pytest.mark.parametrize("timeout", [None, 60])
def test_a_waiter_wakes_with_the_last_piece(timeout):
    handle = kv.PiecewiseHandle(Job(), 2)
    assert not handle.wait(0)
    threads = [threading.Timer(0.01 * n, handle.ended, (n, 1)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    assert handle.wait(timeout)
    assert handle.result().bytes == 2
    for thread in threads:
        thread.join()
