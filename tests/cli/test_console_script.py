"""The process itself: what it imports, how it starts, and what reaches a terminal; `doctor`."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import MOE, Run

from mcore_reshard import __version__
from mcore_reshard.cli import main as cli


def python(code: str, *argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, timeout=120)


def test_doctor_reports_versions_devices_and_transports(run: Run) -> None:
    outcome = run("doctor", "--json")
    report = outcome.json
    assert (outcome.code, outcome.err) == (0, "")
    packages = {package["name"]: package for package in report["packages"]}
    assert packages["numpy"]["version"] and packages["torch"]["version"]
    assert set(packages) >= {
        "megatron-core",
        "megatron-bridge",
        "transformer-engine",
        "vllm",
        "nccl4py",
        "cuda-core",
        "cuda-bindings",
    }
    transports = {transport["name"]: transport for transport in report["transports"]}
    assert transports["gloo"]["ok"] and set(transports) >= {"direct", "nccl", "golden"}
    assert all(transport["reason"] for transport in transports.values() if not transport["ok"])
    assert report["cuda"]["available"] or report["cuda"]["reason"]
    text = run("doctor").out
    assert "gloo" in text and "validate" in text
    assert ("from a clone: pip install '.[fp8]'" in text) == (packages["transformer-engine"]["version"] is None)


def test_doctor_runs_in_a_checkout_that_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    report = run("doctor", "--json").json
    assert {package["wanted"] for package in report["packages"]} == {None}
    assert [row["command"] for row in report["commands"]] == [
        "plan, show, explain, simulate, advise",
        "report",
        "plan --traced",
        "validate",
        "store",
        "watch",
    ]


@pytest.mark.parametrize(
    ("argv", "forbidden"),
    [
        (["--version"], {"torch", "numpy", "rich", "megatron"}),
        (["plan", "--help"], {"torch", "numpy", "rich", "megatron"}),
        (["plan", *MOE], {"torch", "megatron", "transformers", "vllm", "plotly"}),
        (["simulate", *MOE, "--topology", "h200-8"], {"torch", "megatron", "transformers", "vllm", "plotly"}),
        (["advise", MOE[0], "--gpus-train", "2", "--gpus-gen", "2"], {"torch", "megatron", "vllm", "plotly"}),
        (["doctor"], {"plotly", "megatron.core", "megatron.bridge", "transformers", "vllm", "transformer_engine"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_do_not_import_what_they_do_not_need(argv: list[str], forbidden: set[str]) -> None:
    code = (
        "import sys; from mcore_reshard.cli.main import main; assert main(sys.argv[1:]) == 0\n"
        f"found = {sorted(forbidden)!r}\nfound = [name for name in found if name in sys.modules]\n"
        "assert not found, found"
    )
    done = python(code, *argv)
    assert done.returncode == 0, done.stderr


def without(package: str, *argvs: list[str]) -> subprocess.CompletedProcess[str]:
    """Commands in one process where `package` is not installed, up to the first that fails."""
    code = f"""
import sys
class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden)
from mcore_reshard.cli.main import main
sys.exit(next(filter(None, map(main, {argvs!r})), 0))
"""
    return python(code)


def test_doctor_reports_that_torch_is_missing() -> None:
    done = without("torch", ["doctor"])
    assert done.returncode == 0, done.stderr
    assert "torch is not installed" in done.stdout
    assert re.search(r"^watch +no  torch is not installed$", done.stdout, re.MULTILINE)


def test_only_report_needs_plotly(tmp_path: Path) -> None:
    plan, page = str(tmp_path / "plan.json"), str(tmp_path / "report.html")
    argvs = ["plan", *MOE, "--out", plan], ["show", plan], ["simulate", plan, "--topology", "h200-8"], ["doctor"]
    done = without("plotly", *argvs)
    assert done.returncode == 0, done
    assert re.search(r"^report +no +plotly is not installed", done.stdout, re.MULTILINE)
    lacking = without("plotly", ["report", plan, "-o", page])
    assert (lacking.returncode, lacking.stdout) == (1, "") and not Path(page).exists()
    assert re.fullmatch(r"mcore-reshard: plotly is not installed.*pip install '\.\[report\]'\n", lacking.stderr)


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("rich", ["doctor"]),
        ("numpy", ["plan", *MOE]),
        ("torch", ["watch", "127.0.0.1:1"]),
        ("torch", ["validate", *MOE]),
    ],
)
def test_a_package_that_is_missing_is_named_in_one_line_with_what_to_install(package: str, argv: list[str]) -> None:
    done = without(package, argv)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"mcore-reshard: {package} is not installed: pip install {package}\n"


def test_the_three_ways_to_start_it_agree() -> None:
    script = Path(sys.executable).with_name("mcore-reshard")
    ways = [[sys.executable, "-m", "mcore_reshard"], [sys.executable, "-m", "mcore_reshard.cli.main"]]
    ways += [[str(script)]] if script.exists() else []
    for way in ways:
        done = subprocess.run([*way, "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"mcore-reshard {__version__}\n")


def test_progress_shows_on_a_terminal_and_nowhere_else() -> None:
    command = [sys.executable, "-m", "mcore_reshard", "plan", *MOE]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert piped.stderr == "" and "\x1b" not in piped.stdout
    terminal, inside = pty.openpty()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=inside, timeout=60, env={**os.environ, "TERM": "xterm"}
    )
    os.close(inside)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "planning tiny-qwen3-moe" in shown
    assert done.stdout.decode().splitlines()[0] == piped.stdout.splitlines()[0]


def test_a_reader_that_leaves_early_is_no_error_message(plan_of: Any) -> None:
    command = f"{sys.executable} -m mcore_reshard show {plan_of(MOE)} --parameter '*' --json | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_help_of_every_command_shows_examples_that_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "show", "explain", "validate", "store", "doctor"):
        shown = run(command, "--help")
        assert shown.code == 0 and "exit codes:" in shown.out
        examples = re.findall(rf"^  mcore-reshard ({command}.*)$", shown.out, re.MULTILINE)
        assert examples
        for example in examples:
            # These take loaders or a trainer, or do not end; here their arguments only.
            if command in {"validate", "store"} or "--traced" in example:
                cli._parser().parse_args(shlex.split(example))
            else:
                assert run(*shlex.split(example)).code == 0
    assert "example" in run("--help").out
