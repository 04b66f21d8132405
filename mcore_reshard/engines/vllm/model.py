"""A live vLLM model as the destination of a refit: its tensors, its loader, and what must follow direct writes.

A refit writes parameters in the layout in which `load_weights` leaves them, or as kernels read them where a trace says how
(`rearranged`). Where a backend's own rearrangement can run again, it writes tensors beside the parameters (`redone`). It
refuses a model whose kernels read any other layout (`kernel_layouts`). File names below are vLLM 0.32's, under
vllm/model_executor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from mcore_reshard.engines.kernel_layouts import refuse_kernel_layouts
from mcore_reshard.planner.layout.block_scales import KV_SCALES
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.planner.layout.vllm_quantized import CHECKPOINT_BLOCKS
from mcore_reshard.session.agreement import is_positive_float32

from . import redone, refined_scales
from .created import parameters_as_created
from .rearranged import rearranged_parameters
from .walked import Modules, Walked

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Quantization methods whose process_weights_after_loading leaves parameters as they were loaded. It puts copies into the
# attributes named here: for kernels of the CPU (layers/utils.py, dispatch_cpu_unquantized_gemm) and for ROCm's router.
_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "_GateLinearMethod"}
_COPIES = ("cpu_linear", "_cpu_unpacked_conv_weight", "_bf16x3_weight")
_AS_LOADED_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON"}
# Block-FP8 kernels that read weights and scales as they were loaded. DeepGEMM rearranges scales, Marlin packs both
# (kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py, layers/fused_moe/oracle/fp8.py).
_AS_LOADED_FP8_KERNELS = {
    "TritonFp8BlockScaledMMKernel",
    "CutlassFp8BlockScaledMMKernel",
    "BlockWiseTorchFP8ScaledMMLinearKernel",
}
_AS_LOADED_FP8_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS"}
_AS_LOADED_REMEDY = (
    "start vLLM with moe_backend='triton' for experts, linear_backend='triton' for block FP8, and without the other features"
    " that are named here"
)
# Values that a backend derives from them in its first forward (v1/attention/backends/flashinfer.py, mla/flashinfer_mla.py).
_OF_KV_SCALES = ("bmm1_scale", "bmm2_scale")


def require_vllm() -> None:
    """Import vLLM, or raise an ImportError that names the extra to install."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError("vLLM is not installed; from a clone of mcore-reshard: pip install '.[vllm]'") from error


