"""The engine's cache tensors of one rank, and where the core reads their pages to lie.

Nothing here copies: pages point into the engine's own storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvpolicy.canonical import local_heads
from kvpolicy.context import PolicyContext
from kvpolicy.errors import OptionError, Refusal
from kvpolicy.pages import PageShape, StridedPage, page_shape
from kvpolicy.specs import MAX_SIZE, LayerSpec
from kvpolicy.strides import TensorFacts, bare_row_bytes, page_of_tensor
from kvpolicy.values import is_whole
from kvpolicy.words import shown


@attrs.frozen(kw_only=True)
class SlabPlacement:
    """Where one layer's pages lie in a slab, in bytes.

    Attributes:
        offset: from the slab's first byte to block 0's page.
        block_stride: from one block's page to the next one's (kernel blocks are adjacent).
    """

    offset: int
    block_stride: int

    def __attrs_post_init__(self) -> None:
        for name in ("offset", "block_stride"):
            value = getattr(self, name)
            if not is_whole(value) or value < 0:
                raise OptionError(f"SlabPlacement.{name} is a number of bytes, not {shown(value)}")


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(f"KVCaches takes a mapping by layer name, not {type(value).__name__}")
    return MappingProxyType(dict(value))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are one run of memory, in whatever order."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()


@attrs.frozen(kw_only=True, eq=False)
class KVCaches:
    """The engine's cache tensors of one rank: one per layer, or one slab with its placement.

    Attributes:
        tensors: layer name -> tensor; dimension 0 counts blocks (kernel blocks, where those are
            smaller). Views of a slab may stand here too.
        slab: the one allocation that holds all layers, if the engine made one.
        placements: layer name -> where its pages lie in ``slab``, for layers not in ``tensors``.
    """

    tensors: Mapping[str, torch.Tensor] = attrs.field(factory=dict, converter=_mapping)
    slab: torch.Tensor | None = None
    placements: Mapping[str, SlabPlacement] = attrs.field(factory=dict, converter=_mapping)

    def __attrs_post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise OptionError(
                    f"the cache of layer {name!r} is a torch tensor, not {type(tensor).__name__}"
                )
        if self.slab is not None and not isinstance(self.slab, torch.Tensor):
            raise OptionError(f"a slab is a torch tensor, not {type(self.slab).__name__}")
        for name, placement in self.placements.items():
            if not isinstance(placement, SlabPlacement):
                raise OptionError(
                    f"the placement of layer {name!r} is a SlabPlacement, not "
                    f"{type(placement).__name__}"
                )
        if self.placements and self.slab is not None and not _is_dense(self.slab):
            raise OptionError(
                f"placements are offsets into a slab that is one run of memory; a view of shape "
                f"{list(self.slab.shape)} and strides {list(self.slab.stride())} is not"
            )
        if self.placements and self.slab is None:
            raise OptionError("placements say where layers lie in a slab, but no slab is given")
        if both := sorted({*self.tensors} & {*self.placements}):
            raise OptionError(f"layer {both[0]!r} has a tensor and a placement; give one of them")

    @classmethod
    def from_slab(
        cls,
        slab: torch.Tensor,
        layer_names: Iterable[str],
        *,
        layer_dim: int | None = None,
        offset: int = 0,
        layer_stride: int | None = None,
        block_stride: int | None = None,
    ) -> KVCaches:
        """One slab that holds the layers in this order.

        Either by dimension, for a slab whose dimensions are layers, blocks and then a page's (in
        any physical order): ``layer_dim`` counts the layers. Or by placement in bytes: the page
        of layer l and block b begins at ``offset + l*layer_stride + b*block_stride``.

        Raises:
            OptionError: both or neither are given, the dimension does not count the layers, or a
                layer is named twice.
        """
        if isinstance(layer_names, str) or not isinstance(layer_names, Iterable):
            raise OptionError(f"layer_names are several names, not {shown(layer_names)}")
        names = list(layer_names)
        if not isinstance(slab, torch.Tensor):
            raise OptionError(f"a slab is a torch tensor, not {type(slab).__name__}")
        numbers = {"layer_dim": layer_dim, "offset": offset, "layer_stride": layer_stride}
        for name, value in (numbers | {"block_stride": block_stride}).items():
            if value is not None and not is_whole(value):
                raise OptionError(f"from_slab's {name} is a whole number, not {shown(value)}")
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise OptionError(f"layer {twice!r} is named twice")
        if layer_stride is not None and block_stride is not None and layer_dim is None:
            placed = {
                name: SlabPlacement(offset=offset + i * layer_stride, block_stride=block_stride)
                for i, name in enumerate(names)
            }
            return cls(slab=slab, placements=placed)
        if layer_dim is None or offset or layer_stride is not None or block_stride is not None:
            raise OptionError(
                "a slab is cut by layer_dim, or by layer_stride and block_stride in bytes; give "
                "one way, whole"
            )
        found = slab.shape[layer_dim] if 0 <= layer_dim < slab.dim() else None
        if found != len(names):
            raise OptionError(
                f"dimension {layer_dim} of the slab, shape {list(slab.shape)}, counts {found} "
                f"layers; {len(names)} are named"
            )
        cut = {name: slab.select(layer_dim, i) for i, name in enumerate(names)}
        return cls(tensors=cut, slab=slab)

    def layer_names(self) -> tuple[str, ...]:
        """Every layer that has memory here."""
        return (*self.tensors, *self.placements)

    def owner(self, layer_name: str) -> torch.Tensor | None:
        """The tensor that holds a layer's pages, or None."""
        if layer_name in self.tensors:
            return self.tensors[layer_name]
        return self.slab if layer_name in self.placements else None


