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
from hypothesis import given, settings
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
def rows_of_models(
    draw: st.DrawFn,
    alike: bool = False,
    kinds: tuple[str, ...] = ("packed", "packed", "split", "latent"),
) -> dict[str, Row]:
    def one() -> Row:
        kind = draw(st.sampled_from(kinds))
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
    found = [one()] if alike else [one() for _ in range(draw(st.integers(1, 2)))]
    return {f"layers.{i}.attn": found[i % len(found)] for i in range(count)}


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
    rows = data.draw(rows_of_models(), label="layers")
    span = data.draw(st.sampled_from([4, 6, 8, 12]), label="tokens of a canonical page")
    one = data.draw(engines(rows, span), label="grid A")
    other = data.draw(engines(rows, span), label="grid B")
    check_a_round_trip(data, rows, span, one, other)


@pytest.mark.parametrize("there", list(kv.KVCacheLayout.__members__))
@given(st.data())
@settings(max_examples=max(1, settings.default.max_examples // 6))
def test_every_element_keeps_its_meaning_from_any_layout_to_any_other(
    there: str, data: st.DataObject
) -> None:
    """Allocations in all six orders, which equal layers of packed rows allow."""
    rows = data.draw(rows_of_models(alike=True, kinds=("packed", "latent")), label="layers")
    one = data.draw(engines(rows, 8), label="grid A")
    other = data.draw(engines(rows, 8, [there]), label="grid B")
    check_a_round_trip(data, rows, 8, one, other)


def check_a_round_trip(
    data: st.DataObject, rows: dict[str, Row], span: int, one: Engine, other: Engine
) -> None:
    """Stores scattered blocks with every rank of one engine, loads them with every rank of the
    other, and compares all memory of both, guards and padding too, with what the oracle says."""
    draw = data.draw
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


# Worked examples. A letter is a (head, token): lower case its K byte, upper case its V byte.


def engine_of(tp: int, **changes: object) -> Engine:
    known = {
        "grid": kv.ParallelGrid(tp=tp),
        "stages": (1,),
        "block": 2,
        "kernel": 2,
        "padding": 0,
        "physical": "LBHNC",
        "num_blocks": 3,
    }
    return Engine(**{**known, **changes})


def letters(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def test_worked_example_two_heads_of_two_tokens_stored_at_tp1_and_loaded_at_tp2() -> None:
    """Heads 0, 1 and tokens 0, 1: aA is head 0 token 0, bB head 0 token 1, cC and dD head 1."""
    spec = kv.AttentionSpec(block_size=2, total_kv_heads=2, head_size=1, itemsize=1)
    geometry = kv.CacheGeometry(layers={"l": spec}, num_blocks=2)
    pool = kv.HostPool(1)

    def connector(tp: int, rank: int, layout: str, cache: torch.Tensor) -> kv.Connector:
        context = kv.PolicyContext(
            geometry=geometry,
            grid=kv.ParallelGrid(tp=tp),
            rank=rank,
            layout=layout,
            canonical=True,
            canonical_order=NHD,
        )
        made = kv.Connector(context, builtins(), host=pool)
        made.register({"l": cache})
        return made

    whole = torch.zeros(2, 8, dtype=torch.uint8)
    whole[1] = letters("aAbBcCdD")  # HND: head by head
    one = connector(1, 0, HND, whole)
    done(one, one.store([1], [0]))
    assert pool.rows[0, :8].numpy().tobytes() == b"aAcCbBdD"  # NHD: token by token

    for rank, held in enumerate([b"aAbB", b"cCdD"]):
        part = torch.zeros(2, 4, dtype=torch.uint8)
        two = connector(2, rank, HND, part)
        done(two, two.load([0], [0]))
        assert part.numpy().tobytes() == held + bytes(4)


def test_worked_example_split_halves_keep_their_places() -> None:
    """The K half, then the V half, each token by token: TP2 rank 1 holds head 1 of both."""
    spec = kv.AttentionSpec(
        block_size=2, total_kv_heads=2, head_size=1, itemsize=1, kv_packing="split"
    )
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers={"l": spec}, num_blocks=1),
        grid=kv.ParallelGrid(tp=2),
        rank=1,
        layout=NHD,
        canonical=True,
    )
    pool = sentinel_pool(1, 8)
    connector = kv.Connector(context, builtins(), host=pool)
    connector.register({"l": letters("cdCD").view(1, 2, 2, 1, 1)})  # [block, half, token, head, C]
    done(connector, connector.store([0], [0]))
    hole = chr(SENTINEL)  # head 0 is rank 0's to write
    found = pool.rows[0, :8].numpy().tobytes().decode("latin-1")
    assert found == f"{hole}c{hole}d{hole}C{hole}D"


@pytest.mark.parametrize(
    ("layout", "stored"),
    [(HND, "aAbBcCdDeEfFgGhH"), (NHD, "aAeEbBfFcCgGdDhH")],
)
def test_c10_a_page_of_two_kernel_blocks_is_stored_like_an_unsplit_one(
    layout: str, stored: str
) -> None:
    """C10: 2 heads, block 4, kernel block 2: memory has both heads' tokens 0, 1, then 2, 3."""
    spec = kv.AttentionSpec(
        block_size=4, total_kv_heads=2, head_size=1, itemsize=1, kernel_block_size=2
    )
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(layers={"l": spec}, num_blocks=4),
        layout=layout,
        canonical=True,
    )
    pool = kv.HostPool(1)
    connector = kv.Connector(context, builtins(), host=pool)
    cache = torch.zeros(8, 2, 2, 2, dtype=torch.uint8)  # 8 rows: block 3 is rows 6 and 7
    if layout == HND:
        cache[6], cache[7] = letters("aAbBeEfF").view(2, 2, 2), letters("cCdDgGhH").view(2, 2, 2)
    else:
        cache[6], cache[7] = letters("aAeEbBfF").view(2, 2, 2), letters("cCgGdDhH").view(2, 2, 2)
    connector.register({"l": cache})
    done(connector, connector.store([3], [0]))
    assert pool.rows[0, :16].numpy().tobytes() == stored.encode()