def local_tensors(model: Modules, *, as_kernels_read: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter that `load_weights` fills on this rank, by vLLM name; the live storage, not copies.

    No supported family loads into buffers. Tied weights appear once. Two kinds of parameters are left out: tensors that
    attention derives after loading, and the scales of the KV cache, which `set_kv_scales` takes. Where vLLM repeats the
    scales of FP8 experts, tensors with the checkpoint's scales take their place (`refined_scales`). So do tensors in the
    loaded layout where the backend lays it out anew (`redone`).
    Raises RuntimeError where kernels read another layout than `load_weights` leaves, naming every such parameter.
    `as_kernels_read`: the refit writes `rearranged_parameters` as kernels read them.
    """
    seen = Walked.of(model)
    seen.once(_refuse_all_but_traced if as_kernels_read else _refuse_all)
    return {name: tensor.detach() for name, tensor in seen.once(_filled_tensors).items()}


def refuse_unknown_layouts(model: Modules, as_kernels_read: bool) -> None:
    """Raise RuntimeError for parameters that a refit cannot write, as `local_tensors` does."""
    changed = kernel_layouts(model)
    known = rearranged_parameters(model) if changed and as_kernels_read else set()
    unknown = {name: changed[name] for name in changed if name not in known}
    if unknown:
        redone.forget(model)  # this engine takes no refits: it gets its memory back
    refuse_kernel_layouts(unknown, _AS_LOADED_REMEDY)


def _refuse_all(seen: Walked) -> None:
    refuse_unknown_layouts(seen, as_kernels_read=False)


def _refuse_all_but_traced(seen: Walked) -> None:
    refuse_unknown_layouts(seen, as_kernels_read=True)


def refuse_traced_layouts(model: Modules, why: Mapping[str, str]) -> None:
    """Raise RuntimeError for rearranged parameters, `why` a refit cannot write them as kernels read them."""
    changed = kernel_layouts(model)
    refuse_kernel_layouts({name: f"{changed[name]}; {why[name]}" for name in changed if name in why}, _AS_LOADED_REMEDY)


def _filled_tensors(seen: Walked) -> dict[str, torch.Tensor]:
    blocks = refined_scales.blocks_of(seen)
    left_out = {name.removesuffix(CHECKPOINT_BLOCKS) for name in blocks}
    for prefix, layer in seen.with_parameters():
        if _is_attention(layer):
            left_out |= {f"{prefix}.{name}" for name in (*KV_SCALES, "prob_scale")}
        if _derives_weights(layer):
            left_out |= {f"{prefix}.{name}" for name in layer._parameters}
    loaded = seen.named_parameters() | redone.beside_of(seen)
    return {name: parameter for name, parameter in loaded.items() if name not in left_out} | blocks


def loaded_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that the model's own loader writes, by vLLM name: `local_tensors`, but with refined scales themselves.

    Those that kernels read in another layout are among them.
    """
    seen = Walked(model)
    loaded = seen.named_parameters() | redone.beside_of(seen)
    names = [name.removesuffix(CHECKPOINT_BLOCKS) for name in _filled_tensors(seen)]
    return {name: loaded[name].detach() for name in names}


def load_weights(
    model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]], *, as_kernels_read: bool = False
) -> None:
    """Feed whole HF tensors, any subset, to the model's own loader, which may change them (models/gpt_oss.py).

    Raises RuntimeError as `local_tensors` does: loaders would corrupt rearranged parameters (vLLM #42821). With
    `as_kernels_read` the tensors must be of others.
    """
    refuse_unknown_layouts(model, as_kernels_read)
    with parameters_as_created(model), torch.no_grad():
        model.load_weights(iter(named_tensors))  # type: ignore[operator]


def after_direct_writes(model: Modules, dtype: torch.dtype) -> list[str]:
    """Derive again the tensors that engine layers derive from parameters; returns the names of the attention layers.

    - MLA absorbs `kv_b_proj` into W_UV and W_UK_T (layers/attention/mla_attention.py).
    - Some backends keep attention sinks as fp32 copies (v1/attention/backends/flashinfer.py).
    - Refined scales of FP8 experts are repeated (`refined_scales`).
    - Layers whose backend lays them out anew are laid out (`redone`).

    vLLM ends its own weight updates with the same call (model_loader/reload/layerwise.py, _finalize_attention_layer). It
    writes in place, so captured CUDA graphs stay valid. It also sets scales of the KV cache to 1 where the checkpoint has
    none (layers/attention/attention.py), so these are put back. `dtype` is that of activations.
    """
    seen = Walked.of(model)
    refined_scales.refine(seen)
    redone.lay_out(seen)  # before attention reads `kv_b_proj`
    derived = seen.once(_layers_that_derive)
    with torch.no_grad():
        for layer in derived.values():
            scales = {leaf: getattr(layer, f"_{leaf}_float") for leaf in KV_SCALES if _is_attention(layer)}
            layer.process_weights_after_loading(dtype)  # type: ignore[operator]
            for leaf, value in scales.items():
                _write_kv_scale(layer, leaf, value)
    return list(derived)


def _layers_that_derive(seen: Walked) -> dict[str, torch.nn.Module]:
    return {name: layer for name, layer in seen.named_modules() if _derives_weights(layer)}


def kv_scale_names(model: torch.nn.Module) -> list[str]:
    """This rank's scales of the KV cache, by checkpoint name: `set_kv_scales` takes these.

    A layer has none if its cache is not quantized or has a scale for every token. vLLM then keeps its scales at 1, and
    some backends multiply by them all the same (layers/quantization/kv_cache.py).
    """
    return list(_kv_scales(model))


