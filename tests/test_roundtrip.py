"""Invariant 3: what is stored under one grid and loaded under another means the same.

The oracle below shares no code with kvpolicy. It knows where an element lies by its logical
coordinates (record, layer, K or V, head, token, element, byte) alone, writes engine caches
through ordinary indexing of logical tensors, and says what the stored bytes must be by the offset
formulas of canonical format v1. A record is the content of one block: its layers, all heads,
``block_size * dcp * pcp`` tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpolicy as kv

SENTINEL = 0xA5
GUARD = 192  # bytes before and after every allocation, a multiple of every item size
HND, NHD = "HND", "NHD"


@functools.cache
def builtins() -> kv.PluginSet:
    return kv.load_plugins(kv.select(names=(), environ={}))


# The oracle: what an element's value is, and who holds it.


@dataclass(frozen=True)
class Row:
    """One layer's (token, head) row: sizes in bytes; a latent is one key of one head."""

    kind: str  # packed, split or latent
    heads: int
    k_size: int
    v_size: int
    itemsize: int
    scale: int = 0

    @property
    def halves(self) -> int:
        return 2 if self.kind == "split" else 1

    def parts(self) -> list[list[tuple[int, int, int]]]:
        """Per half, the (K or V, element, byte) of each byte of a row; a scale is one element."""
        key = [(0, i, b) for i in range(self.k_size) for b in range(self.itemsize)]
        value = [(1, i, b) for i in range(self.v_size) for b in range(self.itemsize)]
        key += [(0, self.k_size, b) for b in range(self.scale)]
        value += [(1, self.v_size, b) for b in range(self.scale)]
        return {"packed": [key + value], "split": [key, value], "latent": [key]}[self.kind]

    @property
    def bytes(self) -> int:
        return len(self.parts()[0])

    def spec(self, block: int, kernel: int, padding: int) -> kv.AttentionSpec | kv.LatentSpec:
        if self.kind == "latent":
            return kv.LatentSpec(
                block_size=block,
                row_bytes=self.bytes,
                page_padding=padding,
                kernel_block_size=kernel,
            )
        return kv.AttentionSpec(
            block_size=block,
            total_kv_heads=self.heads,
            head_size=self.k_size,
            v_head_size=self.v_size,
            itemsize=self.itemsize,
            kv_packing=self.kind,
            scale_bytes=self.scale,
            page_padding=padding,
            kernel_block_size=kernel,
        )


