"""Parameters of a live vLLM model as its loaders want them: with the classes and attributes that they were created with.

Block-FP8 layers replace their parameters once these are loaded. The new ones have lost what loaders ask for, such as the
methods of BlockQuantScaleParameter and `quant_method` of experts' scales. vLLM records every layer's first parameters on
the meta device, for reloads of its own. Source: vLLM 0.26 and 0.32, model_loader/reload/layerwise.py, sanitize.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

BESIDE = (
    "_loaded_beside"  # attribute of a layer: tensors that loaders fill in place of its parameters, by name (`redone`)
)


@contextmanager
def parameters_as_created(model: torch.nn.Module) -> Iterator[None]:
    """Within it, parameters that were replaced have their first class and attributes; bytes and addresses stay.

    Tensors that are kept beside a layer take the place of its parameters. Any other parameter of another shape or dtype
    than the first one is left alone.
    """
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    replaced: dict[int, tuple[Any, type, dict[str, Any]]] = {}
    aside: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    try:
        for layer in (layer for layer in model.modules() if layer._parameters):
            recorded = recorded_parameters(layer)
            if beside := layer.__dict__.get(BESIDE):
                aside.append((layer, dict(layer._parameters)))
                layer._parameters.update(beside)
            for name, parameter in layer.named_parameters(recurse=False):
                first = recorded.get(name)
                if first is None:
                    continue
                attributes = {key: _unwrapped(value) for key, value in vars(first).items()}
                if type(first) is type(parameter) and attributes.keys() <= vars(parameter).keys():
                    continue
                if first.shape != parameter.shape or first.dtype != parameter.dtype or id(parameter) in replaced:
                    continue
                replaced[id(parameter)] = (parameter, type(parameter), dict(vars(parameter)))
                _become(parameter, type(first), attributes)
                restore_layer_refs(parameter, layer)  # recorded loaders are methods of no layer
        yield
    finally:
        for layer, parameters in aside:
            layer._parameters.update(parameters)
        for parameter, kind, attributes in replaced.values():
            _become(parameter, kind, attributes)


def recorded_parameters(layer: torch.nn.Module) -> dict[str, Any]:
    """A layer's first parameters by name, on the meta device. vLLM 0.32 leaves out biases, and tables that no loader fills."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    recorded: dict[str, Any] = get_layerwise_info(layer).restore_metadata[0]
    return recorded


def as_created(first: Any, layer: torch.nn.Module, device: torch.device) -> torch.nn.Parameter:
    """A parameter of zeros like `first`, one of `recorded_parameters`."""
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    data = torch.empty_strided(tuple(first.shape), first.stride(), dtype=first.dtype, device=device).zero_()
    parameter = torch.nn.Parameter(data, requires_grad=False)
    _become(parameter, type(first), {key: _unwrapped(value) for key, value in vars(first).items()})
    restore_layer_refs(parameter, layer)
    return parameter


def _unwrapped(value: Any) -> Any:
    """A loader without what vLLM's reload wraps around those that it records: afterwards that wrapper loads nothing."""
    while getattr(value, "__name__", "") == "online_process_loader":
        value = value.__wrapped__
    return value


def _become(parameter: torch.nn.Parameter, kind: type, attributes: dict[str, Any]) -> None:
    parameter.__class__ = kind
    vars(parameter).clear()
    vars(parameter).update(attributes)
