"""A real Megatron-Core trainer of a tiny model, built through Megatron-Bridge inside one training process.

It stands for a policy worker: it holds weights over a real mesh, takes optimizer steps in place, and exports through
Megatron-Bridge. The real Transformer Engine holds the parameters on a GPU where it is installed, its stand-in elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.precision import Block
from mcore_reshard.trainers.megatron.model import export_hf, local_tensors, require
from mcore_reshard.trainers.megatron.quantized_pairs import export_with_pairs
from mcore_reshard.trainers.quantized_export import Pairs
from mcore_reshard.validation.hf_configs import register_configs
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.bridge import install_repairs
from mcore_reshard.validation.trainer.nemotron_vl import sizes_of
from mcore_reshard.validation.trainer.te_standin_modules import use_block

LEARNING_RATE = 0.5

# Megatron's own names: E4M3 with a scale for each block of 128 x 128 of a weight, and weights kept so.
_FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}


@dataclass(frozen=True)
class Trainer:
    """One rank's share of a trainer. Every method is collective over the training world."""

    bridge: Any
    model_chunks: list[torch.nn.Module]
    pairs: Pairs = field(default_factory=dict)  # what to export as FP8 data and scales
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's tensors as the refit binds them."""
        return local_tensors(self.model_chunks)

    def tensors_on(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """The tensors; of a model elsewhere, copies on `device` that each call brings up to date in place."""
        if all(tensor.device.type == device.type for tensor in self.tensors.values()):
            return self.tensors
        copies = self._copies
        for name, tensor in self.tensors.items():
            copies[name] = copies[name].copy_(tensor.detach()) if name in copies else tensor.detach().to(device)
        return copies

    def load(self, checkpoint: Path | str) -> None:
        """Replace all weights, in place, by those of a checkpoint of the same config."""
        with te_standin.cpu_as_device(), _quiet():
            self.bridge.load_hf_weights(self.model_chunks, hf_path=str(checkpoint))

    def step(self) -> None:
        """One SGD step in place on the loss |w|^2 / 2, whose gradient is w: every weight is halved, exactly.

        Replicas stay equal and elements stay recognizable. Quantized weights are halved and quantized again. No data
        passes through the model, since forward needs kernels that a CPU does not have. The router's bias, which
        Megatron updates outside the optimizer, is halved too.
        """
        parameters = [parameter for chunk in self.model_chunks for parameter in chunk.parameters()]
        unquantized = [parameter for parameter in parameters if not hasattr(parameter, "_rowwise_data")]
        for parameter in unquantized:
            parameter.grad = parameter.detach().clone()
        optimizer = torch.optim.SGD(unquantized, lr=LEARNING_RATE, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        for name, tensor in self.tensors.items():
            if name.endswith("router.expert_bias"):
                tensor.mul_(1 - LEARNING_RATE)
        with torch.no_grad():
            for parameter in parameters:
                if hasattr(parameter, "_rowwise_data"):
                    parameter.copy_(parameter.dequantize() * (1 - LEARNING_RATE))

    def export(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole HF tensors as the engine holds them."""
        return export_with_pairs(self.bridge, self.model_chunks, self.pairs, names)

    def export_unquantized(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All HF tensors as Megatron-Bridge gives them, none quantized."""
        return export_hf(self.bridge, self.model_chunks)


def prepare(*, on_cuda: bool = False) -> None:
    """Import everything a trainer needs; called before a fork, it is paid once for all processes.

    `on_cuda` asks for models on the GPU, if Transformer Engine is installed.
    Raises ImportError naming the extra when Megatron is not installed.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with _quiet():
        te_standin.install(on_cuda=on_cuda)
        require("megatron.core")
        require("megatron.bridge")
    install_repairs()
    register_configs()


def build_trainer(
    checkpoint: Path | str,
    mesh: TrainMesh,
    *,
    grouped_experts: bool = True,
    vocab_multiple: int | None = None,
    fp8_block: Block | None = None,
    pairs: Pairs | None = None,
) -> Trainer:
    """Build the checkpoint's model over `mesh` and load it. The default process group must be the training world.

    `grouped_experts=False` gives one module an expert (SequentialMLP) instead of grouped tensors (TEGroupedMLP).
    The vocabulary is padded with zero rows to a multiple of `vocab_multiple * tp`; None pads only where TP does not
    divide it, with Megatron-Bridge's divisor. `fp8_block` keeps the weights of linear layers quantized in such blocks
    (`fp8_param`, the blockwise recipe); the real Transformer Engine has 128 x 128 alone. `export` yields `pairs` as FP8
    data and scales. Raises ValueError where the world or the blocks do not fit.
    """
    trainer = Trainer(*_build(checkpoint, mesh, grouped_experts, vocab_multiple, fp8_block), pairs or {})
    trainer.load(checkpoint)
    return trainer


def build_on_meta(
    folder: Path | str,
    mesh: TrainMesh = TrainMesh(),  # noqa: B008
    fp8_block: Block | None = None,
) -> tuple[Any, list[torch.nn.Module]]:
    """AutoBridge and a rank's model of a folder's `config.json`, on the meta device: shapes of any size, no memory.

    `fp8_block` is as in `build_trainer`. The default process group must be the training world; torch's fake one will do.
    """
    return _build(folder, mesh, fp8_block=fp8_block, on_meta=True)


def forget_groups() -> None:
    """Let Megatron-Core forget its process groups, before the world that they belong to ends."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def _build(
    checkpoint: Path | str,
    mesh: TrainMesh,
    grouped_experts: bool = True,
    vocab_multiple: int | None = None,
    fp8_block: Block | None = None,
    on_meta: bool = False,
) -> tuple[Any, list[torch.nn.Module]]:
    if fp8_block not in {None, (128, 128)} and te_standin.is_real():
        raise ValueError(f"Transformer Engine quantizes in blocks of 128x128, not of {fp8_block[0]}x{fp8_block[1]}")
    if torch.distributed.get_world_size() != mesh.world:
        raise ValueError(f"the mesh has {mesh.world} ranks and the world {torch.distributed.get_world_size()}")
    prepare()
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    sizes = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": mesh.vpp if mesh.vpp > 1 else None,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
    }
    with te_standin.cpu_as_device(), _quiet():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        if te_standin.is_real():
            model_parallel_cuda_manual_seed(1)  # else nothing can be initialized on a GPU
        bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
        _restore_fields(bridge.hf_pretrained.config, json.loads((Path(checkpoint) / "config.json").read_text()))
        provider = bridge.to_megatron_provider(load_weights=False)
        if hasattr(provider, "q_lora_rank"):  # Bridge takes an absent low rank for its provider's default
            provider.q_lora_rank = bridge.hf_pretrained.config.q_lora_rank
        if getattr(provider, "moe_shared_expert_intermediate_size", None) == 0:  # Megatron wants None
            provider.moe_shared_expert_intermediate_size = None
        if bridge.hf_pretrained.config.model_type == "qwen3_next":  # Bridge maps its prediction layer, and builds none
            provider.mtp_num_layers = getattr(bridge.hf_pretrained.config, "num_nextn_predict_layers", None)
        fields = sizes | _provider_fields(provider, mesh, vocab_multiple) | (_FP8 if fp8_block else {})
        if getattr(provider, "num_moe_experts", None):
            fields["moe_grouped_gemm"] = grouped_experts
        if on_meta:
            fields["perform_initialization"] = False  # large embeddings are on the CPU even so
        for name, value in fields.items():
            setattr(provider, name, value)
        provider.finalize()
        with use_block(fp8_block or (128, 128)), sizes_of(bridge.hf_pretrained.config, provider):
            chunks = provider.provide_distributed_model(
                wrap_with_ddp=False,
                use_cpu_initialization=not on_meta and not te_standin.is_real(),
                init_model_with_meta_device=on_meta,
                pre_wrap_hook=_cast_without_values if on_meta else None,
                bf16=True,
            )
    return bridge, chunks


def _cast_without_values(chunks: list[torch.nn.Module]) -> None:
    """On the meta device: Ministral 3 would keep a buffer's values over casts."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        vars(module).pop("_apply", None)


def _restore_fields(config: Any, published: Mapping[str, Any]) -> None:
    """Give a config of transformers 5 the fields that Bridge 0.3 reads as of transformers 4.

    transformers 5 keeps the bases of rotations in `rope_parameters`, and ties the embeddings of a language model inside of a
    config that says nothing of them there.
    """
    by_layer_type = getattr(config, "rope_parameters", None) or {}
    for name, layer_type in (("rope_local_base_freq", "sliding_attention"), ("rope_theta", "full_attention")):
        if layer_type in by_layer_type and getattr(config, name, None) is None:
            setattr(config, name, by_layer_type[layer_type]["rope_theta"])
    for name, value in published.items():
        held = getattr(config, name, None)
        if held is not None and isinstance(value, Mapping) and hasattr(held, "to_dict"):
            if "tie_word_embeddings" in published and "tie_word_embeddings" not in value:
                held.tie_word_embeddings = published["tie_word_embeddings"]
            _restore_fields(held, value)
        elif name == "rope_scaling":
            config.rope_scaling = value and {**(held or {}), **value}
        elif held is None and value is not None:
            setattr(config, name, value)


def _provider_fields(provider: Any, mesh: TrainMesh, vocab_multiple: int | None) -> dict[str, Any]:
    fields = {
        "sequence_parallel": mesh.tp > 1,
        "pipeline_dtype": torch.bfloat16,
        "should_pad_vocab": vocab_multiple is not None or provider.vocab_size % mesh.tp != 0,
        "make_vocab_size_divisible_by": vocab_multiple or math.gcd(provider.vocab_size, 128),
        # These need CUDA kernels or streams already when the model is built.
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "moe_permute_fusion": False,
        "moe_shared_expert_overlap": False,
        "moe_token_dispatcher_type": "allgather",
    }
    if not mesh.layers:
        return fields
    counts = mesh.chunk_layers(provider.num_layers)
    if not hasattr(provider, "hybrid_override_pattern"):
        chunks = [["decoder"] * count for count in counts]
        chunks[0].insert(0, "embedding")
        chunks[-1] += ["mtp"] * (getattr(provider, "mtp_num_layers", None) or 0) + ["loss"]
        return fields | {"pipeline_model_parallel_layout": chunks}
    if len(set(counts[1:-1])) > 1:
        raise ValueError("a pipeline of a hybrid model can differ only in its first and last stage")
    return fields | {
        "num_layers_in_first_pipeline_stage": counts[0],
        "num_layers_in_last_pipeline_stage": counts[-1],
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron's chatter about absent kernels and progress would drown a validation report."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
