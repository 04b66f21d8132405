"""Build the real vLLM model of any generation rank on a CPU, for golden-vs-real validation and for the oracle's tests.

Forward cannot run (vLLM's CPU kernels are not built), but construction and `load_weights` are vLLM's own. Stand-in
groups let one process play any rank; vLLM computes all coordinates itself, from its own `initialize_model_parallel`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from mcore_reshard.engines.vllm.model import require_vllm
from mcore_reshard.validation.hf_configs import register_configs
from mcore_reshard.validation.standins import hide_amx, register_inert

from .slices import GenSizes, poison

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_ENVIRONMENT = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_GROUPS = ("_WORLD", "_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")
_IMAGE_PROCESSING = ("torchvision", "mistral_common")


def prepare() -> None:
    """Import vLLM for a CPU; some seconds, so a parent process does it before it forks ranks."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for logger in ("vllm", "torch._library.triton"):  # they warn of missing kernels, which nobody runs here
        logging.getLogger(logger).setLevel(logging.ERROR)
    hide_amx()
    require_vllm()
    _stand_in_for_image_processing()
    register_configs()
    import vllm.model_executor.model_loader.utils
    import vllm.model_executor.models.registry  # noqa: F401


def _stand_in_for_image_processing() -> None:
    """Let vLLM import its vision models: they name packages that process images, which nobody does here."""
    from transformers.utils import import_utils

    for package in _IMAGE_PROCESSING:
        if importlib.util.find_spec(package) is None:
            getattr(import_utils, f"is_{package}_available")()  # caches that it is absent
            register_inert(package)


def build_engine(
    config_folder: Path | str, sizes: GenSizes, gen_rank: int, device: Literal["cpu", "meta"] = "cpu"
) -> torch.nn.Module:
    """The vLLM model of one generation rank in bf16, or as its quantization_config says, every parameter byte poisoned.

    `config_folder` holds an HF `config.json`. vLLM's loaders read the process's parallel state: only the model built last
    can be loaded.
    On "meta" a model of any size has names, shapes and dtypes, and nothing else.
    """
    config = engine_config(config_folder, sizes, gen_rank)
    with _building(config, sizes, gen_rank, device):
        from vllm.model_executor.model_loader.utils import initialize_model

        model = initialize_model(config)
    _poison_parameters(model)
    return model


def build_engine_with_draft(config_folder: Path | str, sizes: GenSizes, gen_rank: int) -> tuple[torch.nn.Module, Any]:
    """`build_engine` on a CPU with speculative decoding by the model's own prediction layers, and vLLM's proposer.

    The proposer's `model` is the draft model, which shares with the first what vLLM lets it share. The config needs
    `num_nextn_predict_layers`.
    """
    prepare()
    import vllm.model_executor.models.registry as registry
    from vllm.config import SpeculativeConfig

    config = engine_config(config_folder, sizes, gen_rank)
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
        config.speculative_config = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=1,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    with _building(config, sizes, gen_rank, "cpu"):
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.v1.spec_decode.eagle import EagleProposer

        model = initialize_model(config)
        proposer = EagleProposer(config, torch.device("cpu"))
        draft = initialize_model(config, model_config=config.speculative_config.draft_model_config)
        with mock.patch.object(proposer, "_get_model", lambda: draft):  # it would fill it with random numbers
            proposer.load_model(model)
    for each in (model, draft):
        _poison_parameters(each)
    return model, proposer


