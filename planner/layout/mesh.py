"""Rank numbering on both sides: which rank sits where on which mesh.

Training ranks carry two meshes at once. Dense parameters live on tp x cp x dp x pp, experts on etp x ep x edp x pp.
Numbering follows megatron.core.parallel_state.RankGenerator with the default order "tp-cp-ep-dp-pp".

Generation ranks follow vLLM's initialize_model_parallel: tensor parallel innermost, then pipeline, then data parallel;
expert parallelism spans dp x tp (vllm/distributed/parallel_state.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_RANKS = 1 << 16
_MAX_TEXT = 1 << 14  # characters of a mesh; layers of 4,096 chunks take 8,000
_MAX_DIGITS = 20


class MeshError(ValueError):
    """A mesh that cannot exist, or that a model does not fit; `violations` lists every reason."""

    def __init__(self, subject: str, violations: Sequence[str]) -> None:
        super().__init__(f"{subject}: " + "; ".join(violations))
        self.subject, self.violations = subject, tuple(violations)

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshError, (self.subject, self.violations), vars(self)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a pipeline stage keeps one HF layer. `layer` and `local` are -1 for what is in no layer."""

    layer: int  # HF number
    vp_stage: int  # model chunk (virtual stage); 0 in an engine
    local: int  # index within the chunk; in an engine, which numbers its layers through, the HF number


