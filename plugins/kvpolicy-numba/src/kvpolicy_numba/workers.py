"""The plugin's threads: a bounded pool for each process, made on first use."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

import kvpolicy

VARIABLE = "KVPOLICY_HOST_THREADS"
MAX_THREADS = 256
_MOST_BY_DEFAULT = 8

Task = Callable[[], None]


def host_threads() -> int:
    """As the environment says, 0 for the caller's own thread; else the cores, at most eight.

    Raises:
        OptionError: the environment says something else than a number from 0 to 256.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        affinity = getattr(os, "sched_getaffinity", None)
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        return min(cores, _MOST_BY_DEFAULT)
    if not (text.isascii() and text.isdigit()) or int(text) > MAX_THREADS:
        raise kvpolicy.OptionError(
            f"{VARIABLE} is a whole number from 0 (the caller's thread copies) to {MAX_THREADS}, "
            f"not {text!r}"
        )
    return int(text)


class Workers:
    """Threads that take tasks first in, first out. A task does not raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[int, SimpleQueue[Task | None]] = {}
        self._process = 0

    def put(self, tasks: Iterable[Task], threads: int) -> None:
        """Has the tasks run by a pool of so many threads; returns at once."""
        queue = self._queue(threads)
        for task in tasks:
            queue.put(task)

    def _queue(self, threads: int) -> SimpleQueue[Task | None]:
        with self._lock:
            if self._process != os.getpid():  # a fork takes no threads along
                self._queues, self._process = {}, os.getpid()
            queue = self._queues.get(threads)
            if queue is None:
                queue = self._queues[threads] = SimpleQueue()
                made = [
                    threading.Thread(
                        target=_serve, args=(queue,), name="kvpolicy-numba", daemon=True
                    )
                    for _ in range(threads)
                ]
                for thread in made:
                    thread.start()
                atexit.register(_stop, queue, made, self._process)
            return queue


def _serve(queue: SimpleQueue[Task | None]) -> None:
    while (task := queue.get()) is not None:
        task()
        del task  # nothing is kept alive while the thread waits


def _stop(queue: SimpleQueue[Task | None], threads: list[threading.Thread], process: int) -> None:
    """At exit, what was submitted is copied before its memory goes."""
    if process == os.getpid():
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join()
