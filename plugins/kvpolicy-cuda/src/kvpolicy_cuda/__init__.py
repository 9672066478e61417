"""KV block copies between CUDA devices and host rows: a transfer plugin for kvpolicy.

Importing it loads neither torch nor the CUDA driver. `status` loads the driver and starts no
device; the rest comes with the first connector or job of a CUDA device.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

import kvpolicy
from kvpolicy_cuda.errors import CudaError

if TYPE_CHECKING:
    import torch

    from kvpolicy_cuda.pinned import PinnedHostPool, PinnedRows, pin

__all__ = [
    "CudaError",
    "PinnedHostPool",
    "PinnedRows",
    "calibration",
    "describe",
    "pin",
    "policy",
]

_log = logging.getLogger(__name__)

_LAZY = {"PinnedHostPool": "pinned", "PinnedRows": "pinned", "pin": "pinned"}


class Cuda:
    """Takes jobs whose storages lie on a CUDA device."""

    priority = 100  # before copy engines that take whatever they are given
    requires_api = 1

    @kvpolicy.hookimpl
    def transfer(self, job: kvpolicy.TransferJob) -> kvpolicy.TransferHandle | None:
        """Enqueues the copies and returns; None for a job of another device."""
        if job.device.partition(":")[0] != "cuda":
            return None
        from kvpolicy_cuda.engine import installed

        return installed().transfer(job)

    def prepare_rows(self, rows: torch.Tensor, device: str) -> PinnedRows | None:
        """Page-locks a pool's rows for a CUDA device, which is measured if it never was.

        Rows that cannot be pinned are warned about: their copies are slower.
        """
        kind, _, ordinal = device.partition(":")
        if kind != "cuda":
            return None
        from kvpolicy_cuda.engine import installed
        from kvpolicy_cuda.pinned import pin

        try:
            installed().prepare(device)
            return pin(rows, device=int(ordinal) if ordinal else None)
        except CudaError as error:
            _log.warning("host rows are not pinned, copies will be slower: %s", error)
            return None

    def calibration(self) -> dict[str, Any] | str:
        """Every device's, measured now if it never was; or why there is none."""
        import torch

        devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        found = {f"cuda:{ordinal}": calibration(f"cuda:{ordinal}") for ordinal in devices}
        return found or calibration()

    def status(self) -> str:
        """What is missing on this machine, in words, "" if nothing is; loads no torch."""
        from kvpolicy_cuda.driver import Driver

        try:
            missing = [Driver.load().no_batch]
        except CudaError as error:
            missing = [str(error)]
        if importlib.util.find_spec("triton") is None:
            missing.append("triton is not installed: small fragments go to the copy engine")
        return "; ".join(filter(None, missing))


def describe() -> dict[str, Any]:
    """What the plugin found on this machine, and which path each plan's jobs take, with reasons.

    Returns:
        JSON values: ``driver`` (version, how runs are copied), ``kernels`` ("" or why there are
        none), and ``devices`` by name, each with its calibration and its plans' latest choices.
        A part that cannot be had is the reason as a string.
    """
    from kvpolicy_cuda.engine import installed

    return installed().describe()


def calibration(device: str = "cuda:0", *, anew: bool = False) -> dict[str, Any] | str:
    """From which size of run on a device's copy engine is used, in bytes; or why it is not known.

    Args:
        device: its name in torch.
        anew: measure again, although it was measured before.
    """
    import attrs

    from kvpolicy_cuda import calibrating
    from kvpolicy_cuda.cudadevice import cuda_device

    try:
        found = cuda_device(device)
        with found.entered():
            return attrs.asdict(calibrating.limits_of(found, found.key, anew=anew))
    except CudaError as error:
        return str(error)


policy = Cuda()


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
