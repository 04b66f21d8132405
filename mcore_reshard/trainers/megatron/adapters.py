"""LoRA adapters of Megatron-Bridge: the weights that they change, merged on the rank that holds them.

    ...linear_qkv.to_wrap.weight [rows, cols], ...linear_qkv.adapter.linear_in.weight, ...linear_out.weight
    -> ...linear_qkv.weight [rows, cols], a buffer that every refit fills anew, and moves by bulk

Golden merges whole tensors (Megatron-Bridge's export, `merge_adapter_weights`), and a matrix product of a part may round
otherwise than that part of the whole product. So a rank puts its part into a whole tensor, lets Bridge's own code merge
that, and cuts its part out again. What other ranks hold of the weight is not needed; their parts of the adapters are
gathered, which are small. Source: megatron/bridge/models/conversion/peft_bridge.py and model_bridge.py,
`stream_weights_megatron_to_hf`, of 0.3.1 and 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from mcore_reshard.trainers.world import gather_from_all, run_on_all_ranks

from .model import local_tensors, parameters_of_tensors, require, tensor_name, unwrapped, without_adapters
from .trace import as_rank_zero

_REMEDY = (
    "merge the adapters into the weights, put every `to_wrap` module in the place of its wrapper, and connect then"
)


class MergedAdapters:
    """A model with LoRA adapters as if they were merged: `local_tensors` has no adapters, and names without `to_wrap`.

    Weights that adapters change are buffers of their own, as large as the weights; `merge` fills them.
    """

    def __init__(self, bridge: Any, model_chunks: Sequence[torch.nn.Module]) -> None:
        """Collective over the training world. Raises ValueError, on all ranks, for adapters that Bridge cannot merge."""
        self._chunks = [unwrapped(chunk) for chunk in model_chunks]
        self._state = getattr(bridge.hf_pretrained, "state", {})
        self._converter = bridge._model_bridge
        tasks = bridge.get_conversion_tasks(list(model_chunks))
        self._weights = run_on_all_ranks(lambda: [*self._adapted_weights(tasks, self._adapter_tasks())])
        run_on_all_ranks(self._check_round_trip)

    def local_tensors(self) -> dict[str, torch.Tensor]:
        """`local_tensors` of the model, merged. It copies nothing: `merge` does."""
        return without_adapters(local_tensors(self._chunks)) | {each.name: each.merged for each in self._weights}

    def parameters_of_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The parameters behind every one of `local_tensors`: of merged ones, the weight and those of its adapters."""
        parameters = without_adapters(parameters_of_tensors(self._chunks))
        for each in self._weights:
            halves = (half for adapter in each.adapters for half in (adapter.linear_in_task, adapter.linear_out_task))
            parameters[each.name] = [*parameters[each.name], *(half.param_weight for half in halves)]
        return parameters

    @torch.no_grad()
    def merge(self) -> None:
        """Fill the buffers from the weights and adapters as they are now. Collective over tensor and expert parallel groups."""
        gathered: dict[str, Any] = {}
        for each in self._weights:
            if each.prefix not in gathered:  # the experts of a layer share their adapter
                with _alone(gathers=True):
                    adapters = [_with_live_weights(adapter) for adapter in each.adapters]
                    gathered[each.prefix] = self._converter.materialize_adapter_weights(adapters)
            whole = self._converter._merge_lora_adapter_weights(self._chunks, self._whole(each), gathered[each.prefix])
            each.merged.copy_(self._own_part(each, whole))

    def _whole(self, each: _AdaptedWeight) -> dict[str, torch.Tensor]:
        """Tensors by Hugging Face name in which this rank's part of a weight is right, and nothing else."""
        with _alone():
            task = _with_live_weight(each.task)
            whole = task.mapping.megatron_to_hf(task.param_weight, task.megatron_module)
            found: dict[str, torch.Tensor] = self._converter.maybe_modify_converted_hf_weight(task, whole, self._state)
        return found

    def _own_part(self, each: _AdaptedWeight, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mapping = each.task.mapping
        with as_rank_zero(each.merged.device):
            weights = self._converter.maybe_modify_loaded_hf_weight(mapping.hf_param, whole)
            part: torch.Tensor = mapping.hf_to_megatron(weights, each.task.megatron_module)
        return part

    @torch.no_grad()
    def _check_round_trip(self) -> None:
        """Raise ValueError unless Bridge's import undoes its export of every weight, each without communication."""
        for each in self._weights:
            try:
                again = self._own_part(each, self._whole(each))
                problem = "" if again.equal(_live_weight(each.task)) else "its import does not undo its export"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                raise ValueError(
                    f"Megatron-Bridge cannot merge the adapter of {each.name} on one rank ({problem}): {_REMEDY}"
                )

    def _adapter_tasks(self) -> Mapping[str, Sequence[Any]]:
        """Bridge's tasks of all adapters, by the prefix of the weight. Collective over the pipeline group."""
        try:
            tasks: Mapping[str, Sequence[Any]] = self._converter.build_adapter_conversion_tasks(self._chunks)
        except Exception as error:  # the experts of gpt-oss in Bridge 0.3.1
            raise ValueError(
                f"Megatron-Bridge cannot merge the adapters of this model ({type(error).__name__}: {error}): {_REMEDY}"
            ) from error
        return tasks

    def _adapted_weights(self, tasks: Sequence[Any], adapters: Mapping[str, Sequence[Any]]) -> Iterator[_AdaptedWeight]:
        for task in tasks:
            if task is None or task.megatron_module is None:
                continue
            prefix, wrapped, _ = task.global_param_name.partition(".to_wrap.weight")
            if wrapped and prefix in adapters:
                name = tensor_name(task.vp_stage, task.param_name).replace(".to_wrap.", ".")
                if len(adapters[prefix]) == 1 and adapters[prefix][0].adapter_key is not None:
                    raise ValueError(
                        f"{name} has the adapter {adapters[prefix][0].adapter_key} alone, which Megatron-Bridge would merge"
                        " into all that is fused in this weight: adapt all its parts (CanonicalLoRA), or none"
                    )
                if type(task.param_weight) is not torch.nn.Parameter:
                    raise ValueError(f"{name} is quantized, and has an adapter: {_REMEDY}")
                yield _AdaptedWeight(name, prefix, task, adapters[prefix], torch.empty_like(task.param_weight.detach()))


@dataclass(frozen=True, slots=True)
class _AdaptedWeight:
    name: str  # as `local_tensors` has it, without the wrapper
    prefix: str  # of its module, with global layer and expert numbers
    task: Any  # Bridge's conversion task of the weight
    adapters: Sequence[Any]  # Bridge's tasks of its adapters
    merged: torch.Tensor


def merged_adapters(bridge: Any, model_chunks: Sequence[torch.nn.Module]) -> MergedAdapters | None:
    """The model's adapters; None if no rank has any. Collective over the training world.

    Raises ValueError, on all ranks, for adapters that Megatron-Bridge's export leaves out or merges wrongly, and if there is
    no bridge.
    """
    kinds = [kind for of_rank in gather_from_all(_kinds_of_adapters(model_chunks)) for kind in of_rank]
    if wrong := [f"{name}: {why}" for name, why in kinds if why]:
        raise ValueError(
            f"Megatron-Bridge's export would give the engine other weights than {len(wrong)} adapters do, first"
            f" {wrong[0]}; {_REMEDY}"
        )
    if not kinds:
        return None
    if bridge is None:
        raise ValueError(
            f"{kinds[0][0]} has a LoRA adapter: give connect() the AutoBridge that built the model, which merges it"
        )
    return MergedAdapters(bridge, model_chunks)


def _kinds_of_adapters(model_chunks: Sequence[torch.nn.Module]) -> list[tuple[str, str]]:
    """(module, why Bridge's export is wrong there, if it is) of every module that Bridge has given an adapter."""
    kinds = []
    for path, module in (found for chunk in model_chunks for found in unwrapped(chunk).named_modules()):
        children = module._modules.keys()
        if {"to_wrap", "adapter"} <= children:
            magnitudes = any(name.endswith("weight_magnitude") for name, _ in module.adapter.named_parameters())
            kinds.append((path, "it leaves out the magnitudes of DoRA" if magnitudes else ""))
        elif {"linear_in", "linear_out"} <= children and "weight" in module._parameters:
            kinds.append((path, f"it leaves out the adapter of a {type(module).__name__}"))
    return kinds


def _live_weight(task: Any) -> torch.Tensor:
    weight: torch.Tensor = getattr(task.megatron_module, task.param_name.rpartition(".")[2])
    return weight


def _with_live_weight(task: Any) -> Any:
    """The task with the parameter that its module has now."""
    return replace(task, param_weight=_live_weight(task))


def _with_live_weights(adapter: Any) -> Any:
    return replace(
        adapter,
        linear_in_task=_with_live_weight(adapter.linear_in_task),
        linear_out_task=_with_live_weight(adapter.linear_out_task),
    )


@contextmanager
def _alone(*, gathers: bool = False) -> Iterator[None]:
    """Bridge's mappings on the pipeline stage that has the weight. Unless it `gathers`, a rank's part stands for all parts."""
    mapping = require("megatron.bridge.models.conversion.param_mapping").MegatronParamMapping

    def keep(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    def repeat(self: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * int(self.tp_size)

    def name(self: Any, tensor: torch.Tensor, module: Any, hf_param: Any) -> dict[str, torch.Tensor]:
        return {str(hf_param): tensor}

    replaced: dict[str, Any] = {"broadcast_from_pp_rank": keep, "broadcast_obj_from_pp_rank": keep}
    if not gathers:
        replaced |= {"gather_from_tp_ranks": repeat, "gather_from_ep_ranks": name}
    with ExitStack() as patches:
        for method, stand_in in replaced.items():
            patches.enter_context(mock.patch.object(mapping, method, stand_in))
        yield
