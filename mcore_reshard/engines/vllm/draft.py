"""The draft model that predicts with the trainer's own layers for multi-token prediction: vLLM's speculative method `mtp`.

    draft:model.layers.61.mtp_block.self_attn.o_proj.weight     a tensor of the draft model, beside those of the main model

vLLM lets the draft model share the embedding and the output layer of the main model; these count as the main model's.
Source: vllm/v1/spec_decode/llm_base_proposer.py (load_model) and v1/worker/gpu_model_runner.py (get_draft_model), 0.32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mcore_reshard.planner.layout.condense import NUMBER, numbers_in
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.tracing.loading import record_loading

from .created import parameters_as_created
from .model import load_weights, local_tensors
from .rearranged import rearrange
from .redone import beside_of

PREFIX = "draft:"  # no module has a colon in its name


def draft_of(runner: Any, config: Any) -> tuple[torch.nn.Module | None, str]:
    """This rank's draft model if it is made of the model's own layers; and why a refit leaves another draft model as it is.

    `runner` is the worker's model runner, `config` its VllmConfig. Pipeline stages but the last have no draft model.
    """
    speculative = getattr(config, "speculative_config", None)
    find = getattr(runner, "get_draft_model", None)
    draft = find() if callable(find) else getattr(getattr(runner, "drafter", None), "model", None)
    if speculative is None or not isinstance(draft, torch.nn.Module):
        return None, ""
    own = {config.model_config.model, getattr(config.model_config, "model_weights", None)}
    if speculative.method == "mtp" and speculative.draft_model_config.model in own:
        return draft, ""
    return None, f"the draft model of the method {speculative.method!r} has a checkpoint of its own"


def own_tensors(draft: torch.nn.Module, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The draft model's tensors as `local_tensors` gives them, but those that lie in the main model's storage."""
    of_model = (*model.parameters(), *beside_of(model).values())
    shared = {parameter.untyped_storage().data_ptr() for parameter in of_model}
    tensors = local_tensors(draft, as_kernels_read=True).items()
    return {PREFIX + name: tensor for name, tensor in tensors if tensor.untyped_storage().data_ptr() not in shared}


def trace_draft(draft: torch.nn.Module, model: torch.nn.Module, checkpoint: Mapping[str, HfTensor]) -> RankTrace | None:
    """Of which elements of `checkpoint` the draft model's own tensors are made; None if it has none of its layers.

    As `trace_loading` of the main model. Raises TraceError.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    with parameters_as_created(draft), _of_some_layers():
        recorder, twin = record_loading(draft, checkpoint, "vLLM", rearrange)
    traced = RankTrace(
        tuple(recorder.read(name, twin.get_parameter(name.removeprefix(PREFIX))) for name in own_tensors(draft, model))
    )
    copies = {
        f"{PREFIX}{name}.weight" for name, layer in draft.named_modules() if isinstance(layer, VocabParallelEmbedding)
    }
    if not any(tensor.names for tensor in traced.tensors if tensor.tensor.name not in copies):
        return None
    return RankTrace(tuple(_by_name_where_renumbered(tensor) for tensor in traced.tensors))


def _by_name_where_renumbered(traced: TracedTensor) -> TracedTensor:
    """MiMo's first prediction layer is its number 0 in a checkpoint, and follows the last layer in vLLM: no plan can say so."""
    found = NUMBER.search(traced.tensor.name)
    layers = {numbers_in(name).layer for name in traced.names} - {None, int(found.group()) if found else None}
    if traced.computed or not layers:
        return traced
    return TracedTensor(traced.tensor, computed="vLLM gives the layer another number", parameters=traced.names)


def load_both(
    model: torch.nn.Module,
    draft: torch.nn.Module,
    of_draft: Collection[str] | None,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Feed whole HF tensors to both models' loaders. Those of the draft are kept until the main model has read all.

    `of_draft` names them; None: any may be the draft's. Raises RuntimeError as `load_weights` does.
    """
    kept: list[tuple[str, torch.Tensor]] = []

    def keep() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            if of_draft is None or name in of_draft:
                kept.append((name, tensor.clone()))  # the main model's loader may change it
            yield name, tensor

    load_weights(model, keep(), as_kernels_read=True)
    if kept:
        with _of_some_layers():
            load_weights(draft, kept, as_kernels_read=True)


def _of_some_layers() -> AbstractContextManager[None]:
    """Loaders of draft models check that each layer has come; the misc route brings a few tensors."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:  # vLLM 0.26 has no such check that can be left out
        return nullcontext()
    return disable_mtp_completeness_check()
