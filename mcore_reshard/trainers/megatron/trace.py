"""The layout of a Megatron-Core model, read off Megatron-Bridge: its own import, run on meta tensors, rank by rank.

Bridge loads a checkpoint task by task: `mapping.hf_to_megatron(hf_weights, module)` gives the local parameter. Its only
communication is to cut a tensor on tensor-parallel rank 0 and to hand out the parts, or one tensor to all. A trace takes
rank 0's branch on every rank, and every rank picks its own part. Source: megatron/bridge/models/conversion/param_mapping.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.tracing.fingerprint import digest_of, digest_of_code, fingerprint
from mcore_reshard.tracing.kept import KeptFile
from mcore_reshard.tracing.recorder import Recorder

from .alternation import alternation_of, let_take_turns
from .model import (
    decoder_of,
    hf_names,
    local_tensors,
    rank_coordinate,
    require,
    tensor_name,
    unwrapped,
    without_adapters,
)

_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")


def trace_live(bridge: Any, model_chunks: Sequence[torch.nn.Module], checkpoint: Mapping[str, HfTensor]) -> RankTrace:
    """`trace_import` of a live model, with the tasks that an AutoBridge builds. Collective over the pipeline group."""
    converter = bridge._model_bridge
    source = SimpleNamespace(
        get_all_keys=lambda: _Everything(checkpoint),
        has_glob=lambda pattern: any(fnmatchcase(name, pattern) for name in checkpoint),  # GLM in Bridge 0.6
    )
    config = getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)  # Bridge 0.6 asks for it again
    pretrained = SimpleNamespace(state=SimpleNamespace(source=source), config=config)
    tasks = converter.build_conversion_tasks(pretrained, list(model_chunks))
    return trace_import(converter, model_chunks, tasks, checkpoint)


def kept_of_trainer(bridge: Any, model_chunks: Sequence[torch.nn.Module], **parts: Any) -> KeptFile:
    """What was seen of this rank's part of models like this one, and of the AutoBridge that made it."""
    converter = bridge._model_bridge
    models = [fingerprint(unwrapped(chunk)) for chunk in model_chunks]
    mappings = vars(require("megatron.bridge.models.conversion.param_mapping"))
    made_by = [
        digest_of(getattr(bridge.hf_pretrained, "config", bridge.hf_pretrained)),
        digest_of(converter.mapping_registry()),
        digest_of({name: value for name, value in mappings.items() if isinstance(value, FunctionType)}),
        digest_of_code([type(converter), *(value for value in mappings.values() if isinstance(value, type))]),
    ]
    return KeptFile.of("megatron", models=models, made_by=made_by, place=rank_coordinate(model_chunks), **parts)


def checkpoint_tensors(bridge: Any) -> dict[str, HfTensor]:
    """The tensors of the checkpoint that an AutoBridge was made of, read off the headers of its files.

    Raises ValueError where the bridge has no safetensors files.
    """
    from safetensors import safe_open

    source: Any = getattr(getattr(bridge.hf_pretrained, "state", None), "source", None)
    files = getattr(source, "key_to_filename_map", None)
    if not files:
        raise ValueError(
            "a model without layout rules is planned from traces, which want the shapes of its checkpoint: give connect() an"
            " AutoBridge made by from_hf_pretrained of a folder with safetensors files"
        )
    names_in: dict[str, list[str]] = {}
    for name, file in files.items():
        names_in.setdefault(file, []).append(name)
    tensors: dict[str, HfTensor] = {}
    for file, names in names_in.items():
        with safe_open(source.path / file, "pt") as opened:
            for name in names:
                tensor = opened.get_slice(name)
                tensors[name] = HfTensor(tuple(tensor.get_shape()), _DTYPES.get(tensor.get_dtype(), tensor.get_dtype()))
    return tensors


_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "U8": "uint8",
    "I64": "int64",
}


class _Everything(frozenset[str]):
    """A checkpoint's names, and it has every other: Bridge leaves out tasks whose tensors a checkpoint lacks."""

    def __contains__(self, name: object) -> bool:
        return True


def trace_import(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], tasks: Sequence[Any], checkpoint: Mapping[str, HfTensor]
) -> RankTrace:
    """Of which elements of `checkpoint` every tensor of this rank is made, as Megatron-Bridge would load them.

    `bridge` is Bridge's converter of the model's architecture, `tasks` are its conversion tasks on this rank. The model is
    not written, and nothing is communicated. A tensor that no task fills is *computed*, with that reason.
    """
    config = getattr(bridge, "hf_config", None)
    if config is not None and not hasattr(bridge.hf_pretrained, "config"):  # gpt-oss in Bridge 0.6 wants a checkpoint
        bridge.hf_pretrained = SimpleNamespace(config=config)
    recorder = Recorder([tensor for chunk in model_chunks for tensor in chunk.parameters() if not tensor.is_meta])
    sources = _Sources(recorder, checkpoint)
    live = without_adapters(local_tensors(model_chunks))
    alternation = alternation_of(decoder_of(model_chunks[0]).config)
    traced: dict[str, TracedTensor] = {}
    with torch.no_grad(), as_rank_zero(torch.device("meta")):
        for task in tasks:
            if task is not None and task.megatron_module is not None:
                name = tensor_name(task.vp_stage, task.param_name).replace(".to_wrap.", ".")
                traced[name] = _trace_task(recorder, bridge, task, name, live[name], sources, alternation.rows_of(name))
        for task in _tied_heads(model_chunks, tasks, live.keys() - traced.keys()):
            name = tensor_name(task.vp_stage, task.param_name)
            traced[name] = _trace_task(recorder, bridge, task, name, live[name], sources, rows=0)
    for name, tensor in live.items():
        if name not in traced and not name.endswith("scale_inv"):
            local = LocalTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            traced[name] = TracedTensor(local, computed="Megatron-Bridge maps no Hugging Face tensor to it")
    return RankTrace(tuple(traced.values()))


