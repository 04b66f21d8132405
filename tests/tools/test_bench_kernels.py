"""The benchmark of kernels: its tables are what it says they are, and what is wrong or missing gets no figure."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import bench_kernels
import numpy as np
import pytest
import torch
from bench_kernels import POISON, Case, Launches, Memory, Method, attempted, cases, row_of
from pages import tables

from mcore_reshard.kernels.copies.cpu import run_copies

CPU = torch.device("cpu")
NBYTES = 1 << 18
TILE_BYTES = 16 << 10


@pytest.fixture
def memory() -> Memory:
    return Memory(NBYTES, CPU, CPU)


def case_of(name: str) -> Case:
    return next(case for case in cases(NBYTES) if case.name == name)


def interpreted(memory: Memory, case: Case, config: dict[str, Any]) -> Launches:
    bases = [memory.src.numpy(), memory.dst.numpy()]
    return Launches(lambda: run_copies(case.copies(), bases), 1)


def row(memory: Memory, case: Case, prepare: Any, *configs: dict[str, Any], modules: tuple[str, ...] = ()) -> Any:
    method = Method("m", modules, configs or ({},), prepare)
    return row_of(case, method, attempted(memory, case, memory.wanted(case), method, float("inf")))


def test_cases_have_the_words_they_say(memory: Memory) -> None:
    words = {case.name: np.unique(memory.tiles(case, TILE_BYTES)["word_bytes"]).tolist() for case in cases(NBYTES)}
    assert words == {
        "one region": [16],
        "rows, 2 KiB apart": [16],
        "rows, 3 KiB apart": [16],
        "odd rows": [2, 4, 8, 16],
    }
    assert [case.nbytes for case in cases(4 << 30)] == [4 << 30, 4 << 30, (4 << 30) - 1024, 2_147_480_656]


@pytest.mark.parametrize("name", ["one region", "rows, 3 KiB apart", "odd rows"])
def test_tables_copy_what_torch_says(memory: Memory, name: str) -> None:
    found = row(memory, case_of(name), interpreted)
    assert found["gb_per_s"] > 0 and found["launches"] == 1
    assert (memory.dst != POISON).sum() == case_of(name).nbytes


def test_wrong_bytes_have_no_figure(memory: Memory) -> None:
    def damaging(memory: Memory, case: Case, config: dict[str, Any]) -> Launches:
        def copy() -> None:
            interpreted(memory, case, config).launch()
            memory.dst[config["at"]] += 1

        return Launches(copy, 1)

    case = case_of("odd rows")
    for at in (1000, len(memory.dst) - 1):  # in a row, and behind all rows
        found = row(memory, case, damaging, {"at": at})
        assert found["error"] == "1 bytes are wrong" and "ms" not in found


def test_the_fastest_counts_and_what_failed_is_kept(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_at_2(memory: Memory, case: Case, config: dict[str, Any]) -> Launches:
        if config["ctas"] == 2:
            raise ValueError("no such\n  launch")
        return interpreted(memory, case, config)

    times = iter([2.0, 0.5, 1.0])
    monkeypatch.setattr(bench_kernels, "timed_ms", lambda memory, copies: next(times))
    configs = [{"ctas": ctas} for ctas in (1, 2, 3, 4)]
    found = row(memory, case_of("rows, 3 KiB apart"), failing_at_2, *configs)
    assert (found["config"], found["ms"]) == ({"ctas": 3}, 0.5)
    assert [attempt["config"] for attempt in found["tried"]] == configs
    assert found["tried"][1] == {"config": {"ctas": 2}, "error": "ValueError: no such launch"}


def test_a_module_that_is_missing_and_a_late_start_are_reasons(memory: Memory) -> None:
    found = row(memory, case_of("rows, 3 KiB apart"), interpreted, modules=("no_such_module",))
    assert found["error"] == "no_such_module cannot be imported: No module named 'no_such_module'"
    method = Method("m", (), ({},), interpreted)
    (late,) = attempted(memory, case_of("rows, 3 KiB apart"), memory.wanted(case_of("rows, 3 KiB apart")), method, 0.0)
    assert late["error"].startswith("not started within")


@pytest.mark.parametrize("walk", ["flat", "rows"])
@pytest.mark.parametrize("name", ["one region", "rows, 3 KiB apart", "odd rows"])
def test_triton_kernels_copy_what_torch_says(
    memory: Memory, name: str, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton.compiler", reason="needs triton", exc_type=ImportError)  # no stand-in has it
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter takes arrays of one element for numbers, which numpy 2.4 refuses")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = Path(bench_kernels.__file__).parent / "bench" / "triton_copies.py"
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    triton_copies = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(triton_copies)  # of this test: decorated for the interpreter

    def prepare(memory: Memory, case: Case, config: dict[str, Any]) -> Any:
        return triton_copies.TritonCopies(memory.tiles(case, TILE_BYTES), CPU, walk, **config)

    monkeypatch.setattr(bench_kernels, "REPEATS", 1)
    found = row(memory, case_of(name), prepare, {"ctas": 3, "warps": 4, "block": 256})
    assert "error" not in found, found["error"]
    assert found["launches"] == (4 if name == "odd rows" else 1)


def test_the_docs_show_what_was_measured_and_nothing_without_data(tmp_path: Path) -> None:
    assert tables.kernels_section(tmp_path) == ""

    def attempt(gb_per_s: float, launches: int = 1, **config: int) -> dict[str, Any]:
        return {"ms": 1e3 / gb_per_s, "gb_per_s": gb_per_s, "launches": launches, "config": config}

    def row(method: str, case: str, *tried: dict[str, Any]) -> dict[str, Any]:
        return {"method": method, "case": case, "tried": tried}

    data = {
        "what": "GB/s", "hardware": "2 x GPU", "driver": "1.2", "date": "2026-01-02", "versions": {"torch": "2.11"},
        "cases": {"one region": {"what": "aligned"}, "odd rows": {"what": "odd"}},
        "first_launch_s": {"ours": 0.512, "Triton, flat": "RuntimeError: no", "Triton, rows": 1.0},
        "rows": [
            row("copy engine", "one region", attempt(400.0)),
            row("ours", "one region", attempt(380.0, ctas=48)),
            row("ours", "odd rows", attempt(100.0, ctas=48), attempt(120.0, ctas=132)),
            row("Triton, flat", "one region", attempt(190.0, ctas=48), attempt(370.0, ctas=132), {"error": "x"}),
            row("Triton, rows", "one region", attempt(210.0, ctas=48)),
            row("Triton, rows", "odd rows", attempt(50.0, 4, ctas=48), attempt(90.0, 4, ctas=264)),
            {**row("bulk copies", "one region"), "error": "3 bytes are wrong"},
        ],
    }  # fmt: skip
    (tmp_path / "kernels-x2.json").write_text(json.dumps(data))
    section = tables.kernels_section(tmp_path)
    assert "2 x GPU, driver 1.2, torch 2.11, 2026-01-02" in section
    for line in (
        "| method | one region | odd rows | launches | first launch |",
        "| copy engine | 400 |  | 1 |  |",
        "| ours, 48 CTAs | 380 | 100 | 1 | 0.51 s |",
        "| ours, 132 CTAs | 380 | 120 | 1 | 0.51 s |",
        "| Triton, 48 CTAs | 210 | 50 | 1 to 4 | 1.00 s |",
        "| Triton, up to 264 CTAs | 370 | 90 | 1 to 4 | 1.00 s |",
        "- bulk copies, one region: 3 bytes are wrong.",
    ):
        assert line in section.splitlines()
