"""Check the pages besides their data: links and paths lead somewhere, lines are short, commands run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from .blocks import RUNNABLE, blocks_of

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 100
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|(?:src|srcset|href)=\"([^\"]+)\"")
_PATH = re.compile(r"`((?:planner|kernels|mcore_reshard|tests|tools|docs)/[\w./-]*)`")
_SHELLS = ("sh", "bash", "shell")


def problems(pages: Mapping[Path, str]) -> list[str]:
    """Everything that is wrong with the pages (path -> text), as `page:line: what`."""
    return [
        f"{page.name}:{line}: {what}"
        for page, text in pages.items()
        for line, what in sorted(
            [*_bad_links(page, text, pages), *_bad_paths(text), *_long_lines(text), *_unclear_blocks(text)]
        )
    ]


def _bad_links(page: Path, text: str, pages: Mapping[Path, str]) -> Iterator[tuple[int, str]]:
    for number, line in _prose(text):
        for match in _LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target = match[1] or match[2]
            if re.match(r"[a-z]+:", target):
                continue  # another site: not looked up
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if name and not file.exists():
                yield number, f"{target} leads to no file"
            elif anchor and anchor not in anchors(pages[file] if file in pages else file.read_text()):
                yield number, f"{target} leads to no heading"


def _bad_paths(text: str) -> Iterator[tuple[int, str]]:
    for number, line in _prose(text):
        for match in _PATH.finditer(line):
            if not (ROOT / match[1]).exists():
                yield number, f"`{match[1]}` is no path of the repository"


def anchors(text: str) -> set[str]:
    """The names under which GitHub reaches the headings of a page: `## Use it, now` -> use-it-now."""
    names: list[str] = []
    for _, line in _prose(text):
        if heading := re.match(r"#{1,6} +(.+)", line):
            slug = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
            earlier = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", name) is not None for name in names)
            names.append(f"{slug}-{earlier}" if earlier else slug)
    return set(names)


def _long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Rows of tables may be long."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS and not line.startswith("|"):
            yield number, f"{len(line)} columns, at most {COLUMNS}"


def _unclear_blocks(text: str) -> Iterator[tuple[int, str]]:
    for block in blocks_of(text):
        if block.language in _SHELLS:
            yield block.line, f"a {block.language} block: write ```console with `$ command`, which is run"
        elif block.language not in RUNNABLE and re.search(r"^(\$ )?mcore-reshard ", block.text, re.MULTILINE):
            yield block.line, "commands in a block that is not run: write ```console"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced blocks, with their numbers."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line
