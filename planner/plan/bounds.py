"""How large a plan may be that another process or a file gave. The proof and the schedules enumerate what is bounded here."""

from __future__ import annotations

from mcore_reshard.planner.layout.record_forms import require_shape
from mcore_reshard.planner.model.config_reader import MAX_LAYERS
from mcore_reshard.planner.model.parameters import MAX_PARAMETERS

from .carriers import TURNS
from .plan import Plan, TransferPattern
from .schedule import is_carried

# Members times overlaps. Kimi-K2 from 2,048 to 1,024 ranks has 2.2 million; a rank's schedule has its share of them.
MAX_TRANSFERS = 1 << 25
MAX_RECEIVERS = 1 << 22  # parts times carriers: a thousand ranks of each
MAX_BYTES = 1 << 46  # of all parameters: bytes of 2^16 ranks can still be summed in 64 bits. Kimi-K2 has 2^41


def require_bounded(plan: Plan) -> None:
    """Raise ValueError for a plan that is larger than any model. What it says need not be right: the proof looks at that."""
    parameters = nbytes = transfers = 0
    for group in plan.groups:
        require_shape(group.name_pattern, group.shape)
        require_shape(group.name_pattern, group.view)
        if not all(0 <= layer < MAX_LAYERS for layer in group.layers):
            raise ValueError(f"{group.name_pattern} has layers outside of 0 to {MAX_LAYERS - 1:,}")
        if group.experts < 0:
            raise ValueError(f"{group.name_pattern} has {group.experts} experts")
        parameters += group.count
        nbytes += group.count * group.nbytes
    if parameters > MAX_PARAMETERS or nbytes > MAX_BYTES:
        raise ValueError(f"it has {parameters:,} parameters of {nbytes:,} bytes: more than any model")
    for pattern in plan.patterns:
        _require_dims(pattern)
    ranks = max(plan.train.world, plan.gen.world)
    if any(grid.size > ranks for grid in plan.rank_grids):
        raise ValueError(f"a rank grid has more entries than the {ranks} ranks of the larger mesh")
    if plan.topology is not None:
        placed = len(plan.topology.train), len(plan.topology.gen)
        if placed != (plan.train.world, plan.gen.world):
            raise ValueError(
                f"its topology has {placed[0]} training and {placed[1]} generation ranks, its meshes {plan.train.world}"
                f" and {plan.gen.world}"
            )
    carried = [rank for each in plan.carriers for rank in (each.rank, *each.turns)]
    if len(plan.carriers) > plan.gen.world or len(carried) > (1 + TURNS) * plan.gen.world:
        raise ValueError(
            f"{len(plan.carriers)} ranks have carriers, of {plan.gen.world}, or these have more turns than any plan"
        )
    if any(not 0 <= rank < plan.gen.world for rank in carried):
        raise ValueError(f"its carriers are not among the {plan.gen.world} generation ranks")
    if not all(each.rank in each.turns for each in plan.carriers):
        raise ValueError("a rank that has carriers has no turn of its own")
    if plan.carriers and max(map(len, plan.rank_grids), default=0) * len({*carried}) > MAX_RECEIVERS:
        raise ValueError(f"{len({*carried})} ranks carry for parts of up to {max(map(len, plan.rank_grids))} ranks")
    overlaps = [len(pattern.overlaps) for pattern in plan.patterns]
    for each in plan.transfer_groups:
        first, stop = each.experts
        if not 0 <= first <= stop <= MAX_PARAMETERS:
            raise ValueError(f"a transfer group has experts {each.experts}")
        if 0 <= each.pattern < len(overlaps):
            transfers += each.members * overlaps[each.pattern]
    require_countable(transfers)


def require_countable(transfers: int) -> None:
    """Raise ValueError for more transfers than any plan has."""
    if transfers > MAX_TRANSFERS:
        raise ValueError(f"it has {transfers:,} transfers, more than {MAX_TRANSFERS:,}")


def _require_dims(pattern: TransferPattern) -> None:
    for overlap in pattern.overlaps:
        if len(overlap.region.start) != len(overlap.region.stop):
            raise ValueError(f"an overlap is from {overlap.region.start} to {overlap.region.stop}")
    for partition in (pattern.src, pattern.dst):
        for piece in (piece for pieces in partition.pieces for piece in pieces):
            require_shape(piece.tensor.name, piece.view)
            if is_carried(piece.tensor.name):
                raise ValueError(f"no model has a tensor {piece.tensor.name}")
