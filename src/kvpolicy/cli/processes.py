"""A round trip whose ranks are processes: each makes its own connector and opens the shared pool.

A rank's process starts, says its fingerprint, waits until it may move, says what it moved, and
ends. It also ends when the process that started it is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, ClassVar

import attrs

from kvpolicy.cli.moving import Side, move_rank
from kvpolicy.cli.options import context_of, plugins_of
from kvpolicy.connector import Connector
from kvpolicy.errors import KVPolicyError, OptionError
from kvpolicy.models import load_config
from kvpolicy.sharedpool import PoolAddress
from kvpolicy.transfer import Direction
from kvpolicy.words import told

MAX_PROCESSES = 64
"""A rank's process takes some 300 MiB before it has any cache."""
_PATIENCE_SECONDS = 10.0
"""For a process that has said its last word, or was told to end."""


class RankError(KVPolicyError, RuntimeError):
    """A rank's process died, raised, or differs from the others."""

    code: ClassVar[str] = "rank"
    exit_status: ClassVar[int] = 1


@attrs.frozen(kw_only=True)
class Task:
    """What a rank's process is to do; can be pickled.

    Attributes:
        args: the command line's options, from which the rank makes its own context and plugins.
        direction: store or load.
        num_blocks: blocks of the engine's caches.
        moved: the groups that are moved.
        address: the pool.
        rank: the world rank.
    """

    args: argparse.Namespace
    direction: Direction
    num_blocks: int
    moved: tuple[str, ...]
    address: PoolAddress
    rank: int = 0

    @property
    def name(self) -> str:
        """The rank, for messages."""
        return (
            f"rank {self.rank} of the {'storing' if self.direction == 'store' else 'loading'} side"
        )


def at_once() -> int:
    """Ranks that start or move at the same time."""
    return os.cpu_count() or 1


def check_processes(*sizes: int) -> None:
    """Refuses more ranks than processes may be started.

    Raises:
        OptionError: says how many.
    """
    if max(sizes) > MAX_PROCESSES:
        raise OptionError(
            f"--processes starts one process for each rank of a side, at most {MAX_PROCESSES}; "
            f"this grid has {max(sizes)} ranks"
        )


def move_side(task: Task, size: int, fingerprint: str, step: Callable[[str], None]) -> Side:
    """Moves all ranks of a side, each in a process of its own.

    Args:
        task: of any rank.
        size: ranks of the side.
        fingerprint: what the connector says that checked the formats; every rank must say it too.
        step: told of each rank that has moved.

    Raises:
        RankError: a rank's process died or raised, or has another fingerprint.
        KVPolicyError: what a rank's process was refused.
    """
    side = Side()
    ranks = [attrs.evolve(task, rank=rank) for rank in range(size)]
    with contextlib.ExitStack() as ending:
        started = [_Process(one) for one in ranks]
        for one in started:
            ending.callback(one.end)
        # All are alive before the first one moves, as the workers of an engine are.
        said = dict(_in_turn(started, _Process.start))
        if others := [one for one in started if said[one] != fingerprint]:
            raise RankError(
                f"{others[0].task.name} has fingerprint {said[others[0]]}, and not {fingerprint} "
                "as the process that started it: they differ in plugins, their versions or "
                "priorities; every process of an engine needs the same"
            )
        for one, moved in _in_turn(started, _Process.go):
            side.add(moved)
            step(f"{task.direction}: rank {one.task.rank + 1} of {size}")
            one.end()
    return side


class _Process:
    """A rank's process, seen from the one that starts it."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._process: SpawnProcess | None = None
        self._ends: list[Connection[Any, Any]] = []

    @property
    def connection(self) -> Connection[Any, Any]:
        """What it talks through."""
        return self._ends[0]

    def start(self) -> None:
        """Starts it; it then says its fingerprint."""
        context = multiprocessing.get_context("spawn")
        self._ends = list(context.Pipe())
        self._process = context.Process(
            target=rank_main, args=(self._ends[1], self.task), name=self.task.name, daemon=True
        )
        self._process.start()
        self._ends.pop().close()  # so that its end is seen

    def go(self) -> None:
        """Lets it move; it then says what it moved."""
        with contextlib.suppress(OSError):  # it is dead, which hear will find out
            self.connection.send("go")

    def hear(self) -> Any:
        """What it says.

        Raises:
            RankError, KVPolicyError: it died, or says what it raised or was refused.
        """
        try:
            kind, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise RankError(f"{self.task.name}: its process {self._how_it_ended()}") from None
        if kind == "refused":
            error: KVPolicyError = value
            error.args = (f"{self.task.name}: {error}",)
            raise error
        if kind == "raised":
            raise RankError(f"{self.task.name}: its process raised {value}")
        return value

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "was never started"
        self._process.join(_PATIENCE_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "closed its connection and does not end"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code} before it was done"

    def end(self) -> None:
        """Sees to it that it has ended; again does no harm."""
        for connection in self._ends:
            connection.close()
        self._ends.clear()
        process, self._process = self._process, None
        if process is None or process.pid is None:
            return
        # One that was told nothing, or has said all, ends by itself and leaves the pool in order.
        process.join(_PATIENCE_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        process.close()


def _in_turn(
    processes: Sequence[_Process], begin: Callable[[_Process], None]
) -> Iterator[tuple[_Process, Any]]:
    """Begins a step of each, so many at once, and yields what each says."""
    waiting, running = list(processes), set[_Process]()
    while waiting or running:
        while waiting and len(running) < at_once():
            one = waiting.pop(0)
            begin(one)
            running.add(one)
        ready = wait([one.connection for one in running])
        for one in [one for one in running if one.connection in ready]:
            running.discard(one)
            yield one, one.hear()


# In the rank's process.


def rank_main(connection: Connection[Any, Any], task: Task) -> None:
    """The rank's process, from start to end."""
    # Interrupts come to the whole group; the process that started this one sees to its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _speak_on_standard_error()
    said: tuple[str, Any]
    try:
        said = "done", _move(connection, task)
    except EOFError:
        return  # not needed any more
    except KVPolicyError as error:
        said = _refused(error)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is said where it is heard
        said = "raised", told(error)
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(said))


def _move(connection: Connection[Any, Any], task: Task) -> Side:
    loading = task.direction == "load"
    config = load_config(task.args.config)
    context = context_of(task.args, config, task.num_blocks, loading=loading)
    own = attrs.evolve(context, rank=task.rank)
    with (
        task.address.open() as pool,
        Connector(own, plugins_of(task.args), host=pool) as connector,
    ):
        # The pages are there, but not in this process's table yet: no store is to pay for that.
        pool.rows.numpy().reshape(-1)[:: mmap.PAGESIZE].max()
        connection.send_bytes(pickle.dumps(("ready", connector.fingerprint)))
        connection.recv()
        return move_rank(task.direction, connector, task.moved, task.args.blocks)


def _refused(error: KVPolicyError) -> tuple[str, Any]:
    """The error itself, or its words where a plugin's own error cannot be handed on."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as why:  # noqa: BLE001  a class that anyone may have written
        del why
        return "raised", told(error)
    return "refused", error


def _speak_on_standard_error() -> None:
    """Standard output is the command's own; what a plugin prints goes beside the warnings."""
    try:
        os.dup2(2, 1)
    except OSError:  # there is no standard error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115  as Python itself does
