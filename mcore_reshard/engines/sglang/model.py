"""A live SGLang model as the destination of a refit: its tensors, its loader, and what must follow direct writes.

A refit writes parameters in the layout in which `load_weights` leaves them. It refuses a model whose kernels read another
layout (`kernel_layouts`). File names below are SGLang 0.5.23's, under sglang/srt.

SGLang's weight updates have sessions: `begin_weight_update` undoes packing, `end_weight_update` packs again. It derives
weights of attention only where the session has loaded nothing; a custom weight loader counts as a load, so call
`after_direct_writes` in it (managers/scheduler_components/weight_updater.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mcore_reshard.engines.kernel_layouts import refuse_kernel_layouts

# Methods whose process_weights_after_loading leaves parameters as they were loaded, but for CPUs with AMX
# (layers/quantization/unquant.py).
_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
_AS_LOADED_REMEDY = (
    "start SGLang with --moe-runner-backend triton for experts, and without the other features that are named here"
)
# Set on layers that keep copies of weights, which `load_weights` does not renew: why SGLang refuses weight updates.
_STALE_COPIES = "_derived_weight_cache_error"


def require_sglang() -> None:
    """Import SGLang, or raise an ImportError that says how to install it."""
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "SGLang is not installed; from a clone of mcore-reshard: pip install '.[sglang]', or for a CPU make test-sglang"
        ) from error


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter that `load_weights` fills on this rank, by SGLang name; the live storage, not copies.

    Tied weights appear once. Raises RuntimeError where kernels read another layout than `load_weights` leaves, naming
    every such parameter.
    """
    refuse_kernel_layouts(kernel_layouts(model), _AS_LOADED_REMEDY)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Feed whole HF tensors to the model's own loader. DeepSeek's wants q_a_proj and kv_a_proj_with_mqa in one call.

    Raises RuntimeError as `local_tensors` does.
    """
    refuse_kernel_layouts(kernel_layouts(model), _AS_LOADED_REMEDY)
    with torch.no_grad():
        model.load_weights(iter(named_tensors))  # type: ignore[operator]


def after_direct_writes(model: torch.nn.Module) -> None:
    """Derive again the tensors that engine layers derive from parameters.

    Multi-head latent attention absorbs kv_b_proj into w_kc and w_vc (models/deepseek_common/deepseek_weight_loader.py). A
    model writes these in place, so captured CUDA graphs stay valid.
    """
    if hasattr(model, "post_load_weights"):
        with torch.no_grad():
            model.post_load_weights()  # type: ignore[operator]


def kernel_layouts(model: torch.nn.Module) -> dict[str, str]:
    """Parameters that kernels do not read as `load_weights` leaves them -> the reason: no refit can write these.

    A whitelist decides: unquantized linear layers, embeddings and experts, on kernels that leave them alone. Parameters of
    layers without a quantization method, as norms, are read as they are.
    """
    changed: dict[str, str] = {}
    for prefix, layer in model.named_modules():
        if reason := _rearranged_by(layer):
            changed |= {f"{prefix}.{name}": reason for name, _ in layer.named_parameters(recurse=False)}
    return changed


def _rearranged_by(layer: torch.nn.Module) -> str | None:
    """Why kernels read the layer's parameters in another layout than `load_weights` leaves; None where they do not."""
    if reason := getattr(layer, _STALE_COPIES, None):
        return str(reason)
    method: Any = getattr(layer, "quant_method", None)
    if method is None or not layer._parameters:
        return None
    if getattr(layer, "use_intel_amx_backend", False):
        return "packed for AMX after loading"
    kind = type(method).__name__
    if kind in _AS_LOADED:
        return None
    if kind != "UnquantizedFusedMoEMethod":
        return f"{kind} is not known to leave parameters as they were loaded"
    if method.w13_swiglu_interleaved:
        return "rows of gate and up are interleaved after loading (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED)"
    if method.use_flashinfer_trtllm_moe:
        return "the flashinfer_trtllm backend permutes experts after loading"
    if method._aiter_runner is not None:
        return "the AITER backend shuffles experts after loading"
    return None
