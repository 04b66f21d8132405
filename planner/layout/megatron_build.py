"""How a Megatron-Core model was built: what its names and its storage depend on beside the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from mcore_reshard.planner.model.parameters import Architecture

from .mesh import TrainMesh

ExpertsModule = Literal["grouped", "sequential", "stacked"]


@dataclass(frozen=True, slots=True)
class MegatronBuild:
    """The choices that, beside the mesh, decide the names and the storage of parameters.

    `experts`: TEGroupedMLP (one tensor per expert), SequentialMLP (one module per expert) or the legacy GroupedMLP (one
    stacked tensor). `fused_norms`: norms live inside the linear they precede (the Transformer Engine spec) or apart
    (the local spec). `padded_vocab`: rows of the embedding over all tp ranks; 0 applies Megatron-Bridge's rule.
    """

    experts: ExpertsModule = "grouped"
    fused_norms: bool = True
    padded_vocab: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """What a layout rule sees beside the group it places."""

    architecture: Architecture
    mesh: TrainMesh
    build: MegatronBuild

    @property
    def padded_vocab(self) -> int:
        return self.build.padded_vocab or padded_vocab(self.architecture.vocab, self.mesh.tp)


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rows as Megatron-Bridge builds them: unpadded where tp divides, else padded.

    Source: megatron.bridge.utils.vocab_utils.calculate_padded_vocab_size, with the divisor of
    MegatronModelBridge.make_vocab_size_divisible_by (the largest power of two up to 128 that divides the vocabulary).
    """
    if vocab % tp == 0:
        return vocab
    multiple = gcd(vocab, 128) * tp
    return -(-vocab // multiple) * multiple
