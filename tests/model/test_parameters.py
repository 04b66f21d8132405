"""From configs to model parameters: what they list, how they are searched, and what is wrong with a bad config."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.planner.model.families import FAMILIES, ConfigError, as_published, parameters_from_config
from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup, Quantization, Role

PUBLISHED = {
    # elements without multi-token prediction, as their publishers (or the checkpoints' headers) count them
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}

# The tensors of model.layers.61 in the published DeepSeek-V3 checkpoint, as README_WEIGHTS.md of its repository lists
# them; experts are one entry.
DEEPSEEK_V3_MTP = {
    "embed_tokens.weight": (129280, 7168),
    "enorm.weight": (7168,),
    "hnorm.weight": (7168,),
    "eh_proj.weight": (7168, 14336),
    "shared_head.norm.weight": (7168,),
    "shared_head.head.weight": (129280, 7168),
    "input_layernorm.weight": (7168,),
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (24576, 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (32768, 512),
    "self_attn.o_proj.weight": (7168, 16384),
    "post_attention_layernorm.weight": (7168,),
    "mlp.gate.weight": (256, 7168),
    "mlp.gate.e_score_correction_bias": (256,),
    "mlp.experts.{expert}.gate_proj.weight": (2048, 7168),
    "mlp.experts.{expert}.up_proj.weight": (2048, 7168),
    "mlp.experts.{expert}.down_proj.weight": (7168, 2048),
    "mlp.shared_experts.gate_proj.weight": (2048, 7168),
    "mlp.shared_experts.up_proj.weight": (2048, 7168),
    "mlp.shared_experts.down_proj.weight": (7168, 2048),
}

# The tensors of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B by kind of layer: 23 of Mamba2, 6 of attention, 23 of experts.
# Names and sizes are those of modeling_nemotron_h.py in the checkpoint's repository.
NEMOTRON_3_NANO: dict[str, dict[str, tuple[int, ...]]] = {
    "M": {
        "norm.weight": (2688,),
        "mixer.in_proj.weight": (10304, 2688),
        "mixer.conv1d.weight": (6144, 1, 4),
        "mixer.conv1d.bias": (6144,),
        "mixer.A_log": (64,),
        "mixer.D": (64,),
        "mixer.dt_bias": (64,),
        "mixer.norm.weight": (4096,),
        "mixer.out_proj.weight": (2688, 4096),
    },
    "*": {
        "norm.weight": (2688,),
        "mixer.q_proj.weight": (4096, 2688),
        "mixer.k_proj.weight": (256, 2688),
        "mixer.v_proj.weight": (256, 2688),
        "mixer.o_proj.weight": (2688, 4096),
    },
    "E": {
        "norm.weight": (2688,),
        "mixer.gate.weight": (128, 2688),
        "mixer.gate.e_score_correction_bias": (128,),
        **{f"mixer.experts.{expert}.up_proj.weight": (1856, 2688) for expert in range(128)},
        **{f"mixer.experts.{expert}.down_proj.weight": (2688, 1856) for expert in range(128)},
        "mixer.shared_experts.up_proj.weight": (3712, 2688),
        "mixer.shared_experts.down_proj.weight": (2688, 3712),
    },
}


def group_of(model: ModelParameters, name: str) -> ParameterGroup:
    return next(parameter.group for parameter in model if parameter.name == name)


def built(name: str, **changes: Any) -> ModelParameters:
    return parameters_from_config({**load_config(name), **changes})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    model_parameters = built(name)
    assert _elements(group for group in model_parameters.groups if not group.mtp) == PUBLISHED[name]


def _elements(groups: Iterable[ParameterGroup]) -> int:
    return sum(group.count * prod(group.shape) for group in groups)


def test_deepseek_v3_lists_its_multi_token_prediction_layer_as_layer_61() -> None:
    model_parameters = built("deepseek-v3")
    mtp = [group for group in model_parameters.groups if group.mtp]
    prefix = "model.layers.{layer}."
    assert {group.name_pattern.removeprefix(prefix): group.shape for group in mtp} == DEEPSEEK_V3_MTP
    assert {group.layers for group in mtp} == {(61,)}
    assert model_parameters.architecture.layers == 61
    assert model_parameters.architecture.mtp_layers == 1
    # the checkpoint's own count, copies of embedding and head included
    assert _elements(model_parameters.groups) == 684_489_845_504
    assert group_of(model_parameters, "model.layers.61.shared_head.head.weight").role is Role.MTP_HEAD


def test_nemotron_3_nano_lists_the_tensors_of_its_checkpoint() -> None:
    config = load_config("nemotron-3-nano-30b-a3b")
    expected = {
        "backbone.embeddings.weight": (131072, 2688),
        "backbone.norm_f.weight": (2688,),
        "lm_head.weight": (131072, 2688),
    }
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        expected |= {f"backbone.layers.{layer}.{name}": shape for name, shape in NEMOTRON_3_NANO[kind].items()}
    found = {parameter.name: parameter.group for parameter in parameters_from_config(config)}
    assert {name: group.shape for name, group in found.items()} == expected
    assert {name for name, group in found.items() if group.dtype != "bfloat16"} == {
        name for name in expected if name.endswith("e_score_correction_bias")
    }


def test_nemotron_h_reads_both_ways_of_writing_its_layers() -> None:
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    old = load_config("tiny-nemotron-h")
    new = {**old, "layers_block_type": [kinds[letter] for letter in old["hybrid_override_pattern"]]}
    del new["hybrid_override_pattern"]
    assert parameters_from_config(new) == parameters_from_config(old)


def test_qwen3_moe_as_transformers_5_writes_it_is_read_like_the_published_one() -> None:
    config = load_config("tiny-qwen3-moe")
    written = {"num_local_experts" if name == "num_experts" else name: value for name, value in config.items()}
    assert parameters_from_config(written) == parameters_from_config(config)
    assert as_published(written) == config
    assert as_published({**config, "num_local_experts": 3})["num_experts"] == config["num_experts"]


def test_norms_are_known_by_what_follows_them() -> None:
    dense_first = {
        group.role: group.layers for group in built("tiny-deepseek-v3").groups if "norm" in group.name_pattern
    }
    assert dense_first[Role.ATTENTION_NORM] == (0, 1, 2, 3)
    assert dense_first[Role.MLP_NORM] == (0,)
    assert dense_first[Role.MOE_NORM] == (1, 2, 3)
    hybrid = [group for group in built("tiny-nemotron-h").groups if group.name_pattern.endswith("{layer}.norm.weight")]
    assert {group.role: group.layers for group in hybrid} == {
        Role.MAMBA_NORM: (0, 2, 5),
        Role.ATTENTION_NORM: (1, 6),
        Role.MLP_NORM: (4,),
        Role.MOE_NORM: (3, 7),
    }


def test_groups_gather_all_that_differs_in_number_only() -> None:
    model_parameters = built("qwen3-235b-a22b")
    assert sum(group.count for group in model_parameters.groups) == 36_945
    assert len(model_parameters.groups) == 15
    gates = group_of(model_parameters, "model.layers.0.mlp.experts.0.gate_proj.weight")
    assert (gates.count, gates.shape, gates.role) == (94 * 128, (1536, 4096), Role.EXPERT_GATE)
    biases = group_of(built("tiny-qwen2"), "model.layers.3.self_attn.q_proj.bias")
    assert (biases.layers, biases.shape, biases.role) == ((0, 1, 2, 3), (64,), Role.Q_BIAS)


def test_gpt_oss_regions_refer_to_a_view_that_sets_gate_and_up_apart() -> None:
    model_parameters = built("tiny-gpt-oss")
    stacked = group_of(model_parameters, "model.layers.2.mlp.experts.gate_up_proj")
    assert (stacked.shape, stacked.view) == ((8, 64, 96), (8, 64, 48, 2))
    bias = group_of(model_parameters, "model.layers.2.mlp.experts.gate_up_proj_bias")
    assert (bias.shape, bias.view) == ((8, 96), (8, 48, 2))


def test_parameters_that_no_layout_rule_knows_are_listed_as_such() -> None:
    unknown = [group.name_pattern for group in built("tiny-llama", mlp_bias=True).groups if group.role is Role.UNKNOWN]
    assert unknown == [f"model.layers.{{layer}}.mlp.{name}_proj.bias" for name in ("gate", "up", "down")]


@pytest.mark.parametrize("name", builtin_names())
def test_every_parameter_has_a_name_of_its_own(name: str) -> None:
    model_parameters = built(name)
    seen = Counter(parameter.name for parameter in model_parameters)
    assert len(seen) == sum(group.count for group in model_parameters.groups)
    assert max(seen.values()) == 1


def test_the_dtype_is_the_configs() -> None:
    assert built("tiny-qwen3", torch_dtype="float16").dtype == "float16"
    assert built("tiny-qwen3", torch_dtype=None, dtype="torch.float32").groups[0].dtype == "float32"
    assert built("gpt-oss-20b").dtype == "bfloat16"  # its config names none
    assert group_of(built("tiny-kimi-k2"), "model.layers.1.mlp.gate.e_score_correction_bias").dtype == "float32"


@pytest.mark.parametrize(
    ("ignored", "not_to_convert", "kept"),
    [(["a"], ["b"], ("a",)), ([], ["b"], ("b",)), (None, ["b"], ("b",)), (["a"], None, ("a",)), ([], [], ())],
)
def test_of_two_lists_of_modules_that_stay_the_one_counts_that_vllm_reads(
    ignored: Any, not_to_convert: Any, kept: tuple[str, ...]
) -> None:
    stated = {"quant_method": "fp8", "ignored_layers": ignored, "modules_to_not_convert": not_to_convert}
    found = built("tiny-qwen3", quantization_config=stated).quantization
    assert found is not None and found.not_converted == kept


def test_without_blocks_activations_may_be_static() -> None:
    stated = {"quant_method": "fp8", "activation_scheme": "static"}
    assert built("tiny-qwen3", quantization_config=stated).quantization == Quantization("fp8")


def test_quantized_checkpoints_are_listed_as_before_and_say_how_they_are_stored() -> None:
    assert built("tiny-llama").quantization is None
    assert built("deepseek-v3").quantization == Quantization("fp8", (128, 128))
    mxfp4 = built("gpt-oss-20b").quantization
    assert mxfp4 is not None
    assert mxfp4.method == "mxfp4"
    assert mxfp4.not_converted == (
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    )
    assert {group.dtype for group in built("gpt-oss-20b").groups} == {"bfloat16"}


BAD: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "fields missing and ill-typed": (
        "tiny-llama",
        {"hidden_size": None, "vocab_size": "256", "intermediate_size": 0, "tie_word_embeddings": "no"},
        [
            "hidden_size is null, an integer is needed",
            "vocab_size is '256', an integer is needed",
            "intermediate_size is 0, at least 1 is needed",
            "tie_word_embeddings is 'no', true or false is needed",
        ],
    ),
    "beyond what can be planned": (
        "tiny-llama",
        {"hidden_size": 10**30, "num_hidden_layers": 10**7},
        [
            f"hidden_size is {10**30}, no more than 16,777,216 is supported",
            "num_hidden_layers is 10000000, no more than 4,096 is supported",
        ],
    ),
    "heads": (
        "tiny-llama",
        {"num_attention_heads": 7, "head_dim": None},
        [
            "num_attention_heads 7 is not divisible by num_key_value_heads 4",
            "hidden_size 64 is not divisible by num_attention_heads 7, and there is no head_dim",
        ],
    ),
    "no head size to derive": ("tiny-qwen3", {"head_dim": None}, ["head_dim is null, an integer is needed"]),
    "dtypes": (
        "tiny-qwen3",
        {"dtype": "float16", "quantization_config": {"weight_block_size": [128]}},
        [
            "dtype and torch_dtype differ: bfloat16 and float16",
            "quantization_config: quant_method is missing",
            "quantization_config: weight_block_size is (128,), two sizes are needed",
        ],
    ),
    "activations that vLLM quantizes in no block": (
        "tiny-qwen3",
        {
            "hidden_size": 0,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "static",
                "weight_block_size": [128, 128, 1],
            },
        },
        [
            "hidden_size is 0, at least 1 is needed",
            "quantization_config: weight_block_size is (128, 128, 1), two sizes are needed",
            "quantization_config: activation_scheme is 'static', and block-wise quantization only supports dynamic"
            " activation: vLLM refuses it",
        ],
    ),
    "blocks that no plan could hold": (
        "tiny-qwen3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 1 << 50]}},
        ["quantization_config: weight_block_size is (128, 1125899906842624), no more than 16,777,216 is supported"],
    ),
    "dense layers that are not there": (
        "tiny-qwen3-moe",
        {"mlp_only_layers": [1, 4], "num_experts": True},
        [
            "num_experts is True, an integer is needed",
            "mlp_only_layers names [4], the model has layers 0-3",
        ],
    ),
    "deepseek": (
        "tiny-deepseek-v3",
        {"first_k_dense_replace": 5, "moe_layer_freq": 2, "num_key_value_heads": 4, "kv_lora_rank": 1.5},
        [
            "first_k_dense_replace 5 exceeds num_hidden_layers 4",
            "moe_layer_freq is 2; only 1 is known (transformers ignores others)",
            "num_key_value_heads 4 is not num_attention_heads 8: latent attention has one k and v a head",
            "kv_lora_rank is 1.5, an integer is needed",
        ],
    ),
    "hybrid pattern": (
        "tiny-nemotron-h",
        {"hybrid_override_pattern": "M*ME-M*", "n_groups": 3, "n_shared_experts": 2},
        [
            "num_hidden_layers is 8, the pattern has 7",
            "mamba_num_heads 8 is not divisible by n_groups 3",
            "n_shared_experts is 2: transformers and vLLM give them different widths",
        ],
    ),
    "hybrid kinds": (
        "tiny-nemotron-h",
        {"hybrid_override_pattern": "M*XE-M*E", "layers_block_type": ["moe"] * 8, "num_nextn_predict_layers": 1},
        [
            "layer kinds ['X'] are not known, these are: ['M', '*', '-', 'E']",
            "multi-token prediction is not known here; num_nextn_predict_layers 0 plans the model without it",
        ],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_is_refused_with_all_that_is_wrong(case: str) -> None:
    base, changes, problems = BAD[case]
    with pytest.raises(ConfigError) as caught:
        built(base, **changes)
    assert list(caught.value.problems) == problems
    assert all(problem in str(caught.value) for problem in problems)


def test_an_absent_field_is_called_missing() -> None:
    config = load_config("tiny-deepseek-v3")
    del config["q_lora_rank"], config["vocab_size"]
    with pytest.raises(ConfigError) as caught:
        parameters_from_config(config)
    assert list(caught.value.problems) == [
        "vocab_size is missing",
        "q_lora_rank is missing (null where the model has none)",
    ]


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-nemotron-h", "tiny-gpt-oss"])
def test_a_missing_field_is_not_taken_for_another_one_of_the_model(name: str) -> None:
    """qk_nope_head_dim is not a misspelled qk_rope_head_dim, nor the router's n_group Mamba's n_groups."""
    config, refused = load_config(name), set()
    for field in config:
        try:
            parameters_from_config({other: value for other, value in config.items() if other != field})
        except ConfigError as error:
            refused.add(field)
            assert "did you mean" not in str(error)
    assert len(refused) > 5


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("tiny-llama", "num_key_value_heads", "num_key_value_head"),
        ("tiny-llama", "head_dim", "hed_dim"),
        ("tiny-llama-tied", "tie_word_embeddings", "tie_word_embedding"),
        ("tiny-qwen3", "attention_bias", "atention_bias"),
        ("tiny-qwen3-moe", "mlp_only_layers", "mlp_only_layer"),
        ("tiny-qwen3-moe", "decoder_sparse_step", "decoder_sparse_steps"),
        ("tiny-qwen3-fp8", "quantization_config", "quantisation_config"),
        ("tiny-deepseek-v3", "num_nextn_predict_layers", "num_nextn_predict_layer"),
        ("tiny-nemotron-h", "use_conv_bias", "use_conv_bais"),
    ],
)
def test_a_misspelled_field_does_not_pass_for_a_default(name: str, right: str, wrong: str) -> None:
    config: dict[str, Any] = {right: None, **load_config(name)}
    config[wrong] = config.pop(right)
    with pytest.raises(ConfigError) as caught:
        parameters_from_config({**config, "vocab_size": "many"})
    assert list(caught.value.problems) == [
        "vocab_size is 'many', an integer is needed",
        f"unknown field {wrong!r}: is {right!r} meant?",
    ]


def test_a_misspelled_field_of_the_quantization_is_one_of_the_problems() -> None:
    config = load_config("tiny-qwen3-fp8")
    stated = dict(config["quantization_config"])
    stated["weight_block_sizes"] = stated.pop("weight_block_size")
    with pytest.raises(ConfigError, match="unknown field 'weight_block_sizes': is 'weight_block_size' meant"):
        parameters_from_config({**config, "quantization_config": stated})


@pytest.mark.parametrize("name", builtin_names())
def test_no_field_that_transformers_writes_is_taken_for_a_misspelled_one(name: str) -> None:
    """Whichever other field is absent."""
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    config = load_config(name)
    family = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    written = mapping[family]().to_dict() if family in mapping else {}
    everything = {**written, "mtp_hybrid_override_pattern": "*E", **config}
    for absent in [None, *everything]:
        try:
            parameters_from_config({field: value for field, value in everything.items() if field != absent})
        except ConfigError as error:
            assert "meant?" not in str(error) and "did you mean it" not in str(error)


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-gpt-oss", "tiny-nemotron-h"])
def test_key_value_heads_are_guessed_for_llama_alone(name: str) -> None:
    config = load_config(name)
    del config["num_key_value_heads"]
    with pytest.raises(ConfigError) as caught:
        parameters_from_config(config)
    assert list(caught.value.problems) == ["num_key_value_heads is missing"]
    parameters_from_config({**config, "num_key_value_heads": None})


def test_a_misspelled_field_is_asked_about_wherever_it_is_missed() -> None:
    for name, right, wrong in (
        ("tiny-deepseek-v3", "q_lora_rank", "q_lora_rnk"),
        ("tiny-nemotron-h", "hybrid_override_pattern", "hybrid_overide_pattern"),
        ("tiny-llama", "model_type", "modeltype"),
    ):
        config = load_config(name)
        config[wrong] = config.pop(right)
        with pytest.raises(ConfigError, match=rf"{right} is missing.*; did you mean it by '{wrong}'\?"):
            parameters_from_config(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "qwen3moe"}, "did you mean qwen3_moe"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not known"),
        (
            {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}},
            "model_type 'kimi_k25' is not known: no multimodal model has layout rules. Its text_config alone will not do",
        ),
    ],
)
def test_an_unknown_family_is_refused_with_those_known(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parameters_from_config(config)
    assert expected in str(caught.value)
    assert all(family in str(caught.value) for family in FAMILIES)


def test_configs_load_from_a_file_a_folder_or_by_name(tmp_path: Path) -> None:
    config = load_config("tiny-llama")
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    assert load_config(tmp_path)["vocab_size"] == 512
    assert load_config(str(tmp_path / "config.json"))["vocab_size"] == 512
    config["vocab_size"] = 1
    assert load_config("tiny-llama")["vocab_size"] == 256


@pytest.mark.parametrize(
    ("content", "expected"), [("{", "not readable as JSON"), ("[1]", "holds a JSON list, not an object")]
)
def test_a_malformed_config_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path)


def test_a_config_that_is_not_there_is_refused_with_the_built_in_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean olmoe-1b-7b \(by plan --traced\) or llama-3\.1-8b\?"):
        load_config("olmo-1b-8b")  # without --traced olmoe-1b-7b would be refused: no layout rules know it
    with pytest.raises(ConfigError, match=r"did you mean deepseek-v3.*\n.*built-in configs: deepseek-v3, gpt-oss-120b"):
        load_config("DeepSeek-V3.1")
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        load_config(tmp_path)


def test_the_parameters_of_deepseek_v3_take_under_20_ms() -> None:
    config = load_config("deepseek-v3")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        parameters_from_config(config)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.020


def test_parameters_need_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, mcore_reshard.planner, mcore_reshard.planner.model.parameters\n"
        "from mcore_reshard.planner.model.configs import builtin_names, load_config\n"
        "from mcore_reshard.planner.model.families import parameters_from_config\n"
        "for name in builtin_names(): parameters_from_config(load_config(name))\n"
        "print([name for name in ('torch', 'megatron', 'transformers', 'vllm') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
