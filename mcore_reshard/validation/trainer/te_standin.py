"""A parameters-only stand-in for Transformer Engine: a test fixture for models on the CPU.

Megatron-Core wraps Transformer Engine's linears and norms, and Megatron-Bridge refuses to import without it, yet
building a model and moving its weights needs only their parameters. This module registers modules of the same names
in `sys.modules` whose classes own the parameters of the real ones (name, shape, dtype, tensor-parallel attributes of
Transformer Engine 2.11) and cannot run forward. Megatron's own wrappers then run unmodified. The same is done for
`mamba_ssm` and `triton`, each only where it is absent.

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


class _ParameterOwner(torch.nn.Module):
    """What Megatron's wrappers call on any Transformer Engine module besides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_initialized = False
        self.save_original_input = False  # Megatron sets it where it builds for FP8
        self.tp_group: Any = None

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        del num_gemms

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("the stand-in for Transformer Engine holds parameters and cannot run forward")


class Linear(_ParameterOwner):
    """`weight` [out, in] and optional `bias` [out], cut over `tp_size` on the side that `parallel_mode` names."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], object] | None = None,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        **ignored: Any,
    ) -> None:
        super().__init__()
        del ignored
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.tp_size, self.tp_group, self.parallel_mode = tp_size, tp_group, parallel_mode
        self.sequence_parallel, self.use_bias = sequence_parallel, bias
        self._placement: dict[str, Any] = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        self._init_method = init_method
        self._add_weights()

    def _add_weights(self) -> None:
        self._add_weight("weight", "bias")

    def _add_weight(self, weight_name: str, bias_name: str) -> None:
        shape = (self.out_features, self.in_features)
        weight = te_standin_fp8.parameter(shape, self._init_method, **self._placement)
        self.register_parameter(weight_name, weight)
        _mark_tensor_parallel(weight, 1 if self.parallel_mode == "row" else 0)
        if not self.use_bias:
            setattr(self, bias_name, torch.Tensor())  # the real one leaves an empty tensor that is no parameter
            return
        bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._placement))
        self.register_parameter(bias_name, bias)
        if self.parallel_mode == "column":
            _mark_tensor_parallel(bias, 0)
        elif self.parallel_mode == "row":
            _set(bias, sequence_parallel=self.sequence_parallel)


class LayerNormLinear(Linear):
    """A `Linear` that also owns the norm before it: `layer_norm_weight` [in] and, for LayerNorm, its bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **linear: Any,
    ) -> None:
        self._norm = (in_features, normalization, 0.0 if zero_centered_gamma else 1.0)
        super().__init__(in_features, out_features, **linear)

    def _add_weights(self) -> None:
        size, normalization, fill = self._norm
        self.layer_norm_weight = torch.nn.Parameter(torch.full((size,), fill, **self._placement))
        _set(self.layer_norm_weight, sequence_parallel=self.sequence_parallel)
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(size, **self._placement))
            _set(self.layer_norm_bias, sequence_parallel=self.sequence_parallel)
        super()._add_weights()


class GroupedLinear(Linear):
    """One `weight{i}` and optional `bias{i}` for each of `num_gemms` experts."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **linear: Any) -> None:
        self._num_gemms = num_gemms
        super().__init__(in_features, out_features, **linear)
        self.num_gemms = num_gemms

    def _add_weights(self) -> None:
        for expert in range(self._num_gemms):
            self._add_weight(f"weight{expert}", f"bias{expert}")


class RMSNorm(_ParameterOwner):
    """`weight` [hidden]."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
        **ignored: Any,
    ) -> None:
        super().__init__()
        del eps, ignored
        size = hidden_size if hidden_size is not None else normalized_shape
        assert size is not None, "a norm needs its size"
        owners: dict[str, Any] = {"dtype": params_dtype or dtype or torch.get_default_dtype(), "device": device}
        self.weight = torch.nn.Parameter(torch.full((size,), 0.0 if zero_centered_gamma else 1.0, **owners))
        if isinstance(self, LayerNorm):
            self.bias = torch.nn.Parameter(torch.zeros(size, **owners))
        if sequence_parallel is not None:
            for parameter in self.parameters(recurse=False):
                _set(parameter, sequence_parallel=sequence_parallel)


class LayerNorm(RMSNorm):
    """`weight` and `bias` [hidden]."""


class DotProductAttention(_ParameterOwner):
    """Owns nothing, or with learnable sinks `softmax_offset`: float32 [heads / tp]."""

    # Megatron inspects this signature to learn which arguments the installed version takes.
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size, dtype=torch.float32))


class GatedRMSNorm(torch.nn.Module):
    """mamba_ssm's `RMSNorm` with a gate: `weight` [hidden], no bias."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        del eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)


class _Format(enum.Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


def _set(parameter: torch.nn.Parameter, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)


def _mark_tensor_parallel(parameter: torch.nn.Parameter, dim: int) -> None:
    _set(parameter, tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


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
    inert = _inert
    _register("transformer_engine", __version__=VERSION)
    _register("transformer_engine.common")
    _register(
        "transformer_engine.common.recipe",
        Format=_Format,
        Recipe=inert("Recipe"),
        DelayedScaling=inert("DelayedScaling"),
        Float8BlockScaling=te_standin_fp8.Float8BlockScaling,
    )
    _register(
        "transformer_engine.pytorch",
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=GroupedLinear,
        LayerNorm=LayerNorm,
        RMSNorm=RMSNorm,
        DotProductAttention=DotProductAttention,
        TransformerLayer=inert("TransformerLayer", torch.nn.Module),
        fp8_model_init=te_standin_fp8.fp8_model_init,
        Fp8Padding=inert("Fp8Padding"),
        Fp8Unpadding=inert("Fp8Unpadding"),
    )
    _register(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=inert("FP8GlobalStateManager"),
        fp8_autocast=_null_context,
        fp8_model_init=te_standin_fp8.fp8_model_init,
    )
    _register(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=inert("CudaRNGStatesTracker"),
        activation_recompute_forward=_null_context,
    )
    _register(
        "transformer_engine.pytorch.ops",
        Sequential=inert("Sequential", torch.nn.Sequential),
        FusibleOperation=inert("FusibleOperation", torch.nn.Module),
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
    _register("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedRMSNorm)
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
