"""The command line as scripts meet it: JSON keys, exit codes, error texts, and what it does not import."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mcore_reshard import __version__, planning
from mcore_reshard.cli import main as cli
from mcore_reshard.cli.explain import parse_element
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import digest_of, dump_plan, load_plan, save_plan
from mcore_reshard.planning import InputError

DEEPSEEK = ["deepseek-v3", "--train", "tp=8,pp=8,ep=32,etp=1,dp=4,layers=8+8+8+8+8+7+7+7", "--gen", "tp=32,dp=4"]
MOE = ["tiny-qwen3-moe", "--train", "tp=2,pp=2,ep=2,dp=2", "--gen", "tp=2,dp=2"]
HYBRID = ["tiny-nemotron-h", "--train", "tp=2,pp=2,ep=2", "--gen", "tp=2"]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The console script's entry, in this process."""

    def call(*argv: object) -> Outcome:
        code = cli.main([str(arg) for arg in argv])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def plan_of(run: Run, tmp_path: Path) -> Callable[[list[str]], Path]:
    def write(arguments: list[str]) -> Path:
        path = tmp_path / f"{arguments[0]}.json"
        assert run("plan", *arguments, "--out", path).code == 0
        return path

    return write


def python(code: str, *argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, timeout=120)


# --- plan


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


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}


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
    assert refused.startswith("vLLM refuses to build this model on these ranks: model.layers.*.mlp.experts.*.gate_proj")


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
    assert [said for said in report["notes"] if "go by misc" not in said] == (
        [f"the config has no quantization_config for {note} are assumed{ASSUMED}"] if note else []
    )
    layers = sum(pair["count"] for pair in report["pairs"] if pair["weight"].endswith("o_proj.weight"))
    assert layers == (4 if note else 3)


def test_explain_answers_for_scales(run: Run, tmp_path: Path) -> None:
    quantized, plan = tmp_path / "config.json", tmp_path / "plan.json"
    quantized.write_text(json.dumps({**load_config("tiny-llama"), "quantization_config": FP8}))
    run("plan", quantized, "--train", "tp=2", "--gen", "tp=4", "--gen-dtype", "fp8", "--out", plan)
    scale = run("explain", plan, "model.layers.1.mlp.up_proj.weight_scale_inv[11,7]", "--json").json
    (origin,) = scale["origins"]
    assert origin["dst"]["tensor"] == "model.layers.1.mlp.gate_up_proj.weight_scale_inv"
    assert (origin["dst"]["rank"], origin["dst"]["index"]) == (3, [5, 7])
    assert origin["src"]["tensor"] == "vp0.decoder.layers.1.mlp.linear_fc1.weight._rowwise_scale_inv"
    assert (origin["src"]["rank"], origin["src"]["index"]) == (1, [11, 7])
    assert scale["notes"] == [
        "it is the scale of model.layers.1.mlp.up_proj.weight[88:96, 56:64]",
        "the trainer holds no scales: it computes this one as it casts the block",
    ]
    weight = run("explain", plan, "model.layers.1.mlp.up_proj.weight[90,60]", "--json").json
    assert weight["notes"] == [
        "the trainer holds bfloat16 and sends float8_e4m3fn",
        "its scale is model.layers.1.mlp.up_proj.weight_scale_inv[11,7], of a block of 8x8",
    ]
    tensor = "model.layers.1.mlp.gate_up_proj.weight_scale_inv[5,7]"
    local = run("explain", plan, tensor, "--gen-rank", 3, "--json").json
    assert (local["origins"], local["notes"]) == (scale["origins"], scale["notes"])


