"""``kvpolicy plugins``: what is installed, in the order in which it is asked."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from kvpolicy.cli.options import add_plugin_options, plugins_of
from kvpolicy.cli.output import Output, table
from kvpolicy.explain import explain_plugin

_EXAMPLE = """\
example:
  KVPOLICY_PLUGINS=slab kvpolicy plugins --priority slab=10"""


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "plugins",
        help="list the plugins, in the order in which they are asked",
        description="Lists the installed plugins, in the order in which they are asked.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_plugin_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Runs the command."""
    found = [explain_plugin(info) for info in plugins_of(args).infos]

    def people(console: Console) -> None:
        rows = [
            (
                one["name"],
                f"{one['distribution']} {one['version']}".strip(),
                one["priority"],
                ", ".join(one["hooks"]) or "-",
                one["status"] + (f": {one['reason']}" if one["reason"] else ""),
            )
            for one in found
        ]
        console.print(table("plugin", "distribution", ">priority", "hooks", "status", rows=rows))

    out.show({"plugins": found}, people)
    return 0
