"""Parameters that the trainer does not train: an engine's first refit moves them, later ones leave them out.

    plan = with_frozen(plan, {(0, -1), (3, 0), (3, 1)})   # (group, layer)
    later = without_frozen(plan)                          # the same plan, without these

A later refit chooses among the transfers of the proven plan, layer by layer: it adds none and changes none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from .plan import FrozenLayers, Plan
from .plan_file import digest_of

Layers = set[tuple[int, int]]  # group, layer; -1 for a group without layers


def trained_layers(plan: Plan, train_rank: int, frozen_tensors: Collection[str]) -> Layers:
    """The layers of bulk parameters of which this training rank holds a part in a tensor that is not frozen."""
    frozen = set(frozen_tensors)
    trained: Layers = set()
    for place in plan.groups_of("train", train_rank):
        tensors = {piece.tensor for piece in place.partition.pieces[place.part]}
        for layer in place.transfers.layers:
            of_layer = replace(place.transfers, layers=(layer,))
            if not all(frozen.issuperset(of_layer.tensor_names(tensor, "train")) for tensor in tensors):
                trained.add((place.transfers.group, layer.layer))
    return trained


def with_frozen(plan: Plan, trained: Layers, misc_trained: Mapping[str, bool]) -> Plan:
    """The plan in which all layers of bulk parameters but the `trained` ones are frozen.

    `misc_trained` says of misc parameters whether they are trained. One that it does not have counts as trained: nobody
    knows. Misc parameters of one layer move together, since a loader may make one tensor of several of them.
    """
    scales_of = {pair.weight: pair.scales for pair in plan.pairs}
    weights = {(group, layer) for group, layer in trained if group not in scales_of.values()}
    moving = weights | {(scales_of[group], layer) for group, layer in weights if group in scales_of}
    misc = {(entry.group, layer) for entry in plan.misc for layer in plan.groups[entry.group].layers or (-1,)}
    moving_misc = {
        layer for group, layer in misc if any(misc_trained.get(name, True) for name in _names(plan, group, layer))
    }
    bulk = {(transfers.group, place.layer) for transfers in plan.transfer_groups for place in transfers.layers}
    frozen = (bulk - moving) | {(group, layer) for group, layer in misc if layer not in moving_misc}
    layers: dict[int, list[int]] = {}
    for group, layer in sorted(frozen):
        layers.setdefault(group, []).append(layer)
    marked = replace(plan, frozen=tuple(FrozenLayers(group, tuple(of_group)) for group, of_group in layers.items()))
    object.__setattr__(marked, "digest", digest_of(marked))
    return marked


def without_frozen(plan: Plan) -> Plan:
    """The plan of a later refit, under the digest of the whole: its parameters that are not frozen."""
    frozen = {(entry.group, layer) for entry in plan.frozen for layer in entry.layers}
    moving = [
        replace(
            transfers, layers=tuple(place for place in transfers.layers if (transfers.group, place.layer) not in frozen)
        )
        for transfers in plan.transfer_groups
    ]
    groups, misc = list(plan.groups), []
    for entry in plan.misc:
        layers = [layer for layer in groups[entry.group].layers or (-1,) if (entry.group, layer) not in frozen]
        if layers:
            misc.append(entry)
            if groups[entry.group].layers:
                groups[entry.group] = replace(groups[entry.group], layers=tuple(layers))
    return replace(
        plan,
        groups=tuple(groups),
        transfer_groups=tuple(transfers for transfers in moving if transfers.layers),
        misc=tuple(misc),
        frozen=(),
    )


def _names(plan: Plan, group: int, layer: int) -> list[str]:
    of_group = plan.groups[group]
    return [of_group.name(layer, expert) for expert in (range(of_group.experts) if of_group.experts else (None,))]