@dataclass(frozen=True, slots=True)
class TrainMesh:
    """Megatron-Core's parallel sizes; `dp` counts dense replicas, and the world has tp * cp * dp * pp ranks.

    `layers` gives uneven pipelines: the decoder layers of each stage (pp entries) or of each model chunk (pp * vpp
    entries). Chunks go in pipeline order: chunk 0 of every stage, then chunk 1, ... The layers of a stage are split
    evenly over its chunks. An entry may be 0: a stage may hold only the embedding or only the loss. Empty: an even split.
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
        violations = _degree_violations(self, "tp*cp*dp*pp")
        if not violations and (ranks := self.world // self.pp) % (self.ep * self.etp):
            violations.append(
                f"ep*etp = {self.ep}*{self.etp} must divide tp*cp*dp = {self.tp}*{self.cp}*{self.dp} = {ranks}"
            )
        entries, chunks = len(self.layers), self.pp * self.vpp
        if self.layers and entries not in {self.pp, chunks}:
            violations.append(
                f"layers has {entries} entries, wants pp = {self.pp} (per stage) or pp*vpp = {chunks} (per chunk)"
            )
        if chunks > MAX_RANKS and not violations:
            violations.append(f"pp*vpp = {chunks} chunks exceed the {MAX_RANKS} that a plan may have")
        if self.vpp > 1 and self.pp == 1:
            violations.append("vpp > 1 wants pp > 1 (Megatron interleaves chunks over pipeline stages)")
        if any(count < 0 for count in self.layers):
            violations.append(f"layers must not be negative, got {self.layers}")
        if self.vpp > 1 and entries == self.pp and any(count % self.vpp for count in self.layers):
            violations.append(f"layers per stage {self.layers} must be divisible by vpp = {self.vpp}")
        if violations:
            raise MeshError("impossible training mesh", violations)

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Replicas of an expert part."""
        return self.world // (self.pp * self.ep * self.etp)

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
        """Decoder layers of every chunk in pipeline order (entry vp_stage * pp + pp_stage)."""
        # Source: megatron.core.transformer.transformer_block.get_num_layers_to_build and PipelineParallelLayerLayout.
        chunks = self.pp * self.vpp
        if not self.layers and num_layers % chunks:
            problem = f"{num_layers} layers do not divide over pp*vpp = {chunks}"
            if num_layers > chunks:
                problem += f"; give them, e.g. layers={_joined(_even_counts(num_layers, chunks))}"
            raise MeshError("impossible training mesh", [problem])
        counts = _check_sum(self.layers or (num_layers // chunks,) * chunks, num_layers, "training")
        return counts if len(counts) == chunks else tuple(count // self.vpp for count in counts) * self.vpp

    def canonical(self, num_layers: int) -> TrainMesh:
        """The one spelling of this pipeline in a plan: no `layers` where the split is even, else one entry per chunk."""
        counts = self.chunk_layers(num_layers)
        return replace(self, layers=() if len(set(counts)) == 1 else counts)

    def place_layers(self, num_layers: int) -> tuple[tuple[int, LayerPlace], ...]:
        """The pipeline stage of each HF layer and its place there, by layer number."""
        places: list[tuple[int, LayerPlace]] = []
        for chunk, count in enumerate(self.chunk_layers(num_layers)):
            vp_stage, pp_stage = divmod(chunk, self.pp)
            places += [(pp_stage, LayerPlace(len(places) + i, vp_stage, i)) for i in range(count)]
        return tuple(places)


@dataclass(frozen=True, slots=True)
class GenMesh:
    """A generation engine's parallel sizes, of tp * pp * dp ranks. `ep` is 1 (experts cut by tp) or tp * dp.

    `layers` are those of every pipeline stage, as in VLLM_PP_LAYER_PARTITION. Empty: vLLM's own split.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        violations = _degree_violations(self, "tp*pp*dp")
        if not violations and self.ep not in {1, self.tp * self.dp}:
            violations.append(
                f"ep = {self.ep} must be 1 (experts cut by tp) or tp*dp = {self.tp}*{self.dp} = {self.tp * self.dp}"
                " (the engine's expert parallelism)"
            )
        if self.layers and len(self.layers) != self.pp:
            violations.append(f"layers has {len(self.layers)} entries, wants pp = {self.pp} (one per stage)")
        if any(count < 1 for count in self.layers):
            violations.append(f"layers must be at least 1 on every stage, got {_joined(self.layers)}")
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
        return self.dense_ranks(pp_stage).T.reshape(-1)

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """How many decoder layers every pipeline stage has. Raises MeshError where they do not fit the mesh.

        Source: vllm/distributed/utils.py get_pp_indices. By default the stages before the last take the layers left over,
        later stages first. 5 layers on 2 stages are 3 + 2; 6 on 4 are 1 + 2 + 2 + 1.
        """
        counts = self.layers or _even_counts(num_layers, self.pp, spare_last=True)
        if min(_check_sum(counts, num_layers, "generation")) < 1:
            raise MeshError("impossible generation mesh", [f"pp = {self.pp} exceeds the {num_layers} layers"])
        return counts

    def stage_of_layers(self, num_layers: int) -> tuple[int, ...]:
        """Pipeline stage of every layer."""
        return tuple(stage for stage, count in enumerate(self.stage_layers(num_layers)) for _ in range(count))

    def canonical(self, num_layers: int) -> GenMesh:
        """The one spelling of this pipeline in a plan: no `layers` where the split is vLLM's own."""
        default = replace(self, layers=())
        is_default = not self.layers or default.stage_layers(num_layers) == self.stage_layers(num_layers)
        return default if is_default else self


def replica_ranks(gen: GenMesh) -> int:
    """Ranks of one replica: tp * pp, or all ranks where experts are parallel over tp * dp."""
    return gen.world if gen.ep > 1 else gen.tp * gen.pp


def replica_count(gen: GenMesh) -> int:
    return gen.world // replica_ranks(gen)


def _degrees(mesh: TrainMesh | GenMesh) -> dict[str, int]:
    return {f.name: getattr(mesh, f.name) for f in fields(mesh) if f.name != "layers"}


def _degree_violations(mesh: TrainMesh | GenMesh, world: str) -> list[str]:
    """Degrees below one, or more ranks than a plan may have; `world` says how many there are, as in `tp*pp*dp`."""
    degrees = _degrees(mesh).items()
    violations = [
        f"{axis} = {size!r} must be a whole number" for axis, size in degrees if not isinstance(size, Integral)
    ]
    violations = violations or [f"{axis} = {size} must be at least 1" for axis, size in degrees if size < 1]
    if not violations and mesh.world > MAX_RANKS:
        violations.append(f"{world} = {mesh.world} ranks exceed the {MAX_RANKS} that a plan may have")
    return violations


def _check_sum(counts: tuple[int, ...], num_layers: int, side: str) -> tuple[int, ...]:
    if sum(counts) != num_layers:
        problem = f"layers={_joined(counts)} adds up to {sum(counts)}, the model has {num_layers}"
        raise MeshError(f"impossible {side} mesh", [problem])
    return counts


def _even_counts(total: int, parts: int, spare_last: bool = False) -> tuple[int, ...]:
    """Parts that differ by one at most; the larger ones go first, or with `spare_last` before the last."""
    base, left_over = divmod(total, parts)
    larger = range(parts - 1 - left_over, parts - 1) if spare_last else range(left_over)
    return tuple(base + (part in larger) for part in range(parts))


def _joined(layers: tuple[int, ...]) -> str:
    return "+".join(map(str, layers))


def parse_train_mesh(text: str) -> TrainMesh:
    """`tp=2,pp=2,ep=4,etp=1,cp=1,dp=2[,vpp=2][,layers=3+1]`; axes left out are 1."""
    return _parse(text, "training", TrainMesh)


def parse_gen_mesh(text: str) -> GenMesh:
    """`tp=4,pp=2,dp=1[,ep=4][,layers=3+1]`; axes left out are 1."""
    return _parse(text, "generation", GenMesh)


_Mesh = TypeVar("_Mesh", TrainMesh, GenMesh)


def _parse(text: str, side: str, kind: type[_Mesh]) -> _Mesh:
    """Parse every axis that is well-formed, then build the mesh: one error lists the faults of the text and of the mesh."""
    axes: dict[str, Any] = {}
    known = sorted(f.name for f in fields(kind))
    if len(text) > _MAX_TEXT or re.search(f"[0-9]{{{_MAX_DIGITS + 1}}}", text):
        problem = f"it has {len(text):,} characters, or a number of more than {_MAX_DIGITS} digits"
        raise MeshError(f"cannot use the {side} mesh {text[:40]!r}...", [problem])
    violations = [] if text.replace(",", " ").strip() else ["it is empty, write for example tp=2"]
    plain = re.sub(r"layers=\d+(,\d+)+(?![^,])", lambda layers: layers[0].replace(",", "+"), text)
    if plain != text:
        violations.append(f"layers are joined by +; did you mean {plain}?")
    for item in filter(None, map(str.strip, plain.split(","))):
        axis, _, value = item.partition("=")
        if axis not in known:
            meant = re.fullmatch(r"([a-z]+)[\s:=]*([\d+]+)", item.lower())
            hint = f"; did you mean {meant[1]}={meant[2]}?" if meant and meant[1] in known else ""
            violations.append(f"unknown axis {axis!r}, known: {', '.join(known)}{hint}")
        elif axis in axes:
            violations.append(f"{axis} is given twice")
        else:
            try:
                axes[axis] = tuple(map(int, value.split("+"))) if axis == "layers" else int(value)
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
    axes = [f"{axis}={degree}" for axis, degree in _degrees(mesh).items()]
    return ",".join([*axes, f"layers={_joined(mesh.layers)}"] if mesh.layers else axes)
