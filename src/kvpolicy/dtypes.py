"""Plain names of the element types that caches have, and the spellings that people use."""

from __future__ import annotations

from collections.abc import Mapping

ITEMSIZES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""Plain dtype name -> bytes of one element."""

SPELLINGS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def plain_dtype(name: str) -> str | None:
    """The plain name of a dtype in any spelling, None if it is unknown."""
    found = name.strip().lower().removeprefix("torch.")
    found = SPELLINGS.get(found, found)
    return found if found in ITEMSIZES else None
