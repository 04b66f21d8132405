"""The rules of the house: which folder imports which, and what loads without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The imports of this package that a folder may make, besides itself and the folders in it. A trailing slash takes in the folders
# below: "kernels" is errors.py and host.py alone, "kernels/" is everything there.
ARROWS: dict[str, tuple[str, ...]] = {
    "planner": (),
    "planner/model": ("planner",),
    "planner/layout": ("planner", "planner/model/"),
    "planner/topology": ("planner",),
    "planner/plan": ("planner", "planner/model/", "planner/layout/", "planner/topology/"),
    "planner/proof": ("planner", "planner/model/", "planner/layout/", "planner/topology/", "planner/plan/"),
    "kernels": (),
    "kernels/copies": ("planner/", "kernels"),
    "kernels/cuda": ("planner/", "kernels", "kernels/copies/"),
    "kernels/rendezvous": ("planner", "kernels"),
    "kernels/transports": ("planner/", "kernels", "kernels/copies/", "kernels/cuda/", "kernels/rendezvous/"),
    "mcore_reshard": (),
    "mcore_reshard/__init__": (
        "planner/",
        "kernels/",
        "mcore_reshard/planning",
        "mcore_reshard/megatron",
        "mcore_reshard/dtensor",
        "mcore_reshard/vllm",
    ),
    "mcore_reshard/planning": ("planner/",),
    "mcore_reshard/megatron": ("mcore_reshard/trainers/",),
    "mcore_reshard/dtensor": ("mcore_reshard/trainers/",),
    "mcore_reshard/vllm": ("mcore_reshard/engines/",),
    "mcore_reshard/__main__": ("mcore_reshard/cli/",),
    "mcore_reshard/session": ("planner/", "kernels/"),
    "mcore_reshard/tracing": ("planner/", "kernels/"),
    "mcore_reshard/trainers": (
        "planner/",
        "kernels/",
        "mcore_reshard/planning",
        "mcore_reshard/session/",
        "mcore_reshard/tracing/",
    ),
    "mcore_reshard/engines": ("planner/", "kernels/", "mcore_reshard/session/", "mcore_reshard/tracing/"),
    "mcore_reshard/advise": (
        "planner/",
        "mcore_reshard/planning",
        "mcore_reshard/simulate/",
        "mcore_reshard/report/",
    ),
    "mcore_reshard/integrations": (
        "planner/",
        "kernels/",
        "mcore_reshard/planning",
        "mcore_reshard/megatron",
        "mcore_reshard/dtensor",
        "mcore_reshard/vllm",
        "mcore_reshard/session/",
        "mcore_reshard/trainers/",
        "mcore_reshard/engines/",
    ),
    "mcore_reshard/validation": (
        "planner/",
        "kernels/",
        "mcore_reshard/planning",
        "mcore_reshard/session/",
        "mcore_reshard/trainers/",
        "mcore_reshard/engines/",
        "mcore_reshard/tracing/",
    ),
    "mcore_reshard/simulate": ("planner/", "kernels/"),
    "mcore_reshard/report": ("planner/", "mcore_reshard/simulate/"),
    "mcore_reshard/cli": (
        "planner/",
        "kernels/",
        "mcore_reshard",
        "mcore_reshard/planning",
        "mcore_reshard/advise/",
        "mcore_reshard/session/",
        "mcore_reshard/simulate/",
        "mcore_reshard/report/",
        "mcore_reshard/validation/",
    ),
}


def files() -> list[Path]:
    return [file for top in ("planner", "kernels", "mcore_reshard") for file in sorted((ROOT / top).rglob("*.py"))]


def imports(source: str, package: list[str]) -> Iterator[str]:
    """The modules, or names in modules, that a file of `package` imports, anywhere in it, by their full names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def folder_of(module: str) -> str | None:
    """The folder of a module, or the module itself if it stands at the top of the package; None for other packages.

    mcore_reshard.kernels.copies.bind -> kernels/copies; mcore_reshard.planning -> mcore_reshard/planning
    """
    top, *parts = module.split(".")
    if top != "mcore_reshard":
        return None
    place = ROOT if parts and parts[0] in ("planner", "kernels") else ROOT / "mcore_reshard"
    for part in parts:
        if not (place / part).is_dir():
            break
        place /= part
    if place == ROOT / "mcore_reshard" and parts and (place / f"{parts[0]}.py").is_file():
        place /= parts[0]
    return str(place.relative_to(ROOT))


