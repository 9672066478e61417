"""What a copy engine's author says of it, and the jobs on which the contract tries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from hypothesis import reject

from kvpolicy import (
    CertificationError,
    PluginSet,
    TransferHandle,
    TransferJob,
    TransferResult,
)
from kvpolicy.testing.bench import Bench, fill_rows, told
from kvpolicy.testing.contract import UNDER_TEST, Contract, broken, call, check, plugin_set
from kvpolicy.testing.fakes import AnyLayout
from kvpolicy.testing.trial import SLOTS, Trial
from kvpolicy.testing.world import WAIT_SECONDS, Recorder, World

T = TypeVar("T")


def failed(job: TransferJob, error: str) -> TransferResult:
    """The result of a job of which nothing is known to be written."""
    return TransferResult(
        job_id=job.job_id,
        ok=False,
        bytes=0,
        seconds=0.0,
        failed_ids=tuple(job.destinations.tolist()),
        error=error,
    )


class TransferCase(Contract):
    """The methods that an author overrides, and those by which `TransferContract` asks."""

    device: ClassVar[str] = "cpu"

    def make_transfer(self) -> object:
        """A new plugin object, or the module."""
        raise NotImplementedError("return your plugin from make_transfer")

    def supports(self, job: TransferJob) -> bool:
        """Whether the plugin takes a job; by default, every job of ``device``.

        Whatever this says no to must be declined with None: that is T2.
        """
        return torch.device(job.device).type == torch.device(self.device).type

    # How it is asked.

    def _plugins(self) -> PluginSet:
        """The plugin alone, and the built-ins; made once for a test."""
        made: PluginSet | None = self.__dict__.get("_made")
        if made is None:
            made = self.__dict__["_made"] = plugin_set({UNDER_TEST: self.make_transfer()})
        return made

    def _world(self, trial: Trial, *more: object) -> World:
        """A registered engine of the trial's context, in whatever layout its vote decides.

        Args:
            trial: the context.
            more: transfer plugins; every test has the same ones, so that they are loaded once.
        """
        sets: dict[object, PluginSet] = self.__dict__.setdefault("_sets", {})
        key = trial.forced, more
        if key not in sets:
            objects = {f"kit-{i}": one for i, one in enumerate([AnyLayout(), *more])}
            sets[key] = plugin_set(objects, trial.forced)
        try:
            world = World.start(trial.context, sets[key], trial.allocation, device=self.device)
            world.register()
        except CertificationError:
            reject()
        return world

    def _once(self, make: Callable[[], T]) -> T:
        """What a function makes, made once for a test."""
        made: dict[object, T] = self.__dict__.setdefault("_kept", {})
        if make not in made:
            made[make] = make()
        return made[make]

    def _store(
        self, trial: Trial, blocks: Sequence[int] | None = None, slots: Sequence[int] | None = None
    ) -> Bench:
        """A store that some rank makes; every block of the group holds the record of its number."""
        blocks, slots = blocks or trial.blocks, slots or trial.slots
        recorder = self._once(Recorder)
        recorder.jobs.clear()
        world, group = self._world(trial, recorder), trial.group_layers
        everything = list(range(trial.context.geometry.num_blocks))
        world.write(group, everything, everything)
        for i in range(len(world.contexts)):
            rank = (trial.rank + i) % len(world.contexts)
            connector = world.connectors[rank]
            job_id = connector.store(blocks, slots, group.name)
            connector.wait([job_id])
            if recorder.jobs:
                return Bench(
                    world=world,
                    rank=rank,
                    group=group,
                    job=recorder.jobs[-1],
                    blocks=blocks,
                    slots=slots,
                    records=blocks,
                    contents={block: block for block in everything},
                )
        return reject()

    def _load(
        self, trial: Trial, slots: Sequence[int] | None = None, blocks: Sequence[int] | None = None
    ) -> Bench:
        """A load that some rank makes: every slot holds the record of its number."""
        blocks, slots = blocks or trial.blocks, slots or trial.slots
        recorder = self._once(Recorder)
        recorder.jobs.clear()
        world, group = self._world(trial, recorder), trial.group_layers
        everywhere = list(range(SLOTS))
        for connector in world.connectors:  # on the books alone; the oracle writes the rows
            sources = [0] * SLOTS
            connector.wait([connector.store(sources, everywhere, group.name)])
        recorder.jobs.clear()
        fill_rows(world, group)
        for i in range(len(world.contexts)):
            rank = (trial.rank + i) % len(world.contexts)
            connector = world.connectors[rank]
            connector.wait([connector.load(slots, blocks, group.name)])
            if recorder.jobs:
                return Bench(
                    world=world,
                    rank=rank,
                    group=group,
                    job=recorder.jobs[-1],
                    blocks=blocks,
                    slots=slots,
                    records=slots,
                    contents={},
                )
        return reject()

    def _both(self, trial: Trial) -> tuple[Bench, Bench]:
        """A store and a load of the same pairs, each in an engine of its own."""
        return self._store(trial), self._load(trial)

    def _offer(self, number: str, job: TransferJob) -> TransferHandle | None:
        """The plugin's own answer to a job."""
        try:
            handle = call(self._plugins(), "transfer", job=job)
        except Exception as error:  # noqa: BLE001  whatever it is, transfer does not raise it
            broken(number, f"transfer raised {type(error).__name__}: {error}, for {told(job)}")
        typed = handle is None or isinstance(handle, TransferHandle)
        check(typed, number, f"answered {handle!r}; possible: a TransferHandle or None")
        return handle if isinstance(handle, TransferHandle) else None

    def _taken(self, number: str, job: TransferJob) -> TransferHandle:
        """The handle of a job that the plugin must take."""
        check(self.supports(job), number, f"supports says no to its own device's {told(job)}")
        handle = self._offer(number, job)
        if handle is None:
            broken(number, f"supports says yes, but it declined {told(job)}")
        return handle

    def _run(self, number: str, job: TransferJob) -> TransferResult:
        """The result of a job that must succeed."""
        result = self._ended(number, self._taken(number, job), job)
        check(result.ok, number, f"{told(job)} failed: {result.error}")
        return result

    def _ended(self, number: str, handle: TransferHandle, job: TransferJob) -> TransferResult:
        """The typed result of a handle, once it is done."""
        try:
            done = handle.wait(WAIT_SECONDS)
            check(done and handle.done(), number, f"{told(job)} is not done in {WAIT_SECONDS} s")
            result: Any = handle.result()
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, a handle does not raise it
            broken(number, f"the handle raised {type(error).__name__}: {error}, for {told(job)}")
        typed = isinstance(result, TransferResult)
        check(typed, number, f"the result is {result!r}, not a TransferResult")
        return result  # type: ignore[no-any-return]

    def _survived(self, how: str, job: TransferJob) -> TransferResult:
        """The result of a job that cannot succeed by rights; raised, it has failed as a whole."""
        try:
            handle = call(self._plugins(), "transfer", job=job)
            if not isinstance(handle, TransferHandle):
                raise TypeError(f"transfer answered {handle!r}")
            result = self._ended("T10", handle, job)
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001  the core makes this a failed result
            return failed(job, f"raised {type(error).__name__}: {error}")
        if result.ok:
            check(not result.failed_ids, "T10", f"with {how}, a success that failed: {result}")
            return result
        ids = {int(one) for one in job.destinations}
        named = bool(result.failed_ids) and ids.issuperset(result.failed_ids)
        text = f"{told(job)} with {how} failed without naming its own: {result}"
        check(named and bool(result.error), "T10", text)
        return result

    def _moved(self, number: str, bench: Bench) -> None:
        """Runs a job that must succeed, and compares every byte."""
        before = bench.rows()
        self._run(number, bench.job)
        wrong = bench.wrong(before)
        check(wrong is None, number, f"{told(bench.job)} on rank {bench.rank}: {wrong}")
