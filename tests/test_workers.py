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


AT_EXIT = """
import os, time
from kvpolicy.workers import Workers

def slow():
    time.sleep(0.2)
    os.write(1, b"done ")

Workers("w").put([slow] * 3, 2)
"""


def test_what_was_put_is_done_before_the_process_ends():
    ran = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.returncode) == ("done " * 3, 0), ran.stderr
