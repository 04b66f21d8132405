"""What a user gave a command: a config, two meshes and dtypes, or a plan file. Everything wrong is reported at once."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_reshard.planner.configs import load_config
from mcore_reshard.planner.engines import DEFAULT_ENGINE, engine_named
from mcore_reshard.planner.families import ConfigError, catalogue_from_config
from mcore_reshard.planner.layout import Layout
from mcore_reshard.planner.megatron import MegatronLayout
from mcore_reshard.planner.mesh import GenMesh, MeshError, TrainMesh, parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.parameters import Catalogue
from mcore_reshard.planner.plan import Policy
from mcore_reshard.planner.plan_file import FORMAT

_DTYPES = {"bf16": "bfloat16"}


class InputError(ValueError):
    """What was asked for cannot be done; `problems` lists every reason, `remedy` says what to do."""

    def __init__(self, problems: Sequence[str], remedy: str = "") -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            lines = [self.problems[0]]
        else:
            lines = [f"{len(self.problems)} problems", *(f"  - {problem}" for problem in self.problems)]
        super().__init__("\n".join([*lines, remedy] if remedy else lines))


@dataclass(frozen=True, slots=True)
class Request:
    """A model and two meshes that fit it."""

    model: str
    config: dict[str, Any]
    catalogue: Catalogue
    train: TrainMesh
    gen: GenMesh
    policy: Policy
    notes: tuple[str, ...] = ()


def read_request(
    source: str, train: str, gen: str, policy: Policy, train_dtype: str | None = None, gen_dtype: str | None = None
) -> Request:
    """Read a config (file, folder or built-in name) and both meshes, and check that the model can be cut this way.

    Raises InputError with every violation of the training mesh, the generation mesh, the config and the dtypes.
    """
    training: list[str] = []
    generation: list[str] = []
    others: list[str] = []
    remedy = ""
    train_mesh, gen_mesh = _train_mesh(train, training), _gen_mesh(gen, generation)
    dtypes = _dtypes(train_dtype, gen_dtype, others)
    config: dict[str, Any] = {}
    catalogue = None
    try:
        config = load_config(source)
        catalogue = catalogue_from_config(config)
    except ConfigError as error:
        others += [f"{error.subject}: {problem}" for problem in error.problems]
        remedy = error.remedy
    if catalogue is not None and dtypes is not None:
        config, catalogue = _with_dtype(config, catalogue, dtypes, others)
    if catalogue is not None:
        training += _train_misfits(catalogue, train_mesh, train)
        generation += _gen_misfits(catalogue, gen_mesh, gen)
    problems = training + generation + others
    if problems or catalogue is None or train_mesh is None or gen_mesh is None:
        raise InputError(problems, remedy)
    return Request(model_name(source), config, catalogue, train_mesh, gen_mesh, policy, _notes(catalogue))


def model_name(source: str) -> str:
    """What a plan calls the model: a built-in name, or the name of the folder or file that the config is in.

    Never a path: the digest covers the name, and plans of one model must agree between machines.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path.resolve().parent.name if path.name == "config.json" else path.stem
    return path.resolve().name if (path / "config.json").is_file() else source


def is_plan_file(source: str) -> bool:
    """Whether this is a file that says it is a plan, of any version and in any state."""
    path = Path(source)
    if not path.is_file():
        return False
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def _train_mesh(text: str, problems: list[str]) -> TrainMesh | None:
    try:
        return parse_train_mesh(text)
    except MeshError as error:
        problems += [f"training: {violation}" for violation in error.violations]
        return None


def _gen_mesh(text: str, problems: list[str]) -> GenMesh | None:
    try:
        return parse_gen_mesh(text)
    except MeshError as error:
        problems += [f"generation: {violation}" for violation in error.violations]
        return None


def _train_misfits(catalogue: Catalogue, mesh: TrainMesh | None, text: str) -> list[str]:
    """Why the model does not fit the training mesh.

    Where the mesh is impossible in itself, what would be wrong on any mesh with its degrees: rules never look at dp, so
    there is one with enough replicas; its pipeline counts only if that is not the impossible part.
    """
    if mesh is None and (axes := _stated_axes(text)) is not None:
        enough = TrainMesh(tp=axes["tp"], ep=axes["ep"], etp=axes["etp"], dp=axes["ep"] * axes["etp"])
        layers = tuple(
            int(number) for number in re.findall(r"[0-9]+", (re.findall(r"layers=([0-9+]+)", text) or [""])[0])
        )
        try:
            mesh = replace(enough, pp=axes["pp"], vpp=axes["vpp"], layers=layers)
        except MeshError:
            mesh = enough
    return [] if mesh is None else MegatronLayout(catalogue, mesh).violations()


def _engine_layout(catalogue: Catalogue, mesh: GenMesh) -> Layout:
    return engine_named(DEFAULT_ENGINE).layout(catalogue, mesh)


def _gen_misfits(catalogue: Catalogue, mesh: GenMesh | None, text: str) -> list[str]:
    """Why the model does not fit the generation mesh; where its ep is impossible, what is wrong with any other ep."""
    if mesh is not None:
        return _engine_layout(catalogue, mesh).violations()
    if (axes := _stated_axes(text)) is None:
        return []
    sizes = {axis: axes[axis] for axis in ("tp", "pp", "dp")}
    without, with_ep = (
        _engine_layout(catalogue, GenMesh(**sizes, ep=ep)).violations() for ep in (1, axes["tp"] * axes["dp"])
    )
    return [violation for violation in without if violation in with_ep]


def _stated_axes(text: str) -> dict[str, int] | None:
    """The degrees that a mesh states, 1 for the rest; None where one is below 1 and nothing follows from it."""
    stated = {axis: int(size) for axis, size in re.findall(r"([a-z]+)=(-?[0-9]+)", text)}
    return (
        defaultdict(lambda: 1, stated) if all(size > 0 for axis, size in stated.items() if axis != "layers") else None
    )


def _dtypes(train: str | None, gen: str | None, problems: list[str]) -> tuple[str | None, str | None] | None:
    """The dtypes asked for, in catalogue names, None for one that was not; None where one cannot be had."""
    found = []
    for side, value in (("training", train), ("generation", gen)):
        if value is None or value in _DTYPES:
            found.append(_DTYPES[value] if value else None)
        elif value == "fp8":
            problems.append(f"{side}: fp8 is not supported yet, this release plans bf16 weights")
        else:
            problems.append(f"{side}: unknown dtype {value!r}, known: {', '.join(_DTYPES)}")
    return (found[0], found[1]) if len(found) == 2 else None


def _with_dtype(
    config: dict[str, Any], catalogue: Catalogue, dtypes: tuple[str | None, str | None], problems: list[str]
) -> tuple[dict[str, Any], Catalogue]:
    """The model in the dtype that both sides hold; the config's own where neither side says otherwise."""
    train, gen = (dtype or catalogue.dtype for dtype in dtypes)
    if train != gen:
        problems.append(
            f"the trainer would hold {train} and the engine {gen}: no cast is planned, give both --train-dtype and"
            f" --gen-dtype (the config says {catalogue.dtype})"
        )
        return config, catalogue
    if train == catalogue.dtype:
        return config, catalogue
    config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": train}
    return config, catalogue_from_config(config)


def _notes(catalogue: Catalogue) -> tuple[str, ...]:
    if catalogue.quantization is None:
        return ()
    return (
        f"the checkpoint is quantised ({catalogue.quantization.method}), the plan moves {catalogue.dtype} weights:"
        " the engine must hold them unquantised",
    )
