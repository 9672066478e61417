"""The threads that copy: a bounded number of them, in order, joined at exit."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import kvpolicy as kv
from kvpolicy import workers


def test_tasks_begin_in_order_and_one_thread_runs_them_one_by_one():
    done, finished = [], threading.Event()
    pool = workers.Workers("w")
    pool.put([lambda i=i: done.append(i) for i in range(100)], 1)
    pool.put([finished.set], 1)
    assert finished.wait(60)
    assert done == list(range(100))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_more_threads_run_than_were_asked_for(threads):
    lock, running, most = threading.Lock(), 0, 0
    left = threading.Semaphore(0)
    together = threading.Barrier(threads)

    def task():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(60)  # only so many at once can pass
        with lock:
            running -= 1
        left.release()

    pool = workers.Workers("w")
    for _ in range(3):
        pool.put([task] * threads, threads)
    for _ in range(3 * threads):
        assert left.acquire(timeout=60)
    assert most == threads


def test_no_threads_are_the_caller_s_own():
    done = []
    pool = workers.Workers("w", 0)
    pool.put([lambda: done.append(threading.current_thread())], pool.threads())
    assert done == [threading.current_thread()]


@pytest.mark.parametrize("threads", [-1, 257, True, 1.0, "2"])
def test_threads_that_cannot_be_are_refused(threads):
    with pytest.raises(kv.OptionError, match="acme: threads is a whole number from 0 to 256"):
        workers.Workers("acme", threads)


def test_the_default_is_the_cores_of_this_process_and_at_most_eight(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: {0, 5, 7}, raising=False)
    assert workers.host_threads() == 3
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: range(64), raising=False)
    assert workers.host_threads() == 8
    monkeypatch.delattr(workers.os, "sched_getaffinity")
    monkeypatch.setattr(workers.os, "cpu_count", lambda: None)
    assert workers.host_threads() == 1


@pytest.mark.parametrize(("text", "number"), [("0", 0), (" 7 ", 7), ("256", 256)])
def test_the_environment_says_otherwise(monkeypatch, text, number):
    monkeypatch.setenv("KVPOLICY_HOST_THREADS", text)
    assert workers.host_threads() == number


@pytest.mark.parametrize("text", ["257", "-1", "two", "1.5", "\u0663"])
def test_what_is_no_number_of_threads_is_refused(monkeypatch, text):
    monkeypatch.setenv("KVPOLICY_HOST_THREADS", text)
    with pytest.raises(kv.OptionError) as caught:
        workers.host_threads()
    assert str(caught.value) == (
        "KVPOLICY_HOST_THREADS is a whole number from 0 (the caller's thread copies) to 256, not "
        f"{text!r}"
    )


def test_a_pool_whose_threads_cannot_start_is_tried_again(monkeypatch):
    """As where processes or memory are short for a moment; nothing that was put is lost."""
    start, left = threading.Thread.start, [1]

    def scarce(thread):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    done = threading.Event()
    pool = workers.Workers("w")
    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.put([done.set], 2)
    assert not done.wait(0.05)
    monkeypatch.setattr(threading.Thread, "start", start)
    pool.put([done.set], 2)
    assert done.wait(60)


def test_a_task_that_raises_is_told_and_ends_no_thread(monkeypatch):
    told, done = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    pool = workers.Workers("w")
    pool.put([lambda: 1 // 0, done.set], 1)
    assert done.wait(60)
    assert [str(one) for one in told] == ["integer division or modulo by zero"]


def test_fewer_threads_than_none_are_refused():
    with pytest.raises(kv.OptionError, match="w: threads is a whole number >= 0, not -1"):
        workers.Workers("w").put([], -1)


AT_EXIT = """
import os, time
from kvpolicy.workers import Workers

def slow():
    time.sleep(0.2)
    os.write(1, b"done ")

Workers("w").put([slow] * 3, 2)
"""


LATE = """
import atexit, os
from kvpolicy.workers import Workers

pool = Workers("w")
atexit.register(lambda: pool.put([lambda: os.write(1, b"late ")], 2))  # runs after ours
pool.put([lambda: os.write(1, b"early ")], 2)
"""


def test_what_is_put_while_the_process_ends_is_done_too():
    ran = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.returncode) == ("early late ", 0), ran.stderr


def test_what_was_put_is_done_before_the_process_ends():
    ran = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.returncode) == ("done " * 3, 0), ran.stderr
