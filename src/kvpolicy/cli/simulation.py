"""The round trip itself: every rank of two simulated engines, one after the other.

Ranks are objects with tensors of their own, or processes; they share one host pool.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from kvpolicy.cli.engine import owned_heads
from kvpolicy.cli.moving import Side, move_rank
from kvpolicy.cli.options import context_of, engine_of, plugins_of
from kvpolicy.cli.output import Output, progress
from kvpolicy.cli.processes import Task, check_processes, move_side
from kvpolicy.cli.processes import at_once as ranks_at_once
from kvpolicy.connector import Connector
from kvpolicy.context import PolicyContext
from kvpolicy.errors import FormatMismatchError, OptionError, PoolError
from kvpolicy.hostpool import HostPool
from kvpolicy.identity import format_id
from kvpolicy.models import load_config
from kvpolicy.pages import page_shape
from kvpolicy.plugins import PluginSet
from kvpolicy.sharedpool import SharedHostPool
from kvpolicy.transfer import Direction
from kvpolicy.words import close_names

_MAX_BLOCKS = 1_000_000
_REFERENCE_BYTES = 2**28


def round_trip(args: argparse.Namespace, out: Output) -> dict[str, Any]:
    """Stores, loads and verifies as the options say; returns the report.

    Raises:
        KVPolicyError: refused, before any byte moves.
    """
    if not 1 <= args.blocks <= _MAX_BLOCKS:
        raise OptionError(f"--blocks lies between 1 and {_MAX_BLOCKS:,}, not {args.blocks}")
    config = load_config(args.config)
    # More blocks than are moved, so that neighbours can be watched.
    num_blocks = args.blocks + args.blocks // 4 + 2
    storing = context_of(args, config, num_blocks)
    loading = context_of(args, config, num_blocks, loading=True)
    plugins = plugins_of(args)
    moved = _moved(args.group, storing)
    with Connector(storing, plugins) as one, Connector(loading, plugins) as other:
        _check_formats(one, other, moved)
        explained = one.explain()
        # A group that is not moved may have longer records on the loading side.
        record_bytes = max(one.record_bytes, other.record_bytes)
        load_explained = other.explain()
        name = format_id({group: one.formats[group] for group in moved})
    groups = [group for group in explained["groups"] if group["name"] in moved]
    slots = args.blocks * len(moved)
    sizes = storing.grid.size, loading.grid.size
    at_once = 1
    if args.processes:
        check_processes(*sizes)
        at_once = min(ranks_at_once(), max(sizes))
    _check_memory(record_bytes * slots, at_once, storing, loading)
    with (
        _pool(args, slots, record_bytes, max(sizes)) as pool,
        progress(out, sum(sizes)) as step,
    ):
        stored = _move("store", args, one, plugins, pool, moved, step)
        # What was not stored cannot be loaded: the report says which stores failed.
        whole = not stored.errors
        loaded = _move("load", args, other, plugins, pool, moved, step) if whole else Side()
    verified = not (stored.errors or loaded.errors or loaded.mismatched or loaded.changed)
    return {
        "verified": verified,
        "mismatched_bytes": loaded.mismatched,
        "changed_outside_bytes": loaded.changed,
        "bytes": stored.bytes,
        "load_bytes": loaded.bytes,
        "blocks": args.blocks,
        "store_seconds": stored.seconds,
        "load_seconds": loaded.seconds,
        "store_ratio": _ratio(stored),
        "load_ratio": _ratio(loaded),
        "groups": [
            {key: group[key] for key in ("name", "record_bytes", "portable", "format_id")}
            for group in groups
        ],
        "record_bytes": max(group["record_bytes"] for group in groups),
        "decision": explained["decision"],
        "load_decision": load_explained["decision"],
        "format_id": name,
        "grid": explained["grid"],
        "load_grid": load_explained["grid"],
        "errors": [*stored.errors, *loaded.errors],
        "engine": engine_of(storing),
    }


def _moved(wanted: Sequence[str], context: PolicyContext) -> tuple[str, ...]:
    """The groups that are moved, in the model's order: those asked for, else all."""
    names = [group.name for group in context.geometry.groups]
    for name in wanted:
        if name not in names:
            raise OptionError(
                f"--group: the model has no group {name!r}; {close_names(name, names)}"
            )
    return tuple(name for name in names if name in wanted or not wanted)


