"""Model parameters list the names, shapes and dtypes of transformers' own models, for every built-in config."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.parameters import ModelParameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
CONFIG_MAPPING = transformers.models.auto.configuration_auto.CONFIG_MAPPING
CONFIG_MAPPING_NAMES = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
try:
    from transformers.initialization import no_init_weights  # transformers 5
except ImportError:
    from transformers.modeling_utils import no_init_weights

Listing = Mapping[str, tuple[tuple[int, ...], str]]

# Kimi-K2's own modeling code is DeepSeek-V3's under another model_type; transformers knows only the latter.
TRANSFORMERS_TYPE = {"kimi_k2": "deepseek_v3"}


def listing(model_parameters: ModelParameters, with_mtp: bool = False) -> Listing:
    return {
        parameter.name: (parameter.group.shape, parameter.group.dtype)
        for parameter in model_parameters
        if with_mtp or not parameter.group.mtp
    }


def transformers_listing(config: dict[str, Any]) -> Listing:
    """The tensors of transformers' model for this config, built on the meta device, under checkpoint names."""
    family = config["model_type"]
    known = TRANSFORMERS_TYPE.get(family, family)
    if known not in CONFIG_MAPPING_NAMES:  # the library's own: Megatron-Bridge registers others where it is imported
        pytest.skip(f"transformers {transformers.__version__} has no {known}")
    fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    built = transformers.AutoConfig.for_model(known, **fields)
    with torch.device("meta"), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)
    model.tie_weights()
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    aliases -= {name for name, _ in model.named_parameters()}  # tied weights
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, tensor in model.state_dict().items():
        if name not in aliases:
            for checkpoint_name, shape in checkpoint_form(family, name, tuple(tensor.shape)):
                found[checkpoint_name] = (shape, checkpoint_dtype(checkpoint_name, tensor.dtype))
    return found


def checkpoint_form(family: str, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Checkpoint names and shapes of one in-memory tensor (transformers' own table: `conversion_mapping.py` of 5.x).

    Transformers 5 stacks experts, `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I]; 4 has a module for each. The
    checkpoints of gpt-oss are stacked too.
    """
    if family == "nemotron_h" and name.startswith("model."):
        name = "backbone." + name.removeprefix("model.")
    stem, _, leaf = name.rpartition(".experts.")
    if family == "gpt_oss" or leaf not in ("gate_up_proj", "up_proj", "down_proj"):
        yield name, shape
        return
    count, rows, columns = shape
    for expert in range(count):
        if leaf == "gate_up_proj":
            yield f"{stem}.experts.{expert}.gate_proj.weight", (rows // 2, columns)
            yield f"{stem}.experts.{expert}.up_proj.weight", (rows // 2, columns)
        else:
            yield f"{stem}.experts.{expert}.{leaf}.weight", (rows, columns)


def checkpoint_dtype(name: str, dtype: Any) -> str:
    """`from_config` casts everything; `from_pretrained` of 5.x leaves the router's bias in fp32, as the published
    checkpoints have it (`_keep_in_fp32_modules_strict`)."""
    if name.endswith("e_score_correction_bias"):
        return "float32"
    return str(dtype).removeprefix("torch.")


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Models of a hundred thousand modules are built in half the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_is_the_model_that_transformers_builds(name: str) -> None:
    config = load_config(name)
    assert listing(parameters_from_config(config)) == transformers_listing(config)


@pytest.mark.parametrize("name", builtin_names())
def test_a_config_that_transformers_wrote_is_read_as_the_one_it_was_given(name: str) -> None:
    config = load_config(name)
    if config["model_type"] not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {config['model_type']}")
    written = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_json_string(use_diff=False)
    assert parameters_from_config(json.loads(written)) == parameters_from_config(config)


VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama with every bias": ("tiny-llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without head_dim": ("tiny-llama", {"head_dim": None}),
    "llama with heads of another size": ("tiny-llama", {"head_dim": 16}),
    "llama with multi-head attention": ("tiny-llama", {"num_key_value_heads": None}),
    "mistral": ("tiny-llama", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}),
    "qwen2 tied": ("tiny-qwen2", {"tie_word_embeddings": True}),
    "qwen3 with a bias": ("tiny-qwen3", {"attention_bias": True}),
    "qwen3-moe with dense layers": ("tiny-qwen3-moe", {"mlp_only_layers": [0, 3]}),
    "qwen3-moe with experts in every second layer": ("tiny-qwen3-moe", {"decoder_sparse_step": 2}),
    "deepseek-v3 with a bias": ("tiny-deepseek-v3", {"attention_bias": True}),
    "deepseek-v3 without dense layers": ("tiny-deepseek-v3", {"first_k_dense_replace": 0}),
    "deepseek-v3 with two shared experts": ("tiny-deepseek-v3", {"n_shared_experts": 2}),
    "gpt-oss tied": ("tiny-gpt-oss", {"tie_word_embeddings": True}),
    "nemotron-h without experts": (
        "tiny-nemotron-h",
        {"hybrid_override_pattern": "M-M*-M*-", "n_routed_experts": None, "moe_intermediate_size": None},
    ),
    "nemotron-h with biases": (
        "tiny-nemotron-h",
        {"hybrid_override_pattern": "M-M*-M*-", "use_bias": True, "mlp_bias": True},
    ),
    "nemotron-h without a bias of the convolution": ("tiny-nemotron-h", {"use_conv_bias": False}),
    "nemotron-h with experts of a latent size": ("tiny-nemotron-h", {"moe_latent_size": 24}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_the_model_that_transformers_builds(variant: str) -> None:
    base, changes = VARIANTS[variant]
    config = {key: value for key, value in {**load_config(base), **changes}.items() if value is not None}
    assert listing(parameters_from_config(config)) == transformers_listing(config)
