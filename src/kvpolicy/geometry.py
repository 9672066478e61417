"""What each layer's cache holds: specs, groups, stages. Sizes in bytes unless a name says else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import attrs

from kvpolicy.errors import GeometryError

MAX_LAYERS = 4_096
MAX_BLOCK_TOKENS = 65_536
MAX_SIZE = 2**40

KVPacking = Literal["packed", "split"]


def _what(instance: object, attribute: attrs.Attribute[Any]) -> str:
    return f"{type(instance).__name__}.{attribute.name}"


def shown(value: object) -> str:
    """A rejected value for an error's text; a huge number by its length, which Python can print."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    return repr(value)


def int_between(least: int, most: int) -> Any:
    """A validator for a whole number in [least, most]; True and False are not numbers."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise GeometryError(
                f"{_what(instance, attribute)} is a whole number, not "
                f"{type(value).__name__} {value!r}"
            )
        if not least <= value <= most:
            raise GeometryError(
                f"{_what(instance, attribute)} lies between {least:,} and {most:,}, not "
                f"{shown(value)}"
            )

    return check


def _seeing_self(convert: Callable[[Any, Any], object]) -> Any:
    """A converter that is also given the instance, whose earlier fields are set.

    mypy's attrs plugin does not know Converter objects, hence the ignores where one is used.
    """
    return attrs.Converter(convert, takes_self=True)


def _or(name: str) -> Any:
    """A converter: None becomes this instance's earlier field ``name``."""
    return _seeing_self(lambda value, spec: getattr(spec, name) if value is None else value)


def _check_page(spec: AttentionSpec | LatentSpec, token_bytes: int) -> None:
    """Offsets are 64-bit numbers, and a page of such a size is a mistake."""
    if (page_bytes := token_bytes * spec.block_size) > MAX_SIZE:
        raise GeometryError(
            f"{type(spec).__name__} declares a page of {page_bytes:,} B ({spec.block_size} tokens "
            f"of {token_bytes:,} B); a page has at most {MAX_SIZE:,} B"
        )


_size = int_between(1, MAX_SIZE)
_extra = int_between(0, MAX_SIZE)
_tokens = int_between(1, MAX_BLOCK_TOKENS)


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """Keys and values of one attention layer, as the whole model has them.

    Attributes:
        block_size: tokens of a block.
        total_kv_heads: KV heads of the model's layer, before TP.
        head_size: elements of one key head.
        itemsize: bytes of one element.
        kv_packing: "packed" (K and V adjacent per (token, head)) or "split" (K half, V half).
        v_head_size: elements of one value head; None means ``head_size``.
        scale_bytes: bytes of an inline scale beside each K and each V row.
        page_padding: unused bytes at the end of every page in memory.
        kernel_block_size: tokens of the block that the attention kernel addresses; None means
            ``block_size``.

    Raises:
        GeometryError: a size that cannot be; split K/V with unequal sizes.
    """

    kind: ClassVar[str] = "attention"

    block_size: int = attrs.field(validator=_tokens)
    total_kv_heads: int = attrs.field(validator=int_between(1, 65_536))
    head_size: int = attrs.field(validator=_size)
    itemsize: int = attrs.field(validator=int_between(1, 64))
    kv_packing: KVPacking = attrs.field(default="packed")
    v_head_size: int = attrs.field(
        default=None,
        converter=_or("head_size"),  # type: ignore[misc] # see _seeing_self
        validator=_size,
    )
    scale_bytes: int = attrs.field(default=0, validator=_extra)
    page_padding: int = attrs.field(default=0, validator=_extra)
    kernel_block_size: int = attrs.field(
        default=None,
        converter=_or("block_size"),  # type: ignore[misc] # see _seeing_self
        validator=_tokens,
    )

    def __attrs_post_init__(self) -> None:
        if self.kv_packing not in ("packed", "split"):
            raise GeometryError(
                f"AttentionSpec.kv_packing is 'packed' or 'split', not {self.kv_packing!r}"
            )
        if self.split and self.v_head_size != self.head_size:
            raise GeometryError(
                f"split K/V has two equal halves, but head_size is {self.head_size} and "
                f"v_head_size {self.v_head_size}; declare kv_packing='packed'"
            )
        _check_page(self, self.halves * self.total_kv_heads * self.row_bytes)

    @property
    def split(self) -> bool:
        """Whether a page is a K half, then a V half."""
        return self.kv_packing == "split"

    @property
    def halves(self) -> int:
        """2 for split K/V, else 1."""
        return 2 if self.split else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one (token, head) row; of one half's row for split K/V."""
        if self.split:
            return self.head_size * self.itemsize + self.scale_bytes
        return (self.head_size + self.v_head_size) * self.itemsize + 2 * self.scale_bytes


