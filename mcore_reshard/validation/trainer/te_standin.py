"""A parameters-only stand-in for Transformer Engine: a test fixture for models on the CPU.

Megatron-Core wraps Transformer Engine's linears and norms, and Megatron-Bridge refuses to import without it. Building a
model and moving its weights needs only their parameters. `install` registers modules of the same names in `sys.modules`;
their classes (te_standin_modules) own these parameters, and Megatron's own wrappers run unmodified. `mamba_ssm`, `fla`
and `triton` are stood in for where they are absent.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import torch

from mcore_reshard.validation.standins import InertModule, inert, inert_classes, register
from mcore_reshard.validation.trainer import te_standin_modules as modules


def is_real() -> bool:
    """Whether the Transformer Engine that megatron finds in this process is the real one."""
    module = sys.modules.get("transformer_engine")
    if module is not None:
        return not getattr(module, "__standin__", False)
    return importlib.util.find_spec("transformer_engine") is not None


def install(*, on_cuda: bool = False) -> None:
    """Register stand-ins for the packages that models cannot be built with here; `on_cuda` says where models will be.

    On the CPU these include Transformer Engine, whose modules need a GPU. Calling this again changes nothing.
    Raises RuntimeError where megatron was imported before: it decides at import which packages it has.
    """
    if "transformer_engine" not in sys.modules and not (on_cuda and is_real()):
        if "megatron.core" in sys.modules:
            raise RuntimeError("te_standin.install() must run before megatron.core is imported")
        register(_TRANSFORMER_ENGINE)
    if importlib.util.find_spec("mamba_ssm") is None:
        register(_MAMBA_SSM)
    if importlib.util.find_spec("fla") is None:
        register(_FLASH_LINEAR_ATTENTION)
    if importlib.util.find_spec("triton") is None:
        _let_torch_conclude_there_is_no_triton()
        register(_TRITON, InertModule)


@contextlib.contextmanager
def cpu_as_device() -> Iterator[None]:
    """Redirect Megatron's hard-coded CUDA calls to the CPU while a model of the stand-in is built, loaded or exported.

    Megatron places a few buffers (router bias, rotary tables) on `torch.cuda.current_device()` and moves tied
    embeddings with `.cuda()`. It forks CUDA random states around initialization. With context parallelism it makes a
    stream and pins a tensor. With the real Transformer Engine this does nothing.
    """
    if is_real():
        yield
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    make_tensor = torch.tensor

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make_tensor(*args, **kwargs)

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "Stream", inert("Stream")),
        mock.patch.object(torch, "tensor", unpinned),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *args, **kwargs: contextlib.nullcontext()),
        mock.patch.dict(vars(sys.modules.get(_NAMES_CUDA, types.ModuleType(""))), torch=_TorchOnCpu()),
    ):
        yield


_NAMES_CUDA = "megatron.bridge.models.minimax_m2.minimax_m2_bridge"  # makes torch.device("cuda", current device)


class _TorchOnCpu:
    """torch, whose `device("cuda", index)` is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: Any = None) -> torch.device:
        return torch.device("cpu" if kind == "cuda" else kind)


def _null_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _unavailable(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("this kernel is not part of the stand-in")


_TRANSFORMER_ENGINE: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": "2.11.0"},
    "transformer_engine.common.recipe": {
        "Format": enum.Enum("Format", {"E4M3": "e4m3", "E5M2": "e5m2", "HYBRID": "hybrid"}),
        "Float8BlockScaling": modules.Float8BlockScaling,
        **inert_classes("Recipe", "DelayedScaling"),
    },
    "transformer_engine.pytorch": {
        **{name: getattr(modules, name) for name in modules.TRANSFORMER_ENGINE},
        "fp8_model_init": modules.fp8_model_init,
        **inert_classes("TransformerLayer", base=torch.nn.Module),
        **inert_classes("Fp8Padding", "Fp8Unpadding"),
    },
    "transformer_engine.pytorch.fp8": {
        "fp8_autocast": _null_context,
        "fp8_model_init": modules.fp8_model_init,
        **inert_classes("FP8GlobalStateManager"),
    },
    "transformer_engine.pytorch.distributed": {
        "activation_recompute_forward": _null_context,
        **inert_classes("CudaRNGStatesTracker"),
    },
    "transformer_engine.pytorch.ops": {
        **inert_classes("Sequential", base=torch.nn.Sequential),
        **inert_classes("FusibleOperation", base=torch.nn.Module),
    },
    "transformer_engine.pytorch.router": dict.fromkeys(
        ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    ),
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": modules.QuantizedTensor},
    "transformer_engine.pytorch.tensor.utils": {"replace_raw_data": None},
}

_MAMBA_SSM: dict[str, dict[str, Any]] = {
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": modules.GatedRMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": dict.fromkeys(
        ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), _unavailable
    ),
}

# Gated DeltaNet owns its parameters in Megatron-Core; only its forward needs these.
_FLASH_LINEAR_ATTENTION: dict[str, dict[str, Any]] = {
    "fla.modules.convolution": {"causal_conv1d": _unavailable},
    "fla.modules.l2norm": {"l2norm": _unavailable},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _unavailable},
}


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """`@jit` and `@jit(...)`: the function itself."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


# Megatron's kernels are decorated at import and never launched.
_TRITON: dict[str, dict[str, Any]] = {
    "triton": {"__version__": "3.4.0", **dict.fromkeys(("jit", "autotune", "heuristics"), _decorator)},
    "triton.language.extra.libdevice": {},
    "triton.runtime.cache": {},
}


def _let_torch_conclude_there_is_no_triton() -> None:
    """torch caches the answer; asked after the stand-in is in place it would try to use it."""
    import torch._dynamo
    import torch._inductor.runtime.triton_compat  # noqa: F401
    import torch.utils._triton as probes

    for name in dir(probes):
        if name.startswith("has_triton"):
            with contextlib.suppress(Exception):
                getattr(probes, name)()