def as_caches(
    given: KVCaches | Mapping[str, torch.Tensor] | torch.Tensor, context: PolicyContext
) -> KVCaches:
    """What an engine hands over, as KVCaches.

    Args:
        given: a KVCaches; layer name -> tensor; or one slab whose first two dimensions are the
            layers of this rank and the blocks.
        context: names the layers.

    Raises:
        OptionError: something else, or dimensions that do not say which counts layers.
    """
    if isinstance(given, KVCaches):
        return given
    if isinstance(given, Mapping):
        return KVCaches(tensors=given)
    if not isinstance(given, torch.Tensor):
        raise OptionError(
            "register takes a mapping of layer names to tensors, a KVCaches or one slab tensor, "
            f"not {type(given).__name__}"
        )
    names = list(context.stage_layers)
    counted = [dim for dim in (0, 1) if dim < given.dim() and given.shape[dim] == len(names)]
    if len(counted) == 2:
        raise OptionError(
            f"a slab of shape {list(given.shape)} has as many blocks as layers, which cannot be "
            "told apart; say which dimension counts layers: KVCaches.from_slab(slab, names, "
            "layer_dim=0 or 1)"
        )
    if not counted:
        raise OptionError(
            f"a slab's first two dimensions are {len(names)} layers and "
            f"{context.geometry.num_blocks} blocks; found shape {list(given.shape)}"
        )
    return KVCaches.from_slab(given, names, layer_dim=counted[0])


@attrs.frozen(kw_only=True, eq=False)
class LayerPages:
    """Where a layer's pages lie: a tensor for its storage, and the pages in that storage."""

    tensor: torch.Tensor = attrs.field(repr=False)
    page: StridedPage


def _facts(tensor: torch.Tensor) -> TensorFacts:
    item = tensor.element_size()
    return TensorFacts(
        shape=tuple(tensor.shape),
        strides=tuple(s * item for s in tensor.stride()),
        itemsize=item,
        offset=int(tensor.storage_offset()) * item,
    )


def read_layer(
    context: PolicyContext, caches: KVCaches, name: str, spec: LayerSpec
) -> LayerPages | Refusal:
    """A layer's pages as the core reads them, or what contradicts the context."""
    owner = caches.owner(name)
    if owner is None:
        return Refusal("layer-missing", f"the engine gives no tensor for {name!r}")
    heads = local_heads(spec, context.grid)
    if isinstance(heads, Refusal):
        return heads
    num_blocks = context.geometry.num_blocks
    facts = _facts(owner)
    if name in caches.placements:
        placed = _placed_facts(caches, name, facts, spec, heads, context)
        if isinstance(placed, Refusal):
            return placed
        facts = placed
    page = page_of_tensor(facts, spec, heads, context.layout, num_blocks)
    return page if isinstance(page, Refusal) else LayerPages(tensor=owner, page=page)


def _placed_facts(
    caches: KVCaches,
    name: str,
    slab: TensorFacts,
    spec: LayerSpec,
    heads: int,
    context: PolicyContext,
) -> TensorFacts | Refusal:
    """A placed layer as a byte tensor whose rows are (kernel blocks of) dense pages."""
    placement = caches.placements[name]
    shape = page_shape(spec, heads, spec.block_size, context.layout)
    ratio, rest = divmod(spec.block_size, spec.kernel_block_size)
    stride = placement.block_stride
    if rest or stride % ratio:
        return Refusal(
            "kernel-block-not-dividing",
            f"a block of {spec.block_size} tokens, {stride} B apart, is not a whole number of "
            f"kernel blocks of {spec.kernel_block_size}; choose a kernel block that divides the "
            "block, and a stride that is a multiple of their ratio",
        )
    if context.geometry.num_blocks > 1 and stride < shape.page_bytes:
        return _short_cell(spec, shape, "block", stride)
    if spec.scale_bytes:
        cell = _cell_bytes(caches.placements, context.geometry.group_of(name).layer_names, name)
        short = _short_cell(spec, shape, "layer", cell)
        if cell < shape.page_bytes and short.code == "scale-does-not-fit":
            return short
    return TensorFacts(
        shape=(context.geometry.num_blocks * ratio, shape.page_bytes // ratio),
        strides=(stride // ratio, 1),
        itemsize=1,
        offset=slab.offset + placement.offset,
    )


def _cell_bytes(placements: Mapping[str, SlabPlacement], group: Iterable[str], name: str) -> int:
    """Bytes from a layer's page to the next one of its group in the slab."""
    own = placements[name]
    others = (placements[other] for other in group if other in placements)
    gaps = (
        (other.offset - own.offset) % own.block_stride
        for other in others
        if own.block_stride and other.block_stride == own.block_stride
    )
    return min((gap for gap in gaps if gap), default=MAX_SIZE)


def _short_cell(spec: LayerSpec, shape: PageShape, what: str, stride: int) -> Refusal:
    bare_row = bare_row_bytes(spec, shape)
    bare = shape.page_bytes // shape.row_bytes * bare_row
    if spec.scale_bytes and stride >= bare:
        return Refusal(
            "scale-does-not-fit",
            f"a {what} stride of {stride} B has room for rows of {bare_row} B, not "
            f"for the spec's rows of {shape.row_bytes} B with inline scales",
        )
    return Refusal(
        "overlapping",
        f"a {what} stride of {stride} B is less than the page of {shape.page_bytes} B",
    )
