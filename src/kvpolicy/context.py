"""Everything that a policy may look at when it votes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvpolicy.certify import canonical_order_of
from kvpolicy.dtypes import plain_dtype
from kvpolicy.errors import GeometryError, OptionError
from kvpolicy.geometry import CacheGeometry
from kvpolicy.grid import ParallelGrid, Rank
from kvpolicy.layout import KVCacheLayout
from kvpolicy.specs import LayerSpec
from kvpolicy.values import Picklable


def _layouts(value: Iterable[str | KVCacheLayout] | None) -> frozenset[KVCacheLayout] | None:
    if value is None:
        return None
    names = [value] if isinstance(value, str | KVCacheLayout) else value
    if not isinstance(names, Iterable):
        raise OptionError(f"BackendCapabilities.layouts is a set of layouts or None, not {value!r}")
    return frozenset(KVCacheLayout.parse(name) for name in names)


def _layout(value: str | KVCacheLayout) -> KVCacheLayout:
    return KVCacheLayout.parse(value)


def _order(value: str | KVCacheLayout | None) -> KVCacheLayout | None:
    return None if value is None else KVCacheLayout.parse(value)


def _copied(value: Any) -> Any:
    """Options of options are copied, so that the caller's later changes change nothing."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _options(value: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(f"options is a mapping, not {type(value).__name__} {value!r}")
    return MappingProxyType({key: _copied(inner) for key, inner in value.items()})


def _plain(value: str) -> str:
    if not isinstance(value, str):
        raise OptionError(
            f"dtype, encoding and a backend are given by name, not {type(value).__name__} {value!r}"
        )
    return value.strip()


def _dtype(value: str) -> str:
    """One name for one type, so that two spellings never make two formats."""
    return plain_dtype(_plain(value)) or _plain(value).removeprefix("torch.")


def _truth(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    optional = attribute.name == "stride_aware"
    if not isinstance(value, bool) and not (optional and value is None):
        possible = "True, False or None" if optional else "True or False"
        raise OptionError(
            f"{type(instance).__name__}.{attribute.name} is {possible}, not {value!r}"
        )


@attrs.frozen(kw_only=True)
class BackendCapabilities:
    """What the attention backend can address. Unknown counts as no.

    Attributes:
        name: for people.
        stride_aware: whether its kernels follow a cache's strides; None: unknown.
        layouts: the layouts that it takes; None: unknown, so that ``stride_aware`` alone decides.

    Raises:
        LayoutError: a layout that does not exist.
        OptionError: another value than a bool or None.
    """

    name: str = attrs.field(default="", converter=_plain)
    stride_aware: bool | None = attrs.field(default=None, validator=_truth)
    layouts: frozenset[KVCacheLayout] | None = attrs.field(default=None, converter=_layouts)


@attrs.frozen(kw_only=True)
class PolicyContext(Picklable):
    """The engine's wishes and the model's geometry, as one rank states them.

    Attributes:
        geometry: the whole model's cache.
        grid: the ranks.
        rank: this process's world rank.
        canonical: whether stored bytes must be free of topology.
        canonical_order: LBHNC or LBNHC; None: the engine's own order. Means nothing unless
            ``canonical``.
        layout: gives the engine's head/token order.
        backend: what the attention backend can address.
        dtype: the cache's element type by name ("bfloat16"; "bf16" is the same); "" if it is not
            known. A name that torch does not have is kept as it is.
        encoding: how elements encode numbers beyond their dtype ("" if they do not).
        options: free options; ``options["kvpolicy"]`` selects and orders plugins.

    Raises:
        GeometryError: not a geometry, grid or backend, a rank outside the grid, stages that do not
            fit.
        LayoutError: a layout or canonical order that cannot be.
        OptionError: another value of the wrong type.
    """

    geometry: CacheGeometry = attrs.field()
    grid: ParallelGrid = attrs.field(factory=ParallelGrid)
    rank: int = attrs.field(default=0)
    canonical: bool = attrs.field(default=False, validator=_truth)
    canonical_order: KVCacheLayout | None = attrs.field(default=None, converter=_order)
    layout: KVCacheLayout = attrs.field(default=KVCacheLayout.LBHNC, converter=_layout)
    backend: BackendCapabilities = attrs.field(factory=BackendCapabilities)
    dtype: str = attrs.field(default="", converter=_dtype)
    encoding: str = attrs.field(default="", converter=_plain)
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=_options, hash=False)

    def __attrs_post_init__(self) -> None:
        for value, kind in (
            (self.geometry, CacheGeometry),
            (self.grid, ParallelGrid),
            (self.backend, BackendCapabilities),
        ):
            if not isinstance(value, kind):
                raise GeometryError(
                    f"a PolicyContext takes a {kind.__name__}, not {type(value).__name__}"
                )
        self.grid.rank(self.rank)
        self.geometry.stages_for(self.grid.pp)
        canonical_order_of(self.layout, self.canonical_order)

    @property
    def place(self) -> Rank:
        """This rank's coordinates."""
        return self.grid.rank(self.rank)

    @property
    def order(self) -> KVCacheLayout:
        """The order of stored pages: the canonical order, or the engine's where none is asked."""
        return canonical_order_of(self.layout, self.canonical_order if self.canonical else None)

    @property
    def stages(self) -> tuple[Mapping[str, LayerSpec], ...]:
        """The layers of each pipeline stage, in the model's order."""
        layers = iter(self.geometry.layers.items())
        return tuple(
            dict(itertools.islice(layers, count))
            for count in self.geometry.stages_for(self.grid.pp)
        )

    @property
    def stage_layers(self) -> Mapping[str, LayerSpec]:
        """The layers of this rank's pipeline stage, in the model's order."""
        return self.stages[self.place.pp_rank]
