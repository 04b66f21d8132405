"""The architectures that Megatron-Bridge 0.6.2 registers: which of them are built here as tiny models, and which are not.

Source: megatron/bridge/models, the decorators `register_bridge`; vllm/model_executor/models/registry.py of vLLM 0.32.
"""

from __future__ import annotations

# architecture -> the built-in config of a tiny model that `build_trainer` builds
BUILT = {
    "BailingMoeV2ForCausalLM": "tiny-ling",
    "DeciLMForCausalLM": "tiny-llama-nemotron",
    "DeepseekV2ForCausalLM": "tiny-deepseek-v2-lite",
    "DeepseekV3ForCausalLM": "tiny-deepseek-v3",
    "Ernie4_5_MoeForCausalLM": "tiny-ernie4.5-moe",
    "Gemma2ForCausalLM": "tiny-gemma2",
    "Gemma3ForCausalLM": "tiny-gemma3",
    "Gemma3ForConditionalGeneration": "tiny-gemma3-vl",
    "GemmaForCausalLM": "tiny-gemma",
    "Glm4MoeForCausalLM": "tiny-glm4-moe",
    "Glm4MoeLiteForCausalLM": "tiny-glm4.7-flash",
    "Glm4vMoeForConditionalGeneration": "tiny-glm4v-moe",
    "GlmMoeDsaForCausalLM": "tiny-glm5",
    "GptOssForCausalLM": "tiny-gpt-oss",
    "KimiK2ForCausalLM": "tiny-kimi-k2",
    "LlamaForCausalLM": "tiny-llama",
    "MiMoForCausalLM": "tiny-mimo",
    "MiMoV2FlashForCausalLM": "tiny-mimo-v2-flash",
    "MiniMaxM2ForCausalLM": "tiny-minimax-m2",
    "Mistral3ForConditionalGeneration": "tiny-mistral3",
    "MistralForCausalLM": "tiny-mistral",
    "NemotronForCausalLM": "tiny-nemotron",
    "NemotronHForCausalLM": "tiny-nemotron-3-latent-moe",
    "NemotronH_Nano_VL_V2": "tiny-nemotron-nano-vl",
    "OlmoeForCausalLM": "tiny-olmoe",
    "Qwen2ForCausalLM": "tiny-qwen2",
    "Qwen2_5_VLForConditionalGeneration": "tiny-qwen2.5-vl",
    "Qwen3ForCausalLM": "tiny-qwen3",
    "Qwen3MoeForCausalLM": "tiny-qwen3-moe",
    "Qwen3NextForCausalLM": "tiny-qwen3-next",
    "Qwen3VLForConditionalGeneration": "tiny-qwen3-vl",
    "Qwen3VLMoeForConditionalGeneration": "tiny-qwen3-vl-moe",
    "Qwen3_5ForCausalLM": "tiny-qwen3.5",
    "Qwen3_5MoeForCausalLM": "tiny-qwen3.5-moe",
    "Step3p5ForCausalLM": "tiny-step3.5",
}

# Built, and not loadable on both sides here.
REFUSED = {
    "DeepseekV2ForCausalLM": "Megatron-Bridge 0.6 maps nothing to the norm that Megatron-Core 0.19 fuses into linear_q_proj",
    "GlmMoeDsaForCausalLM": "vLLM's CPU platform raises NotImplementedError: Sparse Attention is not supported on CPU",
    "NemotronH_Nano_VL_V2": "vLLM leaves the layer scales of its vision tower as it made them: nothing fills ls1 and ls2",
}

# No tiny config: nobody tried to build these here.
UNTRIED = (
    "DeepseekV4ForCausalLM",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Exaone4ForCausalLM",
    "Exaone4_5_ForConditionalGeneration",
    "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "HYV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronLabsDiffusionModel",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
    "Step3p7ForConditionalGeneration",
)

# vLLM registers all others under the same name. It loads Kimi-K2 as DeepseekV3ForCausalLM.
NOT_IN_VLLM = ("KimiK2ForCausalLM", "NemotronLabsDiffusionModel")
