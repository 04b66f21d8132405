"""Numbers and names as people read them, on a page and on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_SECONDS = ((0.1, 1.0, "s"), (1e-4, 1e-3, "ms"))  # from here on, the unit, its name


def size(nbytes: float) -> str:
    """Bytes in decimal units, as links are rated: 1_234_567 -> `1.23 MB`."""
    value, unit, larger = float(nbytes), "B", ["kB", "MB", "GB", "TB"]
    while value >= 1000 and larger:
        value, unit = value / 1000, larger.pop(0)
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:#.3g} {unit}"


def count(number: int, noun: str, nouns: str = "") -> str:
    """`1 rank`, `1,234 ranks`."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def starred(pattern: str) -> str:
    """A pattern of names with stars for what varies: `layers.{layer}.mlp` -> `layers.*.mlp`."""
    return re.sub(r"\{\w+\}", "*", pattern)


def seconds_text(seconds: float) -> str:
    """0.0123 -> `12.3 ms`, 3.14159 -> `3.142 s`."""
    if not seconds:
        return "0 s"
    if seconds >= 0.1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"


def rails_text(nbytes: int, on_rail: int) -> str:
    """The share of the bytes by NIC that leave and enter by NICs of one number; empty where none go by NIC."""
    return f"{on_rail / nbytes:.1%} of {size(nbytes)} by NIC stay on their rail" if nbytes else ""


def bytes_unit(most: float) -> tuple[float, str]:
    """The unit for an axis that ends at `most` bytes, and its size."""
    return next(((value, unit) for value, unit in _BYTES if most >= value), (1.0, "B"))


def seconds_unit(most: float) -> tuple[float, str]:
    """The unit for an axis that ends at `most` seconds, and its size."""
    return next(((value, unit) for least, value, unit in _SECONDS if most >= least), (1e-6, "us"))
