"""What the CUDA driver refused, by the driver's own name for it."""

from __future__ import annotations

from typing import ClassVar

import kvpolicy


class CudaError(kvpolicy.KVPolicyError, RuntimeError):
    """A driver call failed, or the driver cannot be had.

    Attributes:
        call: the driver's function, "" if it could not be loaded at all.
        name: the driver's name of the error, such as ``CUDA_ERROR_INVALID_VALUE``.
    """

    code: ClassVar[str] = "cuda"

    def __init__(self, message: str, *, call: str = "", name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.name = name
