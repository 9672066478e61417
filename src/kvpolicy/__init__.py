"""kvpolicy: the policy engine for KV-cache layout and offload in LLM serving.

Names that need torch are resolved when they are first used, so that ``import kvpolicy`` and
``kvpolicy plugins`` do without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvpolicy.boxes import Box, Dim
from kvpolicy.canonical import PageMapping
from kvpolicy.certify import Certificate, certify
from kvpolicy.context import BackendCapabilities, PolicyContext
from kvpolicy.decision import CastVote, LayoutDecision, Vote
from kvpolicy.errors import (
    REFUSAL_CODES,
    BlockIdError,
    CertificationError,
    ClosedError,
    ConfigError,
    DuplicatePluginError,
    FormatMismatchError,
    GeometryError,
    KVPolicyError,
    LayoutError,
    NoTransferError,
    OptionError,
    PluginError,
    PolicyConflictError,
    PoolError,
    Refusal,
    RegistrationError,
    UnknownJobError,
    UnknownPluginError,
)
from kvpolicy.geometry import CacheGeometry, LayerGroup
from kvpolicy.grid import ParallelGrid, Rank
from kvpolicy.hooks import hookimpl
from kvpolicy.identity import GroupFormat
from kvpolicy.layout import KVCacheLayout
from kvpolicy.pages import StridedPage
from kvpolicy.plugins import PluginInfo, PluginSet, load_plugins, select
from kvpolicy.slabs import slab_obstacle
from kvpolicy.slots import StoredRecord
from kvpolicy.specs import AttentionSpec, LatentSpec, StateSpec
from kvpolicy.workers import Workers

if TYPE_CHECKING:
    from kvpolicy.caches import KVCaches, LayerPages, SlabPlacement
    from kvpolicy.connector import Connector
    from kvpolicy.hostpool import HostPool
    from kvpolicy.pieces import PiecewiseHandle
    from kvpolicy.plan import PlannedCopy, TransferPlan
    from kvpolicy.registration import Registration
    from kvpolicy.sharedpool import PoolAddress, SharedHostPool
    from kvpolicy.transfer import Span, TransferHandle, TransferJob, TransferPart, TransferResult

__version__ = "0.1.0"

_LAZY = {
    "Connector": "connector",
    "HostPool": "hostpool",
    "KVCaches": "caches",
    "LayerPages": "caches",
    "PiecewiseHandle": "pieces",
    "PlannedCopy": "plan",
    "PoolAddress": "sharedpool",
    "Registration": "registration",
    "SharedHostPool": "sharedpool",
    "SlabPlacement": "caches",
    "Span": "transfer",
    "TransferHandle": "transfer",
    "TransferJob": "transfer",
    "TransferPart": "transfer",
    "TransferPlan": "plan",
    "TransferResult": "transfer",
}

__all__ = [
    "REFUSAL_CODES",
    "AttentionSpec",
    "BackendCapabilities",
    "BlockIdError",
    "Box",
    "CacheGeometry",
    "CastVote",
    "Certificate",
    "CertificationError",
    "ClosedError",
    "ConfigError",
    "Connector",
    "Dim",
    "DuplicatePluginError",
    "FormatMismatchError",
    "GeometryError",
    "GroupFormat",
    "HostPool",
    "KVCacheLayout",
    "KVCaches",
    "KVPolicyError",
    "LatentSpec",
    "LayerGroup",
    "LayerPages",
    "LayoutDecision",
    "LayoutError",
    "NoTransferError",
    "OptionError",
    "PageMapping",
    "ParallelGrid",
    "PiecewiseHandle",
    "PlannedCopy",
    "PluginError",
    "PluginInfo",
    "PluginSet",
    "PolicyConflictError",
    "PolicyContext",
    "PoolAddress",
    "PoolError",
    "Rank",
    "Refusal",
    "Registration",
    "RegistrationError",
    "SharedHostPool",
    "SlabPlacement",
    "Span",
    "StateSpec",
    "StoredRecord",
    "StridedPage",
    "TransferHandle",
    "TransferJob",
    "TransferPart",
    "TransferPlan",
    "TransferResult",
    "UnknownJobError",
    "UnknownPluginError",
    "Vote",
    "Workers",
    "__version__",
    "certify",
    "hookimpl",
    "load_plugins",
    "select",
    "slab_obstacle",
]


def __getattr__(name: str) -> Any:
    if name == "models":
        return importlib.import_module(f"{__name__}.models")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