def test_explain_says_what_the_engine_repeats_and_what_no_plan_has(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    dtypes = ("--train-dtype", "bf16", "--gen-dtype", "fp8")
    run("plan", "tiny-qwen3-moe-fp8", "--train", "tp=2,ep=2", "--gen", "tp=4", *dtypes, "--out", plan)
    engines = "model.layers.0.mlp.experts.routed_experts.w13_weight_scale_inv"
    beside = run("explain", plan, f"{engines}.blocks[0,0,0]", "--gen-rank", 1).out
    assert f"note: a tensor beside the engine's own, which repeats {engines} from it" in beside
    own = run("explain", plan, f"{engines}[0,0,0]", "--gen-rank", 1)
    assert (own.code, own.out) == (2, "")
    assert f"on gen:1: the engine repeats it from {engines}.blocks, which the plan fills" in own.err
    cache = run("explain", plan, "model.layers.0.self_attn.attn.k_scale[0]")
    assert cache.code == 2 and "no plan has scales of the KV cache, refit(kv_scales=...) brings them" in cache.err


@pytest.mark.parametrize("dtypes", ["fp32 -> bf16", "bf16 -> fp32", "fp32 -> fp8", "mxfp8 -> mxfp8"])
def test_validate_reads_off_a_plan_file_which_dtypes_it_cannot_compare(run: Run, tmp_path: Path, dtypes: str) -> None:
    train, gen = dtypes.split(" -> ")
    plan = tmp_path / "plan.json"
    run(
        "plan",
        "tiny-qwen3",
        "--train",
        "tp=2",
        "--gen",
        "tp=2",
        "--train-dtype",
        train,
        "--gen-dtype",
        gen,
        "--out",
        plan,
    )
    outcome = run("validate", plan)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{dtypes} is not validated here" in outcome.err


def test_validate_refuses_a_plan_whose_trainer_is_in_fp8_and_whose_engine_is_not(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    run("plan", "tiny-qwen3-fp8", "--train", "tp=2", "--gen", "tp=2", "--train-dtype", "fp8", "--out", plan)
    outcome = run("validate", plan)
    assert (outcome.code, outcome.out) == (2, "")
    assert "sends other parameters by misc than one of bf16 -> bf16 does" in outcome.err
    outcome = run("validate", plan, "--train-dtype", "fp8", "--gen-dtype", "bf16")
    assert (outcome.code, outcome.out) == (2, "")
    assert "fp8 -> bf16 is not validated here" in outcome.err and "the plan is of" not in outcome.err


def test_deepseek_v3_is_planned_and_proven_by_the_console_script_in_two_seconds_and_300_mb() -> None:
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
    assert usage.ru_utime + usage.ru_stime < 2.0  # processor time: the machine may be busy with other things
    assert peak_kb < 300 * 1024
    assert len(report["ranks"]["train"]) == 256 and len(report["ranks"]["gen"]) == 128
    assert any("quantized (fp8)" in note for note in report["notes"])


# --- bad input


def test_every_violation_of_both_meshes_and_the_model_is_listed_at_once(run: Run) -> None:
    outcome = run("plan", "tiny-llama", "--train", "tp=3,ep=2,pp=3", "--gen", "tp=5,ep=3", "--json")
    assert (outcome.code, outcome.out) == (2, "")
    lines = outcome.err.splitlines()
    assert lines[0] == f"mcore-reshard: {len(lines) - 1} problems"
    assert [line.startswith("  - training: ") for line in lines[1:]].count(True) == 5
    for expected in (
        "ep*etp = 2*1 must divide tp*cp*dp = 3*1*1 = 3",
        "8 attention heads cannot be divided by tp = 3",
        "4 layers do not divide over pp*vpp = 3",
        "ep = 3 must be 1 (experts cut by tp) or tp*dp = 5*1 = 5",
        "MLP width 96 cannot be divided by tp = 5",
    ):
        assert expected in outcome.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny-lama", "--train", "tp=2", "--gen", "tp=2"], "did you mean tiny-llama"),
        (["tiny-llama", "--train", "tp=two", "--gen", "tp=2"], "'tp=two' is not a number, write for example tp=2"),
        (["tiny-llama", "--train", "xp=2", "--gen", "tp=2"], "training: unknown axis 'xp', known: cp, dp"),
        (["tiny-llama", "--train", "tp=2", "--gen", "cp=2"], "generation: unknown axis 'cp', known: dp, ep, pp, tp"),
        (["tiny-llama", "--train", "tp=2,pp=2,layers=3+2", "--gen", "tp=2"], "adds up to 5, the model has 4"),
        (["tiny-llama", "--train", "", "--gen", "tp=2", "--train-dtype", "fp4"], "training: unknown dtype 'fp4'"),
        (["tiny-llama", "--train", "", "--gen", "tp=2", "--gen-dtype", "int4"], "generation: unknown dtype 'int4'"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--out", "/nowhere/plan.json"], "cannot write /nowhere"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(run: Run, arguments: list[str], expected: str) -> None:
    for flags in ([], ["--json"]):
        outcome = run("plan", *arguments, *flags)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith("mcore-reshard: ") and expected in outcome.err
        assert "Traceback" not in outcome.err


def test_configs_that_cannot_be_read_or_known_are_bad_input(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    meshes = ["--train", "tp=2", "--gen", "tp=2"]
    for content, expected in (
        ("{", "not readable as JSON"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not known"),
        (json.dumps({**load_config("tiny-llama"), "num_attention_heads": 7}), "not divisible"),
    ):
        config.write_text(content)
        outcome = run("plan", config, *meshes)
        assert outcome.code == 2 and expected in outcome.err


def test_a_plan_where_a_config_is_wanted_is_recognized(run: Run, plan_of: Any) -> None:
    plan = plan_of(MOE)
    outcome = run("plan", plan, "--train", "tp=2", "--gen", "tp=2")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"mcore-reshard: {plan}: this is a plan, where the config of a model is wanted\n"
        f"See what it does with `mcore-reshard show {plan}`; `explain` and `validate` take plans too.\n"
    )


def test_a_config_where_a_plan_is_wanted_is_recognized(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-70b").mkdir()
    (tmp_path / "my-70b" / "config.json").write_text(json.dumps(load_config("tiny-llama")))
    for source in ("my-70b", "my-70b/config.json", "qwen3-4b"):
        for command in (["show", source], ["explain", source, "model.norm.weight[0]"]):
            outcome = run(*command)
            assert (outcome.code, outcome.out) == (2, "")
            assert outcome.err == (
                f"mcore-reshard: {source}: this is the config of a model, where a plan is wanted\n"
                f"Make a plan of it with `mcore-reshard plan {source} --train ... --gen ... --out plan.json`.\n"
            )
    (tmp_path / "empty").mkdir()
    assert "cannot read plan empty: Is a directory" in run("show", "empty").err


def test_misspelled_fields_of_a_config_are_asked_about_and_its_file_is_named(run: Run, tmp_path: Path) -> None:
    text = json.dumps({**load_config("tiny-qwen3-moe"), "quantization_config": FP8})
    for right, wrong in (("num_experts", "num_expert"), ("hidden_size", "hiden_size"), ("quant_method", "quant_methd")):
        text = text.replace(f'"{right}"', f'"{wrong}"')
    config = tmp_path / "config.json"
    config.write_text(text)
    for source in (config, tmp_path):
        outcome = run("plan", source, "--train", "tp=2", "--gen", "tp=2")
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.splitlines() == [
            "mcore-reshard: 3 problems",
            f"  - {config}: hidden_size is missing; did you mean it by 'hiden_size'?",
            f"  - {config}: num_experts is missing; did you mean it by 'num_expert'?",
            f"  - {config}: quantization_config: quant_method is missing; did you mean it by 'quant_methd'?",
            "Correct these fields in config.json.",
        ]


@pytest.mark.parametrize("command", [["show"], ["explain", "model.norm.weight[0]"]], ids=lambda c: c[0])
def test_plan_files_that_are_not_plans_are_told_apart(
    run: Run, plan_of: Any, tmp_path: Path, command: list[str]
) -> None:
    good = plan_of(MOE).read_text()
    bad = tmp_path / "bad.json"
    for content, expected in (
        ("not json", "it is not JSON"),
        ('{"format": "something else"}', "is not a plan"),
        (re.sub('"version":[0-9]+', '"version":99', good), "is a plan of version 99"),
        (good.replace("qkv", "qvk", 1), "is damaged"),
        (good[: len(good) // 2], "it is not JSON"),
    ):
        bad.write_text(content)
        outcome = run(command[0], bad, *command[1:], "--json")
        assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err
    missing = run(command[0], tmp_path / "none.json", *command[1:])
    assert missing.code == 2 and "cannot read plan" in missing.err


def test_usage_errors_are_bad_input_too(run: Run) -> None:
    for argv in ([], ["nonsense"], ["plan"], ["plan", "tiny-llama"], ["plan", *MOE, "--policy", "brave"]):
        outcome = run(*argv)
        assert (outcome.code, outcome.out) == (2, "") and "usage: mcore-reshard" in outcome.err


# --- proof failures and the unexpected


def _broken(path: Path) -> Path:
    """A plan that sends one destination twice and another never, sealed as if it were right."""
    plan = load_plan(path)
    pattern = plan.patterns[0]
    overlaps = (pattern.overlaps[0], *pattern.overlaps[:-1])
    return _sealed(
        replace(plan, patterns=(replace(pattern, overlaps=overlaps), *plan.patterns[1:])),
        path,
    )


def _sealed(plan: Plan, path: Path) -> Path:
    object.__setattr__(plan, "digest", digest_of(plan))
    save_plan(plan, path)
    return path


def test_an_unsound_plan_exits_with_3_and_names_the_parameter(run: Run, plan_of: Any) -> None:
    path = _broken(plan_of(MOE))
    outcome = run("show", path, "--json")
    assert outcome.code == 3
    assert outcome.json["proof"]["ok"] is False
    assert {"rule", "parameter", "ranks", "message"} == set(outcome.json["proof"]["violations"][0])
    assert "the plan is not sound" in outcome.err and "model.embed_tokens.weight" in outcome.err
    assert "FAILED" in run("show", path).out
    for command in (["show", path, "--rank", "gen:0"], ["explain", path, "model.norm.weight[0]"], ["validate", path]):
        outcome = run(*command, "--json")
        assert (outcome.code, outcome.out) == (3, "") and "model.embed_tokens.weight" in outcome.err


def test_a_plan_that_fails_its_proof_is_not_written(
    run: Run, plan_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = load_plan(_broken(plan_of(MOE)))
    monkeypatch.setattr(planning, "make_plan", lambda *_, **__: broken)
    target = tmp_path / "unsound.json"
    outcome = run("plan", *MOE, "--out", target, "--json")
    assert outcome.code == 3 and outcome.json["proof"]["ok"] is False and not target.exists()


def test_an_unexpected_error_is_one_line_and_exit_code_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_reshard.cli import doctor

    def fail(_: object) -> int:
        raise RuntimeError("the roof is on fire")

    monkeypatch.setattr(doctor, "run", fail)
    outcome = run("doctor", "--json")
    assert (outcome.code, outcome.out) == (1, "")
    assert "unexpected RuntimeError: the roof is on fire" in outcome.err and "Traceback" not in outcome.err
    assert "Traceback" in run("doctor", "--debug").err


# --- show


def test_show_repeats_the_plan_and_lists_its_parameters(run: Run, plan_of: Any) -> None:
    path = plan_of(HYBRID)
    planned, shown = run("plan", *HYBRID, "--json").json, run("show", path, "--json").json
    assert shown["plan_seconds"] is None
    assert {**planned, "plan_seconds": None} == shown
    text = run("show", path).out
    assert "backbone.layers.*.mixer.in_proj.weight" in text and "vp*.decoder.layers.*.mixer.in_proj.weight" in text


def test_show_rank_adds_up_to_what_the_plan_says(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    ranks = run("show", path, "--json").json["ranks"]
    for world, key in (("train", "send_bytes"), ("gen", "recv_bytes")):
        report = run("show", path, "--rank", f"{world}:3", "--json").json
        assert report["bytes"] == ranks[world][3][key]
        assert report["bytes"] == sum(p["bytes"] for stage in report["stages"] for p in stage["peers"])
        assert report["bytes"] == sum(tensor["bytes"] for tensor in report["tensors"])
        assert report["transfers"] == sum(tensor["transfers"] for tensor in report["tensors"])
    assert "gen:3" in run("show", path, "--rank", "gen:3").out


def test_show_parameter_lists_transfers_with_both_ends(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    rows = run("show", path, "--parameter", "*.0.self_attn.k_proj.weight", "--json").json["transfers"]
    assert sum(row["bytes"] for row in rows) == 2 * 32 * 64 * 2  # two replicas of the engine, 2 bytes an element
    assert {row["dst"]["tensor"] for row in rows} == {"model.layers.0.self_attn.qkv_proj.weight"}
    mine = run("show", path, "--parameter", "*.0.self_attn.k_proj.weight", "--rank", "gen:1", "--json").json
    assert mine["transfers"] == [row for row in rows if row["dst"]["rank"] == 1]
    everything = run("show", path, "--parameter", "*", "--rank", "train:2", "--json").json["transfers"]
    assert sum(r["bytes"] for r in everything) == run("show", path, "--rank", "train:2", "--json").json["bytes"]
    text = run("show", path, "--parameter", "model.layers.0.*").out
    assert "linear_qkv.weight" in text and "more: --json lists all" in text


def test_show_parameter_gives_the_reason_of_a_misc_parameter(run: Run, plan_of: Any) -> None:
    path = plan_of(HYBRID)
    (row,) = run("show", path, "--parameter", "*.0.mixer.A_log", "--json").json["transfers"]
    assert row["route"] == "misc" and "not a byte copy" in row["reason"]
    assert "not a byte copy" in run("show", path, "--parameter", "*.0.mixer.A_log").out
    assert "has no part in" in run("show", path, "--parameter", "*.0.mixer.A_log", "--rank", "gen:0").out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rank", "gen:4"], "gen:4 is outside of the 4 gen ranks of the plan"),
        (["--rank", "3"], "cannot read the rank '3', write train:0 or gen:3"),
        (["--parameter", "nothing.*"], "no parameter of the plan matches 'nothing.*'"),
    ],
)
def test_show_refuses_what_the_plan_does_not_have(run: Run, plan_of: Any, options: list[str], expected: str) -> None:
    outcome = run("show", plan_of(MOE), *options)
    assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err


def test_show_names_an_unknown_rank_and_an_unmatched_glob_together(run: Run, plan_of: Any) -> None:
    outcome = run("show", plan_of(MOE), "--rank", "foo:1", "--parameter", "zzz*")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == [
        "mcore-reshard: 2 problems",
        "  - cannot read the rank 'foo:1', write train:0 or gen:3",
        "  - no parameter of the plan matches 'zzz*'; `show PLAN` lists them",
    ]


# --- explain


def test_explain_follows_one_element_from_all_three_names_of_it(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    forward = run("explain", path, "model.layers.3.self_attn.q_proj.weight[37,3]", "--gen-rank", 1, "--json").json
    (origin,) = forward["origins"]
    assert (origin["route"], origin["pp_stage"], forward["kind"]) == ("bulk", 1, "parameter")
    assert origin["dst"]["rank"] == 1 and origin["dst"]["tensor"] == "model.layers.3.self_attn.qkv_proj.weight"
    assert origin["src"]["tensor"] == "vp0.decoder.layers.1.self_attention.linear_qkv.weight"
    assert origin["src"]["byte_offset"] == 2 * origin["src"]["offset"]
    assert origin["src"]["rank"] in {place["rank"] for place in forward["holders"]}
    for end, flag in (("dst", "--gen-rank"), ("src", "--train-rank")):
        place = origin[end]
        element = f"{place['tensor']}[{','.join(map(str, place['index']))}]"
        assert origin in run("explain", path, element, flag, place["rank"], "--json").json["origins"]


def test_explain_prefers_the_parameter_and_says_how_to_mean_the_tensor(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    outcome = run("explain", path, "lm_head.weight[200,0]", "--gen-rank", 1)
    assert "is also a tensor of gen:1, [128, 64] of [256, 64]" in outcome.out and "[72,0]" in outcome.out
    (origin,) = run("explain", path, "gen:lm_head.weight[72,0]", "--gen-rank", 1, "--json").json["origins"]
    assert origin["index"] == [200, 0]


def test_explain_says_padding_misc_and_nobody(run: Run, plan_of: Any, tmp_path: Path) -> None:
    path = plan_of(HYBRID)
    assert "vLLM stores A = -exp(A_log)" in run("explain", path, "backbone.layers.0.mixer.A_log[0]").out
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**load_config("tiny-llama"), "vocab_size": 250}))
    padded = tmp_path / "padded.json"
    assert run("plan", config, "--train", "dp=2", "--gen", "tp=2", "--out", padded).code == 0
    assert "no parameter fills it" in run("explain", padded, "gen:lm_head.weight[127,0]", "--gen-rank", 1).out
    element = "lm_head.weight[0,0]"
    answer = run("explain", padded, element, "--json").json
    (idle,) = {place["rank"] for place in answer["holders"]} - {origin["src"]["rank"] for origin in answer["origins"]}
    assert "its replicas serve every pull" in run("explain", padded, element, "--train-rank", idle).out
    assert "gen:1 does not hold this element" in run("explain", padded, element, "--gen-rank", 1).out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["model.norm.weight"],
            "model.norm.weight has shape [64]: name one element, for example 'model.norm.weight[0]'",
        ),
        (["model.norm.weight[64]"], "index [64] is outside of model.norm.weight"),
        (["model.nrm.weight[0]"], "did you mean model.norm.weight"),
        (["model.norm.weight[a]"], "cannot read the index [a]"),
        (["model.norm.weight[0]", "--gen-rank", "9"], "gen:9 is outside of the 4 gen ranks"),
        (["model.layers.0.self_attn.qkv_proj.weight[0,0]"], "name one with --gen-rank N"),
        (["vp0.decoder.final_layernorm.weight[0]"], "name one with --train-rank N"),
        (["vp0.decoder.final_layernorm.weight[0]", "--train-rank", "0"], "no planned transfer touches"),
    ],
)
def test_explain_refuses_what_it_cannot_answer(run: Run, plan_of: Any, arguments: list[str], expected: str) -> None:
    outcome = run("explain", plan_of(MOE), *arguments)
    assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err


_NO_RANKS = [
    "gen:77 is outside of the 4 gen ranks of the plan (0 to 3)",
    "train:99 is outside of the 8 train ranks of the plan (0 to 7)",
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["x[5000,9003]", "--gen-rank", 77, "--train-rank", 99], [*_NO_RANKS, "the plan has no parameter 'x'"]),
        (
            ["model.norm.weight[5000]", "--gen-rank", 77, "--train-rank", 99],
            [*_NO_RANKS, "index [5000] is outside of model.norm.weight, which has shape [64]: write [0] to [63]"],
        ),
        (
            ["model.norm.weight[a]", "--gen-rank", 77, "--train-rank", 0],
            [
                _NO_RANKS[0],
                "cannot read the index [a], write whole numbers, for example model.norm.weight[5,3]",
            ],
        ),
        (
            ["gen:x[0]", "--gen-rank", 1, "--train-rank", 99],
            [_NO_RANKS[1], "no planned transfer touches 'x' on gen:1"],
        ),
    ],
)
def test_explain_names_everything_that_is_wrong(
    run: Run, plan_of: Any, arguments: list[object], expected: list[str]
) -> None:
    outcome = run("explain", plan_of(MOE), *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == [
        f"mcore-reshard: {len(expected)} problems",
        *(f"  - {problem}" for problem in expected),
    ]


def test_elements_are_read_and_misread() -> None:
    element = parse_element(" a.b[5, 3] ")
    assert (element.name, element.index) == ("a.b", (5, 3))
    assert parse_element("a.b").index is None
    for text in ("a[1", "a[x]", "a[]", "[1]", "a b[1]", "a[1:2]", "a[1][2]"):
        with pytest.raises(InputError, match="write"):
            parse_element(text)


# --- doctor


def test_doctor_reports_versions_devices_and_transports(run: Run) -> None:
    outcome = run("doctor", "--json")
    report = outcome.json
    assert (outcome.code, outcome.err) == (0, "")
    packages = {package["name"]: package for package in report["packages"]}
    assert packages["numpy"]["version"] and packages["torch"]["version"]
    assert set(packages) >= {
        "megatron-core",
        "megatron-bridge",
        "transformer-engine",
        "vllm",
        "nccl4py",
        "cuda-core",
        "cuda-bindings",
    }
    transports = {transport["name"]: transport for transport in report["transports"]}
    assert transports["gloo"]["ok"] and set(transports) >= {"direct", "nccl", "golden"}
    assert all(transport["reason"] for transport in transports.values() if not transport["ok"])
    assert report["cuda"]["available"] or report["cuda"]["reason"]
    text = run("doctor").out
    assert "gloo" in text and "validate" in text
    assert ("from a clone: pip install '.[fp8]'" in text) == (packages["transformer-engine"]["version"] is None)


# --- the process itself


@pytest.mark.parametrize(
    ("argv", "forbidden"),
    [
        (["--version"], {"torch", "numpy", "rich", "megatron"}),
        (["plan", "--help"], {"torch", "numpy", "rich", "megatron"}),
        (["plan", *MOE], {"torch", "megatron", "transformers", "vllm"}),
        (["doctor"], {"megatron.core", "megatron.bridge", "transformers", "vllm", "transformer_engine"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_do_not_import_what_they_do_not_need(argv: list[str], forbidden: set[str]) -> None:
    code = (
        "import sys; from mcore_reshard.cli.main import main; assert main(sys.argv[1:]) == 0\n"
        f"found = {sorted(forbidden)!r}\nfound = [name for name in found if name in sys.modules]\n"
        "assert not found, found"
    )
    done = python(code, *argv)
    assert done.returncode == 0, done.stderr


def test_doctor_reports_that_torch_is_missing() -> None:
    code = """
import sys
class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden)
from mcore_reshard.cli.main import main
sys.exit(main(["doctor"]))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed" in done.stdout


def test_the_three_ways_to_start_it_agree() -> None:
    script = Path(sys.executable).with_name("mcore-reshard")
    ways = [[sys.executable, "-m", "mcore_reshard"], [sys.executable, "-m", "mcore_reshard.cli.main"]]
    ways += [[str(script)]] if script.exists() else []
    for way in ways:
        done = subprocess.run([*way, "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, f"mcore-reshard {__version__}\n")


def test_progress_shows_on_a_terminal_and_nowhere_else() -> None:
    command = [sys.executable, "-m", "mcore_reshard", "plan", *MOE]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert piped.stderr == "" and "\x1b" not in piped.stdout
    terminal, inside = pty.openpty()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=inside, timeout=60, env={**os.environ, "TERM": "xterm"}
    )
    os.close(inside)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "planning tiny-qwen3-moe" in shown
    assert done.stdout.decode().splitlines()[0] == piped.stdout.splitlines()[0]


def test_a_reader_that_leaves_early_is_no_error_message(plan_of: Any) -> None:
    command = f"{sys.executable} -m mcore_reshard show {plan_of(MOE)} --parameter '*' --json | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_help_of_every_command_shows_examples_that_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "show", "explain", "validate", "doctor"):
        shown = run(command, "--help")
        assert shown.code == 0 and "exit codes:" in shown.out
        examples = re.findall(rf"^  mcore-reshard ({command}.*)$", shown.out, re.MULTILINE)
        assert examples
        for example in examples:
            if command == "validate":  # takes a trainer to run; here its arguments only
                cli._parser().parse_args(shlex.split(example))
            else:
                assert run(*shlex.split(example)).code == 0
    assert "example" in run("--help").out


# --- validate


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny-llama"], "--train and --gen wanted"),
        (["tiny-llama", "--train", "tp=3", "--gen", "tp=2"], "8 attention heads cannot be divided by tp = 3"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--refits", "0"], "must be above zero"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--timeout", "nan"], "must be above zero, and finite"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--config", "x"], "--config goes with a plan file"),
        (["tiny-llama", "--train", "tp=2", "--gen", "tp=2", "--transport", "nccl"], "transport"),
    ],
)
def test_validate_checks_its_input_before_it_starts_anything(run: Run, arguments: list[str], expected: str) -> None:
    outcome = run("validate", *arguments, "--json")
    assert (outcome.code, outcome.out) == (2, "") and expected in outcome.err


def test_validate_holds_a_plan_to_what_it_says(run: Run, plan_of: Any) -> None:
    path = plan_of(MOE)
    outcome = run("validate", path, "--train", "tp=2", "--policy", "conservative", "--config", "tiny-llama")
    assert outcome.code == 2
    for expected in (
        "--train is tp=2,pp=1,ep=1,etp=1,cp=1,dp=1,vpp=1, the plan is for tp=2,pp=2,ep=2",
        "--policy is conservative, the plan follows exact",
        "the plan is of another model than tiny-llama",
    ):
        assert expected in outcome.err


def _needs_megatron() -> None:
    if find_spec("megatron") is None:
        pytest.skip("needs the megatron extra")


def validate_in_a_process(*argv: object) -> Outcome:
    """Ranks are forked; a process of its own keeps them clear of pytest's threads."""
    command = [sys.executable, "-m", "mcore_reshard", "validate", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_validate_compares_every_byte_of_a_plan_file(plan_of: Any) -> None:
    _needs_megatron()
    path = plan_of(["tiny-qwen3", "--train", "tp=2", "--gen", "tp=1"])
    outcome = validate_in_a_process(path, "--refits", 1, "--engine", "slices", "--json")
    assert outcome.code == 0, outcome.err
    report = outcome.json
    assert report["ok"] is True and report["digest"] == load_plan(path).digest
    assert all(row["mismatches"] == 0 for refit in report["refits"] for row in refit["parameters"])


def test_validate_says_that_it_leaves_a_quantized_checkpoint_unquantized() -> None:
    _needs_megatron()
    arguments = ("tiny-qwen3-fp8", "--train", "tp=1", "--gen", "tp=1", "--refits", 1, "--engine", "slices")
    outcome = validate_in_a_process(*arguments)
    assert outcome.code == 0, outcome.err
    assert "note: the checkpoint is quantized (fp8), the plan moves bfloat16 weights" in outcome.out


def test_validate_finds_a_plan_that_is_sound_and_wrong(plan_of: Any) -> None:
    """Two norms of one shape swapped at the source: no proof can see it, the comparison names the first element."""
    _needs_megatron()
    path = plan_of(["tiny-qwen3", "--train", "tp=1", "--gen", "tp=1"])
    swapped = {"q_layernorm": "k_layernorm", "k_layernorm": "q_layernorm"}
    document = json.loads(re.sub("[qk]_layernorm", lambda match: swapped[match[0]], path.read_text()))
    canonical = json.dumps(document["plan"], sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(document))
    outcome = validate_in_a_process(path, "--refits", 1, "--engine", "slices")
    assert outcome.code == 4
    assert "model.layers.0.self_attn.k_norm.weight" in outcome.err and "first [0]: got" in outcome.err
    assert "differ from golden" in outcome.out and "FAILED" in outcome.out
