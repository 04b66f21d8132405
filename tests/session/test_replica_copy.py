"""A new replica gets all bytes of another one, between real processes, or an error that says why not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.gloo import NoisyWire, connecting
from helpers.gpu import needs_gpus
from helpers.handmade import raw_bytes
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.kernels.rendezvous.store_keys import StoreView
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.session import replica_copy
from mcore_reshard.session.replica_copy import CopyReport, list_tensors, offer, take

Tensors = dict[str, torch.Tensor]
OPTIONS = Options(transport="gloo", bucket_bytes=1 << 10, timeout_s=10.0)


def weights(seed: int) -> Tensors:
    """Tensors of many dtypes and memory orders; two are tied, one is empty, one name has braces."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "embed.weight": drawn(65, 8).bfloat16(),
        "layers.0.up.weight": drawn(16, 24).to(torch.float8_e4m3fn).t(),
        "layers.0.up.weight_scale_inv": drawn(2, 3),
        "layers.0.experts.w13": drawn(4, 6, 10).bfloat16().permute(2, 0, 1),
        "layers.{0}.ids:{layer:>1000}": torch.randint(100, (7,), generator=generator),
        "mask": drawn(9) > 0,
        "scalar": drawn()[None][0],
        "none": drawn(0, 4),
        "column": drawn(1, 5, 1),
        "nans": torch.full((3,), float("nan")),
    }
    return tensors | {"lm_head.weight": tensors["embed.weight"]}


def bytes_of(tensors: Tensors) -> dict[str, bytes]:
    return {name: raw_bytes(tensor.contiguous()) for name, tensor in tensors.items()}


Change = Callable[[Tensors], Any]


def view(address: str, name: str, joiner: str = "gen:5") -> StoreView:
    """The keys of a copy to a joiner, for the rank `name`."""
    store = connect_store(address, OPTIONS)
    store.take_seat(name, {})
    return store.under(f"copies/{joiner}")


def one_end(
    rank: int,
    address: str,
    change: tuple[Change, Change] | None = None,
    options: tuple[Options, Options] = (OPTIONS, OPTIONS),
    prepare: Callable[[int], Any] | None = None,
) -> tuple[CopyReport, dict[str, bytes]]:
    """Rank 0 is the donor gen:1, rank 1 the joiner gen:5. Raises a RuntimeError with "moved" if a refused copy moved bytes."""
    store = view(address, "gen:5" if rank else "gen:1")
    tensors = weights(seed=rank)
    if change is not None:
        change[rank](tensors)
    if prepare is not None:
        prepare(rank)
    before = bytes_of(tensors)
    try:
        if rank == 0:
            report = offer(store, "gen:1", "gen:5", tensors, options[0], version=7)
        else:
            report = take(store, "gen:5", "gen:1", tensors, options[1])
    except Exception as error:
        if bytes_of(tensors) != before:
            error.args = (f"MOVED {error}",)
        raise
    return report, bytes_of(tensors)


@pytest.mark.parametrize("transport", ["gloo", "golden"])
def test_every_byte_of_every_tensor_arrives(transport: str) -> None:
    options = replace(OPTIONS, transport=transport)
    (gave, held), (took, filled) = values(run_ranks(2, one_end, None, (options, options)))
    assert held == bytes_of(weights(0)) and filled == held != bytes_of(weights(1))
    nbytes = sum(len(each) for name, each in held.items() if name != "lm_head.weight")  # once: it is tied
    assert (gave.version, gave.nbytes, gave.transport) == (took.version, took.nbytes, took.transport)
    assert (took.version, took.nbytes, took.transport) == (7, nbytes, transport)


def test_errors_name_tensors_as_the_model_does() -> None:
    listed, views = list_tensors("gen:1", weights(0))
    schedule = replica_copy._schedule((0, 1), listed, views, sends=True)
    assert [schedule.parameter_name(index, 0) for index in range(len(views))] == [*views]
    assert "layers.{0}.ids:{layer:>1000}" in views


def keep(tensors: Tensors) -> None:
    pass


def other_shape(tensors: Tensors) -> None:
    tensors["mask"] = torch.zeros(3, 3, dtype=torch.bool)


def other_dtype(tensors: Tensors) -> None:
    tensors["mask"] = tensors["mask"].to(torch.uint8)


def other_order(tensors: Tensors) -> None:
    tensors["layers.0.up.weight"] = (
        tensors["layers.0.up.weight"].view(torch.uint8).contiguous().view(torch.float8_e4m3fn)
    )


