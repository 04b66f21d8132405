"""Rank numbering on both sides: which rank sits where on which mesh.

Training ranks carry two meshes at once. Dense parameters live on tp x cp x dp x pp, experts on etp x ep x edp x pp, laid
over the same ranks; one `TrainMesh` answers for both. Numbering follows megatron.core.parallel_state.RankGenerator with
the default order "tp-cp-ep-dp-pp" (the expert generator has no cp and etp in place of tp).

Generation ranks follow vLLM's initialize_model_parallel: tensor parallel innermost, then pipeline, then data parallel;
expert parallelism spans dp x tp (vllm/distributed/parallel_state.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_RANKS = 1 << 16


class MeshError(ValueError):
    """A mesh that cannot exist, or that a model does not fit; `violations` lists every reason."""

    def __init__(self, subject: str, violations: list[str]) -> None:
        super().__init__(f"{subject}: " + "; ".join(violations))
        self.violations = tuple(violations)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a pipeline stage keeps one HF layer. `layer` and `local` are -1 for what is in no layer."""

    layer: int  # HF number
    vp_stage: int  # model chunk (virtual stage); 0 in an engine
    local: int  # index within the chunk; in an engine, which numbers its layers through, the HF number


@dataclass(frozen=True, slots=True)
class TrainMesh:
    """Megatron-Core's parallel sizes. `dp` counts dense replicas; world = tp * cp * dp * pp.

    `layers` gives uneven pipelines: decoder layers per stage (pp entries, each split evenly over its chunks) or per
    model chunk in pipeline order (pp * vpp entries: chunk 0 of every stage, then chunk 1, ...). Zero is allowed: a
    stage may hold only the embedding or only the loss. Empty: layers are divided evenly.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        violations = _axis_violations(self, ("tp", "cp", "dp", "pp"))
        replicas = self.tp * self.cp * self.dp
        if not violations and replicas % (self.ep * self.etp):
            violations.append(
                f"ep*etp = {self.ep}*{self.etp} must divide tp*cp*dp = {self.tp}*{self.cp}*{self.dp} = {replicas}"
            )
        if self.layers and len(self.layers) not in {self.pp, self.pp * self.vpp}:
            violations.append(
                f"layers has {len(self.layers)} entries, wants pp = {self.pp} (per stage) or pp*vpp ="
                f" {self.pp * self.vpp} (per chunk)"
            )
        if self.vpp > 1 and self.pp == 1:
            violations.append("vpp > 1 wants pp > 1 (Megatron interleaves chunks over pipeline stages)")
        if any(count < 0 for count in self.layers):
            violations.append(f"layers must not be negative, got {self.layers}")
        if self.layers and len(self.layers) == self.pp and any(count % self.vpp for count in self.layers):
            violations.append(f"layers per stage {self.layers} must be divisible by vpp = {self.vpp}")
        if violations:
            raise MeshError("impossible training mesh", violations)

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Replicas of an expert part."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def coordinate(self, global_rank: int) -> dict[str, int]:
        """All coordinates of a rank, dense and expert: tp cp dp pp and etp ep edp."""
        pp, within = divmod(global_rank, self.world // self.pp)
        rest, tp = divmod(within, self.tp)
        dp, cp = divmod(rest, self.cp)
        rest, etp = divmod(within, self.etp)
        edp, ep = divmod(rest, self.ep)
        return {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "etp": etp, "ep": ep, "edp": edp}

    def dense_ranks(self, pp_stage: int) -> NDArray[np.int32]:
        """Ranks of a stage as [tp, replicas]; replicas run over cp, then dp."""
        ranks = np.arange(self.world, dtype=np.int32).reshape(self.pp, self.dp * self.cp, self.tp)
        return ranks[pp_stage].T

    def expert_ranks(self, pp_stage: int) -> NDArray[np.int32]:
        """Ranks of a stage as [ep, etp, edp]."""
        ranks = np.arange(self.world, dtype=np.int32).reshape(self.pp, self.edp, self.ep, self.etp)
        return ranks[pp_stage].transpose(1, 2, 0)

    def chunk_layers(self, num_layers: int) -> tuple[int, ...]:
        """Decoder layers of every chunk in pipeline order (entry vp_stage * pp + pp_stage).

        Source: megatron.core.transformer.transformer_block.get_num_layers_to_build and PipelineParallelLayerLayout.
        """
        chunks = self.pp * self.vpp
        if not self.layers and num_layers % chunks:
            problem = f"{num_layers} layers do not divide over pp*vpp = {chunks}"
            if num_layers > chunks:
                problem += "; give them, e.g. layers=" + "+".join(map(str, _even_counts(num_layers, chunks)))
            raise MeshError("impossible training mesh", [problem])
        counts = self.layers or (num_layers // chunks,) * chunks
        if len(counts) < chunks:  # per stage
            counts = tuple(count // self.vpp for count in counts) * self.vpp
        if sum(counts) != num_layers:
            raise MeshError("impossible training mesh", [_wrong_sum(self.layers, num_layers)])
        return counts

    def canonical(self, num_layers: int) -> TrainMesh:
        """The same pipeline in one spelling: no `layers` where the split is even, else one entry per chunk.

        Plans are compared by digest, so two spellings of one mesh must not differ.
        """
        counts = self.chunk_layers(num_layers)
        return replace(self, layers=() if len(set(counts)) == 1 else counts)

    def place_layers(self, num_layers: int) -> tuple[tuple[int, LayerPlace], ...]:
        """The pipeline stage of each HF layer and its place there, by layer number."""
        places = []
        counts = self.chunk_layers(num_layers)
        for chunk, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            vp_stage, pp_stage = divmod(chunk, self.pp)
            places += [(pp_stage, LayerPlace(end - count + i, vp_stage, i)) for i in range(count)]
        return tuple(places)


@dataclass(frozen=True, slots=True)
class GenMesh:
    """A generation engine's parallel sizes; world = tp * pp * dp. `ep` is 1 (experts cut by tp) or tp * dp.

    `layers` gives the decoder layers of every pipeline stage, as vLLM's variable VLLM_PP_LAYER_PARTITION does. Empty: vLLM's
    own split.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        violations = _axis_violations(self, ("tp", "pp", "dp"))
        if not violations and self.ep not in {1, self.tp * self.dp}:
            violations.append(
                f"ep = {self.ep} must be 1 (experts cut by tp) or tp*dp = {self.tp}*{self.dp} = {self.tp * self.dp}"
                " (the engine's expert parallelism)"
            )
        if self.layers and len(self.layers) != self.pp:
            violations.append(f"layers has {len(self.layers)} entries, wants pp = {self.pp} (one per stage)")
        if any(count < 1 for count in self.layers):
            violations.append(f"layers must be at least 1 on every stage, got {'+'.join(map(str, self.layers))}")
        if violations:
            raise MeshError("impossible generation mesh", violations)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinate(self, gen_rank: int) -> dict[str, int]:
        rest, tp = divmod(gen_rank, self.tp)
        dp, pp = divmod(rest, self.pp)
        return {"tp": tp, "pp": pp, "dp": dp, "ep": dp * self.tp + tp if self.ep > 1 else 0}

    def dense_ranks(self, pp_stage: int) -> NDArray[np.int32]:
        """Ranks of a stage as [tp, dp]."""
        return np.arange(self.world, dtype=np.int32).reshape(self.dp, self.pp, self.tp)[:, pp_stage].T

    def expert_ranks(self, pp_stage: int) -> NDArray[np.int32]:
        """Ranks of a stage in expert-parallel order [tp * dp], data parallel outermost."""
        return np.arange(self.world, dtype=np.int32).reshape(self.dp, self.pp, self.tp)[:, pp_stage].reshape(-1)

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """How many decoder layers every pipeline stage has. Raises MeshError where they do not fit the mesh.

        Source: vllm/distributed/utils.py get_pp_indices. By default layers left over go to the stages before the last, later
        ones first: 5 layers on 2 stages are 3 + 2, 6 on 4 are 1 + 2 + 2 + 1.
        """
        counts = self.layers or _even_counts(num_layers, self.pp, spare_last=True)
        if sum(counts) != num_layers:
            raise MeshError("impossible generation mesh", [_wrong_sum(self.layers, num_layers)])
        if min(counts) < 1:
            raise MeshError("impossible generation mesh", [f"pp = {self.pp} exceeds the {num_layers} layers"])
        return counts

    def stage_of_layers(self, num_layers: int) -> tuple[int, ...]:
        """Pipeline stage of every layer."""
        return tuple(stage for stage, count in enumerate(self.stage_layers(num_layers)) for _ in range(count))

    def canonical(self, num_layers: int) -> GenMesh:
        """The same pipeline in one spelling: no `layers` where the split is vLLM's own."""
        default = replace(self, layers=())
        is_default = not self.layers or default.stage_of_layers(num_layers) == self.stage_of_layers(num_layers)
        return default if is_default else self


