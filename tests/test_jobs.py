"""Jobs: nothing that a plugin's handle does can lose a job, or deliver a result twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvpolicy as kv
from kvpolicy.jobs import Claim, Jobs, PendingJob

BYTES = 128


class Handle(kv.TransferHandle):
    """Ends when told to, with whatever it is told."""

    def __init__(self) -> None:
        self.answer: Callable[[], object] | None = None
        self.waiters: set[int] = set()

    def end(self, answer: object) -> None:
        self.answer = answer if callable(answer) else lambda: answer

    def done(self) -> bool:
        return self.answer is not None

    def result(self) -> object:
        return self.answer()

    def wait(self, timeout: float | None = None) -> bool:
        self.waiters.add(threading.get_ident())
        return super().wait(timeout)


class Queue:
    """Jobs under test, with each job's handle and what was released for it."""

    def __init__(self) -> None:
        self.jobs, self.handles = Jobs(), {}
        self.released: dict[int, list[frozenset[int]]] = {}

    def submit(self, handle: kv.TransferHandle | None = None, direction: str = "store") -> int:
        job_id = self.jobs.new_id()
        handle = handle or Handle()
        job = kv.TransferJob(
            job_id=job_id,
            direction=direction,
            parts=(),
            rows=torch.zeros(0),
            device="cpu",
            bytes=BYTES,
            block_ids=np.array([1, 2]),
            slots=np.array([8, 9]),
        )
        released = self.released[job_id] = []
        self.handles[job_id] = handle
        self.jobs.add(
            PendingJob(
                job=job,
                handle=handle,
                plugin="acme",
                begun=0.0,
                claim=Claim(settle=released.append, undo=lambda: None),
            )
        )
        return job_id

    def end(self, job_id: int, **changes: object) -> kv.TransferResult:
        result = fine(job_id, **changes)
        self.handles[job_id].end(result)
        return result


def fine(job_id: int, **changes: object) -> kv.TransferResult:
    known = {"job_id": job_id, "ok": True, "bytes": BYTES, "seconds": 0.0}
    return kv.TransferResult(**{**known, **changes})


@pytest.fixture
def queue() -> Queue:
    return Queue()


# Delivery.


def test_ids_count_from_zero(queue: Queue) -> None:
    assert [queue.submit(), queue.submit(), queue.jobs.new_id()] == [0, 1, 2]


def test_poll_delivers_what_has_finished_by_job_id_and_each_once(queue: Queue) -> None:
    one, two, three = queue.submit(), queue.submit(), queue.submit()
    assert queue.jobs.poll() == []
    expected = [queue.end(three), queue.end(one)]
    assert queue.jobs.poll() == expected[::-1]
    assert queue.jobs.poll() == []
    result = queue.end(two)
    assert queue.jobs.poll() == [result]


def test_poll_never_waits_for_a_handle(queue: Queue) -> None:
    job = queue.submit()
    assert queue.jobs.poll() == []
    assert queue.handles[job].waiters == set()


def test_wait_without_ids_waits_for_everything(queue: Queue) -> None:
    jobs = [queue.submit(), queue.submit()]
    expected = [queue.end(job) for job in jobs]
    assert queue.jobs.wait() == expected
    assert queue.jobs.wait() == []


def test_wait_delivers_the_jobs_that_are_named_and_leaves_the_others(queue: Queue) -> None:
    one, two = queue.submit(), queue.submit()
    results = [queue.end(one), queue.end(two)]
    assert queue.jobs.wait([two]) == results[1:]
    assert queue.jobs.poll() == results[:1]


def test_wait_takes_one_id_repeated_ids_and_none(queue: Queue) -> None:
    one = queue.submit()
    result = queue.end(one)
    assert queue.jobs.wait([]) == []
    assert queue.jobs.wait([one, one]) == [result]
    two = queue.submit()
    result = queue.end(two)
    assert queue.jobs.wait(two) == [result]


