"""How reports look: tables on stdout, progress on stderr, numbers with their units.

Every text passes through `printable` here, so that no name out of a config or a plan file commands the terminal.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from mcore_reshard.report.text import count as count
from mcore_reshard.report.text import ranges as ranges
from mcore_reshard.report.text import size as size

from .printable import printable

_PIPED_WIDTH = 250  # columns where no terminal says otherwise; names of tensors are long

Cell = str | int | Text
_Row = TypeVar("_Row")
_Key = TypeVar("_Key", bound=Hashable)


def print_report(as_json: bool, report: Mapping[str, Any], parts: Iterable[RenderableType]) -> None:
    """Print a command's answer: its JSON object, or the parts of its text with a blank line between them.

    Without a terminal: no colors, no padding at line ends, and wide enough not to fold names.
    """
    if as_json:
        print(json.dumps(report, indent=2))
        return
    columns = os.environ.get("COLUMNS", "")
    piped_width = int(columns) if columns.isdigit() else _PIPED_WIDTH
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else piped_width)
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number:
                console.print()
            console.print(printable(part) if isinstance(part, str) else part)
    sys.stdout.write(re.sub(r"[ \t]+$", "", captured.get(), flags=re.MULTILINE))


def progress(text: str) -> Status:
    """A spinner on stderr while something runs, and nothing at all where stderr is no terminal."""
    return Console(stderr=True, markup=False, force_terminal=sys.stderr.isatty()).status(printable(text))


def table(
    title: str | None, columns: str, rows: Iterable[Iterable[Cell]], most: int | None = None, noun: str = "row"
) -> Table:
    """A table with a heading, or none, of `columns` like "name, >bytes": right-aligned behind `>`, others fold.

    After `most` rows a last line says how many more there are.
    """
    made = Table(title=title, title_style="bold", title_justify="left", caption_justify="left")
    made.box, made.show_edge, made.pad_edge = box.SIMPLE_HEAD, False, False
    for column in columns.split(", "):
        if column.startswith(">"):
            made.add_column(column[1:], justify="right", no_wrap=True)
        else:
            made.add_column(column, overflow="fold")
    rows = list(rows)
    for row in rows[:most]:
        made.add_row(*map(_shown, row))
    if most is not None and len(rows) > most:
        made.caption = and_more(len(rows) - most, noun)
    return made


def facts(rows: Iterable[tuple[str, Cell]]) -> Table:
    """Aligned `name  value` lines, without a heading."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, _shown(value))
    return made


def _shown(cell: Cell) -> str | Text:
    if isinstance(cell, int):
        return f"{cell:,}"
    return printable(cell) if isinstance(cell, str) else cell


def styled(text: str, style: str) -> Text:
    return Text(printable(text), style=style)


def verdict(ok: bool, text: str, bad: str = "FAILED") -> Text:
    """`text` behind a green or red word that also reads without colors."""
    return Text.assemble(("ok  ", "bold green") if ok else (f"{bad}  ", "bold red"), printable(text))


def noted(notes: Iterable[str]) -> list[Text]:
    """Notes to the reader, a line each."""
    return [styled(f"note: {note}", "yellow") for note in notes]


def and_more(left: int, noun: str) -> str:
    return f"and {count(left, noun)} more: --json lists all"


def grouped(rows: Iterable[_Row], key: Callable[[_Row], _Key]) -> dict[_Key, list[_Row]]:
    """Rows by their key, in the order in which the keys first appear."""
    groups: dict[_Key, list[_Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
