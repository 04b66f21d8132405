"""Ranks of both sides on one GPU, on several hosts, over nccl: no GPU is twice in a communicator, and nothing deadlocks."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import permutations

import numpy as np
import pytest
import synthetic
from helpers.nccl_devices import Device
from helpers.nccl_devices import run_in_any_order as run_devices
from helpers.nccl_parts import joined_parts, share
from helpers.plans import Case

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.memory import session_memory
from mcore_reshard.kernels.transports.mixed import _shared_gpus
from mcore_reshard.kernels.transports.nccl.buffers import ALONE_BYTES, POOL_BYTES
from mcore_reshard.kernels.transports.nccl.shared_gpus import SharedGpus, codes, most_ctas
from mcore_reshard.kernels.transports.nccl.staging import Round, ScratchBudget, divide, slot_bytes
from mcore_reshard.kernels.transports.peer_access import RankPair, Reach
from mcore_reshard.kernels.transports.reach import shared_gpus
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.simulate.script import script_of


def shared(hosts: int, gpus: int = 1) -> str:
    """`--hosts` of so many hosts on whose GPUs there is a rank of each side."""
    named = "+".join(f"{chr(ord('a') + host)}*{gpus}" for host in range(hosts))
    return f"train={named},gen={named}"


FP8 = {"dtypes": ("bf16", "fp8"), "block": (8, 16)}
ONE = "h200-8,gpus=1"
TWO_HOSTS = [
    Case("tiny-qwen3-moe", "tp=2,ep=2,pp=2", "tp=2,dp=2", machine="h200-8,gpus=2", hosts=shared(2, 2)),
    Case("tiny-llama", "pp=2", "dp=2", machine=ONE, hosts=shared(2)),
    Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", machine=ONE, hosts=shared(2), **FP8),  # type: ignore[arg-type]
]
MORE_HOSTS = [
    Case("tiny-llama", "pp=3,layers=1+2+1", "dp=3", machine=ONE, hosts=shared(3)),  # replicas pass on
    Case("tiny-qwen3-moe", "tp=4", "dp=4", machine=ONE, hosts=shared(4)),
    Case("tiny-qwen3-moe", "tp=2,pp=2", "tp=2,dp=2", machine=ONE, hosts=shared(4), **FP8),  # type: ignore[arg-type]
    Case("tiny-llama", "pp=2", "dp=5", machine=ONE, hosts="train=a*1+b*1,gen=a*1+b*1+c*1+d*1+e*1"),
    Case("tiny-llama", "pp=5,layers=1+1+1+1+0", "dp=5", machine=ONE, hosts=shared(5)),
    Case("tiny-llama", "tp=2,pp=2", "tp=2,dp=2", machine="h200-8,gpus=2", hosts="train=a*2+b*1+c*1,gen=a*1+b*2+c*1"),
]  # fmt: skip
_LONG = {"dp=5"}  # left to the nightly tests
CASES = [
    pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case.gen in _LONG))
    for case in [*TWO_HOSTS, *MORE_HOSTS]
]

BUDGET = ScratchBudget(192 << 10)

# Ranks of both sides share a host at most. The digests are of their rounds without any communicators of shared GPUs.
APART = [
    (Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=3", machine="h200-8,gpus=2"), "5085fbc04ce92bad"),
    (Case("tiny-qwen3-moe", "tp=1", "dp=3", machine="h200-8,gpus=2", hosts="train=a*1,gen=a*1@1+b*1+c*1"),
     "0cca2d17da13d6af"),
    (Case("tiny-llama", "tp=2,pp=2", "tp=2,dp=2", machine="h200-8,gpus=4", hosts="train=a*2+b*2,gen=a*2@2+b*2@2"),
     "abd5e6330f5a7707"),
    (Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", machine="h200-8,gpus=2", **FP8), "3f4994ba18fcd0d8"),  # type: ignore[arg-type]
]  # fmt: skip


def colocated(hosts: int, *, passes_on: bool = True) -> SharedGpus:
    """A GPU on each of so many hosts, with a rank of each side."""
    at = [*range(hosts), *range(hosts)]
    return SharedGpus.of(at, at, [0] * 2 * hosts, hosts, passes_on=passes_on)


# --- by hand -------------------------------------------------------------------------------------------------------


def test_four_hosts_have_the_communicators_of_the_docstring() -> None:
    assert [np.flatnonzero(each).tolist() for each in codes(4)] == [[0, 2], [1, 2], [0, 3], [1, 3]]
    four = colocated(4)  # ranks 0 to 3 train, on a to d; 4 to 7 are the engine's
    assert four.communicators(range(8)) == {
        0: (0, 2, 5, 7), 1: (1, 3, 4, 6), 2: (0, 1, 6, 7), 3: (2, 3, 4, 5), 4: (4, 5, 6, 7),
    }  # fmt: skip
    a_to_b, b_to_a, a_to_d = (0, 5), (1, 4), (0, 7)
    turns = np.arange(40)
    assert [{*four.communicator_of(*pair, turns).tolist()} for pair in (a_to_b, b_to_a, a_to_d)] == [{0}, {1}, {0, 2}]
    assert {*four.communicator_of(5, 6, turns).tolist()} == {4}


def test_two_hosts_have_one_communicator_in_each_direction() -> None:
    two = colocated(2, passes_on=False)
    assert two.communicators(range(4)) == {0: (0, 3), 1: (1, 2)}
    assert two.communicators([0, 3]) == {0: (0, 3)}  # of b nobody exchanges anything with a's engine
    with pytest.raises(ValueError, match="two ranks of one host have no communicator in common"):
        two.communicator_of(0, 2, 0)


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 6, 7, 20, 21, 70, 71, 128])
def test_each_pair_of_hosts_has_a_communicator_in_both_directions_and_no_gpu_is_in_one_twice(hosts: int) -> None:
    everything = colocated(hosts)
    communicators = everything.communicators(range(2 * hosts))
    for members in communicators.values():
        assert len({rank % hosts for rank in members}) == len(members)
    src, dst = np.array([*permutations(range(hosts), 2)]).T
    for turn in range(0, 24, 8):  # of ranks that meet every eighth
        found = everything.communicator_of(src, hosts + dst, turn).tolist()
        for *pair, number in zip(src.tolist(), (hosts + dst).tolist(), found, strict=True):
            assert {*pair} <= {*communicators[number]}
        found = everything.communicator_of(hosts + src, hosts + dst, turn)
        assert {*found.tolist()} == {max(communicators)}
    trainers = codes(hosts).sum(axis=0)
    assert trainers.min() >= hosts // 3  # about half of the hosts have each digit
    assert codes(hosts).shape == (hosts, 2 * max(1, int(np.ceil(np.log2(hosts)))))


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_pairs_take_all_communicators_that_they_have_about_equally_often(stride: int) -> None:
    found = colocated(4).communicator_of(0, 7, stride * np.arange(64))  # from a to d: 0 and 2
    counts = np.bincount(found)
    assert counts[[0, 2]].min() > 24 and counts.sum() == counts[[0, 2]].sum()


def test_they_are_needed_where_members_of_both_sides_share_a_gpu() -> None:
    beside = SharedGpus.of("aabb", [0, 1, 1, 2], [0, 1, 1, 2], 2, passes_on=False)
    assert beside.is_needed(range(4)) and beside.is_needed([1, 2])
    assert not beside.is_needed([0, 2, 3]) and not beside.is_needed([0, 1, 3])
    same_side = SharedGpus.of("aabb", [0, 0, 1, 1], [0, 0, 1, 1], 2, passes_on=False)
    assert not same_side.is_needed(range(4))  # NCCL says so itself
    apart = divide(ScratchBudget(), [1, 1, 1, 1])
    assert apart == divide(ScratchBudget(), [1, 1, 1, 1], shared=same_side) and apart.shared is None
    assert divide(ScratchBudget(), [1, 1, 1, 1], shared=beside) == replace(apart, shared=beside)


def test_ranks_beside_those_that_send_are_members_on_rails_that_are_reached() -> None:
    """Trainers on GPUs 0 and 1 of host a, engine ranks on its GPUs 2 and 3; those of host b are the ones that get bytes."""
    rails = [0, 1, 2, 3, 0, 3]
    at = SharedGpus.of("aaaabb", range(6), rails, 2, passes_on=False)
    assert at.members([0, 1, 4, 5]) == (0, 1, 3, 4, 5)
    assert at.members([0, 1, 4]) == (0, 1, 4)
    assert at.members([2, 3, 4, 5]) == (2, 3, 4, 5)  # nobody sends from a
    without = SharedGpus.of("aaaabb", range(6), [0, 1, 2, -1, 0, 3], 2, passes_on=False)
    assert without.members([0, 1, 4, 5]) == (0, 1, 4, 5)  # gen:1 has no GPU
    apart = SharedGpus.of(range(6), range(6), rails, 2, passes_on=False)  # each GPU counts as a host
    assert apart.members([0, 1, 4, 5]) == (0, 1, 4, 5)


def test_where_gpus_are_shared_training_ranks_of_hosts_that_send_are_members() -> None:
    """A communicator has one side of a host: an engine rank on GPU 1 of host a would not do for what leaves by its NIC."""
    at = SharedGpus.of("aabb" * 2, [*range(4)] * 2, [0, 1] * 4, 4, passes_on=False)
    assert at.members([0, 2, 4, 6]) == (0, 2, 4, 6)  # only GPUs 0 get bytes
    assert at.members([0, 2, 4, 5, 6, 7]) == (0, 1, 2, 3, 4, 5, 6, 7)


def test_each_digit_has_a_stream_and_so_have_replicas() -> None:
    """One digit has as many streams as sessions without shared GPUs have. A rank is in one communicator of each stream."""
    for hosts, passes_on, streams in (
        (2, False, 2),
        (2, True, 3),
        (4, False, 2),
        (8, False, 3),
        (8, True, 4),
        (128, False, 7),
    ):
        everything = colocated(hosts, passes_on=passes_on)
        assert everything.streams(2) == streams
        communicators = everything.communicators(range(2 * hosts))
        of_stream: dict[int, list[int]] = {}
        for number in communicators:
            for stream in everything.streams_of(number, 2):
                of_stream.setdefault(stream, []).append(number)
        assert sorted(of_stream) == [*range(streams)]
        for rank in range(2 * hosts):
            assert all(sum(rank in communicators[n] for n in numbers) <= 1 for numbers in of_stream.values())
        found = everything.stream_of(np.array([*communicators]), 1, 2).tolist()
        assert all(stream in everything.streams_of(n, 2) for n, stream in zip(communicators, found, strict=True))
    assert [most_ctas(streams) for streams in (1, 2, 3, 4, 5, 7, 9)] == [None, None, 16, 16, 8, 8, 4]


def test_cells_are_hosts_unless_nccl_is_needed_within_one() -> None:
    at = Reach({}, ("a", "a", "b", "a", "a", "b"), ("0", "1", "0", "0", "1", "0"), (0, 1, 0, 0, 1, 0), None)
    rails = (0, 1, 0, 0, 1, 0)  # three ranks of each side
    between, within, on_one_gpu = ([RankPair(0, gen, 0)] for gen in (2, 1, 0))
    of_hosts = _shared_gpus(at, between, 3, joins=True)
    of_gpus = _shared_gpus(at, between + within, 3, joins=False)
    assert of_hosts == SharedGpus((0, 0, 1, 0, 0, 1), (0, 1, 2, 0, 1, 2), rails, 3, True)
    assert of_gpus == SharedGpus((0, 1, 2, 0, 1, 2), (0, 1, 2, 0, 1, 2), rails, 3, False)
    assert _shared_gpus(at, between + on_one_gpu, 3, joins=False) is None  # as if nobody knew: NCCL may refuse
    assert _shared_gpus(at, [*between, RankPair(0, 1, 1)], 3, joins=True) == of_hosts  # replicas have their own


# --- where no GPU is shared ----------------------------------------------------------------------------------------


def recorded(case: Case) -> str:
    """A digest of a plan, of the rounds of all ranks over auto and nccl, and of their memory but that of NCCL itself."""
    plan, options = case.plan(), Options(scratch_bytes=64 << 10, bucket_bytes=1 << 10)
    assert plan.topology is not None
    found = sha256(plan.digest.encode())
    for transport in ("auto", "nccl"):
        script = script_of(plan, plan.topology, transport, options)
        places = script.src_round, script.dst_round, script.round_rank, script.first_round
        for column in (*places, script.buckets.nbytes):
            found.update(column.astype(np.int64).tobytes())
        memory = session_memory(plan, options, transports=(transport,)).transports[transport]
        found.update(repr([[rank.total - rank.nccl for rank in memory[world]] for world in ("train", "gen")]).encode())  # type: ignore[index]
    return found.hexdigest()[:16]


@pytest.mark.parametrize(("case", "digest"), APART, ids=lambda value: str(value)[:60])
def test_everything_stays_where_no_gpu_has_ranks_of_both_sides(case: Case, digest: str) -> None:
    assert recorded(case) == digest


@pytest.mark.parametrize("case", [case for case, _ in APART[1:]], ids=str)
def test_rounds_are_the_same_with_and_without_places_where_no_gpu_is_shared(case: Case) -> None:
    budget = BUDGET
    with_places, without = (joined_parts(case, budget, shares=shares) for shares in (True, False))
    assert with_places[1] == without[1] and [*with_places[1]] == [0]
    for part, other in zip(with_places[0], without[0], strict=True):
        assert [*part] == [*other]
        for rank in part:
            assert places_of(part[rank].found) == places_of(other[rank].found)


def places_of(rounds: tuple[Round, ...]) -> list[tuple[object, ...]]:
    return [
        (*(each.window, each.stream, each.communicator, each.slot, each.after), *(
            (placed.end, placed.member, placed.message_bytes, placed.tensor, placed.offset)
            for placed in each.placed_messages
        )) for each in rounds
    ]  # fmt: skip


# --- where GPUs are shared -----------------------------------------------------------------------------------------


def gpus_of(plan: Plan) -> list[int]:
    assert plan.topology is not None
    return [*plan.topology.gpus("train").tolist(), *plan.topology.gpus("gen").tolist()]


def check_rounds(parts: list[dict[int, Device]], budget: ScratchBudget) -> None:
    """Rounds are in the order of all ranks, and their slots fit into scratch."""
    for device in (device for part in parts for device in part.values()):
        order = [(each.window, each.stream, each.communicator) for each in device.found]
        assert order == sorted({*order})
        assert sum(slot_bytes(device.found).values()) <= budget.scratch_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget", [BUDGET, ScratchBudget(300_000, 3, 2)], ids=["2 streams", "3 streams"])
@pytest.mark.parametrize("case", CASES)
def test_no_order_of_kernels_deadlocks_where_gpus_are_shared(case: Case, budget: ScratchBudget) -> None:
    plan = case.plan()
    parts, communicators, tensors = joined_parts(case, budget)
    gpus = gpus_of(plan)
    for members in communicators.values():
        assert len({gpus[rank] for rank in members}) == len(members) > 1  # NCCL refuses others
    check_rounds(parts, budget)
    used = {each.communicator for part in parts for device in part.values() for each in device.found}
    assert used <= {*communicators} and len(used) > 1
    run_devices(parts, communicators, np.random.default_rng(budget.streams))
    share(plan, tensors)
    wrong = [
        synthetic.wrong_elements(plan, "gen", rank, tensors[plan.train.world + rank]) for rank in range(plan.gen.world)
    ]
    assert wrong == [{}] * plan.gen.world


def test_memory_counts_every_communicator_and_the_slots_of_all_rounds() -> None:
    case = MORE_HOSTS[1]  # four hosts: each rank is in a communicator of both streams, and has a peer on three hosts
    plan = case.plan()
    parts, _, _ = joined_parts(case, BUDGET)
    options = Options(scratch_bytes=BUDGET.scratch_bytes)
    counted = session_memory(plan, options, transports=("auto",)).transports["auto"]
    for rank in range(4):
        # Of 4 ranks each; one rank of a side is on each host.
        assert counted["train"][rank].nccl == 2 * (ALONE_BYTES + 32 * (POOL_BYTES + 4 * 640))
        assert counted["gen"][rank].nccl == counted["train"][rank].nccl
    held = [sum(slot_bytes(parts[0][rank].found).values()) for rank in range(8)]
    assert [rank.scratch for world in ("train", "gen") for rank in counted[world]] == held  # type: ignore[index]


def test_memory_counts_the_communicator_of_replicas() -> None:
    plan = MORE_HOSTS[0].plan()  # three hosts whose replicas pass on, so that they send as well
    shared = shared_gpus(plan, plan.topology, "auto")  # type: ignore[arg-type]
    division = divide(ScratchBudget(), [1] * 6, hops=("relay",), shared=shared)
    joined = [
        sum(
            len(division.streams_with(number))
            for number, members in division.communicators().items()
            if rank in members
        )
        for rank in range(6)
    ]
    counted = session_memory(plan, transports=("auto",)).transports["auto"]
    nccl = [rank.nccl for world in ("train", "gen") for rank in counted[world]]  # type: ignore[index]
    pools = [1, 1, 1, 3, 3, 3]  # of 64 MiB
    found = [(each - of_rank * 32 * POOL_BYTES) // ALONE_BYTES for each, of_rank in zip(nccl, pools, strict=True)]
    assert joined == found == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("case", CASES)
def test_one_communicator_would_have_a_gpu_twice(case: Case) -> None:
    """What NCCL refused before: the checks above can fail."""
    _, communicators, _ = joined_parts(case, BUDGET, shares=False)
    gpus = [gpus_of(case.plan())[rank] for rank in communicators[0]]
    assert [*communicators] == [0] and len({*gpus}) < len(gpus)


def in_order(device: Device, budget: ScratchBudget, sign: int) -> None:
    """Make a rank take its rounds by window, ascending or descending."""
    order = sorted(range(len(device.found)), key=lambda n: (sign * device.found[n].window, device.found[n].stream))
    rounds: list[Round] = []
    of_stream: dict[int, list[int]] = {}
    for each in (device.found[number] for number in order):
        earlier = of_stream.setdefault(each.stream, [])
        after = earlier[-budget.slots] if len(earlier) >= budget.slots else None
        rounds.append(replace(each, slot=len(earlier) % budget.slots, after=after))
        earlier.append(len(rounds) - 1)
    device.found = tuple(rounds)
    device.slots = {place: np.full(nbytes, 0xEE, np.uint8) for place, nbytes in slot_bytes(device.found).items()}


def test_a_rank_that_takes_windows_in_another_order_deadlocks() -> None:
    """The check above fails for it, and not for ranks that all take them in the same other order."""
    case, reordered = MORE_HOSTS[3], 5  # gen:3
    for ranks in ([reordered], range(7)):
        parts, communicators, _ = joined_parts(case, BUDGET)
        for part in parts:
            for rank in ranks:
                in_order(part[rank], BUDGET, -1)
        if len(ranks) > 1:
            run_devices(parts, communicators, np.random.default_rng(0))
        else:
            with pytest.raises(AssertionError, match="deadlock"):
                run_devices(parts, communicators, np.random.default_rng(0))
