"""Words for people: values, names and exceptions as an error's text shows them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_SHOWN_CHARS = 200
_RANGES_SHOWN = 4


def spare(error: BaseException) -> None:
    """Lets an interrupt through; anything else that a plugin raises, the core survives.

    ``except BaseException as error: spare(error)``: asyncio's cancellation and what native
    extensions raise are no Exceptions either.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error


def span_of(names: Sequence[str]) -> str:
    """Names that differ in one number as one, with the ranges of that number.

    ``model.layers.0-47.attn``, ``model.layers.4,12,20,28.attn``; else the first and the last.
    """
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"(\d+)", name) for name in names]
    apart = [i for i, cut in enumerate(zip(*parts, strict=False)) if len(set(cut)) > 1]
    if len({len(cut) for cut in parts}) > 1 or len(apart) != 1 or apart[0] % 2 == 0:
        return f"{names[0]} ... {names[-1]}"
    shared = list(parts[0])
    shared[apart[0]] = _ranges([int(cut[apart[0]]) for cut in parts])
    return "".join(shared)


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges, as in 0-2,4-6; many of them in the middle left out."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > _RANGES_SHOWN:
        texts = [*texts[: _RANGES_SHOWN - 1], "...", texts[-1]]
    return ",".join(texts)


def shown(value: object) -> str:
    """A rejected value for an error's text: short, whatever its own ``__repr__`` does."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    try:
        text = repr(value)
    except BaseException as error:  # noqa: BLE001  see spare
        spare(error)
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def told(error: BaseException) -> str:
    """A plugin's exception for an error's text, whatever its own ``__str__`` does."""
    try:
        text = str(error)
    except BaseException as raised:  # noqa: BLE001  see spare
        spare(raised)
        text = "(no text)"
    return f"{type(error).__name__}: {text}".rstrip(": ")


def close_names(name: str, known: Iterable[str]) -> str:
    """A sentence's tail: which of ``known`` are near ``name``, else which there are."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(repr(n) for n in near)}?"
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"known: {listed or 'none'}"
