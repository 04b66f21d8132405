#!/usr/bin/env bash
# The environment of make_vllm_cpu.sh with the newest Megatron-Core and Megatron-Bridge, for `make test-newest`.
#
#   tools/make_newest_bridge.sh VENV        PYTHON=... names the interpreter to start from
#
# They want Python 3.12; Python 3.11 gets Megatron-Core 0.16.1 and Megatron-Bridge 0.3.1. Where no index has torch for a CPU
# and this Python, PyPI's brings CUDA: 5 GB of disk more.
set -euo pipefail

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.12 python3.13; do
        # pyenv runs its python3.12 only where PYENV_VERSION names it
        [[ $candidate == python3.* ]] && export PYENV_VERSION=${candidate#python}
        "$candidate" -c 'import sys; (3, 12) <= sys.version_info[:2] <= (3, 13) or sys.exit(1); print(sys.executable)' \
            2> /dev/null && return
    done
    echo "[make_newest_bridge] Python 3.12 or 3.13 is wanted, and none is on PATH; set PYTHON=/path/to/python" >&2
    exit 1
}

PYTHON=$(find_python)
export PYTHON MEGATRON_CORE=0.19.2 MEGATRON_BRIDGE=0.6.2
exec bash "$(dirname "${BASH_SOURCE[0]}")/make_vllm_cpu.sh" "$@"
