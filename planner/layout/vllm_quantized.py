"""Which matrices vLLM quantizes when it is asked to, and where that is not what a trainer can send.

Paths are under vllm/model_executor of vLLM 0.32.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup, Quantization, Role
from mcore_reshard.planner.model.precision import MXFP8, QUANTIZED

# What vLLM fuses, by the name that a list of modules may give instead of each part's (packed_modules_mapping of models/).
_FUSED_INTO = {
    **dict.fromkeys((Role.Q, Role.K, Role.V), "qkv_proj"),
    **dict.fromkeys((Role.GATE, Role.UP, Role.SHARED_GATE, Role.SHARED_UP), "gate_up_proj"),
    **dict.fromkeys((Role.MLA_Q_A, Role.MLA_KV_A), "fused_qkv_a_proj"),
}


def quantizes(group: ParameterGroup, layer: int | None, model: ModelParameters) -> bool:
    """Whether vLLM quantizes the matrices of a group in one layer.

    vLLM's MXFP8 takes the output layer too (layers/quantization/modelopt.py, ModelOptQuantConfigBase.get_quant_method). That
    of gpt-oss it leaves alone: models/gpt_oss.py builds it without a config. A model without a quantization_config of this
    format is planned as if it had one that lists the output layer and the routers, which no trainer quantizes.
    """
    quantization = model.quantization
    if group.role is Role.LM_HEAD:
        takes_head = quantization is not None and quantization.method == MXFP8.method
        if not takes_head or model.architecture.family == "gpt_oss":
            return False
    elif group.role not in QUANTIZED:
        return False
    return quantization is None or not _is_listed(group, layer, quantization)


def misquantized(model: ModelParameters) -> list[str]:
    """Why vLLM cannot hold the model as its quantization_config says; empty where it can."""
    quantization = model.quantization
    if quantization is None:
        return []
    return (
        _half_listed_modules(model, quantization)
        + _quantized_routers(model, quantization)
        + _tied_head(model, quantization)
    )


def _is_listed(group: ParameterGroup, layer: int | None, quantization: Quantization) -> bool:
    """Whether the config lists a module: by its name, by that of the module it is fused into, or for experts by any inside.

    Source: layers/quantization/utils/quant_utils.py, is_layer_skipped, which matches exactly.
    """
    if not group.experts:
        return _is_module_listed(*_module_names(group, layer), quantization)
    experts = group.name_pattern.partition(".{expert}")[0].format(layer=layer)
    if any(listed.startswith(experts + ".") for listed in quantization.not_converted):
        return True
    return _is_module_listed(experts, experts, quantization)


def _is_module_listed(module: str, fused: str, quantization: Quantization) -> bool:
    """Whether the config lists a module, or the one that it is fused into. MXFP8 takes parts of names, and patterns.

    Source: layers/quantization/modelopt.py, ModelOptQuantConfigBase.is_layer_excluded.
    """
    if module in quantization.not_converted or fused in quantization.not_converted:
        return True
    return quantization.method == MXFP8.method and any(
        listed in fused or fnmatchcase(fused, listed) for listed in quantization.not_converted
    )


def _module_names(group: ParameterGroup, layer: int | None) -> tuple[str, str]:
    """The module of a weight that is no expert's, and the module that vLLM fuses it into: the same where it does not."""
    module = group.name(layer, None).removesuffix(".weight")
    fused = _FUSED_INTO.get(group.role)
    return module, f"{module.rpartition('.')[0]}.{fused}" if fused else module


def _half_listed_modules(model: ModelParameters, quantization: Quantization) -> list[str]:
    """Parts of fused modules that are listed without the others.

    Source: layers/quantization/utils/quant_utils.py, is_layer_skipped, which raises ValueError.
    """
    modules_of: dict[str, list[str]] = {}  # by the name of the fused module
    for group in model.groups:
        if group.role in QUANTIZED and not group.experts and not group.mtp:
            for layer in group.layers:
                module, fused = _module_names(group, layer)
                modules_of.setdefault(fused, []).append(module)
    half_listed = {}
    for fused, modules in modules_of.items():
        others = [module for module in modules if module not in quantization.not_converted]
        if fused not in quantization.not_converted and 0 < len(others) < len(modules):
            half_listed[fused] = others
    if not half_listed:
        return []
    fused, others = next(iter(half_listed.items()))
    more = f", and so on for {len(half_listed) - 1} more" if len(half_listed) > 1 else ""
    return [
        f"generation: vLLM quantizes all of {fused} or nothing, and only a part of it is in {quantization.list_name} of the"
        f" quantization_config: list {' and '.join(others)} too{more}"
    ]


def _quantized_routers(model: ModelParameters, quantization: Quantization) -> list[str]:
    """Routers that vLLM would quantize, though no trainer does. Published FP8 checkpoints list them all.

    Source: models/qwen3_moe.py, which quantizes the routers that the config does not list.
    """
    if model.architecture.family != "qwen3_moe":
        return []
    routers = [name for group in model.groups if group.role is Role.ROUTER for name in group.names()]
    modules = [(name, name.removesuffix(".weight")) for name in routers]
    missing = [name for name, module in modules if not _is_module_listed(module, module, quantization)]
    if not missing:
        return []
    return [
        f"generation: vLLM would quantize {len(missing)} routers, such as {missing[0]}: list them in"
        f" {quantization.list_name} of the quantization_config"
    ]


def _tied_head(model: ModelParameters, quantization: Quantization) -> list[str]:
    """MXFP8 of an output layer that is the embedding: vLLM builds its scales, then puts the embedding beside them.

    Source: layers/quantization/base_config.py, QuantizeMethodBase.tie_weights.
    """
    reads_mxfp8 = quantization.method == MXFP8.method and not _is_module_listed("lm_head", "lm_head", quantization)
    if not reads_mxfp8 or not model.architecture.tied:
        return []
    return [
        "generation: vLLM would read the embedding, which lm_head is tied to, as MXFP8, with scales that nothing fills: list"
        f" lm_head in {quantization.list_name} of the quantization_config"
    ]