def test_wait_with_a_timeout_returns_what_there_is(queue: Queue) -> None:
    one, two = queue.submit(), queue.submit()
    result = queue.end(one)
    assert queue.jobs.wait([one, two], timeout=0) == [result]
    assert queue.jobs.wait([two], timeout=0.001) == []
    assert queue.jobs.wait(timeout=0) == []
    result = queue.end(two)
    assert queue.jobs.wait([two], timeout=60) == [result]


def test_wait_sees_what_another_thread_ends(queue: Queue) -> None:
    job = queue.submit()
    timer = threading.Timer(0.02, queue.end, [job])
    timer.start()
    (result,) = queue.jobs.wait([job])
    assert result == fine(job)
    timer.join()


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", [1]])
def test_a_timeout_is_a_number_of_seconds(queue: Queue, timeout: object) -> None:
    with pytest.raises(kv.OptionError, match="a timeout is a number of seconds >= 0, not "):
        queue.jobs.wait(timeout=timeout)


def test_a_job_that_was_never_given_or_was_delivered_is_unknown(queue: Queue) -> None:
    job = queue.submit()
    for unknown in (job + 1, -1, "0", None):
        with pytest.raises(kv.UnknownJobError, match=f"job {unknown!r} is not pending here"):
            queue.jobs.wait([job, unknown])
    queue.end(job)
    assert len(queue.jobs.poll()) == 1
    with pytest.raises(kv.UnknownJobError, match=f"job {job} is not pending here; its result was"):
        queue.jobs.wait([job])


def test_a_result_without_a_handle_is_delivered_like_any(queue: Queue) -> None:
    job = queue.jobs.new_id()
    queue.jobs.finished(fine(job))
    assert queue.jobs.wait([job]) == [fine(job)]


# Release.


def test_a_job_is_released_once_before_its_result_is_seen(queue: Queue) -> None:
    job = queue.submit()
    queue.jobs.collect()
    assert queue.released[job] == []
    queue.end(job)
    queue.jobs.collect()
    assert queue.released[job] == [frozenset()]
    queue.jobs.collect()
    queue.jobs.poll()
    queue.jobs.drain()
    assert queue.released[job] == [frozenset()]


def test_drain_waits_for_everything_and_keeps_the_results(queue: Queue) -> None:
    one, two = queue.submit(), queue.submit()
    expected = [queue.end(one)]
    timer = threading.Timer(0.02, queue.end, [two])
    timer.start()
    queue.jobs.drain()
    assert queue.released == {one: [frozenset()], two: [frozenset()]}
    assert queue.jobs.poll() == [*expected, fine(two)]
    timer.join()


# Handles that misbehave.


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def raising(error: Exception) -> Callable[[], object]:
    def answer() -> object:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (raising(OSError("unplugged")), "raised OSError: unplugged"),
        (lambda: None, "gave None, not a TransferResult"),
        (lambda: "done", "gave 'done', not a TransferResult"),
        (lambda: True, "gave True, not a TransferResult"),
        (lambda: Unspeakable(), "gave a Unspeakable that cannot be shown, not a TransferResult"),
        (lambda: fine(77), "gave the result of job 77 for job 0"),
        (lambda: fine(0, bytes=BYTES - 1), "reports success with 127 of 128 B and 0 failed ids"),
        (lambda: fine(0, bytes=0), "reports success with 0 of 128 B"),
        (lambda: fine(0, bytes=BYTES + 1), "reports success with 129 of 128 B"),
        (lambda: fine(0, failed_ids=[8]), "reports success with 128 of 128 B and 1 failed ids"),
        (lambda: kv.TransferResult(job_id=0, ok="yes", bytes=BYTES, seconds=0.0), "OptionError"),
    ],
)
def test_a_result_that_is_wrong_is_a_failed_one_that_names_the_plugin(
    queue: Queue, answer: Callable[[], object], what: str
) -> None:
    job = queue.submit()
    queue.handles[job].end(answer)
    (result,) = queue.jobs.wait([job], timeout=60)
    assert (result.ok, result.job_id, result.bytes, result.failed_ids) == (False, job, 0, (8, 9))
    assert result.error.startswith("plugin 'acme' ")
    assert what in result.error
    assert queue.released[job] == [frozenset({8, 9})]


