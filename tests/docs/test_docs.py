"""The pages: they hold what the data, the planner and the commands say, and each check of them can fail."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
from helpers import traced_cases
from pages import blocks, checks
from pages.figures import HeadMove, head_moves, qkv_figure

import docs
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of

ROOT = Path(__file__).parents[2]


def test_tables_figures_and_links_are_those_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    code = docs.main(["--check", "--no-run"])
    expected = f"{len(docs.pages())} pages and {len(docs.figures.FIGURES)} figures are as they should be\n"
    assert (capsys.readouterr().out, code) == (expected, 0)


def test_the_first_screen_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    first = "\n".join(lines[:40])
    for part in (
        "make demo", "make test", "docs/figures/qkv.svg", "numbers:end", "front-door:end", "planner/         proof ->"
    ):  # fmt: skip
        assert part in first


def test_everything_tracked_is_small_enough_to_travel() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert sum(file.lstat().st_size for file in files if file.is_symlink() or file.exists()) < 6_500_000


def test_the_commands_of_cli_md_print_what_it_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    quick = page.replace("```console\n$ mcore-reshard validate", "```text\n$ mcore-reshard validate")
    assert quick != page
    after, problems = blocks.run_page(quick, tmp_path)
    assert problems == []
    assert after == quick, "the commands print something else now: run make docs"


def test_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    assert blocks.run_page((ROOT / "README.md").read_text(), tmp_path)[1] == []


def test_the_numbers_in_design_md_are_those_of_its_plan() -> None:
    config = {**load_config("tiny-qwen3"), "num_key_value_heads": 2}
    plan = make_plan(parameters_from_config(config), TrainMesh(tp=2), GenMesh(tp=4))
    ((_, transfers, nbytes),) = plan.stage_totals
    received = schedule_of(plan, "gen", 3).stages[0].recvs
    page = (ROOT / "docs" / "design.md").read_text()
    assert f"schedule of gen:3, stage 0: {len(received)} receives" in page
    assert f"one bucket of {received.nbytes[received.peer == 1].sum():,} bytes" in page
    assert (
        f"{sum(group.count for group in plan.groups)} parameters -> {len(plan.transfer_groups)} transfer groups,"
        f" {len(plan.patterns)} patterns -> {transfers} transfers, {nbytes:,} bytes"
    ) in page


# --- each check can fail


def test_a_stale_section_is_seen() -> None:
    text = "<!-- a:begin -->\nold\n<!-- a:end -->\nrest\n"
    assert docs.filled(text, {"a": lambda: "new", "b": lambda: "x"}) == text.replace("old", "new")


def test_a_stale_page_fails_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(docs.tables.SECTIONS, "numbers", lambda: "others")
    monkeypatch.setitem(docs.figures.FIGURES, "qkv.svg", lambda: "<svg/>")
    assert docs.main(["--check", "--no-run"]) == 1
    out = capsys.readouterr().out
    assert "README.md is stale: run make docs" in out and "docs/figures/qkv.svg is stale" in out


def test_other_results_of_coverage_make_the_page_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = docs.tables.coverage_section
    data = json.loads((ROOT / "tools" / "results" / "coverage.json").read_text())
    assert section() == section(ROOT / "tools" / "results") and "wrong**" not in section()
    case = next(case for case in data["cases"] if "refits" in case)
    case["wrong"] = 2
    (tmp_path / "coverage.json").write_text(json.dumps(data))
    assert "| **2 wrong** |" in section(tmp_path)
    monkeypatch.setitem(docs.tables.SECTIONS, "coverage", lambda: section(tmp_path))
    assert docs.main(["--check", "--no-run"]) == 1
    assert "docs/support.md is stale: run make docs" in capsys.readouterr().out


def test_every_case_of_models_without_rules_has_run() -> None:
    fp8 = traced_cases.FP8_FULL
    for file, tiny, more in (
        ("coverage.json", traced_cases.FULL, fp8),
        ("coverage-newest.json", traced_cases.NEWEST_FULL, []),
    ):
        cases = [case for case in json.loads((ROOT / "tools" / "results" / file).read_text())["cases"] if case["mesh"]]
        ran = [(case["model"], case["train"], case["gen"], case["precision"]) for case in cases]
        wanted = [*((*case, traced_cases.BF16) for case in tiny), *more]
        assert ran == [(model, *traced_cases.arguments(model, mesh), precision) for model, mesh, precision in wanted]
        assert not [case for case in cases if "error" in case or case.get("wrong")]
        refused = {(case["model"], case["mesh"]) for case in cases if "refused" in case}
        assert refused == {*tiny} & {(model, mesh) for model, found in traced_cases.REFUSED.items() for mesh in found}


def test_published_models_without_rules_go_by_bulk() -> None:
    data = json.loads((ROOT / "tools" / "results" / "coverage.json").read_text())
    published = [case for case in data["cases"] if not case["mesh"]]
    assert [(case["model"], case["train"], case["gen"]) for case in published] == traced_cases.PUBLISHED
    assert min(docs.tables._bulk_share(case) for case in published) >= 0.99
    assert sum("refits" in case for case in data["random"]) == 200
    assert not [case for case in data["random"] if "error" in case or case.get("wrong")]


def test_a_section_or_figure_that_no_page_shows_is_seen() -> None:
    problems = docs.misplaced(
        {Path("a.md"): 2 * "<!-- planner:begin -->\n<!-- planner:end -->\n" + "figures/qkv.svg <!-- gpu:begin -->"}
    )
    assert "section planner is on 2 pages, wants one" in problems
    assert "section goals is on 0 pages, wants one" in problems
    assert "section gpu is on 0 pages, wants one" in problems  # it begins and does not end
    assert "no page shows figures/refit.svg" in problems


def test_the_code_of_the_guide_imports_what_exists(tmp_path: Path) -> None:
    assert blocks.run_page((ROOT / "docs" / "guide.md").read_text(), tmp_path)[1] == []


def test_the_names_that_the_changelog_leads_to_exist() -> None:
    table = (ROOT / "CHANGELOG.md").read_text().partition("| in 0.1 | in 0.2 |")[2].partition("\n\n")[0]
    rows = [line.split("|")[2] for line in table.splitlines()[2:]]
    for name in (name for row in rows for name in re.findall(r"`(mcore_reshard[\w.]*)`", row)):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name), name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](gone.md)", "gone.md leads to no file"),
        ("![a](figures/gone.svg)", "figures/gone.svg leads to no file"),
        ('<img src="gone.png">', "gone.png leads to no file"),
        ("[a](#gone)", "#gone leads to no heading"),
        ("[a](other.md#gone)", "other.md#gone leads to no heading"),
        ("see `planner/gone.py`", "`planner/gone.py` is no path of the repository"),
        ("x" * 101, "101 columns, at most 100"),
        ("```sh\nls\n```", "a sh block: write ```console with `$ command`, which is run"),
        ("```\nmcore-reshard doctor\n```", "commands in a block that is not run: write ```console"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# There\n")
    assert checks.problems({tmp_path / "page.md": f"# Here\n\n{text}\n"}) == [f"page.md:3: {problem}"]


def test_links_that_lead_somewhere_pass(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Why it is C++, now\n# Twice\n# Twice\n")
    page = "# Here\n[a](#here) [b](other.md#why-it-is-c-now) [c](other.md#twice-1) [d](https://a.b/c)\n"
    assert checks.problems({tmp_path / "page.md": page + "`[e](gone.md)`\n```\n[f](gone.md)\n```\n"}) == []


def test_code_that_does_not_run_is_said(tmp_path: Path) -> None:
    page = "```python\nopen('made', 'w')\n```\n\n```python\nraise ValueError('no')\n```\n\n```console\n$ exit 3\n```\n"
    _, problems = blocks.run_page(page, tmp_path)
    assert problems == ["line 5: the code ends with ValueError: no", "line 9: exit 3 ends with exit code 3: "]
    assert (tmp_path / "made").exists()


def test_code_with_a_reason_is_not_run(tmp_path: Path) -> None:
    page = "<!-- not run: needs a GPU -->\n```python\nraise ValueError('no')\n```\n"
    assert blocks.run_page(page, tmp_path) == (page, [])
    assert blocks.run_page(page.replace(": needs a GPU", ""), tmp_path)[1] != []


def test_code_that_is_not_run_imports_what_exists(tmp_path: Path) -> None:
    page = "<!-- not run: why -->\n```python\nimport vllm\nfrom mcore_reshard.planner import gone\nvllm.go()\n```\n"
    _, (problem,) = blocks.run_page(page, tmp_path)
    assert problem.startswith("line 2: the code ends with ImportError: cannot import name 'gone'")


def test_outputs_become_those_of_now_unless_times_alone_differ(tmp_path: Path) -> None:
    def page(*outputs: str) -> str:
        commands = "echo one", "echo 'in  0.50 s'", "echo two"
        shown = "\n\n".join(f"$ {command}\n{output}" for command, output in zip(commands, outputs, strict=True))
        return f"```console\n{shown}\n```\nrest\n"

    after, problems = blocks.run_page(page("one", "in 12.25 s", "2\n3\n4"), tmp_path)
    assert (after, problems) == (page("one", "in 12.25 s", "two"), [])


def test_a_failing_command_in_a_pipe_is_seen(tmp_path: Path) -> None:
    _, problems = blocks.run_page("```console\n$ false | cat\n```\n", tmp_path)
    assert problems == ["line 1: false | cat ends with exit code 1: "]


# --- figures


def test_the_rows_in_the_figure_are_those_of_the_plan() -> None:
    moves = head_moves(8, 2, train_tp=2, gen_tp=4)
    assert [move for move in moves if move.kind == "k"] == [
        HeadMove("k", 0, 1, src=0, src_row=4, dst=0, dst_row=2),
        HeadMove("k", 0, 1, src=0, src_row=4, dst=1, dst_row=2),
        HeadMove("k", 1, 1, src=1, src_row=4, dst=2, dst_row=2),
        HeadMove("k", 1, 1, src=1, src_row=4, dst=3, dst_row=2),
    ]
    assert sum(move.heads for move in moves if move.kind == "q") == 8


def test_a_figure_has_a_color_for_light_and_for_dark_and_is_drawn_alike_each_time() -> None:
    drawn = qkv_figure(8, 2)
    assert "@media (prefers-color-scheme:dark)" in drawn
    assert drawn == qkv_figure(8, 2)
