"""A job as engines make them: hundreds of blocks, dozens of layers, pages of many KiB.

The small trials find what goes wrong by coordinates; a limit that a copy engine has inside, such
as a table of so many entries, shows only here. One rank, so that a record is its pages in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvpolicy import (
    AttentionSpec,
    CacheGeometry,
    Connector,
    HostPool,
    PolicyContext,
)
from kvpolicy.testing.contract import UNDER_TEST, plugin_set

SIZES = ((300, 2, 4), (3, 48, 256))
"""(blocks, layers, tokens of a block): many small pages, and many large ones."""
_SEED = 13
_ROW_BYTES = 256


def large_difference(plugin: object, device: str, size: tuple[int, int, int]) -> str | None:
    """Stores and loads one large job; what is wrong with it, or None.

    Args:
        plugin: the copy engine.
        device: where the caches lie.
        size: blocks, layers and tokens of a block (see `SIZES`).
    """
    blocks, layers, tokens = size
    random = np.random.default_rng(_SEED)
    spec = AttentionSpec(block_size=tokens, total_kv_heads=1, head_size=_ROW_BYTES // 2, itemsize=1)
    names = [f"layer.{i}" for i in range(layers)]
    geometry = CacheGeometry(layers=dict.fromkeys(names, spec), num_blocks=blocks)
    caches = {
        name: torch.from_numpy(
            random.integers(0, 256, (blocks, 1, tokens, _ROW_BYTES), dtype=np.uint8)
        ).to(device)
        for name in names
    }
    pool = HostPool(blocks)
    slots = random.permutation(blocks).tolist()
    back = random.permutation(blocks).tolist()
    everything = list(range(blocks))
    context = PolicyContext(geometry=geometry, canonical=True)
    with Connector(context, plugin_set({UNDER_TEST: plugin}), host=pool) as connector:
        connector.register(caches)
        before = [cache.cpu().clone() for cache in caches.values()]
        (stored,) = connector.wait([connector.store(everything, slots)])
        if not stored.ok:
            return f"the store failed: {stored.error}"
        if (wrong := _first_wrong(_records(before, everything), pool.rows[slots])) is not None:
            return f"stored block {wrong} of {blocks} x {layers} layers is not what it was"
        for cache in caches.values():
            cache.zero_()
        (loaded,) = connector.wait([connector.load(slots, back)])
        if not loaded.ok:
            return f"the load failed: {loaded.error}"
        after = _records([cache.cpu() for cache in caches.values()], back)
        if (wrong := _first_wrong(_records(before, everything), after)) is not None:
            return f"loaded block {wrong} of {blocks} x {layers} layers is not what was stored"
    return None


def _records(caches: Sequence[torch.Tensor], blocks: Sequence[int]) -> torch.Tensor:
    """Each block's pages, layer after layer: with one rank, that is its record."""
    return torch.cat([cache[list(blocks)].flatten(1) for cache in caches], dim=1)


def _first_wrong(expected: torch.Tensor, found: torch.Tensor) -> int | None:
    same = (expected == found[:, : expected.shape[1]]).all(dim=1)
    wrong = torch.nonzero(~same).flatten().tolist()
    return int(wrong[0]) if wrong else None
