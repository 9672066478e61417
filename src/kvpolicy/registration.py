"""What a policy makes of the engine's tensors, and the check of what it made.

A registration points into the engine's own storage and never copies, so that what the engine
writes afterwards is seen through it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import torch

from kvpolicy.boxes import MAX_PROOF_RUNS, Box, Dim, boxes_tile, normal
from kvpolicy.caches import KVCaches, LayerPages, read_layer
from kvpolicy.canonical import local_heads
from kvpolicy.context import PolicyContext
from kvpolicy.errors import OptionError, Refusal, RegistrationError
from kvpolicy.pages import StridedPage, page_shape
from kvpolicy.specs import LayerSpec, StateSpec

_RAW_DTYPES = (torch.uint8, torch.int8)


def _pages(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionError(f"a Registration maps layer names to pages, not {type(value).__name__}")
    return MappingProxyType(dict(value))


@attrs.frozen(kw_only=True, eq=False)
class Registration:
    """What a policy answers: every layer of this rank, with its pages.

    Attributes:
        pages: layer name -> `LayerPages`.
    """

    pages: Mapping[str, LayerPages] = attrs.field(converter=_pages)

    @classmethod
    def from_caches(cls, context: PolicyContext, caches: KVCaches) -> Registration:
        """Reads every layer's pages off the engine's tensors, as the core understands them.

        Raises:
            RegistrationError: layers whose tensors contradict the context, each with a reason.
        """
        pages, refusals = {}, {}
        for name, spec in context.stage_layers.items():
            read = read_layer(context, caches, name, spec)
            if isinstance(read, Refusal):
                refusals[name] = read
            else:
                pages[name] = read
        if refusals:
            raise RegistrationError(
                f"{len(refusals)} of {len(context.stage_layers)} layers contradict what the "
                "context declares",
                refusals,
            )
        return cls(pages=pages)


def check_caches(context: PolicyContext, caches: KVCaches) -> Mapping[str, Refusal]:
    """What no policy can mend: layers without memory, unknown ones, wrong dtypes or devices."""
    expected = context.stage_layers
    refusals: dict[str, Refusal] = {}
    devices = {str(t.device) for t in (*caches.tensors.values(), caches.slab) if t is not None}
    for name in caches.layer_names():
        if name not in expected:
            stage = context.place.pp_rank
            refusals[name] = Refusal(
                "layer-unknown",
                f"rank {context.rank} (stage {stage}) holds {len(expected)} layers and this is "
                "none of them",
            )
    for name, spec in expected.items():
        owner = caches.owner(name)
        if owner is None:
            refusals[name] = Refusal(
                "layer-missing",
                f"rank {context.rank} holds this layer and the engine gives no tensor for it",
            )
        elif owner.layout is not torch.strided:
            refusals[name] = Refusal(
                "stride-contradicts-layout",
                f"the tensor is {owner.layout}; a cache is one strided tensor",
            )
        elif len(devices) > 1 or not _has_memory(owner):
            refusals[name] = Refusal(
                "device-contradicts-registration",
                f"tensors lie on {', '.join(sorted(devices))}; one rank's caches lie on one "
                "device with memory",
            )
        elif (refusal := _wrong_dtype(context, spec, owner)) is not None:
            refusals[name] = refusal
    return refusals


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are plain bytes at an address."""
    if tensor.device.type == "meta" or tensor.is_neg() or tensor.is_conj():
        return False
    try:
        return bool(tensor.untyped_storage().data_ptr() or not tensor.numel())
    except RuntimeError:  # a tensor that only pretends, such as those of a tracer
        return False


