"""``kvpolicy roundtrip``: stores real blocks under one grid, loads them under another, verifies."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.markup import escape

from kvpolicy.cli.options import add_load_options, add_model_options, add_plugin_options
from kvpolicy.cli.output import Output, size, table

_EXAMPLE = """\
example:
  kvpolicy roundtrip qwen3-30b-a3b.json --tp 2 --load-tp 4 --canonical --blocks 64

A group is layers that share a block table; explain lists them. Recurrent state cannot change
topology: with --group, the other groups of a hybrid model can."""

_LEAST_SECONDS = 0.005
"""What takes less says nothing of a speed."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "roundtrip",
        help="store blocks under one grid, load them under another, verify every byte",
        description="Stores blocks under one grid, loads them under another, and verifies every\n"
        "byte by its logical coordinates (layer, token, K/V, head).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser)
    parser.add_argument("--blocks", type=int, default=16, metavar="N", help="blocks a group (16)")
    parser.add_argument(
        "--group",
        metavar="NAME",
        action="append",
        default=[],
        help="move this group alone; may be repeated (all groups)",
    )
    parser.add_argument(
        "--processes", action="store_true", help="each rank is a process (all ranks in this one)"
    )
    add_load_options(parser)
    add_plugin_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Runs the command; torch is imported no sooner."""
    from kvpolicy.cli.simulation import round_trip

    report = round_trip(args, out)
    out.show(report, lambda console: people(report, console))
    return 0 if report["verified"] else 1


def _speed(count: int, seconds: float) -> str:
    return f"{count / max(seconds, 1e-9) / 1e9:.2f} GB/s"


def _share(ratio: float | None, seconds: float) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.0%}" if seconds >= _LEAST_SECONDS else "too little to time"


def people(report: dict[str, Any], console: Console) -> None:
    """Prints the report as tables."""
    good = report["verified"]
    verdict = "verified: every byte is what its coordinates say" if good else "NOT verified"
    console.print(verdict, style="bold green" if good else "bold red")
    sides = [
        (
            what,
            ", ".join(f"{name} {n}" for name, n in report[grid].items() if n > 1) or "one rank",
            report[decision]["layout"],
            size(report[count]),
            _speed(report[count], report[seconds]),
            _share(report[ratio], report[seconds]),
        )
        for what, grid, decision, count, seconds, ratio in (
            ("stored", "grid", "decision", "bytes", "store_seconds", "store_ratio"),
            ("loaded", "load_grid", "load_decision", "load_bytes", "load_seconds", "load_ratio"),
        )
    ]
    console.print()
    console.print(table("", "grid", "layout", ">bytes", ">speed", ">of one large copy", rows=sides))
    console.print()
    names = ", ".join(group["name"] for group in report["groups"])
    console.print(escape(f"blocks             {report['blocks']} of each group ({names})"))
    console.print(f"record of a block  {size(report['record_bytes'])}")
    console.print(f"format id          {report['format_id']}")
    console.print(f"mismatched         {size(report['mismatched_bytes'])}")
    console.print(f"changed elsewhere  {size(report['changed_outside_bytes'])}")
    for error in report["errors"]:
        console.print(escape(f"failed: {error}"), style="red")
