"""``kvpolicy explain``: the layout decision for a model, and what it comes to in bytes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpolicy.cli.options import (
    add_model_options,
    add_plugin_options,
    context_of,
    engine_of,
    plugins_of,
)
from kvpolicy.cli.output import Output, size, table
from kvpolicy.models import load_config
from kvpolicy.words import span_of

_EXAMPLE = """\
example:
  kvpolicy explain qwen3-30b-a3b.json --tp 2 --canonical

A page is one layer of one block on one rank; a record is what a slot of the host pool holds of one
block; fragments are the contiguous copies that move it, on one rank of each stage. Equal format ids
name equal bytes; equal fingerprints, ranks that agree. Layer names are vLLM's, and part of both."""

_BLOCKS = 2
"""Blocks of the simulated engine's caches; what is explained does not depend on it."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "explain",
        help="explain the layout decision for a model",
        description="Explains the layout decision for a model: votes, layers, records, identities.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser)
    add_plugin_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Runs the command."""
    from kvpolicy.cli.engine import SimulatedRank
    from kvpolicy.connector import Connector

    context = context_of(args, load_config(args.config), _BLOCKS)
    plugins = plugins_of(args)
    explained: dict[str, Any] = {}
    # Stages with equal layers ask the policies the same question.
    unlike = {tuple(layers.values()): stage for stage, layers in enumerate(context.stages)}
    for stage in sorted(unlike.values()):
        own = attrs.evolve(context, rank=stage * context.grid.stage_size)
        with Connector(own, plugins) as connector:
            # Real tensors, so that what the policies would answer at registration is known.
            connector.register(SimulatedRank(own, connector.decision).caches)
            explained = explained or connector.explain()
    explained["engine"] = engine_of(context)
    for plugin in explained["plugins"]:
        if plugin["status"] == "failed":
            out.warn(f"plugin {plugin['name']!r} is out: it {plugin['reason']}")
    out.show(explained, lambda console: people(explained, console))
    return 0


def in_words(explained: Mapping[str, Any]) -> str:
    """The decision as a sentence or two."""
    decision = explained["decision"]
    what = "Cross-layer blocks" if decision["cross_layer_blocks"] else "Per-layer registration"
    reasons = {vote["plugin"]: vote["reason"] for vote in decision["votes"]}
    who = decision["decided_by"]
    abstained = "; ".join(
        f"{name} abstains, since {reason}" for name, reason in reasons.items() if reason
    )
    by = f"decided by {who}: {reasons[who]}" if who else f"since nobody votes: {abstained}"
    layers = explained["layers"]
    portable = sum(layer["portable"] for layer in layers)
    if explained["canonical"]:
        kept = "" if portable == len(layers) else f"; {len(layers) - portable} are kept per rank"
        stored = f"{portable} of {len(layers)} layers are portable{kept}"
    else:
        stored = "Stored as it lies, one slice per rank; not portable"
    return f"{what} ({decision['layout']}), {by}. {stored}."


def _answer(answer: bool | None) -> str:
    return {True: "cross-layer", False: "per-layer", None: "abstains"}[answer]


def _holds(spec: Mapping[str, Any]) -> str:
    """What one layer's cache holds, for people."""
    if "state_bytes" in spec:
        return f"state of {spec['state_bytes']:,} B"
    if "row_bytes" in spec:
        return f"latent rows of {spec['row_bytes']:,} B"
    sizes = dict.fromkeys((spec["head_size"], spec["v_head_size"]))
    return f"{spec['total_kv_heads']} KV heads x {'/'.join(str(size) for size in sizes)}"


def people(explained: Mapping[str, Any], console: Console) -> None:
    """Prints the explanation as tables."""
    console.print(escape(in_words(explained)), style="bold")
    console.print()
    votes = [
        (vote["plugin"], vote["priority"], _answer(vote["answer"]), vote["reason"])
        for vote in explained["decision"]["votes"]
    ]
    console.print(table("plugin", ">priority", "vote", "reason", rows=votes))
    console.print()
    console.print(_layers(explained))
    console.print()
    groups = [
        (
            group["name"],
            size(group["record_bytes"]),
            group["fragments_per_block"],
            "yes" if group["portable"] else "no",
            group["format_id"],
        )
        for group in explained["groups"]
    ]
    columns = ("group", ">record of a block, all ranks", ">fragments", "portable", "format id")
    console.print(table(*columns, rows=groups))
    console.print()
    for name, value in _facts(explained):
        console.print(f"{name:<12} {escape(value)}")


def _layers(explained: Mapping[str, Any]) -> Table:
    """The layers, equal ones together; canonical pages only where they are requested."""
    canonical = explained["canonical"]
    alike: dict[tuple[Any, ...], list[str]] = {}
    for layer in explained["layers"]:
        row = [layer["group"], _holds(layer["spec"]), size(layer["local_page_bytes"])]
        if canonical:
            row.append(size(layer["canonical_page_bytes"]))
        alike.setdefault((*row, layer["fragments_per_block"]), []).append(layer["name"])
    return table(
        "layers",
        ">",
        "group",
        "holds",
        ">page on\na rank",
        *([">canonical\npage"] if canonical else []),
        ">fragments",
        rows=[(span_of(names), len(names), *row) for row, names in alike.items()],
    )


def _facts(explained: Mapping[str, Any]) -> list[tuple[str, str]]:
    specs = [layer["spec"] for layer in explained["layers"]]
    packing = sorted({spec["kv_packing"] for spec in specs if "kv_packing" in spec})
    tokens = sorted({spec["block_size"] for spec in specs if "block_size" in spec})
    cache = [explained["dtype"] or "dtype unknown"]
    cache += [f"blocks of {count} tokens" for count in tokens]
    cache += [f"{name} K/V" for name in packing]
    engine = explained["engine"]
    aware = "stride-aware" if engine["stride_aware"] else "not stride-aware"
    takes = "all layouts" if engine["layouts"] is None else ", ".join(engine["layouts"])
    return [
        ("cache", ", ".join(cache)),
        ("engine", f"simulated: {aware}, takes {takes}"),
        ("format id", explained["format_id"]),
        ("fingerprint", explained["fingerprint"]),
    ]
