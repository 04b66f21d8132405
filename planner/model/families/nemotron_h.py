"""Nemotron-H and Nemotron-3-Nano: one mixer a layer, Mamba2, attention, MLP or experts, none of them gated.

Names are the published checkpoints' (`backbone.`). Shapes mirror `modeling_nemotron_h.py`, that of the checkpoints and
that of transformers 5, which calls the backbone `model` and stacks the experts in memory.

The published Nemotron-3-Nano stores `gate.weight` in fp32, Nemotron-3-Super in bf16, and no field of the config says
which. This function lists the config's dtype, in which transformers 5 and Megatron-Core hold it.
"""

from __future__ import annotations

from collections.abc import Iterator

from mcore_reshard.planner.model.config_reader import ConfigReader, read_attention
from mcore_reshard.planner.model.parameters import Mamba, ModelParameters, ParameterGroup, Role

from .blocks import EXPERT, SHARED, Layers, attention, framed, mlp, read_model

# layers_block_type of transformers 5, and its older names, by letter of hybrid_override_pattern
_KINDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
_LETTERS = "M*-E"


def nemotron_h(reader: ConfigReader) -> ModelParameters:
    """`hybrid_override_pattern` (M, *, -, E) or `layers_block_type` gives the kind of each layer.

    The config may lack the sizes of a kind of layer that the model does not have.
    """
    hidden, vocab = reader.size("hidden_size"), reader.size("vocab_size")
    pattern = _read_pattern(reader)
    heads = read_attention(reader, hidden, alias="attention_head_dim")
    mamba = _read_mamba(reader) if "M" in pattern else None
    width = reader.size("intermediate_size") if "-" in pattern else 0
    mamba_bias, mlp_bias = reader.flag("use_bias"), reader.flag("mlp_bias")
    experts, latent = _read_experts(reader, mlp_bias) if "E" in pattern else ({}, 0)
    conv_bias, attention_bias = reader.flag("use_conv_bias", default=True), reader.flag("attention_bias")
    reader.check(
        reader.size("num_nextn_predict_layers", minimum=0, default=0) == 0,
        "multi-token prediction is not known here; num_nextn_predict_layers 0 plans the model without it",
    )
    model = read_model(
        reader,
        hidden,
        vocab,
        layers=len(pattern),
        attention=heads,
        intermediate=width,
        gated=False,
        mamba=mamba,
        **experts,
    )
    layers = {
        letter: Layers(model, [n for n, kind in enumerate(pattern) if kind == letter], "backbone.layers.{layer}")
        for letter in _LETTERS
    }
    groups = (
        *layers["M"].norm("norm", Role.MAMBA_NORM),
        *(_mamba(layers["M"], mamba, mamba_bias, conv_bias) if mamba else ()),
        *layers["*"].norm("norm", Role.ATTENTION_NORM),
        *attention(layers["*"], heads, "mixer", qkv_bias=attention_bias, o_bias=attention_bias),
        *layers["-"].norm("norm", Role.MLP_NORM),
        *mlp(layers["-"], width, "mixer", bias=Role.UNKNOWN if mlp_bias else None),
        *layers["E"].norm("norm", Role.MOE_NORM),
        *_mixture(layers["E"], latent),
    )
    return framed(model, groups, "backbone.embeddings.weight", "backbone.norm_f.weight")


def _read_pattern(reader: ConfigReader) -> str:
    """One letter a layer, however the config writes it; empty where it is wrong."""
    pattern, kinds = reader.typed("hybrid_override_pattern", str), reader.items("layers_block_type", str)
    if not pattern and not kinds:
        reader.note_missing("hybrid_override_pattern", " (layers_block_type would do as well)")
        return ""
    strange = sorted(set(pattern or "") - set(_LETTERS)) + sorted(set(kinds or ()) - set(_KINDS))
    if strange:
        known = [*_LETTERS] if pattern else list(_KINDS)
        reader.check(False, f"layer kinds {strange} are not known, these are: {known}")
        return ""
    listed = "".join(_KINDS[kind] for kind in kinds or ())
    reader.check(not (pattern and listed) or pattern == listed, "hybrid_override_pattern and layers_block_type differ")
    letters = pattern or listed
    count = reader.size("num_hidden_layers", default=len(letters))
    problem = f"num_hidden_layers is {count}, the pattern has {len(letters)}"
    reader.check(count == len(letters), problem, "num_hidden_layers")
    return letters


