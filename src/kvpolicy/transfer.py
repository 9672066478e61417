"""A transfer job, the plan behind it, and the result that comes of it.

A plan is made once per registration, group and pool: strided boxes from the engine's storages to
the pool's rows, equal layers joined into one. A job is a plan with block ids and slots; it covers
many blocks, and consecutive pairs become spans, which are the same boxes with one more dimension.
"""

from __future__ import annotations

import abc
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.boxes import Box, Dim, box, compose
from kvpolicy.errors import BlockIdError, OptionError, Refusal, RegistrationError
from kvpolicy.records import GroupRecord
from kvpolicy.registration import Registration

Direction = Literal["store", "load"]
BlockIds = NDArray[np.int64]

MAX_JOB_BLOCKS = 2**24
_FIRST_NAP, _LONGEST_NAP = 0.0001, 0.005


@attrs.frozen(kw_only=True, eq=False)
class PlannedCopy:
    """One box between a storage and the pool's rows, for every block and slot.

    Byte ``offset + block*block_stride + sum(i*from_stride)`` of ``storage`` is byte
    ``box.to_offset + sum(i*to_stride)`` of the slot's row, ``box.size`` of them together.

    Attributes:
        storage: the engine's whole storage as uint8, one dimension.
        offset: bytes to block 0, ``box.from_offset`` not counted.
        block_stride: bytes from one block to the next.
        box: memory -> row.
        layers: the layers that it copies.
    """

    storage: torch.Tensor = attrs.field(repr=False)
    offset: int
    block_stride: int
    box: Box
    layers: tuple[str, ...]


@attrs.frozen(kw_only=True, eq=False)
class TransferPlan:
    """The copies that one rank makes for one group's blocks in one pool.

    Attributes:
        rows: the pool's rows, uint8 of shape (num_slots, row_stride).
        num_blocks: blocks of the engine's caches.
        num_writers, writer_index: this rank stores slot s if
            ``s % num_writers == writer_index``; it loads every slot.
        copies: the boxes.
        device: where the engine's storages lie, such as "cpu" or "cuda:0".
    """

    rows: torch.Tensor = attrs.field(repr=False)
    num_blocks: int
    num_writers: int
    writer_index: int
    copies: tuple[PlannedCopy, ...] = attrs.field(repr=False)
    device: str

    @property
    def block_bytes(self) -> int:
        """Bytes that one block's copies move."""
        return sum(copy.box.bytes for copy in self.copies)


class Span(NamedTuple):
    """``length`` consecutive blocks and slots."""

    block: int
    slot: int
    length: int


@attrs.frozen(kw_only=True, eq=False)
class TransferPart:
    """The blocks of a job that one plan covers.

    Attributes:
        plan: the copies of each block.
        block_ids, slots: int64, read-only, paired, sorted by block id.
    """

    plan: TransferPlan
    block_ids: BlockIds
    slots: BlockIds

    def spans(self) -> Iterator[Span]:
        """The pairs, consecutive ones together."""
        if not len(self.block_ids):
            return
        steps = (np.diff(self.block_ids) != 1) | (np.diff(self.slots) != 1)
        starts = np.concatenate(([0], np.flatnonzero(steps) + 1, [len(self.block_ids)]))
        for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            yield Span(int(self.block_ids[start]), int(self.slots[start]), end - start)

    def runs(self) -> int:
        """Contiguous copies of the part: spans of dense rows are one, padding keeps them apart."""
        row = self.plan.rows.stride(0)
        return sum(
            box(copy.box.size, [Dim(span.length, copy.block_stride, row), *copy.box.dims]).num_runs
            for span in self.spans()
            for copy in self.plan.copies
        )


@attrs.frozen(kw_only=True, eq=False)
class TransferJob:
    """One store or load of many blocks, handed to the ``transfer`` hook.

    Attributes:
        job_id: unique within the connector.
        direction: "store" (engine to rows) or "load" (rows to engine).
        parts: what to copy; blocks of one part lie in one plan.
        rows: the pool's rows, uint8 of shape (num_slots, row_stride).
        device: where the engine's storages lie.
        bytes: bytes that a complete transfer moves.
        block_ids, slots: every pair of the job, as given; int64, read-only.
    """

    job_id: int
    direction: Direction
    parts: tuple[TransferPart, ...]
    rows: torch.Tensor = attrs.field(repr=False)
    device: str
    bytes: int
    block_ids: BlockIds = attrs.field(repr=False)
    slots: BlockIds = attrs.field(repr=False)

    @property
    def destinations(self) -> BlockIds:
        """The ids that are written: slots of a store, block ids of a load."""
        return self.slots if self.direction == "store" else self.block_ids

    def runs(self) -> int:
        """Contiguous copies of the whole job."""
        return sum(part.runs() for part in self.parts)


