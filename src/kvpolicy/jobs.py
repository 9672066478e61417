"""Jobs under way and results not yet delivered. Thread-safe.

A plugin's handle is only ever called outside the lock, and nothing it does can lose a job: what it
raises, and what it gets wrong, becomes a failed result that names the plugin.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import attrs
import numpy as np

from kvpolicy.errors import BlockIdError, NoTransferError, OptionError, UnknownJobError
from kvpolicy.hostpool import HostPool
from kvpolicy.identity import GroupFormat
from kvpolicy.plugins import PluginInfo, PluginSet
from kvpolicy.records import GroupRecord
from kvpolicy.slots import Keys
from kvpolicy.transfer import TransferHandle, TransferJob, TransferResult, failed
from kvpolicy.words import shown, spare, told

_GLANCE_SECONDS = 0.05
_NAP_SECONDS = 0.0002


@attrs.frozen(kw_only=True)
class Claim:
    """A job's hold on the pool's slots.

    Attributes:
        settle: ends it, given the destinations that failed; again does no harm.
        undo: ends it as if the job had never been.
    """

    settle: Callable[[frozenset[int]], None]
    undo: Callable[[], None]


def claim_slots(
    pool: HostPool,
    job: TransferJob,
    record: GroupRecord,
    fmt: GroupFormat,
    rank: int,
    element: str,
    keys: Keys | None,
) -> Claim:
    """Marks a job's slots in the pool; says how to unmark them.

    Raises:
        FormatMismatchError, PoolError: as `HostPool.begin_store` and `begin_load` say.
    """
    slots = tuple(dict.fromkeys(job.slots.tolist()))
    what = fmt, record.topology
    if pool.is_busy(slots):
        pool.collect()
    if job.direction == "store":
        undo = pool.begin_store(slots, *what, rank, record.writers, keys=keys, element=element)
        return Claim(settle=lambda lost: pool.end_store(slots, rank, lost), undo=undo)
    sources = partial(record.sources, rank)
    end = pool.begin_load(slots, *what, sources, keys=keys, element=element)
    return Claim(settle=lambda _lost: end(), undo=end)


@attrs.frozen(kw_only=True, eq=False)
class PendingJob:
    """A job that a plugin has taken.

    Attributes:
        job: what is to be copied.
        handle: the plugin's handle.
        plugin: its name, for messages.
        begun: `time.perf_counter` at submission.
        claim: the slots that it holds.
        process: who submitted it, by id.
    """

    job: TransferJob
    handle: TransferHandle
    plugin: str
    begun: float
    claim: Claim
    process: int = attrs.field(factory=os.getpid, init=False)

    def finish(self) -> TransferResult | None:
        """The checked result, or None while the transfer runs; blocks no more than `done` does."""
        if self.process != os.getpid():  # no thread of the parent lives on in a forked child
            return self.failed("ran in the parent when this process was forked")
        try:
            if not self.handle.done():
                return None
            return self._checked(self.handle.result())
        except BaseException as error:  # noqa: BLE001  see spare
            spare(error)
            return self.failed(f"raised {told(error)}")

    def pause(self, seconds: float) -> None:
        """Waits for the handle, about that long at most."""
        try:
            ended = self.handle.wait(seconds)
        except BaseException as error:  # noqa: BLE001  finish turns it into a result
            spare(error)
            ended = False
        if not ended:  # a handle that does not wait must not make the caller spin
            time.sleep(min(seconds, _NAP_SECONDS))

    def failed(self, what: str) -> TransferResult:
        """The result of a job that its plugin has spoilt."""
        seconds = time.perf_counter() - self.begun
        return failed(self.job, f"plugin {self.plugin!r} {what}", seconds)

    def _checked(self, result: object) -> TransferResult:
        job = self.job
        if type(result) is not TransferResult:
            return self.failed(f"gave {shown(result)}, not a TransferResult")
        if result.job_id != job.job_id:
            return self.failed(f"gave the result of job {result.job_id} for job {job.job_id}")
        if result.ok and (result.bytes != job.bytes or result.failed_ids):
            return self.failed(
                f"reports success with {result.bytes} of {job.bytes} B and "
                f"{len(result.failed_ids)} failed ids"
            )
        if result.ok:
            return result
        if not _unfailed_bytes(job, result.failed_ids) <= result.bytes <= job.bytes:
            return self.failed(
                f"reports {result.bytes} of {job.bytes} B and {len(result.failed_ids)} failed ids, "
                f"which do not agree: {result.error or 'failed'}"
            )
        known = set(job.destinations.tolist())
        if not result.failed_ids or not known.issuperset(result.failed_ids):
            # It failed without saying which of ours: then none is known to be written.
            return attrs.evolve(result, failed_ids=sorted(known), error=result.error or "failed")
        return attrs.evolve(result, error=result.error or "failed")


def _unfailed_bytes(job: TransferJob, failed_ids: Iterable[int]) -> int:
    """The bytes of the destinations that are not said to have failed."""
    lost = np.fromiter(failed_ids, dtype=np.int64)
    total = 0
    for part in job.parts:
        ids = part.slots if job.direction == "store" else part.block_ids
        total += int(np.count_nonzero(~np.isin(ids, lost))) * part.plan.block_bytes
    return total


def _met_blocks(job: TransferJob, others: Iterable[TransferJob]) -> tuple[int, TransferJob] | None:
    """A block that a job and another one use, one of them writing it; and that other."""
    for other in others:
        if job.direction == other.direction == "store":
            continue
        for part in job.parts:
            for its in other.parts:
                if part.plan is its.plan:
                    met = np.intersect1d(part.block_ids, its.block_ids)
                    if len(met):
                        return int(met[0]), other
    return None


class Jobs:
    """The jobs of one connector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, PendingJob] = {}
        self._results: dict[int, TransferResult] = {}
        self._using: dict[int, TransferJob] = {}  # whose blocks nobody may write, or touch
        self._next_id = 0

    @property
    def pending(self) -> int:
        """Jobs under way."""
        with self._lock:
            return len(self._pending)

    def new_id(self) -> int:
        """The next job id, from 0."""
        with self._lock:
            self._next_id += 1
            return self._next_id - 1

    def start(self, job: TransferJob, plugins: PluginSet, claim: Claim) -> None:
        """Offers a job to the transfer plugins, by priority; the first taker runs it.

        A plugin that raises, or answers with something else, has failed the job: it is not known
        what it did to the destinations, so nobody else is asked.

        Args:
            job: what is to be copied.
            plugins: who is asked, in the caller's thread.
            claim: settled when the job has ended, undone if nobody takes it.

        Raises:
            NoTransferError: nobody takes it.
            BlockIdError: a block is in use by another job.
        """
        begun = time.perf_counter()
        everything = frozenset(job.destinations.tolist())
        if not job.bytes:
            claim.settle(frozenset())
            self.finished(TransferResult(job_id=job.job_id, ok=True, bytes=0, seconds=0.0))
            return
        self._use_blocks(job, claim)
        for plugin in plugins.having("transfer"):
            try:
                handle = plugin.call("transfer", job=job)
            except BaseException as error:  # noqa: BLE001  see spare
                claim.settle(everything)
                self._leave_blocks(job)
                spare(error)
                self._spoilt(job, plugin.info, f"raised {told(error)}", begun)
                return
            if handle is None:
                continue
            if issubclass(type(handle), TransferHandle):
                taken = cast(TransferHandle, handle)
                name = plugin.info.name
                self.add(PendingJob(job=job, handle=taken, plugin=name, begun=begun, claim=claim))
                return
            claim.settle(everything)
            what = f"answered {shown(handle)}, not a TransferHandle or None"
            self._spoilt(job, plugin.info, what, begun)
            return
        claim.undo()
        self._leave_blocks(job)
        asked = ", ".join(plugin.info.name for plugin in plugins.having("transfer"))
        raise NoTransferError(
            f"no transfer plugin takes a {job.direction} of tensors on {job.device!r}; asked: "
            f"{asked or 'none'}; install a plugin for that device"
        )

    def _use_blocks(self, job: TransferJob, claim: Claim) -> None:
        """Refuses a load into blocks that a job uses, and a store of blocks that a load writes.

        A plugin may run its jobs in any order, so what came of it would be anybody's guess.
        """
        for is_last in (False, True):
            with self._lock:
                met = _met_blocks(job, self._using.values())
                if met is None:
                    self._using[job.job_id] = job
                    return
            if is_last:
                claim.undo()
                block, other = met
                does = "read by a store" if other.direction == "store" else "written by a load"
                raise BlockIdError(
                    f"block {block} is being {does} that has not finished (job {other.job_id}); "
                    f"wait for it before this {job.direction}"
                )
            self.collect()

    def _leave_blocks(self, job: TransferJob) -> None:
        with self._lock:
            self._using.pop(job.job_id, None)

    def _spoilt(self, job: TransferJob, info: PluginInfo, what: str, begun: float) -> None:
        seconds = time.perf_counter() - begun
        self.finished(failed(job, f"plugin {info.described} {what}", seconds))

    def add(self, pending: PendingJob) -> None:
        """A job that a plugin has taken."""
        with self._lock:
            self._pending[pending.job.job_id] = pending

    def finished(self, result: TransferResult) -> None:
        """The result of a job that no plugin runs."""
        with self._lock:
            self._results[result.job_id] = result
            self._using.pop(result.job_id, None)

    def collect(self) -> None:
        """Notices what has finished, and keeps the results for delivery."""
        with self._lock:
            pending = list(self._pending.values())
        for one in pending:
            result = one.finish()
            if result is None:
                continue
            with self._lock:
                if one.job.job_id not in self._pending:
                    continue  # another thread was faster
                # In this order, so that an interrupt between any two loses nothing, and so that
                # who sees the result finds the slots settled.
                one.claim.settle(frozenset(result.failed_ids))
                self._results[result.job_id] = result
                self._using.pop(one.job.job_id, None)
                del self._pending[one.job.job_id]

    def poll(self) -> list[TransferResult]:
        """What has finished and was not delivered yet, by job id; never blocks."""
        self.collect()
        with self._lock:
            found = [self._results[job_id] for job_id in sorted(self._results)]
            self._results.clear()
        return found

    def wait(
        self, job_ids: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[TransferResult]:
        """Waits for jobs and delivers their results, by job id; fewer if time runs out.

        Raises:
            UnknownJobError: an id that was never given, or whose result was delivered.
            OptionError: a timeout that is no number >= 0.
        """
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and 0 <= timeout < threading.TIMEOUT_MAX):
            raise OptionError(f"a timeout is a number of seconds >= 0, not {shown(timeout)}")
        deadline = None if timeout is None else time.monotonic() + timeout
        wanted = self._wanted(job_ids)
        while True:
            self.collect()
            with self._lock:
                running = [self._pending[i] for i in sorted(wanted) if i in self._pending]
                left = None if deadline is None else deadline - time.monotonic()
                if not running or (left is not None and left <= 0):
                    done = [i for i in sorted(wanted) if i in self._results]
                    return [self._results.pop(job_id) for job_id in done]
            glance = _GLANCE_SECONDS if left is None else min(_GLANCE_SECONDS, left)
            running[0].pause(glance)

    def _wanted(self, job_ids: Iterable[int] | None) -> set[int]:
        with self._lock:
            known = {*self._pending, *self._results}
            if job_ids is None:
                return known
            asked = job_ids if isinstance(job_ids, Iterable) else [job_ids]
            wanted = list(asked)
            unknown = [one for one in wanted if type(one) is not int or one not in known]
        if unknown:
            raise UnknownJobError(
                f"job {shown(unknown[0])} is not pending here; its result was delivered, or no "
                "store or load ever gave that id"
            )
        return set(wanted)

    def drain(self) -> None:
        """Waits until nothing runs; results stay for delivery."""
        while True:
            self.collect()
            with self._lock:
                running = next(iter(self._pending.values()), None)
            if running is None:
                return
            running.pause(_GLANCE_SECONDS)