# Cases met in the field.


def attention(**changes: object) -> kv.AttentionSpec:
    known = {"block_size": 16, "total_kv_heads": 2, "head_size": 128, "itemsize": 2}
    return kv.AttentionSpec(**{**known, **changes})


@pytest.mark.parametrize("order", [HND, NHD])
def test_c16_c15_a_canonical_record_is_the_same_65536_bytes_at_tp_1_2_4_and_8(order: str) -> None:
    """C16, and the second half of C15: one format id, one record, whichever TP stored it."""
    rows = {f"l{i}": Row("packed", 2, 128, 128, 2) for i in range(4)}
    record = b"".join(canonical_page(rows[f"l{i}"], i, 5, 16, order) for i in range(4))
    assert len(record) == 65_536
    ids = set()
    for tp in (1, 2, 4, 8):
        engine = engine_of(tp, stages=(4,), block=16, kernel=16, num_blocks=2)
        pool = sentinel_pool(2, 65_536)
        world = World.make(engine, rows, pool, canonical=True, canonical_order=order)
        world.write(list(rows), [1], [5])
        world.store([1], [0])
        assert world.connectors[0].record_bytes == 65_536
        np.testing.assert_array_equal(pool.rows.numpy(), expected_rows(pool, {0: record}))
        ids |= {connector.format_id for connector in world.connectors}
    assert len(ids) == 1


