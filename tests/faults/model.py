"""A tiny model whose bytes tell their version: padding, tensors on the misc route, and a whole-tensor form for golden."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import synthetic
import torch
from attack.mutants.edits import sealed, transfer_groups_of, without_transfers
from helpers.plans import Case

from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.plan.replicas import schedule_for
from mcore_reshard.planner.plan.schedule import Schedule, World

VERSIONS = range(1, 80)
_UNTOUCHED = 0xEE
_GOLDEN = tuple(f"model.part{number}.weight" for number in range(6))
_SHAPE = (48, 64)


@cache
def plan_of(replica_ranks: int, train_ranks: int = 2, replicas: int = 2) -> Plan:
    """A padded vocabulary; lm_head is on the misc route."""
    case = Case("tiny-llama", f"tp={train_ranks}", f"tp={replica_ranks},dp={replicas}", changes=(("vocab_size", 250),))
    plan = case.plan()
    heads = transfer_groups_of(plan, Role.LM_HEAD)
    (group,) = {plan.transfer_groups[i].group for i in heads}
    return sealed(replace(without_transfers(plan, heads), misc=(UnplannedGroup(group, "a test"),)))


def misc_names(plan: Plan) -> tuple[str, ...]:
    return schedule_for(plan, "train", 0, range(plan.gen.dp)).misc


def whole_tensors(names: Iterable[str], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What a trainer exports."""
    for name in names:
        number = zlib.crc32(f"{name} {version}".encode())
        yield name, torch.arange(number % 1000, number % 1000 + _SHAPE[0] * _SHAPE[1]).float().reshape(_SHAPE)


@dataclass
class Weights:
    """One rank's tensors. A rank of the engine has, beside those that are bound, those that arrive by name."""

    plan: Plan
    world: World
    rank: int
    golden: bool = False
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.golden:
            self.tensors = _filled(self.schedule, _UNTOUCHED, self.device)
        if self.world == "gen":
            self.loaded = {name: torch.zeros(_SHAPE) for name in self.names}

    @cached_property
    def schedule(self) -> Schedule:
        own = self.rank // (self.plan.gen.tp * self.plan.gen.pp)
        return schedule_for(
            self.plan, self.world, self.rank, range(self.plan.gen.dp) if self.world == "train" else (own,)
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of what moves by name."""
        return _GOLDEN if self.golden else misc_names(self.plan)

    def step(self, version: int) -> None:
        """Training: take the weights of a version."""
        for name, tensor in self._content(version).items():
            self.tensors[name].copy_(tensor)

    def export(self, names: Sequence[str] | None, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        return whole_tensors(self.names if names is None else names, version)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.loaded[name].copy_(tensor)

    def held(self) -> int | None:
        """The version whose bytes the engine holds: 0 for those that it began with, None for no single one."""
        now = _digest(self.tensors, self.loaded)
        return next((version for version in (0, *VERSIONS) if self._digest_of(version) == now), None)

    def _digest_of(self, version: int) -> int:
        if not hasattr(self, "_digests"):
            self._digests = {}
        if version not in self._digests:
            if version == 0:
                blank = Weights(self.plan, self.world, self.rank, self.golden, self.device)
                content, loaded = blank.tensors, blank.loaded
            else:
                content, loaded = self._content(version), dict(whole_tensors(self.names, version))
            self._digests[version] = _digest(content, loaded)
        return self._digests[version]

    def _content(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors as they are once `version` is complete. Each piece has a content of its own; the version flips bits."""
        if self.golden:
            return {}
        schedule = self.schedule
        if not hasattr(self, "_base"):
            self._base = _filled(schedule, 0, self.device)
            synthetic.fill(self.plan, self.world, self.rank, self._base)
        content = {name: tensor.clone() for name, tensor in self._base.items()}
        for tensor in content.values():
            tensor.view(torch.uint8).bitwise_xor_(1 + version % 255)
        if self.world == "gen":
            _zero_padding(schedule, content)
        return content


def _filled(schedule: Schedule, byte: int, device: torch.device) -> dict[str, torch.Tensor]:
    tensors = synthetic.allocate(schedule, device)
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(byte)
    return tensors


def _zero_padding(schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> None:
    for index, offset, box in schedule.padding:
        flat = tensors[schedule.tensors[index].name].reshape(-1)
        flat.as_strided(box.extents, box.strides, offset).zero_()


def _digest(*parts: Mapping[str, torch.Tensor]) -> int:
    crc = 0
    for tensors in parts:
        for name in sorted(tensors):
            raw = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            crc = zlib.crc32(raw.tobytes(), zlib.crc32(name.encode(), crc))
    return crc
