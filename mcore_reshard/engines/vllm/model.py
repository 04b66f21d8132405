"""A live vLLM model as the destination of a refit: its tensors, its loader, and what must follow direct writes.

A refit puts bytes into the parameters as `load_weights` leaves them. That is what the kernels read for bf16 dense
layers, for block-FP8 layers on most kernels and for experts on the Triton backend. `kernel_layouts` names every parameter
for which it is not, and a model with such parameters is refused. File names below are vLLM 0.32's, under
vllm/model_executor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from mcore_reshard.engines.vllm import refined_scales as vllm_refined_scales
from mcore_reshard.planner.layout.block_scales import KV_SCALES
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.planner.layout.vllm_scales import CHECKPOINT_BLOCKS
from mcore_reshard.session.agreement import is_positive_float32

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Quantization methods whose process_weights_after_loading leaves parameters as they were loaded, and where it puts what
# kernels for the CPU (layers/utils.py, dispatch_cpu_unquantized_gemm) and ROCm's router read instead of them.
_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "_GateLinearMethod"}
_COPIES = ("cpu_linear", "_cpu_unpacked_conv_weight", "_bf16x3_weight")
_AS_LOADED_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON"}
# Block-FP8 kernels that read weights and scales as they were loaded; DeepGEMM lays scales out anew, Marlin packs both
# (kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py, layers/fused_moe/oracle/fp8.py).
_AS_LOADED_FP8_KERNELS = {
    "TritonFp8BlockScaledMMKernel",
    "CutlassFp8BlockScaledMMKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
}
_AS_LOADED_FP8_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS"}
# What a backend keeps of them from its first forward on (v1/attention/backends/flashinfer.py, mla/flashinfer_mla.py).
_OF_KV_SCALES = ("bmm1_scale", "bmm2_scale")


def require_vllm() -> None:
    """Import vLLM, or raise an ImportError that names the extra to install."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError("vLLM is not installed; from a clone of mcore-reshard: pip install '.[vllm]'") from error


def local_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that `load_weights` fills on this rank, by vLLM name; the live storage, not copies.

    These are the parameters. No supported family loads into buffers (a Mamba mixer's `conv_weights` is a view of its
    `conv1d.weight`). Tied weights appear once. What attention derives from parameters after loading is left out, and so
    are the scales of the KV cache, which no trainer has: `set_kv_scales` takes them. Where vLLM repeats the scales of
    FP8 experts, tensors with the checkpoint's scales stand for them.
    Raises RuntimeError where kernels read another layout than `load_weights` leaves, naming every such parameter.
    """
    _refuse_kernel_layouts(model)
    blocks = vllm_refined_scales.blocks_of(model)
    left_out = {name.removesuffix(CHECKPOINT_BLOCKS) for name in blocks}
    for prefix, layer in _layers_with_parameters(model):
        if _is_attention(layer):
            left_out |= {f"{prefix}.{name}" for name in (*KV_SCALES, "prob_scale")}
        if _derives_weights(layer):
            left_out |= {f"{prefix}.{name}" for name in layer._parameters}
    held = {name: parameter.detach() for name, parameter in model.named_parameters() if name not in left_out}
    return held | blocks


def loaded_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that the model's own loader writes, by vLLM name: as `local_tensors`, refined scales themselves."""
    refined = vllm_refined_scales.refined_names(model)
    held = {name: tensor for name, tensor in local_tensors(model).items() if not name.endswith(CHECKPOINT_BLOCKS)}
    return held | {name: model.get_parameter(name).detach() for name in refined}


