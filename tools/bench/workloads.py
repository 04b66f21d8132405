"""The workloads: a model, the meshes on both sides, and the methods that are measured on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_reshard.planner.layout.megatron import MegatronBuild
from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import parse_topology

_EXPERTS = {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN}
MODELS = {"moe": "qwen3-30b-a3b", "dense": "qwen3-4b"}


@dataclass(frozen=True, slots=True)
class Workload:
    """A row of the table below. In meshes `{n}` stands for the ranks of that side."""

    name: str
    what: str
    model: str  # key of MODELS
    train: str
    gen: str
    methods: tuple[str, ...]
    experts_only: bool = False
    train_ranks: int = 0  # 0: half of the ranks
    least_ranks: int = 2
    dtypes: tuple[str, str] = ("bf16", "bf16")  # of the trainer and the engine, as --train-dtype and --gen-dtype


WORKLOADS = (
    Workload(
        "moe-ep-tp",
        "the whole model, EP to TP",
        "moe",
        "ep={n},dp={n}",
        "tp={n}",
        (
            *("copy-engine", "nccl-alone", "direct", "direct:ctas=32", "direct:checksums=1"),
            "direct:engine_percent=0",
            *("nccl", "session:transport=direct", "isend-irecv", "megatron-core"),
        ),
    ),
    Workload(
        "moe-experts",
        "its expert weights alone, EP to TP",
        "moe",
        "ep={n},dp={n}",
        "tp={n}",
        ("direct", "nccl", "nemo-rl", "nemo-rl-golden", "nccl-m2n"),
        experts_only=True,
    ),
    Workload(
        "dense-tp-tp",
        "TP to TP",
        "dense",
        "tp={n}",
        "tp={n}",
        ("direct", "nccl", "isend-irecv", "megatron-core", "golden"),
    ),
    Workload("dense-dp-tp", "DP to TP", "dense", "dp={n}", "tp={n}", ("direct", "nccl", "isend-irecv")),
    Workload(
        "moe-replicas",
        "the whole model, EP to DP replicas",
        "moe",
        "ep={n},dp={n}",
        "tp=1,dp={n}",
        ("direct", "nccl"),
        least_ranks=4,
    ),
    Workload(
        "moe-fp8",
        "the whole model in block FP8, EP to TP",
        "moe",
        "ep={n},dp={n}",
        "tp={n}",
        ("direct", "nccl"),
        dtypes=("fp8", "fp8"),
    ),
    Workload(
        "moe-bf16-fp8",
        "the whole model, BF16 made block FP8 on the way, EP to TP",
        "moe",
        "ep={n},dp={n}",
        "tp={n}",
        ("direct", "nccl"),
        dtypes=("bf16", "fp8"),
    ),
    Workload(
        "moe-one-to-many",
        "the whole model, one trainer to replicas",
        "moe",
        "ep={n},dp={n}",
        "tp=1,dp={n}",
        ("direct", "nccl"),
        train_ranks=1,
        least_ranks=3,
    ),
    Workload(
        "dense-one-to-many",
        "one trainer to replicas",
        "dense",
        "dp={n}",
        "tp=1,dp={n}",
        ("direct", "nccl"),
        train_ranks=1,
        least_ranks=3,
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on so many ranks."""

    name: str
    what: str
    model: str
    layers: int  # 0: as many as the model has
    experts_only: bool
    train: str
    gen: str
    train_ranks: int
    gen_ranks: int
    dtypes: tuple[str, str] = ("bf16", "bf16")
    as_hosts: bool = False  # every rank is on a host of its own, as far as the plan knows
    isolated: bool = False  # each process sees its own GPU alone

    def plan(self, *, build: MegatronBuild = MegatronBuild(), train: str | None = None) -> Plan:  # noqa: B008
        """The plan of the case; `train` stands in for its training mesh, to describe a Megatron model that receives.

        Raises what `make_plan` raises, and ValueError where the meshes do not have the case's ranks.
        """
        config = load_config(self.model)
        if self.layers:
            config = {**config, "num_hidden_layers": self.layers}
        model_parameters = parameters_from_config(config)
        if self.experts_only:
            groups = tuple(group for group in model_parameters.groups if group.role in _EXPERTS)
            model_parameters = replace(model_parameters, groups=groups)
        meshes = parse_train_mesh(train or self.train), parse_gen_mesh(self.gen)
        if train is None and (meshes[0].world, meshes[1].world) != (self.train_ranks, self.gen_ranks):
            raise ValueError(
                f"{self.name}: {self.train} -> {self.gen} are {meshes[0].world} -> {meshes[1].world} ranks,"
                f" not {self.train_ranks} -> {self.gen_ranks}"
            )
        train_dtype, gen_dtype = self.dtypes
        plan = make_plan(
            model_parameters, *meshes, model=self.model, build=build, train_dtype=train_dtype, gen_dtype=gen_dtype
        )
        if self.as_hosts:
            plan = located(plan, parse_topology("h200-8,gpus=1", plan.train.world, plan.gen.world))
        return plan


def case_of(workload: Workload, ranks: int, *, train_ranks: int = 0, layers: int = 0, model: str = "") -> Case:
    """`workload` on `ranks` ranks, of which `train_ranks` train (0: what the workload says, else half)."""
    train = train_ranks or workload.train_ranks or ranks // 2
    return Case(
        workload.name,
        workload.what,
        model or MODELS[workload.model],
        layers,
        workload.experts_only,
        workload.train.format(n=train),
        workload.gen.format(n=ranks - train),
        train,
        ranks - train,
        workload.dtypes,
    )
