"""Model configs: Hugging Face `config.json` files, and built-in ones that need no download.

Published models carry the fields of the `config.json` of meta-llama/Llama-3.1-8B, Qwen/Qwen3-4B, Qwen/Qwen3-30B-A3B,
Qwen/Qwen3-235B-A22B, deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Instruct, nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16,
openai/gpt-oss-20b and openai/gpt-oss-120b. The `tiny-` ones have a family's every part in sizes for tests.
tiny-moonlight is DeepSeek-V3 without a low rank of queries; `-fp8` configs are quantized in blocks of 128 by 128.
The folder `traced` has models that are only planned from traces of the loaders: published ones with the fields of
deepseek-ai/DeepSeek-V2-Lite, google/gemma-2-9b, google/gemma-3-27b-it, zai-org/GLM-4.5-Air, allenai/OLMoE-1B-7B-0924,
nvidia/Llama-3_3-Nemotron-Super-49B-v1, Qwen/Qwen2.5-VL-7B-Instruct, Qwen/Qwen3-Next-80B-A3B-Thinking and
Qwen/Qwen3-VL-30B-A3B-Instruct. Imports the files of `planner.model`.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mcore_reshard.planner.bounded_json import MAX_PLAN_BYTES, parse_json, read_bounded
from mcore_reshard.planner.model.config_reader import ConfigError

_FOLDER = Path(__file__).parent


def builtin_names() -> tuple[str, ...]:
    """Names that `load_config` knows without a file, of models planned by rules, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def traced_names() -> tuple[str, ...]:
    """Names that `load_config` knows without a file, of models planned from traces of the loaders, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("traced/*.json")))


def load_config(name_or_path: str | Path) -> dict[str, Any]:
    """The config called `name_or_path`: a `config.json`, a folder with one, or a built-in name.

    A file or folder of that name goes before the built-in. Raises `ConfigError` where nothing is found, with the names
    that come close, and where the file is no JSON object.
    """
    path = find_config(name_or_path)
    try:
        config = parse_json(read_bounded(path, MAX_PLAN_BYTES), "the file", max_bytes=MAX_PLAN_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), [f"not readable as JSON: {error}"]) from error
    if not isinstance(config, dict):
        raise ConfigError(str(path), [f"holds a JSON {type(config).__name__}, not an object"])
    return config


def find_config(name_or_path: str | Path) -> Path:
    """The file that `load_config` reads. Raises `ConfigError` where nothing is found."""
    name = str(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    for folder in (_FOLDER, _FOLDER / "traced"):
        if name in {file.stem for file in folder.glob("*.json")}:
            return folder / f"{name}.json"
    if path.is_dir():
        raise ConfigError(name, ["the folder holds no config.json"])
    problem = "is no file, no folder, and no built-in config"
    if close := get_close_matches(name.lower(), builtin_names() + traced_names(), n=3, cutoff=0.5):
        offered = [f"{each} (by plan --traced)" if each in traced_names() else each for each in close]
        problem += f"; did you mean {' or '.join(offered)}?"
    raise ConfigError(name, [problem], remedy=f"built-in configs: {', '.join(builtin_names())}")
