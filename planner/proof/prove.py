"""Prove a plan before a byte moves.

The proof looks at the plan alone: it does not ask the layout rules again, so it also holds for plans read from a file.
Each pattern is checked once. Ranks, layers, experts and slots are checked per transfer group, and
local tensors are checked per class of ranks that hold the same parts. The cost follows the number of distinct layouts.

A plan is sound when
  references  records refer to what exists, and layers and experts are the group's;
  bounds      pieces and padding lie inside of their parameter and their tensor, with a known dtype;
  groups      every parameter is listed once, and has one route: bulk, misc or (prediction layers only) excluded;
  source      source parts tile the parameter;
  consumed    destination parts tile it too; replicated parts count once;
  cover       the overlaps into each destination piece tile it, out of pieces that hold what they send;
  bytes       both ends of an overlap have one dtype, or the two dtypes of a declared cast;
  storage     pieces lie in their tensors as Hugging Face has them, or transposed where `storage` declares it;
  order       parts, fused parameters and rows follow each other as declared;
  names       all parts lie in the same tensors, whose names vary with chunk, layer and expert where they must;
  tensors     pieces and declared padding tile each tensor of either world;
  holders     the ranks named are those that hold the part on the mesh;
  places      layers are read and written where both pipelines keep them;
  arrivals    every bulk parameter arrives once on each stage of the engine that holds it;
  paths       each replica gets each overlap once, from the trainer or from a replica that has it by then;
  pairs       quantized weights and their scales have one route, the same ranks and replica order, and agree block by block;
  casts       dtypes change only in declared, known ways, and all of a tensor is sent in one dtype;
  stages      transfer groups leave in stage order, towards generation ranks only (so no cycle).

The proof cannot see tensors that the live model does not have under that name and of that shape; binding refuses them.
Names mean nothing to it, so three faults pass; validation against golden shows them:
  - two parameters of one shape lie in each other's place;
  - a parameter is missing from the list of the model's parameters;
  - KV groups are counted wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.plan import Plan

from .paths import check_paths
from .patterns import check_groups, check_patterns, check_pieces, check_references
from .quantized import check_casts, check_pairs
from .ranks import check_ranks
from .report import Violation
from .tensors import check_tensors

__all__ = ["Proof", "ProofError", "Violation", "prove"]

_SHOWN = 20  # violations kept per rule: a broken pattern breaks thousands of parameters


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome: violations, bytes of bulk parameters that all generation ranks must get, and bytes that arrive."""

    violations: tuple[Violation, ...]
    destination_bytes: int
    covered_bytes: int

    @property
    def ok(self) -> bool:
        return not self.violations and self.destination_bytes == self.covered_bytes

    def __bool__(self) -> bool:
        """Whether the plan is sound, so that `assert plan.prove()` means what it says."""
        return self.ok


class ProofError(ValueError):
    """The plan is not sound; `proof` has the violations."""

    def __init__(self, proof: Proof) -> None:
        shown = "\n  ".join(f"{violation!s:.1000}" for violation in proof.violations[:10])
        super().__init__(f"the plan is not sound, {len(proof.violations)} violations:\n  {shown}")
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return ProofError, (self.proof,), vars(self)


def prove(plan: Plan) -> Proof:
    """Check every rule; never raises for an unsound plan."""
    for check in (check_references, check_pieces):
        if violations := tuple(_few_per_rule(check(plan))):
            return Proof(violations, 0, 0)  # nothing else can be evaluated
    checks = (check_groups, check_patterns, check_ranks, check_paths, check_tensors, check_pairs, check_casts)
    return Proof(tuple(v for check in checks for v in _few_per_rule(check(plan))), *_bytes(plan))


def require_proof(plan: Plan) -> Proof:
    """The proof of a plan that must be sound. Raises ProofError where it is not."""
    if not (proof := prove(plan)):
        raise ProofError(proof)
    return proof


def _few_per_rule(violations: Iterable[Violation]) -> Iterator[Violation]:
    counts: dict[str, int] = defaultdict(int)
    for violation in violations:
        counts[violation.rule] += 1
        if counts[violation.rule] <= _SHOWN:
            yield violation


def _bytes(plan: Plan) -> tuple[int, int]:
    """Bytes that destination pieces hold over all ranks, and bytes that overlaps bring."""
    expected = covered = 0
    for transfers in plan.transfer_groups:
        pattern = plan.patterns[transfers.pattern]
        copies = transfers.members * plan.dst_replicas(transfers)
        destination = (piece for pieces in pattern.dst.pieces for piece in pieces)
        expected += copies * sum(piece.region.elements * ITEMSIZE[piece.tensor.dtype] for piece in destination)
        covered += int(pattern.overlap_bytes.sum()) * copies
    return expected, covered
