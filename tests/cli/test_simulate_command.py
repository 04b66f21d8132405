"""`simulate` predicts a refit, compares engines, and says what is wrong with its input."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import HYBRID, MOE, Run

from mcore_reshard.cli import memory
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.paths import NIC
from mcore_reshard.planner.plan.plan_file import load_plan
from mcore_reshard.planner.topology.topology import parse_topology


def routes(report: Any) -> dict[str, int]:
    return {entry["route"]: entry["bytes"] for entry in report["routes"]}


def test_simulate_says_the_time_the_bound_and_where_every_byte_goes(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    report = run("simulate", path, "--topology", "h200-8", "--transport", "nccl", "--json").json
    moved = sum(run("show", path, "--json").json["ranks"]["gen"][rank]["recv_bytes"] for rank in range(4))
    plan = load_plan(path)
    far = int(located(plan, parse_topology("h200-8", 8, 4)).loads.received[NIC].sum())
    assert routes(report) == {"own GPU": 0, "NVLink": moved - far, "NIC": far} and 0 < far < moved
    assert report["seconds"] >= report["bound_seconds"] == max(link["seconds"] for link in report["links"]) > 0
    assert 0 < report["least_seconds"] <= report["bound_seconds"]
    assert report["critical_path"][-1]["end_s"] == report["seconds"]
    text = run("simulate", path, "--topology", "h200-8").out
    assert "Critical path" in text and "NIC in" in text and "it could begin once" in text
    first, *later = (step["why"] for step in report["critical_path"])
    assert first == "the refit had begun" in text
    assert later and all(
        re.fullmatch(r"(train|gen):\d+ had (sent to|received from) .+, stage \d+", why) for why in later
    )


def test_simulate_says_the_extra_memory_of_each_rank(run: Run, tmp_path: Path) -> None:
    path, machine = str(tmp_path / "plan.json"), ("--topology", "h200-8")
    planned = run("plan", *MOE, *machine, "--out", path, "--json").json["memory"]
    for transport in ("auto", "nccl"):
        memory = run("simulate", path, *machine, "--transport", transport, "--json").json["memory"]
        assert memory == {name: planned[name] for name in (transport, "staged", "first_use")}
        assert memory[transport]["gen"][0]["nccl"] > 0
    assert "Extra memory of a rank, at most" in run("simulate", path, *machine).out


def test_what_is_said_of_nccls_buffers_is_said_where_some_rank_has_them(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    assert "NCCL's own buffers are" in run("simulate", path, "--topology", "h200-8").out
    for alone in (["--topology", "h200-8,shared"], ["--topology", "h200-8", "--transport", "gloo"]):
        text = run("simulate", path, *alone).out
        assert "NCCL's own buffers are" not in text and "once, a process also takes" in text


def test_a_note_says_where_nics_of_other_ranks_would_help(run: Run) -> None:
    """Engine ranks on four of eight GPUs: the NICs of the others bring nothing in."""
    halves = ("--topology", "h200-8", "--hosts", "train=a*4+b*4,gen=a*4@4+b*4@4")
    meshes = ("--train", "tp=2,pp=2,ep=2,dp=2", "--gen", "tp=4,dp=2")
    text = run("simulate", "tiny-qwen3-moe", *meshes, *halves).out
    assert "times the least, which takes every NIC of an engine's host" in text
    assert "which takes every NIC" not in run("simulate", "tiny-qwen3-moe", *meshes, "--topology", "h200-8").out


def test_a_note_says_what_the_nics_on_the_receivers_rails_cost(run: Run) -> None:
    """Two GPUs of each engine host have ranks: by default a trainer's host sends by two of its eight NICs."""
    text = run(
        "simulate", "qwen3-4b", "--train", "tp=2,dp=4", "--gen", "tp=2,dp=3", "--topology", "h200-8",
        "--hosts", "train=a*8,gen=c*2+d*2+e*2",
    ).out  # fmt: skip
    assert "3.00 times the least" in text
    note = "the busiest one sends for 0.241 s; with NCCL_P2P_PXN_LEVEL=0 on all ranks, for 60.4 ms: set it here"
    assert note in " ".join(text.split())


def test_a_session_does_not_know_racks(run: Run) -> None:
    meshes = "tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--topology"
    for command in ("plan", "simulate"):
        assert "--topology h200-8,gpus=4,memory=3400,nvlink=800,nic=50; 18 hosts in a row are a rack here" in " ".join(
            run(command, *meshes, "gb200-nvl72").out.split()
        )
        assert "racks" not in run(command, *meshes, "h200-8").out