_Mesh = TypeVar("_Mesh", TrainMesh, GenMesh)


def _axis_violations(mesh: TrainMesh | GenMesh, ranks: tuple[str, ...]) -> list[str]:
    """Sizes below one, or more ranks (the product of the axes `ranks`) than a plan may have."""
    sizes = {f.name: getattr(mesh, f.name) for f in fields(mesh) if f.name != "layers"}
    violations = [f"{axis} = {size} must be at least 1" for axis, size in sizes.items() if size < 1]
    if not violations and (world := prod(sizes[axis] for axis in ranks)) > MAX_RANKS:
        violations.append(f"{'*'.join(ranks)} = {world} ranks exceed the {MAX_RANKS} that a plan may have")
    return violations


def _wrong_sum(layers: tuple[int, ...], num_layers: int) -> str:
    return f"layers={'+'.join(map(str, layers))} adds up to {sum(layers)}, the model has {num_layers}"


def _even_counts(total: int, parts: int, spare_last: bool = False) -> tuple[int, ...]:
    base, left = divmod(total, parts)
    counts = [base] * parts
    for i in range(left):
        counts[-(i + 2) if spare_last else i] += 1
    return tuple(counts)


def parse_train_mesh(text: str) -> TrainMesh:
    """`tp=2,pp=2,ep=4,etp=1,cp=1,dp=2[,vpp=2][,layers=3+1]`; axes left out are 1."""
    return _parsed(text, "training", TrainMesh)


