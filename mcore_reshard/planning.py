"""Read a request for a plan, and report everything wrong with it at once. Imports numpy and the planner alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar, get_args

from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE, Engine, UnknownEngineError, engine_named
from mcore_reshard.planner.layout.megatron import MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh, parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.config_reader import ConfigReader, read_quantization
from mcore_reshard.planner.model.configs import find_config, load_config
from mcore_reshard.planner.model.families import FAMILIES, ConfigError, parameters_from_config
from mcore_reshard.planner.model.parameters import ModelParameters
from mcore_reshard.planner.model.precision import (
    BLOCK_FP8,
    CASTS,
    PRECISIONS,
    Format,
    Precision,
    PrecisionError,
    precision_of,
    with_format,
)
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.plan.plan_file import FORMAT

ConfigSource = str | PathLike[str] | Mapping[str, Any]
_Mesh = TypeVar("_Mesh", TrainMesh, GenMesh)


class InputError(ValueError):
    """The request cannot be met. `problems` lists every reason; `remedy` says what to do."""

    def __init__(self, problems: Sequence[str], remedy: str = "") -> None:
        self.problems = tuple(problems)
        self.remedy = remedy
        lines = list(problems)
        if len(problems) != 1:
            lines = [f"{len(problems)} problems", *(f"  - {problem}" for problem in problems)]
        super().__init__("\n".join([*lines, remedy] if remedy else lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return InputError, (self.problems, self.remedy), vars(self)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model, two meshes that it fits, and the dtype of each side. `notes` are assumptions that a user should know."""

    model: str
    config: dict[str, Any]
    model_parameters: ModelParameters
    train: TrainMesh
    gen: GenMesh
    policy: Policy = "exact"
    engine: str = DEFAULT_ENGINE
    train_dtype: str | None = None  # None: the dtype of the model's parameters
    gen_dtype: str | None = None
    notes: tuple[str, ...] = ()

    def plan(self) -> Plan:
        """Make the plan; it is not proven yet."""
        return make_plan(
            self.model_parameters,
            self.train,
            self.gen,
            model=self.model,
            policy=self.policy,
            engine=self.engine,
            train_dtype=self.train_dtype,
            gen_dtype=self.gen_dtype,
        )


@dataclass(frozen=True, slots=True)
class RefitRequest:
    """A model, and the mesh of its engine. `has_rules`: the planner has layout rules for the model's family and the engine."""

    model: str
    config: dict[str, Any]
    gen: GenMesh
    has_rules: bool


def plan(
    config: ConfigSource,
    train: str | TrainMesh,
    gen: str | GenMesh,
    *,
    train_dtype: str | None = None,
    gen_dtype: str | None = None,
    policy: Policy = "exact",
    engine: str = DEFAULT_ENGINE,
    model: str | None = None,
) -> Plan:
    """Plan the refit of a model from a training mesh to the mesh of an engine. Imports neither torch nor Megatron.

    `config` is a built-in name, a config.json, a folder with one, its content as a dict, or a transformers config. Meshes
    are texts, as in "tp=2,pp=2,ep=4,dp=2", or records. The dtypes say what either side holds: bf16, fp32, fp8 or mxfp8; None: the
    config's. `model` is the plan's name for the model, by default that of `config`.
    Raises InputError with every violation of the meshes, the config and the dtypes.
    """
    request = read_request(config, train, gen, policy, train_dtype, gen_dtype, engine)
    return (request if model is None else replace(request, model=model)).plan()


