"""The Connector's life: made, registered, closed; from any thread, with any copy engine."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

import kvpolicy as kv
from kvpolicy.policies import host_copy

SPEC = kv.LatentSpec(block_size=4, row_bytes=8)
PAGE = 32


def connect(
    plugins: object = (),
    *,
    host: object = 4,
    blocks: int = 8,
    layers: dict | None = None,
    caches: dict | None = None,
    **wishes: object,
) -> tuple[kv.Connector, dict[str, torch.Tensor]]:
    """One layer, unless others are given; block b is full of b + 1."""
    layers = layers or {"l": SPEC}
    context = kv.PolicyContext(
        **{
            "geometry": kv.CacheGeometry(layers=layers, num_blocks=blocks),
            "canonical": True,
            **wishes,
        }
    )
    connector = kv.Connector(context, plugins, host=host)
    if caches is None:
        filled = (torch.arange(blocks) + 1).to(torch.uint8).view(-1, 1, 1)
        caches = {name: filled.repeat(1, 4, 8) for name in layers}
    connector.register(caches)
    return connector, caches


def finish(connector: kv.Connector, job_id: int) -> kv.TransferResult:
    (result,) = connector.wait([job_id], timeout=60)
    assert result.job_id == job_id
    return result


class Gate:
    """A copy engine whose jobs stand still until `open`; host-copy then does the work."""

    priority = 10

    def __init__(self) -> None:
        self.open = threading.Event()

    @kv.hookimpl
    def transfer(self, job: kv.TransferJob) -> kv.TransferHandle:
        gate, engine = self, host_copy.HostCopy()

        class Gated(kv.TransferHandle):
            inner: kv.TransferHandle | None = None

            def done(self) -> bool:
                if not gate.open.is_set():
                    return False
                self.inner = self.inner or engine.transfer(job=job)
                return self.inner.done()

            def result(self) -> kv.TransferResult:
                return self.inner.result()

        return Gated()


# A copy engine that takes its time, or goes wrong.


def test_poll_returns_at_once_while_a_transfer_takes_its_time() -> None:
    gate = Gate()
    connector, _ = connect([gate])
    job = connector.store([2], [1])
    assert connector.poll() == []
    assert connector.wait([job], timeout=0) == []
    assert not connector.host.rows.any()
    gate.open.set()
    assert finish(connector, job).ok
    assert connector.host.rows[1, :PAGE].tolist() == [3] * PAGE
    assert connector.poll() == []


def test_poll_returns_at_once_even_while_a_plugin_sleeps_in_its_hook() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Sleeper:
        priority = 10

        @kv.hookimpl
        def transfer(self, job: kv.TransferJob) -> None:
            entered.set()
            assert leave.wait(60)

    connector, _ = connect([Sleeper()])
    submitter = threading.Thread(target=connector.store, args=([0], [0]))
    submitter.start()
    assert entered.wait(60)
    assert connector.poll() == []
    assert connector.wait(timeout=0) == []
    leave.set()
    submitter.join()
    (result,) = connector.wait(timeout=60)
    assert result.ok


def taking(answer: Callable[[kv.TransferJob], object]) -> object:
    class Acme:
        name, priority = "acme", 10

        @kv.hookimpl
        def transfer(self, job: kv.TransferJob) -> object:
            return answer(job)

    return Acme()


def raises(_job: kv.TransferJob) -> None:
    raise OSError("no such device")


def claims(job: kv.TransferJob, bytes_moved: int) -> kv.TransferHandle:
    return kv.TransferHandle.finished(
        kv.TransferResult(job_id=job.job_id, ok=True, bytes=bytes_moved, seconds=0.0)
    )


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (raises, "raised OSError: no such device"),
        (lambda job: "taken", "answered 'taken', not a TransferHandle or None"),
        (lambda job: True, "answered True, not a TransferHandle or None"),
        (lambda job: kv.TransferHandle, "not a TransferHandle or None"),
        (lambda job: claims(job, 0), "reports success with 0 of 64 B"),
        (lambda job: kv.TransferHandle.finished("fine"), "gave 'fine', not a TransferResult"),
    ],
)
def test_a_copy_engine_that_goes_wrong_is_a_failed_result_that_names_it(
    answer: Callable[[kv.TransferJob], object], what: str
) -> None:
    connector, _ = connect([taking(answer)])
    job = connector.store([0, 1], [2, 3])
    result = finish(connector, job)
    assert (result.ok, result.bytes, result.failed_ids) == (False, 0, (2, 3))
    assert result.error.startswith("plugin 'acme' ")
    assert what in result.error
    for slot in (2, 3):  # what was not written is never reported as there
        assert connector.host.holds(slot) is None
        with pytest.raises(kv.PoolError, match=f"slot {slot} holds nothing"):
            connector.load([slot], [0])


def test_a_load_that_goes_wrong_names_the_blocks_and_leaves_the_record() -> None:
    faults = [None, raises, None]
    connector, caches = connect([taking(lambda job: (faults.pop(0) or (lambda _: None))(job))])
    assert finish(connector, connector.store([4], [3])).ok
    result = finish(connector, connector.load([3, 3], [5, 6]))
    assert (result.ok, result.failed_ids) == (False, (5, 6))
    assert finish(connector, connector.load([3], [7])).ok
    assert set(caches["l"][7].flatten().tolist()) == {5}


def test_a_job_that_nobody_takes_is_refused_with_who_was_asked() -> None:
    installed = kv.load_plugins(kv.select(names=(), environ={}))
    connector, _ = connect(installed.without("host-copy", "not here"))
    with pytest.raises(
        kv.NoTransferError,
        match=r"no transfer plugin takes a store of tensors on 'cpu'; asked: none; install",
    ):
        connector.store([0], [0])
    assert connector.poll() == []


def test_copy_engines_are_asked_by_priority_until_one_takes_the_job() -> None:
    asked: list[str] = []

    def engine(name: str, priority: int, takes: bool) -> object:
        class Engine:
            @kv.hookimpl
            def transfer(self, job: kv.TransferJob) -> kv.TransferHandle | None:
                asked.append(name)
                return claims(job, job.bytes) if takes else None

        made = Engine()
        made.name, made.priority = name, priority
        return made

    plugins = [
        engine("low", 1, True),
        engine("first-by-name", 5, False),
        engine("top", 9, False),
        engine("second-by-name", 5, True),
    ]
    for order in (plugins, plugins[::-1]):
        asked.clear()
        connector, _ = connect(order)
        assert finish(connector, connector.store([0], [0])).ok
        assert asked == ["top", "first-by-name", "second-by-name"]


# Closing (C24).


def started_thread(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def until_closing(connector: kv.Connector) -> None:
    while "closed" not in repr(connector):
        time.sleep(0.001)


def test_c24_close_drains_a_pending_load_and_releases_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, pool, left = Gate(), kv.HostPool(4), []
    leave = kv.HostPool.leave
    monkeypatch.setattr(
        kv.HostPool, "leave", lambda self, who: (left.append(who), leave(self, who))
    )
    connector, caches = connect([gate], host=pool)
    gate.open.set()
    assert finish(connector, connector.store([4], [1])).ok
    gate.open.clear()
    job = connector.load([1], [6])

    closers = [started_thread(connector.close) for _ in range(2)]  # from two threads
    until_closing(connector)
    with pytest.raises(kv.ClosedError, match="this connector is closed"):
        connector.store([0], [0])
    assert all(thread.is_alive() for thread in closers)
    assert left == []
    assert set(caches["l"][6].flatten().tolist()) == {7}

    gate.open.set()
    for thread in closers:
        thread.join()
    assert set(caches["l"][6].flatten().tolist()) == {5}  # the load was finished, not dropped
    assert len(left) == 1
    connector.close()  # twice is fine
    assert len(left) == 1
    (result,) = connector.poll()
    assert (result.job_id, result.ok) == (job, True)

    other, _ = connect(host=pool)  # nobody is busy with the slot any more
    assert finish(other, other.store([0], [1])).ok


def test_c24_closing_twice_is_fine_registered_or_not() -> None:
    connector, _ = connect()
    connector.close()
    connector.close()
    bare = kv.Connector(connector.context)
    bare.close()
    bare.close()


def test_a_closed_connector_refuses_everything_but_its_results() -> None:
    connector, caches = connect()
    job = connector.store([0], [0])
    connector.close()
    for refused in (
        lambda: connector.store([0], [0]),
        lambda: connector.load([0], [0]),
        lambda: connector.register(caches),
    ):
        with pytest.raises(kv.ClosedError, match="this connector is closed; make another one"):
            refused()
    assert [result.job_id for result in connector.poll()] == [job]
    assert connector.poll() == connector.wait() == []
    assert connector.registration is None
    assert connector.host is None
    assert connector.explain()["format_id"] == connector.format_id
    assert "closed" in repr(connector)


def test_close_waits_for_a_submission_that_has_begun() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(job: kv.TransferJob) -> None:
        entered.set()
        assert leave.wait(60)

    connector, _ = connect([taking(slow)])
    submitter = started_thread(lambda: connector.store([3], [0]))
    assert entered.wait(60)
    closer = started_thread(connector.close)
    until_closing(connector)
    assert closer.is_alive()
    leave.set()
    submitter.join()
    closer.join()
    (result,) = connector.poll()
    assert result.ok


def test_close_releases_the_engines_memory_and_its_own_rows() -> None:
    memory = np.zeros((8, 4, 8), dtype=np.uint8)
    connector = connect(caches={"l": torch.from_numpy(memory)})[0]
    alive = [weakref.ref(memory), weakref.ref(connector.host)]
    assert finish(connector, connector.store([0], [0])).ok
    del memory
    gc.collect()
    assert all(ref() is not None for ref in alive)
    connector.close()
    deadline = time.monotonic() + 60
    while any(ref() is not None for ref in alive) and time.monotonic() < deadline:
        time.sleep(0.001)  # the copy thread may still be letting go of its last job
        gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_shared_pool_outlives_the_connectors_that_close() -> None:
    pool = kv.HostPool(4)
    one, _ = connect(host=pool)
    assert finish(one, one.store([4], [2])).ok
    one.close()
    assert one.host is pool
    other, caches = connect(host=pool)
    assert finish(other, other.load([2], [0])).ok
    assert set(caches["l"][0].flatten().tolist()) == {5}


# Rows that a copy engine is shown before the first job.


class Preparing:
    name, priority = "acme", 10

    def __init__(self) -> None:
        self.shown: list[tuple[torch.Tensor, str]] = []
        self.held: list[weakref.ref] = []

    @kv.hookimpl
    def transfer(self, job: kv.TransferJob) -> None:
        assert self.shown[0][0] is job.rows
        assert self.held[0]() is not None

    def prepare_rows(self, rows: torch.Tensor, device: str) -> object:
        self.shown.append((rows, device))
        answer = np.zeros(1)
        self.held.append(weakref.ref(answer))
        return answer


def test_a_copy_engine_is_shown_the_rows_once_and_what_it_answers_is_kept_until_close() -> None:
    acme = Preparing()
    connector, _ = connect([acme], layers={"a": SPEC, "b": SPEC})
    for slot in range(2):
        assert finish(connector, connector.store([slot], [slot])).ok
    ((rows, device),) = acme.shown
    assert rows is connector.host.rows
    assert device == "cpu"
    connector.close()
    gc.collect()
    assert acme.held[0]() is None


def test_without_a_host_pool_there_are_no_rows_to_show() -> None:
    acme = Preparing()
    connect([acme], host=None)
    assert not acme.shown


def test_a_copy_engine_that_fails_on_the_rows_stops_the_registration_and_is_named() -> None:
    acme = Preparing()
    acme.prepare_rows = lambda rows, device: 1 // 0
    with pytest.raises(
        kv.RegistrationError, match=r"'acme' raised ZeroDivisionError: .* prepare the host rows"
    ) as caught:
        connect([acme])
    assert caught.value.plugin_name == "acme"


def test_a_connector_is_a_context_manager() -> None:
    connector, _ = connect()
    with connector as entered:
        assert entered is connector
        job = connector.store([0], [0])
    with pytest.raises(kv.ClosedError):
        connector.store([0], [0])
    assert [result.job_id for result in connector.poll()] == [job]
    connector, _ = connect()
    with pytest.raises(KeyError), connector:
        raise KeyError("ours")
    assert "closed" in repr(connector)


# What must come first.


def test_nothing_moves_before_the_layers_are_registered() -> None:
    connector = kv.Connector(connect()[0].context, host=2)
    assert "not registered" in repr(connector)
    for submit in (connector.store, connector.load):
        with pytest.raises(kv.ClosedError, match="register the engine's tensors before storing"):
            submit([0], [0])
    assert connector.poll() == []


def test_nothing_moves_without_a_host_pool() -> None:
    connector, _ = connect(host=None)
    assert connector.host is None
    assert connector.registration is not None
    for submit in (connector.store, connector.load):
        with pytest.raises(kv.ClosedError, match="has no host pool; give host= when making it"):
            submit([0], [0])


def test_layers_are_registered_once() -> None:
    connector, caches = connect()
    before = connector.registration
    with pytest.raises(kv.ClosedError, match="has registered its layers; make another one"):
        connector.register(caches)
    assert connector.registration is before
    assert "registered>" in repr(connector)


def test_one_of_several_threads_registers() -> None:
    """All of them are past the first check, inside a policy, before any of them is done."""
    everyone = threading.Barrier(4)

    class Meeting:
        priority = 500

        @kv.hookimpl
        def register_layers(self, context: kv.PolicyContext) -> None:
            everyone.wait(60)

    connector = kv.Connector(connect()[0].context, [Meeting()], host=2)
    caches = {"l": torch.zeros(8, 4, 8, dtype=torch.uint8)}
    refused: list[kv.ClosedError] = []

    def register() -> None:
        try:
            connector.register(caches)
        except kv.ClosedError as error:
            refused.append(error)

    threads = [started_thread(register) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert finish(connector, connector.store([0], [0])).ok


@pytest.mark.parametrize("context", [None, {}, kv.PolicyContext])
def test_a_connector_takes_a_context(context: object) -> None:
    with pytest.raises(kv.OptionError, match="a Connector takes a PolicyContext, not "):
        kv.Connector(context)


@pytest.mark.parametrize("host", [True, "4", 0, -1])
def test_a_host_that_cannot_be_is_refused(host: object) -> None:
    with pytest.raises(kv.OptionError, match=r"host is a HostPool|num_slots is a whole number"):
        connect(host=host)


def test_a_pool_with_rows_too_short_for_the_records_is_refused() -> None:
    with pytest.raises(kv.PoolError, match="hold 31 B, this connector's records have 32; make"):
        connect(host=kv.HostPool(2, record_bytes=31))


# Groups.


def grouped() -> tuple[kv.Connector, dict[str, torch.Tensor]]:
    context = kv.PolicyContext(
        geometry=kv.CacheGeometry(
            layers={"full.0": SPEC, "slide.0": SPEC, "full.1": SPEC},
            num_blocks=4,
            groups=[
                kv.LayerGroup(name="full", layer_names=["full.0", "full.1"]),
                kv.LayerGroup(name="sliding", layer_names=["slide.0"]),
            ],
        ),
        canonical=True,
    )
    caches = {
        name: torch.full((4, 4, 8), 10 * (i + 1), dtype=torch.uint8)
        for i, name in enumerate(context.geometry.layers)
    }
    connector = kv.Connector(context, (), host=4)
    connector.register(caches)
    return connector, caches


def test_a_group_is_named_where_there_are_several() -> None:
    connector, _ = grouped()
    for submit in (connector.store, connector.load):
        with pytest.raises(kv.OptionError, match="form groups, name one of: full, sliding"):
            submit([0], [0])
        with pytest.raises(kv.OptionError, match="no group 'slidng'; did you mean 'sliding'"):
            submit([0], [0], group="slidng")
        with pytest.raises(kv.OptionError, match=re.escape("no group 'x'; known: full, sliding")):
            submit([0], [0], "x")


def test_one_group_needs_no_name_but_may_have_it() -> None:
    connector, _ = connect()
    assert finish(connector, connector.store([0], [0], "latent")).ok
    with pytest.raises(kv.OptionError, match="no group 'attention'"):
        connector.store([0], [0], "attention")


def test_a_slot_belongs_to_the_group_that_was_stored_there() -> None:
    connector, caches = grouped()
    assert connector.record_bytes == 2 * PAGE
    assert finish(connector, connector.store([1], [0], "full")).bytes == 2 * PAGE
    assert finish(connector, connector.store([1], [1], "sliding")).bytes == PAGE
    assert connector.host.rows[0, : 2 * PAGE].tolist() == [10] * PAGE + [30] * PAGE
    assert connector.host.rows[1, : 2 * PAGE].tolist() == [20] * PAGE + [0] * PAGE
    with pytest.raises(kv.FormatMismatchError, match="layers: stored 2 of them, wanted 1"):
        connector.load([0], [2], "sliding")
    for cache in caches.values():
        cache.fill_(0)
    assert finish(connector, connector.load([1], [2], "sliding")).ok
    assert {name: cache[2].any().item() for name, cache in caches.items()} == {
        "full.0": False,
        "slide.0": True,
        "full.1": False,
    }


# Results that nobody has asked for hold nothing up.


def test_slots_of_a_finished_job_are_free_before_its_result_is_delivered() -> None:
    connector, caches = connect()
    jobs = [connector.store([0], [1])]
    deadline = time.monotonic() + 60
    while len(jobs) < 3:
        assert time.monotonic() < deadline
        try:
            jobs.append(
                connector.store([len(jobs)], [1]) if len(jobs) == 1 else connector.load([1], [5])
            )
        except kv.PoolError:  # the store before it has not finished yet
            time.sleep(0.001)
    results = connector.wait(timeout=60)
    assert [result.job_id for result in results] == jobs
    assert all(result.ok for result in results)
    assert set(caches["l"][5].flatten().tolist()) == {2}


def test_a_rank_loads_what_another_has_finished_but_not_yet_polled() -> None:
    pool = kv.HostPool(2)
    one, _ = connect(host=pool)
    other, caches = connect(host=pool)
    stored = one.store([6], [0])
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        try:
            loaded = other.load([0], [0])
        except kv.PoolError:
            time.sleep(0.001)
        else:
            break
    assert finish(other, loaded).ok
    assert set(caches["l"][0].flatten().tolist()) == {7}
    assert [result.job_id for result in one.poll()] == [stored]


def test_no_blocks_at_all_are_a_job_that_is_done() -> None:
    connector, _ = connect()
    job = connector.store([], [])
    assert finish(connector, job) == kv.TransferResult(job_id=job, ok=True, bytes=0, seconds=0.0)
    assert finish(connector, connector.load([], [])).ok


# Threads.


def test_many_threads_submit_and_poll_and_every_result_comes_once_with_the_right_bytes() -> None:
    """Each of 4 threads owns 4 slots and 8 blocks; 2 more threads poll all the while."""
    workers, rounds = 4, 25
    connector, caches = connect(host=4 * workers, blocks=8 * workers)
    cache = caches["l"]
    content = torch.arange(8 * workers, dtype=torch.int64)
    expected = content + 1
    results: list[list[kv.TransferResult]] = [[] for _ in range(workers + 2)]
    jobs: list[list[int]] = [[] for _ in range(workers)]
    stop, barrier = threading.Event(), threading.Barrier(workers + 2)
    faults: list[BaseException] = []

    def eventually(submit: Callable[[], int], number: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                jobs[number].append(submit())
            except kv.PoolError:
                assert time.monotonic() < deadline
            else:
                return

    def work(number: int) -> None:
        rng = random.Random(number)
        slots = range(4 * number, 4 * number + 4)
        low = range(8 * number, 8 * number + 4)
        high = range(8 * number + 4, 8 * number + 8)
        barrier.wait()
        for _ in range(rounds):
            here, there = rng.sample(low, 4), rng.sample(high, 4)
            rows = rng.sample(slots, 4)
            eventually(lambda here=here, rows=rows: connector.store(here, rows), number)
            eventually(lambda rows=rows, there=there: connector.load(rows, there), number)
            for one, other in zip(here, there, strict=True):
                expected[other] = expected[one]
            results[number].extend(connector.poll())

    def poll(number: int) -> None:
        barrier.wait()
        while not stop.is_set():
            results[number].extend(connector.poll())
            results[number].extend(connector.wait(timeout=0.001))

    def guarded(target: Callable[[int], None], number: int) -> Callable[[], None]:
        def run() -> None:
            try:
                target(number)
            except BaseException as error:  # noqa: BLE001  the main thread tells it
                faults.append(error)
                barrier.abort()

        return run

    pollers = [started_thread(guarded(poll, workers + i)) for i in range(2)]
    threads = [started_thread(guarded(work, i)) for i in range(workers)]
    for thread in threads:
        thread.join()
    stop.set()
    for thread in pollers:
        thread.join()
    assert faults == []
    connector.close()
    delivered = [result for some in (*results, connector.poll()) for result in some]
    submitted = sorted(job for some in jobs for job in some)
    assert sorted(result.job_id for result in delivered) == submitted
    assert len(submitted) == 2 * workers * rounds
    assert all(result.ok for result in delivered)
    for block in range(8 * workers):
        assert set(cache[block].flatten().tolist()) == {int(expected[block])}, block


# What comes from outside and is no ordinary error.


class Panic(BaseException):
    """What a native extension may raise; no Exception."""


@pytest.mark.parametrize("kind", [Panic, asyncio.CancelledError, GeneratorExit, SystemExit])
def test_whatever_a_copy_engine_raises_fails_the_job_and_frees_the_slots(kind: type) -> None:
    def panics(_job: kv.TransferJob) -> None:
        raise kind("gone")

    connector, _ = connect([taking(panics)])
    result = finish(connector, connector.store([2], [1]))
    assert not result.ok
    assert "gone" in result.error
    assert not connector.host.is_busy([1])
    connector.close()


def test_whatever_a_handle_raises_fails_its_job_alone() -> None:
    class Panicking(kv.TransferHandle):
        def done(self) -> bool:
            raise Panic("gone")

        def result(self) -> kv.TransferResult:
            raise NotImplementedError

    connector, _ = connect([taking(lambda job: Panicking() if job.job_id == 0 else None)])
    lost, kept = connector.store([2], [1]), connector.store([3], [2])
    assert not finish(connector, lost).ok
    assert finish(connector, kept).ok


def test_an_interrupt_in_a_hook_goes_through_and_frees_the_slots() -> None:
    def interrupted(_job: kv.TransferJob) -> None:
        raise KeyboardInterrupt

    connector, _ = connect([taking(interrupted)])
    with pytest.raises(KeyboardInterrupt):
        connector.store([2], [1])
    assert not connector.host.is_busy([1])
    connector.close()


def test_closing_from_inside_a_hook_is_refused_not_waited_for() -> None:
    def closes(_job: kv.TransferJob) -> None:
        connector.close()

    connector, _ = connect([taking(closes)])
    result = finish(connector, connector.store([2], [1]))
    assert not result.ok
    assert "call it outside" in result.error
    connector.close()


def test_storage_that_the_engine_freed_is_refused_before_a_byte_moves() -> None:
    connector, caches = connect()
    caches["l"].untyped_storage().resize_(0)
    with pytest.raises(kv.RegistrationError, match="layer 'l' was freed or resized"):
        connector.store([2], [1])
    assert not connector.host.is_busy([1])


def test_a_plugin_cannot_change_the_ids_of_a_job() -> None:
    def meddles(job: kv.TransferJob) -> None:
        for ids in (job.block_ids, job.slots, job.parts[0].block_ids, job.parts[0].slots):
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                ids.flags.writeable = True

    connector, _ = connect([taking(meddles)])
    assert finish(connector, connector.store([2], [1])).ok


def test_a_failure_that_does_not_add_up_is_a_failure_of_all() -> None:
    """One of two slots is said to have failed, yet no byte was moved."""

    def lies(job: kv.TransferJob) -> kv.TransferHandle:
        return kv.TransferHandle.finished(
            kv.TransferResult(job_id=job.job_id, ok=False, bytes=0, seconds=0.0, failed_ids=[0])
        )

    connector, _ = connect([taking(lies)])
    result = finish(connector, connector.store([2, 3], [0, 1]))
    assert result.failed_ids == (0, 1)
    with pytest.raises(kv.PoolError, match="slot 1 holds nothing"):
        connector.load([1], [5])


def test_one_connectors_slow_handle_does_not_hold_up_the_others() -> None:
    """A done() that blocks is asked only by who wants a slot in use."""

    class Slow(kv.TransferHandle):
        def done(self) -> bool:
            raise AssertionError("asked")

        def result(self) -> kv.TransferResult:
            raise NotImplementedError

    pool = kv.HostPool(4)
    slow, _ = connect([taking(lambda _job: Slow())], host=pool)
    other, _ = connect(host=pool)
    slow.store([2], [1])
    assert finish(other, other.store([2], [3])).ok


def test_records_go_by_their_keys() -> None:
    connector, caches = connect()
    assert finish(connector, connector.store([2, 3], [0, 1], keys=["two", b"three"])).ok
    with pytest.raises(kv.PoolError, match="slot 1 holds record b'three', this load wants 'two'"):
        connector.load([0, 1], [5, 6], keys=["two", "two"])
    assert finish(connector, connector.load([1, 1], [5, 6], keys=[b"three", b"three"])).ok
    assert caches["l"][6].unique().tolist() == [4]
    for keys, what in (
        (["a"], "1 keys and 2 slots do not pair"),
        (["a", None], "and not None; found None"),
        (["a", []], r"a record's key is hashable, .* found \[\]"),
        (["a", ([],)], r"found \(\[\],\)"),
        (["a", float("nan")], "equal to itself and not None; found nan"),
        (5, "one name for each slot, not 5"),
        ("ab", "one name for each slot, not 'ab'"),
    ):
        with pytest.raises(kv.BlockIdError, match=what):
            connector.store([2, 3], [0, 1], keys=keys)
    with pytest.raises(kv.BlockIdError, match="slot 1 is given two keys: 'a', 'b'"):
        connector.load([1, 1], [5, 6], keys=["a", "b"])


def test_keys_from_an_array_are_values_of_their_own() -> None:
    connector, _ = connect()
    keys = torch.tensor([7])
    assert finish(connector, connector.store([2], [0], keys=keys)).ok
    keys[0] = 8
    with pytest.raises(kv.PoolError, match="slot 0 holds record 7, this load wants 8"):
        connector.load([0], [5], keys=keys)
    assert finish(connector, connector.load([0], [5], keys=[7])).ok


@pytest.mark.parametrize("dtype", ["", "float32"])
def test_an_undeclared_dtype_is_compared_a_declared_one_is_the_formats(dtype: str) -> None:
    """float32 stored, int32 wanted: the same sizes, the same format unless somebody says so."""
    spec = kv.AttentionSpec(block_size=4, total_kv_heads=1, head_size=1, itemsize=4)
    pool = kv.HostPool(4)

    def one(element: torch.dtype, declared: str) -> kv.Connector:
        caches = {"l": torch.zeros(8, 1, 4, 2, dtype=element)}
        return connect(layers={"l": spec}, caches=caches, host=pool, dtype=declared)[0]

    storing = one(torch.float32, dtype)
    assert finish(storing, storing.store([0], [0])).ok
    with pytest.raises(kv.FormatMismatchError, match="float32"):
        one(torch.int32, "" if not dtype else "int32").load([0], [1])


def test_layers_of_two_dtypes_on_two_stages_load_what_they_stored() -> None:
    spec = kv.AttentionSpec(block_size=4, total_kv_heads=1, head_size=1, itemsize=4)
    half = kv.AttentionSpec(block_size=4, total_kv_heads=1, head_size=1, itemsize=2)
    pool, made = kv.HostPool(4), []
    for rank, (name, element) in enumerate([("a", torch.float32), ("b", torch.bfloat16)]):
        made.append(
            connect(
                layers={"a": spec, "b": half},
                caches={name: torch.ones(8, 1, 4, 2, dtype=element)},
                host=pool,
                grid=kv.ParallelGrid(pp=2),
                rank=rank,
            )[0]
        )
    for connector in made:
        assert finish(connector, connector.store([0], [0], keys=["k"])).ok
    for connector in made:
        assert finish(connector, connector.load([0], [1], keys=["k"])).ok


def test_a_connector_that_is_collected_with_a_job_pending_keeps_no_slot() -> None:
    gate, pool = Gate(), kv.HostPool(4)
    lost, _ = connect([gate], host=pool)
    lost.store([2], [1])
    del lost
    gc.collect()
    other, _ = connect(host=pool)
    with pytest.raises(kv.PoolError, match="being written"):
        other.store([3], [1])
    gate.open.set()
    deadline = time.monotonic() + 60
    while pool.is_busy([1]) and time.monotonic() < deadline:
        pool.collect()
    assert finish(other, other.store([3], [1])).ok


# Blocks under way: engines of copies may run jobs in any order.


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ("store", "load", "block 2 is being read by a store that has not finished"),
        ("load", "store", "block 2 is being written by a load that has not finished"),
        ("load", "load", "block 2 is being written by a load that has not finished"),
        ("store", "store", None),
    ],
)
def test_nobody_writes_a_block_that_another_job_uses(first: str, second: str, refused: str) -> None:
    gate = Gate()
    gate.open.set()
    connector, _ = connect([gate], host=6)
    finish(connector, connector.store([1, 1], [0, 1]))

    def submit(direction: str, block: int, slot: int) -> int:
        if direction == "store":
            return connector.store([block], [slot])
        return connector.load([slot % 2], [block])

    gate.open.clear()
    under_way = submit(first, 2, 2)
    elsewhere = submit(second, 3, 3)  # other blocks are free
    if refused is None:
        gate.open.set()
        assert len(connector.wait([under_way, elsewhere])) == 2
        return
    with pytest.raises(kv.BlockIdError, match=refused):
        submit(second, 2, 4)
    gate.open.set()
    connector.wait([under_way, elsewhere], timeout=60)
    assert finish(connector, submit(second, 2, 4)).ok  # and its slot was not left in use


def test_an_interrupted_job_leaves_its_blocks() -> None:
    class Interrupted:
        priority = 10
        comes = True

        @kv.hookimpl
        def transfer(self, job: kv.TransferJob) -> None:
            if self.comes:
                raise KeyboardInterrupt

    plugin = Interrupted()
    connector, _ = connect([plugin])
    with pytest.raises(KeyboardInterrupt):
        connector.store([2], [0])
    plugin.comes = False
    assert finish(connector, connector.store([1], [1])).ok
    assert finish(connector, connector.load([1], [2])).ok


# A pool that comes after start-up.


def late(blocks: int = 8) -> tuple[kv.Connector, dict[str, torch.Tensor]]:
    """Two layers and no pool yet; caches full of ones."""
    layers = {"a.0": SPEC, "a.1": SPEC}
    geometry = kv.CacheGeometry(layers=layers, num_blocks=blocks)
    connector = kv.Connector(kv.PolicyContext(geometry=geometry), [])
    return connector, {n: torch.ones(blocks, 4, 8, dtype=torch.uint8) for n in layers}


def test_a_pool_may_come_when_the_records_size_is_known() -> None:
    connector, caches = late()
    assert connector.host is None
    assert connector.fragments == {}
    pool = kv.HostPool(3, connector.record_bytes)
    connector.use_host(pool)
    with pytest.raises(kv.ClosedError, match="has a host pool"):
        connector.use_host(pool)
    connector.register(caches)
    assert connector.fragments == {"latent": 2}
    assert finish(connector, connector.store([0], [2])).ok
    assert pool.rows[2, : 2 * PAGE].tolist() == [1] * (2 * PAGE)
    connector.close()
    assert pool.holds(2)  # it is the caller's, and still there
    with pytest.raises(kv.ClosedError):
        connector.use_host(pool)


def test_a_pool_that_comes_too_late_or_is_too_short_is_refused() -> None:
    connector, caches = late()
    with pytest.raises(kv.PoolError, match="the pool's rows hold 63 B"):
        connector.use_host(kv.HostPool(3, 63))
    with pytest.raises(kv.OptionError, match="host is a HostPool"):
        connector.use_host("3")
    connector.register(caches)
    with pytest.raises(kv.ClosedError, match="has registered its layers"):
        connector.use_host(3)