def parse_gen_mesh(text: str) -> GenMesh:
    """`tp=4,pp=2,dp=1[,ep=4][,layers=3+1]`; axes left out are 1."""
    return _parsed(text, "generation", GenMesh)


def _parsed(text: str, side: str, kind: type[_Mesh]) -> _Mesh:
    """Read the axes that can be read and build the mesh, so that one error lists what is wrong with the text and the mesh."""
    axes: dict[str, Any] = {}
    known = sorted(f.name for f in fields(kind))
    violations = [] if text.replace(",", " ").strip() else ["it is empty, write for example tp=2"]
    for item in filter(None, map(str.strip, text.split(","))):
        axis, _, value = item.partition("=")
        if axis not in known:
            violations.append(f"unknown axis {axis!r}, known: {', '.join(known)}")
        elif axis in axes:
            violations.append(f"{axis} is given twice")
        else:
            try:
                axes[axis] = tuple(int(n) for n in value.split("+")) if axis == "layers" else int(value)
            except ValueError:
                example = "layers=3+1" if axis == "layers" else f"{axis}=2"
                violations.append(f"{item!r} is not a number, write for example {example}")
    try:
        mesh = kind(**axes)
    except MeshError as error:
        violations += error.violations
    if violations:
        raise MeshError(f"cannot use the {side} mesh {text!r}", violations)
    return mesh


def format_mesh(mesh: TrainMesh | GenMesh) -> str:
    """The text that parses back to this mesh; every axis stays, also at size one."""
    axes = [f"{f.name}={getattr(mesh, f.name)}" for f in fields(mesh) if f.name != "layers"]
    return ",".join([*axes, "layers=" + "+".join(map(str, mesh.layers))] if mesh.layers else axes)
