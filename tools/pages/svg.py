"""A drawing of rectangles, lines, ribbons and text, as an SVG that reads on light and on dark pages.

Every shape has a class; the classes have one color for light and one for dark. Output is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# class: (property, light, dark)
PALETTE: dict[str, tuple[str, str, str]] = {
    "page": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1f2328", "#e6edf3"),
    "faint": ("fill", "#59636e", "#9198a1"),
    "grid": ("stroke", "#d1d9e0", "#3d444d"),
    "limit": ("stroke", "#1f2328", "#e6edf3"),
    "blue": ("fill", "#0969da", "#4493f8"),
    "orange": ("fill", "#bc4c00", "#f0883e"),
    "green": ("fill", "#1a7f37", "#3fb950"),
    "gray": ("fill", "#818b98", "#656c76"),
    "blue-line": ("stroke", "#0969da", "#4493f8"),
    "orange-line": ("stroke", "#bc4c00", "#f0883e"),
    "green-line": ("stroke", "#1a7f37", "#3fb950"),
}
FONT = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"


class Drawing:
    """Shapes in the order in which they were added. Lengths are in pixels of a `width` x `height` page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title, self._shapes = (width, height), title, list[str]()
        self.box(0, 0, width, height, "page")

    def box(self, x: float, y: float, width: float, height: float, color: str, round_: float = 0) -> None:
        corner = f' rx="{_n(round_)}"' if round_ else ""
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._shapes.append(f'<rect class="{color}" {size}{corner}/>')

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float = 1, dashes: str = "") -> None:
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._shapes.append(
            f'<polyline class="{color}" fill="none" stroke-width="{_n(width)}"{dashed} points="{path}"/>'
        )

    def ribbon(self, top: tuple[float, float, float], bottom: tuple[float, float, float], color: str) -> None:
        """From `(left, right, y)` down to `(left, right, y)`, see-through."""
        (left, right, y), (left_below, right_below, below) = top, bottom
        half = _n((y + below) / 2)
        path = (
            f"M{_n(left)} {_n(y)}C{_n(left)} {half} {_n(left_below)} {half} {_n(left_below)} {_n(below)}"
            f"H{_n(right_below)}C{_n(right_below)} {half} {_n(right)} {half} {_n(right)} {_n(y)}Z"
        )
        self._shapes.append(f'<path class="{color}" fill-opacity=".28" d="{path}"/>')

    def dot(self, x: float, y: float, color: str) -> None:
        self._shapes.append(f'<circle class="{color}" cx="{_n(x)}" cy="{_n(y)}" r="3.5"/>')

    def text(self, x: float, y: float, text: str, color: str = "ink", anchor: str = "start", size: int = 13) -> None:
        place = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" font-size="{size}"'
        self._shapes.append(f'<text class="{color}" {place}>{escape(text)}</text>')

    def render(self) -> str:
        width, height = self._size
        light, dark = (
            "".join(_rule(name, values[0], values[shade]) for name, values in PALETTE.items()) for shade in (1, 2)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
                f' role="img" font-family="{FONT}">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>",
                *self._shapes,
                "</svg>\n",
            ]
        )


def _rule(name: str, attribute: str, value: str) -> str:
    return f".{name}{{{attribute}:{value}}}"


def _n(value: float) -> str:
    """At most one decimal, so that the file stays small: 12.0 -> 12."""
    return f"{value:.1f}".removesuffix(".0")
