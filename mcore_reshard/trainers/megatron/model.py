"""A live Megatron-Core model as the source of a refit: its local tensors, its mesh, and Megatron-Bridge's export.

Tensors and mesh are read off the live modules, never off a config. Functions import Megatron when they are first called.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.trainers.world import gather_from_all

from .alternation import refuse_alternating_export

# megatron-core 0.19 keeps the convolution's parameters on the Mamba mixer itself.
_EARLIER_NAMES_IN_A_MIXER = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}


def local_tensors(model_chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer that this rank holds, as `vp{chunk}.{name}` -> the model's own tensor.

        vp1.decoder.layers.0.mlp.linear_fc2.weight                       the second virtual pipeline chunk's first layer
        vp1.decoder.layers.0.mlp.linear_fc2.weight._rowwise_scale_inv    its scales, where Transformer Engine quantized it

    Names have no wrapper prefixes (DDP, Float16Module), and are those of Megatron 0.16. A tied parameter appears under
    each of its names. The router's `expert_bias` is a persistent buffer.

    Sessions call this before every refit, so it copies nothing: tensors are the model's own, or views of E4M3 data.
    Raises ValueError for a quantized parameter without row-wise data.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _parameters_and_buffers(model_chunks):
        if type(tensor) is torch.nn.Parameter:
            tensors[name] = tensor
        else:
            tensors |= _data_and_scales(name, tensor)
    return tensors


_Value = TypeVar("_Value")


def without_adapters(tensors: Mapping[str, _Value]) -> dict[str, _Value]:
    """Tensors of a model as they are named where no adapters wrap modules. Source: megatron/bridge/peft/adapter_wrapper.py."""
    wrapped = {name.partition(".to_wrap.")[0] for name in tensors if ".to_wrap." in name}
    return {
        name.replace(".to_wrap.", "."): value
        for name, value in tensors.items()
        if name.partition(".adapter.")[0] not in wrapped or ".adapter." not in name
    }


def parameters_of_tensors(model_chunks: Sequence[torch.nn.Module]) -> dict[str, list[torch.Tensor]]:
    """The parameter behind every one of `local_tensors`; buffers have none."""
    return {
        part: [tensor]
        for name, tensor in _parameters_and_buffers(model_chunks)
        if isinstance(tensor, torch.nn.Parameter)
        for part in _data_and_scales(name, tensor)
    }


def _parameters_and_buffers(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk_index, chunk in enumerate(model_chunks):
        for path, module in unwrapped(chunk).named_modules():
            if not module._parameters and not module._buffers:
                continue
            prefix = f"vp{chunk_index}.{path}." if path else f"vp{chunk_index}."
            for leaf, tensor in _own_tensors(module, prefix).items():
                if tensor is not None:
                    yield prefix + leaf, tensor


def export_hf(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron-Bridge's export: (HF name, whole tensor) on every training rank, on the tensors' own device.

    `bridge` is an AutoBridge made by `from_hf_pretrained`. With `names`, only tasks that yield these run. A padded
    vocabulary is cut back to the config's size. Collective: all training ranks must call it with the same names and read
    the iterator to its end. Raises KeyError, on all ranks and before any tensor moves, for a name that no task yields.
    """
    yield from export_tasks(bridge, model_chunks, select_tasks(bridge, model_chunks, names), names)


def select_tasks(bridge: Any, model_chunks: Sequence[torch.nn.Module], names: Collection[str] | None) -> list[Any]:
    """Bridge's conversion tasks that yield `names`, or all: the same ones in the same order on every rank. Collective.

    Raises ValueError for a task whose weights Bridge would read wrongly (alternation.py).
    """
    tasks = _tasks_yielding(bridge, model_chunks, names)
    refuse_alternating_export(decoder_of(model_chunks[0]).config, (task.global_param_name for task in tasks))
    return tasks


