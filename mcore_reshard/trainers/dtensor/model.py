"""A live DTensor model as the source of a refit: its local tensors, what they hold, and its export by Hugging Face names.

Everything is read off the live module. A plain tensor counts as replicated: every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.strided import compose
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor

from .checkpoint import Checkpoint, read_checkpoint
from .placements import copies_to_local

_PLANNED = "vp0."
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # torch.compile, activation checkpointing


def local_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter and persistent buffer, as `vp0.{name}`: live storage, no copies.

    Names are those in memory, without wrappers' parts; a plan names a trainer's model chunk first, and here there is one.
    FSDP2 keeps a part in one storage from step to step: optimizers and mixed precision do not move it. But between a
    forward and its backward, and after a forward alone with reshard_after_forward=False (which is the root's default),
    the module holds gathered tensors instead. So this calls `reshard` of every FSDP2 module first, which frees them.
    Tensors without elements on this rank are left out; a tied parameter has its first name.
    """
    with torch.no_grad():
        parts = {_PLANNED + name: _local(tensor) for name, tensor in whole_tensors(module).items()}
    return {name: part for name, part in parts.items() if part.numel()}


def parameters_of_tensors(module: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """The parameter behind every one of `local_tensors`; buffers have none."""
    tensors = whole_tensors(module).items()
    return {_PLANNED + name: [tensor] for name, tensor in tensors if isinstance(tensor, torch.nn.Parameter)}


def tensors_of_hf_names(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Which of `local_tensors` make up each tensor of the checkpoint."""
    return {name: [_PLANNED + of for of, _ in boxes] for name, boxes in checkpoint.made_of.items()}


def whole_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer as the module holds it: DTensors, whose shape is that of the whole, and plain ones.

    Raises ValueError for FSDP1, whose parameters are parts of one flat tensor.
    """
    for each in module.modules():
        if isinstance(each, FullyShardedDataParallel):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) keeps flat parameters: shard the model by fully_shard (FSDP2)"
            )
        if isinstance(each, FSDPModule):
            each.reshard()
    found: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    for path, tensor in unwrapped(module).state_dict(keep_vars=True).items():
        name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        if isinstance(tensor, torch.Tensor) and first_name.setdefault(id(tensor), name) == name:
            found[name] = tensor
    return found


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := module._modules.get("_orig_mod"), torch.nn.Module):
            module = inner
        else:
            return module


def checkpoint_of(module: torch.nn.Module) -> Checkpoint:
    """What the module would save, by Hugging Face names.

    Raises ValueError for adapters, which would be left out, and as `read_checkpoint` does.
    """
    if adapted := [
        path for path, each in module.named_modules() if "base_layer" in each._modules
    ]:  # peft, BaseTunerLayer
        raise ValueError(
            f"{len(adapted)} modules have adapters (peft), first {adapted[0]}: no tensor holds the weights that the engine"
            " needs; merge_and_unload() the adapters, or train them by Megatron-Bridge (mr.megatron.connect merges those)"
        )
    tensors = {name: HfTensor(tuple(t.shape), dtype_name(t.dtype)) for name, t in whole_tensors(module).items()}
    return read_checkpoint(unwrapped(module), tensors)


def trace_module(module: torch.nn.Module, checkpoint: Checkpoint) -> RankTrace:
    """Which elements of `checkpoint` this rank's local tensors hold, from placements and device meshes. No communication.

    Raises ValueError for a placement that says no place, as `copies_to_local` does, with the tensor's name.
    """
    within, traced = checkpoint.within(), []
    for name, tensor in whole_tensors(module).items():
        try:
            held = copies_to_local(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if held and name in within:
            copies = tuple((hf, part) for hf, box in within[name] for place in held for part in compose(box, place))
            local = LocalTensor(_PLANNED + name, tuple(_local(tensor).shape), dtype_name(tensor.dtype))
            traced.append(TracedTensor(local, copies))
    return RankTrace(tuple(traced))


def export_hf(
    module: torch.nn.Module, checkpoint: Checkpoint, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) on every training rank, on the tensors' own device: those of `names`, or all.

    Collective: all training ranks must call it with the same names and read the iterator to its end. It gathers one
    tensor of the module at a time. Raises KeyError, before any tensor moves, for a name that the checkpoint does not have.
    """
    if missing := set(names or ()).difference(checkpoint.made_of):
        raise KeyError(f"the model saves no {', '.join(sorted(missing))}")
    wanted = [name for name in checkpoint.made_of if names is None or name in names]
    last_use = {of: name for name in wanted for of, _ in checkpoint.made_of[name]}
    tensors, gathered = whole_tensors(module), dict[str, torch.Tensor]()
    for name in wanted:
        boxes = checkpoint.made_of[name]
        for of, _ in boxes:
            if of not in gathered:
                gathered[of] = _gather(tensors[of])
        shape = checkpoint.tensors[name].shape
        first = gathered[boxes[0][0]]
        if len(boxes) == 1 and boxes[0][1].elements == first.numel() and first.shape == shape:
            yield name, first
        else:
            whole = first.new_empty(shape)
            for of, box in boxes:
                src = gathered[of].as_strided(box.extents, box.src_strides, box.src_offset)
                whole.as_strided(box.extents, box.dst_strides, box.dst_offset).copy_(src)
            yield name, whole
        for of in {of for of, _ in boxes if last_use[of] == name}:
            del gathered[of]


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _gather(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).contiguous()
