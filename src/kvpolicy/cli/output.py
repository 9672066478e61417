"""What a command prints: one JSON object, or tables for people. Errors go to standard error."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpolicy.errors import KVPolicyError, Refusal

_PAGE_COLUMNS = 120


class _Console(Console):
    """A console that leaves a reader who went away to the command line's own handler."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@attrs.frozen
class Output:
    """Where a command's words go.

    Attributes:
        json: one JSON object on standard output and nothing else there.
        stream: standard output as the caller gave it; while a command runs, what others print
            goes to standard error.
    """

    json: bool
    stream: TextIO

    def show(self, value: Mapping[str, Any], people: Callable[[Console], None]) -> None:
        """Prints the JSON value, or calls ``people`` with a console."""
        if self.json:
            self._dump(value)
        else:
            # Wide enough for names and ids to stay whole; a narrow terminal wraps by itself.
            people(
                _Console(
                    file=self.stream,
                    highlight=False,
                    emoji=False,
                    width=max(_PAGE_COLUMNS, shutil.get_terminal_size().columns),
                )
            )

    def error(self, error: KVPolicyError) -> None:
        """Prints an error with every reason; in JSON beside what is known so far."""
        print(f"kvpolicy: {error}", file=sys.stderr)
        refusals: Mapping[str, Refusal] = getattr(error, "refusals", {})
        if self.json:
            listed = [
                {"layer": name, "code": why.code, "detail": why.detail}
                for name, why in refusals.items()
            ]
            told = {"code": error.code, "message": str(error), "refusals": listed}
            self._dump({**(error.explanation or {}), "error": told})

    def warn(self, sentence: str) -> None:
        """One line on standard error."""
        print(f"kvpolicy: warning: {sentence}", file=sys.stderr)

    def _dump(self, value: Mapping[str, Any]) -> None:
        # ASCII, so that any text, lone surrogates too, passes any encoding.
        json.dump(value, self.stream, indent=2, ensure_ascii=True)
        self.stream.write("\n")


def table(*columns: str, rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A plain table; columns that begin with ">" are numbers, set to the right.

    The first column names what a row is about, and stays whole where that leaves room for others.
    """
    made = Table(title=title or None, title_justify="left", title_style="bold", box=None)
    cells = [[str(cell) for cell in row] for row in rows]
    longest = max((len(row[0]) for row in cells), default=0)
    for i, column in enumerate(columns):
        number = column.startswith(">")
        made.add_column(
            column.lstrip(">"),
            justify="right" if number else "left",
            overflow="fold",
            no_wrap=i == 0 and longest <= _PAGE_COLUMNS // 2,
        )
    for row in cells:
        made.add_row(*(escape(cell) for cell in row))
    return made


def size(count: int | None) -> str:
    """A number of bytes for people, exact."""
    return "-" if count is None else f"{count:,} B"


@contextlib.contextmanager
def progress(out: Output, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar over all steps, on a terminal only; yields what advances it and says what is done."""
    # Most commands show none, and need not wait for this import.
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    shown = sys.stderr.isatty() and not out.json
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task("starting", total=steps)

        def step(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield step