def _check_formats(one: Connector, other: Connector, moved: Collection[str]) -> None:
    """Refuses before any byte moves, with the fields that differ and what may be done."""
    for name in moved:
        stored = one.formats[name]
        wanted = other.formats.get(name)
        differences = stored.differences(wanted) if wanted else (f"group {name!r}: not loaded",)
        if not differences:
            continue
        advice = ""
        spans = stored.fields["tokens"], wanted.fields["tokens"] if wanted else None
        if not one.context.canonical:
            advice = "; bytes that are not canonical belong to one topology: add --canonical"
        elif spans[1] is not None and spans[0] != spans[1]:
            fitting, rest = divmod(spans[0], other.context.grid.cp)
            advice = f"; canonical pages of equal tokens need --load-block-size {fitting}"
            advice = advice if not rest else "; choose grids whose dcp * pcp divide one another"
        elif wanted is not None and stored.fields["order"] != wanted.fields["order"]:
            advice = "; give both sides one --canonical-order, HND or NHD"
        elif "tp" in stored.fields:
            portable = [n for n in moved if "tp" not in one.formats[n].fields]
            advice = "; recurrent state is kept per rank and cannot change topology"
            if portable:
                options = " ".join(f"--group {n}" for n in portable)
                advice += f", and {options} leaves it out"
        raise FormatMismatchError(
            f"group {name!r} is stored as format {stored.format_id} and would be loaded as "
            f"{wanted.format_id if wanted else 'none'}{advice}; they differ in",
            differences,
        )


def _memory_available() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _check_memory(rows: int, at_once: int, *sides: PolicyContext) -> None:
    """Refuses what would not fit: the rows, the largest ranks' caches, and the expected bytes."""
    caches = [
        context.geometry.num_blocks
        * sum(
            page_shape(
                spec, len(owned_heads(context, spec)), spec.block_size, context.layout
            ).page_bytes
            for spec in layers.values()
        )
        for context in sides
        for layers in context.stages
    ]
    needed, free = rows + at_once * 2 * max(caches), _memory_available()
    if free is not None and needed > free:
        raise OptionError(
            f"this round trip needs about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are "
            "free; lower --blocks"
        )


@contextlib.contextmanager
def _pool(
    args: argparse.Namespace, slots: int, record_bytes: int, ranks: int
) -> Iterator[HostPool]:
    """The rows, touched once, so that the first store does not pay for the pages."""
    if not args.processes:
        pool = HostPool(slots, record_bytes)
        pool.rows.fill_(0)
        yield pool
        return
    token = secrets.token_hex(8)
    try:
        shared = SharedHostPool(
            f"roundtrip-{token}", slots, record_bytes, nonce=token, max_ranks=ranks
        )
    except PoolError as error:
        raise OptionError(f"{error} (here: --blocks)") from None
    with shared:
        yield shared


def _move(
    direction: Direction,
    args: argparse.Namespace,
    connector: Connector,
    plugins: PluginSet,
    pool: HostPool,
    moved: tuple[str, ...],
    step: Callable[[str], None],
) -> Side:
    """Stores the logical blocks on every rank, or loads them and compares every byte.

    Args:
        direction: what to do.
        args: the options.
        connector: of the side's first rank, closed; has its context and fingerprint.
        plugins: of ranks that are no processes.
        pool: the rows.
        moved: the groups.
        step: told of each rank that has moved.
    """
    context = connector.context
    if isinstance(pool, SharedHostPool):
        task = Task(
            args=argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "run"}),
            direction=direction,
            num_blocks=context.geometry.num_blocks,
            moved=moved,
            address=pool.address(),
        )
        return move_side(task, context.grid.size, connector.fingerprint, step)
    side = Side()
    for rank in context.grid.ranks():
        own = attrs.evolve(context, rank=rank.rank)
        with Connector(own, plugins, host=pool) as mover:
            side.add(move_rank(direction, mover, moved, args.blocks))
        step(f"{direction}: rank {rank.rank + 1} of {context.grid.size}")
    return side


def _reference_seconds(count: int) -> float:
    """Seconds of one large copy of that many bytes, the best of three."""
    chunk = min(count, _REFERENCE_BYTES)
    source, target = np.ones(chunk, dtype=np.uint8), np.zeros(chunk, dtype=np.uint8)
    target[...] = 1
    best = math.inf
    for _ in range(3):
        begun = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begun)
    return best * count / chunk


def _ratio(side: Side) -> float | None:
    """The speed against one large copy of the same bytes; None if nothing moved."""
    if not side.bytes or not side.seconds:
        return None
    return round(_reference_seconds(side.bytes) / side.seconds, 3)
