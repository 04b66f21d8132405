"""Our golden: training ranks gather whole tensors as an export does, a session broadcasts them, engines cut them.

The broadcast and its checks are the product's own (`transport="golden"`). The gathering is the least that an export can
do: whole tensors one by one, on training rank 0, over the trainer's own process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import synthetic
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from mcore_reshard.kernels.options import Options as SessionOptions
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

from .methods import Options, Prepared, Unavailable
from .ranks import Rank

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def broadcast(rank: Rank, options: Options) -> Prepared:
    if rank.on_cuda and rank.launch.gpus < rank.ranks:
        raise Unavailable("the trainer's export needs a GPU for every rank")
    session = SessionOptions(transport="golden", session="bench-golden", timeout_s=rank.timeout_s)
    endpoint: TrainEndpoint | GenerationEndpoint
    if rank.world == "train":
        endpoint = TrainEndpoint(rank.schedule, rank.tensors, store=rank.address, export=_Export(rank), options=session)
    else:
        cut = _Cut(rank)
        endpoint = GenerationEndpoint(
            rank.schedule, rank.tensors, store=rank.address, load_weights=cut, options=session
        )
    endpoint.prepare()

    def refit() -> None:
        endpoint.refit((endpoint.committed_version or 0) + 1)

    return Prepared(refit, endpoint.close)


class _Export:
    """Yields whole tensors on training rank 0, and nothing of use on the others, which take part."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._pieces = _first_holders(rank.plan)
        if rank.case.train_ranks > 1:
            dist.init_process_group(
                "nccl" if rank.on_cuda else "gloo",
                store=PrefixStore("trainer", rank.store),
                rank=rank.rank,
                world_size=rank.case.train_ranks,
                timeout=timedelta(seconds=rank.timeout_s),
            )

    def __call__(self, names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        assert names is None, "golden asks for the whole model"
        for name, pieces in self._pieces.items():
            yield name, self._gathered(pieces)

    def _gathered(self, pieces: list[tuple[int, synthetic.LocalPiece]]) -> torch.Tensor:
        rank = self._rank
        dtype = getattr(torch, pieces[0][1].piece.tensor.dtype)
        whole = torch.empty(pieces[0][1].shape, dtype=dtype, device=rank.device)
        bits = synthetic.bits(whole)
        for holder, local in pieces:
            place = bits[synthetic.slices(local.piece.region)]
            if holder == rank.rank:
                box = synthetic.box(local, rank.tensors)
                if rank.rank == 0:
                    place.copy_(box)
                else:
                    dist.send(box.contiguous().view(torch.uint8), 0)
            elif rank.rank == 0:
                arriving = torch.empty(place.shape, dtype=bits.dtype, device=rank.device)
                dist.recv(arriving.view(torch.uint8), holder)
                place.copy_(arriving)
        return whole


class _Cut:
    """Cuts whole tensors to what this generation rank holds of them."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._pieces: dict[str, list[synthetic.LocalPiece]] = {}
        for local in synthetic.pieces(rank.plan, "gen", rank.rank):
            self._pieces.setdefault(local.parameter, []).append(local)

    def __call__(self, tensors: NamedTensors) -> None:
        for name, tensor in tensors:
            whole = synthetic.bits(tensor.to(self._rank.device))
            for local in self._pieces.get(name, ()):
                part = whole.reshape(local.shape)[synthetic.slices(local.piece.region)]
                synthetic.box(local, self._rank.tensors).copy_(part)


def _first_holders(plan: Plan) -> dict[str, list[tuple[int, synthetic.LocalPiece]]]:
    """By parameter, every region with the first training rank that holds it."""
    by_parameter: dict[str, dict[object, tuple[int, synthetic.LocalPiece]]] = {}
    for holder in range(plan.train.world):
        for local in synthetic.pieces(plan, "train", holder):
            by_parameter.setdefault(local.parameter, {}).setdefault(local.piece.region, (holder, local))
    return {name: list(regions.values()) for name, regions in by_parameter.items()}
