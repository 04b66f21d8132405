"""A twin of a live module: the same modules and attributes, with meta tensors in place of weights."""

from __future__ import annotations

from typing import Any

import torch


def meta_twin(module: torch.nn.Module) -> torch.nn.Module:
    """The module tree anew, without its weights. Loaders find the same names, shapes, strides, classes and attributes.

    Tied parameters stay tied. Integer buffers keep their values, because loaders look experts up in them. Other attributes
    than tensors and submodules are those of the live module; `Recorder` refuses writes into tensors in them.
    """
    return _twin_module(module, {}, {})


def _twin_module(module: Any, modules: dict[int, Any], tensors: dict[int, torch.Tensor]) -> Any:
    if id(module) in modules:
        return modules[id(module)]
    twin = modules[id(module)] = object.__new__(type(module))
    attributes = vars(module).items()  # some layers keep what they derive from weights as plain tensors
    vars(twin).update({k: _twin_tensor(v, tensors) if isinstance(v, torch.Tensor) else v for k, v in attributes})
    twin.__dict__["_modules"] = {
        name: None if child is None else _twin_module(child, modules, tensors)
        for name, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        own = {name: None if t is None else _twin_tensor(t, tensors) for name, t in vars(module)[kind].items()}
        twin.__dict__[kind] = own
    return twin


def _twin_tensor(tensor: torch.Tensor, tensors: dict[int, torch.Tensor]) -> torch.Tensor:
    if not (tensor.dtype.is_floating_point or isinstance(tensor, torch.nn.Parameter)):
        return tensor
    if id(tensor) not in tensors:
        size, stride = tuple(tensor.shape), tensor.stride()
        data = torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")
        twin = torch.Tensor._make_subclass(type(tensor), data, False)
        vars(twin).update(vars(tensor))
        tensors[id(tensor)] = twin
    return tensors[id(tensor)]
