"""HF configs of families that transformers lacks: their model code is remote, and only their config is read here."""

from __future__ import annotations

from typing import Any


def register_configs() -> None:
    """Let transformers read them. Calling it twice is harmless."""
    import transformers

    # Megatron-Bridge reads the class name out of auto_map.
    nemotron_h = {"auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}}
    decilm = {"auto_map": {"AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"}, "__setattr__": _set_field}
    decilm["max_position_embeddings"] = 0  # transformers 5 reads it for rope_scaling before it sets it
    nano_vl = {"auto_map": {"AutoModelForCausalLM": "modeling.NemotronH_Nano_VL_V2"}, "__setattr__": _set_field}
    mimo = {"auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}}
    # Ministral 3 is in transformers 5
    for model_type, base, fields in (
        ("kimi_k2", transformers.DeepseekV3Config, {}),
        ("mimo", transformers.Qwen2Config, mimo),
        ("ministral3", transformers.MistralConfig, {}),
        ("nemotron_h", transformers.PretrainedConfig, nemotron_h),
        ("nemotron-nas", transformers.PretrainedConfig, decilm),
        ("NemotronH_Nano_VL_V2", transformers.PretrainedConfig, nano_vl),
    ):
        if model_type not in transformers.CONFIG_MAPPING:
            config_class = type(model_type, (base,), {"model_type": model_type, "__module__": __name__, **fields})
            globals()[model_type] = config_class  # Bridge pickles configs
            transformers.AutoConfig.register(model_type, config_class)


class _Fields(dict[str, Any]):
    """A JSON object whose members are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _set_field(config: Any, name: str, value: Any) -> None:
    """Objects inside of a config are read as attributes, and written as JSON; a config of a language model is one itself."""
    if name == "block_configs":
        value = [_Fields({part: _Fields(fields) for part, fields in block.items()}) for block in value]
    elif name == "vision_config":
        value = _Fields(value)
    elif name == "llm_config" and isinstance(value, dict):
        import transformers

        value = transformers.AutoConfig.for_model(**value)
    super(type(config), config).__setattr__(name, value)
