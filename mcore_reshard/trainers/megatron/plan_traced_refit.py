"""From a live trainer of a model without layout rules to its plan: trace this side, ask the engine's, put both together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames, condense
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.planner.layout.trace_file import dump_checkpoint, dump_trace, parse_checkpoint, parse_trace
from mcore_reshard.planner.layout.traced import read_layouts
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.planner.model.precision import FP8, Format
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.trainers.world import gather_from_all, own_rank, run_on_all_ranks

from .adapters import MergedAdapters
from .config_fields import check_config_fields, fields_of_bridge
from .model import local_tensors, precisions_of, rank_coordinate, train_mesh_of
from .plan_refit import refuse_adapters, refuse_other_rank_orders
from .trace import checkpoint_tensors, kept_of_trainer, trace_live

_MAIN = "bfloat16"  # what Megatron-Bridge exports FP8 weights as
Collect = Callable[[Mapping[str, HfTensor]], list[CondensedTrace]]


def plan_traced_refit(
    family: str,
    bridge: Any,
    model_chunks: Sequence[torch.nn.Module],
    gen: GenMesh,
    collect: Collect,
    *,
    model: str = "",
    engine: str = DEFAULT_ENGINE,
    adapters: MergedAdapters | None = None,
    form: Format | None = None,
) -> Plan:
    """Plan the refit of a live Megatron-Core model from traces of Megatron-Bridge and of the engine, and prove it.

    `bridge` is the AutoBridge that built the model, made of a checkpoint with files. `collect` brings the engine ranks'
    traces to training rank 0, given the tensors that the trainer will send. `form` is that of the engine's quantized
    matrices; a trainer may keep its own in it. Collective over the training world: all ranks get the same plan. Raises
    ValueError, TracedLayoutError, PrecisionError, ProofError, and as `collect` does.
    """
    train = train_mesh_of(model_chunks)
    refuse_other_rank_orders(train, rank_coordinate(model_chunks))
    tensors = adapters.local_tensors() if adapters is not None else local_tensors(model_chunks)
    refuse_adapters(tensors)
    _refuse_mxfp8(precisions_of(tensors))
    check_config_fields(model_chunks, run_on_all_ranks(lambda: fields_of_bridge(bridge)))
    files = run_on_all_ranks(lambda: checkpoint_tensors(bridge))
    checkpoint, traces = _trainer_traces(bridge, model_chunks, files)
    engine_traces = run_on_all_ranks(lambda: collect(checkpoint) if own_rank() == 0 else [])
    engine_traces = gather_from_all(engine_traces)[0]
    stages = [[mesh.coordinate(rank)["pp"] for rank in range(mesh.world)] for mesh in (train, gen)]
    layouts = read_layouts(family, checkpoint, traces, engine_traces, (stages[0], stages[1]), engine)
    plan = plan_traced(layouts, train, gen, model=model, form=form)
    require_proof(plan)
    return plan


def _trainer_traces(
    bridge: Any, model_chunks: Sequence[torch.nn.Module], files: Mapping[str, HfTensor]
) -> tuple[dict[str, HfTensor], list[CondensedTrace]]:
    """The tensors that the trainer sends, in its dtypes, and the trace of every rank; kept ones where all ranks have them."""
    kept = run_on_all_ranks(lambda: kept_of_trainer(bridge, model_chunks, files=dump_checkpoint(files)))
    if all(gather_from_all((lines := kept.read()) is not None)):
        assert lines is not None
        return parse_checkpoint(lines[0]), gather_from_all(parse_trace(lines[1]))
    trace = run_on_all_ranks(lambda: trace_live(bridge, model_chunks, files))
    own_dtypes = {name: tensor.tensor.dtype for tensor in trace.tensors for name in tensor.names}
    dtypes: dict[str, str] = {}
    for of_rank in gather_from_all(own_dtypes):
        dtypes |= of_rank
    unquantized = {name: _MAIN if dtype == FP8 else dtype for name, dtype in dtypes.items()}
    sent = dump_checkpoint({name: replace(files[name], dtype=unquantized[name]) for name in files if name in dtypes})
    checkpoint = parse_checkpoint(sent)
    condensed = condense(trace, ParameterNames(checkpoint), is_trainer=True)
    kept.write([sent, dump_trace(condensed)])
    return checkpoint, gather_from_all(condensed)


def _refuse_mxfp8(first_in: Mapping[str, str]) -> None:
    """Raise ValueError, on every rank, if one holds a matrix in MXFP8. `first_in` names one of each precision."""
    if found := [name for name in gather_from_all(first_in.get("mxfp8", "")) if name]:
        raise ValueError(
            f"the trainer keeps {found[0]} in MXFP8, which plans from traces do not know: train in bfloat16, or with the"
            " blockwise FP8 recipe"
        )
