"""The verdict on live refits finds whatever is not as in the engine that loaded the checkpoint."""

from __future__ import annotations

import copy
import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from live.cases import PLACES, REFIT_WORKER, WEIGHT_TRANSFER, Case, cases_on
from live.checkpoints import dequantized, engine_folder, rounded_to_fp8, trainer_folder, write_checkpoints
from live.launch import write_entry_point
from live.verdict import judge
from live.whole_model import speeds
from pages import live
from safetensors.torch import load_file, save_file

from mcore_reshard.integrations.vllm_plugin import BACKEND, register
from mcore_reshard.kernels.copies.cast_arithmetic import quantized
from mcore_reshard.planning import read_request
from mcore_reshard.trainers.quantized_export import pairs_by_name
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.trainer.build import prepare
from mcore_reshard.validation.trainer.te_standin_modules import Float8BlockwiseQTensor


def answers(first: int, logprob: float) -> list[dict[str, Any]]:
    return [{"tokens": [first, 7], "logprobs": [logprob, -0.5], "cached_tokens": 0}]


def engines() -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A refitted engine without a fault, and those that loaded checkpoints 1 and 2."""
    loaded = {
        number: {
            "sums": {"0:lm_head.weight": number, "0:norm.weight": 10 + number},
            "answers": answers(number, -0.1 * number),
            "again": answers(number, -0.1 * number),
        }
        for number in (1, 2)
    }
    told = {"transport": "direct", "nbytes": 4, "misc_bytes": 0, "seconds": 0.01}
    refits = [{**copy.deepcopy(loaded[number]), **told} for number in (1, 2, 1)]
    return {"kernels": {}, "before": answers(9, -3.0), "refits": refits}, loaded


def test_an_engine_that_is_alike_has_no_problems() -> None:
    verdict = judge("eager", *engines())
    assert verdict["problems"] == []
    assert [row["equal_logprobs"] for row in verdict["refits"]] == [1, 1, 1]
    assert [row["tensors"] for row in verdict["refits"]] == [2, 2, 2]


def other_bytes(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][1]["sums"]["0:norm.weight"] += 1


def missing_tensor(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    del refitted["refits"][2]["sums"]["0:norm.weight"]


def more_tensors(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][0]["sums"]["1:norm.weight"] = 5


def other_tokens(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][1]["answers"][0]["tokens"][1] = 8


def other_logprobs(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    for number in (0, 2):
        refitted["refits"][number]["answers"][0]["logprobs"][1] += 1e-7


def answers_do_not_come_back(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][2]["answers"][0]["logprobs"][0] -= 0.01


def equal_checkpoints(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    for engine in (loaded[2], refitted["refits"][1]):
        engine["answers"] = engine["again"] = loaded[1]["answers"]


def unsteady_engine(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    loaded[1]["again"] = answers(1, -0.2)


def random_weights_that_answer_alike(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["before"] = loaded[2]["answers"]


def stale_cache(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][1]["from_cache"] = copy.deepcopy(refitted["refits"][1]["answers"])
    refitted["refits"][1]["answers"][0]["cached_tokens"] = 32
    refitted["refits"][1]["from_cache"][0]["cached_tokens"] = 32


def unused_cache(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][2]["from_cache"] = refitted["refits"][2]["answers"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (other_bytes, "refit 2: 1 tensors have other bytes, first 0:norm.weight"),
        (missing_tensor, "refit 3: 1 tensors have other bytes"),
        (more_tensors, "refit 1: 1 tensors have other bytes, first 1:norm.weight"),
        (other_tokens, "refit 2: 1 of 1 answers have other tokens"),
        (other_logprobs, "refit 1: 1 of 1 answers have other log-probabilities"),
        (answers_do_not_come_back, "the answers after the last refit are not those after the first"),
        (equal_checkpoints, "the checkpoints give the same answers"),
        (unsteady_engine, "the engine that loaded checkpoint 1 answers differently the second time"),
        (stale_cache, "refit 2: 32 tokens of its prompts came from the cache of before"),
        (unused_cache, "refit 3: the prefix cache was not used"),
        (random_weights_that_answer_alike, "random weights answer as checkpoint 2 does"),
    ],
)
def test_each_damage_is_named(damage: Any, problem: str) -> None:
    refitted, loaded = engines()
    damage(refitted, loaded)
    assert any(text.startswith(problem) for text in judge("eager", refitted, loaded)["problems"])


def test_engines_that_compile_may_differ_in_logprobs_but_not_in_what_comes_back() -> None:
    refitted, loaded = engines()
    other_logprobs(refitted, loaded)
    verdict = judge("graphs", refitted, loaded)
    assert verdict["problems"] == []
    assert verdict["refits"][0]["largest_difference"] == pytest.approx(1e-7)


def test_a_prefix_cache_that_was_reset_and_is_used_again_has_no_problems() -> None:
    refitted, loaded = engines()
    for after in refitted["refits"]:
        after["from_cache"] = [{**answer, "cached_tokens": 32} for answer in after["answers"]]
    assert judge("eager", refitted, loaded)["problems"] == []


def test_every_case_has_a_name_of_its_own() -> None:
    cases = cases_on(1) + cases_on(2)
    assert len({case.name for case in cases}) == len(cases)
    assert {PLACES[case.place].gpus for case in cases} == {1, 2}
    assert {case.door for case in cases} == {REFIT_WORKER, WEIGHT_TRANSFER}
    assert "fp8" not in {case.train_dtype for case in cases_on(1, fp8_trainers=False)}


def test_a_checkout_that_is_not_installed_shows_vllm_its_plug_in(tmp_path: Path) -> None:
    write_entry_point(tmp_path)
    (found,) = (found for found in distributions(path=[str(tmp_path)]))
    assert {point.name: point.load() for point in found.entry_points} == {BACKEND: register}


def test_tokens_per_second_are_told_apart_by_what_overlaps_a_refit() -> None:
    """Steps of 10 ms, and of 20 ms while a refit runs; the last step of another batch counts for nothing."""
    starts = [0.00, 0.01, 0.02, 0.04, 0.06, 0.07]
    steps = [*((start, 4) for start in starts), (0.08, 2), (0.5, 4)]
    without, during = speeds(steps, [(0.02, 0.06)], batch=4)
    assert without == pytest.approx(400)
    assert during == pytest.approx(200)
    _, half = speeds([(0.0, 4), (0.02, 4), (0.04, 1)], [(0.01, 0.02)], batch=4)
    assert half == pytest.approx(200)


def test_a_run_without_refits_gives_no_speeds() -> None:
    with pytest.raises(ValueError, match="both beside refits and without"):
        speeds([(0.0, 4), (0.01, 4)], [], batch=4)


# --- checkpoints of FP8 trainers

BLOCK = (128, 128)


def weights() -> torch.Tensor:
    """bfloat16 [384, 300], whose blocks differ in size, and whose last ones are cut off."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(384, 300, generator=generator) / 20
    values[:128] *= 0.003
    return values.to(torch.bfloat16)