class RaisingDone(Handle):
    def done(self) -> bool:
        raise ValueError("cannot say")


def test_a_handle_whose_done_raises_has_failed(queue: Queue) -> None:
    job = queue.submit(RaisingDone(), direction="load")
    (result,) = queue.jobs.poll()
    assert (result.job_id, result.ok, result.failed_ids) == (job, False, (1, 2))
    assert result.error == "plugin 'acme' raised ValueError: cannot say"


class RaisingWait(Handle):
    """Its wait raises; at the third time of asking it is done."""

    def __init__(self, job_id: int) -> None:
        super().__init__()
        self.asked, self.job_id = 0, job_id

    def wait(self, timeout: float | None = None) -> bool:
        raise ValueError("cannot wait")

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def result(self) -> kv.TransferResult:
        return fine(self.job_id)


class ImpatientWait(RaisingWait):
    def wait(self, timeout: float | None = None) -> bool:
        return False


@pytest.mark.parametrize("kind", [RaisingWait, ImpatientWait])
@pytest.mark.parametrize("how", ["wait", "drain"])
def test_a_handle_whose_wait_raises_or_returns_early_is_asked_again(
    queue: Queue, kind: type[RaisingWait], how: str
) -> None:
    job = queue.submit(kind(0))
    if how == "wait":
        assert queue.jobs.wait([job]) == [fine(job)]
    else:
        queue.jobs.drain()
        assert queue.jobs.poll() == [fine(job)]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"failed_ids": [9], "error": "half"}, {"failed_ids": (9,), "error": "half", "bytes": 64}),
        ({"failed_ids": [], "error": "some"}, {"failed_ids": (8, 9), "error": "some", "bytes": 64}),
        ({"failed_ids": [1], "error": ""}, {"failed_ids": (8, 9), "error": "failed", "bytes": 64}),
        ({"failed_ids": [8, 77], "error": "x"}, {"failed_ids": (8, 9), "error": "x", "bytes": 64}),
        ({"failed_ids": [8], "error": ""}, {"failed_ids": (8,), "error": "failed", "bytes": 64}),
    ],
)
def test_a_failure_that_does_not_say_which_of_ours_is_a_failure_of_all(
    queue: Queue, said: dict, told: dict
) -> None:
    job = queue.submit()
    queue.end(job, ok=False, bytes=64, **said)
    (result,) = queue.jobs.poll()
    assert result == fine(job, ok=False, **told)
    assert queue.released[job] == [frozenset(told["failed_ids"])]


# Threads.


def test_many_threads_deliver_each_result_once_and_release_each_job_once(queue: Queue) -> None:
    jobs = [queue.submit() for _ in range(200)]
    barrier, found = threading.Barrier(6), []

    def poll() -> None:
        barrier.wait()
        while len(found) < len(jobs):
            found.extend(queue.jobs.poll())

    def end(these: list[int]) -> None:
        barrier.wait()
        for job in these:
            queue.end(job)

    threads = [threading.Thread(target=poll) for _ in range(4)]
    threads += [threading.Thread(target=end, args=(jobs[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.job_id for result in found) == jobs
    assert all(released == [frozenset()] for released in queue.released.values())


def test_threads_that_wait_for_one_job_share_one_result(queue: Queue) -> None:
    job, got = queue.submit(), []
    threads = [
        threading.Thread(target=lambda: got.extend(queue.jobs.wait([job]))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while len(queue.handles[job].waiters) < len(threads):
        time.sleep(0.001)
    queue.end(job)
    for thread in threads:
        thread.join()
    assert got == [fine(job)]
