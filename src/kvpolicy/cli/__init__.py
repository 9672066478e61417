"""The command line: parses, runs one command, and turns every error into words and a status.

Exit status: 0 done; 1 verification failed; 2 wrong usage or unreadable input; 3 refused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, TextIO

from kvpolicy import __version__
from kvpolicy.cli import bench, explain, new_plugin, plugins, roundtrip
from kvpolicy.cli.output import Output
from kvpolicy.errors import KVPolicyError, OptionError

_EPILOG = """\
examples:
  kvpolicy plugins
  kvpolicy explain config.json --tp 2 --canonical
  kvpolicy roundtrip config.json --tp 2 --load-tp 4 --canonical --blocks 64
  kvpolicy bench config.json
  kvpolicy new-plugin few-layers

exit status: 0 done, 1 verification failed, 2 wrong usage or unreadable input, 3 refused"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as an error value, so that --json can print it too."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvpolicy",
        description="The policy engine for KV-cache layout and offload in LLM serving.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvpolicy {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (plugins, explain, roundtrip, bench, new_plugin):
        module.add_to(commands)
    return parser


def _discard_output() -> None:
    """Keeps the interpreter from complaining at exit of output that nobody takes."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _spell_out(stream: TextIO) -> None:
    """What a stream's encoding cannot say is escaped: a name never stops the output."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def _run(words: Sequence[str], out: Output) -> int:
    """Parses and runs one command; an error that has words is said in them."""
    try:
        args = _parser().parse_args(words)
        # Standard output is the command's own; what a plugin prints goes beside the warnings.
        with contextlib.redirect_stdout(sys.stderr):
            status: int = args.run(args, out)
    except KVPolicyError as error:
        return _told(error, out)
    except MemoryError:
        return _told(OptionError("not enough memory; lower --blocks or --block-size"), out)
    return status


def _told(error: KVPolicyError, out: Output) -> int:
    """Says an error; its status stays what it is where nobody reads standard output any more."""
    with contextlib.suppress(BrokenPipeError):
        out.error(error)
    return error.exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    # A closed stream is None; what is said there is said to nobody.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115  as Python itself does
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115  as Python itself does
    for stream in (sys.stdout, sys.stderr):
        _spell_out(stream)
    words = list(sys.argv[1:] if argv is None else argv)
    out = Output(json="--json" in words, stream=sys.stdout)
    status = 0
    try:
        status = _run(words, out)
        out.stream.flush()
    except BrokenPipeError:
        _discard_output()
    except OSError as error:
        print(f"kvpolicy: cannot write the output: {error}", file=sys.stderr)
        _discard_output()
        return 2
    except KeyboardInterrupt:
        return 130
    return status
