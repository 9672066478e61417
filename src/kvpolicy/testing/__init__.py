"""The conformance kit for authors of kvpolicy plugins (the extra ``kvpolicy[testing]``).

Subclass `PolicyContract` or `TransferContract` in a test module; pytest does the rest.
"""

from __future__ import annotations

from kvpolicy.testing import fakes, memory, oracle, strategies
from kvpolicy.testing.policy import PolicyContract
from kvpolicy.testing.transfer import TransferContract

__all__ = [
    "PolicyContract",
    "TransferContract",
    "fakes",
    "memory",
    "oracle",
    "strategies",
]
