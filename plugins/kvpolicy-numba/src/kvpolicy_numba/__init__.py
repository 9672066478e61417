"""Copies of KV blocks on the host with streaming stores, compiled by numba.

``kvpolicy_numba.policy`` is the plugin; it is made, and its kernel compiled or read from numba's
cache, when it is first asked for. Where that cannot be, `Unavailable` says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy_numba.errors import Unavailable

if TYPE_CHECKING:
    from kvpolicy_numba.engine import NumbaCopy

    policy: NumbaCopy

__all__ = ["NumbaCopy", "Unavailable", "policy"]


def __getattr__(name: str) -> Any:
    if name not in ("NumbaCopy", "policy"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpolicy_numba.engine import NumbaCopy

    value = NumbaCopy if name == "NumbaCopy" else NumbaCopy()
    globals()[name] = value
    return value