def _wrong(name: str, possible: str, value: object) -> OptionError:
    return OptionError(f"TransferResult.{name} is {possible}, not {value!r}")


def _whole(name: str, value: Any) -> int:
    """A whole number >= 0, NumPy's too; True and False are not numbers."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise _wrong(name, "a whole number >= 0", value)
    return number


def _job_id(value: Any) -> int:
    return _whole("job_id", value)


def _byte_count(value: Any) -> int:
    return _whole("bytes", value)


def _failed_ids(ids: Iterable[Any]) -> tuple[int, ...]:
    if not isinstance(ids, Iterable):
        raise _wrong("failed_ids", "a sequence of whole numbers", ids)
    return tuple(_whole("failed_ids", one) for one in ids)


@attrs.frozen(kw_only=True)
class TransferResult:
    """What came of a job.

    Attributes:
        job_id: the job.
        ok: whether every byte was copied.
        bytes: bytes copied, in whole blocks.
        seconds: from submission to completion.
        failed_ids: destinations that were not wholly written: slots of a store, block ids of a
            load.
        error: what went wrong, "" if nothing did.

    Raises:
        OptionError: another type of value, or a negative one.
    """

    job_id: int = attrs.field(converter=_job_id)
    ok: bool
    bytes: int = attrs.field(converter=_byte_count)
    seconds: float
    failed_ids: tuple[int, ...] = attrs.field(default=(), converter=_failed_ids)
    error: str = ""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.ok, bool):
            raise _wrong("ok", "True or False", self.ok)
        if not (isinstance(self.seconds, int | float) and self.seconds >= 0):
            raise _wrong("seconds", "a number >= 0", self.seconds)
        if not isinstance(self.error, str):
            raise _wrong("error", "a sentence", self.error)


class TransferHandle(abc.ABC):
    """A transfer under way. Thread-safe; a plugin's own handle derives from it."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the transfer has ended, well or not; never blocks."""

    @abc.abstractmethod
    def result(self) -> TransferResult:
        """The result, once `done`; the same one each time."""

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until `done` or for ``timeout`` seconds; returns `done`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        nap = _FIRST_NAP
        while not self.done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            time.sleep(nap if left is None else min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP)
        return True

    @staticmethod
    def finished(result: TransferResult) -> TransferHandle:
        """A handle of a transfer that has ended already."""
        return _Finished(result)


