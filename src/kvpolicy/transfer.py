"""A transfer job, the handle of one under way, and the result that comes of it.

A job is a plan with block ids and slots; it covers many blocks, and consecutive pairs become
spans, which are the plan's boxes with one more dimension.
"""

from __future__ import annotations

import abc
import math
import operator
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy.boxes import Dim, box
from kvpolicy.errors import BlockIdError, OptionError
from kvpolicy.plan import TransferPlan
from kvpolicy.words import shown

Direction = Literal["store", "load"]
BlockIds = NDArray[np.int64]

MAX_JOB_BLOCKS = 2**24
_FIRST_NAP, _LONGEST_NAP = 0.0001, 0.005


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
    return OptionError(f"TransferResult.{name} is {possible}, not {shown(value)}")


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
        number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not (number and 0 <= self.seconds < math.inf):
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
    return _sealed(found.astype(np.int64))


def _sealed(ids: BlockIds) -> BlockIds:
    """A copy that nobody can make writable: a plugin is handed these."""
    return np.frombuffer(ids.tobytes(), dtype=np.int64)


def pair_keys(keys: Iterable[Hashable], slots: BlockIds) -> dict[int, Hashable]:
    """Slot -> the name of its record.

    Raises:
        BlockIdError: another number of keys than slots, keys that are None or not hashable, or
            two keys for one slot.
    """
    found: dict[int, Hashable] = {}
    if isinstance(keys, torch.Tensor | np.ndarray):
        keys = keys.tolist()  # plain values, not views of what the caller may change
    if not isinstance(keys, Iterable) or isinstance(keys, str | bytes):
        raise BlockIdError(f"keys are one name for each slot, not {shown(keys)}")
    named = list(keys)
    if len(named) != len(slots):
        raise BlockIdError(
            f"{len(named)} keys and {len(slots)} slots do not pair; give one key for each slot"
        )
    for slot, key in zip(slots.tolist(), named, strict=True):
        try:
            hash(key)
            same = bool(key == found.setdefault(slot, key))
            sound = key is not None and not isinstance(key, torch.Tensor) and bool(key == key)
        except Exception:  # noqa: BLE001  a key's own methods may raise anything
            same, sound = True, False
        if not sound:
            raise BlockIdError(
                f"a record's key is hashable, equal to itself and not None; found {shown(key)}"
            )
        if not same:
            raise BlockIdError(f"slot {slot} is given two keys: {shown(found[slot])}, {shown(key)}")
    return found


def check_unique(ids: BlockIds, what: str) -> None:
    """Refuses a destination that is named twice.

    Raises:
        BlockIdError: the first such id.
    """
    ordered = np.sort(ids)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise BlockIdError(
            f"{what} id {repeated[0]} is a destination twice; sources may repeat, destinations may "
            "not"
        )


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
            parts.append(TransferPart(plan=plan, block_ids=_sealed(blocks), slots=_sealed(rows)))
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