def by_transformer_engine(weight: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As quantize_transpose_square_blockwise.cu of 2.11: the factor is 448 / amax, rounded down or not."""
    rows, columns = weight.shape
    data, scales = torch.empty(weight.shape), torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            place = (slice(down * 128, down * 128 + 128), slice(across * 128, across * 128 + 128))
            factor = 448.0 / weight[place].abs().amax().float()
            if power_of_two:
                factor = (factor.view(torch.int32) & 0x7F800000).view(torch.float32)
            data[place], scales[down, across] = weight[place].float() * factor, 1.0 / factor
    return data.to(torch.float8_e4m3fn), scales


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    "quantizer",
    [
        lambda weight: quantized(weight, BLOCK),
        lambda weight: by_transformer_engine(weight, power_of_two=True),
        lambda weight: by_transformer_engine(weight, power_of_two=False),
    ],
)
def test_every_quantizer_makes_the_same_bytes_of_rounded_weights_and_others_of_the_original_ones(
    quantizer: Any,
) -> None:
    data, scales = rounded_to_fp8(weights(), BLOCK)
    rounded = dequantized(data, scales, BLOCK)
    again, scales_again = quantizer(rounded)
    assert same_bytes(again, data) and torch.equal(scales_again, scales)
    original, scales_of_original = quantizer(weights())
    assert not (same_bytes(original, data) and torch.equal(scales_of_original, scales))


def test_rounded_weights_are_near_and_pass_through_the_stand_ins_tensor_unchanged() -> None:
    data, scales = rounded_to_fp8(weights(), BLOCK)
    rounded = dequantized(data, scales, BLOCK)
    assert torch.equal(
        rounded.float(), data.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :300]
    )
    error = (rounded.float() - weights().float()).norm() / weights().float().norm()
    assert 0 < error < 0.1
    kept = Float8BlockwiseQTensor.of(rounded, BLOCK)
    assert same_bytes(kept._rowwise_data, data) and torch.equal(kept._rowwise_scale_inv[:, :3], scales)
    assert torch.equal(kept.dequantize(), rounded)


def wrong_names(rank: int, case: Case, root: Path) -> list[str]:
    """What a real Megatron model of the case holds otherwise than the folder that an engine loads."""
    import torch.distributed as dist

    from mcore_reshard.validation.precision import side_precisions
    from mcore_reshard.validation.trainer.build import build_trainer

    dist.init_process_group("gloo", store=dist.FileStore(str(root / "world")), rank=rank, world_size=1)
    request = read_request(case.config, case.train, case.gen, train_dtype=case.train_dtype, gen_dtype=case.gen_dtype)
    model = build_trainer(
        trainer_folder(root, case, 1),
        case.train,
        fp8_block=side_precisions(request).trainer_block,
        pairs=pairs_by_name(request.plan()),
    )
    exported, loaded = dict(model.export()), load_file(engine_folder(root, case, 1) / "model.safetensors")
    wrong = {
        name for name in exported.keys() & loaded.keys() if not torch.equal(*map(bits, (exported[name], loaded[name])))
    }
    return sorted(wrong | exported.keys() ^ loaded.keys())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.long
def test_a_real_trainer_in_fp8_holds_the_bytes_that_its_engine_loads(tmp_path: Path) -> None:
    pytest.importorskip("megatron", reason="needs the megatron extra")
    case = Case("qwen3", gen_dtype="fp8", train_dtype="fp8")
    write_checkpoints(tmp_path, case, torch.device("cpu"))
    prepare()
    (wrong,) = run_processes(1, wrong_names, (case, tmp_path), timeout_s=120.0)
    assert wrong == []
    file = engine_folder(tmp_path, case, 1) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight_scale_inv"][0, 0] *= 2
    save_file(tensors, file)
    (tmp_path / "world").unlink()
    (wrong,) = run_processes(1, wrong_names, (case, tmp_path), timeout_s=120.0)
    assert wrong == ["model.layers.0.mlp.down_proj.weight_scale_inv"]


# --- pages


def whole_file(folder: Path, in_flight: list[dict[str, Any]], hardware: str = "2 x NVIDIA H200") -> Path:
    row = {"transport": "direct", "bytes": 10**9, "misc_bytes": 0, "wrong_parameters": 0, "prepare_s": 1.0, "first_ms": 5.0,
           "ms": 4.0, "called_ms": 6.0}  # fmt: skip
    report = {"model": "a-model", "date": "2026-01-02", "hardware": hardware, "versions": {"vllm": "0"}, "whole": [row],
              "in_flight": in_flight}  # fmt: skip
    file = folder / "live-whole-x2.json"
    file.write_text(json.dumps(report))
    return file


IN_FLIGHT = [
    {"ctas": 132, "tokens_per_s_without": 2000, "tokens_per_s_during": 500, "refit_ms": 200.4, "refits": 3},
    {"ctas": 8, "tokens_per_s_without": 2000, "tokens_per_s_during": 1500, "refit_ms": 400.0, "refits": 2},
]


def test_the_page_says_what_was_not_measured_until_the_data_has_it(tmp_path: Path) -> None:
    whole_file(tmp_path, [])
    assert "not measured" in live.in_flight_section(tmp_path)
    assert "figures/" not in live.in_flight_section(tmp_path)
    assert "Not measured: the same by `nccl`." in live.whole_section(tmp_path)
    whole_file(tmp_path, IN_FLIGHT)
    text = live.in_flight_section(tmp_path)
    assert "not measured" not in text and "(figures/in-flight.svg)" in text
    assert text.splitlines()[-2:] == [
        "| 8 | 2,000 | 1,500 | 75% | 400.0 ms | 2 |",
        "| 132 | 2,000 | 500 | 25% | 200.4 ms | 3 |",
    ]


def test_the_figure_has_a_point_for_each_number_of_ctas_at_the_height_of_its_speed(tmp_path: Path) -> None:
    drawn = live.in_flight_chart(whole_file(tmp_path, IN_FLIGHT))
    for x, y in (("113.9", 105), ("640", 215)):  # 8 and 132 of 132 in 80..640; 1500 and 500 of 2000 from 270 up to 50
        assert f'<circle class="blue" cx="{x}" cy="{y}"' in drawn
    assert drawn.count('<circle class="gray"') == 3  # two points without refits, and the legend
    assert ">8</text>" in drawn and ">132</text>" in drawn and ">400</text>" in drawn and ">2,000</text>" in drawn


def test_the_headline_names_the_gpu_of_the_data(tmp_path: Path) -> None:
    whole_file(tmp_path, [], "2 x NVIDIA H100 80GB HBM3")
    assert "engine on another H100 80GB HBM3, by `direct`" in live.whole_headline(tmp_path)


def test_the_table_of_sessions_names_the_transformer_engine_and_lists_the_cases_that_did_not_run(
    tmp_path: Path,
) -> None:
    refit = {"tensors": 2, "wrong_tensors": 0, "answers": 5, "equal_tokens": 5, "equal_logprobs": 5}
    common = {
        "model": "qwen3",
        "mode": "eager",
        "place": "one GPU",
        "transport": "direct",
        "problems": [],
        "refits": [refit],
    }
    cases = [
        {**common, "gen_dtype": "bf16"},  # as a file has it that knew no other trainers
        {**common, "gen_dtype": "fp8", "train_dtype": "fp8", "transformer_engine": "transformer-engine 2.11.0"},
    ]
    report = {"date": "2026-01-02", "hardware": "1 x A", "versions": {"vllm": "0"}, "cases": cases}
    (tmp_path / "live-x1.json").write_text(json.dumps(report))
    text = live.live_section(tmp_path)
    assert "| Qwen3 | BF16 -> BF16 | one GPU | `direct` | eager | RefitWorker | stand-in | 1 |" in text
    assert "| Qwen3 | FP8 -> FP8 | one GPU | `direct` | eager | RefitWorker | 2.11.0 | 1 |" in text
    missing = text.partition("Not run:")[2]
    assert "- Qwen3, BF16 -> BF16, one GPU, `direct`, graphs, RefitWorker" in missing
    assert "- Qwen3, FP8 -> FP8, one GPU, `direct`, eager, RefitWorker" not in missing
    assert "- Qwen3, BF16 -> BF16, one GPU, `direct`, eager, weight transfer, sleep" in missing