def scrambled(numbers: np.ndarray) -> np.ndarray:
    """One byte of each number's splitmix64 hash: neighbours have nothing in common."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(56)).astype(np.uint8)


@functools.lru_cache(maxsize=512)
def content(row: Row, layer: int, record: int, tokens: int) -> np.ndarray:
    """What a layer of a record holds: uint8 of shape (halves, heads, tokens, row bytes)."""
    coordinates = np.array(row.parts(), dtype=np.int64)  # (halves, row bytes, 3)
    which, element, byte = (coordinates[:, None, None, :, i] for i in range(3))
    head = np.arange(row.heads).reshape(1, -1, 1, 1)
    token = np.arange(tokens).reshape(1, 1, -1, 1)
    number = record * 64 + layer
    for part, base in ((token, 1024), (which, 2), (head, 64), (element, 512), (byte, 64)):
        number = number * base + part
    return scrambled(number)


def canonical_page(row: Row, layer: int, record: int, tokens: int, order: str) -> bytes:
    """Canonical format v1 by its formulas, a row at a time."""
    held, size = content(row, layer, record, tokens), row.bytes
    page = np.zeros(row.halves * row.heads * tokens * size, dtype=np.uint8)
    for half, head, token in itertools.product(range(row.halves), range(row.heads), range(tokens)):
        place = token * row.heads + head if order == NHD else head * tokens + token
        at = half * tokens * row.heads * size + place * size
        page[at : at + size] = held[half, head, token]
    return page.tobytes()


@dataclass(frozen=True)
class Place:
    """One rank's coordinates, and what it holds."""

    pp: int
    pcp: int
    tp: int

    def heads(self, row: Row, grid: kv.ParallelGrid) -> list[int]:
        if row.heads < grid.tp:
            return [self.tp * row.heads // grid.tp]
        share = row.heads // grid.tp
        return list(range(self.tp * share, (self.tp + 1) * share))

    def tokens(self, block: int, grid: kv.ParallelGrid) -> list[int]:
        ranks, mine = grid.dcp * grid.pcp, self.pcp * grid.dcp + self.tp % grid.dcp
        whole = range(block * ranks)
        return (
            [t for t in whole if t // grid.cp_interleave % ranks == mine] if ranks > 1 else [*whole]
        )


def places(grid: kv.ParallelGrid) -> list[Place]:
    """Every rank in world order: stages outermost, then PCP, then TP."""
    return [
        Place(pp, pcp, tp)
        for pp in range(grid.pp)
        for pcp in range(grid.pcp)
        for tp in range(grid.tp)
    ]


# The engine: memory of one rank, in some physical order.


@dataclass
class Caches:
    """A rank's allocations with guards around them, seen in two ways."""

    allocations: list[torch.Tensor] = field(default_factory=list)
    logical: dict[str, torch.Tensor] = field(default_factory=dict)  # [rows, half, head, token, C]
    engine: dict[str, torch.Tensor] = field(default_factory=dict)  # what kvpolicy is given
    slab: torch.Tensor | None = None

    def room(self, *sizes: int) -> torch.Tensor:
        total = math.prod(sizes)
        whole = torch.full((GUARD + total + GUARD,), SENTINEL, dtype=torch.uint8)
        self.allocations.append(whole)
        return whole[GUARD : GUARD + total].view(sizes)

    def bytes(self) -> list[bytes]:
        return [whole.numpy().tobytes() for whole in self.allocations]


@dataclass(frozen=True)
class Engine:
    """How one engine keeps its caches; one of these per side of a round trip."""

    grid: kv.ParallelGrid
    stages: tuple[int, ...]
    block: int
    kernel: int
    padding: int
    physical: str  # one of the six layouts
    num_blocks: int
    typed: bool = False
    axes: tuple[int, ...] = (0, 1, 2, 3)  # the order in which a page's dimensions are shown

    @property
    def order(self) -> str:
        return HND if self.physical.index("H") < self.physical.index("N") else NHD

    @property
    def span(self) -> int:
        return self.block * self.grid.dcp * self.grid.pcp

    def geometry(self, rows: dict[str, Row], extra: dict | None = None) -> kv.CacheGeometry:
        specs = {n: row.spec(self.block, self.kernel, self.padding) for n, row in rows.items()}
        return kv.CacheGeometry(
            layers={**specs, **(extra or {})}, num_blocks=self.num_blocks, stages=self.stages
        )

    def held_layers(self, rows: dict[str, Row], place: Place) -> list[str]:
        first = sum(self.stages[: place.pp])
        return list(rows)[first : first + self.stages[place.pp]]

    def caches(self, rows: dict[str, Row], place: Place) -> Caches:
        made, names = Caches(), self.held_layers(rows, place)
        if self.physical in ("LBHNC", "LBNHC"):
            for name in names:
                row = rows[name]
                tail = self.tail(row, place)
                kernels = self.block // self.kernel
                padded = math.prod(tail) + self.padding // kernels
                cells = made.room(self.num_blocks * kernels, padded)
                self.show(made, name, row, cells[:, : math.prod(tail)].view(-1, *tail))
            return made
        row = rows[names[0]]
        halves, heads = row.halves, len(place.heads(row, self.grid))
        layers, blocks = len(names), self.num_blocks
        if self.physical == "LHBNC":
            kernels = self.block // self.kernel
            whole = made.room(layers, heads, blocks * kernels, self.kernel, row.bytes)
            cut = [whole[i].permute(1, 0, 2, 3).unsqueeze(1) for i in range(layers)]
        elif self.physical == "BHLNC":
            whole = made.room(blocks, heads, layers, self.block, row.bytes)
            cut = [whole[:, :, i].unsqueeze(1) for i in range(layers)]
        else:
            tail = self.tail(row, place)
            whole = made.room(blocks, layers, math.prod(tail) + self.padding)
            pages = whole[:, :, : math.prod(tail)].view(blocks, layers, *tail)
            cut = [pages[:, i] for i in range(layers)]
            made.slab = pages if halves > 1 else pages.squeeze(2)
        for name, pages in zip(names, cut, strict=True):
            self.show(made, name, row, pages)
        return made

    def tail(self, row: Row, place: Place) -> tuple[int, ...]:
        heads = len(place.heads(row, self.grid))
        inner = (heads, self.kernel) if self.order == HND else (self.kernel, heads)
        return (row.halves, *inner, row.bytes)

    def show(self, made: Caches, name: str, row: Row, pages: torch.Tensor) -> None:
        """``pages`` is [rows, half, head, token, C], head and token as the order has them."""
        typed = pages.view(torch.int16) if self.typed and row.itemsize == 2 else pages
        made.engine[name] = typed.permute(0, *(1 + axis for axis in self.axes))
        headed = self.order == HND or self.physical in ("LHBNC", "BHLNC")
        made.logical[name] = pages if headed else pages.transpose(2, 3)

    def write(
        self,
        made: Caches,
        rows: dict[str, Row],
        names: list[str],
        place: Place,
        blocks: list[int],
        records: list[int],
    ) -> None:
        """Writes what this rank holds of records into its blocks, element by element."""
        tokens = place.tokens(self.block, self.grid)
        local = np.arange(self.block)
        for name in self.held_layers(rows, place):
            if name not in names:
                continue
            row, layer = rows[name], list(rows).index(name)
            for block, record in zip(blocks, records, strict=True):
                held = content(row, layer, record, self.span)
                mine = held[:, place.heads(row, self.grid)][:, :, tokens]
                at = block * (self.block // self.kernel) + local // self.kernel
                made.logical[name][at, :, :, local % self.kernel] = torch.from_numpy(
                    np.ascontiguousarray(mine.transpose(2, 0, 1, 3))
                )


@dataclass
class World:
    """All ranks of one engine."""

    engine: Engine
    rows: dict[str, Row]
    caches: list[Caches]
    connectors: list[kv.Connector]

    @classmethod
    def make(
        cls,
        engine: Engine,
        rows: dict[str, Row],
        pool: kv.HostPool,
        by_slab: bool = False,
        **wishes: object,
    ) -> World:
        caches, connectors = [], []
        for number, place in enumerate(places(engine.grid)):
            context = kv.PolicyContext(
                geometry=engine.geometry(rows),
                grid=engine.grid,
                rank=number,
                layout=engine.order,
                **wishes,
            )
            connector = kv.Connector(context, builtins(), host=pool)
            made = engine.caches(rows, place)
            connector.register(made.slab if by_slab else made.engine)
            caches.append(made)
            connectors.append(connector)
        return cls(engine, rows, caches, connectors)

    def write(self, names: list[str], blocks: list[int], records: list[int]) -> None:
        for made, place in zip(self.caches, places(self.engine.grid), strict=True):
            self.engine.write(made, self.rows, names, place, blocks, records)

    def store(self, blocks: list[int], slots: list[int], group: str | None = None) -> None:
        for connector in self.connectors:
            done(connector, connector.store(blocks, slots, group))

    def load(self, slots: list[int], blocks: list[int], group: str | None = None) -> None:
        for connector in self.connectors:
            done(connector, connector.load(slots, blocks, group))

    def bytes(self) -> list[list[bytes]]:
        return [made.bytes() for made in self.caches]

    def as_it_should_be(self, held: list[tuple[list[str], list[int], list[int]]]) -> list:
        """The bytes of fresh caches in which the oracle alone wrote (names, blocks, records)."""
        found = []
        for place in places(self.engine.grid):
            made = self.engine.caches(self.rows, place)
            for names, blocks, records in held:
                self.engine.write(made, self.rows, names, place, blocks, records)
            found.append(made.bytes())
        return found


def done(connector: kv.Connector, job_id: int) -> kv.TransferResult:
    (result,) = connector.wait([job_id], timeout=60)
    assert result.ok, result
    assert result.job_id == job_id
    return result


def sentinel_pool(num_slots: int, record_bytes: int) -> kv.HostPool:
    pool = kv.HostPool(num_slots, record_bytes=record_bytes + 24)
    pool.rows.fill_(SENTINEL)
    return pool


def expected_rows(pool: kv.HostPool, records: dict[int, bytes]) -> np.ndarray:
    rows = np.full(tuple(pool.rows.shape), SENTINEL, dtype=np.uint8)
    for slot, record in records.items():
        rows[slot, : len(record)] = np.frombuffer(record, dtype=np.uint8)
    return rows


# Random cases.


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def rows_of_models(draw: st.DrawFn, alike: bool = False) -> dict[str, Row]:
    def one() -> Row:
        kind = draw(st.sampled_from(["packed", "packed", "split", "latent"]))
        k_size, itemsize = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 2, 3]))
        if kind == "latent":
            return Row(kind, 1, k_size + 1, 0, itemsize)
        return Row(
            kind=kind,
            heads=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
            k_size=k_size,
            v_size=k_size if kind == "split" else draw(st.integers(1, 5)),
            itemsize=itemsize,
            scale=draw(st.sampled_from([0, 0, itemsize, 2 * itemsize])),
        )

    count = draw(st.integers(1, 4))
    kinds = [one()] if alike else [one() for _ in range(draw(st.integers(1, 2)))]
    return {f"layers.{i}.attn": kinds[i % len(kinds)] for i in range(count)}


