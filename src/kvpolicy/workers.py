"""A bounded pool of threads for copies on the host: made on first use, safe after a fork."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from kvpolicy.errors import OptionError
from kvpolicy.values import is_whole
from kvpolicy.words import shown

VARIABLE = "KVPOLICY_HOST_THREADS"
MAX_THREADS = 256
_MOST_BY_DEFAULT = 8
"""More seldom copy faster: a few cores fill the memory's channels."""

Task = Callable[[], None]


def default_threads() -> int:
    """The cores that this process may use, at most eight."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, _MOST_BY_DEFAULT)


def host_threads() -> int:
    """The threads that copy on the host, as the environment says; 0 means the caller's own.

    Raises:
        OptionError: what it says is no number from 0 to 256.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return default_threads()
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_THREADS:
        raise OptionError(
            f"{VARIABLE} is a whole number from 0 (the caller's thread copies) to {MAX_THREADS}, "
            f"not {shown(text)}"
        )
    return int(text)


class Workers:
    """Threads that take tasks first in, first out. A task does not raise.

    Args:
        name: the threads', and what messages call them.
        threads: how many there are, 0 for none: the caller's own thread does it; by default as
            ``KVPOLICY_HOST_THREADS`` says at the time, or the cores that the process may use, at
            most eight.

    Raises:
        OptionError: threads that are no number from 0 to 256.
    """

    def __init__(self, name: str, threads: int | None = None) -> None:
        if threads is not None and not (is_whole(threads) and 0 <= threads <= MAX_THREADS):
            raise OptionError(
                f"{name}: threads is a whole number from 0 to {MAX_THREADS} or None, not "
                f"{shown(threads)}"
            )
        self._threads = threads
        self._name = name
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[Task | None]] = {}
        self._process = os.getpid()
        self._ended = False

    def threads(self) -> int:
        """How many there are now.

        Raises:
            OptionError: as `host_threads` says.
        """
        return host_threads() if self._threads is None else self._threads

    def put(self, tasks: Iterable[Task], threads: int) -> None:
        """Has the tasks run by a pool of so many threads, and returns at once.

        Args:
            tasks: in the order in which they are begun.
            threads: what `threads` said; every number has a pool of its own. With 0, and once the
                process is about to end, the tasks have run when this returns.

        Raises:
            OptionError: a number below 0.
            RuntimeError: no thread can be started; nothing was put.
        """
        if threads < 0:
            raise OptionError(f"{self._name}: threads is a whole number >= 0, not {threads}")
        if self._process != os.getpid():
            # A fork carries no threads over, and may leave the lock held.
            self._lock, self._queues, self._ended = threading.Lock(), {}, False
            self._process = os.getpid()
        with self._lock:
            queue = self._queue(threads) if threads else None
            if queue is not None:
                for task in tasks:
                    queue.put(task)
                return
        for task in tasks:
            task()

    def _queue(self, threads: int) -> SimpleQueue[Task | None] | None:
        """Where a pool of that size takes its tasks; None where there are no threads any more."""
        if self._ended:
            return None
        if threads not in self._queues:
            queue: SimpleQueue[Task | None] = SimpleQueue()
            made: list[threading.Thread] = []
            try:
                for _ in range(threads):
                    thread = threading.Thread(
                        target=_serve, args=(queue,), name=self._name, daemon=True
                    )
                    thread.start()
                    made.append(thread)
            except BaseException:
                for _ in made:
                    queue.put(None)
                raise
            atexit.register(self._stop, queue, made, self._process)
            self._queues[threads] = queue
        return self._queues[threads]

    def _stop(
        self, queue: SimpleQueue[Task | None], threads: list[threading.Thread], process: int
    ) -> None:
        """At exit: what was submitted is copied before its memory goes."""
        if process != os.getpid():
            return
        with self._lock:
            self._ended = True  # what else comes at exit is copied by who brings it
            for _ in threads:
                queue.put(None)
        for thread in threads:
            thread.join()


def _serve(queue: SimpleQueue[Task | None]) -> None:
    """One thread: task after task, until None."""
    while (task := queue.get()) is not None:
        try:
            task()
        except BaseException:  # noqa: BLE001  told as Python tells it, and the thread goes on
            told = threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            threading.excepthook(told)
            del told
        del task  # nothing is kept alive while the thread waits
