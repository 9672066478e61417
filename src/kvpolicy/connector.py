"""The Connector: decides at start-up, registers tensors, stores and loads blocks, explains itself.

Its life: made (decided and certified) -> registered -> closed. Every method may be called from
any thread; a plugin's ``transfer`` runs in the submitter's thread, outside every lock.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from kvpolicy.caches import KVCaches, as_caches
from kvpolicy.context import PolicyContext
from kvpolicy.decision import LayoutDecision
from kvpolicy.errors import BlockIdError, ClosedError, OptionError
from kvpolicy.hostpool import HostPool, as_pool
from kvpolicy.identity import GroupFormat
from kvpolicy.jobs import Jobs, claim_slots
from kvpolicy.plan import TransferPlan, elements, plan_group
from kvpolicy.plugins import PluginSet, load_plugins, plugin_names, select
from kvpolicy.records import GroupRecord
from kvpolicy.registration import Registration
from kvpolicy.startup import prepare_rows, register_layers, start_up
from kvpolicy.transfer import (
    Direction,
    TransferResult,
    check_ids,
    check_unique,
    make_job,
    pair_keys,
)
from kvpolicy.words import close_names, shown


class Connector:
    """One rank's offload connector.

    Args:
        context: the model, the grid, the rank and the wishes.
        plugins: None for what is installed (see `kvpolicy.plugins.select`), a `PluginSet`, a list
            of installed names and objects, or a mapping of names to objects; a list or mapping
            replaces every other choice of plugins, and the built-ins always take part.
        strict: any plugin fault stops start-up.
        priorities: plugin name -> priority, over options and environment.
        host: a `HostPool` (several ranks may share one; a `SharedHostPool` if they are
            processes), a number of slots, or None, in which case `store` and `load` refuse.

    Raises:
        PolicyConflictError: opposite votes at the deciding priority.
        CertificationError: some layer cannot be certified; one reason for each.
        PluginError, UnknownPluginError, OptionError: plugins that cannot be settled.
        PoolError: rows shorter than this connector's records, or no memory for them.
    """

    def __init__(
        self,
        context: PolicyContext,
        plugins: object = None,
        *,
        strict: bool = False,
        priorities: Mapping[str, int] | None = None,
        host: HostPool | int | None = None,
    ) -> None:
        if not isinstance(context, PolicyContext):
            raise OptionError(f"a Connector takes a PolicyContext, not {type(context).__name__}")
        if isinstance(plugins, PluginSet):
            if strict or priorities is not None:
                raise OptionError(
                    "a PluginSet is taken as it is; give strict and priorities to select and "
                    "load_plugins, which make it"
                )
        else:
            selection = select(
                context.options,
                names=plugin_names(plugins),
                priorities=priorities,
                strict=strict or None,
            )
            plugins = load_plugins(selection, plugins)
        self.context = context
        self._started = start_up(context, plugins)
        self._pool: HostPool | None = None
        self._pool_is_own = True
        self._jobs = Jobs()
        self._registration: Registration | None = None
        self._plans: dict[str, tuple[TransferPlan, ...]] = {}
        self._prepared: tuple[object, ...] = ()  # what copy engines have of the pool's rows
        self._changed = threading.Condition()
        self._callers: list[int] = []  # threads that are inside a call
        self._closing = False
        self._released = False
        if host is not None:
            self.use_host(host)

    def __repr__(self) -> str:
        """Where it stands, for people."""
        registered = "registered" if self._registration else "not registered"
        state = "closed" if self._closing else registered
        return (
            f"<Connector rank {self.context.rank} of {self.context.grid.size}, "
            f"{self.decision.layout}, {state}>"
        )

    # What it is.

    @property
    def decision(self) -> LayoutDecision:
        """What the votes came to."""
        return self._started.decision

    @property
    def plugins(self) -> PluginSet:
        """The plugins, failed ones too."""
        return self._started.plugins

    @property
    def host(self) -> HostPool | None:
        """The host pool, shared or own."""
        return self._pool

    @property
    def registration(self) -> Registration | None:
        """What was registered, or None so far."""
        return self._registration

    @property
    def record_bytes(self) -> int:
        """Bytes of the largest group's record."""
        return self._started.record_bytes

    @property
    def fragments(self) -> Mapping[str, int]:
        """Group name -> contiguous copies that this rank makes of a block, as registered."""
        return {
            name: sum(copy.box.num_runs for plan in plans for copy in plan.copies)
            for name, plans in self._plans.items()
        }

    @property
    def formats(self) -> Mapping[str, GroupFormat]:
        """Group name -> the format of its stored bytes, with the fields that name it."""
        return self._started.formats

    @property
    def format_id(self) -> str:
        """Names the bytes that this connector stores; equal ids are interoperable."""
        return self._started.format_id

    @property
    def fingerprint(self) -> str:
        """What every rank of one engine must agree on at start-up."""
        return self._started.fingerprint

    def explain(self) -> dict[str, Any]:
        """Everything that start-up came to, as the command line prints it (JSON values)."""
        return self._started.explain()

    # What it does.

    def use_host(self, host: HostPool | int) -> None:
        """Gives a connector that was made without a host pool one, before `register`.

        For pools whose size follows from `record_bytes`, which nobody knows before start-up.

        Args:
            host: as the constructor takes it.

        Raises:
            ClosedError: it has a pool, is registered or closed.
            PoolError, OptionError: as the constructor says.
        """
        with self._open(), self._changed:
            self._check_unregistered()
            if self._pool is not None:
                raise ClosedError("this connector has a host pool; make another connector")
            pool = as_pool(host)
            # The pool knows the jobs, not the connector, whose tensors it would keep alive.
            pool.join(self._started.record_bytes, self._jobs.collect)
            self._forgotten = weakref.finalize(self, _forget, pool, self._jobs)
            self._pool, self._pool_is_own = pool, not isinstance(host, HostPool)

    def register(self, caches: KVCaches | Mapping[str, torch.Tensor] | torch.Tensor) -> None:
        """Registers this rank's cache tensors; nothing is copied, and what is wrong is refused.

        Args:
            caches: layer name -> tensor with dimension 0 counting blocks; or a `KVCaches`; or one
                slab tensor whose first two dimensions are the layers of this rank and the blocks.

        Raises:
            RegistrationError: tensors that contradict the context, a plugin's registration that
                cannot be proved, or host rows that its copy engine fails on; the plugin is named.
            CertificationError: no policy takes these layers under this decision.
            ClosedError: closed, or registered before.
            OptionError: a copy engine refuses what its user has set, such as a number of threads.
        """
        with self._open():
            self._check_unregistered()
            given = as_caches(caches, self.context)
            registration = register_layers(self._started, given)
            plans = self._plan(registration)
            prepared = self._prepare(plans)
            with self._changed:
                self._check_unregistered()
                self._registration, self._plans = registration, plans
                self._prepared = prepared

    def store(
        self,
        block_ids: Iterable[int],
        slots: Iterable[int],
        group: str | None = None,
        *,
        keys: Iterable[Hashable] | None = None,
    ) -> int:
        """Copies this rank's part of blocks into slots; returns the job's id at once.

        Args:
            block_ids: the engine's blocks; may repeat.
            slots: the pool's rows, one for each block; may not repeat. Copied: the caller may
                change its arrays afterwards.
            group: the layers' group; required if there are several.
            keys: the records' names, one for each slot, such as the engine's block hashes. Ranks
                that store parts of one record give one key; another key begins a new record.
                Without keys the ranks must stay in step: a slot begins a new record when a rank
                stores it a second time.

        Raises:
            BlockIdError: not integers, out of range, repeated slots, or other lengths; a block
                that a load under way writes.
            PoolError: a slot is in use by another job.
            OptionError: no such group.
            NoTransferError: no transfer plugin takes the job.
            ClosedError: closed, not registered yet, or made without a host pool.
        """
        return self._submit("store", block_ids, slots, group, keys)

    def load(
        self,
        slots: Iterable[int],
        block_ids: Iterable[int],
        group: str | None = None,
        *,
        keys: Iterable[Hashable] | None = None,
    ) -> int:
        """Copies this rank's part of slots into blocks; returns the job's id at once.

        Args:
            slots: the pool's rows; may repeat.
            block_ids: the engine's blocks, one for each slot; may not repeat.
            group: the layers' group; required if there are several.
            keys: the records that the slots must hold, one for each slot.

        Raises:
            FormatMismatchError: a slot holds another format; the differing fields are named.
            PoolError: a slot is empty, being written, or lacks some rank's part.
            BlockIdError: as for `store`; also a block that another job under way uses.
            OptionError, NoTransferError, ClosedError: as for `store`.
        """
        return self._submit("load", block_ids, slots, group, keys)

    def poll(self) -> list[TransferResult]:
        """The results that have come since the last call, each once; never blocks."""
        return self._jobs.poll()

    def wait(
        self, job_ids: Iterable[int] | None = None, timeout: float | None = None
    ) -> list[TransferResult]:
        """Waits for jobs (None: all that are pending) and delivers their results, each once.

        Args:
            job_ids: what `store` and `load` returned.
            timeout: seconds; when they are over, what has finished is returned.

        Raises:
            UnknownJobError: an id that was never given, or whose result was delivered.
            OptionError: a timeout that is no number >= 0.
        """
        return self._jobs.wait(job_ids, timeout)

    def close(self) -> None:
        """Takes no more jobs, waits for those under way, then releases everything, once.

        Results that were not delivered stay for `poll` and `wait`. Closing twice is fine.
        """
        with self._changed:
            if threading.get_ident() in self._callers:
                raise ClosedError("close waits for the call that it was made from; call it outside")
            if self._closing:
                self._changed.wait_for(lambda: self._released)
                return
            self._closing = True
            self._changed.wait_for(lambda: not self._callers)
        try:
            self._jobs.drain()
        finally:
            with self._changed:
                if self._pool is not None:
                    self._pool.leave(self._jobs.collect)
                    self._forgotten.detach()
                    if self._pool_is_own:
                        self._pool = None
                self._plans, self._registration, self._prepared = {}, None, ()
                self._released = True
                self._changed.notify_all()

    def __enter__(self) -> Self:
        """The connector itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    # How it does it.

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Refuses if closed; while inside, `close` waits."""
        with self._changed:
            if self._closing:
                raise ClosedError("this connector is closed; make another one")
            self._callers.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._callers.remove(threading.get_ident())
                self._changed.notify_all()

    def _check_unregistered(self) -> None:
        if self._registration is not None:
            raise ClosedError("this connector has registered its layers; make another one")

    def _plan(self, registration: Registration) -> dict[str, tuple[TransferPlan, ...]]:
        if self._pool is None:
            return {}
        rank, num_blocks = self.context.rank, self.context.geometry.num_blocks
        return {
            name: plan_group(record, registration, rank, num_blocks, self._pool.rows)
            for name, record in self._started.records.items()
        }

    def _prepare(self, plans: Mapping[str, tuple[TransferPlan, ...]]) -> tuple[object, ...]:
        device = next((plan.device for group in plans.values() for plan in group), None)
        if self._pool is None or device is None:
            return ()
        return prepare_rows(self._started, self._pool.rows, device)

    def _record(self, group: str | None) -> GroupRecord:
        records = self._started.records
        if group is None and len(records) == 1:
            return next(iter(records.values()))
        if group is None:
            raise OptionError(f"the layers form groups, name one of: {', '.join(records)}")
        if not isinstance(group, str) or group not in records:
            raise OptionError(f"no group {shown(group)}; {close_names(str(group), records)}")
        return records[group]

    def _submit(
        self,
        direction: Direction,
        block_ids: Iterable[int],
        slots: Iterable[int],
        group: str | None,
        keys: Iterable[Hashable] | None,
    ) -> int:
        with self._open():
            if self._registration is None:
                raise ClosedError("register the engine's tensors before storing or loading")
            if self._pool is None:
                raise ClosedError("this connector has no host pool; give host= when making it")
            record = self._record(group)
            blocks = check_ids(block_ids, self.context.geometry.num_blocks, "block")
            rows = check_ids(slots, self._pool.num_slots, "slot")
            if len(blocks) != len(rows):
                raise BlockIdError(
                    f"{len(blocks)} block ids and {len(rows)} slots do not pair; give one slot for "
                    "each block"
                )
            if direction == "store":
                check_unique(rows, "slot")
            else:
                check_unique(blocks, "block")
            named = None if keys is None else pair_keys(keys, rows)
            plans = self._plans[record.group.name]
            for plan in plans:
                plan.check_alive()
            job = make_job(self._jobs.new_id(), direction, plans, blocks, rows)
            fmt = self._started.formats[record.group.name]
            # A declared dtype is part of the format. Undeclared, the tensors' own is compared,
            # where every rank holds every layer.
            undeclared = not self.context.dtype and self.context.grid.pp == 1
            element = elements(plans) if undeclared else ""
            claim = claim_slots(self._pool, job, record, fmt, self.context.rank, element, named)
            self._jobs.start(job, self.plugins, claim)
            return job.job_id


def _forget(pool: HostPool, jobs: Jobs) -> None:
    """A connector is gone that nobody closed: its jobs end, and then the pool forgets them."""
    jobs.collect()
    if not jobs.pending:
        pool.leave(jobs.collect)
