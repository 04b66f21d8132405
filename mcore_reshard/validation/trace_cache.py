"""Offline traces on disk: the second plan of a model on its meshes needs neither Megatron nor the engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mcore_reshard.planner.bounded_json import MAX_PLAN_BYTES, parse_json
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames
from mcore_reshard.planner.layout.record_forms import canonical
from mcore_reshard.planner.layout.trace_file import (
    dump_checkpoint,
    dump_trace,
    parse_checkpoint,
    parse_trace,
    require_known,
)
from mcore_reshard.planning import TracedRequest
from mcore_reshard.tracing.kept import KeptFile

from .offline_traces import OfflineTraces


@dataclass(frozen=True, slots=True)
class TraceCache:
    """The file of one request's traces: a header, the checkpoint's tensors, and each distinct trace."""

    kept: KeptFile

    @classmethod
    def of(cls, request: TracedRequest) -> TraceCache:
        parts = {"train": asdict(request.train), "gen": asdict(request.gen)}
        config, quantized = request.engine_config, request.quantized_trainer
        return cls(
            KeptFile.of(request.engine, engine=request.engine, config=config, quantized_trainer=quantized, **parts)
        )

    def read(self) -> OfflineTraces | None:
        """The traces; None where there are none, or the file is damaged."""
        if (content := self.kept.read()) is None:
            return None
        try:
            header, tensors, *lines = content
            fields = parse_json(header, "the header", max_bytes=MAX_PLAN_BYTES)
            checkpoint = parse_checkpoint(tensors)
            names, traces = ParameterNames(checkpoint), [parse_trace(line) for line in lines]
            for trace in traces:
                require_known(trace, names)
            sides = [tuple(traces[number] for number in fields[side]) for side in ("train", "gen")]
            stages = [tuple(map(int, fields[f"{side}_stages"])) for side in ("train", "gen")]
            return OfflineTraces(fields["family"], checkpoint, sides[0], sides[1], stages[0], stages[1])
        except (ValueError, KeyError, TypeError, IndexError):  # a TraceFileError is a ValueError
            return None

    def write(self, traces: OfflineTraces) -> None:
        """Keep the traces, whole or not at all. A folder that cannot be written is no error."""
        distinct: dict[CondensedTrace, int] = {}
        numbers = [[distinct.setdefault(trace, len(distinct)) for trace in side] for side in (traces.train, traces.gen)]
        fields = {
            "family": traces.family,
            "train": numbers[0],
            "gen": numbers[1],
            "train_stages": traces.train_stages,
            "gen_stages": traces.gen_stages,
        }
        self.kept.write([canonical(fields), dump_checkpoint(traces.checkpoint), *map(dump_trace, distinct)])
