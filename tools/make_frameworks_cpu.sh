#!/usr/bin/env bash
# The environment of make_newest_bridge.sh with the frameworks that have adapters, for `make test-frameworks`.
#
#   tools/make_frameworks_cpu.sh VENV        PYTHON=... names the interpreter to start from
#
# Ray 2.60.0, verl 0.9.1 and SkyRL 0.3.0. Both frameworks pin CUDA builds of torch, vLLM and Megatron, so they come without
# their requirements; what they import is named here. SkyRL's wheel has `skyrl-gym/` as a plain folder, which a .pth file adds.
set -euo pipefail

venv=$1
here=$(dirname "${BASH_SOURCE[0]}")
bash "$here/make_newest_bridge.sh" "$venv"
python=$venv/bin/python
stamp=$venv/.frameworks
recipe=$(cat "$0" "$venv/.complete" | cksum)
[ "$(cat "$stamp" 2> /dev/null)" != "$recipe" ] || exit 0

install() { "$python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-compile "$@"; }

echo "[make_frameworks_cpu] Ray, verl, SkyRL and what they import" >&2
install "ray[default]==2.60.0"
install --no-deps verl==0.9.1 skyrl==0.3.0
install --no-deps "tensordict>=0.8,<=0.10,!=0.9.0" orjson pyvers importlib_metadata zipp hydra-core "antlr4-python3-runtime==4.9.*" \
    codetiming pandas python-dateutil pytz tzdata six peft dill torchdata pyarrow datasets multiprocess xxhash \
    pylatexenc tensorboard wandb cloudpathlib jaxtyping wadler-lindig httpx httpcore
# `vllm serve`
install --no-deps uvicorn python-multipart prometheus-fastapi-instrumentator setproctitle watchfiles jsonschema mistral_common \
    blake3 tiktoken ijson model-hosting-container-standards jmespath supervisor
# NeMo-RL's own modules, from a checkout
install --no-deps nvidia-ml-py colorlog
"$python" -c 'import sysconfig, pathlib; site = pathlib.Path(sysconfig.get_path("purelib")); (site / "skyrl_gym.pth").write_text(f"{site}/skyrl-gym\n")'
echo "$recipe" > "$stamp"
echo "[make_frameworks_cpu] ready: $python" >&2
