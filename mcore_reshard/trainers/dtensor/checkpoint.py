"""The checkpoint that a live module would save: its names and shapes, and the boxes of module tensors that it is made of.

transformers 5 keeps the experts of a layer in one tensor, and checkpoints keep one tensor for each expert:

    model.layers.0.mlp.experts.gate_up_proj [4, 2 * 48, 32] -> model.layers.0.mlp.experts.1.up_proj.weight [48, 32], ...

No rule here says so: transformers' own `revert_weight_conversion`, which `save_pretrained` runs, is recorded on meta tensors.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.tracing.recorder import Recorder

Boxes = tuple[tuple[str, StridedCopy], ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Every tensor by its Hugging Face name, and what fills it: (module tensor, copy from the whole of that tensor)."""

    tensors: Mapping[str, HfTensor]
    made_of: Mapping[str, Boxes]

    def within(self) -> dict[str, list[tuple[str, StridedCopy]]]:
        """By module tensor: (Hugging Face name, copy from that tensor to the whole of the module's)."""
        found: dict[str, list[tuple[str, StridedCopy]]] = {}
        for name, boxes in self.made_of.items():
            for of, box in boxes:
                found.setdefault(of, []).append((name, box.inverse))
        return found


def read_checkpoint(module: torch.nn.Module, tensors: Mapping[str, HfTensor]) -> Checkpoint:
    """What `module`, which has these whole tensors, would save.

    Modules that are no transformers model save their tensors as they are. Raises ValueError for a transformers model
    whose tensors are not those of its class, or that it converts by more than a rearrangement.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return _renamed({name: name for name in tensors}, tensors)
    if int(transformers.__version__.partition(".")[0]) < 5:
        _refuse_plain_shards(module)
        return _renamed(_names_before_5(module, tensors), tensors)
    return _converted(module, tensors)


def _renamed(names: Mapping[str, str], tensors: Mapping[str, HfTensor]) -> Checkpoint:
    """`names`: the checkpoint's name for each of the module's."""
    made_of = {}
    for name, tensor in tensors.items():
        strides = row_major_strides(tensor.shape)
        made_of[names[name]] = ((name, StridedCopy(tensor.shape, 0, strides, 0, strides).coalesced()),)
    return Checkpoint({names[name]: tensor for name, tensor in tensors.items()}, made_of)


def _names_before_5(module: Any, names: Iterable[str]) -> dict[str, str]:
    """Vision-language models that changed their modules still save the old names.

    Source: transformers 4.57 modeling_utils.py, `save_pretrained`.
    """
    from transformers import modeling_utils

    classes = " ".join(each.__name__.lower() for each in type(module).__mro__)
    renames: dict[str, str] = {}
    if any(kind in classes for kind in modeling_utils.VLMS):
        for old, new in module._checkpoint_conversion_mapping.items():
            renames[new] = re.sub(r"\(.*\)", "", old.lstrip("^"))
    found = {}
    for name in names:
        applied = (re.subn(new, old, name) for new, old in renames.items())
        found[name] = next((renamed for renamed, count in applied if count), name)
    return found


def _refuse_plain_shards(module: Any) -> None:
    """transformers 4 keeps parts of some weights as plain tensors, which look like whole ones."""
    if module.tp_size and (
        styles := sorted({s for s in module.tp_plan.values() if s.startswith(("local", "grouped"))})
    ):
        raise ValueError(
            f"transformers {sys.modules['transformers'].__version__} cut this model by {', '.join(styles)}: weights are"
            " then plain tensors that do not say which part they are. Load it without tp_plan, and cut it by"
            " torch.distributed.tensor.parallel.parallelize_module and fully_shard, or take transformers 5"
        )


def _converted(module: Any, tensors: Mapping[str, HfTensor]) -> Checkpoint:
    from transformers.core_model_loading import revert_weight_conversion

    bare = _without_weights(module)
    _check_against_class(bare, tensors)
    recorder = Recorder()
    standins = {name: recorder.source(name, tensor) for name, tensor in tensors.items()}
    with torch.no_grad(), recorder:
        saved = revert_weight_conversion(bare, standins)
    shapes, made_of = {}, {}
    for name, tensor in saved.items():
        traced = recorder.read(name, tensor)
        if traced.computed:
            raise ValueError(
                f"transformers makes {name} of {', '.join(traced.names)} by {traced.computed}, which rearranges nothing;"
                " give a model whose tensors are those of its checkpoint"
            )
        shapes[name] = HfTensor(tuple(tensor.shape), dtype_name(tensor.dtype))
        made_of[name] = traced.copies
    checkpoint = Checkpoint(shapes, made_of)
    for name, boxes in checkpoint.within().items():
        if (saved_elements := sum(box.elements for _, box in boxes)) != prod(tensors[name].shape):
            raise ValueError(f"transformers saves {saved_elements} of {prod(tensors[name].shape)} elements of {name}")
    return checkpoint


def _without_weights(module: Any) -> Any:
    """A model of this config on meta, of the class that `fully_shard` derived another from: conversions go by class."""
    from torch.distributed.fsdp import FSDPModule

    kind: Any = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
    with torch.device("meta"):
        bare = kind(copy.deepcopy(module.config))
    if (conversions := getattr(module, "_weight_conversions", None)) is not None:  # as loaded, if it was
        bare._weight_conversions = conversions
    return bare


def _check_against_class(bare: torch.nn.Module, tensors: Mapping[str, HfTensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in bare.state_dict().items()}
    if unknown := [name for name in tensors if name not in shapes]:
        raise ValueError(
            f"{type(bare).__name__} has no {unknown[0]} (and {len(unknown) - 1} more): give the model that the engine serves,"
            " without heads of its own"
        )
    if other := [name for name, tensor in tensors.items() if tensor.shape != shapes[name]]:
        raise ValueError(
            f"{other[0]} has the shape {list(tensors[other[0]].shape)}, in the config it has {list(shapes[other[0]])}"
            f" ({len(other)} such): a plain tensor must be whole on every rank, and a part a DTensor"
        )