def is_raw(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are opaque bytes."""
    return tensor.dtype in _RAW_DTYPES


def _wrong_dtype(context: PolicyContext, spec: LayerSpec, tensor: torch.Tensor) -> Refusal | None:
    if is_raw(tensor) or isinstance(spec, StateSpec):
        return None
    found = str(tensor.dtype).removeprefix("torch.")
    itemsize = getattr(spec, "itemsize", tensor.element_size())
    if tensor.element_size() != itemsize:
        return Refusal(
            "shape-contradicts-spec",
            f"elements of {tensor.element_size()} B ({found}), but the spec declares {itemsize} B; "
            "pass the tensor as uint8 if its elements are opaque",
        )
    declared = getattr(torch, context.dtype, None) if context.dtype else None
    if isinstance(declared, torch.dtype) and tensor.dtype != declared:
        return Refusal(
            "dtype-contradicts-context",
            f"the tensor holds {found}, but the context declares {context.dtype}; pass it as "
            "uint8 if its elements are opaque",
        )
    return None


def verify(
    context: PolicyContext, caches: KVCaches, registration: Registration
) -> Mapping[str, Refusal]:
    """What is wrong with a policy's registration, by layer; empty if it is proved.

    Every layer of this rank is there, in the engine's own memory, inside its allocation, holds
    exactly the spec's page once, is what the core itself reads off the tensor where it can, and
    shares no byte with another layer of its group.
    """
    expected = context.stage_layers
    refusals: dict[str, Refusal] = {}
    for name in registration.pages:
        if name not in expected:
            refusals[name] = Refusal(
                "layer-unknown",
                f"registered, but none of the {len(expected)} layers of rank {context.rank}; leave "
                "it out",
            )
    for name, spec in expected.items():
        pages = registration.pages.get(name)
        if pages is None:
            refusals[name] = Refusal(
                "layer-missing",
                f"rank {context.rank} holds this layer, and it was not registered; register all of "
                "context.stage_layers",
            )
        elif type(pages) is not LayerPages or not _is_page(pages.page):
            refusals[name] = Refusal(
                "page-contradicts-spec",
                f"registered as {type(pages).__name__}; possible: a LayerPages whose StridedPage "
                "and Box hold whole numbers",
            )
        elif (refusal := _wrong_pages(context, caches, name, spec, pages)) is not None:
            refusals[name] = refusal
    for group in context.geometry.groups:
        held = [n for n in group.layer_names if n in expected]
        if not any(name in refusals for name in held):
            pages_of = {name: registration.pages[name] for name in held}
            refusals |= _overlaps(pages_of, context.geometry.num_blocks)
    return refusals


def _is_page(page: object) -> bool:
    """Whether a plugin's page can be reckoned with at all; values are not checked at birth."""
    # A subclass could answer otherwise when it is asked again.
    if type(page) is not StridedPage or type(page.box) is not Box:
        return False
    dims = page.box.dims
    if type(dims) is not tuple or not all(type(dim) is Dim for dim in dims):
        return False
    numbers = (page.offset, page.block_stride, page.box.size, page.box.from_offset)
    every = (*numbers, page.box.to_offset, *itertools.chain(*dims))
    return all(type(n) is int for n in every)


def _wrong_pages(
    context: PolicyContext, caches: KVCaches, name: str, spec: LayerSpec, pages: LayerPages
) -> Refusal | None:
    page, num_blocks = pages.page, context.geometry.num_blocks
    owner = caches.owner(name)
    if owner is None or not _same_storage(owner, pages.tensor):
        return Refusal(
            "page-contradicts-spec",
            "registered in other memory than the engine's tensor; a registration never copies",
        )
    heads = local_heads(spec, context.grid)
    if isinstance(heads, Refusal):
        return heads
    expected = page_shape(spec, heads, spec.block_size, context.layout).page_bytes
    if page.page_bytes != expected or page.box.to_offset or not page.box.size > 0:
        return Refusal(
            "page-contradicts-spec",
            f"registered a page of {page.page_bytes} B; this rank's page has {expected} B",
        )
    low, high = _bounds(owner)
    negative = page.block_stride < 0 or any(d.from_stride < 0 for d in page.box.dims)
    first = page.offset + page.box.from_offset
    if negative or first < low or page.end(num_blocks) > high:
        return Refusal(
            "out-of-bounds",
            f"pages reach from byte {first:,} to {page.end(num_blocks):,} of the storage, whose "
            f"tensor holds {low:,} to {high:,}",
        )
    whole = page.box.inverse().from_end == expected  # before NumPy reckons in 64 bits
    proof = whole and boxes_tile([page.box], expected)
    if isinstance(proof, Refusal):
        return proof
    if not proof:
        return Refusal(
            "page-contradicts-spec", f"the registered runs do not tile the page of {expected} B"
        )
    if not page.is_disjoint(num_blocks):
        return Refusal(
            "overlapping",
            f"registered pages of {expected} B at a block stride of {page.block_stride} B share "
            "bytes; register each block where the tensor has it",
        )
    own = read_layer(context, caches, name, spec)
    if isinstance(own, Refusal) and not (is_raw(owner) and owner.dim() <= 2):
        return own  # only of flat bytes may a plugin know what the core cannot read
    if isinstance(own, LayerPages) and not _same_bytes(own.page, page, num_blocks):
        return Refusal(
            "page-contradicts-spec",
            f"registered at byte {page.offset:,} with block stride {page.block_stride:,}, but the "
            f"tensor's own strides say byte {own.page.offset:,}, block stride "
            f"{own.page.block_stride:,}, or another order inside the page",
        )
    return None


def _same_bytes(own: StridedPage, page: StridedPage, num_blocks: int) -> bool:
    same_start = own.offset + own.box.from_offset == page.offset + page.box.from_offset
    theirs = normal(page.box)
    same_box = (own.box.size, own.box.dims) == (theirs.size, theirs.dims)
    return same_start and same_box and (num_blocks == 1 or own.block_stride == page.block_stride)


def _same_storage(one: torch.Tensor, other: object) -> bool:
    if not isinstance(other, torch.Tensor) or one.device != other.device:
        return False
    mine, theirs = one.untyped_storage(), other.untyped_storage()
    return (mine.data_ptr(), mine.nbytes()) == (theirs.data_ptr(), theirs.nbytes())


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and one past its last."""
    item = tensor.element_size()
    low = int(tensor.storage_offset()) * item
    if tensor.numel() == 0:
        return low, low
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    high = low + item * (1 + sum((n - 1) * s for n, s in pairs))
    return low, min(high, tensor.untyped_storage().nbytes())


def _overlaps(pages: Mapping[str, LayerPages], num_blocks: int) -> Mapping[str, Refusal]:
    """Layers of one group that share a byte: whole extents first, then runs where those meet."""
    bases = {n: p.tensor.untyped_storage().data_ptr() + p.page.offset for n, p in pages.items()}
    order = sorted(pages, key=lambda name: bases[name])
    clusters: list[list[str]] = []
    reach = -1
    for name in order:
        page = pages[name].page
        if bases[name] + page.box.from_offset >= reach:
            clusters.append([])
        clusters[-1].append(name)
        reach = max(reach, bases[name] + page.span_bytes(num_blocks))
    refusals: dict[str, Refusal] = {}
    for names in clusters:
        if len(names) > 1:
            found = _shared({n: (bases[n], pages[n].page) for n in names}, num_blocks)
            refusals |= {} if found is None else dict.fromkeys(names, found)
    return refusals


def _shared(placed: Mapping[str, tuple[int, StridedPage]], num_blocks: int) -> Refusal | None:
    strides = {page.block_stride for _, page in placed.values()}
    base = min(at for at, _ in placed.values())
    extent = max(at + page.box.from_end for at, page in placed.values()) - base
    # Equal strides with all layers inside one of them: what holds for a block holds for all.
    repeats = 1 if len(strides) == 1 and extent <= max(strides) else num_blocks
    total = sum(page.box.num_runs for _, page in placed.values()) * repeats
    if total > MAX_PROOF_RUNS:
        return Refusal(
            "proof-too-large",
            f"layers interleave in memory and {total:,} runs would have to be compared",
        )
    starts, sizes, owners = [], [], []
    for index, (at, page) in enumerate(placed.values()):
        runs, _ = page.box.offsets()
        blocks = np.arange(repeats, dtype=np.int64) * page.block_stride
        found = ((at - base) + blocks[:, None] + runs).reshape(-1)
        starts.append(found)
        sizes.append(np.full(len(found), page.box.size, dtype=np.int64))
        owners.append(np.full(len(found), index, dtype=np.int64))
    start, size, owner = (np.concatenate(part) for part in (starts, sizes, owners))
    sort = np.argsort(start, kind="stable")
    start, size, owner = start[sort], size[sort], owner[sort]
    clash = np.flatnonzero(start[1:] < start[:-1] + size[:-1])
    if not len(clash):
        return None
    names = list(placed)
    one, other = names[owner[clash[0]]], names[owner[clash[0] + 1]]
    return Refusal(
        "overlapping",
        f"layers {one!r} and {other!r} of one group share bytes; layers of a group need memory of "
        "their own",
    )
