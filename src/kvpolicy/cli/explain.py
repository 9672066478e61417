"""``kvpolicy explain``: the layout decision for a model, what it comes to, and what differs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.cli.difference import explain_difference, load_explanation
from kvpolicy.cli.difference import people as people_of_difference
from kvpolicy.cli.options import (
    add_model_options,
    add_plugin_options,
    context_of,
    engine_of,
    plugins_of,
)
from kvpolicy.cli.output import Output
from kvpolicy.cli.tree import people, refused
from kvpolicy.errors import KVPolicyError, OptionError
from kvpolicy.models import load_config

if TYPE_CHECKING:
    from kvpolicy.cli.scene import Scene
    from kvpolicy.connector import Connector
    from kvpolicy.context import PolicyContext
    from kvpolicy.pages import StridedPage
    from kvpolicy.plugins import PluginSet

_EXAMPLE = """\
examples:
  kvpolicy explain qwen3-30b-a3b.json --tp 2 --canonical
  kvpolicy explain qwen3-30b-a3b.json --tp 2 --canonical --svg block.svg
  kvpolicy explain qwen3-30b-a3b.json --tp 2 --json > two.json
  kvpolicy explain --diff two.json four.json

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
    add_model_options(parser, config_needed=False)
    told = parser.add_argument_group("instead of, or beside, the words")
    told.add_argument("--svg", metavar="FILE", help="draw one block in memory and its record")
    told.add_argument(
        "--diff",
        nargs=2,
        metavar=("A.json", "B.json"),
        help="why the identities of two explanations, made with --json, differ",
    )
    add_plugin_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Runs the command."""
    if args.diff is not None:
        return _diff(args, out)
    if args.config is None:
        raise OptionError(
            "the following arguments are required: CONFIG.json, or --diff A.json B.json; see "
            "kvpolicy explain --help"
        )
    context = context_of(args, load_config(args.config), _BLOCKS)
    plugins = plugins_of(args)
    try:
        explained, first, places = _started(context, plugins)
    except KVPolicyError as error:
        known = error.explanation
        if known:
            _warn(known, out)
            if not out.json:  # which has it beside the error
                with contextlib.suppress(BrokenPipeError):  # the error is told all the same
                    out.show(known, lambda console: refused(known, console))
        raise
    _warn(explained, out)
    if args.svg is not None:
        _draw(_scene(context, first, places), args.svg)
    out.show(explained, lambda console: people(explained, console, args.svg or ""))
    return 0


def _warn(explained: Mapping[str, Any], out: Output) -> None:
    for plugin in explained["plugins"]:
        if plugin["status"] == "failed":
            out.warn(f"plugin {plugin['name']!r} is out: it {plugin['reason']}")


def _started(
    context: PolicyContext, plugins: PluginSet
) -> tuple[dict[str, Any], Connector, dict[object, list[StridedPage]]]:
    """The explanation, the first rank's connector, and each kind of stage's pages."""
    from kvpolicy.cli.engine import SimulatedRank
    from kvpolicy.connector import Connector

    asked: list[Connector] = []
    explained: dict[str, Any] = {}
    places: dict[object, list[StridedPage]] = {}
    # Stages with equal layers ask the policies the same question.
    unlike = {tuple(layers.values()): stage for stage, layers in enumerate(context.stages)}
    for specs, stage in sorted(unlike.items(), key=lambda one: one[1]):
        own = attrs.evolve(context, rank=stage * context.grid.stage_size)
        with Connector(own, plugins) as connector:
            # Real tensors, so that what the policies would answer at registration is known.
            connector.register(SimulatedRank(own, connector.decision).caches)
            explained = explained or connector.explain()
            registered = connector.registration.pages if connector.registration else {}
            places[specs] = [registered[name].page for name in own.stage_layers]
            asked.append(connector)
    explained["engine"] = engine_of(context)
    return explained, asked[0], places


def _scene(
    context: PolicyContext, connector: Connector, places: dict[object, list[StridedPage]]
) -> Scene:
    """The largest group, with every stage's pages where its tensors have them."""
    from kvpolicy.certify import Certificate
    from kvpolicy.cli.scene import Scene
    from kvpolicy.records import group_records, prove_layers

    proofs = prove_layers(context, connector.decision)
    certificates = {n: p for n, p in proofs.items() if isinstance(p, Certificate)}
    records = group_records(context, certificates).values()
    pages = {
        name: page
        for layers in context.stages
        for name, page in zip(layers, places[tuple(layers.values())], strict=True)
    }
    return Scene(
        context=context,
        decision=connector.decision,
        record=max(records, key=lambda record: record.record_bytes),
        pages=pages,
    )


def _draw(scene: Scene, file: str) -> None:
    from kvpolicy.cli.draw import save
    from kvpolicy.cli.draw_block import draw_block

    save(draw_block(scene), Path(file))


def _diff(args: argparse.Namespace, out: Output) -> int:
    """Compares two explanations that were made before; no model is read."""
    if args.config is not None or args.svg is not None:
        raise OptionError("--diff A.json B.json stands alone, without CONFIG.json and --svg")
    one, other = args.diff
    try:
        found = explain_difference(load_explanation(one), load_explanation(other))
    except (AttributeError, KeyError, TypeError):
        raise OptionError(
            f"{one} or {other} has been changed by hand, and is no whole explanation any more; "
            "make it with kvpolicy explain CONFIG.json --json"
        ) from None
    out.show(found, lambda console: people_of_difference(found, (one, other), console))
    return 0