@contextlib.contextmanager
def _building(config: VllmConfig, sizes: GenSizes, gen_rank: int, device: str) -> Iterator[None]:
    """The surroundings in which vLLM builds the models of one rank."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
    from vllm.utils.torch_utils import set_default_torch_dtype

    sizes.coordinates(gen_rank)  # refuses a rank outside the mesh
    # Without expert parallelism every replica is an engine of its own, and gpt_oss.py asks for the size of its world.
    engine = sizes if sizes.ep > 1 else replace(sizes, dp=1)
    with (
        mock.patch.dict(os.environ),
        set_current_vllm_config(config),
        stand_in_groups(engine, gen_rank % engine.world),
        _without_kernels(),
        _without_tokenizer(config.model_config),
        set_default_torch_dtype(torch.bfloat16),
        torch.device(device),
    ):
        os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
        if sizes.layers:
            os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, sizes.layers))
        yield
    _model_to_pp_missing_layer_names.clear()  # keyed by id(module), which a later model may reuse


def _poison_parameters(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        poison(parameter.data)


def refusal(config_folder: Path | str, sizes: GenSizes, checkpoint: Mapping[str, torch.Tensor]) -> str | None:
    """Why vLLM cannot hold a model, in its own words; None if it can.

    Builds every generation rank and loads `checkpoint` into it, all on the meta device. Raises every failure that is not
    about sizes.
    """
    loading = ""

    def note_names() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal loading
        for name, tensor in checkpoint.items():
            loading = name
            yield name, tensor

    for gen_rank in range(sizes.world):
        try:
            model = build_engine(config_folder, sizes, gen_rank, device="meta")
        except (AssertionError, ValueError) as error:
            return f"gen:{gen_rank}: {type(error).__name__}: {error}"
        loading = "its checkpoint"
        try:
            with torch.no_grad():
                model.load_weights(note_names())  # type: ignore[operator]
        except NotImplementedError:  # a RuntimeError, of the meta device
            raise
        except (AssertionError, ValueError, RuntimeError) as error:
            return f"gen:{gen_rank}, loading {loading}: {type(error).__name__}: {error}"
    return None


def engine_config(config_folder: Path | str, sizes: GenSizes, gen_rank: int) -> VllmConfig:
    """The vLLM configuration of one rank; without expert parallelism every data-parallel replica is an engine."""
    prepare()
    import vllm.model_executor.models.registry as registry
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    folder, (replica, rank) = str(config_folder), divmod(gen_rank, sizes.tp * sizes.pp)
    expert_parallel = {"enable_expert_parallel": True, "data_parallel_size": sizes.dp, "data_parallel_rank": replica}
    # Inspect model classes here: in a subprocess each family takes 6 seconds.
    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
        model = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=32,
        )
        parallel = ParallelConfig(
            tensor_parallel_size=sizes.tp,
            pipeline_parallel_size=sizes.pp,
            distributed_executor_backend="mp",
            rank=rank,
            **(expert_parallel if sizes.ep > 1 else {}),
        )
        device, load = DeviceConfig("cpu"), LoadConfig(load_format="dummy")
        return VllmConfig(model_config=model, parallel_config=parallel, device_config=device, load_config=load)


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Build layers where no kernel can run them. Parameters and their loaders are vLLM's own.

    Experts are built as for the Triton backend, Hopper's default, which keeps them as loaded: vLLM's CPU platform lacks
    it, and lacks non-gated experts. Expert maps are on the CPU, because vLLM reads them back.
    """
    import vllm.model_executor.layers.fused_moe.config as moe_config
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as moe_method
    import vllm.model_executor.layers.quantization.fp8 as fp8
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    build_map = ExpertMapManager.__init__

    def build_map_on_cpu(manager: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            build_map(manager, *args, **kwargs)

    platform = copy.copy(moe_config.current_platform)
    platform.is_cuda_alike = lambda: True
    unquantized, quantized = UnquantizedMoeBackend.TRITON, Fp8MoeBackend.TRITON
    with (
        mock.patch.object(moe_config, "current_platform", platform),
        mock.patch.object(moe_method, "select_unquantized_moe_backend", lambda **_: (unquantized, None)),
        mock.patch.object(fp8, "select_fp8_moe_backend", lambda **_: (quantized, None)),
        mock.patch.object(fp8, "init_fp8_linear_kernel", lambda **_: None),
        mock.patch.object(ExpertMapManager, "__init__", build_map_on_cpu),
    ):
        yield


@contextlib.contextmanager
def _without_tokenizer(model: ModelConfig) -> Iterator[None]:
    """Let Nemotron-Nano-VL be built of a config alone: it encodes three words, and names its vision tower after its sizes."""
    config = model.hf_config
    if config.model_type != "NemotronH_Nano_VL_V2":
        yield
        return
    import vllm.model_executor.models.nano_nemotron_vl as nano_vl
    from vllm.transformers_utils.configs.radio import VIT_TIMM_DIM_BY_NAME

    tower, fields = (
        config.vision_config,
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    )
    sizes = {tower["args"]["model"]: tuple(tower[field] for field in fields)} if fields[0] in tower else {}
    tokenizer = SimpleNamespace(encode=lambda *_, **__: [])
    with (
        mock.patch.dict(VIT_TIMM_DIM_BY_NAME, sizes),
        mock.patch.object(nano_vl, "cached_tokenizer_from_config", lambda _: tokenizer),
    ):
        yield


@contextlib.contextmanager
def stand_in_groups(sizes: GenSizes, gen_rank: int) -> Iterator[None]:
    """vLLM's groups without communication: its own layout of ranks, read off by one process."""
    import vllm.distributed.parallel_state as state

    def stand_in(group_ranks: list[list[int]], *_: object, group_name: str, **__: object) -> state.GroupCoordinator:
        ranks = next(ranks for ranks in group_ranks if gen_rank in ranks)
        index = ranks.index(gen_rank)
        process_group = SimpleNamespace(size=lambda: len(ranks), rank=lambda: index)  # all that construction asks for
        group = state.GroupCoordinator.__new__(state.GroupCoordinator)
        vars(group).update(
            unique_name=group_name,
            ranks=ranks,
            rank=gen_rank,
            local_rank=gen_rank,
            world_size=len(ranks),
            rank_in_group=index,
            device=torch.device("cpu"),
            device_communicator=None,
            mq_broadcaster=None,
            device_group=process_group,
            cpu_group=process_group,
        )
        return group

    forget_groups()
    with (
        mock.patch.object(dist, "is_initialized", lambda: True),
        mock.patch.object(dist, "get_world_size", lambda group=None: sizes.world),
        mock.patch.object(dist, "get_rank", lambda group=None: gen_rank),
        mock.patch.object(dist, "get_backend", lambda group=None: "gloo"),
        mock.patch.object(state, "init_model_parallel_group", stand_in),
    ):
        state._WORLD, state._NODE_COUNT = stand_in([list(range(sizes.world))], group_name="world"), 1
        state.initialize_model_parallel(sizes.tp, sizes.pp)
        yield


def forget_groups() -> None:
    import vllm.distributed.parallel_state as state

    for name in _GROUPS:
        setattr(state, name, None)