def read_request(
    config: ConfigSource,
    train: str | TrainMesh,
    gen: str | GenMesh,
    policy: Policy = "exact",
    train_dtype: str | None = None,
    gen_dtype: str | None = None,
    engine: str = DEFAULT_ENGINE,
) -> PlanRequest:
    """Read the arguments of `plan`, and check that the model can be cut this way. Raises InputError as `plan` does."""
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if others := _wrong_types(config, train, gen, train_dtype=train_dtype, gen_dtype=gen_dtype, engine=engine):
        raise InputError(others)
    if policy not in get_args(Policy):
        others.append(f"unknown policy {policy!r}, known: {', '.join(get_args(Policy))}")
    fields: dict[str, Any] = {}
    remedy = ""
    parameters: ModelParameters | None = None
    precisions: tuple[Precision, Precision] | None = None
    rules: Engine | None = None
    try:
        fields, parameters = _read_config(config)
        precisions = _precisions(parameters, train_dtype, gen_dtype, others)
    except ConfigError as error:
        others += [f"{error.subject}: {problem}" for problem in error.problems]
        remedy = error.remedy
    try:
        rules = engine_named(engine)
    except UnknownEngineError as error:
        others.append(str(error))
    if parameters is not None and precisions and precisions[0] == precisions[1] and precisions[0].format is None:
        dtype, train_dtype, gen_dtype = precisions[0].dtype, None, None
        if dtype != parameters.dtype:
            fields = {name: value for name, value in fields.items() if name != "torch_dtype"} | {"dtype": dtype}
            parameters = parameters_from_config(fields)

    train_mesh, training = _parse(parse_train_mesh, train, "training")
    gen_mesh, generation = _parse(parse_gen_mesh, gen, "generation")
    if parameters is not None:
        training += _train_misfits(parameters, train_mesh, str(train))
    if parameters is not None and rules is not None:
        generation += _gen_misfits(parameters, gen_mesh, str(gen), rules)
        if precisions and precisions[1].format and gen_mesh:
            generation += rules.misquantized(with_format(parameters, precisions[1].format))

    problems = [*training, *generation, *others]
    if problems or not (parameters and train_mesh and gen_mesh and precisions):
        raise InputError(problems, remedy)
    name, notes = model_name(config), _notes(parameters, *precisions)
    return PlanRequest(name, fields, parameters, train_mesh, gen_mesh, policy, engine, train_dtype, gen_dtype, notes)


