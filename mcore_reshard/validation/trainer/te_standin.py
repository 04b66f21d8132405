"""A parameters-only stand-in for Transformer Engine: a test fixture for models on the CPU.

Megatron-Core wraps Transformer Engine's linears and norms, and Megatron-Bridge refuses to import without it. Building a
model and moving its weights needs only their parameters. `install` registers modules of the same names in `sys.modules`;
their classes (te_standin_modules) own the parameters of the real ones and cannot run forward. Megatron's own wrappers
then run unmodified. `mamba_ssm` and `triton` are stood in for where they are absent.

Call `install()` before anything imports megatron, which keeps what it finds then. On a GPU the real Transformer Engine
is used where it is installed.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch

from mcore_reshard.validation.trainer import te_standin_fp8
from mcore_reshard.validation.trainer import te_standin_modules as modules

VERSION = "2.11.0"


def is_real() -> bool:
    """Whether the Transformer Engine that megatron finds in this process is the real one."""
    module = sys.modules.get("transformer_engine")
    if module is not None:
        return not getattr(module, "__standin__", False)
    return importlib.util.find_spec("transformer_engine") is not None


def install(*, on_cuda: bool = False) -> None:
    """Register stand-ins for what models cannot be built with here; `on_cuda` says where they will be.

    On a GPU that is what is not installed; on the CPU it is Transformer Engine in any case, which cannot be built with
    there. A process keeps what it had first: calling this again changes nothing.
    Raises RuntimeError when megatron was imported without Transformer Engine: it decides at import what it has.
    """
    if "transformer_engine" not in sys.modules and not (on_cuda and is_real()):
        if "megatron.core" in sys.modules:
            raise RuntimeError("te_standin.install() must run before megatron.core is imported")
        _register_transformer_engine()
    if importlib.util.find_spec("mamba_ssm") is None:
        _register_mamba_ssm()
    if importlib.util.find_spec("triton") is None:
        _register_triton()


@contextlib.contextmanager
def cpu_as_device() -> Iterator[None]:
    """Redirect Megatron's hard-coded CUDA calls to the CPU while a model of the stand-in is built, loaded or exported.

    With the real Transformer Engine this does nothing. With the stand-in the model is on the CPU on any machine.

    Megatron places a few buffers (router bias, rotary tables) on `torch.cuda.current_device()`, forks CUDA random
    states around initialization, moves tied embeddings with `.cuda()`, and with context parallelism makes a stream and
    pins a tensor.
    """
    if is_real():
        yield
        return
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with (
        mock.patch.object(torch.cuda, "is_available", lambda: False),
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        mock.patch.object(torch.cuda, "Stream", _inert("Stream")),
        mock.patch.object(torch, "tensor", _unpinned(torch.tensor)),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *args, **kwargs: contextlib.nullcontext()),
    ):
        yield


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        del pin_memory
        return make(*args, **kwargs)

    return unpinned


class _Format(enum.Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


def _inert(name: str, *bases: type) -> type:
    """A class that can be named, subclassed and made, and does nothing."""
    return type(name, bases or (object,), {"__init__": lambda self, *args, **kwargs: None})


def _null_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _unavailable(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("this kernel is not part of the stand-in")


def _register(name: str, **contents: Any) -> None:
    _place(types.ModuleType(name), **contents)


def _place(module: types.ModuleType, **contents: Any) -> None:
    name = module.__name__
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__dict__.update(contents, __standin__=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _register_transformer_engine() -> None:
    _register("transformer_engine", __version__=VERSION)
    _register("transformer_engine.common")
    _register(
        "transformer_engine.common.recipe",
        Format=_Format,
        Recipe=_inert("Recipe"),
        DelayedScaling=_inert("DelayedScaling"),
        Float8BlockScaling=te_standin_fp8.Float8BlockScaling,
    )
    _register(
        "transformer_engine.pytorch",
        Linear=modules.Linear,
        LayerNormLinear=modules.LayerNormLinear,
        GroupedLinear=modules.GroupedLinear,
        LayerNorm=modules.LayerNorm,
        RMSNorm=modules.RMSNorm,
        DotProductAttention=modules.DotProductAttention,
        TransformerLayer=_inert("TransformerLayer", torch.nn.Module),
        fp8_model_init=te_standin_fp8.fp8_model_init,
        Fp8Padding=_inert("Fp8Padding"),
        Fp8Unpadding=_inert("Fp8Unpadding"),
    )
    _register(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=_inert("FP8GlobalStateManager"),
        fp8_autocast=_null_context,
        fp8_model_init=te_standin_fp8.fp8_model_init,
    )
    _register(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=_inert("CudaRNGStatesTracker"),
        activation_recompute_forward=_null_context,
    )
    _register(
        "transformer_engine.pytorch.ops",
        Sequential=_inert("Sequential", torch.nn.Sequential),
        FusibleOperation=_inert("FusibleOperation", torch.nn.Module),
    )
    _register(
        "transformer_engine.pytorch.router",
        fused_compute_score_for_moe_aux_loss=None,
        fused_moe_aux_loss=None,
        fused_topk_with_score_function=None,
    )
    _register("transformer_engine.pytorch.tensor", QuantizedTensor=te_standin_fp8.QuantizedTensor)
    _register("transformer_engine.pytorch.tensor.utils", replace_raw_data=None)


def _register_mamba_ssm() -> None:
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        _register(name)
    _register("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=modules.GatedRMSNorm)
    _register(
        "mamba_ssm.ops.triton.ssd_combined",
        mamba_chunk_scan_combined=_unavailable,
        mamba_split_conv1d_scan_combined=_unavailable,
    )


class _Triton(types.ModuleType):
    """Any name asked of it is an inert class: Megatron's kernels are decorated at import and never launched."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _inert(name)


def _register_triton() -> None:
    _let_torch_conclude_there_is_no_triton()
    for name in (
        "triton",
        "triton.language",
        "triton.language.extra",
        "triton.language.extra.libdevice",
        "triton.runtime",
        "triton.runtime.cache",
    ):
        _place(_Triton(name))
    sys.modules["triton"].__dict__.update(
        __version__="3.4.0", jit=_decorator, autotune=_decorator_factory, heuristics=_decorator_factory
    )


def _let_torch_conclude_there_is_no_triton() -> None:
    """torch caches the answer; asked after the stand-in is in place it would try to use it."""
    import torch._dynamo
    import torch._inductor.runtime.triton_compat  # noqa: F401
    import torch.utils._triton as probes

    for name in dir(probes):
        if name.startswith("has_triton"):
            with contextlib.suppress(Exception):
                getattr(probes, name)()


def _decorator(*args: Any, **kwargs: Any) -> Any:
    """`@jit` and `@jit(...)`: the function itself."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


def _decorator_factory(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function