def set_kv_scales(model: torch.nn.Module, scales: Mapping[str, float]) -> None:
    """Put calibrated scales of the KV cache where attention reads them; `scales` are some of `kv_scale_names`.

    They stay until others are set. Entries already in the cache were quantized with the old scales. Tensors are
    written in place, so captured CUDA graphs read the new scales; but the graphs have the host's floats baked in. Source:
    layers/quantization/kv_cache.py, BaseKVCacheMethod. Raises ValueError, before anything is written, for names that are
    not here and scales not above 0.
    """
    from vllm.platforms import current_platform

    known, problems = _kv_scales(model), []
    for name, scale in scales.items():
        if name not in known:
            problems.append(f"{name} is no scale of an attention layer whose KV cache is quantized")
        elif not is_positive_float32(scale):
            problems.append(f"{name} is {scale}, a positive float32 number is needed")
    if problems:
        raise ValueError("\n  ".join((f"{len(problems)} scales of the KV cache cannot be set:", *problems)))
    with torch.no_grad():
        for name, scale in scales.items():
            _write_kv_scale(*known[name], scale * 2 if current_platform.is_fp8_fnuz() else scale)


def set_default_kv_scales(model: torch.nn.Module) -> None:
    """Put 1 into every scale of attention, as vLLM does where a checkpoint has none.

    `load_format="dummy"` fills them with random numbers, as all parameters and persistent buffers
    (model_loader/dummy_loader.py), and block-FP8 models keep these.
    """
    with torch.no_grad():
        for _, layer in model.named_modules():
            if _is_attention(layer):
                for leaf in KV_SCALES:
                    _write_kv_scale(layer, leaf, 1.0)


def _write_kv_scale(layer: Any, leaf: str, value: float) -> None:
    """Write a scale everywhere that attention may read it: on the device, twice on the host, in FlashInfer's own values."""
    getattr(layer, f"_{leaf}").fill_(value)
    setattr(layer, f"_{leaf}_float", torch.tensor(value, dtype=torch.float32).item())
    if hasattr(layer, f"_{leaf}_cpu"):
        getattr(layer, f"_{leaf}_cpu").fill_(value)
    impl = getattr(layer, "impl", None)
    for derived in _OF_KV_SCALES:
        if hasattr(impl, derived):
            setattr(impl, derived, None)  # the next forward derives it again


