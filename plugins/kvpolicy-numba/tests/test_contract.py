"""The plugin keeps the transfer contract of ``kvpolicy.testing``."""

from __future__ import annotations

import kvpolicy_numba

from kvpolicy.testing import TransferContract


class TestNumbaCopy(TransferContract):
    examples = 25

    def make_transfer(self):
        return kvpolicy_numba.NumbaCopy()


class TestInTheCallersThread(TransferContract):
    examples = 10

    def make_transfer(self):
        return kvpolicy_numba.NumbaCopy(threads=0)


class TestInSmallPieces(TransferContract):
    """Every block is a piece of its own, and three threads share them."""

    examples = 10

    def make_transfer(self):
        return kvpolicy_numba.NumbaCopy(threads=3, piece_bytes=1)