def untied(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()


def without_scale(tensors: Tensors) -> None:
    del tensors["layers.0.up.weight_scale_inv"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_shape, "mask: bool (9,) here, bool (3, 3) at gen:5"),
        (other_dtype, "mask: bool (9,) here, uint8 (9,) at gen:5"),
        (
            other_order,
            "layers.0.up.weight: float8_e4m3fn (24, 16) with dims in memory order (1, 0) here, float8_e4m3fn (24, 16) at gen:5",
        ),
        (untied, "lm_head.weight: bfloat16 (65, 8) tied to embed.weight here, bfloat16 (65, 8) at gen:5"),
        (without_scale, "layers.0.up.weight_scale_inv: gen:5 has no such tensor"),
    ],
)
def test_ends_that_differ_are_refused_on_both_before_a_byte_moves(change: Change, said: str) -> None:
    donor, joiner = run_ranks(2, one_end, (keep, change))
    assert donor.kind == joiner.kind == "SessionError"
    assert "gen:1: nothing can be copied between it and gen:5" in str(donor.error) and said in str(donor.error)
    assert "gen:1" in str(joiner.error) and said.split(":")[0].split(" ")[0] in str(joiner.error)
    assert "MOVED" not in f"{donor.error}{joiner.error}" and max(donor.seconds, joiner.seconds) < 5


def with_gaps(tensors: Tensors) -> None:
    tensors["mask"] = torch.zeros(18, dtype=torch.bool)[::2]


def test_a_tensor_with_gaps_is_refused_and_the_peer_hears_why() -> None:
    donor, joiner = run_ranks(2, one_end, (keep, with_gaps))
    assert joiner.kind == "BindError" and "mask: strides (2,) of shape (9,) skip or repeat memory" in str(joiner.error)
    assert donor.kind == "SessionError" and "gen:5: BindError: gen:5 cannot bind" in str(donor.error)
    assert "MOVED" not in f"{donor.error}{joiner.error}" and donor.seconds < 5


def test_ends_of_other_options_are_refused() -> None:
    golden = replace(OPTIONS, transport="golden", bucket_bytes=1 << 11)
    donor, joiner = run_ranks(2, one_end, None, (OPTIONS, golden))
    assert donor.kind == joiner.kind == "SessionError" and "transport: gloo here, golden at gen:5" in str(donor.error)
    assert "bucket_bytes: 1024 here, 2048 at gen:5" in str(donor.error) and "MOVED" not in str(joiner.error)


class Interrupted(GlooExecutor):
    """Does something to the process before it packs or unpacks the third bucket."""

    interrupt: Callable[[], Any]

    def _start(self, bucket: Bucket, slot: torch.Tensor) -> Any:
        if self._buckets.index(bucket) == 2:
            type(self).interrupt()
        return super()._start(bucket, slot)


def connect_by(kind: type[GlooExecutor], victim: int, rank: int) -> None:
    if rank == victim:
        known = registry._transports
        known["gloo"] = replace(known["gloo"], connect=connecting(kind))


def interrupted(victim: int, how: signal.Signals, rank: int) -> None:
    Interrupted.interrupt = lambda: os.kill(os.getpid(), how)  # type: ignore[assignment, method-assign]
    connect_by(Interrupted, victim, rank)


def test_a_joiner_whose_donor_is_killed_hears_of_it_at_once() -> None:
    donor, joiner = run_ranks(2, one_end, None, (OPTIONS, OPTIONS), partial(interrupted, 0, signal.SIGKILL))
    assert donor.died and joiner.kind == "PeerLostError" and joiner.seconds < 5
    assert "gen:5 waiting for relay:1 to send" in str(joiner.error)


def test_a_donor_whose_joiner_is_killed_hears_of_it_and_keeps_its_bytes() -> None:
    donor, joiner = run_ranks(2, one_end, None, (OPTIONS, OPTIONS), partial(interrupted, 1, signal.SIGKILL))
    assert joiner.died and donor.kind == "PeerLostError" and donor.seconds < 5
    assert "gen:5" in str(donor.error) and "MOVED" not in str(donor.error)


def frozen(rank: int, address: str) -> Any:
    """The donor freezes in the middle, and is killed by a sibling process later."""
    quick = replace(OPTIONS, timeout_s=1.0)
    if rank == 0:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(3)
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
    return one_end(rank, address, None, (quick, quick), partial(interrupted, 0, signal.SIGSTOP))


def test_a_frozen_donor_is_named_at_the_deadline() -> None:
    donor, joiner = run_ranks(2, frozen)
    assert donor.died and joiner.kind == "DeadlineError" and 1 <= joiner.seconds < 3
    assert "gen:5 waiting for relay:1 to send" in str(joiner.error) and "nothing within 1 s" in str(joiner.error)


def alone(rank: int, address: str) -> Any:
    quick = replace(OPTIONS, timeout_s=1.0)
    return None if rank == 0 else one_end(rank, address, None, (quick, quick))


def test_a_donor_that_does_not_come_is_named_at_the_deadline() -> None:
    _, joiner = run_ranks(2, alone)
    assert joiner.kind == "DeadlineError" and joiner.seconds < 4
    assert "gen:5 waiting for gen:1 to send its word for a copy" in str(joiner.error)


def ended(rank: int, address: str) -> Any:
    if rank == 1:
        return one_end(rank, address)
    view(address, "gen:1")
    time.sleep(0.5)
    return os.kill(os.getpid(), signal.SIGKILL)


def test_a_donor_that_dies_before_it_begins_is_noticed_whatever_the_deadline() -> None:
    _, joiner = run_ranks(2, ended)
    assert joiner.kind == "PeerLostError" and joiner.seconds < 4
    assert "waiting for gen:1 to send its word for a copy of its weights: its process has ended" in str(joiner.error)


