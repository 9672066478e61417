"""The whole model's cache: layers by name, groups that share a block table, pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from kvpolicy.errors import GeometryError
from kvpolicy.specs import SPEC_TYPES, LayerSpec, StateSpec
from kvpolicy.values import Picklable, int_between, is_whole, seeing_self
from kvpolicy.words import close_names, shown

MAX_LAYERS = 4_096


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise GeometryError(f"a group's layer_names are several names, not {names!r}")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise GeometryError(f"a group's layer_names are names, not {name!r}")
    return found


@attrs.frozen(kw_only=True)
class LayerGroup:
    """Layers that share one block table: a block id belongs to one group.

    Attributes:
        name: how store and load name it.
        layer_names: its layers, in the model's order.
    """

    name: str = attrs.field()
    layer_names: tuple[str, ...] = attrs.field(converter=_names)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise GeometryError(f"a group's name is a non-empty string, not {self.name!r}")
        if not self.layer_names:
            raise GeometryError(f"group {self.name!r} has no layers")


def even_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be: the extra ones go before the last stage, as in vLLM.

    ``even_stages(46, 4) == (11, 12, 12, 11)``: the first and last stage also hold the embedding
    and the head.

    Raises:
        GeometryError: fewer layers than stages.
    """
    if pp > num_layers:
        raise GeometryError(f"{num_layers} layers cannot fill {pp} pipeline stages; lower pp")
    stages = [num_layers // pp] * pp
    remainder = num_layers % pp
    for i in range(2, remainder + 2):
        stages[-i] += 1
    return tuple(stages)


def _check_ordered(name: str, values: object) -> None:
    if isinstance(values, set | frozenset):
        raise GeometryError(f"{name} are given in order; a set has none")


def _whole_layers(layers: object) -> Mapping[str, LayerSpec]:
    if not isinstance(layers, Mapping):
        raise GeometryError(f"layers maps names to specs; it cannot be {type(layers).__name__}")
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise GeometryError(f"a geometry has 1 to {MAX_LAYERS:,} layers, not {len(layers):,}")
    for name, spec in layers.items():
        if not isinstance(name, str) or not name:
            raise GeometryError(f"a layer's name is a non-empty string, not {name!r}")
        if not isinstance(spec, SPEC_TYPES):
            raise GeometryError(
                f"layer {name!r} has {type(spec).__name__} for a spec; possible: "
                "AttentionSpec, LatentSpec, StateSpec"
            )
    return MappingProxyType(dict(layers))


def _whole_groups(groups: object, geometry: CacheGeometry) -> tuple[LayerGroup, ...]:
    layers = geometry.layers
    if groups is None:
        return _default_groups(layers)
    _check_ordered("groups", groups)
    owner: dict[str, str] = {}
    names: set[str] = set()
    found = tuple(groups) if isinstance(groups, Iterable) else (groups,)
    for group in found:
        if not isinstance(group, LayerGroup):
            raise GeometryError(f"groups holds LayerGroup values, not {group!r}")
        if group.name in names:
            raise GeometryError(f"two groups are named {group.name!r}; rename one of them")
        names.add(group.name)
        for layer in group.layer_names:
            if layer not in layers:
                raise GeometryError(
                    f"group {group.name!r} names {layer!r}, which is no layer; "
                    f"{close_names(layer, layers)}"
                )
            if layer in owner:
                raise GeometryError(
                    f"layer {layer!r} is named twice, in groups {owner[layer]!r} and {group.name!r}"
                )
            owner[layer] = group.name
        specs = (layers[layer] for layer in group.layer_names)
        sizes = {spec.block_size for spec in specs if not isinstance(spec, StateSpec)}
        if len(sizes) > 1:
            raise GeometryError(
                f"group {group.name!r} shares one block table, but its layers have blocks of "
                f"{', '.join(str(size) for size in sorted(sizes))} tokens"
            )
    missing = [name for name in layers if name not in owner]
    if missing:
        raise GeometryError(
            f"{len(missing)} layers are in no group, {missing[0]!r} first; add each to one"
        )
    return found


def _whole_stages(stages: object, geometry: CacheGeometry) -> tuple[int, ...] | None:
    if stages is None:
        return None
    _check_ordered("stages", stages)
    found = tuple(stages) if isinstance(stages, Iterable) else (stages,)
    for count in found:
        if not is_whole(count) or count < 1:
            raise GeometryError(f"a stage holds a whole number of layers >= 1, not {shown(count)}")
    if sum(found) != len(geometry.layers):
        raise GeometryError(
            f"stages {list(found)} hold {sum(found)} layers; the model has {len(geometry.layers)}"
        )
    return found


def _default_groups(layers: Mapping[str, LayerSpec]) -> tuple[LayerGroup, ...]:
    found: dict[tuple[str, int], list[str]] = {}
    for name, spec in layers.items():
        found.setdefault((spec.kind, spec.block_size), []).append(name)
    kinds = [kind for kind, _ in found]
    return tuple(
        LayerGroup(
            name=kind if kinds.count(kind) == 1 else f"{kind}-{block_size}", layer_names=names
        )
        for (kind, block_size), names in found.items()
    )


@attrs.frozen(kw_only=True)
class CacheGeometry(Picklable):
    """The whole model's KV cache, before any parallelism.

    Attributes:
        layers: layer name -> spec, in the model's order.
        num_blocks: blocks of each layer's cache on a rank.
        groups: a partition of the layers; default: one per kind and block size, named
            ``attention``, ``latent`` and ``state``.
        stages: layers per pipeline stage; default: as even as can be (see `even_stages`).

    Raises:
        GeometryError: no layers, more than 4,096, groups or stages that do not fit them.
    """

    layers: Mapping[str, LayerSpec] = attrs.field(
        converter=_whole_layers,
        eq=lambda layers: tuple(layers.items()),  # order counts
    )
    num_blocks: int = attrs.field(validator=int_between(1, 2**40))
    groups: tuple[LayerGroup, ...] = attrs.field(
        default=None,
        converter=seeing_self(_whole_groups),  # type: ignore[misc] # see there
    )
    stages: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=seeing_self(_whole_stages),  # type: ignore[misc] # see there
    )

    def stages_for(self, pp: int) -> tuple[int, ...]:
        """Layers per stage under ``pp``.

        Raises:
            GeometryError: explicit stages of another number, or fewer layers than stages.
        """
        if self.stages is None:
            return even_stages(len(self.layers), pp)
        if len(self.stages) != pp:
            raise GeometryError(
                f"{len(self.stages)} stages are given for pp={pp}; give {pp} stages, or "
                f"pp={len(self.stages)}"
            )
        return self.stages

    def stage_of(self, pp: int) -> Mapping[str, int]:
        """Layer name -> the pipeline stage that holds it, under ``pp``."""
        stages = self.stages_for(pp)
        owners = [stage for stage, count in enumerate(stages) for _ in range(count)]
        return dict(zip(self.layers, owners, strict=True))

    def group_of(self, layer_name: str) -> LayerGroup:
        """The group that holds the layer."""
        return next(group for group in self.groups if layer_name in group.layer_names)
