"""The code of a page: find it, run it, and compare the output of each command with the one shown.

Every `python` and `console` block runs, in the order of the page and in one folder a page. A line above it excepts it:
`<!-- not run: REASON -->`, or the mark that begins the front door, which has a test of its own. A console block holds
`$ command` lines, each followed by its output. An excepted python block still runs its imports of this package.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNNABLE = ("python", "console")
TIMEOUT_S = 180
_REASON = re.compile(r"<!-- (?:not run: (.+)|(front-door):begin) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text, the line of its opening fence (from 1), and why it is not run."""

    language: str
    text: str
    line: int
    reason: str = ""

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and not self.reason


def blocks_of(page: str) -> Iterator[Block]:
    lines = page.splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        reason = _REASON.fullmatch(lines[start - 1]) if start else None
        text = "\n".join(lines[start + 1 : number])
        yield Block(lines[start][3:].strip(), text, start + 1, (reason[1] or reason[2]) if reason else "")
        start = None


def run_page(page: str, folder: Path) -> tuple[str, list[str]]:
    """The page with the outputs that its commands print now, and what is wrong, each with its line."""
    environment = _environment(folder)
    problems = []
    lines = page.splitlines()
    replaced: list[tuple[Block, str]] = []
    for block in blocks_of(page):
        if block.language == "python":
            code = block.text if block.runs else _own_imports(block.text)
            if failure := _run_python(code, folder, environment):
                problems.append(f"line {block.line}: {failure}")
            continue
        if not block.runs:
            continue
        text, failures = _run_console(block.text, folder, environment)
        problems += [f"line {block.line}: {failure}" for failure in failures]
        replaced.append((block, text))
    for block, text in reversed(replaced):  # from the end, so that line numbers hold
        lines[block.line : block.line + len(block.text.splitlines())] = text.splitlines()
    return "\n".join(lines) + "\n", problems


def alike(shown: str, printed: str) -> bool:
    """Whether two outputs differ in nothing but times and the width of columns."""
    return _masked(shown) == _masked(printed)


def _masked(text: str) -> str:
    return re.sub(r"[ ─]+", " ", re.sub(r"\b\d+\.\d\d\b(?! [kMG]?B)", "#", text))


def _run_python(text: str, folder: Path, environment: dict[str, str]) -> str:
    run = subprocess.run(
        [sys.executable, "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return "" if run.returncode == 0 else f"the code ends with {(run.stderr.strip() or 'an error').splitlines()[-1]}"


def _own_imports(text: str) -> str:
    """The imports of this package in code that does not run. Raises SyntaxError."""
    lines = ast.parse(text).body
    return "\n".join(line for line in map(ast.unparse, lines) if re.match(r"(from|import) mcore_reshard\b", line))


def _run_console(text: str, folder: Path, environment: dict[str, str]) -> tuple[str, list[str]]:
    """The block with the outputs of now; those that differ in times alone stay as they were."""
    parts, failures = [], []
    for command, shown in commands_of(text):
        run = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        printed = run.stdout.rstrip()
        if run.returncode:
            failures.append(f"{command} ends with exit code {run.returncode}: {printed[-300:]}")
        parts.append("\n".join(filter(None, [f"$ {command}", shown if alike(shown, printed) else printed])))
    return "\n\n".join(parts), failures


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """(command, output) of a console block. A command that ends in a backslash goes on in the next line."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = re.sub(r"(?<!\\)\n", "\0", part, count=1).partition("\0")
        yield command, shown.strip("\n")


def _environment(folder: Path) -> dict[str, str]:
    """The commands of this checkout and this Python, printing to 100 columns."""
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    program = programs / "mcore-reshard"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m mcore_reshard "$@"\n')
    program.chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
