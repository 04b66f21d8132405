"""The checks of `bind`: does the schedule fit its tensors, and does it stay within them and the mesh?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np
import torch

from mcore_reshard.planner.model.parameters import ITEMSIZE
from mcore_reshard.planner.plan.schedule import Schedule, StridedBox

from .casts import wire_itemsizes
from .tensors import misfits


def tensor_problems(schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors that are missing, or of another shape, dtype, stride or device: first by stage, then by tensor."""
    not_live = {*schedule.computed, *schedule.carried}
    live = [index for index in range(len(schedule.tensors)) if index not in not_live]
    reasons = {index: why for index in live if (why := "; ".join(misfits(schedule.tensors[index], tensors)))}
    problems: list[str] = []
    unbound = np.zeros(len(schedule.tensors), bool)
    unbound[list(reasons)] = True
    shared: dict[int, int] = {}
    if schedule.world == "gen":
        fitting = [index for index in live if index not in reasons]
        shared = {index: other for other, index in _overlapping(schedule, tensors, fitting)}
    parameters = first_parameters(schedule) if reasons or shared else {}

    for stage in schedule.stages:
        tensor = np.concatenate([stage.sends.tensor, stage.recvs.tensor])
        if count := int(unbound[tensor].sum()):
            names = dict.fromkeys(schedule.tensors[index].name for index in tensor[unbound[tensor]].tolist())
            listed = ", ".join(list(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(f"stage {stage.pp_stage}: {count} of {len(tensor)} transfers unbound: {listed}")
    problems += [f"{described_tensor(schedule, index, parameters)}: {why}" for index, why in reasons.items()]
    examples = {tensors[local.name].device: local.name for local in schedule.tensors if local.name in tensors}
    if len(examples) > 1:
        where = ", ".join(f"{examples[device]} on {device}" for device in sorted(examples, key=str))
        problems.append(f"tensors on {len(examples)} devices: {where}")
    problems += unfilled_tensors(schedule, tensors)
    problems += [
        f"{described_tensor(schedule, index, parameters)}: shares its storage with {schedule.tensors[other].name}"
        for index, other in shared.items()
    ]
    return problems


def unfilled_tensors(schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors of an engine that no transfer and no parameter of the misc route fills."""
    if schedule.world != "gen" or schedule.misc:  # a plan does not say which tensors the misc route fills
        return []
    filled = {local.name for local in schedule.tensors}
    return [
        f"{name}: nothing in the plan fills it"
        for name, tensor in tensors.items()
        if name not in filled and tensor.numel()  # vLLM keeps shared experts of no rows where a model has none
    ]


def _overlapping(
    schedule: Schedule, tensors: Mapping[str, torch.Tensor], fitting: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Pairs of destination tensors whose bytes overlap, so that one transfer would overwrite another's."""
    spans = []
    for index in fitting:
        tensor = tensors[schedule.tensors[index].name]
        if tensor.numel():
            spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, index))
    spans.sort()
    for (_, stop, other), (start, _, index) in pairwise(spans):
        if start < stop:
            yield other, index


def first_parameters(schedule: Schedule) -> dict[int, str]:
    """One parameter that each tensor holds a part of."""
    first: dict[int, str] = {}
    for stage in schedule.stages:
        for table in (stage.sends, stage.recvs):
            tensors, rows = np.unique(table.tensor, return_index=True)
            for tensor, row in zip(tensors.tolist(), rows.tolist(), strict=True):
                if tensor not in first:
                    first[tensor] = schedule.parameter_name(int(table.transfer_group[row]), int(table.member[row]))
    return first


def described_tensor(schedule: Schedule, number: int, parameters: dict[int, str] | None = None) -> str:
    """A tensor and a parameter of its; `parameters` are those of `first_parameters`, where the caller has them."""
    parameters = first_parameters(schedule) if parameters is None else parameters
    name = schedule.tensors[number].name
    return f"{name} (holds {parameters[number]})" if number in parameters else name


def transfer_problems(schedule: Schedule) -> list[str]:
    """Signs of a damaged or foreign schedule: impossible strided boxes, transfers that leave their tensor or the mesh."""
    strided_boxes = (*schedule.strided_boxes, *(strided_box for *_, strided_box in schedule.padding))
    if damaged := [strided_box for strided_box in strided_boxes if not _is_possible(strided_box)]:
        return [f"{len(damaged)} of {len(strided_boxes)} strided boxes damaged, first {damaged[0]}"]
    if unknown := {local.dtype for local in schedule.tensors}.difference(ITEMSIZE):
        return [f"nothing moves tensors of {', '.join(sorted(unknown))}; known dtypes: {', '.join(ITEMSIZE)}"]
    itemsize = wire_itemsizes(schedule)
    elements = np.array([prod(local.shape) for local in schedule.tensors], np.int64)
    box = np.array([prod(strided_box.extents) for strided_box in schedule.strided_boxes], np.int64)
    reach = np.array([_reach(strided_box) for strided_box in schedule.strided_boxes], np.int64)
    peers = schedule.gen_ranks if schedule.world == "train" else schedule.train_ranks
    problems = [
        f"padding outside its tensor: offset {offset} and {strided_box} in {schedule.tensors[tensor].name}"
        for tensor, offset, strided_box in schedule.padding
        if offset < 0 or offset + _reach(strided_box) > elements[tensor]
    ]
    for stage in schedule.stages:
        for table in (stage.sends, stage.recvs):
            end = table.offset + reach[table.strided_box]
            faults = {
                "outside their tensor": (table.offset < 0) | (end > elements[table.tensor]),
                "of other bytes than their extents": table.nbytes != box[table.strided_box] * itemsize[table.tensor],
                "with a peer that does not exist": (table.peer < 0) | (table.peer >= peers),
            }
            for fault, is_faulty in faults.items():
                if is_faulty.any():
                    row = int(np.argmax(is_faulty))
                    name = schedule.parameter_name(int(table.transfer_group[row]), int(table.member[row]))
                    problems.append(
                        f"stage {stage.pp_stage}: {int(is_faulty.sum())} of {len(table)} transfers {fault}, "
                        f"first {name} in {schedule.tensors[int(table.tensor[row])].name}"
                    )
    return problems


def unnamed_transfers(schedule: Schedule) -> list[str]:
    """Transfers of parameters that their transfer group does not have: no message could name them."""
    counts = np.zeros(max(schedule.names, default=-1) + 2, np.int64)  # the last one: of unknown groups
    for group, names in schedule.names.items():
        counts[group] = len(names)
    problems = []
    for stage in schedule.stages:
        for table in (stage.sends, stage.recvs):
            known = (table.transfer_group >= 0) & (table.transfer_group < len(counts) - 1)
            count = counts[np.where(known, table.transfer_group, -1)]
            is_wrong = (table.member < 0) | (table.member >= count)
            if is_wrong.any():
                row = int(np.argmax(is_wrong))
                first = f"member {int(table.member[row])} of transfer group {int(table.transfer_group[row])}"
                problems.append(
                    f"stage {stage.pp_stage}: {int(is_wrong.sum())} transfers of no parameter, first {first}"
                )
    return problems


def _is_possible(strided_box: StridedBox) -> bool:
    return (
        len(strided_box.extents) == len(strided_box.strides)
        and min((*strided_box.extents, *strided_box.strides, 0)) >= 0
    )


def _reach(strided_box: StridedBox) -> int:
    """Elements from a transfer's first to past its last."""
    if prod(strided_box.extents) == 0:
        return 0
    return 1 + sum(
        (extent - 1) * stride for extent, stride in zip(strided_box.extents, strided_box.strides, strict=True)
    )
