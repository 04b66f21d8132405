"""Build the real vLLM model of any generation rank on a CPU, for golden-vs-real validation and for the oracle's tests.

Forward cannot run (vLLM's CPU kernels are not built), but construction and `load_weights` are vLLM's own. Two ways to
give the model its place in the mesh: "stand-in" groups let one process play any rank, "gloo" uses the process group of
real generation processes. vLLM computes all coordinates itself, from its own `initialize_model_parallel`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from mcore_reshard.engines.vllm.model import require_vllm

from .slices import GenSizes, poison

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_PARTITION = "VLLM_PP_LAYER_PARTITION"
_GROUPS = ("_WORLD", "_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")


def prepare() -> None:
    """Import vLLM for a CPU; some seconds, so a parent process does it before it forks ranks."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for logger in ("vllm", "torch._library.triton"):  # they warn of missing kernels, which nobody runs here
        logging.getLogger(logger).setLevel(logging.ERROR)
    require_vllm()
    import vllm.model_executor.model_loader.utils
    import vllm.model_executor.models.registry  # noqa: F401


def build_engine(
    config_folder: Path | str,
    sizes: GenSizes,
    gen_rank: int,
    groups: Literal["stand-in", "gloo"] = "stand-in",
    device: Literal["cpu", "meta"] = "cpu",
) -> torch.nn.Module:
    """The vLLM model of one generation rank in bf16, or as its quantization_config says, every parameter byte poisoned.

    `config_folder` holds an HF `config.json`. With "gloo" the default process group must be initialized and consist of
    the generation ranks. vLLM's loaders read the process's parallel state: only the model built last can be loaded.
    On "meta" a model of any size has names, shapes and dtypes, and nothing else.
    """
    prepare()
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names
    from vllm.utils.torch_utils import set_default_torch_dtype

    sizes.coordinates(gen_rank)  # refuses a rank outside the mesh
    config = engine_config(config_folder, sizes, gen_rank)
    place = _gloo_groups(sizes, gen_rank) if groups == "gloo" else _stand_in_groups(*_own_engine(sizes, gen_rank))
    with (
        set_current_vllm_config(config),
        place,
        layer_partition(sizes),
        triton_expert_layout(),
        fp8_without_kernels(),
        _expert_maps_on_cpu(),
        set_default_torch_dtype(torch.bfloat16),
        torch.device(device),
    ):
        model = initialize_model(config)
    _model_to_pp_missing_layer_names.clear()  # keyed by id(module), which a later model may reuse
    for parameter in model.parameters():
        poison(parameter.data)
    return model


def refusal(config_folder: Path | str, sizes: GenSizes, checkpoint: Mapping[str, torch.Tensor]) -> str | None:
    """Why vLLM cannot hold a model, in its own words; None if it can.

    Builds every generation rank and loads `checkpoint` into it, all on the meta device. What fails in other ways than sizes
    that do not fit is raised.
    """
    for gen_rank in range(sizes.world):
        rank = f"gen:{gen_rank}"
        try:
            model = build_engine(config_folder, sizes, gen_rank, device="meta")
        except (AssertionError, ValueError) as error:
            return f"{rank}: {type(error).__name__}: {error}"
        begun = ["its checkpoint"]
        try:
            with torch.no_grad():
                model.load_weights(_noting(checkpoint, begun))  # type: ignore[operator]
        except NotImplementedError:  # a RuntimeError, of the meta device
            raise
        except (AssertionError, ValueError, RuntimeError) as error:
            return f"{rank}, loading {begun[-1]}: {type(error).__name__}: {error}"
    return None


def _noting(tensors: Mapping[str, torch.Tensor], begun: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        begun.append(name)
        yield name, tensor


def engine_config(config_folder: Path | str, sizes: GenSizes, gen_rank: int) -> VllmConfig:
    """The vLLM configuration of one rank; without expert parallelism every data-parallel replica is an engine."""
    prepare()
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    folder, within_replica = str(config_folder), sizes.tp * sizes.pp
    expert_parallel = {
        "enable_expert_parallel": True,
        "data_parallel_size": sizes.dp,
        "data_parallel_rank": gen_rank // within_replica,
    }
    with _inspection_in_process():
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
            rank=gen_rank % within_replica,
            **(expert_parallel if sizes.ep > 1 else {}),
        )
        return VllmConfig(
            model_config=model,
            parallel_config=parallel,
            device_config=DeviceConfig("cpu"),
            load_config=LoadConfig(load_format="dummy"),
        )


@contextlib.contextmanager
def layer_partition(sizes: GenSizes) -> Iterator[None]:
    """VLLM_PP_LAYER_PARTITION as `sizes` says it, also where the environment says otherwise (vllm/envs.py)."""
    with mock.patch.dict(os.environ):
        os.environ.pop(_PARTITION, None)
        if sizes.layers:
            os.environ[_PARTITION] = ",".join(map(str, sizes.layers))
        yield


