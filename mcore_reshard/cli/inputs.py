"""What a user gave a command: a config, two meshes and dtypes, or a plan file. Everything wrong is reported at once."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE, engine_named
from mcore_reshard.planner.layout.megatron import MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh, parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.layout.partitions import Layout
from mcore_reshard.planner.model.configs import find_config, load_config
from mcore_reshard.planner.model.families import ConfigError, parameters_from_config
from mcore_reshard.planner.model.parameters import ModelParameters
from mcore_reshard.planner.model.precision import CASTS, PRECISIONS, Precision, PrecisionError, in_format, precision_of
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.plan.plan_file import FORMAT, PlanFileError, load_plan


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
    """A model, two meshes that fit it, and what either side holds."""

    model: str
    config: dict[str, Any]
    model_parameters: ModelParameters
    train: TrainMesh
    gen: GenMesh
    policy: Policy
    train_dtype: str | None = None  # as `make_plan` wants them; None: the model's parameters's dtype
    gen_dtype: str | None = None
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
    precisions: tuple[Precision, Precision] | None = None
    config: dict[str, Any] = {}
    model_parameters, subject = None, source
    try:
        subject = str(find_config(source))
        config = load_config(subject)
        if config.get("format") == FORMAT:
            remedy = f"See what it does with `mcore-reshard show {source}`; `explain` and `validate` take plans too."
            raise ConfigError(source, ["this is a plan, where the config of a model is wanted"], remedy)
        model_parameters = parameters_from_config(config)
    except ConfigError as error:
        others += [f"{subject}: {problem}" for problem in error.problems]
        remedy = error.remedy
    if model_parameters is not None:
        precisions = _precisions(model_parameters, train_dtype, gen_dtype, others)
        if precisions is not None and precisions[0] == precisions[1] and precisions[0].format is None:
            config, model_parameters = _in_dtype(config, model_parameters, precisions[0].dtype)
            train_dtype = gen_dtype = None
        training += _train_misfits(model_parameters, train_mesh, train)
        generation += _gen_misfits(model_parameters, gen_mesh, gen)
        if precisions is not None and precisions[1].format is not None and gen_mesh is not None:
            quantized = in_format(model_parameters, precisions[1].format)
            generation += _engine_layout(quantized, gen_mesh).misquantized()
    problems = training + generation + others
    if problems or model_parameters is None or train_mesh is None or gen_mesh is None or precisions is None:
        raise InputError(problems, remedy)
    notes = _notes(model_parameters, *precisions)
    return Request(
        model_name(source), config, model_parameters, train_mesh, gen_mesh, policy, train_dtype, gen_dtype, notes
    )


def read_plan(source: str) -> Plan:
    """The plan in a file. Raises InputError where `source` is the config of a model, PlanFileError for all else."""
    try:
        return load_plan(source)
    except PlanFileError:
        if not _is_config(source):
            raise
        raise InputError(
            [f"{source}: this is the config of a model, where a plan is wanted"],
            f"Make a plan of it with `mcore-reshard plan {source} --train ... --gen ... --out plan.json`.",
        ) from None


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


def _is_config(source: str) -> bool:
    try:
        return "model_type" in load_config(source)
    except ConfigError:
        return False


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


def _train_misfits(model_parameters: ModelParameters, mesh: TrainMesh | None, text: str) -> list[str]:
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
    return [] if mesh is None else MegatronLayout(model_parameters, mesh).violations()


def _engine_layout(model_parameters: ModelParameters, mesh: GenMesh) -> Layout:
    return engine_named(DEFAULT_ENGINE).layout(model_parameters, mesh)


def _gen_misfits(model_parameters: ModelParameters, mesh: GenMesh | None, text: str) -> list[str]:
    """Why the model does not fit the generation mesh; where its ep is impossible, what is wrong with any other ep."""
    if mesh is not None:
        return _engine_layout(model_parameters, mesh).violations()
    if (axes := _stated_axes(text)) is None:
        return []
    sizes = {axis: axes[axis] for axis in ("tp", "pp", "dp")}
    without, with_ep = (
        _engine_layout(model_parameters, GenMesh(**sizes, ep=ep)).violations() for ep in (1, axes["tp"] * axes["dp"])
    )
    return [violation for violation in without if violation in with_ep]


def _stated_axes(text: str) -> dict[str, int] | None:
    """The degrees that a mesh states, 1 for the rest; None where one is below 1 and nothing follows from it."""
    stated = {axis: int(size) for axis, size in re.findall(r"([a-z]+)=(-?[0-9]+)", text)}
    return (
        defaultdict(lambda: 1, stated) if all(size > 0 for axis, size in stated.items() if axis != "layers") else None
    )


def _precisions(
    model_parameters: ModelParameters, train: str | None, gen: str | None, problems: list[str]
) -> tuple[Precision, Precision] | None:
    """What both sides would hold; None where one cannot be had, or nothing turns one into the other."""
    found = []
    for side, name in (("training", train), ("generation", gen)):
        try:
            found.append(precision_of(name, model_parameters))
        except PrecisionError:
            problems.append(f"{side}: unknown dtype {name!r}, known: {', '.join(PRECISIONS)}")
    if len(found) < 2:
        return None
    held, wanted = found
    if held.dtype != wanted.dtype and (held.dtype, wanted.dtype) not in CASTS:
        problems.append(
            f"the trainer would hold {held.dtype} and the engine {wanted.dtype}, which nothing casts: give both"
            f" --train-dtype and --gen-dtype (the config says {model_parameters.dtype})"
        )
        return None
    return held, wanted


def _in_dtype(
    config: dict[str, Any], model_parameters: ModelParameters, dtype: str
) -> tuple[dict[str, Any], ModelParameters]:
    """The model in a dtype that both sides hold."""
    if dtype == model_parameters.dtype:
        return config, model_parameters
    config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": dtype}
    return config, parameters_from_config(config)


def _notes(model_parameters: ModelParameters, held: Precision, wanted: Precision) -> tuple[str, ...]:
    stated = model_parameters.quantization
    if wanted.format is None and held.format is None and stated is not None:
        return (
            f"the checkpoint is quantized ({stated.method}), the plan moves {wanted.dtype} weights: the engine must hold"
            " them unquantized; --gen-dtype and --train-dtype say otherwise",
        )
    if wanted.format is None or (stated is not None and stated.method == wanted.format.method):
        return ()
    found = "" if stated is None else f" ({stated.method} says nothing of it, and its list of modules is not read)"
    block = "x".join(map(str, wanted.format.block or ()))
    return (
        f"the config has no quantization_config for {wanted.format.name}{found}: blocks of {block} are assumed in every"
        " linear layer but routers and lm_head, and the engine needs a config that says so",
    )
