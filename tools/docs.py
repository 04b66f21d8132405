"""Fill the pages from data and commands: tables, figures, outputs. Check their links and run their code.

python tools/docs.py                     rewrite README.md, docs/*.md and docs/figures
python tools/docs.py --check             change nothing; list what is stale, leads nowhere or does not run, and exit 1
python tools/docs.py --check --no-run    the same in a second: no code runs
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

from pages import blocks, checks, figures, tables  # noqa: E402

FIGURES = ROOT / "docs" / "figures"


def pages() -> dict[Path, str]:
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    return {file: file.read_text() for file in files}


def filled(text: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """The page with each of its marked sections as the data has it."""
    for name, section in sections.items():
        content = section().replace("\\", r"\\")
        text = _section(name).sub(rf"\g<1>{content}\n\g<2>", text)
    return text


def _section(name: str) -> re.Pattern[str]:
    return re.compile(f"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)


def misplaced(texts: Mapping[Path, str]) -> list[str]:
    """Sections and figures that no page shows, and sections that several show."""
    everything = "\n".join(texts.values())
    counts = {name: len(_section(name).findall(everything)) for name in tables.SECTIONS}
    return [
        *(f"section {name} is on {count} pages, wants one" for name, count in counts.items() if count != 1),
        *(f"no page shows figures/{name}" for name in figures.FIGURES if f"figures/{name}" not in everything),
    ]


def ran(texts: Mapping[Path, str]) -> tuple[dict[Path, str], list[str]]:
    """The pages with the outputs of now, and what failed."""
    after, problems = {}, []
    for page, text in texts.items():
        with tempfile.TemporaryDirectory() as folder:
            after[page], failures = blocks.run_page(text, Path(folder))
        problems += [f"{page.name}: {failure}" for failure in failures]
    return after, problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is wrong")
    parser.add_argument("--no-run", action="store_true", help="run no code")
    arguments = parser.parse_args(argv)
    before = pages()
    after = {page: filled(text, tables.SECTIONS) for page, text in before.items()}
    drawn = {FIGURES / name: draw() for name, draw in figures.FIGURES.items()}
    failures: list[str] = []
    if not arguments.no_run:
        after, failures = ran(after)
    files = {**after, **drawn}
    old = {**before, **{file: file.read_text() if file.exists() else "" for file in drawn}}
    stale = [file for file in files if files[file] != old[file]]
    if not arguments.check:
        FIGURES.mkdir(parents=True, exist_ok=True)
        for file in stale:
            file.write_text(files[file])
            print(f"wrote {file.relative_to(ROOT)}")
        stale = []
    failures += [f"{file.relative_to(ROOT)} is stale: run make docs" for file in stale]
    failures += [*misplaced(after), *checks.problems(after)]
    print("\n".join(failures) or f"{len(after)} pages and {len(drawn)} figures are as they should be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
