"""Compare the deliveries of a plan with golden: tensors cut by slicing code that does not use the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from helpers.plans import Case
from helpers.simulate import TRAINER_PADDING, UNTOUCHED, declared_padding, execute, numbered_tensors, sources_of

from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.validation.engine.slices import POISON, GenSizes, StandInEngine


@dataclass(frozen=True)
class Difference:
    """The first element of one engine tensor that is not golden; `got` None: the tensor is missing or never written."""

    gen_rank: int
    tensor: str
    message: str


def differences(case: Case, plan: Plan | None = None) -> list[Difference]:
    """Deliver a checkpoint of numbered elements by `plan` (the case's own by default) and compare every engine tensor.

    Training ranks hold what the case's good plan says; misc parameters go through the engine's loader, as in a refit.
    """
    good = case.plan()
    plan = good if plan is None else plan
    config = {**load_config(case.config), **dict(case.changes), "torch_dtype": "float32"}  # holds numbers to 2^24
    checkpoint = _checkpoint(good)
    arrived, faults = execute(plan, sources_of(good), numbered_tensors(plan, "gen"))
    differing = [Difference(-1, "", fault) for fault in faults]
    for (rank, local), padded in declared_padding(plan).items():
        arrived[rank, local].reshape(-1)[list(padded)] = 0
    mesh = {axis: size for axis, size in asdict(plan.gen).items() if axis in ("tp", "pp", "dp", "ep")}
    for rank in range(plan.gen.world):
        got: dict[str, Any] = {local.name: array for (r, local), array in arrived.items() if r == rank}
        for name, tensor in _loaded(config, GenSizes(**mesh), rank, plan, checkpoint).items():
            got[name] = np.where(tensor == UNTOUCHED, got.get(name, np.full(tensor.shape, UNTOUCHED)), tensor)
        for name, want in expected_tensors(config, checkpoint, GenSizes(**mesh), rank).items():
            if message := _difference(got.get(name), want.numpy()):
                differing.append(Difference(rank, name, message))
    return differing


def expected_tensors(
    config: Mapping[str, Any], hf: Mapping[str, torch.Tensor], sizes: GenSizes, gen_rank: int
) -> dict[str, torch.Tensor]:
    """Every parameter tensor of a vLLM rank after `load_weights`, by vLLM name, from a whole checkpoint in HF names.

    Vocabulary padding is zero. Raises ValueError for tensors that are missing, unknown or of a wrong shape, and for
    sizes that cannot serve the model.
    """
    engine = StandInEngine(config, sizes, gen_rank)
    if missing := sorted(set(engine.checkpoint_shapes) - set(hf)):
        raise ValueError(f"{len(missing)} HF tensors are missing: {', '.join(missing[:5])}")
    written = engine.load_weights(hf.items())
    for name, tensor in engine.loaded.items():
        assert written.get(name, 0) == tensor.numel(), f"{name}: {written.get(name, 0)} of {tensor.numel()} written"
    return engine.loaded


def _checkpoint(plan: Plan) -> dict[str, torch.Tensor]:
    """Every HF tensor; element numbers are those of `simulate.numbered_tensors`."""
    tensors, first = {}, 0
    for group in plan.groups:
        for name in group.names():
            size = prod(group.shape)
            tensors[name] = torch.arange(first, first + size, dtype=torch.float32).reshape(group.shape)
            first += size
    return tensors


def _loaded(config: Any, sizes: GenSizes, rank: int, plan: Plan, checkpoint: Any) -> dict[str, np.ndarray]:
    """Engine tensors that the misc route writes; UNTOUCHED where it does not."""
    engine = StandInEngine(config, sizes, rank)
    written = engine.load_weights((name, checkpoint[name]) for name in plan.misc_names)
    poison = int.from_bytes(bytes([POISON] * 4), "little")
    arrays = {name: engine.loaded[name].numpy() for name in written}
    return {name: np.where(array.view(np.uint32) == poison, UNTOUCHED, array) for name, array in arrays.items()}


def _difference(got: np.ndarray | None, want: np.ndarray) -> str:
    if got is None:
        return "never written"
    if got.shape != want.shape:
        return f"has shape {got.shape}, golden {want.shape}"
    wrong = np.argwhere(got != want)
    if not len(wrong):
        return ""
    first = tuple(wrong[0].tolist())
    value = {UNTOUCHED: "nothing", TRAINER_PADDING: "the trainer's padding"}.get(got[first], str(got[first]))
    return f"{len(wrong)} of {want.size} elements differ, first at {list(first)}: {value}, golden {want[first]}"