def allows(entry: str, folder: str) -> bool:
    return folder == entry.rstrip("/") or (entry.endswith("/") and folder.startswith(entry))


# The one import against the arrows: `Plan.prove`, late.
EXCEPTION = ("mcore_reshard.planner.plan.plan", "mcore_reshard.planner.proof.prove")


def violations(source: str, module: str) -> list[str]:
    """The folders that a module imports against the arrows. A folder in a folder follows the outer one's rule."""
    folder = folder_of(module) or "mcore_reshard"
    rule = max((entry for entry in ARROWS if allows(f"{entry}/", folder)), key=len)
    imported = [
        each for each in imports(source, module.split(".")[:-1]) if (module, each.rpartition(".")[0]) != EXCEPTION
    ]
    targets = {target for each in imported if (target := folder_of(each)) is not None}
    own = rule if rule in ("kernels", "mcore_reshard") else f"{rule}/"
    return sorted(target for target in targets if not any(allows(entry, target) for entry in (own, *ARROWS[rule])))


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    parts = file.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts if parts[0] == "mcore_reshard" else ("mcore_reshard", *parts))
    assert violations(file.read_text(), module) == []


@pytest.mark.parametrize(
    "folder",
    sorted({file.parent for file in files()} - {ROOT / "mcore_reshard"}),
    ids=lambda folder: str(folder.relative_to(ROOT)),
)
def test_each_folder_says_what_lives_there_and_what_it_may_import(folder: Path) -> None:
    summary, *rest = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").splitlines()
    assert summary.endswith(".")
    assert any("Imports " in line for line in (summary, *rest))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mcore_reshard.planner.__init__", "from mcore_reshard.kernels import errors"),
        ("mcore_reshard.planner.model.precision", "from mcore_reshard.planner.layout.mesh import GenMesh"),
        ("mcore_reshard.planner.model.precision", "from mcore_reshard.planning import plan"),
        ("mcore_reshard.planner.plan.routing", "from ..proof.prove import prove"),
        ("mcore_reshard.planner.layout.mesh", "import mcore_reshard.kernels.errors"),
        ("mcore_reshard.kernels.copies.bind", "from mcore_reshard.kernels.transports import gloo"),
        ("mcore_reshard.kernels.rendezvous.store", "def late():\n    from mcore_reshard.planner.plan.plan import Plan"),
        ("mcore_reshard.planning", "from mcore_reshard.session import endpoints"),
        ("mcore_reshard.session.agreement", "from mcore_reshard.trainers.megatron import model"),
        ("mcore_reshard.session.agreement", "from mcore_reshard import megatron"),
        ("mcore_reshard.session.agreement", "import mcore_reshard"),
        ("mcore_reshard.trainers.megatron.model", "from mcore_reshard.engines.vllm.model import gen_mesh_of"),
    ],
)
def test_an_import_against_the_arrows_is_seen(module: str, line: str) -> None:
    assert violations(line, module) != []


PURE = """
import sys
from dataclasses import replace
import mcore_reshard.planner.plan.make_plan, mcore_reshard.planner.proof.prove
import mcore_reshard.planning, mcore_reshard.planner.plan.make_schedule, mcore_reshard.planner.plan.transfers
import mcore_reshard.planner.model.families, mcore_reshard.planner.model.configs, mcore_reshard.planner.plan.plan_file
heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "megatron", "transformers", "vllm", "triton"}
sys.exit(f"imported {heavy}" if heavy else 0)
"""


def test_the_planner_imports_neither_torch_nor_megatron() -> None:
    subprocess.run([sys.executable, "-c", PURE], check=True)


def test_planner_and_kernels_are_not_importable_under_their_bare_names(tmp_path: Path) -> None:
    code = "import importlib.util as u; assert u.find_spec('planner') is None and u.find_spec('kernels') is None"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)
