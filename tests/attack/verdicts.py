"""The verdict on a damaged plan: refused by the proof, refused when bound, or shown to change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from helpers.handmade import allocate
from helpers.plans import Case
from helpers.simulate import damage

from attack.single_field import Mutant
from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.proof.prove import prove

# Fields whose damage may name tensors that no model has: the proof knows no model, binding does.
NAMES_TENSORS = frozenset({"LocalTensor.name", "TransferGroup.pattern"})

# Fields that may change without changing what arrives. The simulator shows it for each such mutant.
EQUIVALENT: dict[str, str] = {
    "TransferGroup.first_src_replica": "other replicas serve, with the same bytes",
    "rank_grid.exchanged": "replicas of one part are listed in another order",
    "TransferGroup.src": "another list of the same ranks",
    "TransferGroup.dst": "another list of the same ranks",
    "Overlap.order": "overlaps are listed, sent and received in another order",
    "TransferGroup.order": "transfer groups of one stage are listed, sent and received in another order",
    "TransferGroup.layers": "layers are listed, sent and received in another order",
    "Group.layers": "layers are listed in another order",
    "TransferGroup.src_slot": "means nothing outside of experts",
    "TransferGroup.dst_slot": "means nothing outside of experts",
    "LayerPlace.local": "means nothing outside of layers",
    "train mesh.ep": "means nothing without experts that are parameters of their own",
    "train mesh.etp": "means nothing without experts",
    "gen mesh.ep": "means nothing without experts",
    "Piece.view": "an empty view is the tensor's own shape",
    "Group.dtype": "what the checkpoint says; both ends of a transfer say what they hold",
    "Group.name_pattern": "the name in reports, where no other parameter has it",
    "Group.shape": "of a parameter on the misc route, or excluded",
    "Group.view": "of a parameter on the misc route, or excluded",
    "Group.experts": "of an excluded parameter",
    "routes.excluded": "a prediction layer, which is excluded already",
    "QuantizedPair.block": "of a pair that is not on the bulk route",
    "QuantizedPair.touched": "no rank has a part of a block",
    "QuantizedPair.absent": "of a pair that is not on the bulk route",
}


@dataclass(frozen=True)
class Verdict:
    """The verdict on one mutant. `by` is a rule of the proof, "BindError", "equivalent" or "missed"."""

    field: str
    by: str
    change: str
    parameter: str = ""
    ranks: str = ""
    damage: str = ""


def attack(case: Case, mutants: Callable[[Plan, int], Iterator[Mutant]], seed: int, count: int) -> Iterator[Verdict]:
    """Put `count` mutants of a case's plan to the proof, and what it accepts to the simulator and to binding."""
    good = case.plan()
    for mutant in islice(mutants(good, seed), count):
        proof = prove(mutant.plan)
        if proof.violations:
            first = proof.violations[0]
            yield Verdict(mutant.field, first.rule, mutant.change, first.parameter, first.ranks)
        elif harm := damage(good, mutant.plan):
            by = "BindError" if _refused_when_bound(good, mutant.plan) else "missed"
            yield Verdict(mutant.field, by, mutant.change, damage=harm[0])
        else:
            yield Verdict(mutant.field, "equivalent", mutant.change)


def _refused_when_bound(good: Plan, plan: Plan) -> bool:
    """Whether any rank refuses to bind to the tensors that the good plan knows."""
    worlds: tuple[tuple[World, int], ...] = (("train", plan.train.world), ("gen", plan.gen.world))
    for world, size in worlds:
        for rank in range(size):
            try:
                bind(schedule_of(plan, world, rank), allocate(schedule_of(good, world, rank)))
            except BindError:
                return True
    return False
