"""How reports look: tables on stdout, progress on stderr, numbers with their units."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 250  # columns where no terminal says otherwise; names of tensors are long


def write(*parts: RenderableType) -> None:
    """Print a report, one blank line between its parts.

    Without a terminal: no colors, no padding at line ends, and wide enough not to fold names.
    """
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _piped_width())
    with console.capture() as captured:
        for number, part in enumerate(parts):
            console.print(*([""] if number else []), part, sep="\n")
    sys.stdout.write(re.sub(r"[ \t]+$", "", captured.get(), flags=re.MULTILINE))


def _piped_width() -> int:
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdigit() else _PIPED_WIDTH


def write_json(report: Mapping[str, Any]) -> None:
    """One object on stdout."""
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


def noted(notes: Iterable[str]) -> list[Text]:
    """What a reader should know besides, a line each."""
    return [Text(f"note: {note}", style="yellow") for note in notes]


@contextmanager
def progress(what: str) -> Iterator[None]:
    """A spinner on stderr while something runs, and nothing at all where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(what):
        yield


def table(title: str | None, *columns: str, numbers: Iterable[str] = ()) -> Table:
    """A table with a heading, or none; columns named in `numbers` are right-aligned, the others fold."""
    made = Table(title=title, title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    made.title_justify = made.caption_justify = "left"
    for column in columns:
        if column in numbers:
            made.add_column(column, justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    return made


def say_what_is_left(shown: Table, left: int, noun: str) -> None:
    """Under a table that was cut short: how many rows are missing, and how to see them."""
    if left > 0:
        shown.caption = f"and {count(left, noun)} more: --json lists all"


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Aligned `name  value` lines, without a heading."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def verdict(ok: bool, text: str, bad: str = "FAILED") -> Text:
    """`text` behind a green or red word that also reads without colors."""
    return Text.assemble(("ok  ", "bold green") if ok else (f"{bad}  ", "bold red"), text)


def size(nbytes: float) -> str:
    """Bytes in decimal units, as links are rated: 1_234_567 -> `1.23 MB`."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{value:#.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


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
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def shape(sizes: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def axes(mesh: Mapping[str, Any]) -> str:
    """`tp 2  pp 2  ...  = 8 ranks`, every axis, also those of size one."""
    parts = [f"{axis}={size}" for axis, size in mesh.items() if axis not in {"world", "layers"}]
    if mesh.get("layers"):
        parts.append("layers=" + "+".join(map(str, mesh["layers"])))
    return " ".join(parts) + f"  ({count(mesh['world'], 'rank')})"
