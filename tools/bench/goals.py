"""The goals of a refit, and whether a run reached them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .results import Row

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    figure: str
    goal: str
    measured: str
    reached: bool | None  # None: not measured in this run


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every goal, against the rows of one run."""
    return [_verdict(rows, *goal) for goal in _GOALS]


Judge = Callable[[list[Row]], tuple[str, bool]]


def _verdict(rows: Sequence[Row], figure: str, goal: str, wanted: Sequence[tuple[str, str]], judge: Judge) -> Verdict:
    measured = {(row["workload"], row["method"]): row for row in rows if "skipped" not in row}
    if any(key not in measured for key in wanted):
        return Verdict(figure, goal, "not measured in this run", None)
    said, reached = judge([measured[key] for key in wanted])
    return Verdict(figure, goal, said, reached)


def _share(least: float) -> Judge:
    def judge(rows: list[Row]) -> tuple[str, bool]:
        return f"{rows[0]['share']:.3f}", rows[0]["share"] >= least

    return judge


def _direct(rows: list[Row]) -> tuple[str, bool]:
    row = rows[0]
    said = f"{row['share']:.3f}; {row['scratch_mb']:.0f} MB of scratch, {row['table_mb']:.0f} MB of tables"
    return said, row["share"] >= 0.94 and row["scratch_mb"] == 0


def _ratio(rows: list[Row]) -> tuple[str, bool]:
    ratio = rows[1]["ms"] / rows[0]["ms"]
    return f"{ratio:.2f} x", ratio >= 1.75


def _at_most(most: float) -> Judge:
    def judge(rows: list[Row]) -> tuple[str, bool]:
        ratio = rows[0]["ms"] / rows[1]["ms"]
        return f"{ratio:.3f} x", ratio <= most

    return judge


def _nccl(rows: list[Row]) -> tuple[str, bool]:
    row = rows[0]
    scratch_mib = round(row["scratch_mb"] * 1e6 / _MIB)
    said = f"{row['gb_per_s_per_receiver']:.0f} GB/s, {row['share']:.3f}, {scratch_mib} MiB"
    return said, row["gb_per_s_per_receiver"] >= 300 and row["share"] >= 0.85 and scratch_mib <= 512


def _first(rows: list[Row]) -> tuple[str, bool]:
    ratios = [row["first_ms"] / row["ms"] for row in rows]
    return ", ".join(f"{ratio:.2f} x" for ratio in ratios), max(ratios) <= 1.2


def _prepare(rows: list[Row]) -> tuple[str, bool]:
    return f"{rows[0]['prepare_s']:.2f} s", rows[0]["prepare_s"] < 3


def _checksums(rows: list[Row]) -> tuple[str, bool]:
    cost = rows[1]["ms"] / rows[0]["ms"] - 1
    return f"{cost:.1%}", cost <= 0.05


def _host(least: float) -> Judge:
    def judge(rows: list[Row]) -> tuple[str, bool]:
        row = rows[0]
        return f"{row['host_cpu_ms']:.1f} ms ({row['host_thread_ms']:.1f} in the caller)", row["host_cpu_ms"] < least

    return judge


def _nccl_memory(rows: list[Row]) -> tuple[str, bool]:
    """What the method takes beside weights, slots and tables: with what CUDA sets up."""
    all_mb = rows[0]["extra_memory_mb"]
    own_mb = all_mb - rows[0]["scratch_mb"] - rows[0].get("table_mb", 0)
    return f"{own_mb:,.0f} MB; {all_mb:,.0f} MB with slots and tables", own_mb <= 1000


def mutual_reads(row: Row, links: Sequence[Row], on: str = "") -> Verdict:
    """Colocated ranks of which each has half of its bytes on another GPU, against the links that GPUs read by mutually.

    `row` is of two ranks of both sides on two GPUs, `links` the rows of tools/bench_links.py. `on` is where these were
    measured, if not where `row` was.
    """
    best = _best(links, "two read each other")
    share = row["gb_per_receiver"] / 2 / row["ms"] * 1e3 / best
    figure, goal = "direct, colocated, half of the bytes on the own GPU", ">= 0.95 of the best way of mutual reads"
    return Verdict(figure, goal, _of_limit(share, best, on), share >= 0.95)


def one_to_three(row: Row, links: Sequence[Row], on: str = "") -> Verdict:
    """Three replicas and their trainer, against GPUs that read each other and a fourth. Arguments as in `mutual_reads`."""
    best = _best(links, "three read each other and a fourth")
    share = row["gb_per_s_per_receiver"] / best
    figure, goal = f"{row['method']}, one trainer, three replicas", ">= 0.95 of GPUs that read each other and a fourth"
    return Verdict(figure, goal, _of_limit(share, best, on), share >= 0.95)


