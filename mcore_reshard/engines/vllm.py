"""A live vLLM model as the destination of a refit: its tensors, its loader, and what must follow direct writes.

Direct writes put bytes into the parameters as `load_weights` leaves them. That is what the kernels read for bf16 dense
layers and for experts on the Triton backend; `kernel_layouts` names every parameter for which it is not. File names
below are vLLM 0.32's, under vllm/model_executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mcore_reshard.planner.mesh import GenMesh

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Quantisation methods whose process_weights_after_loading leaves CUDA parameters as they were loaded.
_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "_GateLinearMethod"}
_AS_LOADED_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON"}


def require_vllm() -> None:
    """Import vLLM, or raise an ImportError that names the extra to install."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError("vLLM is not installed: pip install 'mcore-reshard[vllm]'") from error


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that `load_weights` fills on this rank, by vLLM name; the live storage, not copies.

    These are the parameters. No supported family loads into buffers (a Mamba mixer's `conv_weights` is a view of its
    `conv1d.weight`). Tied weights appear once. What attention derives from parameters after loading is left out.
    """
    derived = {
        f"{prefix}.{name}"
        for prefix, layer in _layers_with_derived_weights(model)
        for name, _ in layer.named_parameters(recurse=False)
    }
    return {name: parameter.detach() for name, parameter in model.named_parameters() if name not in derived}


def load_weights(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Feed HF tensors to the model's own loader, as the misc route and golden do; any subset, whole tensors.

    The tensors may be changed: gpt-oss zeroes expert biases in place (models/gpt_oss.py, _load_weights_other).
    Raises RuntimeError where kernels have rearranged parameters, which the raw loaders would corrupt (vLLM #42821).
    """
    rearranged = kernel_layouts(model)
    if rearranged:
        name, reason = next(iter(rearranged.items()))
        raise RuntimeError(f"{len(rearranged)} parameters cannot be loaded in place, such as {name}: {reason}")
    with torch.no_grad():
        model.load_weights(iter(named_tensors))  # type: ignore[operator]


def after_direct_writes(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Recompute what attention layers hold in other tensors than their parameters; returns the layers' names.

    MLA absorbs `kv_b_proj` into W_UV and W_UK_T, views of the parameter in plain bf16 and copies otherwise
    (layers/attention/mla_attention.py, process_weights_after_loading), and some backends keep attention sinks as fp32
    copies (v1/attention/backends/flashinfer.py). `dtype` is the activation dtype, `vllm_config.model_config.dtype`.
    vLLM ends its own weight updates with the same call (model_loader/reload/layerwise.py, _finalize_attention_layer),
    which writes in place, so captured CUDA graphs stay valid.
    """
    done = []
    with torch.no_grad():
        for name, layer in _layers_with_derived_weights(model):
            layer.process_weights_after_loading(dtype)
            done.append(name)
    return done


def kernel_layouts(model: torch.nn.Module) -> dict[str, str]:
    """Parameters whose bytes differ from what `load_weights` wrote, with the reason: not for direct writes.

    A whitelist: unquantised linear layers and embeddings, and experts before `process_weights_after_loading` or on a
    backend that leaves them alone (layers/fused_moe/oracle/unquantized.py, convert_to_unquantized_kernel_format).
    """
    changed: dict[str, str] = {}
    for prefix, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        reason = None if method is None else _rearranged_by(method)
        if reason:
            changed |= {f"{prefix}.{name}": reason for name, _ in layer.named_parameters(recurse=False)}
    return changed


def gen_sizes_of(vllm_config: VllmConfig) -> GenMesh:
    """The generation mesh of a vLLM configuration.

    Raises ValueError for what a `GenMesh` cannot say: experts cut over data parallelism, experts that move at run time
    or are not placed linearly, and prefill context parallelism.
    """
    parallel = vllm_config.parallel_config
    tp, pp, dp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    moe = vllm_config.model_config.is_moe
    expert_parallel = moe and parallel.enable_expert_parallel and tp * dp > 1
    problems = []
    if moe and dp > 1 and not expert_parallel:
        problems.append(f"without expert parallelism vLLM cuts experts by tp*dp = {tp * dp}; run replicas as engines")
    if expert_parallel and parallel.enable_eplb:
        problems.append("expert-parallel load balancing (EPLB) moves experts at run time")
    if expert_parallel and parallel.expert_placement_strategy != "linear":
        problems.append(f"expert placement {parallel.expert_placement_strategy!r} is not 'linear'")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        problems.append("prefill context parallelism is not supported")
    if problems:
        raise ValueError("; ".join(problems))
    return GenMesh(tp=tp, pp=pp, dp=dp, ep=tp * dp if expert_parallel else 1)


def gen_rank_of(vllm_config: VllmConfig) -> int:
    """This worker's rank in its engine's `GenMesh`; engines that are replicas of each other all count from zero."""
    parallel = vllm_config.parallel_config
    return parallel.data_parallel_rank * parallel.tensor_parallel_size * parallel.pipeline_parallel_size + parallel.rank


def _layers_with_derived_weights(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if not callable(getattr(layer, "process_weights_after_loading", None)):
            continue
        if hasattr(layer, "kv_b_proj") or getattr(getattr(layer, "impl", None), "sinks", None) is not None:
            yield name, layer


def _rearranged_by(method: Any) -> str | None:
    kind = type(method).__name__
    if kind in _AS_LOADED:
        return None
    if kind != "UnquantizedFusedMoEMethod":
        return f"quantised by {kind}"
    backend = method.unquantized_backend
    if backend.name in _AS_LOADED_MOE_BACKENDS or method.moe_kernel is None:
        return None
    return f"the {backend.value} backend rearranges experts after loading"
