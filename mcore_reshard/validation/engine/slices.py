"""What a vLLM rank holds after `load_weights`, from plain slicing: the oracle for destination tensors.

It shares no code with the planner and is itself compared with vLLM's own loaders, byte for byte (tests/engine). Where
vLLM is not installed, `StandInEngine` takes the engine's place: the tensors of a rank and their loader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from .families import FAMILIES
from .fp8 import BLOCKS, Refined, quantize
from .tables import Config, GenSizes, Table, stage_layers

POISON = 0xFF  # NaN in every floating-point dtype
_UNWRITTEN = -1.0  # no scale is negative

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class StandInEngine:
    """The tensors of one generation rank, without vLLM: same names, shapes and dtypes, poisoned, and a loader.

    The loader writes `loaded`; a refit writes `tensors`. They are the same but where vLLM makes blocks of scales smaller:
    there `tensors` holds the checkpoint's blocks, negative until they are written.
    Raises ValueError for an unknown family or sizes that vLLM cannot serve the model with.
    """

    def __init__(self, config: Config, sizes: GenSizes, gen_rank: int, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._table, self._refined = _table(config, sizes, gen_rank)
        tensors = self._table.tensors.items()
        self.loaded = {name: poison(torch.empty(shape, dtype=dtype, device=device)) for name, (shape, dtype) in tensors}
        self._blocks = {
            name: torch.full(refined.blocks_shape, _UNWRITTEN, device=device) for name, refined in self._refined.items()
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        unrefined = {name: tensor for name, tensor in self.loaded.items() if name not in self._blocks}
        return unrefined | {name + BLOCKS: blocks for name, blocks in self._blocks.items()}

    def after_direct_writes(self) -> None:
        """Repeat the checkpoint's blocks that a refit has written, once: the loader may write their scales next."""
        for name, blocks in self._blocks.items():
            if not (blocks < 0).any():
                refined = self._refined[name]
                self.loaded[name].copy_(blocks[:, refined.rows][:, :, refined.columns])
                blocks.fill_(_UNWRITTEN)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        """Write what these HF tensors determine; elements written per engine tensor.

        Like vLLM's loaders it takes any subset in any order and casts to the dtype of the parameter. It skips tensors
        of other ranks and those that vLLM drops: multi-token-prediction layers, rotary tables, a tied lm_head.
        Raises ValueError for a name or a shape that the model does not have.
        """
        written: dict[str, int] = {}
        for name, tensor in named_tensors:
            if name not in self._table.sources:
                if is_dropped(name, self._config):
                    continue
                raise ValueError(f"the model has no parameter {name!r}")
            shape, targets = self._table.sources[name]
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wants {shape}")
            for target in targets:
                box = self.loaded[target.tensor][target.index]
                box.copy_(target.take(tensor))
                written[target.tensor] = written.get(target.tensor, 0) + box.numel()
        return written

    def destinations(self, name: str) -> set[str]:
        """The engine tensors of this rank that an HF tensor is loaded into."""
        return {target.tensor for target in self._table.sources[name][1]}

    @property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every HF tensor of the model, also those that other ranks hold, and its shape."""
        return {name: shape for name, (shape, _) in self._table.sources.items()}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite every byte with POISON, in place, so that unwritten elements show. `tensor` must be contiguous."""
    if tensor.device.type != "meta":
        tensor.detach().view(-1).view(torch.uint8).fill_(POISON)
    return tensor


def is_dropped(name: str, config: Config) -> bool:
    """Whether vLLM's loader ignores this HF tensor (models/utils.py, AutoWeightsLoader; deepseek_v2.py)."""
    if "rotary_emb.inv_freq" in name or name.startswith("mtp."):
        return True
    if name == "lm_head.weight":
        return bool(config["tie_word_embeddings"])
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    extra = config.get("num_nextn_predict_layers") or 0
    return layer is not None and 0 <= int(layer[1]) - config["num_hidden_layers"] < extra


def _table(config: Config, sizes: GenSizes, gen_rank: int) -> tuple[Table, dict[str, Refined]]:
    family = config["model_type"]
    if family not in FAMILIES:
        raise ValueError(f"unknown model family {family!r}, known: {', '.join(sorted(FAMILIES))}")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"  # absent in gpt-oss
    if dtype not in _DTYPES:
        raise ValueError(f"config dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    dp_index, pp_index, tp_index = sizes.coordinates(gen_rank)
    ep_index = dp_index * sizes.tp + tp_index if sizes.ep > 1 else 0
    layers = len(config.get("hybrid_override_pattern") or "") or config["num_hidden_layers"]
    stage = stage_layers(layers, pp_index, sizes.pp, sizes.layers)
    table = Table(config, sizes, tp_index, ep_index, layers, stage, _DTYPES[dtype])
    FAMILIES[family](table)
    refined = quantize(table)
    if sizes.ep > 1 and not any(".experts." in source for source in table.sources):
        raise ValueError(f"{family} has no experts: ep must be 1, not {sizes.ep}")
    return table, refined
