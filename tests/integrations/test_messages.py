"""The messages that pages of docs/integrations explain are those of the code: tables whose first column has messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "mcore_reshard",
    "kernels",
    "planner",
)  # the last two are links inside the first, which rglob does not follow
PAGES = sorted((ROOT / "docs" / "integrations").glob("*.md"))
OTHERS = {  # of the frameworks
    "no attribute 'connect_refit'",
    "vLLM rollout supports wire_format=",
    "Checkpoint engine mcore_reshard not registered",
    "vLLM answers: 500: ... Unknown weight transfer backend",
    "a weight-update session is already open",
    "takes one tensor, mcore_reshard.command",
}
ANYTHING = re.compile(r"\.\.\.|\d+")  # in a message on a page


def messages(page: str) -> list[str]:
    """What stands in quotes or backticks in the first column of tables of messages."""
    found, is_table_of_messages = [], False
    for line in page.splitlines():
        if not line.startswith("|"):
            is_table_of_messages = False
        elif re.match(r"\| (message|the error says) \|", line):
            is_table_of_messages = True
        elif is_table_of_messages and not line.startswith("|---"):
            found += [quoted.strip('`"') for quoted in re.findall(r'`[^`]+`|"[^"]+"', line.split(" | ")[0])]
    return found


def literals(source: str) -> Iterator[str]:
    """Texts of a module, with "..." for what f-strings put in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.ClassDef):
            yield node.name


def is_told(message: str, modules: list[str]) -> bool:
    """Whether one module has all parts of a message."""
    parts = [part.strip() for part in ANYTHING.split(message)]
    return any(all(part in module for part in parts) for module in modules)


def test_a_message_that_no_code_tells_is_found() -> None:
    (page,) = ["| message | meaning |\n|---|---|\n| `rank 3 has no ...: go`, `never said` | x |\n\n| other |\n| `y` |"]
    code = ["\n".join(literals("def f(a, b):\n    raise ValueError(f'rank {a} has no {b}: go home')"))]
    assert [is_told(each, code) for each in messages(page)] == [True, False]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_explained_messages_are_those_of_the_code(page: Path) -> None:
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    modules = ["\n".join(literals(file.read_text())) for file in files]
    assert [each for each in messages(page.read_text()) if each not in OTHERS and not is_told(each, modules)] == []


def test_tables_of_messages_are_read() -> None:
    found = {page.stem: len(messages(page.read_text())) for page in PAGES}
    assert all(found[name] > 2 for name in ("failures", "nemo_rl", "sglang", "slime", "verl", "vllm")), found
