"""An engine that generates on a CPU, in place of vLLM: its tensors have vLLM's layout, and a plain Qwen3 reads them as views.

python engine_on_cpu.py FOLDER PIPE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rollout import serve
from transformers import Qwen3Config, Qwen3ForCausalLM

from mcore_reshard.kernels.options import Options
from mcore_reshard.session.endpoints import GenerationEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class CpuEngine:
    """The methods of `rollout.VllmEngine`."""

    def __init__(self, folder: str) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        torch.manual_seed(99)
        self._tensors = StandInEngine(config, GenSizes(), 0).tensors
        for tensor in self._tensors.values():
            tensor.copy_(0.02 * torch.randn(tensor.shape))
        with torch.device("meta"):
            self._model = Qwen3ForCausalLM(Qwen3Config(**config)).to(torch.bfloat16)
        self._model.to_empty(device="cpu")
        self._model.model.rotary_emb = type(self._model.model.rotary_emb)(self._model.config)
        self._model.load_state_dict(dict(self._views()), assign=True)

    def _views(self) -> Any:
        own = dict(self._model.named_parameters())
        for name, tensor in self._tensors.items():
            module, _, leaf = name.removesuffix(".weight").rpartition(".")
            names = [f"{module}.{part}.weight" for part in _FUSED[leaf]] if leaf in _FUSED else [name]
            rows = tensor.split([own[part].shape[0] for part in names])
            yield from zip(names, rows, strict=True)

    def connect(self, store: str, options: dict[str, Any]) -> None:
        asked = Options(**options)
        plan = fetch_plan(store, asked, timeout_s=120.0)
        self._endpoint = GenerationEndpoint(RankOfPlan(plan, "gen", 0), self._tensors, store=store, options=asked)
        self._endpoint.prepare(timeout_s=120.0)

    def refit(self, version: int) -> float:
        return self._endpoint.refit(version).seconds

    def keep_tensor(self, name: str) -> None:
        self._kept = self._tensors[name].clone()

    def put_tensor_back(self, name: str) -> None:
        self._tensors[name].copy_(self._kept)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], group: int, tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        sequence = torch.tensor(prompts).repeat_interleave(group, 0)
        asked, logprobs = sequence.shape[1], []
        for _ in range(tokens):
            scores = self._model(sequence, use_cache=False).logits[:, -1].float().log_softmax(-1)
            chosen = scores.exp().multinomial(1)
            logprobs.append(scores.gather(1, chosen))
            sequence = torch.cat([sequence, chosen], 1)
        return sequence[:, asked:].tolist(), torch.cat(logprobs, 1).tolist()

    def close(self) -> None:
        self._endpoint.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(CpuEngine(sys.argv[1]), int(sys.argv[2]))
