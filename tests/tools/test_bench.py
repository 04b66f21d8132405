"""The benchmark of refits: what it reads, what it computes, and that it neither passes wrong bytes nor waits for ever."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import bench_links
import bench_refit
import pytest
import torch
from bench import machine, ours
from bench.goals import live_session, mutual_reads, one_gpu, one_to_three, prepares, verdicts
from bench.methods import Method, Prepared, parse_method
from bench.ranks import Launch
from bench.results import ResultFile, row_of, skipped, with_share
from bench.workloads import WORKLOADS, Case, case_of
from pages import tables

ON_CPU = ["--device", "cpu", "--ranks", "4", "--moe", "tiny-qwen3-moe", "--dense", "tiny-qwen3", "--repeats", "2"]


def workload(name: str) -> Any:
    return next(workload for workload in WORKLOADS if workload.name == name)


def test_a_method_is_a_name_and_options() -> None:
    assert parse_method("direct") == Method("direct")
    parsed = parse_method("nccl:scratch_mib=256,checksums=1")
    assert parsed == Method("nccl", {"scratch_mib": "256", "checksums": "1"})
    assert parsed.text == "nccl:scratch_mib=256,checksums=1"


def test_everything_that_is_wrong_with_a_method_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"'b' is not an option of direct.*ctas = 'a' is not a number"):
        parse_method("direct:ctas=a,b=1")
    with pytest.raises(ValueError, match="write ctas=N"):
        parse_method("nccl:ctas")
    with pytest.raises(ValueError, match="unknown method 'teleport', known: copy-engine"):
        parse_method("teleport")


def test_methods_of_the_workloads_exist() -> None:
    for each in WORKLOADS:
        assert [parse_method(text).text for text in each.methods] == list(each.methods)


def test_workloads_are_laid_over_the_ranks() -> None:
    case = case_of(workload("moe-one-to-many"), 4)
    assert (case.train, case.gen, case.train_ranks, case.gen_ranks) == ("ep=1,dp=1", "tp=1,dp=3", 1, 3)
    case = case_of(workload("moe-ep-tp"), 8)
    assert (case.train, case.gen) == ("ep=4,dp=4", "tp=4")
    case = case_of(workload("moe-replicas"), 4, train_ranks=1)
    assert (case.train, case.gen) == ("ep=1,dp=1", "tp=1,dp=3")


def test_the_experts_alone_are_planned() -> None:
    plan = case_of(workload("moe-experts"), 4).plan()
    assert {group.name_pattern.split(".")[5:][1] for group in plan.groups} == {"gate_proj", "up_proj", "down_proj"}
    assert plan.bulk_bytes == 48 * 128 * 3 * 2048 * 768 * 2
    assert plan.misc_bytes == 0


def test_as_hosts_a_trainer_relays_between_hosts() -> None:
    run = bench_refit.parsed(["--device", "cpu", "--ranks", "4", "--as-hosts", "--workloads", "dense-one-to-many"])
    ((case, _),) = run.work
    assert (run.out.name, case.plan().later_hops, case.plan().waves) == ("hosts-x4.json", ("relay",), 32)


def test_one_run_holds_every_workload_that_its_ranks_allow() -> None:
    of_two, of_four = (
        [case.name for case, _ in bench_refit.parsed(["--device", "cpu", "--ranks", ranks]).work] for ranks in "24"
    )
    first, quantized = ["moe-ep-tp", "moe-experts", "dense-tp-tp", "dense-dp-tp"], ["moe-fp8", "moe-bf16-fp8"]
    assert of_two == [*first, *quantized]
    assert of_four == [*first, "moe-replicas", *quantized, "moe-one-to-many", "dense-one-to-many"]
    run = bench_refit.parsed([*ON_CPU, "--workloads", "dense-tp-tp", "--methods", "gloo", "golden", "isend-irecv"])
    assert [(case.name, [m.text for m in methods]) for case, methods in run.launches()] == [
        ("dense-tp-tp", ["gloo"]),
        ("dense-tp-tp", ["isend-irecv"]),
        ("dense-tp-tp", ["golden"]),
    ]


def test_a_wrong_command_line_is_refused_with_all_its_faults(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--device", "cpu", "--workloads", "moe", "--methods", "foo", "--train-gpus", "2", "--nemo-rl", "/nowhere"]
    wrong += ["--colocated"]
    with pytest.raises(SystemExit) as exit_:
        bench_refit.parsed([*wrong, "--ranks", "2"])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    for fault in (
        "unknown workload 'moe'",
        "unknown method 'foo'",
        "--train-gpus 2 leaves no rank",
        "no folder nemo_rl",
        "--colocated is of GPUs",
    ):
        assert fault in said


def told(start: float, ends: list[float], **changes: Any) -> dict[str, Any]:
    """The word of a rank about runs that all begin at 0, 10, 20... s."""
    word = {
        "spans": [[10 * n + start, 10 * n + end] for n, end in enumerate(ends)],
        "cpu_ms": [50.0, 1.0, 3.0, 2.0],
        "thread_ms": [40.0, 0.5, 0.5, 0.5],
        "prepare_s": 0.25,
        "nbytes": 0,
        "extra_bytes": 0,
        "allocated_bytes": 0,
        "wrong_elements": 0,
        "facts": {"scratch_mb": 0.0},
    }
    return {**word, **changes}


def test_a_row_counts_from_the_last_call_to_the_last_return() -> None:
    train = told(0.0, [0.9, 0.4, 0.2, 0.3])
    gen = told(0.1, [1.1, 0.5, 0.1, 0.4], nbytes=20 * 10**9, extra_bytes=7_000_000, facts={"scratch_mb": 5.0})
    row = row_of("w", "direct", [train, gen])
    assert row["first_ms"] == 1000.0
    assert (row["ms"], row["ms_min_max"], row["runs"]) == (300.0, [100.0, 400.0], 3)
    assert row["gb_per_s_per_receiver"] == 66.67
    assert (row["host_cpu_ms"], row["host_thread_ms"]) == (2.0, 0.5)
    assert (row["extra_memory_mb"], row["scratch_mb"], row["prepare_s"]) == (7.0, 5.0, 0.25)


def test_a_single_run_is_both_the_first_and_the_median() -> None:
    row = row_of("w", "golden", [told(0.0, [2.0], cpu_ms=[9.0], thread_ms=[9.0], nbytes=10**9)])
    assert (row["first_ms"], row["ms"], row["runs"], row["host_cpu_ms"]) == (2000.0, 2000.0, 1, 9.0)


def test_shares_are_of_the_limit_that_fits_the_method() -> None:
    limits = [measured("w", "copy-engine", 400), measured("w", "nccl-alone", 350), skipped("v", "copy-engine", "why")]
    assert with_share(measured("v", "direct:ctas=32", 380), limits) | {} == {
        **measured("v", "direct:ctas=32", 380), "share": 0.95, "share_of": "copy-engine",
    }  # fmt: skip
    assert with_share(measured("v", "nccl", 280), limits)["share"] == 0.8
    assert "share" not in with_share(measured("v", "nemo-rl", 200), limits)
    assert "share" not in with_share(measured("v", "direct", 200), limits[1:])


def measured(workload: str, method: str, gb_per_s: float, **changes: Any) -> dict[str, Any]:
    row = {
        "workload": workload, "method": method, "ms": 100.0, "first_ms": 110.0, "gb_per_s_per_receiver": gb_per_s,
        "prepare_s": 1.0, "host_cpu_ms": 1.5, "host_thread_ms": 1.0, "scratch_mb": 0.0, "table_mb": 11.0,
        "extra_memory_mb": 12.0,
    }  # fmt: skip
    return {**row, **changes}


def test_goals_are_judged_by_the_rows() -> None:
    rows = [
        measured("moe-ep-tp", "direct", 380, share=0.941),
        measured("moe-ep-tp", "direct:checksums=1", 380, share=0.9, ms=106.0),
        measured("moe-ep-tp", "nccl", 310, share=0.84, scratch_mb=536.0, first_ms=130.0, host_cpu_ms=12.0),
        measured("moe-experts", "direct", 380),
        measured("moe-experts", "nemo-rl", 200, ms=180.0),
    ]
    found = {verdict.figure: (verdict.measured, verdict.reached) for verdict in verdicts(rows)}
    assert found["direct, whole MoE"] == ("0.941; 0 MB of scratch, 11 MB of tables", True)
    assert found["direct with checksums"] == ("6.0%", False)
    assert found["nccl, whole MoE"] == ("310 GB/s, 0.840, 511 MiB", False)
    assert found["direct against NeMo-RL's point to point, experts"] == ("1.80 x", True)
    assert found["first refit after prepare, direct, nccl"] == ("1.10 x, 1.30 x", False)
    assert found["host CPU of a refit, nccl"] == ("12.0 ms (1.0 in the caller)", False)


def test_the_docs_show_rows_goals_and_what_was_not_measured(tmp_path: Path) -> None:
    data = {
        "hardware": "4 x GPU", "driver": "1.2", "date": "2026-01-02", "versions": {"torch": "2.11"},
        "environment": {"NCCL_NVLS_ENABLE": "0", "NCCL_VERSION": "2"},
        "workloads": {"w": {"what": "all", "model": "m", "train": "tp=2", "gen": "tp=2", "ranks": "2 -> 2"}},
        "rows": [
            measured("w", "copy-engine", 400), measured("w", "direct", 376, share=0.94, share_of="copy-engine"),
            skipped("w", "nemo-rl", "not given"),
        ],
    }  # fmt: skip
    (tmp_path / "refit-x4.json").write_text(json.dumps(data))
    section = tables.gpu_section(tmp_path)
    assert "4 x GPU, driver 1.2, torch 2.11, NCCL_NVLS_ENABLE=0, 2026-01-02" in section
    assert "([data](../tools/results/refit-x4.json)):" in section
    assert "|  |  | `direct` | 100.0 | 376 | 0.940 of copy-engine | 110 ms | 1.0 s | 12 MB | 1.5 ms |" in section
    assert "- `nemo-rl`, m: all: not given." in section
    assert "| direct, whole MoE | >= 0.94 of the copy engine, no scratch | not measured in this run |  |" in (
        tables.goals_section(tmp_path)
    )


def test_the_docs_show_what_ranks_that_share_gpus_reach(tmp_path: Path) -> None:
    assert tables.shared_section(tmp_path) == ""
    workload = {"what": "all", "model": "m", "train": "ep=2", "gen": "tp=2", "ranks": "2 -> 2"}
    data = {
        "hardware": "2 x GPU", "driver": "1.2", "date": "2026-01-02", "versions": {"torch": "2.11"},
        "environment": {}, "shared": "every GPU has a rank of both sides",
        "workloads": {"w": {**workload, "dtypes": "bf16 -> bf16"}, "v": {**workload, "dtypes": "bf16 -> fp8"}},
        "rows": [measured("w", "direct", 376), measured("v", "direct", 376, ms=52.25), skipped("v", "nccl", "why")],
    }  # fmt: skip
    (tmp_path / "refit-colocated-x2.json").write_text(json.dumps(data))
    data["environment"] = {"CUDA_MPS_PIPE_DIRECTORY": "/mps"}
    (tmp_path / "refit-colocated-mps-x2.json").write_text(json.dumps(data))
    section = tables.shared_section(tmp_path)
    assert "| ranks | processes on a GPU | method | BF16 -> BF16 | BF16 -> FP8 | data |" in section
    assert "| every GPU has a rank of both sides | in turns | `direct` | 100.0 ms | 52.2 ms | [data](" in section
    assert "| at the same time (MPS) | `nccl` |  |  | [data](" in section


def gpus_of(case: Case, gpus: int, *, colocated: bool) -> list[int]:
    launch = Launch(case, (), "cuda", gpus, colocated, 1, 1.0, Path(), Path(), None)
    return [launch.gpu_of(number) for number in range(launch.ranks)]


def test_ranks_share_gpus_side_by_side_or_colocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    apart, together = bench_refit.parsed(["--ranks", "4", "--device", "cuda"]), bench_refit.parsed(["--colocated"])
    assert (together.ranks, together.out.name) == (4, "refit-colocated-x2.json")
    case = case_of(workload("moe-ep-tp"), 4)
    assert gpus_of(case, apart.gpus, colocated=apart.colocated) == [0, 0, 1, 1]
    assert gpus_of(case, together.gpus, colocated=together.colocated) == [0, 1, 0, 1]
    one_trains = case_of(workload("moe-one-to-many"), 4)
    assert gpus_of(one_trains, 4, colocated=False) == [0, 1, 2, 3]
    assert gpus_of(one_trains, 2, colocated=True) == [0, 0, 1, 0]


def test_the_line_of_a_failure_that_says_most() -> None:
    failed = "process 2 failed:\nTraceback\n  File x\nValueError: no GPU\n\nprocess 1 was at:\n  File y"
    assert bench_refit.reason_of(failed, 9) == "ValueError: no GPU"
    hung = "process 1 ended with exit code 1 before it returned"
    assert bench_refit.reason_of(hung, 9) == f"no result within 9 s, or its process ended: {hung}"


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    asked = bench_refit.parsed([*ON_CPU, "--out", str(out), *arguments])
    results = ResultFile(out)
    results.start(bench_refit.header(asked))
    bench_refit.measure(asked, results)
    return results.rows()


def test_a_run_on_cpu_measures_what_it_can_and_says_what_it_cannot(tmp_path: Path) -> None:
    methods = ["copy-engine", "gloo", "session:transport=gloo", "isend-irecv", "golden"]
    rows = run(tmp_path / "refit.json", "--workloads", "moe-ep-tp", "--methods", *methods)
    assert [row["method"] for row in rows] == methods
    by_method = {row["method"]: row for row in rows}
    assert by_method["copy-engine"]["skipped"] == "there is no copy engine without a GPU"
    for method in methods[1:]:
        row = by_method[method]
        assert row["wrong_elements"] == 0 and row["ms"] > 0 and row["gb_per_receiver"] == 0.0002839
    written = json.loads((tmp_path / "refit.json").read_text())
    assert written["hardware"].startswith("4 processes on a ")
    assert written["workloads"]["moe-ep-tp"]["ranks"] == "2 -> 2"


def test_replicas_that_relay_are_compared_too(tmp_path: Path) -> None:
    rows = run(tmp_path / "refit.json", "--workloads", "moe-one-to-many", "--methods", "gloo", "isend-irecv")
    assert (rows[0]["relayed"], rows[0]["wrong_elements"], rows[0]["moved_by"]) == (True, 0, "gloo")
    assert rows[1]["skipped"] == "the plan has replicas relay, which this method does not do"


def test_wrong_bytes_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ours.gloo

    def damaging(rank: Any, options: Any) -> Prepared:
        prepared = whole(rank, options)
        overlap = prepared.run

        def run() -> None:
            overlap()
            if rank.number == 3:
                next(iter(rank.tensors.values())).reshape(-1).view(torch.int16)[5] ^= 1

        prepared.run = run
        return prepared

    monkeypatch.setattr(ours, "gloo", damaging)
    rows = run(tmp_path / "refit.json", "--workloads", "dense-tp-tp", "--methods", "gloo", "isend-irecv")
    assert rows[0]["skipped"].endswith("elements are wrong; by rank, training ranks first: [0, 0, 0, 1]")
    assert rows[1]["wrong_elements"] == 0


def test_a_method_that_hangs_costs_its_deadline_and_no_other_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hanging(rank: Any, options: Any) -> Prepared:
        return Prepared(lambda: time.sleep(600), lambda: None)

    monkeypatch.setattr(ours, "gloo", hanging)
    methods = ["gloo", "session:transport=gloo"]
    rows = run(tmp_path / "refit.json", "--workloads", "dense-tp-tp", "--timeout-s", "4", "--methods", *methods)
    assert rows[0]["skipped"].startswith("no result within 4 s")
    assert rows[1]["wrong_elements"] == 0


def test_what_is_late_is_not_started(tmp_path: Path) -> None:
    methods = ["gloo", "golden"]
    rows = run(tmp_path / "refit.json", "--workloads", "dense-tp-tp", "--methods", *methods, "--limit-s", "0.1")
    assert rows[0]["wrong_elements"] == 0
    assert rows[1] == skipped("dense-tp-tp", "golden", "not started within --limit-s 0.1")


def test_the_docs_say_which_rows_of_nccl_are_of_an_earlier_executor(tmp_path: Path) -> None:
    data = {
        "hardware": "2 x GPU", "date": "2026-11-22", "versions": {}, "environment": {}, "rows": [measured("w", "nccl", 300)],
        "workloads": {"w": {"what": "all", "model": "m", "train": "tp=1", "gen": "tp=1", "ranks": "1 -> 1"}},
    }  # fmt: skip
    for day, is_old in (("2026-11-22", True), ("2026-11-24", False)):
        (tmp_path / "refit-x2.json").write_text(json.dumps({**data, "date": day}))
        assert ("before the rounds of today" in tables.gpu_section(tmp_path)) == is_old


def test_goals_of_shared_gpus_are_judged_by_the_links() -> None:
    links = [{"pattern": "two read each other", "copy_engine": 197, "pull": 335, "push_by_tile": 360}]
    halves = measured("moe-ep-tp", "direct", 690, gb_per_receiver=69.0)
    verdict = mutual_reads(halves, links)
    assert (verdict.measured, verdict.reached) == ("0.958 of 360 GB/s", True)
    assert not mutual_reads({**halves, "ms": 110.0}, links).reached
    links = [{"pattern": "three read each other and a fourth", "copy_engine": 170, "pull": 338, "pull_by_tile": 330}]
    assert one_to_three(measured("moe-one-to-many", "nccl", 322), links).reached
    faster = [{**links[0], "pull_and_push": {"32 and 64 CTAs": 350}}]
    assert not one_to_three(measured("moe-one-to-many", "nccl", 322), faster).reached
    verdict = one_to_three(measured("moe-one-to-many", "direct", 300), links)
    assert (verdict.measured, verdict.reached) == ("0.888 of 338 GB/s", False)
    verdict = one_to_three(measured("moe-one-to-many", "direct", 300), links, "4 x OTHER")
    assert verdict.measured == "0.888 of 338 GB/s, measured on 4 x OTHER"
    assert one_gpu([measured("moe-ep-tp", "direct", 1900, share=0.91)]).reached
    assert one_gpu([measured("moe-ep-tp", "direct", 1900, share=0.89)]).reached is False


def test_goals_of_whole_sessions_are_judged_by_their_own_files() -> None:
    limit = measured("moe-ep-tp", "copy-engine", 400)
    row = {"transport": "direct", "bytes": 60 * 10**9, "ms": 160.0}
    verdict = live_session(row, limit, "2 x GPU, 2026-01-02")
    assert (verdict.measured, verdict.reached) == ("0.938 of 400 GB/s, measured on 2 x GPU, 2026-01-02", True)
    assert live_session({**row, "ms": 162.0}, limit, "").reached is False
    session = {"ranks": "1 -> 1", "connects": [{"connect_s": 2.5}, {"connect_s": 2.75}]}
    data = {"goal_s": 3.0, "sessions": [session], "traces": {"train": {"warm_s": 0.25}, "gen": {"not_measured": "why"}}}
    (verdict,) = prepares(data)
    assert (verdict.measured, verdict.reached) == ("3.00 s", True)
    assert prepares({**data, "goal_s": 2.9})[0].reached is False


def test_goals_say_what_a_run_did_not_measure_and_where_a_limit_was_measured(tmp_path: Path) -> None:
    workloads = {"moe-one-to-many": {"what": "all", "model": "m", "train": "dp=1", "gen": "dp=3", "ranks": "1 -> 3"}}
    replicas = measured("moe-one-to-many", "nccl", 360, share=0.9)
    data = {"hardware": "4 x GPU", "date": "2026-01-02", "workloads": workloads, "rows": [replicas]}
    (tmp_path / "refit-x4.json").write_text(json.dumps(data))
    data |= {"hardware": "4 x OTHER", "rows": [measured("moe-ep-tp", "nccl", 360, share=0.9)]}
    (tmp_path / "refit-x4-other.json").write_text(json.dumps(data))
    links = [{"pattern": "three read each other and a fourth", "pull": 400}]
    (tmp_path / "links-x4.json").write_text(json.dumps({"hardware": "4 x OTHER", "rows": links}))
    section = tables.goals_section(tmp_path)
    assert "| on 4 x OTHER, 1 -> 3 | goal |" in section
    assert "Not measured in this run: NCCL's own memory, one trainer, three replicas." in section
    assert "three replicas (4 x GPU, 2026-01-02) |" in section
    assert "| 0.900 of 400 GB/s, measured on 4 x OTHER | **not reached** |" in section


def test_nccls_own_memory_is_without_our_slots_and_tables() -> None:
    rows = [measured("moe-ep-tp", "nccl", 310, share=0.9, scratch_mb=500.0, extra_memory_mb=1500.0)]
    found = {verdict.figure: (verdict.measured, verdict.reached) for verdict in verdicts(rows)}
    assert found["NCCL's own memory, whole MoE"] == ("989 MB; 1,500 MB with slots and tables", True)


def test_few_gpus_have_the_patterns_of_few() -> None:
    names = {count: [*bench_links.patterns_of(count)] for count in range(5)}
    assert names[2] == ["one reads another", "two read each other"]
    assert len(names[4]) == 8 and not names[1]


def test_a_kept_command_names_no_folder_of_its_machine() -> None:
    kept = machine.command("bench_refit.py", ["--out", "/some/folder/refit.json", "--repeats", "5", "out/a.json"])
    assert kept == "bench_refit.py --out refit.json --repeats 5 out/a.json"