def read_refit_request(config: ConfigSource, gen: str | GenMesh, policy: str, engine: str) -> RefitRequest:
    """Read what a live trainer is asked for: its own mesh is read off the model. Raises InputError as `plan` does.

    A model of a family without layout rules passes here, and every model for an engine without: traces plan these.
    """
    config = config.to_dict() if hasattr(config, "to_dict") else config
    fields: dict[str, Any] = {}
    with suppress(ConfigError, TypeError, ValueError):
        fields = dict(config) if isinstance(config, Mapping) else load_config(fspath(config))
    family = fields.get("model_type")
    has_rules = True
    with suppress(UnknownEngineError, TypeError, AttributeError):  # wrong names are refused below
        has_rules = engine_named(engine).has_rules
    if not isinstance(family, str) or (family in FAMILIES and has_rules):
        request = read_request(config, TrainMesh(), gen, policy, engine=engine)  # type: ignore[arg-type]
        return RefitRequest(request.model, request.config, request.gen, True)
    if problems := _wrong_types(config, TrainMesh(), gen, engine=engine):
        raise InputError(problems)
    if policy not in get_args(Policy):
        problems.append(f"unknown policy {policy!r}, known: {', '.join(get_args(Policy))}")
    try:
        engine_named(engine)
    except UnknownEngineError as error:
        problems.append(str(error))
    mesh, violations = _parse(parse_gen_mesh, gen, "generation")
    if problems + violations or mesh is None:
        raise InputError(problems + violations)
    return RefitRequest(model_name(config), fields, mesh, False)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A model whose layouts are read off the loaders of trainer and engine, and two meshes."""

    model: str
    config: dict[str, Any]
    train: TrainMesh
    gen: GenMesh
    engine: str = DEFAULT_ENGINE
    form: Format | None = None  # of the engine's quantized matrices
    quantized_trainer: bool = False  # the trainer's have it too

    @property
    def trainer_config(self) -> dict[str, Any]:
        """The config as the trainer takes it: Megatron-Bridge loads unquantized checkpoints."""
        return {name: value for name, value in self.config.items() if name != "quantization_config"}

    @property
    def engine_config(self) -> dict[str, Any]:
        """The config that the engine is built by."""
        return self.trainer_config if self.form is None else self.config


def traced_format(config: Mapping[str, Any], gen_dtype: str | None) -> Format | None:
    """The format of an engine's quantized matrices in a plan from traces; None for an unquantized engine.

    Nothing is known of the model, so its quantization_config must say what the engine quantizes. Raises InputError for
    what no plan from traces knows.
    """
    if gen_dtype in (None, "bf16"):
        return None
    if gen_dtype != "fp8":
        raise InputError([f"a plan from traces has the engine in bf16 or fp8, not in {gen_dtype}"])
    reader = ConfigReader(config)
    quantization = read_quantization(reader)
    if problems := reader.problems():
        raise InputError(problems)
    if quantization is None:
        raise InputError(
            ["fp8: give the config the engine's quantization_config, which a plan from traces takes as it is"]
        )
    if quantization.method != BLOCK_FP8.method or quantization.block is None:
        what = (
            f"quant_method {quantization.method!r}" if quantization.block else f"{quantization.method!r} without blocks"
        )
        raise InputError(
            [
                f"fp8: a plan from traces knows FP8 in blocks (weight_block_size), and the quantization_config is of {what}"
            ]
        )
    return replace(BLOCK_FP8, block=quantization.block)


def read_traced_request(
    config: ConfigSource,
    train: str | TrainMesh,
    gen: str | GenMesh,
    policy: str = "exact",
    train_dtype: str | None = None,
    gen_dtype: str | None = None,
    engine: str = DEFAULT_ENGINE,
) -> TracedRequest:
    """Read the arguments of a plan from traces. Whether the model fits the meshes is known once the loaders have run.

    Raises InputError with every violation of the meshes, the config and the options.
    """
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if others := _wrong_types(config, train, gen, train_dtype=train_dtype, gen_dtype=gen_dtype, engine=engine):
        raise InputError(others)
    if policy != "exact":
        others.append(f"policy {policy!r} is for layout rules: a plan from traces takes the layouts as they are")
    if train_dtype not in (None, "bf16") and (train_dtype, gen_dtype) != ("fp8", "fp8"):
        others.append(
            f"a plan from traces has the trainer in bf16, or both sides in fp8, not the trainer in {train_dtype}"
        )
    fields: dict[str, Any] = {}
    form: Format | None = None
    remedy = ""
    try:
        engine_named(engine)
        fields = _read_fields(config)[1]
        form = traced_format(fields, gen_dtype)
    except UnknownEngineError as error:
        others.append(str(error))
    except ConfigError as error:
        others += [f"{error.subject}: {problem}" for problem in error.problems]
        remedy = error.remedy
    except InputError as error:
        others += error.problems
    train_mesh, training = _parse(parse_train_mesh, train, "training")
    gen_mesh, generation = _parse(parse_gen_mesh, gen, "generation")
    problems = [*training, *generation, *others]
    if problems or not (train_mesh and gen_mesh):
        raise InputError(problems, remedy)
    return TracedRequest(model_name(config), fields, train_mesh, gen_mesh, engine, form, train_dtype == "fp8")


def _wrong_types(config: Any, train: Any, gen: Any, **names: Any) -> list[str]:
    """Problems of a caller in Python who gave something else than a config, a mesh or a name."""
    wrong = [
        f"{argument} is a {type(name).__name__}: give a text"
        for argument, name in names.items()
        if not isinstance(name, str) and (name is not None or argument == "engine")
    ]
    if not isinstance(config, (str, PathLike, Mapping)):
        wrong.append(f"the config is a {type(config).__name__}: give a name, a path, a dict or a transformers config")
    for side, mesh, kind, example in (("train", train, TrainMesh, "tp=2,pp=2"), ("gen", gen, GenMesh, "tp=4")):
        if not isinstance(mesh, (str, kind)):
            wrong.append(f"{side} is a {type(mesh).__name__}: give a text, as in {example!r}, or a {kind.__name__}")
    return wrong


def model_name(config: ConfigSource) -> str:
    """The model's name in a plan: a built-in name, that of the config's folder, file or repository, or its model_type.

    It is never a path: the digest covers the name, and plans of one model must agree between machines.
    """
    if isinstance(config, Mapping):
        return Path(config.get("_name_or_path") or config.get("model_type", "")).name
    path = Path(config).expanduser()
    if path.is_file():
        return path.resolve().parent.name if path.name == "config.json" else path.stem
    return path.resolve().name if (path / "config.json").is_file() else str(config)


def _read_config(config: ConfigSource) -> tuple[dict[str, Any], ModelParameters]:
    """The config's fields and the model's parameters. Raises ConfigError, its subject the file that was read."""
    subject, fields = _read_fields(config)
    try:
        return fields, parameters_from_config(fields)
    except ConfigError as error:
        raise ConfigError(subject, error.problems, error.remedy) from error


def _read_fields(config: ConfigSource) -> tuple[str, dict[str, Any]]:
    """The file that is read, and its fields. Raises ConfigError."""
    subject = "config" if isinstance(config, Mapping) else str(find_config(fspath(config)))
    fields = dict(config) if isinstance(config, Mapping) else load_config(subject)
    if fields.get("format") == FORMAT:
        remedy = f"See what it does with `mcore-reshard show {config}`; `explain` and `validate` take plans too."
        raise ConfigError(str(config), ["this is a plan, where the config of a model is wanted"], remedy)
    return subject, fields


def _parse(parse: Callable[[str], _Mesh], mesh: str | _Mesh, side: str) -> tuple[_Mesh | None, list[str]]:
    """The mesh that a text states; None, and every reason, where it is impossible."""
    if not isinstance(mesh, str):
        return mesh, []
    try:
        return parse(mesh), []
    except MeshError as error:
        return None, [f"{side}: {violation}" for violation in error.violations]


def _train_misfits(parameters: ModelParameters, mesh: TrainMesh | None, text: str) -> list[str]:
    """Why the model does not fit the training mesh.

    For an impossible mesh the check takes one with enough replicas, and with all its degrees that go together: no layout
    rule looks at dp.
    """
    if mesh is None and (stated := _stated_degrees(text)):
        axes, layers = stated
        with suppress(MeshError):
            mesh = TrainMesh(tp=axes["tp"], ep=axes["ep"], etp=axes["etp"], dp=axes["ep"] * axes["etp"])
            mesh = replace(mesh, pp=axes["pp"], vpp=axes["vpp"], layers=layers)
    return [] if mesh is None else MegatronLayout(parameters, mesh).violations()


def _gen_misfits(parameters: ModelParameters, mesh: GenMesh | None, text: str, engine: Engine) -> list[str]:
    """Why the model does not fit the generation mesh. For an impossible ep: the faults of both possible ones."""
    if mesh is not None:
        return engine.layout(parameters, mesh).violations()
    if (stated := _stated_degrees(text)) is None:
        return []
    axes, layers = stated
    with suppress(MeshError):
        mesh = GenMesh(tp=axes["tp"], pp=axes["pp"], dp=axes["dp"])
        mesh = replace(mesh, layers=layers)
    if mesh is None:
        return []
    with_ep = engine.layout(parameters, replace(mesh, ep=mesh.tp * mesh.dp)).violations()
    return [violation for violation in engine.layout(parameters, mesh).violations() if violation in with_ep]


def _stated_degrees(text: str) -> tuple[dict[str, int], tuple[int, ...]] | None:
    """The degrees that a mesh states, 1 for the rest, and its layers; None where a degree is below 1, or far too large."""
    if re.search("[0-9]{21}", text):
        return None
    text = re.sub(r",(?=[0-9])", "+", text)  # "layers=2,2" is refused, and read as it was meant
    stated = dict(re.findall(r"([a-z]+)=(-?[0-9]+(?:\+[0-9]+)*)", text))
    layers = tuple(map(int, re.findall("-?[0-9]+", stated.pop("layers", ""))))
    axes = {axis: int(size.partition("+")[0]) for axis, size in stated.items()}
    return (defaultdict(lambda: 1, axes), layers) if all(size > 0 for size in axes.values()) else None


def _precisions(
    parameters: ModelParameters, train_dtype: str | None, gen_dtype: str | None, problems: list[str]
) -> tuple[Precision, Precision] | None:
    """The precisions of trainer and engine; None where one is unknown or no cast leads from the first to the second."""
    precisions = []
    for side, name in (("training", train_dtype), ("generation", gen_dtype)):
        try:
            precisions.append(precision_of(name, parameters))
        except PrecisionError:
            problems.append(f"{side}: unknown dtype {name!r}, known: {', '.join(PRECISIONS)}")
    if len(precisions) < 2:
        return None
    src, dst = precisions
    if src.dtype == dst.dtype or (src.dtype, dst.dtype) in CASTS:
        return src, dst
    problems.append(
        f"the trainer would hold {src.dtype} and the engine {dst.dtype}, and no cast leads from one to the other:"
        f" give a dtype for train and one for gen (the config says {parameters.dtype})"
    )
    return None


def _notes(parameters: ModelParameters, src: Precision, dst: Precision) -> tuple[str, ...]:
    stated = parameters.quantization
    if dst.format is None and src.format is None and stated is not None:
        moved = f"the checkpoint is quantized ({stated.method}), the plan moves {dst.dtype} weights"
        remedy = "For an engine or a trainer in FP8 give --gen-dtype or --train-dtype"
        return (f"{moved}: the engine must hold them unquantized. {remedy}",)
    if dst.format is None or (stated is not None and stated.method == dst.format.method):
        return ()
    other = "" if stated is None else f" ({stated.method} says nothing of it, and its list of modules is not read)"
    block = "x".join(map(str, dst.format.block or ()))
    return (
        f"the config has no quantization_config for {dst.format.name}{other}: blocks of {block} are assumed in every"
        " linear layer but routers and lm_head, and the engine needs a config that says so",
    )
