"""What a rank holds: the pieces of all bulk parameters in its tensors, to find the parameter at any element of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mcore_reshard.planner.layout.geometry import Piece

from .plan import Plan
from .schedule import World


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """One piece of each member of a transfer group, as it lies in a rank's tensors."""

    group: int  # index into Plan.groups
    shape: tuple[int, ...]  # of the whole parameter, in the coordinates of `piece.region`
    piece: Piece
    tensors: tuple[str, ...]  # one for each layer, or one for each layer and expert; experts vary fastest
    layers: tuple[int, ...]  # their numbers in the HF model; (-1,) for a parameter in no layer
    experts: tuple[int, int]  # half-open; (0, 0) for a parameter of no expert
    slot: int  # of the first expert, where experts are stacked in a tensor

    @property
    def expert_count(self) -> int:
        return max(1, self.experts[1] - self.experts[0])


@dataclass(frozen=True, slots=True)
class NamedCast:
    """The cast of one tensor of a training rank, by names."""

    to: str  # dtype on the wire
    scales: str | None  # the tensor of its scales
    block: tuple[int, int]  # of no meaning without scales


@dataclass(frozen=True, slots=True)
class Held:
    """The layout of one rank in a plan."""

    pieces: tuple[HeldPiece, ...]
    names: Mapping[int, str]  # name pattern of each group, with {layer} and {expert}
    casts: Mapping[str, NamedCast]  # by tensor; empty on generation ranks


def held_pieces(plan: Plan, world: World, rank: int) -> Iterator[HeldPiece]:
    """Everything that planned transfers may read on a training rank, or write on a generation rank, which may carry some."""
    for place in plan.groups_of(world, rank):
        transfers = place.transfers
        for piece in place.partition.pieces[place.part]:
            yield HeldPiece(
                group=transfers.group,
                shape=plan.groups[transfers.group].view,
                piece=piece,
                tensors=tuple(transfers.tensor_names(piece.tensor, world)),
                layers=tuple(layer.layer for layer in transfers.layers),
                experts=transfers.experts,
                slot=transfers.slot(world, 0),
            )
    for place in plan.carried_by(rank) if world == "gen" else ():
        transfers = place.transfers
        waves = plan.paths(transfers).waves(transfers.members, plan.waves, plan.wave_lag(transfers))
        for overlap in place.overlaps.tolist():
            yield HeldPiece(
                group=transfers.group,
                shape=plan.groups[transfers.group].view,
                piece=place.pattern.carried_piece(place.pattern.overlaps[overlap]),
                tensors=tuple(
                    plan.carried_name(place.index, member, overlap, wave)
                    for member, wave in enumerate(waves[:, overlap].tolist())
                ),
                layers=tuple(layer.layer for layer in transfers.layers),
                experts=transfers.experts,
                slot=0,
            )
