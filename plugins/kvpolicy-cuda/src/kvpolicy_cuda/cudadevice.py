"""CUDA devices, through torch and the driver."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvpolicy_cuda import calibrating
from kvpolicy_cuda.driver import Driver
from kvpolicy_cuda.errors import CudaError
from kvpolicy_cuda.kernels import Kernels
from kvpolicy_cuda.planner import Limits


class CudaDevice:
    """A device of torch's.

    Args:
        ordinal: torch's number for it.
        driver: the installed driver.
        kernels: the kernel, or why there is none.
    """

    def __init__(self, ordinal: int, driver: Driver, kernels: Kernels | str) -> None:
        self.ordinal = ordinal
        self.driver = driver
        self.kernels = kernels
        self.torch_device = torch.device("cuda", ordinal)
        maps = driver.maps_host_pointers(ordinal)
        self.no_mapping = "" if maps else "the device has other addresses for host memory"

    @functools.cached_property
    def limits(self) -> Limits:
        """From the cache of measurements, or measured now."""
        return calibrating.limits_of(self, self.key)

    @property
    def key(self) -> str:
        """Names this device and its driver; measurements are kept under it."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        which = getattr(properties, "uuid", self.ordinal)
        return f"{properties.name}-{which}-{self.driver.version}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """See `Driver.entered`; torch's current device is this one, too."""
        with torch.cuda.device(self.torch_device), self.driver.entered(self.ordinal):
            yield

    def capturing(self) -> bool:
        """Whether the caller's current stream is being captured into a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def current_stream(self) -> torch.cuda.Stream:
        """The caller's."""
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self) -> torch.cuda.Stream:
        """One that does not wait for the default one."""
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]  # torch's own

    def launch(self, stream: Any, kernel: Callable[[], None]) -> None:
        """Has a function launch its kernels on a stream."""
        with torch.cuda.stream(stream):
            kernel()

    def upload(self, numbers: NDArray[np.int64], stream: Any) -> torch.Tensor:
        """Through pinned memory of torch's, which keeps it until the copy has ended."""
        with torch.cuda.stream(stream):
            pinned = torch.from_numpy(numbers).pin_memory()
            return pinned.to(self.torch_device, non_blocking=True)

    def scratch(self, size: int) -> torch.Tensor:
        """Bytes on the device; torch aligns to 512."""
        return torch.empty(size, dtype=torch.uint8, device=self.torch_device)

    def pinned_scratch(self, num_rows: int, row_stride: int) -> torch.Tensor:
        """Page-locked rows of torch's."""
        return torch.empty((num_rows, row_stride), dtype=torch.uint8, pin_memory=True)


def cuda_device(name: str) -> CudaDevice:
    """The device of that name, such as "cuda:0".

    Raises:
        CudaError: it has no driver, or an old one.
    """
    asked = torch.device(name)
    if not torch.cuda.is_available():
        raise CudaError(f"torch {torch.__version__} can use no CUDA device here")
    ordinal = torch.cuda.current_device() if asked.index is None else asked.index
    return CudaDevice(ordinal, Driver.load(), Kernels.load())