def _tasks_yielding(bridge: Any, model_chunks: Sequence[torch.nn.Module], names: Collection[str] | None) -> list[Any]:
    require("megatron.bridge")
    tasks = [task for task in bridge.get_conversion_tasks(list(model_chunks)) if task is not None]
    if names is None:
        return tasks
    group = require("megatron.core.parallel_state").get_expert_model_parallel_group()  # a task names its rank's experts
    served = {
        index: yielded for index, task in enumerate(tasks) if (yielded := set(names).intersection(hf_names(task)))
    }
    served_by_rank = gather_from_all(served, group)
    if missing := set(names).difference(*(yielded for rank in served_by_rank for yielded in rank.values())):
        raise KeyError(f"Megatron-Bridge has no conversion task for {', '.join(sorted(missing))}")
    return [tasks[index] for index in sorted(set().union(*served_by_rank))]


def export_tasks(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], tasks: Sequence[Any], names: Collection[str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Run these tasks alone, otherwise as `export_hf`."""
    padded = ("embedding.word_embeddings.weight", "output_layer.weight")
    vocabulary = {name for task in tasks if task.global_param_name.endswith(padded) for name in hf_names(task)}
    config = getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)
    vocab_size = getattr(config, "text_config", getattr(config, "llm_config", config)).vocab_size
    for name, tensor in bridge.export_hf_weights(
        list(model_chunks), cpu=False, show_progress=False, conversion_tasks=list(tasks)
    ):
        if names is None or name in names:
            yield name, tensor[:vocab_size] if name in vocabulary else tensor


def tensors_of_hf_names(bridge: Any, model_chunks: Sequence[torch.nn.Module]) -> dict[str, list[str]]:
    """Which of `local_tensors` make up each Hugging Face tensor that Megatron-Bridge exports. Collective, as its tasks are."""
    tensors: dict[str, list[str]] = {}
    for task in bridge.get_conversion_tasks(list(model_chunks)):
        if task is not None and task.megatron_module is not None:
            for name in hf_names(task):
                tensor = tensor_name(task.vp_stage, task.param_name).replace(".to_wrap.", ".")
                tensors.setdefault(name, []).append(tensor)
    return tensors


def hf_names(task: Any) -> list[str]:
    """The names of the tensors that a conversion task yields: for experts, only those of this rank."""
    hf_param = task.mapping.hf_param
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())


def train_mesh_of(model_chunks: Sequence[torch.nn.Module]) -> TrainMesh:
    """The mesh that a live model runs under, read from its process groups and its layers.

    `layers` counts those of every chunk in pipeline order: chunk `v` of stage `p` stands at `v * pp + p`. Collective over
    the pipeline group. Raises MeshError, and ValueError where the chunks do not have the layers in that order.
    """
    groups = _process_groups(model_chunks)
    sizes = {axis: 1 if group is None else group.size() for axis, group in groups.items()}
    own_layers = [[layer.layer_number - 1 for layer in decoder_of(chunk).layers] for chunk in model_chunks]
    layers_of_stages = gather_from_all(own_layers, groups["pp"]) if sizes["pp"] > 1 else [own_layers]
    chunks = [stage[chunk_index] for chunk_index in range(len(model_chunks)) for stage in layers_of_stages]
    layers = [layer for chunk in chunks for layer in chunk]
    if layers != list(range(len(layers))):
        problem = f"the pipeline's chunks have layers {chunks}, out of order"
        raise ValueError(f"{problem}: give each chunk the layers after the chunk before")
    return TrainMesh(**sizes, vpp=len(model_chunks), layers=tuple(map(len, chunks)))


def rank_coordinate(model_chunks: Sequence[torch.nn.Module]) -> dict[str, int]:
    """Where the process groups put this rank: `{tp, pp, cp, ep, etp, dp}`, all 0 without process groups."""
    return {axis: 0 if group is None else group.rank() for axis, group in _process_groups(model_chunks).items()}


def require(module: str) -> ModuleType:
    """Import a Megatron module, or raise ImportError naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "install megatron-core 0.16.1 and megatron-bridge 0.3.1 or newer"
        how = "from a clone of mcore-reshard: pip install '.[megatron]'"
        raise ImportError(f"{module} cannot be imported ({error}); {remedy}, {how}") from error


def has_decoder(chunk: torch.nn.Module) -> bool:
    """Whether this is a Megatron-Core model, or one around a language model."""
    return hasattr(_language_model_of(chunk), "decoder")


def decoder_of(chunk: torch.nn.Module) -> Any:
    """The transformer block that a pipeline cuts into layers; of a vision-language model, the language model's."""
    return _language_model_of(chunk).decoder


def _language_model_of(chunk: torch.nn.Module) -> Any:
    model: Any = unwrapped(chunk)
    for name in ("llava_model", "language_model"):  # Nemotron-Nano-VL has one in the other
        model = getattr(model, name, model)
    return model


def tensor_name(vp_stage: int, name: str) -> str:
    """The name in `local_tensors` of a parameter that Megatron calls `name` in a chunk."""
    prefix, _, leaf = name.rpartition(".")
    leaf = _EARLIER_NAMES_IN_A_MIXER.get(leaf, leaf) if prefix.endswith(".mixer") else leaf
    return f"vp{vp_stage}.{prefix}.{leaf}" if prefix else f"vp{vp_stage}.{leaf}"


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The Megatron model inside DDP and mixed-precision wrappers."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _own_tensors(module: torch.nn.Module, prefix: str) -> Mapping[str, torch.Tensor | None]:
    """A module's own parameters and persistent buffers, by names that are the same for every supported release."""
    tensors: dict[str, torch.Tensor | None] = module._parameters  # type: ignore[assignment]
    if module._buffers:
        transient = module._non_persistent_buffers_set
        tensors = tensors | {leaf: buffer for leaf, buffer in module._buffers.items() if leaf not in transient}
    if prefix.endswith(".mixer."):
        tensors = {_EARLIER_NAMES_IN_A_MIXER.get(leaf, leaf): tensor for leaf, tensor in tensors.items()}
    return tensors


def _data_and_scales(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The E4M3 data and the scales of a tensor that Transformer Engine quantized; any other tensor as it is.

    Source: transformer_engine/pytorch/tensor/. Raises ValueError for column-wise data alone and for swizzled scales (of a
    quantizer with optimize_for_gemm), which no layout rule reads.
    """
    if isinstance(getattr(tensor, "_scale_inv", None), torch.Tensor):  # Float8Tensor
        data, attribute = tensor._data, "_scale_inv"  # type: ignore[attr-defined]
    elif hasattr(tensor, "_rowwise_scale_inv"):  # Float8BlockwiseQTensor, MXFP8Tensor
        data, attribute = tensor._rowwise_data, "_rowwise_scale_inv"  # type: ignore[attr-defined]
    else:
        return {name: tensor}
    scales = getattr(tensor, attribute)
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        raise ValueError(
            f"{name} keeps its scales in the order of a matrix product: quantize without optimize_for_gemm"
        )
    if data is None or scales is None:
        raise ValueError(f"{name} is quantized and keeps no row-wise data: build the model with row-wise usage")
    return {name: data.view(torch.float8_e4m3fn), f"{name}.{attribute}": scales}


def precisions_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The precisions of the matrices among `tensors` (`fp8`, `mxfp8` or a dtype's name), each with its first matrix."""
    matrices: dict[str, str] = {}
    for name, tensor in tensors.items():
        if name.endswith("scale_inv"):
            matrices.setdefault("mxfp8" if tensor.dtype is torch.uint8 else "fp8", name)
        elif tensor.dim() > 1 and tensor.dtype is not torch.float8_e4m3fn:
            matrices.setdefault(dtype_name(tensor.dtype), name)
    return matrices


def _process_groups(model_chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """The groups that the model was built with, else Megatron's globals. Raises ValueError where there are neither."""
    collection = getattr(unwrapped(model_chunks[0]), "pg_collection", None)
    if collection is None or not hasattr(collection, "expt_tp"):
        process_groups = require("megatron.core.process_groups_config")
        try:
            collection = process_groups.ProcessGroupCollection.use_mpu_process_groups()
        except AssertionError as error:
            problem = f"Megatron-Core's parallel state is not there ({error})"
            raise ValueError(f"{problem}: call parallel_state.initialize_model_parallel first") from error
    attributes = {"tp": "tp", "pp": "pp", "cp": "cp", "dp": "dp", "ep": "ep", "etp": "expt_tp"}
    return {axis: getattr(collection, attribute) for axis, attribute in attributes.items()}
