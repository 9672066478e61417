"""A picture as SVG text: rectangles, lines and words, with the room that words take known."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

import attrs

from kvpolicy.errors import OptionError

FONT_SIZE = 11.0
_CHAR_WIDTH = 0.602  # of a monospaced font's size, in every common one
_FONTS = "DejaVu Sans Mono, Menlo, Consolas, monospace"
# What XML 1.0 cannot hold: control characters and surrogates.
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_HUE_STEP = 0.381966  # the golden section's: neighbours differ, and no two hues meet soon


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Pixels that a text takes."""
    return len(text) * size * _CHAR_WIDTH


def clipped(text: str, width: float, size: float = FONT_SIZE) -> str:
    """The text, its middle left out where it is wider than ``width`` pixels."""
    most = max(3, int(width / (size * _CHAR_WIDTH)))
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def colour(number: int) -> str:
    """One of a row of colours that are told apart, light enough for dark words on them."""
    lightness = (0.77, 0.7, 0.85)[number // 8 % 3]
    red, green, blue = colorsys.hls_to_rgb((0.58 + number * _HUE_STEP) % 1, lightness, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _plain(text: str) -> str:
    return _UNWRITABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


@attrs.define
class Picture:
    """What is drawn so far, and how large it has become; the origin is at the top left."""

    width: float = 0.0
    height: float = 0.0
    _parts: list[str] = attrs.field(factory=list)

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        opacity: float = 1.0,
        hint: str = "",
        **data: object,
    ) -> None:
        """A rectangle; ``hint`` shows under the pointer, ``data`` is kept as attributes."""
        self._reach(x + width, y + height)
        given = {
            "x": _number(x),
            "y": _number(y),
            "width": _number(width),
            "height": _number(height),
            "fill": fill,
            "stroke": stroke,
        }
        if opacity < 1:
            given["fill-opacity"] = _number(opacity)
        given |= {f"data-{name.replace('_', '-')}": str(value) for name, value in data.items()}
        attributes = " ".join(f"{name}={quoteattr(_plain(v))}" for name, v in given.items())
        inside = f"<title>{escape(_plain(hint))}</title></rect>" if hint else ""
        self._parts.append(f"<rect {attributes}{'>' + inside if hint else '/>'}")

    def line(self, x: float, y: float, to_x: float, to_y: float, stroke: str) -> None:
        """A thin line."""
        self._reach(max(x, to_x), max(y, to_y))
        ends = zip(("x1", "y1", "x2", "y2"), (x, y, to_x, to_y), strict=True)
        attributes = " ".join(f'{name}="{_number(value)}"' for name, value in ends)
        self._parts.append(f'<line {attributes} stroke="{stroke}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = FONT_SIZE,
        bold: bool = False,
        end: bool = False,
        fill: str = "#222222",
    ) -> None:
        """Words on the baseline ``y``, which begin at ``x``, or end there; none are nothing."""
        if not text:
            return
        self._reach(x if end else x + text_width(text, size), y + 0.3 * size)
        attributes = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" fill="{fill}"'
        attributes += ' text-anchor="end"' if end else ""
        attributes += ' font-weight="bold"' if bold else ""
        self._parts.append(f"<text {attributes}>{escape(_plain(text))}</text>")

    def svg(self, margin: float = 16.0) -> str:
        """The whole picture as an SVG document."""
        width, height = _number(self.width + margin), _number(self.height + margin)
        attributes = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        style = f'font-family="{_FONTS}" stroke-width="0.75"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {attributes} {style}>',
            f'<rect x="0" y="0" width="{width}" height="{height}" fill="#ffffff"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def save(picture: Picture, path: Path) -> None:
    """Writes the picture.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        path.write_text(picture.svg(), encoding="utf-8", newline="\n")
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