class _Sources(dict[str, torch.Tensor]):
    """The checkpoint as meta tensors, made when they are first read."""

    def __init__(self, recorder: Recorder, checkpoint: Mapping[str, HfTensor]) -> None:
        super().__init__()
        self._recorder, self._checkpoint = recorder, checkpoint

    def __missing__(self, name: str) -> torch.Tensor:
        self[name] = self._recorder.source(name, self._checkpoint[name])
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def keys(self) -> Any:
        return self._checkpoint.keys()


def _trace_task(
    recorder: Recorder, bridge: Any, task: Any, name: str, live: torch.Tensor, sources: _Sources, rows: int
) -> TracedTensor:
    """What one task puts into its parameter. Rows that a vocabulary has beyond the checkpoint's are padding.

    Gate and up take turns every `rows` rows, if any.
    """
    parameter = torch.empty(live.shape, dtype=live.dtype, device="meta")
    local = LocalTensor(name, tuple(live.shape), dtype_name(live.dtype))
    try:
        with recorder:
            weights = bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, sources)
            converted = task.mapping.hf_to_megatron(weights, task.megatron_module)
            if rows:
                converted = let_take_turns(converted, rows)
            if converted.shape == parameter.shape:
                parameter.copy_(converted)
            elif name.endswith(_PADDED) and converted.shape[1:] == parameter.shape[1:]:
                parameter.zero_()
                parameter[: converted.shape[0]].copy_(converted)
            else:
                shapes = f"{tuple(converted.shape)} for {tuple(parameter.shape)}"
                return TracedTensor(local, computed=f"Megatron-Bridge gives {shapes}", parameters=tuple(hf_names(task)))
    except KeyError as error:
        return TracedTensor(local, computed=f"Megatron-Bridge maps {error} to it, which is not in the checkpoint")
    except Exception as error:
        reason = f"Megatron-Bridge's mapping cannot be traced: {type(error).__name__}: {error}"
        return TracedTensor(local, computed=reason, parameters=tuple(hf_names(task)))
    return recorder.read(name, parameter)


def _tied_heads(
    model_chunks: Sequence[torch.nn.Module], tasks: Sequence[Any], untraced: Collection[str]
) -> Iterator[Any]:
    """Tasks for heads that are copies of the embedding of another pipeline stage: Bridge has none, it sends the copy."""
    embedding = next((t for t in tasks if t is not None and t.global_param_name.endswith(_PADDED[0])), None)
    for chunk_index, chunk in enumerate(map(unwrapped, model_chunks)):
        for path, module in chunk.named_modules():
            head = f"{path}.weight"
            if head.endswith(_PADDED[1]) and embedding is not None and tensor_name(chunk_index, head) in untraced:
                yield replace(embedding, vp_stage=chunk_index, param_name=head, megatron_module=module)


class _RankZero(int):
    """A rank that compares as rank 0 and counts as itself: `rank == 0`, but `weight[rank * rows :]` is its own part.

    Most mappings ask whether they are rank 0, which cuts for all; MiniMax-M2's norms are cut by each rank for itself.
    """

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other == 0

    def __lt__(self, other: int) -> bool:
        return other > 0

    def __le__(self, other: int) -> bool:
        return other >= 0

    def __gt__(self, other: int) -> bool:
        return other < 0

    def __ge__(self, other: int) -> bool:
        return other <= 0


@contextmanager
def as_rank_zero(device: torch.device) -> Iterator[None]:
    """Bridge's mappings without communication: each rank cuts as tensor-parallel rank 0 does, and takes its own part.

    `device` has the tensors that are cut.
    """
    mapping = require("megatron.bridge.models.conversion.param_mapping").MegatronParamMapping
    rank_of = mapping.tp_rank.fget

    def take_own(self: Any, splits: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        return splits[rank_of(self)]

    def take_all(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(mapping, "scatter_to_tp_ranks", take_own))
        patches.enter_context(mock.patch.object(mapping, "broadcast_tensor_to_tp_ranks", take_all))
        patches.enter_context(mock.patch.object(mapping, "tp_rank", property(lambda self: _RankZero(rank_of(self)))))
        if not torch.cuda.is_available():  # replicated mappings ask where to put what they broadcast
            patches.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: device))
        yield
