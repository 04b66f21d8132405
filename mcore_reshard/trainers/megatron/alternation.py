"""Experts whose linear_fc1 has gate and up take turns, block by block, instead of [gate; up].

Bulk moves them. Megatron-Bridge's import and export of Hugging Face tensors know no turns: a trace adds them, and misc and
golden are refused.
Source: megatron-core 0.19 and later, TEGroupedMLP._remove_glu_interleaving, and the shared experts that
use_grouped_gemm_for_shared_expert brings (transformer/moe/shared_experts.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class Alternation(NamedTuple):
    """Rows of linear_fc1 after which gate and up take turns, in routed and in shared experts; 0: [gate; up]."""

    experts: int
    shared: int

    def rows_of(self, name: str) -> int:
        """The rows after which gate and up take turns in the tensor of this name; 0: they do not."""
        if ".linear_fc1." not in name:
            return 0
        return self.experts if ".mlp.experts." in name else self.shared if ".mlp.shared_experts." in name else 0


def alternation_of(config: Any) -> Alternation:
    """What a TransformerConfig says; releases before 0.19 lack the fields."""
    if not config.gated_linear_unit:
        return Alternation(0, 0)
    fused = getattr(config, "use_grouped_gemm_for_shared_expert", False)
    shared = getattr(config, "moe_shared_expert_glu_interleave_size", None) if fused else None
    return Alternation(getattr(config, "moe_mlp_glu_interleave_size", None) or 0, shared or 0)


def let_take_turns(fc1: torch.Tensor, rows: int) -> torch.Tensor:
    """[gate; up] with blocks of `rows` in turns, same shape. Source: Megatron-Bridge, training/checkpointing.py, on load."""
    return fc1.unflatten(0, (2, -1, rows)).transpose(0, 1).flatten(0, 2)


def refuse_alternating_export(config: Any, names: Iterable[str]) -> None:
    """Raise ValueError if gate and up take turns in one of these tensors, which Megatron-Bridge is to export.

    Its GatedMLPMapping takes linear_fc1 for [gate; up] (conversion/param_mapping.py); only its checkpoints undo the turns
    (training/checkpointing.py).
    """
    alternation = alternation_of(config)
    if name := next(filter(alternation.rows_of, names), ""):
        raise ValueError(
            f"in {name} gate and up take turns every {alternation.rows_of(name)} rows (moe_mlp_glu_interleave_size,"
            " moe_shared_expert_glu_interleave_size), and Megatron-Bridge exports [gate; up]: such experts go by bulk alone,"
            " not by misc or golden. Build the trainer without these fields, or take another transport than golden"
        )
