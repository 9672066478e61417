"""Jobs of small models, made by the core, and what the bytes of each must be."""

from __future__ import annotations

import numpy as np
import torch

import kvpolicy
from kvpolicy import AttentionSpec, CacheGeometry, KVCacheLayout, ParallelGrid

HND, NHD = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
SENTINEL = 0xA5


class Recorder:
    """Takes every job, moves nothing, keeps it."""

    priority = 2000

    def __init__(self):
        self.jobs = []

    @kvpolicy.hookimpl
    def transfer(self, job):
        self.jobs.append(job)
        return kvpolicy.TransferHandle.finished(
            kvpolicy.TransferResult(job_id=job.job_id, ok=True, bytes=job.bytes, seconds=0.0)
        )


class Rank:
    """One rank of a canonical engine with dense per-layer caches of random bytes."""

    def __init__(
        self,
        plugin,
        *,
        heads=4,
        tp=1,
        rank=0,
        layout=HND,
        tokens=4,
        row=16,
        layers=3,
        blocks=6,
        slots=5,
        pool=None,
        seed=0,
        canonical=True,
        dtype=torch.uint8,
    ):
        # Rows of K and V of one byte elements: row bytes are 2 * head_size.
        self.spec = AttentionSpec(
            block_size=tokens, total_kv_heads=heads, head_size=row // 2, itemsize=1
        )
        names = [f"layer.{i}" for i in range(layers)]
        self.plugin = plugin
        self.context = kvpolicy.PolicyContext(
            geometry=CacheGeometry(layers=dict.fromkeys(names, self.spec), num_blocks=blocks),
            grid=ParallelGrid(tp=tp),
            rank=rank,
            canonical=canonical,
            layout=layout,
        )
        self.connector = kvpolicy.Connector(
            self.context, {"under-test": plugin}, host=slots if pool is None else pool
        )
        mine = max(1, heads // tp)
        shape = (mine, tokens) if layout is HND else (tokens, mine)
        random = np.random.default_rng(seed)
        self.caches = {
            name: torch.from_numpy(
                random.integers(0, 256, (blocks, *shape, row), dtype=np.uint8)
            ).view(dtype)
            for name in names
        }
        self.connector.register(self.caches)
        self.rows.fill_(SENTINEL)

    def twin(self):
        """Another connector of the same caches and plugin, with a pool of its own."""
        made = kvpolicy.Connector(self.context, {"under-test": self.plugin}, host=len(self.rows))
        made.register(self.caches)
        return made

    @property
    def rows(self):
        return self.connector.host.rows

    def bytes(self):
        """(layer, block) -> the dense page, copied."""
        return np.stack([c.view(torch.uint8).flatten(1).numpy() for c in self.caches.values()])

    def runs(self):
        """Every run of a block: layer, offset in its page, offset in the row, bytes."""
        proof = kvpolicy.certify(self.spec, self.context.grid, self.context.layout)
        mapping = proof.mapping(self.context.rank)
        return [
            (layer, local, layer * mapping.canonical_page_bytes + canonical, size)
            for layer in range(len(self.caches))
            for local, canonical, size in mapping.byte_runs()
        ]

    def stored(self, pages, rows, blocks, slots):
        """The rows after a store, by the certified runs."""
        rows = rows.copy()
        for layer, local, at, size in self.runs():
            for block, slot in zip(blocks, slots, strict=True):
                rows[slot, at : at + size] = pages[layer, block, local : local + size]
        return rows

    def loaded(self, pages, rows, slots, blocks):
        """The pages after a load, by the certified runs."""
        pages = pages.copy()
        for layer, local, at, size in self.runs():
            for block, slot in zip(blocks, slots, strict=True):
                pages[layer, block, local : local + size] = rows[slot, at : at + size]
        return pages
