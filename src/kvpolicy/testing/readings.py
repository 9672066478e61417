"""What a registration says, read byte by byte; and engine memory that contradicts its context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy import KVCaches, KVPolicyError, LayerPages, PolicyContext, Refusal
from kvpolicy.testing import oracle
from kvpolicy.testing.memory import Memory


def storage_bytes(tensor: torch.Tensor) -> oracle.Bytes:
    """All bytes of the storage behind a tensor, copied to the CPU."""
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole: oracle.Bytes = raw.set_(storage, 0, (storage.nbytes(),), (1,)).cpu().numpy().copy()
    return whole


def addresses(pages: LayerPages, block: int) -> NDArray[np.int64] | str:
    """The address in the storage of every byte of a block's dense page, in the page's order.

    Returns:
        int64 of one dimension; or what is wrong, in words.
    """
    page, box = pages.page, pages.page.box
    size = box.size
    for dim in box.dims:
        size *= dim.times
    at = np.full(max(size, 0), -1, dtype=np.int64)
    here = np.arange(box.size, dtype=np.int64) + page.offset + block * page.block_stride
    here, there = here + box.from_offset, np.arange(box.size, dtype=np.int64) + box.to_offset
    for dim in box.dims:
        step = np.arange(dim.times, dtype=np.int64)[:, None]
        here = (here + step * dim.from_stride).reshape(-1)
        there = (there + step * dim.to_stride).reshape(-1)
    if len(there) and (there.min() < 0 or there.max() >= size):
        return f"the box reaches page byte {there.max()}, but maps only {size} bytes"
    at[there] = here
    if (at < 0).any():
        missing = int(np.flatnonzero(at < 0)[0])
        return f"page byte {missing} of block {block} is mapped by no run, another one twice"
    return at


def misread(context: PolicyContext, memory: Memory, name: str, pages: LayerPages) -> str | None:
    """Where a registered layer is not what its coordinates say, in words; None: it all is.

    Every block holds the record of its own number.
    """
    stored = storage_bytes(pages.tensor)
    seen: NDArray[np.int64] = np.zeros(len(stored), dtype=np.int64)
    for block in range(context.geometry.num_blocks):
        at = addresses(pages, block)
        if isinstance(at, str):
            return at
        wanted = oracle.dense_page(context, name, memory.place, block)
        if len(at) != len(wanted):
            return f"a page of {len(at)} B is registered; this rank's page has {len(wanted)} B"
        if at.min() < 0 or at.max() >= len(stored):
            return (
                f"block {block} reaches from byte {at.min()} to {at.max()} of a storage of "
                f"{len(stored)} B"
            )
        wrong = np.flatnonzero(stored[at] != wanted)
        if len(wrong):
            byte = int(wrong[0])
            return (
                f"page byte {byte} of block {block} is read at byte {at[byte]} of the storage as "
                f"0x{stored[at[byte]]:02x}, but its coordinates say 0x{wanted[byte]:02x} "
                f"({len(wrong)} of {len(wanted)} bytes of the page differ)"
            )
        np.add.at(seen, at, 1)
    if (seen > 1).any():
        return f"byte {int(np.flatnonzero(seen > 1)[0])} of the storage belongs to two page bytes"
    return None


def refusals(error: KVPolicyError) -> list[Refusal]:
    """The refusals that an error carries, whatever its type."""
    found = getattr(error, "refusals", {})
    return [one for one in dict(found).values() if isinstance(one, Refusal)]


def contradictions(memory: Memory) -> Iterator[tuple[str, KVCaches]]:
    """What an engine may show wrongly, each with a name: all of them must be refused."""
    caches = memory.caches
    name = caches.layer_names()[0]
    tensors, placements = dict(caches.tensors), dict(caches.placements)
    yield f"layer {name!r} is missing", _without(caches, name)
    if name in tensors:
        tensor = tensors[name]
        yield f"layer {name!r} has a block too few", _with(caches, {**tensors, name: tensor[:-1]})
        if tensor.dim() == 1:
            return
        longest = max(range(1, tensor.dim()), key=lambda dim: tensor.shape[dim])
        shorter = tensor.narrow(longest, 0, tensor.shape[longest] - 1)
        yield f"pages of layer {name!r} are too small", _with(caches, {**tensors, name: shorter})
    elif caches.slab is not None:
        far = attrs.evolve(placements[name], offset=caches.slab.numel())
        placed = {**placements, name: far}
        yield f"layer {name!r} lies past the slab", attrs.evolve(caches, placements=placed)


def _without(caches: KVCaches, name: str) -> KVCaches:
    tensors = {one: held for one, held in caches.tensors.items() if one != name}
    placements = {one: held for one, held in caches.placements.items() if one != name}
    return KVCaches(tensors=tensors, slab=caches.slab, placements=placements)


def _with(caches: KVCaches, tensors: Mapping[str, torch.Tensor]) -> KVCaches:
    return KVCaches(tensors=tensors, slab=caches.slab, placements=caches.placements)
