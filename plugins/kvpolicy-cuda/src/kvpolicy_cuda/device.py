"""What the rest of the plugin needs of a device; everything that runs on one is behind this."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy_cuda.driver import Driver
from kvpolicy_cuda.kernels import Kernels
from kvpolicy_cuda.planner import Limits


class Event(Protocol):
    """What torch.cuda.Event has and we use."""

    @property
    def cuda_event(self) -> int:
        """The driver's handle."""


class Stream(Protocol):
    """What torch.cuda.Stream has and we use."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle."""

    def wait_event(self, event: Any) -> None:
        """What is enqueued from now on waits for the event."""

    def record_event(self) -> Any:
        """An event that comes when all that was enqueued so far has ended."""

    def synchronize(self) -> None:
        """Blocks until all that was enqueued so far has ended."""


class Device(Protocol):
    """A device that copies; `CudaDevice` is one, a simulation that needs no GPU another.

    Attributes:
        driver: the copy engine's calls.
        kernels: the kernel, or why there is none.
        limits: which sizes go to which path.
        no_mapping: why a kernel may not use the addresses of host memory, "" if it may.
    """

    driver: Driver
    kernels: Kernels | str
    no_mapping: str

    @property
    def limits(self) -> Limits:
        """Measured when they are first asked for, unless they were measured before."""

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the driver's calls go to this device, even while a graph is captured."""

    def capturing(self) -> bool:
        """Whether the caller's current stream is being captured into a graph."""

    def current_stream(self) -> Stream:
        """The caller's."""

    def new_stream(self) -> Stream:
        """One of its own, not the default one."""

    def launch(self, stream: Stream, kernel: Callable[[], None]) -> None:
        """Has a function launch its kernels on a stream."""

    def upload(self, numbers: NDArray[np.int64], stream: Stream) -> torch.Tensor:
        """The numbers on the device, for kernels of that stream."""

    def scratch(self, size: int) -> torch.Tensor:
        """Bytes on the device, aligned to 256.

        Raises:
            RuntimeError: no memory.
        """

    def pinned_scratch(self, num_rows: int, row_stride: int) -> torch.Tensor:
        """Page-locked rows on the host."""
