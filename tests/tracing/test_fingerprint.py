"""Digests of a model's structure: what a loader may look at changes them, weights do not."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_reshard.tracing.fingerprint import fingerprint


class Config:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class Method:
    def __init__(self) -> None:
        self.config = Config(block=[128, 128], rank=0)

    def load(self, parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.copy_(loaded)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.quant_method = Method()
        self.weight.weight_loader = self.quant_method.load
        self.weight.narrow_loader = functools.partial(self.quant_method.load, None)
        self.kind, self.names, self.itself = torch.bfloat16, {"b", "a"}, [self]
        self.register_buffer("expert_map", torch.tensor([0, 1, -1]))
        self.register_buffer("rotary", torch.zeros(3))

    def load_weights(self) -> None:
        self.weight.zero_()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])


def _replace(model: Model, tensor: torch.Tensor) -> None:
    model.layers[1].weight = torch.nn.Parameter(tensor, requires_grad=False)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a shape": lambda m: _replace(m, torch.zeros(6, 4)),
    "strides": lambda m: _replace(m, torch.zeros(6, 4).t()),
    "a dtype": lambda m: _replace(m, torch.zeros(4, 6, dtype=torch.float16)),
    "a parameter's attribute": lambda m: setattr(m.layers[1].weight, "output_dim", 0),
    "a parameter's loader": lambda m: setattr(m.layers[1].weight, "weight_loader", torch.Tensor.copy_),
    "a module's attribute": lambda m: setattr(m.layers[0], "tp_rank", 1),
    "a class": lambda m: setattr(m.layers[0], "__class__", type("Layer", (Layer,), {})),
    "a method of a class": lambda m: setattr(Layer, "load_weights", lambda self: None),
    "a config of a method": lambda m: m.layers[0].quant_method.config.block.append(64),
    "where experts are": lambda m: m.layers[1].expert_map.copy_(torch.tensor([1, 0, -1])),
    "a layer": lambda m: m.layers.append(Layer()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_loader_may_look_at_changes_it(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "load_weights", Layer.load_weights)  # to be restored
    model = Model()
    before = fingerprint(model)
    CHANGES[change](model)
    assert fingerprint(model) != before


def test_weights_and_opaque_objects_do_not() -> None:
    model = Model()
    before = fingerprint(model, (Config,))
    model.layers[0].weight.fill_(3)
    model.layers[0].rotary.fill_(3)
    model.layers[0].quant_method.config.rank = 7
    assert fingerprint(model, (Config,)) == before == fingerprint(Model(), (Config,))
    assert fingerprint(model) != before


def test_other_processes_get_the_same() -> None:
    root = Path(__file__).parents[2]
    script = "from tracing.test_fingerprint import *; print(fingerprint(Model()))"
    path = os.pathsep.join((str(root), str(root / "tests")))
    told = [
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}, **RUN
        )
        for seed in ("1", "2")
    ]
    assert told[0].stdout and told[0].stdout == told[1].stdout


RUN: dict[str, Any] = {"capture_output": True, "text": True, "check": True}


def test_what_torch_compile_leaves_in_a_model_does_not_stop_it() -> None:
    """vLLM keeps compiled callables, and modules that make up any attribute, in models that it runs with CUDA graphs."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    model = Model()
    compiled: Any = model.layers[0]
    compiled.run = torch.compile(double, backend="eager")
    compiled.run(torch.ones(2))
    compiled.held = Config(classes=torch.classes, ops=torch.ops, kind=type(double), code=double.__code__)
    assert fingerprint(model) == fingerprint(model)
    assert fingerprint(model) != fingerprint(Model())