@contextlib.contextmanager
def triton_expert_layout() -> Iterator[None]:
    """Fixture: build experts as for the Triton backend, Hopper's default, which keeps them as loaded.

    vLLM's CPU platform has neither that backend nor non-gated experts; only their parameters are wanted here.
    """
    import vllm.model_executor.layers.fused_moe.config as moe_config
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    def select_triton(**_: object) -> tuple[UnquantizedMoeBackend, None]:
        return UnquantizedMoeBackend.TRITON, None

    with (
        mock.patch.object(moe_config, "current_platform", _CudaAlike(moe_config.current_platform)),
        mock.patch.object(moe_method, "select_unquantized_moe_backend", select_triton),
    ):
        yield


@contextlib.contextmanager
def fp8_without_kernels() -> Iterator[None]:
    """Fixture: build FP8 layers where no kernel can run them, experts as for the Triton backend.

    Parameters and their loaders are vLLM's own; what follows loading is left out.
    """
    import vllm.model_executor.layers.quantization.fp8 as fp8
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    with (
        mock.patch.object(fp8, "init_fp8_linear_kernel", lambda **_: None),
        mock.patch.object(fp8, "select_fp8_moe_backend", lambda **_: (Fp8MoeBackend.TRITON, None)),
    ):
        yield


@contextlib.contextmanager
def _expert_maps_on_cpu() -> Iterator[None]:
    """Fixture: vLLM reads its expert maps back while it builds, which the meta device cannot."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    def build(manager: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            upstream(manager, *args, **kwargs)

    upstream = ExpertMapManager.__init__
    with mock.patch.object(ExpertMapManager, "__init__", build):
        yield


class _CudaAlike:
    """A platform that says it is CUDA-like where non-gated experts ask, and is itself otherwise."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


@contextlib.contextmanager
def _inspection_in_process() -> Iterator[None]:
    """Model classes are inspected here rather than each in a subprocess, which takes 6 seconds a family."""
    import vllm.model_executor.models.registry as registry

    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
        yield


@contextlib.contextmanager
def _gloo_groups(sizes: GenSizes, gen_rank: int) -> Iterator[None]:
    import vllm.distributed.parallel_state as state

    if not dist.is_initialized() or (dist.get_world_size(), dist.get_rank()) != (sizes.world, gen_rank):
        raise RuntimeError(f"the default process group must be the {sizes.world} generation ranks")
    _forget_groups()
    state.init_distributed_environment(sizes.world, gen_rank, backend="gloo", local_rank=gen_rank)
    state.initialize_model_parallel(sizes.tp, sizes.pp)
    yield


def _own_engine(sizes: GenSizes, gen_rank: int) -> tuple[GenSizes, int]:
    """The sizes of this rank's engine and its rank there: gpt_oss.py, for one, asks for the size of the world."""
    if sizes.ep > 1:
        return sizes, gen_rank
    replica = replace(sizes, dp=1)
    return replica, gen_rank % replica.world


@contextlib.contextmanager
def _stand_in_groups(sizes: GenSizes, gen_rank: int) -> Iterator[None]:
    """vLLM's groups without communication: its own layout of ranks, read off by one process."""
    import vllm.distributed.parallel_state as state

    def group(group_ranks: list[list[int]], *_: object, group_name: str, **__: object) -> state.GroupCoordinator:
        return _stand_in_group(group_ranks, gen_rank, group_name)

    _forget_groups()
    as_if_initialized = mock.patch.multiple(
        dist,
        is_initialized=lambda: True,
        get_world_size=lambda group=None: sizes.world,
        get_rank=lambda group=None: gen_rank,
        get_backend=lambda group=None: "gloo",
    )
    with as_if_initialized, mock.patch.object(state, "init_model_parallel_group", group):
        state._WORLD, state._NODE_COUNT = group([list(range(sizes.world))], group_name="world"), 1
        state.initialize_model_parallel(sizes.tp, sizes.pp)
        yield


def _forget_groups() -> None:
    import vllm.distributed.parallel_state as state

    for name in _GROUPS:
        setattr(state, name, None)


def _stand_in_group(group_ranks: list[list[int]], gen_rank: int, name: str) -> Any:
    from vllm.distributed.parallel_state import GroupCoordinator

    ranks = next(ranks for ranks in group_ranks if gen_rank in ranks)
    group = GroupCoordinator.__new__(GroupCoordinator)
    group.unique_name, group.ranks, group.rank, group.local_rank = name, ranks, gen_rank, gen_rank
    group.world_size, group.rank_in_group = len(ranks), ranks.index(gen_rank)
    group.device, group.device_communicator, group.mq_broadcaster = torch.device("cpu"), None, None
    group.device_group = group.cpu_group = _Members(len(ranks), ranks.index(gen_rank))
    return group


class _Members:
    """As much of a process group as model construction asks for."""

    def __init__(self, members: int, own: int) -> None:
        self._members, self._own = members, own

    def size(self) -> int:
        return self._members

    def rank(self) -> int:
        return self._own