def test_nccl_takes_no_gpu_twice(run: Run) -> None:
    meshes = "tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--topology", "h200-8,shared"
    refused = run("simulate", *meshes, "--transport", "nccl")
    assert refused.code == 2 and refused.err == (
        "mcore-reshard: nccl takes no GPU twice, and ranks of both sides share 2 of them: auto takes direct within a GPU\n"
    )
    counted = run("plan", *meshes, "--json").json["memory"]
    assert "auto" in counted and "nccl" not in counted


def test_memory_is_counted_by_another_process_for_large_plans(
    run: Run, plan_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, here, counted_here = plan_of(MOE), os.getpid(), memory.session_memory

    def elsewhere(*args: Any, **options: Any) -> Any:
        assert os.getpid() != here
        return counted_here(*args, **options)

    expected = run("simulate", path, "--topology", "h200-8", "--json").json["memory"]
    monkeypatch.setattr(memory, "session_memory", elsewhere)
    plan = load_plan(path)
    topology = parse_topology("h200-8", plan.train.world, plan.gen.world)
    plan = located(plan, topology)
    with pytest.raises(AssertionError), memory.counted_beside(plan, topology, ("auto",)) as counted:
        counted()
    monkeypatch.setattr(memory, "counts_every_rank", lambda plan: False)
    with memory.counted_beside(plan, topology, ("auto",)) as counted:
        assert memory.as_json(counted()) == expected


def test_shared_hosts_move_less_over_nics(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    report = run("simulate", path, "--topology", "h200-8,shared", "--json").json
    assert routes(report)["NIC"] == 0 < routes(report)["own GPU"]
    halves = run("simulate", path, "--topology", "h200-8", "--hosts", "train=a*8,gen=a*2+b*2", "--json").json
    assert 0 < routes(halves)["NIC"] < sum(routes(halves).values())


def test_engines_are_compared_the_fastest_first(run: Run) -> None:
    arguments = [*MOE[:3], "--gen", "tp=1", "--gen", "tp=4", "--topology", "h200-8"]
    report = run("simulate", *arguments, "--json").json
    one, four = report["simulations"]
    alone = run("simulate", *MOE[:3], "--gen", "tp=4", "--topology", "h200-8", "--json").json
    assert set(report) == {"simulations"} and set(one) == set(four) == set(alone), "as docs/cli.md says"
    assert (one["gen"], four["gen"]) == ("tp=1,pp=1,dp=1,ep=1", "tp=4,pp=1,dp=1,ep=1")
    assert one["seconds"] > four["seconds"]
    lines = run("simulate", *arguments).out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("tp=")] == [four["gen"], one["gen"]]


def test_misc_tensors_are_named_as_not_simulated(run: Run, plan_of: Any) -> None:
    assert "misc tensors travel whole" in run("simulate", plan_of(HYBRID), "--topology", "h200-8").out


@pytest.mark.parametrize("machine", [["--topology", "h200-8,gpus=2"], []], ids=["between hosts", "between any two"])
def test_replicas_pass_on_over_every_transport(run: Run, tmp_path: Path, machine: list[str]) -> None:
    path = str(tmp_path / "plan.json")
    run("plan", MOE[0], "--train", "tp=2", "--gen", "tp=1,dp=8", *machine, "--out", path)
    ranks = run("show", path, "--json").json["ranks"]
    sent, passed_on = (
        sum(rank["send_bytes"] for rank in ranks["train"]),
        sum(rank["relay_bytes"] for rank in ranks["gen"]),
    )
    assert passed_on > sent
    where = machine or ["--topology", "h200-8,gpus=4", "--hosts", "train=a*2,gen=b*4+c*4"]
    for transport in ("auto", "nccl", "gloo"):
        simulated = run("simulate", path, *where, "--transport", transport, "--json").json
        assert sum(route["bytes"] for route in simulated["routes"]) == sent + passed_on


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--topology", "dgx,nic=0"], "there is no machine 'dgx'"),
        ([], "was made for no machine: give --topology"),
        (["--hosts", "train=a*8,gen=a*4"], "--hosts says which ranks are on which host, and needs --topology"),
        (["--topology", "h200-8", "--hosts", "train=a*8,gen=a*2"], "hosts have 2 gen ranks, the mesh has 4"),
        (["--topology", "h200-8", "--transport", "direct"], "direct reaches GPUs of one NVLink domain"),
        (["--topology", "h200-8", "--gen", "tp=2"], "is a plan, which has its meshes"),
    ],
)
def test_wrong_input_is_named(run: Run, plan_of: Any, options: list[str], expected: str) -> None:
    outcome = run("simulate", plan_of(MOE), *options)
    assert outcome.code == 2
    assert expected in outcome.err


