"""Draws the bench's ratios as bars; matplotlib comes with the extra ``kvpolicy[plot]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpolicy.errors import OptionError

_BAR = 0.8


def plot(report: dict[str, Any], path: Path) -> None:
    """Writes bars of R1, one group for each case and direction, the limit drawn in.

    Args:
        report: the bench's.
        path: a name that ends in .png or .svg.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("--plot needs matplotlib: pip install 'kvpolicy[plot]'") from None
    lines = report["cases"]
    groups = list(dict.fromkeys((one["case"], one["direction"]) for one in lines))
    plugins = list(dict.fromkeys(one["plugin"] for one in lines))
    figure = Figure(figsize=(max(6.0, 0.45 * len(groups) * len(plugins) + 2), 5), dpi=120)
    axes = figure.add_subplot()
    width = _BAR / len(plugins)
    for number, plugin in enumerate(plugins):
        own = {(one["case"], one["direction"]): one for one in lines if one["plugin"] == plugin}
        held = [(place, own[group]) for place, group in enumerate(groups) if group in own]
        axes.bar(
            [place + (number + 0.5) * width - _BAR / 2 for place, _ in held],
            [one["r1"] for _, one in held],
            width,
            yerr=[one["spread"] * one["r1"] / 2 for _, one in held],
            label=plugin,
        )
    axes.axhline(1.0, color="black", linewidth=1, label="one large torch copy")
    if lines:
        limit = sorted(one["r1"] / one["r2"] for one in lines)[len(lines) // 2]
        axes.axhline(limit, color="black", linewidth=1, linestyle="--", label="one large memcpy")
    axes.set_xticks(range(len(groups)), [f"{case}\n{way}" for case, way in groups], rotation=60)
    axes.set_ylabel("speed against one large torch copy (R1)")
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error}") from None