@st.composite
def engines(
    draw: st.DrawFn, rows: dict[str, Row], span: int, physical: list[str] | None = None
) -> Engine:
    kinds = set(rows.values())

    def fits(tp: int) -> bool:
        return all(row.heads % tp == 0 or tp % row.heads == 0 for row in kinds)

    tp = draw(st.sampled_from([tp for tp in (1, 2, 3, 4, 8) if fits(tp)]))
    replicas = math.gcd(*(max(1, tp // row.heads) for row in kinds))
    dcp = draw(st.sampled_from([d for d in divisors(replicas) if span % d == 0]))
    pcp = draw(st.sampled_from([p for p in (1, 2, 3) if span % (dcp * p) == 0 and p * tp <= 12]))
    block = span // (dcp * pcp)
    pp = draw(st.integers(1, min(len(rows), 3, max(1, 12 // (tp * pcp)))))
    ends = sorted(draw(st.permutations(range(1, len(rows))))[: pp - 1])
    stages = tuple(b - a for a, b in itertools.pairwise([0, *ends, len(rows)]))

    uniform, packed = len(kinds) == 1, all(row.kind != "split" for row in kinds)
    possible = ["LBHNC", "LBNHC"]
    if uniform:
        possible += ["BLHNC", "BLNHC"] + (["LHBNC", "BHLNC"] if packed else [])
    where = draw(st.sampled_from([p for p in physical or possible if p in possible]))
    interleave = draw(st.sampled_from(divisors(block)))
    kernels = [
        k for k in divisors(block) if dcp * pcp == 1 or k % interleave == 0 or interleave % k == 0
    ]
    kernel = draw(st.sampled_from(kernels)) if where.startswith("L") else block
    unit = math.lcm(*(row.itemsize for row in kinds))
    padding = draw(st.sampled_from([0, 0, 1, 3])) * unit * (block // kernel)
    return Engine(
        grid=kv.ParallelGrid(tp=tp, pp=pp, dcp=dcp, pcp=pcp, cp_interleave=interleave),
        stages=stages,
        block=block,
        kernel=kernel,
        padding=0 if where in ("LHBNC", "BHLNC") else padding,
        physical=where,
        num_blocks=draw(st.integers(3, 5)),
        typed=all(row.itemsize == 2 for row in kinds) and draw(st.booleans()),
        axes=tuple(draw(st.permutations(range(4)))),
    )


def scattered(draw: st.DrawFn, limit: int, count: int) -> list[int]:
    return list(draw(st.permutations(range(limit))))[:count]


@given(st.data())
def test_every_element_keeps_its_meaning_from_any_grid_to_any_other(data: st.DataObject) -> None:
    draw = data.draw
    rows = draw(rows_of_models(), label="layers")
    span = draw(st.sampled_from([4, 6, 8, 12]), label="tokens of a canonical page")
    one = draw(engines(rows, span), label="grid A")
    other = draw(engines(rows, span), label="grid B")
    order = draw(st.sampled_from([HND, NHD]), label="canonical order")
    records = draw(st.integers(1, 3), label="records of each group")

    groups = {g.name: list(g.layer_names) for g in one.geometry(rows).groups}
    slots = scattered(draw, 7, records * len(groups))
    jobs = {}
    for number, (group, names) in enumerate(groups.items()):
        mine = slice(number * records, (number + 1) * records)
        jobs[group] = (
            names,
            scattered(draw, one.num_blocks, records),
            slots[mine],
            scattered(draw, other.num_blocks, records),
            list(range(7 * number, 7 * number + records)),
        )
    stored = {
        slot: b"".join(
            canonical_page(rows[name], list(rows).index(name), record, span, order)
            for name in names
        )
        for names, _, slots_of, _, numbers in jobs.values()
        for slot, record in zip(slots_of, numbers, strict=True)
    }
    pool = sentinel_pool(7, max(map(len, stored.values())))

    def world(engine: Engine) -> World:
        asked = None if engine.order == order and draw(st.booleans()) else order
        return World.make(engine, rows, pool, canonical=True, canonical_order=asked)

    writer = world(one)
    for names, blocks, _, _, numbers in jobs.values():
        writer.write(names, blocks, numbers)
    before = writer.bytes()
    for group, (_, blocks, slots_of, _, _) in jobs.items():
        writer.store(blocks, slots_of, group)
    assert writer.bytes() == before  # a store changes nothing in the engine
    np.testing.assert_array_equal(pool.rows.numpy(), expected_rows(pool, stored))

    reader = world(other)
    assert reader.connectors[0].format_id == writer.connectors[0].format_id
    for group, (_, _, slots_of, blocks, _) in jobs.items():
        reader.load(slots_of, blocks, group)
    held = [(names, blocks, numbers) for names, _, _, blocks, numbers in jobs.values()]
    assert reader.bytes() == reader.as_it_should_be(held)
    np.testing.assert_array_equal(pool.rows.numpy(), expected_rows(pool, stored))


@given(st.data())
def test_private_records_come_back_as_they_were(data: st.DataObject) -> None:
    """Canonical not requested: direct, or a cross-layer slab kept as it is, on one grid."""
    draw = data.draw
    slab = draw(st.booleans(), label="cross-layer slab")
    rows = draw(rows_of_models(alike=slab), label="layers")
    span = draw(st.sampled_from([4, 6, 8]), label="tokens of a canonical page")
    engine = draw(engines(rows, span, ["BLHNC", "BLNHC"] if slab else None), label="engine")
    if slab and any(row.scale for row in rows.values()):
        slab = False  # cross-layer abstains: see the refusals
    records = draw(st.integers(1, 3), label="records")
    wishes = {"backend": kv.BackendCapabilities(stride_aware=slab)}

    groups = {g.name: list(g.layer_names) for g in engine.geometry(rows).groups}
    group = draw(st.sampled_from(sorted(groups)), label="group")
    names, numbers = groups[group], list(range(records))
    blocks, slots, back = (
        scattered(draw, limit, records) for limit in (engine.num_blocks, 5, engine.num_blocks)
    )
    stored = {
        slot: b"".join(
            dense_page(engine, rows, name, place, record)
            for place in places(engine.grid)
            for name in engine.held_layers(rows, place)
            if name in names
        )
        for slot, record in zip(slots, numbers, strict=True)
    }
    pool = sentinel_pool(5, 4 * max(map(len, stored.values())) + 4096)
    by_slab = slab and draw(st.booleans(), label="registered as one tensor")
    writer = World.make(engine, rows, pool, by_slab, **wishes)
    assert writer.connectors[0].decision.cross_layer_blocks == slab
    writer.write(names, blocks, numbers)
    writer.store(blocks, slots, group)
    np.testing.assert_array_equal(pool.rows.numpy(), expected_rows(pool, stored))

    reader = World.make(engine, rows, pool, by_slab, **wishes)
    reader.load(slots, back, group)
    assert reader.bytes() == reader.as_it_should_be([(names, back, numbers)])


def dense_page(engine: Engine, rows: dict[str, Row], name: str, place: Place, record: int) -> bytes:
    """A rank's page without padding, in the engine's own order: the K half, then the V half."""
    row = rows[name]
    held = content(row, list(rows).index(name), record, engine.span)
    tokens = place.tokens(engine.block, engine.grid)
    mine = held[:, place.heads(row, engine.grid)][:, :, tokens]
    return (mine if engine.order == HND else mine.transpose(0, 2, 1, 3)).tobytes()
