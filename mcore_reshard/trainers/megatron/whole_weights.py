"""Weights that a refit cannot read where they are: sharded by FSDP, or offloaded. They are named before anything is planned.

A refit reads whole tensors of the model, as tensor, pipeline and expert parallelism cut them, from the memory that the
first refit bound. FSDP keeps parts of them in buffers of its own; offloading takes the memory away, or moves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# Source: megatron.core.distributed: fsdp/mcore_fsdp_adapter.py, fsdp/src/megatron_fsdp, torch_fully_sharded_data_parallel.py.
_FSDP = {
    "MegatronFSDP": "Megatron-FSDP (use_megatron_fsdp)",
    "FullyShardedDataParallel": "Megatron-FSDP (use_megatron_fsdp)",
    "TorchFullyShardedDataParallel": "torch's FSDP2 (use_torch_fsdp2)",
}
_WRAP = "wrap the model in megatron.core.distributed.DistributedDataParallel instead"
_KEEP_OPTIMIZER = "its distributed optimizer (use_distributed_optimizer) still shards the optimizer's states"
_LOAD = "load them before connect() and before each refit, to where they were; or do not offload weights"


def unreadable_weights(model_chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Why no refit can read this rank's weights, and what to do; [] if one can. It looks at no value."""
    wrappers = dict.fromkeys(name for chunk in model_chunks for name in _wrappers(chunk))
    if sharded := [_FSDP[name] for name in wrappers if name in _FSDP]:
        return [f"the model is sharded by {sharded[0]}, which keeps parts of weights: {_WRAP}; {_KEEP_OPTIMIZER}"]
    tensors = {
        f"vp{index}.{name}": tensor
        for index, chunk in enumerate(model_chunks)
        for name, tensor in chunk.named_parameters()
    }
    if parts := [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)]:
        return [f"{_some(parts)} DTensors, parts of weights: {_WRAP}, or connect by mr.dtensor.connect"]
    problems = []
    if gone := [name for name, tensor in tensors.items() if _has_no_memory(tensor)]:
        problems.append(f"{_some(gone)} offloaded, without memory: {_LOAD}")
    on_cpu = [name for name, tensor in tensors.items() if tensor.device.type == "cpu"]
    if on_cpu and (len(on_cpu) < len(tensors) or _trains_on_gpus()):
        problems.append(f"{_some(on_cpu)} offloaded to the CPU: {_LOAD}")
    return problems


def _wrappers(chunk: torch.nn.Module) -> Iterator[str]:
    """The classes of a chunk and of what it wraps, with their bases."""
    module: object = chunk
    while isinstance(module, torch.nn.Module):
        yield from (kind.__name__ for kind in type(module).__mro__)
        module = getattr(module, "module", None)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, or its storage has been given back, as verl does to Megatron's buffers."""
    if tensor.is_meta:
        return True
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return type(tensor) is torch.nn.Parameter and tensor.untyped_storage().nbytes() < end


def _trains_on_gpus() -> bool:
    """Whether the ranks talk over NCCL, which no model on the CPU can do."""
    return dist.is_initialized() and "nccl" in dist.get_backend()


def _some(names: Sequence[str]) -> str:
    """'a is', 'a and 2 other parameters are'."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{names[0]} and {len(names) - 1} other parameter{'s' * (len(names) > 2)} are"
