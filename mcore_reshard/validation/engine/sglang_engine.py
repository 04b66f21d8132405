"""Build the real SGLang model of any generation rank on a CPU, for traced plans and for the tests of the adapter.

Forward cannot run (SGLang's kernels are not installed), but construction and `load_weights` are SGLang's own. Stand-in
groups let one process play any rank; SGLang computes all coordinates itself, from the rank in its world.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from mcore_reshard.engines.sglang.model import require_sglang

from .slices import GenSizes, poison

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
_KERNELS = ("sgl_kernel", "torchvision")  # imported by model classes, called by forward alone
_GROUPS = (
    "_TP", "_ATTN_TP", "_SHARED_EXPERTS_TP", "_ATTN_CP", "_DCP", "_MOE_DP", "_MOE_EP", "_MOE_TP", "_PP", "_SELF_PP"
)  # fmt: skip


def prepare() -> None:
    """Import SGLang for a CPU; half a minute, so a parent process does it before it forks ranks."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("sglang").setLevel(logging.ERROR)  # it warns of missing kernels, which nobody runs here
    require_sglang()
    from transformers import AutoProcessor  # noqa: F401  it looks for torchvision: before there is a stand-in

    with _standin_kernels():
        import sglang.srt.model_loader.loader
        import sglang.srt.models.registry  # noqa: F401


def build_engine(
    config_folder: Path | str, sizes: GenSizes, gen_rank: int, device: Literal["cpu", "meta"] = "cpu"
) -> torch.nn.Module:
    """The SGLang model of one generation rank, every parameter byte poisoned.

    `config_folder` holds an HF `config.json`. SGLang's loaders read the process's parallel state: only the model built
    last can be loaded. On "meta" a model of any size has names, shapes and dtypes, and nothing else.

    With `ep` > 1 and `dp` > 1 attention is data parallel: SGLang then calls tp * dp its `tp_size`.
    """
    prepare()
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context

    dp_index, pp_index, tp_index = sizes.coordinates(gen_rank)
    # Without expert parallelism every replica is an engine of its own.
    attention_dp, dp_index = (sizes.dp, dp_index) if sizes.ep > 1 else (1, 0)
    tp_size = sizes.tp * attention_dp
    world_rank = tp_size * pp_index + sizes.tp * dp_index + tp_index
    arguments = _server_args(config_folder, sizes, tp_size, attention_dp)
    with mock.patch.dict(os.environ), _standin_kernels(), _without_kernels():
        os.environ.pop("SGLANG_PP_LAYER_PARTITION", None)
        if sizes.layers:
            os.environ["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, sizes.layers))
        reset_context()
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=0))
        config, load = ModelConfig.from_server_args(arguments), LoadConfig(load_format="dummy")
        with stand_in_groups(tp_size * sizes.pp, world_rank):
            dp_attention.initialize_dp_attention(arguments)
            dp_attention.init_dp_gathered_buffer(config)
            with set_default_torch_dtype(config.dtype), torch.device(device):
                model = loader._initialize_model(config, load, loader._get_quantization_config(config, load))
    for parameter in model.parameters():
        poison(parameter.data)
    return model


def _server_args(config_folder: Path | str, sizes: GenSizes, tp_size: int, attention_dp: int) -> ServerArgs:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(config_folder),
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        tp_size=tp_size,
        pp_size=sizes.pp,
        ep_size=sizes.ep,
        dp_size=attention_dp,
        enable_dp_attention=attention_dp > 1,
    )


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """Build layers as for a Hopper GPU, where no kernel can run them. Parameters and their loaders are SGLang's own.

    - Rotary tables: on a CPU SGLang builds them for one kind of scaling alone. No checkpoint has them.
    - DeepSeek-V3's shared expert is kept as one more routed expert, which SGLang does on GPUs alone.
    """
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader import loader
    from sglang.srt.models import deepseek_v2

    choose = loader.resolve_shared_experts_config

    def choose_for_hopper(*args: Any) -> Any:
        with (
            mock.patch.object(deepseek_v2, "_is_cuda", True),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        ):
            return choose(*args)

    with (
        mock.patch.object(factory, "get_rope_cpu", lambda *args: factory.get_rope(*args[:8])),
        mock.patch.object(loader, "resolve_shared_experts_config", choose_for_hopper),
    ):
        yield


@contextlib.contextmanager
def stand_in_groups(world: int, rank: int) -> Iterator[None]:
    """SGLang's groups without communication: its own layout of ranks, read off by one process."""
    import sglang.srt.distributed.parallel_state as state
    from sglang.srt.runtime_context import get_parallel

    def stand_in(group_ranks: list[list[int]], *_: object, group_name: str, **__: object) -> state.GroupCoordinator:
        ranks = next(ranks for ranks in group_ranks if rank in ranks)
        index = ranks.index(rank)
        process_group = SimpleNamespace(size=partial(len, ranks), rank=lambda: index)  # all that construction asks for
        group = state.GroupCoordinator.__new__(state.GroupCoordinator)
        vars(group).update(
            unique_name=group_name,
            ranks=ranks,
            rank=rank,
            local_rank=rank,
            world_size=len(ranks),
            rank_in_group=index,
            device=torch.device("cpu"),
            device_group=process_group,
            cpu_group=process_group,
        )
        return group

    forget_groups()
    with (
        mock.patch.object(dist, "is_initialized", lambda: True),
        mock.patch.object(dist, "get_world_size", lambda group=None: world),
        mock.patch.object(dist, "get_rank", lambda group=None: rank),
        mock.patch.object(dist, "get_backend", lambda group=None: "gloo"),
        mock.patch.object(state, "init_model_parallel_group", stand_in),
    ):
        get_parallel().override_permanently(world_group=stand_in([list(range(world))], group_name="world"))
        state.initialize_model_parallel()
        yield


def forget_groups() -> None:
    import sglang.srt.distributed.parallel_state as state

    for name in _GROUPS:
        setattr(state, name, None)


class _StandinModule(types.ModuleType):
    """A package that is not installed. Names of it can be imported, and are mocks."""

    __path__ = []  # a package  # noqa: RUF012
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _StandinFinder:
    """Finds stand-ins for packages and everything in them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = set(packages)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self._packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandinModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def _standin_kernels() -> Iterator[None]:
    """Stand-ins for those of `_KERNELS` that are not installed; afterwards nobody can import them again.

    What asks whether a package is installed, as Megatron does, is told the truth.
    """
    absent = [name for name in _KERNELS if name not in sys.modules and importlib.util.find_spec(name) is None]
    finder = _StandinFinder(absent)
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]