def test_the_variables_of_nccl_say_by_which_nic_it_sends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers on GPUs 0 and 1 of a host whose other GPUs have engine ranks; what leaves it enters by NICs 2 and 3."""
    case = "simulate", "tiny-llama", "--train", "tp=2", "--gen", "tp=2,dp=2", "--topology", "h200-8"
    case += "--hosts", "train=a*2,gen=a*2@2+b*2@2", "--transport"

    def sending(transport: str) -> set[int]:
        links = run(*case, transport, "--json").json["links"]
        return {link["gpu"] for link in links if link["kind"] == "NIC out" and link["host"] == "a"}

    assert "set it to compare" in " ".join(run(*case, "nccl").out.split()) and sending("nccl") == {2, 3}
    for variable, value in (("NCCL_P2P_PXN_LEVEL", "0"), ("NCCL_PXN_DISABLE", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert "own NIC, as NCCL_P2P_PXN_LEVEL or" in " ".join(run(*case, "nccl").out.split())
            assert sending("nccl") == {0, 1}
            patch.setenv("NCCL_CROSS_NIC", "0")
            assert sending("nccl") == {2, 3}
    assert "PXN" not in run(*case, "gloo").out


def test_all_that_is_wrong_with_every_engine_and_the_machine_is_said_at_once(run: Run) -> None:
    meshes = "--train", "tp=3", "--gen", "tp=5", "--gen", "tp=7"
    outcome = run("simulate", "tiny-llama", *meshes, "--topology", "dgx,nic=0", "--hosts", "train=a*x")
    assert outcome.code == 2
    lines = outcome.err.splitlines()
    for problem in ("tp = 3", "tp = 5", "tp = 7", "no machine 'dgx'", "nic must be positive", "'a*x' is not"):
        assert any(problem in line for line in lines), problem
    assert len(lines) == len({*lines}) == 1 + 2 + 4 + 4 + 3
    assert "give --topology" in run("simulate", "tiny-llama", *meshes).err


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format"', '{"format": "another"}', "\x00\x01"])
def test_a_damaged_plan_is_not_called_missing(run: Run, tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    outcome = run("simulate", path, "--topology", "dgx")
    assert outcome.code == 2 and "there is no machine 'dgx'" in outcome.err
    reason = run("report", path, "-o", tmp_path / "page.html", "--topology", "dgx")
    assert reason.code == 2 and "there is no machine 'dgx'" in reason.err
    assert outcome.err.splitlines()[1:3] == reason.err.splitlines()[1:3] and "exists" not in outcome.err
    missing = run("simulate", tmp_path / "none.json", "--topology", "dgx")
    assert "is no plan file that exists" in missing.err and "there is no machine 'dgx'" in missing.err


def test_a_config_needs_meshes(run: Run) -> None:
    assert "needs --train and at least one --gen" in run("simulate", "tiny-llama", "--topology", "h200-8").err


def test_a_plan_is_simulated_on_the_machine_that_it_was_made_for(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run("plan", *MOE[:1], "--train", "tp=2", "--gen", "tp=2,dp=4", "--topology", "h200-8,nic=25,gpus=2", "--out", path)
    arguments = "simulate", path, "--transport", "gloo", "--json"
    own, given = run(*arguments).json, run(*arguments, "--topology", "h200-8,nic=25,gpus=2").json
    assert own["topology"]["machine"]["nic"] == 25e9
    assert {**own, "simulation_seconds": 0} == {**given, "simulation_seconds": 0}


@pytest.mark.parametrize(
    "hosts", ["train=a*8,gen=b*4", "train=a*8,gen=a*4", "train=a*8,gen=a*4@8", "train=a*8,gen=c*2+b*2"]
)
def test_a_plan_for_no_hosts_is_simulated_as_a_session_executes_it(run: Run, plan_of: Any, hosts: str) -> None:
    path = plan_of(MOE)
    machine = "--topology", "h200-8,gpus=16", "--hosts", hosts
    of_file = run("simulate", path, *machine, "--json").json
    note = "between these GPUs a session plans anew, whatever plan it is given"
    assert note not in run("simulate", *MOE, *machine).out
    if hosts == "train=a*8,gen=a*4@8":
        assert of_file["digest"] == run("show", path, "--json").json["digest"]
        assert note not in run("simulate", path, *machine).out
    else:
        of_config = run("simulate", *MOE, *machine, "--json").json
        assert {**of_file, "simulation_seconds": 0} == {**of_config, "simulation_seconds": 0}
        assert f"{note}: this is that plan, digest {of_config['digest']}" in " ".join(
            run("simulate", path, *machine).out.split()
        )