class _Finished(TransferHandle):
    def __init__(self, result: TransferResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> TransferResult:
        return self._result


def failed(job: TransferJob, error: str, seconds: float = 0.0) -> TransferResult:
    """The result of a job of which nothing is known to be written."""
    return TransferResult(
        job_id=job.job_id,
        ok=False,
        bytes=0,
        seconds=seconds,
        failed_ids=job.destinations.tolist(),
        error=error,
    )


def check_ids(ids: Iterable[int], limit: int, what: str) -> BlockIds:
    """A read-only int64 copy of block ids or slots.

    Raises:
        BlockIdError: not one dimension of integers, or one outside [0, limit).
    """
    try:
        if isinstance(ids, torch.Tensor):
            ids = ids.detach().cpu().numpy()
        elif not isinstance(ids, np.ndarray):
            ids = list(ids)
            if any(isinstance(one, bool | np.bool_) for one in ids):  # NumPy takes True for 1
                raise TypeError("True and False are not numbers")
        found = np.array(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        # torch raises RuntimeError for tensors that have no memory or no NumPy form.
        raise BlockIdError(f"{what} ids are a sequence of integers: {error}") from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise BlockIdError(
            f"{what} ids are one dimension of integers; found {found.ndim} of {found.dtype}"
        )
    if len(found) > MAX_JOB_BLOCKS:
        raise BlockIdError(f"a job has at most {MAX_JOB_BLOCKS:,} blocks, not {len(found):,}")
    outside = (found < 0) | (found >= limit) if found.size else np.zeros(0, dtype=bool)
    if outside.any():
        raise BlockIdError(
            f"{what} id {found[outside][0]} is out of range; possible: 0 to {limit - 1}"
        )
    copied = found.astype(np.int64)
    copied.flags.writeable = False
    return copied


def check_unique(ids: BlockIds, what: str) -> None:
    """Refuses a destination that is named twice.

    Raises:
        BlockIdError: the first such id.
    """
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise BlockIdError(
            f"{what} id {values[counts > 1][0]} is a destination twice; sources may repeat, "
            "destinations may not"
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(storage, 0, (storage.nbytes(),), (1,))


def plan_group(
    record: GroupRecord, registration: Registration, rank: int, num_blocks: int, rows: torch.Tensor
) -> tuple[TransferPlan, ...]:
    """The plans of one rank for one group: one for each way in which slots elect their writer.

    Raises:
        RegistrationError: a registered page that cannot be joined with its certificate.
    """
    storages: dict[int, torch.Tensor] = {}
    elected: dict[tuple[int, int], list[PlannedCopy]] = {}
    device = ""
    for name in record.group.layer_names:
        pages = registration.pages.get(name)
        if pages is None:
            continue
        part = record.part(rank, name)
        page = pages.page.box
        normal = box(page.size, page.dims, page.from_offset)  # a plugin may leave dims unmerged
        joined = compose(normal, part.box)
        if joined is None:
            why = Refusal(
                "page-contradicts-spec",
                "the registered page and the certified one are cut at points that do not divide "
                "one another; register it row by row",
            )
            raise RegistrationError("a registered page cannot be copied", {name: why})
        device = str(pages.tensor.device)
        key = pages.tensor.untyped_storage().data_ptr()
        copy = PlannedCopy(
            storage=storages.setdefault(key, _bytes_of(pages.tensor)),
            offset=pages.page.offset,
            block_stride=pages.page.block_stride,
            box=joined,
            layers=(name,),
        )
        elected.setdefault((part.num_writers, part.writer_index), []).append(copy)
    return tuple(
        TransferPlan(
            rows=rows,
            num_blocks=num_blocks,
            num_writers=writers,
            writer_index=index,
            copies=_joined(copies),
            device=device,
        )
        for (writers, index), copies in elected.items()
    )


def _joined(copies: Sequence[PlannedCopy]) -> tuple[PlannedCopy, ...]:
    """Layers at constant distances in one storage and in the row become one copy."""
    runs: list[list[PlannedCopy]] = []
    for copy in copies:
        if runs and _continues(runs[-1], copy):
            runs[-1].append(copy)
        else:
            runs.append([copy])
    return tuple(_one(run) for run in runs)


def _step(one: PlannedCopy, other: PlannedCopy) -> tuple[int, int]:
    return _start(other) - _start(one), other.box.to_offset - one.box.to_offset


def _start(copy: PlannedCopy) -> int:
    return copy.offset + copy.box.from_offset


def _continues(run: Sequence[PlannedCopy], copy: PlannedCopy) -> bool:
    first, last = run[0], run[-1]
    alike = (
        copy.storage is last.storage
        and copy.block_stride == last.block_stride
        and (copy.box.size, copy.box.dims) == (last.box.size, last.box.dims)
    )
    step = _step(last, copy)
    return alike and step[0] > 0 and step[1] > 0 and (len(run) == 1 or step == _step(first, run[1]))


def _one(run: Sequence[PlannedCopy]) -> PlannedCopy:
    first = run[0]
    if len(run) == 1:
        return first
    from_step, to_step = _step(first, run[1])
    joined = box(
        first.box.size,
        [Dim(len(run), from_step, to_step), *first.box.dims],
        first.box.from_offset,
        first.box.to_offset,
    )
    names = tuple(name for copy in run for name in copy.layers)
    return attrs.evolve(first, box=joined, layers=names)


def make_job(
    job_id: int,
    direction: Direction,
    plans: Sequence[TransferPlan],
    block_ids: BlockIds,
    slots: BlockIds,
) -> TransferJob:
    """Pairs plans with ids; a store keeps the slots that this rank is elected to write."""
    order = np.lexsort((slots, block_ids))
    parts = []
    for plan in plans:
        blocks, rows = block_ids[order], slots[order]
        if direction == "store" and plan.num_writers > 1:
            mine = rows % plan.num_writers == plan.writer_index
            blocks, rows = blocks[mine], rows[mine]
        if len(blocks):
            blocks.flags.writeable = rows.flags.writeable = False
            parts.append(TransferPart(plan=plan, block_ids=blocks, slots=rows))
    return TransferJob(
        job_id=job_id,
        direction=direction,
        parts=tuple(parts),
        rows=plans[0].rows if plans else torch.empty(0, dtype=torch.uint8),
        device=plans[0].device if plans else "cpu",
        bytes=sum(len(part.block_ids) * part.plan.block_bytes for part in parts),
        block_ids=block_ids,
        slots=slots,
    )