def test_damaged_bytes_are_found_and_both_ends_say_so() -> None:
    donor, joiner = run_ranks(2, one_end, None, (OPTIONS, OPTIONS), partial(connect_by, NoisyWire, 0))
    assert joiner.kind == "ChecksumError" and "arrived damaged: CRC-32" in str(joiner.error)
    assert donor.kind == "SessionError" and "gen:5: ChecksumError" in str(donor.error)


def written_meanwhile(rank: int, address: str) -> Any:
    tensors: list[Tensors] = []
    if rank == 0:
        Interrupted.interrupt = lambda: tensors[0]["nans"].zero_()  # type: ignore[assignment, method-assign]
    return one_end(rank, address, (tensors.append, keep), prepare=partial(connect_by, Interrupted, 0))


def test_a_tensor_that_is_written_while_it_is_read_is_found() -> None:
    donor, joiner = run_ranks(2, written_meanwhile)
    assert (donor.kind, joiner.kind) == ("TornWeightsError", "SessionError")
    said = "gen:1: nans was written while it was copied, so gen:5 holds a mixture"
    assert said in str(donor.error) and f"TornWeightsError: {said}" in str(joiner.error)


def garbled(rank: int, address: str) -> Any:
    if rank == 1:
        return one_end(rank, address)
    view(address, "gen:1").set("copy/word/gen:1", "[1")
    time.sleep(0.5)  # else its seat is gone
    return None


def test_what_no_donor_wrote_is_refused() -> None:
    joiner = run_ranks(2, garbled)[1]
    assert joiner.kind == "SessionError" and "which gen:1 wrote, is malformed" in str(joiner.error)


def on_threads(rank: int, address: str) -> list[dict[str, bytes]]:
    """The donor serves two joiners at the same time, each on a thread of its own, over one connection to the store."""
    if rank:
        tensors, name = weights(rank), f"gen:{rank}"
        take(view(address, name, name), name, "gen:0", tensors, OPTIONS)
        return [bytes_of(tensors)]
    store = connect_store(address, OPTIONS)
    store.take_seat("gen:0", {})
    held = weights(0)

    def serve(joiner: int) -> None:
        offer(store.under(f"copies/gen:{joiner}"), "gen:0", f"gen:{joiner}", held, OPTIONS, version=1)

    threads = [threading.Thread(target=serve, args=(joiner,)) for joiner in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [bytes_of(held)]


def test_one_donor_serves_two_joiners_at_once() -> None:
    held = values(run_ranks(3, on_threads))
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize(
    ("own", "peer"), [("gen:1", "gen:1"), ("train:0", "gen:1"), ("gen:1", "gen:01"), ("", "gen:1")]
)
def test_a_copy_is_between_two_ranks_of_the_engine(own: str, peer: str) -> None:
    with pytest.raises(ValueError, match="a copy is between two ranks of the engine"):
        take(None, own, peer, {}, OPTIONS)  # type: ignore[arg-type]


def test_views_share_memory_with_their_tensors() -> None:
    tensors = weights(0)
    listed, views = list_tensors("gen:0", tensors)
    assert [each.name for each in listed] == sorted(tensors) and {*tensors} - {*views} == {"lm_head.weight", "none"}
    for view in views.values():
        view.zero_()
    assert not any(tensor.to(torch.float32).count_nonzero() for tensor in tensors.values())
    with pytest.raises(BindError, match="expanded: strides"):
        list_tensors("gen:0", {"expanded": torch.zeros(1).expand(4)})
    with pytest.raises(BindError, match="without bytes"):
        list_tensors("gen:0", {"meta": torch.zeros(1, device="meta")})


def on_one_gpu(rank: int, address: str, transport: str) -> tuple[CopyReport, dict[str, bytes]]:
    """As `one_end`, with all tensors on GPU 0."""
    torch.cuda.set_device(0)
    store = view(address, "gen:5" if rank else "gen:1")
    tensors = {name: tensor.cuda() for name, tensor in weights(seed=rank).items() if name != "lm_head.weight"}
    tensors["lm_head.weight"] = tensors["embed.weight"]  # tied
    options = replace(OPTIONS, transport=transport, timeout_s=60.0)
    if rank == 0:
        report = offer(store, "gen:1", "gen:5", tensors, options, version=7)
    else:
        report = take(store, "gen:5", "gen:1", tensors, options)
    torch.cuda.synchronize()
    return report, bytes_of({name: tensor.cpu() for name, tensor in tensors.items()})


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("transport", ["direct", "auto"])
def test_every_byte_of_every_tensor_arrives_on_a_gpu(transport: str) -> None:
    (gave, held), (took, filled) = values(run_ranks(2, on_one_gpu, transport, timeout_s=120.0, method="spawn"))
    assert filled == held == bytes_of(weights(0)) != bytes_of(weights(1))
    assert (took.version, took.nbytes, took.transport) == (7, gave.nbytes, "direct")
