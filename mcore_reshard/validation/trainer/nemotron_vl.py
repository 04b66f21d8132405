"""Nemotron-Nano-VL in other sizes than its 12B: Megatron-Bridge writes those of the 12B into its provider.

Layers, Mamba sizes, the vision tower (RADIO) and the projector are the provider's own, whatever the config says. Here
they come from the config, and Megatron-Core's own LLaVA model is built of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def sizes_of(config: Any, provider: Any) -> Iterator[None]:
    """Let `provider` build the model of `config`, where it is a Nemotron-Nano-VL; nothing changes for another one."""
    if config.model_type != "NemotronH_Nano_VL_V2":
        yield
        return
    from megatron.bridge.models.nemotron_vl import nemotron_vl_provider
    from megatron.bridge.models.nemotronh.nemotron_h_bridge import NemotronHBridge

    for hf_name, name in NemotronHBridge.CONFIG_MAPPING:
        if getattr(config.llm_config, hf_name, None) is not None:
            setattr(provider, name, getattr(config.llm_config, hf_name))
    provider.finalize()
    build = nemotron_vl_provider.LLaVAModel

    def build_in_sizes(**arguments: Any) -> Any:
        tower, projection = arguments["vision_transformer_config"], arguments["vision_projection_config"]
        vision = config.vision_config
        tower.num_layers, tower.hidden_size = vision["num_hidden_layers"], vision["hidden_size"]
        tower.num_attention_heads = tower.num_query_groups = vision["num_attention_heads"]
        tower.kv_channels, tower.ffn_hidden_size = vision["head_dim"], vision["intermediate_size"]
        projection.ffn_hidden_size = config.projector_hidden_size
        return build(**arguments | dict.fromkeys(("img_h", "img_w"), config.force_image_size))

    with mock.patch.object(nemotron_vl_provider, "LLaVAModel", build_in_sizes):
        yield
