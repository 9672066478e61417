"""The plan behind a transfer job: strided boxes between the engine's storages and the rows.

A plan is made once per registration, group and pool; equal layers are joined into one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import torch

from kvpolicy.boxes import Box, Dim, box, compose, normal
from kvpolicy.errors import RegistrationError
from kvpolicy.records import GroupRecord
from kvpolicy.registration import Registration, is_raw


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
        element: the tensors' dtype, "" if they are opaque bytes.
    """

    storage: torch.Tensor = attrs.field(repr=False)
    offset: int
    block_stride: int
    box: Box
    layers: tuple[str, ...]
    element: str = ""


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

    @cached_property
    def block_bytes(self) -> int:
        """Bytes that one block's copies move."""
        return sum(copy.box.bytes for copy in self.copies)

    @cached_property
    def _storages(self) -> tuple[tuple[torch.UntypedStorage, int, str], ...]:
        """The distinct storages, their bytes when they were registered, and a layer of each."""
        found = {id(copy.storage): copy for copy in self.copies}
        return tuple(
            (copy.storage.untyped_storage(), copy.storage.numel(), copy.layers[0])
            for copy in found.values()
        )

    def check_alive(self) -> None:
        """Refuses to go on with storages that the engine has freed or resized.

        Raises:
            RegistrationError: names a layer of the first such storage.
        """
        for storage, size, layer in self._storages:
            if storage.nbytes() != size:
                raise RegistrationError(
                    f"the storage of layer {layer!r} was freed or resized after it was "
                    "registered; make a new connector and register the new tensors"
                )


def elements(plans: Sequence[TransferPlan]) -> str:
    """The dtype of a group's tensors, "" if they are opaque bytes or have several."""
    found = {copy.element for plan in plans for copy in plan.copies}
    return found.pop() if len(found) == 1 else ""


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
    storages: dict[tuple[int, int], torch.Tensor] = {}
    elected: dict[tuple[int, int], list[PlannedCopy]] = {}
    device = ""
    for name in record.group.layer_names:
        pages = registration.pages.get(name)
        if pages is None:
            continue
        part = record.part(rank, name)
        joined = compose(normal(pages.page.box), part.box)
        if joined is None:  # refused at registration
            raise RegistrationError(
                f"no single box joins the registered pages of {name!r} to the record"
            )
        device = str(pages.tensor.device)
        storage = pages.tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        copy = PlannedCopy(
            storage=storages.setdefault(key, _bytes_of(pages.tensor)),
            offset=pages.page.offset,
            block_stride=pages.page.block_stride,
            box=joined,
            layers=(name,),
            element="" if is_raw(pages.tensor) else str(pages.tensor.dtype).split(".")[-1],
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
