"""A live Megatron-Core model as the source of a refit: its local tensors, its mesh, and Megatron-Bridge's export.

Everything here runs inside a training process and reads real modules; nothing is derived from a config. Megatron is
imported when a function is first called.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from mcore_reshard.kernels.copies.tensors import dtype_name

MINIMUM_VERSIONS = "megatron-core 0.16.1 and megatron-bridge 0.3.1"

# megatron-core 0.19 keeps the convolution's parameters on the Mamba mixer itself.
_EARLIER_NAMES_IN_A_MIXER = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}


def local_tensors(model_chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer that this rank holds, as `vp{chunk}.{name}` -> the model's own tensor.

    Wrapper prefixes (DDP, Float16Module) are stripped; layers keep Megatron's numbering within the chunk, so
    `vp1.decoder.layers.0` is the first layer of the second virtual pipeline chunk. Persistent buffers are included
    because the router's `expert_bias` is one. What newer Megatron releases renamed has the name of 0.16. A parameter that
    Transformer Engine quantized (`fp8_param`) is two tensors: its E4M3 data under its own name, and its scales under that
    name with the attribute's, as in `vp0.decoder.layers.0.mlp.linear_fc2.weight._rowwise_scale_inv`. A tied parameter is
    there by each of its names.

    Sessions read it before every refit, with all experts of all layers. It makes names, and of tensors only views of E4M3 data.
    """
    tensors: dict[str, torch.Tensor] = {}
    for chunk_index, chunk in enumerate(model_chunks):
        for path, module in chunk.named_modules():
            if not module._parameters and not module._buffers:
                continue
            prefix = f"vp{chunk_index}.{_stable_prefix(path)}"
            for leaf, tensor in _held_by(module, prefix).items():
                if type(tensor) is torch.nn.Parameter:
                    tensors[prefix + leaf] = tensor
                elif tensor is not None:
                    tensors |= _parts_of(prefix + leaf, tensor)
    return tensors


def export_hf(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron-Bridge's export: (HF name, whole tensor) on every training rank, on the tensors' own device.

    A padded vocabulary is cut back to the config's size, which Bridge does not do. With `names`, only the conversion
    tasks that yield them run, and only they are yielded. `bridge` is an AutoBridge made by `from_hf_pretrained`.
    Collective: all ranks of the training world must call it with the same names and consume the iterator to its end.
    Raises KeyError, on all ranks alike and before any tensor moves, for a name that no task yields.
    """
    yield from export_tasks(bridge, model_chunks, conversion_tasks(bridge, model_chunks, names), names)


def conversion_tasks(bridge: Any, model_chunks: Sequence[torch.nn.Module], names: Collection[str] | None) -> list[Any]:
    """Bridge's conversion tasks that yield `names`, or all: the same number, in the same order, on every rank."""
    require("megatron.bridge")
    tasks = [task for task in bridge.get_conversion_tasks(list(model_chunks)) if task is not None]
    return tasks if names is None else [tasks[index] for index in _task_indices(tasks, set(names))]


def export_tasks(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], tasks: Sequence[Any], names: Collection[str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `export_hf` yields, from these tasks."""
    vocabulary = {name for task in tasks if _holds_vocabulary(task) for name in hf_names(task)}
    vocab_size = _vocab_size(bridge)
    for name, tensor in bridge.export_hf_weights(
        list(model_chunks), cpu=False, show_progress=False, conversion_tasks=list(tasks)
    ):
        if names is None or name in names:
            yield name, tensor[:vocab_size] if name in vocabulary else tensor


def hf_names(task: Any) -> list[str]:
    """The tensors that a conversion task yields; of experts those of this rank."""
    hf_param = task.mapping.hf_param
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())


def train_mesh_of(model_chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """The parallel sizes that a live model runs under, read from its process groups and its layers.

    Returns `{tp, pp, vpp, cp, ep, etp, dp, layers}`, the fields of the planner's `TrainMesh`: `dp` counts dense
    replicas, `layers` the decoder layers of every chunk in pipeline order (chunk `v` of stage `p` at `v * pp + p`).
    Collective over the pipeline group. Raises ValueError when the chunks do not hold the layers in that order.
    """
    require("megatron.core")
    groups = _process_groups(model_chunks)
    sizes: dict[str, Any] = {axis: _size(group) for axis, group in groups.items()}
    sizes["vpp"] = len(model_chunks)
    local = [[layer.layer_number - 1 for layer in _decoder_layers(chunk)] for chunk in model_chunks]
    held: list[list[list[int]]] = [local]
    if sizes["pp"] > 1:
        held = [[] for _ in range(sizes["pp"])]
        torch.distributed.all_gather_object(held, local, group=groups["pp"])
    in_model_order = [stage[chunk_index] for chunk_index in range(len(model_chunks)) for stage in held]
    flat = [layer for chunk in in_model_order for layer in chunk]
    if flat != list(range(len(flat))):
        raise ValueError(f"the pipeline's chunks hold layers out of order: {in_model_order}")
    return {**sizes, "layers": tuple(len(chunk) for chunk in in_model_order)}


def rank_coordinate(model_chunks: Sequence[torch.nn.Module]) -> dict[str, int]:
    """Where the process groups put this rank: `{tp, pp, cp, ep, etp, dp}`, all 0 without process groups."""
    groups = _process_groups(model_chunks)
    return {axis: 0 if group is None else group.rank() for axis, group in groups.items()}


def require(module: str) -> ModuleType:
    """Import a Megatron module, or raise ImportError naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} cannot be imported ({error}); wanted: {MINIMUM_VERSIONS} or newer; "
            "from a clone of mcore-reshard: pip install '.[megatron]'"
        ) from error


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The Megatron model inside DDP and mixed-precision wrappers."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _held_by(module: torch.nn.Module, prefix: str) -> Mapping[str, torch.Tensor | None]:
    """Its own parameters and persistent buffers, by names that are the same for every supported release."""
    held: dict[str, torch.Tensor | None] = module._parameters  # type: ignore[assignment]
    if module._buffers:
        left_out = module._non_persistent_buffers_set
        held = held | {leaf: buffer for leaf, buffer in module._buffers.items() if leaf not in left_out}
    if prefix.endswith(".mixer."):
        held = {_EARLIER_NAMES_IN_A_MIXER.get(leaf, leaf): tensor for leaf, tensor in held.items()}
    return held


