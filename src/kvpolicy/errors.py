"""The exception tree, and the one value that is not an exception: a refusal.

Everything raised on purpose derives from `KVPolicyError`::

    KVPolicyError
    ├── GeometryError (ValueError)            a spec, group, stage, grid or size that cannot be
    ├── LayoutError (ValueError)              no such layout
    ├── ConfigError (ValueError)              a model's config.json, by key
    ├── OptionError (ValueError)              an option, argument or environment variable
    ├── UnknownPluginError (LookupError)      a plugin was named that is not installed
    ├── PluginError (RuntimeError)            a plugin misbehaves; says which, from where
    │   └── DuplicatePluginError              two distributions provide one plugin name
    ├── PolicyConflictError (RuntimeError)    opposite votes at one priority
    ├── CertificationError (RuntimeError)     start-up refused, one reason per layer
    ├── RegistrationError (RuntimeError)      tensors or a registration that contradict the decision
    ├── FormatMismatchError (ValueError)      stored bytes of another format, field by field
    ├── BlockIdError (ValueError)             block ids or slots
    ├── PoolError (RuntimeError)              the host pool: sizes, an empty or half-written slot
    ├── UnknownJobError (LookupError)         a job id that this connector never gave
    ├── NoTransferError (RuntimeError)        no transfer plugin takes the job
    └── ClosedError (RuntimeError)            the connector or the shared pool is closed
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import attrs

from kvpolicy.words import span_of

REFUSAL_CODES: Mapping[str, str] = {
    "heads-not-divisible": "The KV heads can be neither split nor replicated evenly over TP.",
    "dcp-not-divisible": "DCP spreads tokens over replicas, and the replicas do not divide by it.",
    "interleave-not-dividing": "The context-parallel interleave does not divide the block size.",
    "interleave-crosses-kernel-block": "An interleave chunk would straddle two kernel blocks.",
    "kernel-block-not-dividing": "The kernel block size does not divide the block size.",
    "kv-halves-need-block-compact": "Split K/V in a layout whose page is not one run of bytes.",
    "kernel-split-needs-layer-compact": "Kernel blocks inside a block that holds several layers.",
    "padding-needs-block-compact": "Padding in a layout whose page is not one run of bytes.",
    "scale-does-not-fit": "A row in memory is shorter than the spec's row with inline scales.",
    "shape-contradicts-spec": "The tensor's shape or dtype is not what the spec declares.",
    "stride-contradicts-layout": "The tensor's strides are not those of the declared layout.",
    "dtype-contradicts-context": "The tensor's dtype is not the one that the context declares.",
    "device-contradicts-registration": "Tensors on several devices, or on one without memory.",
    "out-of-bounds": "A page reaches outside the memory that holds it.",
    "overlapping": "Two pages of one group, or two runs of one page, share bytes.",
    "layer-missing": "A layer of this rank has no tensor or no page.",
    "layer-unknown": "A tensor or page is named for a layer that this rank does not hold.",
    "not-tiling": "The ranks' runs do not tile the canonical page exactly once.",
    "page-contradicts-spec": "A page that is not the one which the layer's tensor holds.",
    "proof-too-large": "More byte runs than this library is willing to prove.",
    "uncertified": "No policy takes layers of this kind under this decision.",
}
"""Every refusal code with its meaning; `docs/reference/errors.md` says what to do about each."""

_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@attrs.frozen
class Refusal:
    """Why something is not proved: a stable ``code`` and a sentence that says what to do.

    Attributes:
        code: one of `REFUSAL_CODES`, or a plugin's own (lower case, words joined by hyphens).
        detail: one sentence for people: what was found, what was possible, what to do.
    """

    code: str = attrs.field()
    detail: str = attrs.field()

    @code.validator
    def _check_code(self, _attribute: object, value: object) -> None:
        if not isinstance(value, str) or not _CODE.fullmatch(value):
            raise OptionError(
                f"a refusal's code is lower-case words joined by hyphens, not {value!r}"
            )

    @detail.validator
    def _check_detail(self, _attribute: object, value: object) -> None:
        if not isinstance(value, str) or not value.strip():
            raise OptionError(f"a refusal needs a sentence that says why; got {value!r}")

    def __str__(self) -> str:
        """``code: detail``."""
        return f"{self.code}: {self.detail}"


class KVPolicyError(Exception):
    """The parent of every error that kvpolicy raises on purpose."""

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = 3
    explanation: dict[str, Any] | None = None
    """What `Connector.explain` would have said, where start-up got far enough to know it."""


class GeometryError(KVPolicyError, ValueError):
    """A spec, group, stage list, grid or size that cannot be; nothing was built."""

    code = "geometry"
    exit_status = 2


class LayoutError(KVPolicyError, ValueError):
    """A name that is no layout, or a layout where it cannot stand."""

    code = "layout"
    exit_status = 2


class ConfigError(KVPolicyError, ValueError):
    """A model's config from which no cache geometry can be derived; names the key.

    Attributes:
        key: the key that is missing or wrong, or "" for the file as a whole.
    """

    code = "config"
    exit_status = 2

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class OptionError(KVPolicyError, ValueError):
    """An option, argument or environment variable with a value that it cannot have."""

    code = "option"
    exit_status = 2


class UnknownPluginError(KVPolicyError, LookupError):
    """A selection or priority names a plugin that is not there; the text has close names."""

    code = "unknown-plugin"
    exit_status = 2

    def __init__(self, message: str, plugin_name: str = "") -> None:
        super().__init__(message)
        self.plugin_name = plugin_name


class PluginError(KVPolicyError, RuntimeError):
    """A plugin misbehaves.

    Attributes:
        plugin_name: its entry point's name.
        distribution, version: the installed distribution that ships it, "" for an object.
    """

    code = "plugin"

    def __init__(
        self, message: str, *, plugin_name: str = "", distribution: str = "", version: str = ""
    ) -> None:
        super().__init__(message)
        self.plugin_name = plugin_name
        self.distribution = distribution
        self.version = version


class DuplicatePluginError(PluginError):
    """Two distributions (or objects) provide one plugin name; both are named."""

    code = "duplicate-plugin"


class PolicyConflictError(KVPolicyError, RuntimeError):
    """Opposite votes at the deciding priority; the text names both and how to settle it.

    Attributes:
        plugin_names: the plugins that disagree, sorted.
        priority: the priority at which they do.
    """

    code = "conflict"

    def __init__(self, message: str, plugin_names: Iterable[str] = (), priority: int = 0) -> None:
        super().__init__(message)
        self.plugin_names = tuple(sorted(plugin_names))
        self.priority = priority


def _alike(refusals: Mapping[str, Refusal]) -> list[str]:
    """A line for each reason, with the layers that share it."""
    layers: dict[Refusal, list[str]] = {}
    for name, why in refusals.items():
        layers.setdefault(why, []).append(name)
    return [
        f"  {span_of(names)}{f' ({len(names)} layers)' if len(names) > 1 else ''}: {why}"
        for why, names in layers.items()
    ]


class _WithRefusals(KVPolicyError, RuntimeError):
    def __init__(self, message: str, refusals: Mapping[str, Refusal] | None = None) -> None:
        self.refusals: Mapping[str, Refusal] = dict(refusals or {})
        super().__init__("\n".join([message, *_alike(self.refusals)]))
        self.message = message


class CertificationError(_WithRefusals):
    """Start-up is refused: layers cannot be certified.

    Attributes:
        refusals: layer name -> `Refusal`, one for every layer that is refused.
        explanation: what `Connector.explain` would have said, or None.
    """

    code = "uncertified"


class RegistrationError(_WithRefusals):
    """Tensors that contradict the decision, or a plugin's registration that is wrong.

    Attributes:
        refusals: layer name -> `Refusal`.
        plugin_name, distribution, version: who made the registration, "" if nobody did yet.
    """

    code = "registration"

    def __init__(
        self,
        message: str,
        refusals: Mapping[str, Refusal] | None = None,
        *,
        plugin_name: str = "",
        distribution: str = "",
        version: str = "",
    ) -> None:
        super().__init__(message, refusals)
        self.plugin_name = plugin_name
        self.distribution = distribution
        self.version = version


class FormatMismatchError(KVPolicyError, ValueError):
    """Stored bytes have another format than the one asked for.

    Attributes:
        differences: the differing fields, each as "field: stored X, wanted Y".
    """

    code = "format-mismatch"

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n".join([message, *(f"  {line}" for line in self.differences)]))


class BlockIdError(KVPolicyError, ValueError):
    """Block ids or slots out of range, repeated as destinations, in use, or not integers."""

    code = "block-id"


class PoolError(KVPolicyError, RuntimeError):
    """The host pool cannot do it: sizes differ, a slot is empty, incomplete or in use."""

    code = "pool"


class UnknownJobError(KVPolicyError, LookupError):
    """A job id that this connector never gave, or whose result was already delivered."""

    code = "unknown-job"


class NoTransferError(KVPolicyError, RuntimeError):
    """Every transfer plugin said "not mine" to a job."""

    code = "no-transfer"


class ClosedError(KVPolicyError, RuntimeError):
    """The connector or the shared pool is closed, or was never given what the call needs."""

    code = "closed"
