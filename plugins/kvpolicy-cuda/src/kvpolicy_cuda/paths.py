"""The three paths: each enqueues the copies of one part, and returns before they run."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy_cuda.device import Device, Stream
from kvpolicy_cuda.driver import Numbers, SourceOrder
from kvpolicy_cuda.kernels import Kernels
from kvpolicy_cuda.lanes import Lane
from kvpolicy_cuda.runs import PlanRuns

Ids = NDArray[np.int64]


def dma(
    device: Device, runs: PlanRuns, blocks: Ids, slots: Ids, *, to_host: bool, stream: Stream
) -> None:
    """Every run by the copy engine."""
    for there, here, sizes in runs.descriptors(blocks, slots):
        _copy(device, there, here, sizes, to_host=to_host, stream=stream)


def direct(
    device: Device,
    kernels: Kernels,
    runs: PlanRuns,
    blocks: Ids,
    slots: Ids,
    *,
    unit: int,
    to_host: bool,
    stream: Stream,
) -> object:
    """A kernel for every box, which reads or writes the rows itself.

    Returns:
        What must live until it has run.
    """
    held = device.upload(_tables(runs, blocks, slots), stream)
    _launch(
        device,
        kernels,
        runs,
        held,
        host=runs.rows,
        row_stride=runs.row_stride,
        unit=unit,
        to_host=to_host,
        stream=stream,
    )
    return held


def staged(
    device: Device,
    kernels: Kernels,
    runs: PlanRuns,
    blocks: Ids,
    slots: Ids,
    *,
    unit: int,
    to_host: bool,
    lane: Lane,
) -> object:
    """A kernel between the cache and a staging buffer, the copy engine between that and the rows.

    A staged window is what the plan touches of a row, as it lies there. Batches of windows take
    turns on the lane's streams; order within a stream guards its buffer.

    Returns:
        What must live until it has run.
    """
    low, high = runs.window
    held = []
    batch = lane.staging(0).numel() // (high - low)
    for number, first in enumerate(range(0, len(blocks), batch)):
        stream, buffer = lane.streams[number % 2], lane.staging(number % 2)
        some, rows = blocks[first : first + batch], slots[first : first + batch]
        windows = np.arange(len(some), dtype=np.int64)
        held.append(device.upload(_tables(runs, some, windows), stream))

        def gather_or_scatter(
            tables: torch.Tensor = held[-1], buffer: torch.Tensor = buffer, stream: Stream = stream
        ) -> None:
            _launch(
                device,
                kernels,
                runs,
                tables,
                host=buffer.data_ptr() - low,
                row_stride=high - low,
                unit=unit,
                to_host=to_host,
                stream=stream,
            )

        if to_host:
            gather_or_scatter()
        for there, here, sizes in runs.host_descriptors(rows, buffer.data_ptr()):
            _copy(device, there, here, sizes, to_host=to_host, stream=stream)
        if not to_host:
            gather_or_scatter()
    return held


def _copy(
    device: Device, there: Numbers, here: Numbers, sizes: Numbers, *, to_host: bool, stream: Stream
) -> None:
    to, frm = (here, there) if to_host else (there, here)
    # A row is complete before its load is submitted; device memory is written until the moment
    # at which the stream gets here.
    order = SourceOrder.STREAM if to_host else SourceOrder.ANY
    device.driver.copy(to, frm, sizes, order=order, stream=stream.cuda_stream)


def _tables(runs: PlanRuns, blocks: Ids, rows: Ids) -> Ids:
    """All that the kernel looks up, in one piece: ids, then bases and offsets of each box."""
    places = [table for box in runs.boxes for table in (box.bases, box.offsets)]
    return np.concatenate([blocks, rows, *places])


def _launch(
    device: Device,
    kernels: Kernels,
    runs: PlanRuns,
    tables: torch.Tensor,
    *,
    host: int,
    row_stride: int,
    unit: int,
    to_host: bool,
    stream: Stream,
) -> None:
    """A launch for each box; ``tables`` are `_tables` on the device."""
    lengths = [len(box.bases) for box in runs.boxes]
    pairs = (len(tables) - 2 * sum(lengths)) // 2

    def launch() -> None:
        sizes = [pairs, pairs, *(2 * n for n in lengths)]
        blocks, rows, *places = torch.split(tables, sizes)
        for box, place in zip(runs.boxes, places, strict=True):
            kernels.copy(
                box,
                blocks,
                rows,
                place.view(2, -1),
                host=host,
                row_stride=row_stride,
                unit=unit,
                to_host=to_host,
            )

    device.launch(stream, launch)