def _parts_of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor, or the data and the scales of one that Transformer Engine quantized.

    Float8BlockwiseQTensor and MXFP8Tensor have row-wise data and scales, Float8Tensor one scale (transformer_engine/pytorch/
    tensor/). Raises ValueError for one that keeps column-wise data only, which no layout rule reads.
    """
    if isinstance(getattr(tensor, "_scale_inv", None), torch.Tensor):  # Float8Tensor
        data, attribute = tensor._data, "_scale_inv"  # type: ignore[attr-defined]
    elif hasattr(tensor, "_rowwise_scale_inv"):
        data, attribute = tensor._rowwise_data, "_rowwise_scale_inv"  # type: ignore[attr-defined]
    else:
        return {name: tensor}
    scales = getattr(tensor, attribute)
    if data is None or scales is None:
        raise ValueError(f"{name} is quantized, and keeps no row-wise data: build it with row-wise usage")
    return {name: data.view(torch.float8_e4m3fn), f"{name}.{attribute}": scales}


def precisions_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What `local_tensors` found matrices in, each with the first of them: `fp8`, `mxfp8`, or the name of a dtype."""
    held: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name.endswith("scale_inv"):
            held.setdefault("mxfp8" if tensor.dtype is torch.uint8 else "fp8", name)
        elif tensor.dim() > 1 and tensor.dtype is not torch.float8_e4m3fn:
            held.setdefault(dtype_name(tensor.dtype), name)
    return held


def _stable_prefix(path: str) -> str:
    """What names of a module's tensors begin with, without wrappers."""
    prefix = f"{path}." if path else ""
    while prefix.startswith("module."):
        prefix = prefix.removeprefix("module.")
    return prefix


def _task_indices(tasks: Sequence[Any], names: set[str]) -> list[int]:
    """Which tasks yield `names` on any expert-parallel rank: tasks are collective, so ranks must agree on them.

    On one rank a task names only its own experts, while the task of the same index on the others names theirs.
    """
    parallel_state = require("megatron.core.parallel_state")
    group = parallel_state.get_expert_model_parallel_group()
    local = {index: sorted(names.intersection(hf_names(task))) for index, task in enumerate(tasks)}
    gathered: list[dict[int, list[str]]] = [{} for _ in range(_size(group))]
    torch.distributed.all_gather_object(gathered, {k: v for k, v in local.items() if v}, group=group)
    missing = names.difference(*(found for rank in gathered for found in rank.values()))
    if missing:
        raise KeyError(f"Megatron-Bridge has no conversion task for {', '.join(sorted(missing))}")
    return sorted(set().union(*gathered))


def _holds_vocabulary(task: Any) -> bool:
    """Megatron may pad the vocabulary, and Bridge exports the padding."""
    return task.global_param_name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))


def _vocab_size(bridge: Any) -> int:
    pretrained = bridge.hf_pretrained
    config = getattr(pretrained, "config", pretrained)
    return getattr(config, "text_config", config).vocab_size


def _process_groups(model_chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """The groups that the model was built with; Megatron's globals for a model that does not carry them."""
    collection = getattr(unwrapped(model_chunks[0]), "pg_collection", None)
    if collection is None or not hasattr(collection, "expt_tp"):
        process_groups = require("megatron.core.process_groups_config")
        collection = process_groups.ProcessGroupCollection.use_mpu_process_groups()
    return {
        "tp": collection.tp,
        "pp": collection.pp,
        "cp": collection.cp,
        "dp": collection.dp,
        "ep": collection.ep,
        "etp": collection.expt_tp,
    }


def _size(group: Any) -> int:
    return 1 if group is None else group.size()


def _decoder_layers(chunk: torch.nn.Module) -> Sequence[Any]:
    return unwrapped(chunk).decoder.layers  # type: ignore[union-attr, return-value]
