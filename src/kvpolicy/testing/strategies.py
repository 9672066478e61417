"""Hypothesis strategies for what kvpolicy is about; all shrink towards one small layer on one rank.

``certified=True`` draws only what kvpolicy can prove; False also draws what it must refuse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from kvpolicy import (
    AttentionSpec,
    BackendCapabilities,
    CacheGeometry,
    KVCacheLayout,
    LatentSpec,
    LayerGroup,
    LayoutDecision,
    ParallelGrid,
    PluginSet,
    PolicyContext,
    StateSpec,
    load_plugins,
    select,
)
from kvpolicy.testing import fakes, oracle
from kvpolicy.testing.memory import Allocation, Memory, allocate
from kvpolicy.testing.trial import SLOTS, Trial

KINDS = ("packed", "split", "latent", "state")
"""The kinds of layers that `specs` knows: packed and split attention, latents, recurrent state."""

_MOST_RANKS = 8
T = TypeVar("T")


def divisors(number: int) -> list[int]:
    """The whole numbers that divide one, least first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _unless_plain(usual: T, others: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """Most often the usual value, so that one example has few peculiarities at once."""
    return st.one_of(st.just(usual), st.just(usual), others)


@st.composite
def specs(
    draw: st.DrawFn,
    kinds: Sequence[str] = KINDS,
    block_size: int | None = None,
    kernel_blocks: bool = True,
) -> oracle.Spec:
    """One layer's spec, of rows of a few bytes.

    Args:
        draw: hypothesis' own.
        kinds: some of `KINDS`.
        block_size: tokens of a block; None: drawn.
        kernel_blocks: whether the kernel may address smaller blocks.
    """
    kind = draw(st.sampled_from(kinds))
    if kind == "state":
        return StateSpec(
            state_bytes=draw(st.integers(1, 12)), page_padding=draw(st.sampled_from([0, 0, 3]))
        )
    block = block_size or draw(st.sampled_from([2, 4, 1, 6, 8]))
    kernel = (
        draw(_unless_plain(block, st.sampled_from(divisors(block)))) if kernel_blocks else block
    )
    itemsize = draw(st.sampled_from([1, 2, 2, 4]))
    padding = draw(st.sampled_from([0, 0, 0, 1, 2])) * itemsize * (block // kernel)
    if kind == "latent":
        return LatentSpec(
            block_size=block,
            row_bytes=draw(st.integers(1, 4)) * itemsize,
            page_padding=padding,
            kernel_block_size=kernel,
        )
    size = draw(st.integers(1, 3))
    return AttentionSpec(
        block_size=block,
        total_kv_heads=draw(st.sampled_from([1, 2, 4, 3, 6, 8])),
        head_size=size,
        v_head_size=size if kind == "split" else draw(_unless_plain(size, st.integers(1, 3))),
        itemsize=itemsize,
        kv_packing="split" if kind == "split" else "packed",
        scale_bytes=draw(st.sampled_from([0, 0, 0, 1])) * itemsize,
        page_padding=padding,
        kernel_block_size=kernel,
    )


@st.composite
def geometries(
    draw: st.DrawFn,
    kinds: Sequence[str] = KINDS,
    uniform: bool | None = None,
    kernel_blocks: bool = True,
    pp: int | None = None,
) -> CacheGeometry:
    """A model's cache of one to four layers, in groups and stages.

    Args:
        draw: hypothesis' own.
        kinds: as for `specs`.
        uniform: whether all layers are equal; None: drawn.
        kernel_blocks: as for `specs`.
        pp: stages to be explicit about; None: the geometry leaves them open.
    """
    count = draw(st.integers(max(1, pp or 1), 4))
    alike = draw(st.booleans()) if uniform is None else uniform
    block = None if alike else draw(st.sampled_from([2, 4, 1, None]))
    one = specs(kinds, block, kernel_blocks)
    found = [draw(one)] if alike else [draw(one) for _ in range(min(count, 2))]
    layers = {f"layers.{i}.attn": found[i % len(found)] for i in range(count)}
    stages = None
    if pp is not None and draw(st.booleans()):
        ends = sorted(draw(st.permutations(range(1, count)))[: pp - 1])
        stages = tuple(b - a for a, b in itertools.pairwise([0, *ends, count]))
    return CacheGeometry(
        layers=layers,
        num_blocks=draw(st.integers(2, 5)),
        groups=draw(st.sampled_from(_groupings(layers))),
        stages=stages,
    )


def _groupings(layers: Mapping[str, oracle.Spec]) -> list[Sequence[LayerGroup] | None]:
    """By kind, as is the default; by block size, which mixes kinds; every layer by itself.

    Recurrent state, whose blocks have no tokens to speak of, joins the first of the sizes.
    """
    paged = [spec.block_size for spec in layers.values() if not isinstance(spec, StateSpec)]
    sizes: dict[int, list[str]] = {}
    for name, spec in layers.items():
        state = isinstance(spec, StateSpec)
        sizes.setdefault([*paged, 1][0] if state else spec.block_size, []).append(name)
    by_size = [LayerGroup(name=f"of-{size}", layer_names=names) for size, names in sizes.items()]
    alone = [LayerGroup(name=f"only-{i}", layer_names=[n]) for i, n in enumerate(layers)]
    return [None, None, by_size, alone]


@st.composite
def grids(
    draw: st.DrawFn, geometry: CacheGeometry, certified: bool = True, pp: int | None = None
) -> ParallelGrid:
    """A grid of at most 8 ranks for a geometry.

    Args:
        draw: hypothesis' own.
        geometry: whose layers are spread.
        certified: whether every layer must be provable under it.
        pp: pipeline stages; None: drawn, at most as many as layers.
    """
    layers = list(dict.fromkeys(geometry.layers.values()))
    sizes = [1, 2, 4, 3, 8, 6]
    tps = [tp for tp in sizes if not certified or all(_fits(spec, tp) for spec in layers)]
    tp = draw(st.sampled_from(tps))
    replicas = tp
    if certified:
        replicas = math.gcd(tp, *(_replicas(spec, tp) for spec in layers))
    dcp = draw(st.sampled_from(divisors(replicas)))
    pcp = draw(st.sampled_from([n for n in (1, 2, 3) if n * tp <= _MOST_RANKS]))
    stages = geometry.stages and len(geometry.stages)
    most = min(len(geometry.layers), 3, max(1, _MOST_RANKS // (tp * pcp)))
    pp = pp or stages or draw(st.sampled_from(range(1, most + 1)))
    chunks = [n for n in (1, 2, 4, 3, 8) if not certified or all(_deals(s, n) for s in layers)]
    chunk = draw(st.sampled_from(chunks))
    return ParallelGrid(tp=tp, pp=pp, dcp=dcp, pcp=pcp, cp_interleave=chunk)


def _fits(spec: oracle.Spec, tp: int) -> bool:
    heads = spec.total_kv_heads if isinstance(spec, AttentionSpec) else 1
    return heads % tp == 0 or tp % heads == 0


def _replicas(spec: oracle.Spec, tp: int) -> int:
    return max(1, tp // spec.total_kv_heads) if isinstance(spec, AttentionSpec) else tp


def _deals(spec: oracle.Spec, chunk: int) -> bool:
    """Whether chunks of tokens divide a block and do not straddle kernel blocks."""
    if isinstance(spec, StateSpec):
        return True
    kernel = spec.kernel_block_size
    return spec.block_size % chunk == 0 and (kernel % chunk == 0 or chunk % kernel == 0)


def layouts() -> st.SearchStrategy[KVCacheLayout]:
    """Any of the six layouts, HND first."""
    return st.sampled_from(list(KVCacheLayout))


def backends() -> st.SearchStrategy[BackendCapabilities]:
    """Backends that follow strides, that do not, and of which little is known."""
    return st.builds(
        BackendCapabilities,
        stride_aware=st.sampled_from([True, True, None, False]),
        layouts=st.one_of(st.none(), st.none(), st.frozensets(layouts(), min_size=1)),
    )


@st.composite
def contexts(
    draw: st.DrawFn,
    certified: bool = True,
    canonical: bool | None = None,
    kinds: Sequence[str] = KINDS,
    kernel_blocks: bool = True,
) -> PolicyContext:
    """What rank 0 of an engine asks for; `attrs.evolve` gives the other ranks'.

    Args:
        draw: hypothesis' own.
        certified: whether per-layer caches must be provable.
        canonical: whether canonical pages are requested; None: drawn.
        kinds: as for `specs`.
        kernel_blocks: as for `specs`.
    """
    pp = draw(st.sampled_from([1, 1, 1, 2, 3]))
    geometry = draw(geometries(kinds, kernel_blocks=kernel_blocks, pp=pp))
    asked = draw(st.booleans()) if canonical is None else canonical
    orders = [None, None, KVCacheLayout.LBHNC, KVCacheLayout.LBNHC]
    options: dict[str, Any] = draw(st.sampled_from([{}, {}, {"notes": ["a", {"b": [1, 2]}]}]))
    return PolicyContext(
        geometry=geometry,
        grid=draw(grids(geometry, certified, pp)),
        canonical=asked,
        canonical_order=draw(st.sampled_from(orders)),
        layout=draw(layouts()),
        backend=draw(backends()),
        dtype=draw(st.sampled_from(["", "float16", "bfloat16"])),
        encoding=draw(st.sampled_from(["", "", "scaled"])),
        options=options,
    )


def allocations() -> st.SearchStrategy[Allocation]:
    """The ways in which an engine allocates and shows its caches."""
    return st.builds(
        Allocation,
        slab=st.sampled_from(["dimension", "placements", "views", "heads-apart"]),
        layers=st.sampled_from(["dense", "dense", "heads-apart"]),
        typed=st.booleans(),
        axes=st.sampled_from(list(itertools.permutations(range(4)))),
        lead=st.sampled_from([0, 8, 40]),
    )


@st.composite
def caches(
    draw: st.DrawFn,
    context: PolicyContext,
    decision: LayoutDecision | None = None,
    device: str = "cpu",
) -> Memory:
    """One rank's strided tensors, filled with the sentinel, for a certified context.

    Args:
        draw: hypothesis' own.
        context: whose rank they are.
        decision: per-layer caches or a slab; None: per-layer.
        device: a torch device.
    """
    order = context.layout.order
    decided = decision or LayoutDecision(cross_layer_blocks=False, layout=order)
    return allocate(context, decided, draw(allocations()), device)


@st.composite
def plugin_sets(
    draw: st.DrawFn, members: Callable[[], Mapping[str, object]] | None = None
) -> PluginSet:
    """The built-ins and up to three fakes that vote, in any order, at any priorities.

    Args:
        draw: hypothesis' own.
        members: makes more plugins by name, which are in every set at their own priority.
    """
    voters = st.builds(fakes.Voter, st.sampled_from([None, True, False]))
    found = {f"voter-{i}": draw(voters) for i in range(draw(st.integers(0, 3)))}
    priorities = {name: draw(st.integers(-200, 200)) for name in found}
    everyone = draw(st.permutations([*found.items(), *(members() if members else {}).items()]))
    selection = select(names=(), priorities=priorities, environ={})
    return load_plugins(selection, dict(everyone))


def _distinct(limit: int, least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, limit - 1), min_size=least, max_size=most, unique=True)


@st.composite
def trials(draw: st.DrawFn, certified: bool = True) -> Trial:
    """Examples for the contracts."""
    forced = draw(st.sampled_from([None, None, False, True]))
    context = draw(contexts(certified, kernel_blocks=forced is not True))
    blocks = draw(_distinct(context.geometry.num_blocks, 1, 4))
    slots = draw(_distinct(SLOTS, len(blocks), len(blocks)))
    return Trial(
        context=context,
        allocation=draw(allocations()),
        forced=forced,
        rank=draw(st.integers(0, _MOST_RANKS - 1)),
        group=draw(st.integers(0, 3)),
        blocks=tuple(blocks),
        slots=tuple(slots),
    )
