"""`plan` prints tables and JSON, and reads dtypes and quantized configs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.cli import FP8, HYBRID, MOE, Run

from mcore_reshard.cli.render import size
from mcore_reshard.engines.sglang.model import require_sglang
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.plan_file import dump_plan, load_plan

DEEPSEEK = ["deepseek-v3", "--train", "tp=8,pp=8,ep=32,etp=1,dp=4,layers=8+8+8+8+8+7+7+7", "--gen", "tp=32,dp=4"]


def test_plan_prints_the_contract_as_json(run: Run) -> None:
    outcome = run("plan", *MOE, "--json")
    report = outcome.json
    assert (outcome.code, outcome.err) == (0, "")
    assert set(report) >= {"digest", "proof", "bytes", "misc", "stages", "ranks", "plan_seconds"}
    assert set(report["proof"]) >= {"ok", "violations", "destination_bytes", "covered_bytes"}
    assert set(report["bytes"]) >= {"total", "bulk", "misc"}
    assert re.fullmatch("[0-9a-f]{64}", report["digest"])
    assert report["proof"]["ok"] is True and report["proof"]["violations"] == []
    assert [set(stage) for stage in report["stages"]] == [{"pp_stage", "transfers", "bytes"}] * 2
    assert [row["rank"] for row in report["ranks"]["train"]] == list(range(8))
    assert [row["rank"] for row in report["ranks"]["gen"]] == list(range(4))
    moved = report["proof"]["destination_bytes"]
    assert moved == report["proof"]["covered_bytes"] == sum(stage["bytes"] for stage in report["stages"])
    assert moved == sum(row["send_bytes"] for row in report["ranks"]["train"])
    assert moved == sum(row["recv_bytes"] for row in report["ranks"]["gen"])
    assert isinstance(report["plan_seconds"], float)


def test_misc_and_excluded_parameters_are_listed_one_by_one(run: Run, tmp_path: Path) -> None:
    report = run("plan", *HYBRID, "--json").json
    assert {"parameter", "reason", "bytes"} == set(report["misc"][0])
    names = {entry["parameter"] for entry in report["misc"]}
    assert {"backbone.layers.0.mixer.A_log", "backbone.layers.2.mixer.A_log"} <= names
    assert sum(entry["bytes"] for entry in report["misc"]) == report["bytes"]["misc"] > 0
    assert report["bytes"]["total"] == report["bytes"]["bulk"] + report["bytes"]["misc"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**load_config("tiny-deepseek-v3"), "num_nextn_predict_layers": 1}))
    report = run("plan", config, "--train", "ep=2,dp=2", "--gen", "tp=2", "--json").json
    assert all("multi-token-prediction" in entry["reason"] for entry in report["excluded"])
    assert sum(entry["bytes"] for entry in report["excluded"]) == report["bytes"]["excluded"] > 0


def test_the_memory_of_every_rank_is_in_the_json_and_the_largest_in_the_text(run: Run) -> None:
    memory = run("plan", *MOE, "--json").json["memory"]
    assert set(memory) == {"direct", "nccl", "gloo", "staged", "first_use"}
    for transport in ("direct", "nccl", "gloo"):
        for world, ranks in (("train", 8), ("gen", 4)):
            rows = memory[transport][world]
            assert [row["rank"] for row in rows] == list(range(ranks))
            assert all(row["total"] == sum(row.values()) - row["rank"] - row["total"] > 0 for row in rows)
    text = run("plan", *MOE).out
    table = text[text.index("Extra memory of a rank, at most") :]
    largest = max(memory["nccl"]["gen"], key=lambda row: row["total"])
    shown = re.search(r"^nccl +gen .* (\S+ \S+)   gen:(\d+)", table, re.MULTILINE)
    assert shown and shown[1] == size(largest["total"]) and int(shown[2]) == largest["rank"]
    staged = max(row["bytes"] for row in memory["staged"])
    assert re.search(rf"^staged +gen +{size(staged)} ", table, re.MULTILINE)
    assert "NCCL's own buffers are as measured" in table
    assert f"{size(memory['first_use']['nccl'])} with its first message over NCCL" in table


def test_all_wrong_hosts_are_listed(run: Run) -> None:
    refused = run("plan", *MOE, "--topology", "h200-8", "--hosts", "train=a*7,gen=b*3")
    assert refused.code == 2
    for line in ("hosts have 7 train ranks, the mesh has 8", "hosts have 3 gen ranks, the mesh has 4"):
        assert f"\n  - {line}" in refused.err


def test_the_conservative_policy_sends_narrow_attention_to_misc(run: Run) -> None:
    arguments = ["plan", "tiny-llama", "--train", "tp=2", "--gen", "tp=8", "--json"]
    assert run(*arguments).json["misc"] == []
    reasons = {entry["reason"] for entry in run(*arguments, "--policy", "conservative").json["misc"]}
    assert len(reasons) == 1 and "4 KV heads < max(train tp 2, gen tp 8)" in reasons.pop()


def test_tables_say_what_the_json_says(run: Run) -> None:
    report, text = run("plan", *HYBRID, "--json").json, run("plan", *HYBRID).out
    for shown in (report["digest"], f"{report['proof']['covered_bytes']:,}", "tiny-nemotron-h", "A = -exp(A_log)"):
        assert shown in text
    assert "\x1b" not in text and not re.search(r"[ \t]+$", text, re.MULTILINE)


def test_a_plan_file_survives_a_round_trip_to_the_byte(run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    digest = run("plan", *MOE, "--out", first, "--json").json["digest"]
    assert run("plan", *MOE, "--out", second).out.endswith(f"plan written to {second}\n")
    plan = load_plan(first)
    assert plan.digest == digest
    assert first.read_bytes() == second.read_bytes() == dump_plan(plan).encode()


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_config_may_be_a_file_or_a_folder_and_the_digest_does_not_see_where(
    run: Run, tmp_path: Path, as_folder: bool
) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_config("tiny-llama")))
    source = folder if as_folder else folder / "config.json"
    meshes = ["--train", "tp=2", "--gen", "tp=2", "--json"]
    assert run("plan", source, *meshes).json["digest"] == run("plan", "tiny-llama", *meshes).json["digest"]


def test_dtypes_both_ends_can_be_stated(run: Run, tmp_path: Path) -> None:
    single = tmp_path / "config.json"
    single.write_text(json.dumps({**load_config("tiny-llama"), "torch_dtype": "float32"}))
    meshes = ["--train", "tp=2", "--gen", "tp=2"]
    full = run("plan", single, *meshes, "--json").json
    half = run("plan", single, *meshes, "--train-dtype", "bf16", "--gen-dtype", "bf16", "--json").json
    assert (full["dtypes"], half["dtypes"]) == (["float32"], ["bfloat16"])
    assert full["bytes"]["bulk"] == 2 * half["bytes"]["bulk"]
    mixed = run("plan", single, *meshes, "--gen-dtype", "bf16", "--json").json
    assert (mixed["dtypes"], mixed["bytes"]["bulk"]) == (["bfloat16"], half["bytes"]["bulk"])
    assert {(cast["from"], cast["to"]) for cast in mixed["casts"]} == {("float32", "bfloat16")}
    single.write_text(json.dumps({**load_config("tiny-llama"), "torch_dtype": "float16"}))
    uncast = run("plan", single, *meshes, "--train-dtype", "bf16")
    assert uncast.code == 2 and "the trainer would hold bfloat16 and the engine float16, and no cast" in uncast.err
    assert "give a dtype for train and one for gen (the config says float16)" in uncast.err


def test_fp8_is_reported_by_dtype_pair_cast_and_reason(run: Run, tmp_path: Path) -> None:
    quantized = tmp_path / "config.json"
    quantized.write_text(
        json.dumps({**load_config("tiny-llama"), "quantization_config": {**FP8, "weight_block_size": [8, 32]}})
    )
    asked = ["plan", quantized, "--train", "tp=2", "--gen", "tp=4", "--gen-dtype", "fp8"]
    report = run(*asked, "--json").json
    assert report["proof"]["ok"] and report["dtypes"] == ["float8_e4m3fn", "bfloat16", "float32"]
    assert sum(report["wire_bytes"].values()) == sum(rank["recv_bytes"] for rank in report["ranks"]["gen"])
    pairs = {pair["weight"].split(".")[-2]: pair for pair in report["pairs"]}
    assert (pairs["q_proj"]["route"], pairs["q_proj"]["block"], pairs["q_proj"]["count"]) == ("bulk", [8, 32], 4)
    assert pairs["down_proj"]["route"] == "misc"
    assert pairs["down_proj"]["reason"].endswith("splits a block of 8x32: vLLM refuses to build a linear layer cut so")
    assert {entry["reason"] for entry in report["misc"] if "down_proj" in entry["parameter"]} == {
        pairs["down_proj"]["reason"]
    }
    assert {(cast["from"], cast["to"]) for cast in report["casts"]} == {("bfloat16", "float8_e4m3fn")}
    text = run(*asked).out
    assert "weights with scales: 20 bulk, 8 misc; blocks 8x32" in re.sub(r"\s+", " ", text)
    assert "bfloat16 -> float8_e4m3fn in the trainer: 20 parameters" in re.sub(r"\s+", " ", text)
    assert re.search(
        r"^dtypes +bytes moved: float8_e4m3fn [0-9.]+ kB, bfloat16 [0-9.]+ kB, float32", text, re.MULTILINE
    )
    both = run(*asked, "--train-dtype", "fp8", "--json").json
    assert both["casts"] == [] and both["wire_bytes"] == report["wire_bytes"]


ASSUMED = " in every linear layer but routers and lm_head, and the engine needs a config that says so"


def test_a_config_without_fp8_is_assumed_to_have_the_usual_blocks(run: Run) -> None:
    report = run("plan", "qwen3-30b-a3b", "--train", "ep=4,dp=4", "--gen", "tp=2", "--gen-dtype", "fp8", "--json").json
    assert report["misc"] == [] and {tuple(pair["block"]) for pair in report["pairs"]} == {(128, 128)}
    assert report["notes"] == [
        "the config has no quantization_config for block FP8: blocks of 128x128 are assumed" + ASSUMED
    ]


def test_a_plan_that_is_proven_but_bad_says_so(run: Run) -> None:
    def notes(*arguments: str) -> list[str]:
        notes: list[str] = run("plan", *arguments, "--json").json["notes"]
        return [note for note in notes if "the config has no quantization_config" not in note]

    usual = ("qwen3-30b-a3b", "--train", "ep=8,dp=8", "--gen")
    assert notes(*usual, "tp=4") == notes(*usual, "tp=4", "--gen-dtype", "fp8") == []
    (much,) = notes(*usual, "tp=4", "--train-dtype", "fp8")
    assert re.fullmatch(r"9\d\.\d% of the bytes go by misc, .*", much)
    _, refused = notes(*usual, "tp=16", "--gen-dtype", "fp8")
    assert refused.startswith("vLLM refuses to run this model on these ranks: model.layers.*.mlp.experts.*.gate_proj")


@pytest.mark.parametrize(
    ("method", "gen_dtype", "note"),
    [
        ("awq", "fp8", "block FP8 (awq says nothing of it, and its list of modules is not read): blocks of 128x128"),
        ("awq", "mxfp8", "MXFP8 (awq says nothing of it, and its list of modules is not read): blocks of 1x32"),
        ("fp8", "mxfp8", "MXFP8 (fp8 says nothing of it, and its list of modules is not read): blocks of 1x32"),
        (
            "mxfp8",
            "fp8",
            "block FP8 (mxfp8 says nothing of it, and its list of modules is not read): blocks of 128x128",
        ),
        ("fp8", "fp8", None),
        ("mxfp8", "mxfp8", None),
    ],
)
def test_another_methods_list_of_modules_is_not_for_the_engine(
    run: Run, tmp_path: Path, method: str, gen_dtype: str, note: str | None
) -> None:
    """Neither what it lists stays as it is, nor what it leaves out is an error."""
    config, kept = tmp_path / "config.json", "model.layers.1.self_attn.o_proj"
    listed = [kept] if note else [kept, "lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(4))]
    stated = {"quant_method": method, "ignored_layers": listed, "weight_block_size": [8, 8]}
    config.write_text(json.dumps({**load_config("tiny-qwen3-moe"), "quantization_config": stated}))
    dtypes = ("--train-dtype", gen_dtype, "--gen-dtype", gen_dtype)
    report = run("plan", config, "--train", "tp=1", "--gen", "tp=1", *dtypes, "--json").json
    others = ("go by misc", "vLLM refuses to run")  # its experts of 32 rows are smaller than a block of 128
    assert [said for said in report["notes"] if not any(other in said for other in others)] == (
        [f"the config has no quantization_config for {note} are assumed{ASSUMED}"] if note else []
    )
    layers = sum(pair["count"] for pair in report["pairs"] if pair["weight"].endswith("o_proj.weight"))
    assert layers == (4 if note else 3)


def test_deepseek_v3_is_planned_proven_and_its_memory_counted_in_ten_seconds_and_600_mb() -> None:
    script = (
        "import sys; from pathlib import Path; from mcore_reshard.cli.main import main; code = main(); "
        "print(Path('/proc/self/status').read_text(), file=sys.stderr); sys.exit(code)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, "plan", *DEEPSEEK, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        report = json.load(process.stdout)
        peak_kb = int(re.search(r"VmHWM:\s+(\d+) kB", process.stderr.read())[1])  # type: ignore[index]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and report["proof"]["ok"]
    assert usage.ru_utime + usage.ru_stime < 10.0  # processor time: the machine may be busy with other things
    assert peak_kb < 600 * 1024
    assert len(report["ranks"]["train"]) == 256 and len(report["ranks"]["gen"]) == 128
    assert any("quantized (fp8)" in note for note in report["notes"])


def test_an_engine_without_rules_or_of_an_unknown_name_is_refused(run: Run) -> None:
    arguments = ["plan", "tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--engine"]
    without_rules, unknown = run(*arguments, "sglang"), run(*arguments, "trtllm")
    assert (without_rules.code, unknown.code) == (2, 2)
    assert "no layout rules for SGLang" in without_rules.err and "plan --traced" in without_rules.err
    assert "no engine 'trtllm', known: sglang, vllm" in unknown.err


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_its_adapter_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"SGLang is not installed; .* pip install '\.\[sglang\]'"):
        require_sglang()


def test_a_plan_for_known_hosts_says_what_each_link_carries(run: Run) -> None:
    meshes = ["llama-3.1-8b", "--train", "tp=2,dp=8", "--gen", "tp=1,dp=16"]
    report = run("plan", *meshes, "--topology", "h200-8,nic=25", "--json").json
    links = {link["link"]: link for link in report["topology"]["links"]}
    model, received = report["bytes"]["total"], sum(link["bytes"] for link in links.values())
    assert (report["topology"]["hosts"], report["hops"]) == (4, ["train", "share"])
    assert links["NIC"]["bytes"] == 2 * model, "once into each of two hosts"
    assert received == 16 * model
    assert model / 8 / 25e9 <= links["NIC"]["busiest_s"] < 1.02 * model / 8 / 25e9
    shared = run("plan", "llama-3.1-8b", "--train", "tp=2,dp=16", "--gen", "tp=2,dp=16", "--topology", "h200-8,shared")
    assert re.search(r"^own GPU +257 GB +100.0%", shared.out, re.MULTILINE)


def test_a_plan_across_hosts_says_how_much_stays_on_its_rail(run: Run) -> None:
    ends = ["tiny-llama", "--train", "tp=1,dp=2", "--gen", "tp=1"]  # one NIC gets all, half of it from the other rail
    between = ["--topology", "h200-8,gpus=2"]
    rails = run("plan", *ends, *between, "--json").json["topology"]["rails"]
    assert 0.45 * rails["bytes"] < rails["on_rail_bytes"] < 0.55 * rails["bytes"]
    share = f"{rails['on_rail_bytes'] / rails['bytes']:.1%} of {size(rails['bytes'])}"
    for command in ("plan", "simulate"):
        assert f"{share} by NIC stay on their rail" in run(command, *ends, *between).out
        assert "rail" not in run(command, *ends, "--topology", "h200-8,shared").out, "nothing goes by NIC"


def test_hosts_of_other_ranks_and_unknown_machines_are_bad_input(run: Run) -> None:
    meshes = ["tiny-qwen3", "--train", "tp=2", "--gen", "tp=2"]
    wrong = run("plan", *meshes, "--topology", "h200-8", "--hosts", "train=a*3,gen=b*2")
    assert "hosts have 3 train ranks, the mesh has 2" in wrong.err
    assert "no machine 'abacus'" in run("plan", *meshes, "--topology", "abacus").err
    assert "needs --topology" in run("plan", *meshes, "--hosts", "train=a*2,gen=a*2").err