def _kv_scales(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Every scale of the KV cache by name -> its attention layer, and which of the layer's scales it is."""
    from vllm.utils.torch_utils import is_quantized_kv_cache

    scales: dict[str, tuple[torch.nn.Module, str]] = {}
    for prefix, layer in model.named_modules():
        cache_dtype: Any = layer.kv_cache_dtype if _is_attention(layer) else "auto"
        if is_quantized_kv_cache(cache_dtype) and not cache_dtype.endswith("per_token_head"):
            # Checkpoints call multi-head latent attention `self_attn.attn`, vLLM has it deeper down.
            for name in (prefix, re.sub(r"\.mla_attn\.mla_attn$", ".attn", prefix)):
                scales |= {f"{name}.{leaf}": (layer, leaf) for leaf in KV_SCALES if hasattr(layer, f"_{leaf}")}
    return scales


def _is_attention(layer: torch.nn.Module) -> bool:
    return hasattr(layer, "_k_scale") and hasattr(layer, "_v_scale")


def kernel_layouts(model: Modules) -> dict[str, str]:
    """Parameters that kernels do not read as `load_weights` leaves them -> the reason: no refit can write these.

    A whitelist decides: unquantized linear layers and embeddings; experts and block-FP8 layers on kernels that leave them
    alone (layers/fused_moe/oracle/). Attention passes: `after_direct_writes` derives its tensors again. So do layers that it
    can lay out anew: the first call puts tensors beside these (`redone`).
    """
    changed: dict[str, str] = {}
    for prefix, layer in Walked.of(model).with_parameters():
        method = getattr(layer, "quant_method", None)
        if method is None or _is_attention(layer) or not (reason := _rearranged_by(layer, method)):
            continue
        if not redone.is_redone(method):
            changed |= {f"{prefix}.{name}": reason for name, _ in layer.named_parameters(recurse=False)}
        elif why := redone.keep_beside(layer):
            reason = f"{reason}, and cannot do so again: {why}"
            changed |= {f"{prefix}.{name}": reason for name, _ in layer.named_parameters(recurse=False)}
    return changed


def gen_mesh_of(vllm_config: VllmConfig) -> GenMesh:
    """The generation mesh of a vLLM configuration, and of the variable VLLM_PP_LAYER_PARTITION of this process.

    Raises MeshError for a partition that does not fit the model, and ValueError where no `GenMesh` describes the engine.
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
        problems.append("expert-parallel load balancing moves experts at run time; start vLLM without enable_eplb")
    if expert_parallel and parallel.expert_placement_strategy != "linear":
        problems.append(
            f"expert placement {parallel.expert_placement_strategy!r} is not supported; start vLLM with 'linear'"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        problems.append("prefill context parallelism is not supported; start vLLM without it")
    if problems:
        raise ValueError("; ".join(problems))
    mesh = GenMesh(tp=tp, pp=pp, dp=dp, ep=tp * dp if expert_parallel else 1)
    partition = envs.VLLM_PP_LAYER_PARTITION  # "1,3"; read as in vllm/distributed/utils.py, get_pp_indices
    if partition is None:
        return mesh
    mesh = replace(mesh, layers=tuple(map(int, partition.split(","))))
    return mesh.canonical(vllm_config.model_config.hf_text_config.num_hidden_layers)


def gen_rank_of(vllm_config: VllmConfig) -> int:
    """This worker's rank in its engine's `GenMesh`; engines that are replicas of each other all count from zero."""
    parallel = vllm_config.parallel_config
    replica_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return parallel.data_parallel_index * replica_size + parallel.rank  # vLLM resets data_parallel_rank of dense models


def _derives_weights(layer: torch.nn.Module) -> bool:
    """Whether its `process_weights_after_loading` makes tensors that kernels read from its parameters."""
    if not hasattr(type(layer), "process_weights_after_loading"):
        return False
    return hasattr(layer, "kv_b_proj") or getattr(getattr(layer, "impl", None), "sinks", None) is not None


def _is_given_the_weight(linear: Any) -> bool:
    """Whether this `cpu_linear` keeps no copy of the weight, as torch's function and vLLM's fallback without kernels."""
    # vLLM's lambdas over packed weights have closures or defaults.
    plain = isinstance(linear, FunctionType) and linear.__closure__ is None and linear.__defaults__ is None
    return plain or linear is torch.nn.functional.linear


def _rearranged_by(layer: torch.nn.Module, method: Any) -> str | None:
    """Why kernels read the layer's parameters in another layout than `load_weights` leaves; None where they do not."""
    kind = type(method).__name__
    if kind in _AS_LOADED:
        may_be_copies = (getattr(layer, name, None) for name in _COPIES)
        copied = any(copy is not None and not _is_given_the_weight(copy) for copy in may_be_copies)
        return "kernels read a copy that was made after loading" if copied else None
    if any(parameter.dtype is torch.float8_e4m3fnuz for parameter in layer.parameters(recurse=False)):
        return "converted to float8_e4m3fnuz after loading"
    if kind == "Fp8LinearMethod" and method.block_quant:
        kernel = type(method.fp8_linear).__name__
        if method.fp8_linear is None or kernel in _AS_LOADED_FP8_KERNELS:  # None: built without kernels
            return None
        return f"{kernel} rearranges block FP8 after loading"
    if kind == "UnquantizedFusedMoEMethod":
        backend, as_loaded = method.unquantized_backend, _AS_LOADED_MOE_BACKENDS
    elif kind == "Fp8MoEMethod" and method.block_quant:
        backend, as_loaded = method.fp8_backend, _AS_LOADED_FP8_MOE_BACKENDS
    else:
        return f"{kind} is not known to leave parameters as they were loaded"
    return None if backend.name in as_loaded else f"the {backend.value} backend rearranges experts after loading"
