"""``kvpolicy explain``: the layout decision for a model, and what it comes to in bytes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import attrs
from rich.console import Console
from rich.markup import escape

from kvpolicy.cli.options import (
    add_model_options,
    add_plugin_options,
    context_of,
    engine_of,
    plugins_of,
)
from kvpolicy.cli.output import Output, size, table
from kvpolicy.errors import span_of
from kvpolicy.models import load_config

_EXAMPLE = """\
example:
  kvpolicy explain qwen3-30b-a3b.json --tp 2 --canonical"""

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
    by = f"decided by {who}: {reasons[who]}" if who else "nobody voted, so layers stay apart"
    layers = explained["layers"]
    portable = sum(layer["portable"] for layer in layers)
    if explained["canonical"]:
        kept = "" if portable == len(layers) else f"; {len(layers) - portable} are kept per rank"
        stored = f"{portable} of {len(layers)} layers are portable{kept}"
    else:
        stored = "stored as it lies, one slice per rank; not portable"
    return f"{what} ({decision['layout']}), {by}. {stored[0].upper()}{stored[1:]}."


def _answer(answer: bool | None) -> str:
    return {True: "cross-layer", False: "per-layer", None: "abstains"}[answer]


def people(explained: Mapping[str, Any], console: Console) -> None:
    """Prints the explanation as tables."""
    console.print(escape(in_words(explained)), style="bold")
    votes = [
        (vote["plugin"], vote["priority"], _answer(vote["answer"]), vote["reason"])
        for vote in explained["decision"]["votes"]
    ]
    console.print()
    console.print(table("vote of", ">priority", "answer", "reason", rows=votes))
    alike: dict[tuple[Any, ...], list[str]] = {}
    for layer in explained["layers"]:
        sizes = (layer["local_page_bytes"], layer["canonical_page_bytes"])
        key = (layer["kind"], *sizes, layer["portable"], layer["fragments_per_block"])
        alike.setdefault(key, []).append(layer["name"])
    layers = [
        (span_of(names), kind, size(local), size(whole), "yes" if portable else "no", runs)
        for (kind, local, whole, portable, runs), names in alike.items()
    ]
    console.print()
    console.print(
        table(
            "layers",
            "kind",
            ">page on a rank",
            ">canonical page",
            "portable",
            ">fragments",
            rows=layers,
        )
    )
    groups = [
        (
            g["name"],
            len(g["layers"]),
            size(g["record_bytes"]),
            g["fragments_per_block"],
            g["format_id"],
        )
        for g in explained["groups"]
    ]
    console.print()
    console.print(
        table("group", ">layers", ">record of a block", ">fragments", "format id", rows=groups)
    )
    engine = explained["engine"]
    aware = "stride-aware" if engine["stride_aware"] else "not stride-aware"
    takes = "all layouts" if engine["layouts"] is None else ", ".join(engine["layouts"])
    console.print()
    console.print(f"format id    {explained['format_id']}")
    console.print(f"fingerprint  {explained['fingerprint']}")
    console.print(f"engine       simulated: {aware}, takes {takes}")