def test_c15_private_records_of_different_grids_never_share_a_format_id() -> None:
    grids = [
        kv.ParallelGrid(),
        kv.ParallelGrid(tp=2),
        kv.ParallelGrid(tp=4),
        kv.ParallelGrid(tp=4, dcp=2),
        kv.ParallelGrid(tp=4, dcp=2, cp_interleave=2),
        kv.ParallelGrid(tp=2, pcp=2),
        kv.ParallelGrid(tp=2, pp=2),
    ]
    ids: dict[str, set[str]] = {"private": set(), "slab": set(), "canonical": set()}
    for grid in grids:
        # The span is the same 32 tokens everywhere, so that the grid alone differs.
        spec = attention(block_size=32 // (grid.dcp * grid.pcp))
        geometry = kv.CacheGeometry(layers={"a": spec, "b": spec}, num_blocks=2)
        wishes = {
            "private": {},
            "slab": {"backend": kv.BackendCapabilities(stride_aware=True)},
            "canonical": {"canonical": True},
        }
        for form, wish in wishes.items():
            of_ranks = {
                kv.Connector(
                    kv.PolicyContext(geometry=geometry, grid=grid, rank=r, **wish), builtins()
                ).format_id
                for r in range(grid.size)
            }
            assert len(of_ranks) == 1  # never the rank
            ids[form] |= of_ranks
    assert len(ids["private"] | ids["slab"]) == 2 * len(grids)
    assert len(ids["canonical"]) == 1
    assert not ids["canonical"] & (ids["private"] | ids["slab"])


@pytest.mark.parametrize(
    ("heads", "tp"),
    [(8, 16), (2, 4), (1, 4), (4, 4)],
    ids=["8-at-16", "2-at-4", "1-at-4", "4-at-4"],
)
def test_c17_each_block_of_each_head_has_exactly_one_writer(heads: int, tp: int) -> None:
    """C17: every rank's cache holds its own number, so a record shows who wrote which head."""
    spec = attention(total_kv_heads=heads, block_size=4, head_size=3)
    geometry = kv.CacheGeometry(layers={"l": spec}, num_blocks=8)
    pool = sentinel_pool(8, heads * 4 * spec.row_bytes)
    for rank in range(tp):
        context = kv.PolicyContext(
            geometry=geometry, grid=kv.ParallelGrid(tp=tp), rank=rank, canonical=True
        )
        connector = kv.Connector(context, builtins(), host=pool)
        connector.register(
            {"l": torch.full((8, max(1, heads // tp), 4, spec.row_bytes), rank, dtype=torch.uint8)}
        )
        done(connector, connector.store(range(8), range(8)))
    replicas = max(1, tp // heads)
    for slot, head in itertools.product(range(8), range(heads)):
        page = pool.rows[slot, : heads * 4 * spec.row_bytes].view(heads, -1)
        assert set(page[head].tolist()) == {head * replicas + slot % replicas}


def test_c18_a_replicated_latent_has_one_writer_and_each_rank_writes_its_own_state() -> None:
    """C18: also, state is kept per rank and says so, and another grid cannot load it."""
    geometry = kv.CacheGeometry(
        layers={
            "mla": kv.LatentSpec(block_size=4, row_bytes=6),
            "ssm": kv.StateSpec(state_bytes=10, page_padding=2),
        },
        num_blocks=4,
    )
    pool = sentinel_pool(8, 24)

    def world(tp: int) -> list[tuple[kv.Connector, torch.Tensor, torch.Tensor]]:
        made = []
        for rank in range(tp):
            context = kv.PolicyContext(
                geometry=geometry, grid=kv.ParallelGrid(tp=tp), rank=rank, canonical=True
            )
            connector = kv.Connector(context, builtins(), host=pool)
            latent = torch.full((4, 4, 6), 16 + rank, dtype=torch.uint8)
            state = torch.full((4, 12), SENTINEL, dtype=torch.uint8)
            state[:, :10] = torch.arange(10) + 32 * (rank + 1)
            connector.register({"mla": latent, "ssm": state})
            made.append((connector, latent, state))
        return made

    two = world(2)
    for connector, _, _ in two:
        done(connector, connector.store([2, 3], [0, 1], "latent"))
        done(connector, connector.store([1], [5], "state"))
    assert set(pool.rows[0, :24].tolist()) == {16}  # slot 0: rank 0
    assert set(pool.rows[1, :24].tolist()) == {17}  # slot 1: rank 1
    assert pool.rows[5, :24].tolist() == [*range(32, 42), *range(64, 74), *[SENTINEL] * 4]

    portable = {layer["name"]: layer["portable"] for layer in two[0][0].explain()["layers"]}
    assert portable == {"mla": True, "ssm": False}

    for rank, (connector, _, state) in enumerate(world(2)):
        state.fill_(SENTINEL)
        done(connector, connector.load([5], [3], "state"))
        assert state[3].tolist() == [*(32 * (rank + 1) + i for i in range(10)), *[SENTINEL] * 2]
        assert set(state[:3].flatten().tolist()) == {SENTINEL}

    (connector, latent, state), *_ = four = world(4)
    with pytest.raises(kv.FormatMismatchError, match="tp: stored 2, wanted 4"):
        connector.load([5], [0], "state")
    done(connector, connector.load([0, 1], [0, 1], "latent"))  # the latent is portable
    assert set(latent[0].flatten().tolist()) == {16}
    assert state[0, :10].tolist() == list(range(32, 42))  # untouched
    assert four[0][0].format_id != two[0][0].format_id


@pytest.mark.parametrize(
    "grid",
    [
        kv.ParallelGrid(),
        kv.ParallelGrid(tp=2, pp=2),
        kv.ParallelGrid(tp=2, pcp=2),
        kv.ParallelGrid(tp=2, dcp=2, pp=3),
    ],
    ids=lambda grid: f"tp{grid.tp}-pp{grid.pp}-dcp{grid.dcp}-pcp{grid.pcp}",
)
@pytest.mark.parametrize("canonical", [True, False])
def test_recurrent_state_is_a_slice_for_each_rank_that_holds_the_layer(
    grid: kv.ParallelGrid, canonical: bool
) -> None:
    """Layers of 10 and 6 B; a byte tells layer, rank and place. Other stages hold no part."""
    sizes = {"s0": 10, "s1": 6, "s2": 10}
    geometry = kv.CacheGeometry(
        layers={name: kv.StateSpec(state_bytes=size) for name, size in sizes.items()},
        num_blocks=3,
    )
    stage_of = geometry.stage_of(grid.pp)
    held = {
        (name, rank): scrambled(np.arange(size) + 1000 * rank + 100 * index)
        for index, (name, size) in enumerate(sizes.items())
        for rank, place in enumerate(places(grid))
        if stage_of[name] == place.pp
    }
    # Canonical: layer by layer, ranks side by side. Private: rank by rank.
    order = sorted(held) if canonical else sorted(held, key=lambda pair: (pair[1], pair[0]))
    record = b"".join(held[pair].tobytes() for pair in order)
    pool = sentinel_pool(2, len(record))

    def connect(rank: int) -> tuple[kv.Connector, dict[str, torch.Tensor]]:
        context = kv.PolicyContext(geometry=geometry, grid=grid, rank=rank, canonical=canonical)
        connector = kv.Connector(context, builtins(), host=pool)
        caches = {
            name: torch.full((3, geometry.layers[name].state_bytes), SENTINEL, dtype=torch.uint8)
            for name in context.stage_layers
        }
        connector.register(caches)
        return connector, caches

    for rank in range(grid.size):
        connector, caches = connect(rank)
        for name, cache in caches.items():
            cache[2] = torch.from_numpy(held[name, rank])
        done(connector, connector.store([2], [1]))
        assert connector.record_bytes == len(record)
    np.testing.assert_array_equal(pool.rows.numpy(), expected_rows(pool, {1: record}))
    for rank in range(grid.size):
        connector, caches = connect(rank)
        done(connector, connector.load([1], [0]))
        for name, cache in caches.items():
            assert cache[0].numpy().tobytes() == held[name, rank].tobytes()
            assert (cache[1:] == SENTINEL).all()


@pytest.mark.parametrize("other", [(44,), (21, 23), (30, 14), (1, 42, 1)], ids=str)
def test_c19_records_do_not_depend_on_the_stages_and_layers_pair_by_name(
    other: tuple[int, ...],
) -> None:
    """C19: stages of 21 + 23 layers make the records of one stage, and any stages load them."""
    rows = {f"model.layers.{i}.self_attn.attn": Row("packed", 2, 2, 2, 1) for i in range(44)}
    record = b"".join(canonical_page(row, i, 3, 2, HND) for i, row in enumerate(rows.values()))
    pool = sentinel_pool(1, len(record))

    def world(stages: tuple[int, ...]) -> World:
        engine = engine_of(2, grid=kv.ParallelGrid(tp=2, pp=len(stages)), stages=stages)
        return World.make(engine, rows, pool, canonical=True)

    writer = world((21, 23))
    assert next(iter(writer.caches[2].engine)) == "model.layers.21.self_attn.attn"
    writer.write(list(rows), [2], [3])
    writer.store([2], [0])
    np.testing.assert_array_equal(pool.rows.numpy(), expected_rows(pool, {0: record}))
    reader = world(other)
    assert reader.connectors[0].format_id == writer.connectors[0].format_id
    reader.load([0], [1])
    assert reader.bytes() == reader.as_it_should_be([(list(rows), [1], [3])])


@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_c20_601_tokens_at_dcp2_are_18_full_blocks_of_32_tokens(interleave: int) -> None:
    """C20: a sequence is written by its tokens' places, stored, and read back without DCP."""
    sequence = scrambled(np.arange(601 * 4)).reshape(601, 4)
    pool = kv.HostPool(20)

    def connectors(block: int, grid: kv.ParallelGrid) -> list[tuple[kv.Connector, torch.Tensor]]:
        spec = kv.LatentSpec(block_size=block, row_bytes=4)
        geometry = kv.CacheGeometry(layers={"mla": spec}, num_blocks=20)
        found = []
        for rank in range(grid.size):
            context = kv.PolicyContext(geometry=geometry, grid=grid, rank=rank, canonical=True)
            connector = kv.Connector(context, builtins(), host=pool)
            cache = torch.full((20, block, 4), SENTINEL, dtype=torch.uint8)
            connector.register({"mla": cache})
            found.append((connector, cache))
        return found

    dcp = connectors(16, kv.ParallelGrid(tp=2, dcp=2, cp_interleave=interleave))
    for token, row in enumerate(sequence):
        block, inside = divmod(token, 32)
        chunk, rest = divmod(inside, interleave)
        _, cache = dcp[chunk % 2]
        cache[block, chunk // 2 * interleave + rest] = torch.from_numpy(row)
    full = len(sequence) // (16 * 2)
    assert full == 18
    for connector, _ in dcp:
        done(connector, connector.store(range(full), range(full)))
    ((connector, cache),) = connectors(32, kv.ParallelGrid())
    done(connector, connector.load(range(full), range(full)))
    np.testing.assert_array_equal(cache.view(-1, 4)[:576].numpy(), sequence[:576])
    assert (cache.view(-1, 4)[576:] == SENTINEL).all()


def test_c20_every_rank_and_role_resolves_the_interleave_alike() -> None:
    """C20: at cp 1 the interleave means nothing; beyond, every rank says the same."""

    def identities(grid: kv.ParallelGrid, canonical: bool) -> tuple[set[str], set[str]]:
        spec = kv.LatentSpec(block_size=8, row_bytes=4)
        geometry = kv.CacheGeometry(layers={"mla": spec}, num_blocks=2)
        made = [
            kv.Connector(
                kv.PolicyContext(geometry=geometry, grid=grid, rank=rank, canonical=canonical),
                builtins(),
            )
            for rank in range(grid.size)
        ]
        return {c.format_id for c in made}, {c.fingerprint for c in made}

    for canonical in (False, True):
        plain, ignored, one, four = (
            identities(grid, canonical)
            for grid in (
                kv.ParallelGrid(tp=2),
                kv.ParallelGrid(tp=2, cp_interleave=4),
                kv.ParallelGrid(tp=2, dcp=2),
                kv.ParallelGrid(tp=2, dcp=2, cp_interleave=4),
            )
        )
        assert all(len(ids) == 1 for found in (plain, ignored, one, four) for ids in found)
        assert plain == ignored
        assert one[1] != four[1]  # peers of one engine must agree on it
        assert (one[0] == four[0]) == canonical  # canonical bytes do not depend on it


# Formats that differ.


def differing() -> dict[str, tuple[dict, dict, str]]:
    """Change -> (spec, context, the field that must be named), against the plain canonical one."""
    return {
        "head size": ({"head_size": 64}, {}, "layers l, head_size: stored 128, wanted 64"),
        "value size": ({"v_head_size": 64}, {}, r"v_head_size: stored 128, wanted 64"),
        "heads": ({"total_kv_heads": 4}, {}, "total_kv_heads: stored 2, wanted 4"),
        "item size": ({"itemsize": 1}, {}, "itemsize: stored 2, wanted 1"),
        "packing": ({"kv_packing": "split"}, {}, "kv_packing: stored 'packed', wanted 'split'"),
        "scales": ({"scale_bytes": 4}, {}, "scale_bytes: stored 0, wanted 4"),
        "tokens": ({"block_size": 8}, {}, "tokens: stored 16, wanted 8"),
        "order": ({}, {"canonical_order": NHD}, "order: stored 'LBHNC', wanted 'LBNHC'"),
        "dtype": ({}, {"dtype": "float16"}, "dtype: stored 'bfloat16', wanted 'float16'"),
        "encoding": ({}, {"encoding": "nvfp4"}, "encoding: stored '', wanted 'nvfp4'"),
        "form": ({}, {"canonical": False}, "form: stored 'canonical', wanted 'private'"),
    }


@pytest.mark.parametrize("change", differing())
def test_a_load_under_another_format_is_refused_and_the_field_is_named(change: str) -> None:
    spec_changes, wishes, named = differing()[change]
    pool = kv.HostPool(2, record_bytes=65_536)

    def connector(spec: kv.AttentionSpec, **wishes: object) -> tuple[kv.Connector, torch.Tensor]:
        context = kv.PolicyContext(
            **{
                "geometry": kv.CacheGeometry(layers={"l": spec}, num_blocks=2),
                "canonical": True,
                "dtype": "bfloat16",
                **wishes,
            }
        )
        made = kv.Connector(context, builtins(), host=pool)
        cache = torch.full(
            (2, 2 if spec.split else 1, spec.total_kv_heads, spec.block_size, spec.row_bytes),
            SENTINEL,
            dtype=torch.uint8,
        )
        made.register({"l": cache})
        return made, cache

    one, _ = connector(attention())
    done(one, one.store([0], [1]))
    other, cache = connector(attention(**spec_changes), **wishes)
    with pytest.raises(kv.FormatMismatchError, match=named) as refused:
        other.load([1], [0])
    assert any("stored" in line and "wanted" in line for line in refused.value.differences)
    assert one.format_id != other.format_id
    assert (cache == SENTINEL).all()
    assert other.poll() == []
    done(one, one.load([1], [0]))  # the slot is still there for its own format


def test_layers_of_other_names_are_another_format() -> None:
    pool = kv.HostPool(1)
    for name in ("l", "m"):
        geometry = kv.CacheGeometry(layers={name: attention()}, num_blocks=1)
        connector = kv.Connector(
            kv.PolicyContext(geometry=geometry, canonical=True), builtins(), host=pool
        )
        connector.register({name: torch.zeros(1, 2, 16, 512, dtype=torch.uint8)})
        if name == "l":
            done(connector, connector.store([0], [0]))
        else:
            with pytest.raises(kv.FormatMismatchError, match="name: stored 'l', wanted 'm'"):
                connector.load([0], [0])