def load_weights(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Feed HF tensors to the model's own loader, as the misc route and golden do; any subset, whole tensors.

    The tensors may be changed: gpt-oss zeroes expert biases in place (models/gpt_oss.py, _load_weights_other).
    Raises RuntimeError as `local_tensors` does: the raw loaders would corrupt what kernels have rearranged (vLLM #42821).
    """
    _refuse_kernel_layouts(model)
    with torch.no_grad():
        model.load_weights(iter(named_tensors))  # type: ignore[operator]


def after_direct_writes(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Recompute what attention layers hold in other tensors than their parameters; returns the layers' names.

    MLA absorbs `kv_b_proj` into W_UV and W_UK_T, views of the parameter in plain bf16 and copies otherwise
    (layers/attention/mla_attention.py, process_weights_after_loading), and some backends keep attention sinks as fp32
    copies (v1/attention/backends/flashinfer.py). `dtype` is the activation dtype, `vllm_config.model_config.dtype`.
    Scales of FP8 experts are repeated where vLLM refined their blocks. The call sets scales of the KV cache to 1 where the
    checkpoint has none (layers/attention/attention.py, set_default_quant_scales); what they were is put back.
    vLLM ends its own weight updates with the same call (model_loader/reload/layerwise.py, _finalize_attention_layer),
    which writes in place, so captured CUDA graphs stay valid.
    """
    vllm_refined_scales.refine(model)
    done = []
    with torch.no_grad():
        for name, layer in model.named_modules():
            if _derives_weights(layer):
                scales = {leaf: getattr(layer, f"_{leaf}_float") for leaf in KV_SCALES if _is_attention(layer)}
                layer.process_weights_after_loading(dtype)  # type: ignore[operator]
                for leaf, value in scales.items():
                    _write_kv_scale(layer, leaf, value)
                done.append(name)
    return done


def kv_scale_names(model: torch.nn.Module) -> list[str]:
    """The names of this rank's scales of the KV cache, as checkpoints have them: `set_kv_scales` takes these.

    Layers whose cache is not quantized, or has a scale for every token, have none: vLLM keeps theirs at 1, also where a
    checkpoint has others (layers/quantization/kv_cache.py), and some backends multiply by them whatever the cache.
    """
    return list(_kv_scales(model))


def set_kv_scales(model: torch.nn.Module, scales: Mapping[str, float]) -> None:
    """Put calibrated scales of the KV cache where attention reads them: some of `kv_scale_names`.

    They stay until others are set. What is in the cache already was quantized with the old scales. Written in place:
    captured CUDA graphs read the tensors, while the host's floats are baked into them
    (layers/quantization/kv_cache.py, BaseKVCacheMethod.process_weights_after_loading, whose values these are).
    Raises ValueError, before anything is written, for names that this rank does not have and scales that are not positive.
    """
    from vllm.platforms import current_platform

    known = _kv_scales(model)
    problems = []
    for name, scale in scales.items():
        if name not in known:
            problems.append(f"{name} is no scale of an attention layer whose KV cache is quantized")
        elif not is_positive_float32(scale):
            problems.append(f"{name} is {scale}, a positive float32 number is needed")
    if problems:
        raise ValueError("\n  ".join((f"{len(problems)} scales of the KV cache cannot be set:", *problems)))
    with torch.no_grad():
        for name, scale in scales.items():
            layer, leaf = known[name]
            _write_kv_scale(layer, leaf, scale * 2 if current_platform.is_fp8_fnuz() else scale)


def _write_kv_scale(layer: Any, leaf: str, value: float) -> None:
    """Everywhere that attention may read it: on the device, twice on the host, and in what FlashInfer derives of those."""
    getattr(layer, f"_{leaf}").fill_(value)
    setattr(layer, f"_{leaf}_float", torch.tensor(value, dtype=torch.float32).item())
    if hasattr(layer, f"_{leaf}_cpu"):
        getattr(layer, f"_{leaf}_cpu").fill_(value)
    impl = getattr(layer, "impl", None)
    for derived in _OF_KV_SCALES:
        if hasattr(impl, derived):
            setattr(impl, derived, None)  # derived again by the next forward


def _kv_scales(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """The attention layer of every scale of the KV cache, and which of its scales it is, by name.

    Multi-head latent attention is `self_attn.attn` to a checkpoint and deeper down here; both names count.
    """
    found: dict[str, tuple[torch.nn.Module, str]] = {}
    for prefix, layer in model.named_modules():
        if _is_attention(layer) and _has_scaled_cache(layer):
            for name in (prefix, re.sub(r"\.mla_attn\.mla_attn$", ".attn", prefix)):
                found |= {f"{name}.{leaf}": (layer, leaf) for leaf in KV_SCALES if hasattr(layer, f"_{leaf}")}
    return found


def _has_scaled_cache(layer: Any) -> bool:
    from vllm.utils.torch_utils import is_quantized_kv_cache

    return is_quantized_kv_cache(layer.kv_cache_dtype) and not layer.kv_cache_dtype.endswith("per_token_head")


def _is_attention(layer: torch.nn.Module) -> bool:
    return hasattr(layer, "_k_scale") and hasattr(layer, "_v_scale")


def kernel_layouts(model: torch.nn.Module) -> dict[str, str]:
    """Parameters that kernels do not read as `load_weights` leaves them, with the reason: no refit can write these.

    A whitelist: unquantized linear layers and embeddings, experts and block-FP8 layers on kernels that leave them alone
    (layers/fused_moe/oracle/unquantized.py, convert_to_unquantized_kernel_format, and oracle/fp8.py,
    convert_to_fp8_moe_kernel_format). What attention derives is not among them: `after_direct_writes` derives it again.
    """
    changed: dict[str, str] = {}
    for prefix, layer in _layers_with_parameters(model):
        method = getattr(layer, "quant_method", None)
        reason = None if method is None or _is_attention(layer) else _rearranged_by(layer, method)
        if reason:
            changed |= {f"{prefix}.{name}": reason for name, _ in layer.named_parameters(recurse=False)}
    return changed


def gen_mesh_of(vllm_config: VllmConfig) -> GenMesh:
    """The generation mesh of a vLLM configuration, and of the variable VLLM_PP_LAYER_PARTITION of this process.

    Raises MeshError for a partition that does not fit the model, and ValueError for whatever a `GenMesh` cannot say: experts
    cut over data parallelism, experts that move at run time or are not placed linearly, and prefill context parallelism.
    """
    from vllm import envs

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
    mesh = GenMesh(tp=tp, pp=pp, dp=dp, ep=tp * dp if expert_parallel else 1)
    partition = envs.VLLM_PP_LAYER_PARTITION  # "1,3"; read as in vllm/distributed/utils.py, get_pp_indices
    if partition is None:
        return mesh
    mesh = replace(mesh, layers=tuple(int(count) for count in partition.split(",")))
    return mesh.canonical(vllm_config.model_config.hf_text_config.num_hidden_layers)


def gen_rank_of(vllm_config: VllmConfig) -> int:
    """This worker's rank in its engine's `GenMesh`; engines that are replicas of each other all count from zero.

    By `data_parallel_index`: vLLM resets `data_parallel_rank` of a model without experts, whose replicas then count on.
    """
    parallel = vllm_config.parallel_config
    return (
        parallel.data_parallel_index * parallel.tensor_parallel_size * parallel.pipeline_parallel_size + parallel.rank
    )


def _layers_with_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Those that have some of their own. Refits ask every layer of a large model: asking a module for what it lacks is slow."""
    return ((name, layer) for name, layer in model.named_modules() if layer._parameters)


def _derives_weights(layer: torch.nn.Module) -> bool:
    """Whether its `process_weights_after_loading` makes tensors that kernels read from its parameters."""
    if not hasattr(type(layer), "process_weights_after_loading"):
        return False
    return hasattr(layer, "kv_b_proj") or getattr(getattr(layer, "impl", None), "sinks", None) is not None


def _refuse_kernel_layouts(model: torch.nn.Module) -> None:
    changed = kernel_layouts(model)
    if changed:
        lines = [
            f"{reason}: {', '.join(name for name in changed if changed[name] == reason)}"
            for reason in dict.fromkeys(changed.values())
        ]
        raise RuntimeError(
            "\n  ".join((f"a refit cannot write {len(changed)} parameters of this engine in place:", *lines))
            + "\nstart vLLM with moe_backend='triton' for experts, linear_backend='triton' for block FP8, and without what"
            " else is named here"
        )


def _is_given_the_weight(linear: Any) -> bool:
    """Whether this `cpu_linear` can only read the weight that it is called with: it keeps nothing from when it was made.

    That is torch's own function, or vLLM's fallback where a CPU has no kernels; lambdas over packed weights have closures.
    """
    plain = isinstance(linear, FunctionType) and linear.__closure__ is None and linear.__defaults__ is None
    return plain or linear is torch.nn.functional.linear


def _rearranged_by(layer: torch.nn.Module, method: Any) -> str | None:
    kind = type(method).__name__
    if kind in _AS_LOADED:
        may_be_copies = (getattr(layer, name, None) for name in _COPIES)
        copied = any(copy is not None and not _is_given_the_weight(copy) for copy in may_be_copies)
        return "kernels read a copy that was made after loading" if copied else None
    if any(parameter.dtype is torch.float8_e4m3fnuz for parameter in layer.parameters(recurse=False)):
        return "converted to float8_e4m3fnuz after loading"
    if kind == "Fp8LinearMethod" and method.block_quant:
        kernel = type(method.fp8_linear).__name__
        as_loaded = method.fp8_linear is None or kernel in _AS_LOADED_FP8_KERNELS  # None: built without kernels
        return None if as_loaded else f"{kernel} rearranges block FP8 after loading"
    if kind == "UnquantizedFusedMoEMethod":
        backend, kept = method.unquantized_backend, _AS_LOADED_MOE_BACKENDS
    elif kind == "Fp8MoEMethod" and method.block_quant:
        backend, kept = method.fp8_backend, _AS_LOADED_FP8_MOE_BACKENDS
    else:
        return f"{kind} is not known to leave parameters as they were loaded"
    return None if backend.name in kept else f"the {backend.value} backend rearranges experts after loading"
