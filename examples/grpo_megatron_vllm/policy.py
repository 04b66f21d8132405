"""The policy: a small Qwen3 as a Megatron-Core model of the local spec, and its GRPO step.

The model is bfloat16, as the engine's. Adam works on float32 copies of the weights, which each step writes back in place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from task import ANSWER_TOKENS, PROMPT_TOKENS, VOCABULARY

LEARNING_RATE, CLIP = 1e-3, 0.2
HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": VOCABULARY,
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 256, "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip


def build(seed: int, device: torch.device) -> torch.nn.Module:
    """The Megatron-Core model on one rank, with random weights. Starts torch's default process group, a world of one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=HF_CONFIG["num_hidden_layers"], hidden_size=HF_CONFIG["hidden_size"],
        num_attention_heads=HF_CONFIG["num_attention_heads"], num_query_groups=HF_CONFIG["num_key_value_heads"],
        kv_channels=HF_CONFIG["head_dim"], ffn_hidden_size=HF_CONFIG["intermediate_size"], qk_layernorm=True,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        layernorm_epsilon=HF_CONFIG["rms_norm_eps"], add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=True,
        bias_activation_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=HF_CONFIG["max_position_embeddings"],
        position_embedding_type="rope", rotary_base=int(HF_CONFIG["rope_theta"]), share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return model.to(device=device, dtype=torch.bfloat16)


def logprobs(model: torch.nn.Module, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Of each answer token, float32 [n, ANSWER_TOKENS]."""
    tokens = torch.cat([prompts, answers[:, :-1]], 1)
    count, length = tokens.shape
    places = torch.arange(length, device=tokens.device).expand(count, length)
    future = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device), 1)
    logits = model(tokens, places, future)[:, PROMPT_TOKENS - 1 :].float()
    return logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


class Learner:
    """GRPO's optimizer: advantages within the group of answers to one prompt, token by token, and PPO's clipped ratio."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._copies = [parameter.detach().float().clone() for parameter in self._parameters]
        self._adam = torch.optim.Adam(self._copies, lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=False)

    def step(
        self,
        prompts: torch.Tensor,
        answers: torch.Tensor,
        sampled_logprobs: torch.Tensor,
        rewards: torch.Tensor,
        group: int,
    ) -> float:
        """One step on n = prompts x group answers: [n, ANSWER_TOKENS] each, [n, PROMPT_TOKENS] prompts.

        `sampled_logprobs` are the engine's. Returns how far the trainer's are from them: the mean absolute difference.
        """
        grouped = rewards.view(-1, group, ANSWER_TOKENS)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-2)
        advantages = advantages.view(-1, ANSWER_TOKENS)
        own = logprobs(self.model, prompts, answers)
        ratio = (own - sampled_logprobs).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        loss.backward()
        for copy, parameter in zip(self._copies, self._parameters, strict=True):
            copy.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._copies, 1.0, foreach=False)
        self._adam.step()
        with torch.no_grad():
            for copy, parameter in zip(self._copies, self._parameters, strict=True):
                parameter.copy_(copy)
        return float((own - sampled_logprobs).abs().mean())
