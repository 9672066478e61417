"""The kernel, compiled once in each process and tried before it is used."""

from __future__ import annotations

import functools
import importlib
import logging
import platform
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpolicy_numba.errors import Unavailable
from kvpolicy_numba.runs import sealed

_PROCESSORS = ("x86_64", "amd64", "aarch64", "arm64")
_OLDEST = (0, 65)

log = logging.getLogger("kvpolicy_numba")


@functools.cache
def kernel() -> Callable[..., int]:
    """The compiled kernel.

    Raises:
        Unavailable: numba or the processor cannot.
    """
    _check_processor()
    _check_numba()
    from kvpolicy_numba.kernel import compiled

    try:
        found = _compiled(compiled)
    except Exception as error:
        raise Unavailable(
            f"numba cannot compile the kernel: {type(error).__name__}: {_line(error)}"
        ) from error
    _try(found)
    return found


def _check_processor() -> None:
    machine = platform.machine()
    if machine.lower() not in _PROCESSORS or sys.maxsize < 2**32 or sys.byteorder != "little":
        raise Unavailable(
            f"the processor is {machine or 'unknown'}; streaming stores are known here on "
            "64-bit x86 and Arm"
        )


def _check_numba() -> None:
    try:
        numba = importlib.import_module("numba")
    except ImportError as error:
        raise Unavailable(
            f"numba cannot be imported: {_line(error)}; install one >= 0.65 that fits this NumPy"
        ) from None
    numbers = tuple(int(part) for part in numba.__version__.split(".")[:2] if part.isdigit())
    if numbers < _OLDEST:
        raise Unavailable(f"numba {numba.__version__} is older than 0.65; install a newer one")
    if numba.config.DISABLE_JIT:
        raise Unavailable("NUMBA_DISABLE_JIT is set, so that numba compiles nothing; unset it")


def _line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [""])[0]


def _compiled(compile_: Callable[[bool], Any]) -> Callable[..., int]:
    """From numba's cache where there is a place for it, else compiled for this process alone."""
    found: Callable[..., int]
    try:
        found = compile_(True)
    except Exception as error:  # noqa: BLE001  a damaged cache raises what unpickling raises
        log.warning(
            "the kernel is compiled anew in every process, which takes seconds: numba cannot keep "
            "it, or read what it has kept (%s: %s); set NUMBA_CACHE_DIR to a directory that can be "
            "written, or empty it",
            type(error).__name__,
            _line(error),
        )
        found = compile_(False)
    return found


def _try(copy: Callable[..., int]) -> None:
    """Copies some runs at odd addresses and compares.

    Raises:
        Unavailable: a byte is wrong.
    """
    random = np.random.default_rng(5)
    for far, size, shift in ((True, 1_061, 3), (False, 771, 61), (True, 64, 0), (False, 7, 5)):
        from_, to = random.integers(0, 256, (2, 3, size + 70), dtype=np.uint8)
        expected = to.copy()
        expected[[2, 0], shift : shift + size] = from_[[0, 1], 1 : 1 + size]
        runs = [[from_.ctypes.data + 1], [from_.strides[0]], [shift], [size]]
        copy(
            sealed([0, 1]),
            sealed([2, 0]),
            *(sealed(numbers) for numbers in runs),
            to.ctypes.data,
            to.strides[0],
            2,
            3,
            True,
            far,
        )
        if not np.array_equal(to, expected):
            raise Unavailable(f"the compiled kernel copies {size} B at an odd address wrongly")