def _read_mamba(reader: ConfigReader) -> Mamba:
    mamba = Mamba(
        heads=reader.size("mamba_num_heads"),
        head_dim=reader.size("mamba_head_dim"),
        groups=reader.size("n_groups", "mamba_n_groups"),
        state=reader.size("ssm_state_size"),
        kernel=reader.size("conv_kernel", "mamba_d_conv"),
    )
    problem = f"mamba_num_heads {mamba.heads} is not divisible by n_groups {mamba.groups}"
    reader.check(mamba.heads % mamba.groups == 0, problem, "mamba_num_heads", "n_groups")
    return mamba


def _read_experts(reader: ConfigReader, bias: bool) -> tuple[dict[str, int], int]:
    """Fields of `Architecture`, and the size that experts work on; 0: the hidden size itself."""
    reader.check(not bias, "mlp_bias is true: the checkpoints' code gives experts biases, transformers 5 does not")
    shared = reader.optional_size("n_shared_experts")
    reader.check(shared <= 1, f"n_shared_experts is {shared}: transformers and vLLM give them different widths")
    sizes = {
        "experts": reader.size("n_routed_experts"),
        "expert_intermediate": reader.size("moe_intermediate_size"),
        "shared_intermediate": reader.size("moe_shared_expert_intermediate_size") if shared else 0,
    }
    return sizes, reader.size("moe_latent_size", minimum=0, default=0)


def _mamba(layers: Layers, mamba: Mamba, bias: bool, conv_bias: bool) -> Iterator[ParameterGroup]:
    """`in_proj` rows are z, x, B, C, dt; the convolution runs over x, B, C."""
    unknown = Role.UNKNOWN if bias else None
    convolved = sum(mamba.conv_sections)
    yield from layers.linear("mixer.in_proj", Role.MAMBA_IN, sum(mamba.in_sections), layers.hidden, unknown)
    yield from layers.group("mixer.conv1d.weight", Role.MAMBA_CONV, convolved, 1, mamba.kernel)
    if conv_bias:
        yield from layers.group("mixer.conv1d.bias", Role.MAMBA_CONV_BIAS, convolved)
    yield from layers.group("mixer.A_log", Role.MAMBA_A_LOG, mamba.heads)
    yield from layers.group("mixer.D", Role.MAMBA_D, mamba.heads)
    yield from layers.group("mixer.dt_bias", Role.MAMBA_DT_BIAS, mamba.heads)
    yield from layers.norm("mixer.norm", Role.MAMBA_GATE_NORM, mamba.d_inner)
    yield from layers.linear("mixer.out_proj", Role.MAMBA_OUT, layers.hidden, mamba.d_inner, unknown)


def _mixture(layers: Layers, latent: int) -> Iterator[ParameterGroup]:
    """Router with an fp32 bias, experts, a shared expert. Nemotron-3-Super's experts work on a smaller size; no layout
    rule knows the projections there and back."""
    sizes = layers.model.architecture
    yield from layers.linear("mixer.gate", Role.ROUTER, sizes.experts, sizes.hidden)
    yield from layers.group("mixer.gate.e_score_correction_bias", Role.EXPERT_BIAS, sizes.experts, dtype="float32")
    if latent:
        yield from layers.linear("mixer.fc1_latent_proj", Role.UNKNOWN, latent, sizes.hidden)
    yield from mlp(
        layers, sizes.expert_intermediate, "mixer.experts.{expert}", EXPERT, experts=sizes.experts, hidden=latent
    )
    if latent:
        yield from layers.linear("mixer.fc2_latent_proj", Role.UNKNOWN, sizes.hidden, latent)
    if sizes.shared_intermediate:
        yield from mlp(layers, sizes.shared_intermediate, "mixer.shared_experts", SHARED)