@attrs.frozen(kw_only=True)
class LatentSpec:
    """A compressed latent (MLA): one row per token, the same on every TP rank.

    Attributes:
        block_size: tokens of a block.
        row_bytes: bytes of one token's row.
        page_padding: unused bytes at the end of every page in memory.
        kernel_block_size: as for `AttentionSpec`.

    Raises:
        GeometryError: a size that cannot be.
    """

    kind: ClassVar[str] = "latent"

    block_size: int = attrs.field(validator=_tokens)
    row_bytes: int = attrs.field(validator=_size)
    page_padding: int = attrs.field(default=0, validator=_extra)
    kernel_block_size: int = attrs.field(
        default=None,
        converter=_or("block_size"),  # type: ignore[misc] # see _seeing_self
        validator=_tokens,
    )

    split: ClassVar[bool] = False
    halves: ClassVar[int] = 1
    total_kv_heads: ClassVar[int] = 1
    scale_bytes: ClassVar[int] = 0

    def __attrs_post_init__(self) -> None:
        _check_page(self, self.row_bytes)


@attrs.frozen(kw_only=True)
class StateSpec:
    """Recurrent state of one rank: opaque bytes, kept per rank, never portable.

    Attributes:
        state_bytes: bytes of one block's state on one rank.
        page_padding: unused bytes at the end of every page in memory.

    Raises:
        GeometryError: a size that cannot be.
    """

    kind: ClassVar[str] = "state"

    state_bytes: int = attrs.field(validator=_size)
    page_padding: int = attrs.field(default=0, validator=_extra)

    block_size: ClassVar[int] = 1
    kernel_block_size: ClassVar[int] = 1
    split: ClassVar[bool] = False
    halves: ClassVar[int] = 1
    scale_bytes: ClassVar[int] = 0


LayerSpec = AttentionSpec | LatentSpec | StateSpec
PagedSpec = AttentionSpec | LatentSpec
SPEC_TYPES = (AttentionSpec, LatentSpec, StateSpec)


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
    owner: dict[str, str] = {}
    names: set[str] = set()
    found = tuple(groups) if isinstance(groups, Iterable) else (groups,)
    for group in found:
        if not isinstance(group, LayerGroup):
            raise GeometryError(f"groups holds LayerGroup values, not {group!r}")
        if group.name in names:
            raise GeometryError(f"two groups are named {group.name!r}")
        names.add(group.name)
        for layer in group.layer_names:
            if layer not in layers:
                raise GeometryError(f"group {group.name!r} names {layer!r}, which is no layer")
            if layer in owner:
                raise GeometryError(
                    f"layer {layer!r} is named twice, in groups {owner[layer]!r} and {group.name!r}"
                )
            owner[layer] = group.name
        sizes = {layers[layer].block_size for layer in group.layer_names}
        if len(sizes) > 1:
            raise GeometryError(
                f"group {group.name!r} shares one block table, but its layers have blocks of "
                f"{', '.join(str(size) for size in sorted(sizes))} tokens"
            )
    missing = [name for name in layers if name not in owner]
    if missing:
        raise GeometryError(f"{len(missing)} layers are in no group, {missing[0]!r} first")
    return found


def _whole_stages(stages: object, geometry: CacheGeometry) -> tuple[int, ...] | None:
    if stages is None:
        return None
    found = tuple(stages) if isinstance(stages, Iterable) else (stages,)
    for count in found:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
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
class CacheGeometry:
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

    layers: Mapping[str, LayerSpec] = attrs.field(converter=_whole_layers, hash=False)
    num_blocks: int = attrs.field(validator=int_between(1, 2**40))
    groups: tuple[LayerGroup, ...] = attrs.field(
        default=None,
        converter=_seeing_self(_whole_groups),  # type: ignore[misc] # see there
    )
    stages: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=_seeing_self(_whole_stages),  # type: ignore[misc] # see there
    )

    def stages_for(self, pp: int) -> tuple[int, ...]:
        """Layers per stage under ``pp``.

        Raises:
            GeometryError: explicit stages of another number, or fewer layers than stages.
        """
        if self.stages is None:
            return even_stages(len(self.layers), pp)
        if len(self.stages) != pp:
            raise GeometryError(f"{len(self.stages)} stages are given for pp={pp}")
        return self.stages

    def stage_of(self, pp: int) -> Mapping[str, int]:
        """Layer name -> the pipeline stage that holds it, under ``pp``."""
        stages = self.stages_for(pp)
        owners = [stage for stage, count in enumerate(stages) for _ in range(count)]
        return dict(zip(self.layers, owners, strict=True))

    def group_of(self, layer_name: str) -> LayerGroup:
        """The group that holds the layer."""
        return next(group for group in self.groups if layer_name in group.layer_names)
