"""`trainable_only`: which local tensors a trainer trains, and the plan whose later refits move these alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from mcore_reshard.kernels.errors import StaleTensorError
from mcore_reshard.planner.plan.frozen import trained_layers, with_frozen
from mcore_reshard.planner.plan.plan import Plan

from .world import gather_from_all, own_rank

MadeOf = Mapping[str, Sequence[torch.Tensor]]  # local tensor -> the parameters that it is, or is merged of
LocalTensors = Callable[[], Mapping[str, torch.Tensor]]


def freeze(plan: Plan, made_of: MadeOf, hf_names: Callable[[], Mapping[str, Sequence[str]]]) -> Plan:
    """The plan whose later refits leave out all that no rank trains. Collective over the training world.

    A local tensor is frozen if it is made of parameters without `requires_grad`; `made_of` lacks buffers, which training
    changes without gradients. `hf_names()` gives the local tensors of every Hugging Face name that this rank exports; it
    is asked if the plan has a misc route. Raises ValueError, on all ranks, if nothing is trained.
    """
    frozen = {name for name, parameters in made_of.items() if not any(each.requires_grad for each in parameters)}
    if not any(gather_from_all(len(frozen) < len(made_of))):
        raise ValueError(
            "trainable_only=True, and no parameter has requires_grad: later refits would move nothing; unfreeze what the"
            " optimizer is to train, or leave trainable_only out"
        )
    trained = set().union(*gather_from_all(trained_layers(plan, own_rank(), frozen)))
    misc_trained: dict[str, bool] = {}
    if plan.misc:
        of_rank = {name: not frozen.issuperset(tensors) for name, tensors in hf_names().items()}
        for names in gather_from_all(of_rank):
            misc_trained |= {name: trains or misc_trained.get(name, False) for name, trains in names.items()}
    return with_frozen(plan, trained, misc_trained)


def watched(tensors: LocalTensors, made_of: MadeOf) -> LocalTensors:
    """`tensors`, which then raises StaleTensorError once a parameter was frozen or unfrozen: the plan says which are."""
    flags = {name: [each.requires_grad for each in parameters] for name, parameters in made_of.items()}

    def checked() -> Mapping[str, torch.Tensor]:
        changed = [
            name for name, parameters in made_of.items() if flags[name] != [each.requires_grad for each in parameters]
        ]
        if changed:
            raise StaleTensorError(
                f"train:{own_rank()}: requires_grad of {len(changed)} tensors has changed since connect(), first of"
                f" {changed[0]}: with trainable_only=True, connect again after freezing or unfreezing parameters"
            )
        return tensors()

    return checked