def _of_limit(share: float, best: float, on: str) -> str:
    """The share that a refit reached, and where its limit was measured if that was elsewhere."""
    return f"{share:.3f} of {best:.0f} GB/s" + (f", measured on {on}" if on else "")


def _best(links: Sequence[Row], pattern: str) -> int:
    """GB/s of the best way by which GPUs read in a pattern."""
    (link,) = (each for each in links if each["pattern"] == pattern)
    rates = [link[way] for way in ("copy_engine", "engine_push", "pull", "pull_by_tile", "push_by_tile") if way in link]
    return max([*rates, *link.get("pull_and_push", {}).values()])


def live_session(row: Row, copy_engine: Row, on: str) -> Verdict:
    """`row`: a whole model into a live engine, of tools/bench_live.py. `on`: where and when the limit was measured."""
    best = copy_engine["gb_per_s_per_receiver"]
    share = row["bytes"] / row["ms"] / 1e6 / best
    figure = f"a whole session, {row['transport']}, whole MoE, into a live vLLM"
    return Verdict(figure, ">= 0.93 of the copy engine", _of_limit(share, best, on), share >= 0.93)


def prepares(data: Row) -> list[Verdict]:
    """Of each session of tools/bench_prepare.py, its slowest connect and all measured traces from a full cache together."""
    warm_s = sum(trace.get("warm_s", 0.0) for trace in data["traces"].values())
    goal = data["goal_s"]
    verdicts = []
    for session in data["sessions"]:
        slowest_s = max(connect["connect_s"] for connect in session["connects"]) + warm_s
        figure = f"prepare, share of a DeepSeek-V3 rank, {session['ranks']}"
        verdicts.append(Verdict(figure, f"<= {goal:g} s, trace cache warm", f"{slowest_s:.2f} s", slowest_s <= goal))
    return verdicts


def one_gpu(rows: Sequence[Row]) -> Verdict:
    """Both sides on one GPU: `rows` of a run of bench_refit there."""
    return _verdict(rows, "direct, one GPU", ">= 0.9 of the copy engine", ((_MOE, "direct"),), _share(0.9))


_MOE = "moe-ep-tp"
_GOALS: tuple[tuple[str, str, tuple[tuple[str, str], ...], Judge], ...] = (
    ("direct, whole MoE", ">= 0.94 of the copy engine, no scratch", ((_MOE, "direct"),), _direct),
    ("direct with 32 CTAs", ">= 0.88 of the copy engine", ((_MOE, "direct:ctas=32"),), _share(0.88)),
    (
        "direct with checksums",
        "costs <= 5%",
        ((_MOE, "direct"), (_MOE, "direct:checksums=1")),
        _checksums,
    ),
    (
        "direct against NeMo-RL's point to point, experts",
        ">= 1.75 x faster",
        (("moe-experts", "direct"), ("moe-experts", "nemo-rl")),
        _ratio,
    ),
    ("nccl, whole MoE", ">= 300 GB/s, >= 0.85 of NCCL alone, <= 512 MiB", ((_MOE, "nccl"),), _nccl),
    ("first refit after prepare, direct, nccl", "<= 1.2 x a later one", ((_MOE, "direct"), (_MOE, "nccl")), _first),
    ("a session's prepare, planning included", "< 3 s", ((_MOE, "session:transport=direct"),), _prepare),
    (
        "a whole session, direct, whole MoE",
        ">= 0.93 of the copy engine",
        ((_MOE, "session:transport=direct"),),
        _share(0.93),
    ),
    ("NCCL's own memory, whole MoE", "<= 1,000 MB", ((_MOE, "nccl"),), _nccl_memory),
    (
        "NCCL's own memory, one trainer, three replicas",
        "<= 1,000 MB",
        (("moe-one-to-many", "nccl"),),
        _nccl_memory,
    ),
    ("direct, two replicas", ">= 0.85 of the copy engine", (("moe-replicas", "direct"),), _share(0.85)),
    ("direct, FP8 to FP8", ">= 0.9 of the copy engine", (("moe-fp8", "direct"),), _share(0.9)),
    (
        "direct, BF16 to FP8 on the way",
        "<= 0.52 x the time of BF16 to BF16",
        (("moe-bf16-fp8", "direct"), (_MOE, "direct")),
        _at_most(0.52),
    ),
    (
        "nccl, BF16 to FP8 on the way",
        "<= 0.65 x the time of BF16 to BF16",
        (("moe-bf16-fp8", "nccl"), (_MOE, "nccl")),
        _at_most(0.65),
    ),
    ("host CPU of a refit, direct", "< 2 ms", ((_MOE, "direct"),), _host(2)),
    ("host CPU of a refit, nccl", "< 10 ms", ((_MOE, "nccl"),), _host(10)),
)
