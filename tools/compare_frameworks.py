"""Frameworks' own weight updates beside ours, on this machine's CPU.

.venv-sglang/bin/python tools/compare_frameworks.py sglang --out tools/results/compare-cpu.json

All paths run in turns in one run, in the same processes, with the same weights, and every byte is compared after each. The
run has a network namespace of its own, so that the loopback interface counts its bytes alone. This needs root.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests"), str(ROOT / "tests" / "integrations")]

from bench.results import line_by_line  # noqa: E402
from compare.measure import Referee  # noqa: E402
from compare.trainer import SIZES, write_checkpoints  # noqa: E402

from mcore_reshard.planner.layout.mesh import parse_train_mesh  # noqa: E402
from mcore_reshard.validation.engine.slices import GenSizes  # noqa: E402
from mcore_reshard.validation.processes import run_processes  # noqa: E402
from mcore_reshard.validation.trainer import te_standin  # noqa: E402
from mcore_reshard.validation.trainer.build import prepare  # noqa: E402

ISOLATED = "MCORE_RESHARD_COMPARE_ISOLATED"  # in the environment of what runs in the namespace
ADDRESS = "10.77.0.1"
LIMIT_S = 1200.0
FRAMEWORKS = ("sglang", "vllm", "areal", "verl", "nemo_rl")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--out", type=Path, required=True, help="the file of results; those of other frameworks stay")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--train", default="tp=2")
    parser.add_argument("--gen-tp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    if ISOLATED not in os.environ:
        os.environ |= {ISOLATED: "1", "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
        os.execvp("unshare", ["unshare", "-n", sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)])
    isolate_loopback()
    te_standin.install()  # before a framework imports Megatron
    module = importlib.import_module(f"compare.{arguments.framework}")
    module.prepare()
    prepare()
    add_result(arguments.out, measured(module, arguments))
    return 0


def measured(module: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """All paths of a framework, in turns."""
    mesh, gen, size = parse_train_mesh(arguments.train), GenSizes(tp=arguments.gen_tp), SIZES[arguments.size]
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        model_bytes = write_checkpoints(size, folder)
        referee = Referee(mesh.world, mesh.world + module.engine_processes(gen), folder)

        def take_part(index: int) -> dict[str, Any]:
            if index < mesh.world:
                part = module.train_part(index, folder, mesh, gen)
            else:
                part = module.engine_part(index - mesh.world, folder, mesh, gen)
            return referee.rounds(index, part, arguments.repeats)

        result = run_processes(referee.processes, take_part, timeout_s=LIMIT_S)[0]
    return {
        "framework": arguments.framework,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "hardware": hardware(),
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in module.PACKAGES},
        },
        "model": size.name,
        "model_bytes": model_bytes,
        "train": arguments.train,
        "gen": f"tp={gen.tp}",
        "paths": module.PATHS,
        **result,
    }


def isolate_loopback() -> None:
    """Bring up the namespace's only interface, and give it an address that frameworks find when they ask for the host's."""
    for command in (
        "link set lo up",
        f"address add {ADDRESS}/32 dev lo",
        f"route add default dev lo src {ADDRESS}",
    ):
        subprocess.run(["ip", *command.split()], check=True)


def hardware() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores"


def add_result(file: Path, result: dict[str, Any]) -> None:
    """Put a framework's result in the place of an earlier one."""
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    runs = [run for run in runs if run["framework"] != result["framework"]] + [result]
    runs.sort(key=lambda run: str(run["framework"]))
    file.write_text(line_by_line({"runs": runs}, "runs"))


if __name__ == "__main__":
    sys.exit(main())
