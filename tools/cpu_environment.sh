# Sourced with the path of a virtual environment by make_vllm_cpu.sh and make_sglang_cpu.sh, which set ENGINE, TORCH,
# MEGATRON_CORE and MEGATRON_BRIDGE first. A complete environment is reused as it is; an interrupted one is completed.
#
#   if begins_anew; then install ...; imports_together MODULE; fi

[ $# -eq 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
venv=$(cd "$1" && pwd)
python=$venv/bin/python
stamp=$venv/.complete
recipe="$(cat "$0" "${BASH_SOURCE[0]}" | cksum) $MEGATRON_CORE $MEGATRON_BRIDGE"

say() { echo "[$(basename "$0" .sh)] $*" >&2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.12 python3.13 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "$ENGINE wants Python 3.11, 3.12 or 3.13, and none is on PATH"
    exit 1
}

# False where the environment is complete; else there is one with pip.
begins_anew() {
    [ "$(cat "$stamp" 2> /dev/null)" != "$recipe" ] || return 1
    rm -f "$stamp"
    if ! "$python" -m pip --version > /dev/null 2>&1; then
        local base
        base=$(find_python) || exit 1
        "$base" -m venv --clear "$venv" || exit 1
    fi
}

# Modules are compiled when first imported, which saves compiling all of them.
install() { "$python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-compile "$@"; }

install_torch() {
    # PyPI's torch for Linux brings CUDA; the CPU index is taken where it can be reached.
    local cpu=https://download.pytorch.org/whl/cpu
    local probe="import urllib.request as r; r.urlopen('$cpu/torch/', timeout=5)"
    say "torch $TORCH"
    if "$python" -c "$probe" 2> /dev/null; then
        install --extra-index-url "$cpu" "torch==$TORCH" "$@"
    else
        install "torch==$TORCH" "$@"
    fi
}

# imports_together vllm_engine: the environment is complete if the engine and Megatron import in one process.
imports_together() {
    install --no-deps --editable "$root"
    say "checking that the engine and Megatron import together"
    "$python" -W ignore - "$1" << 'PYTHON'
import sys
from importlib import import_module

from mcore_reshard.validation.trainer import te_standin

te_standin.install()
import_module(f"mcore_reshard.validation.engine.{sys.argv[1]}").prepare()
import megatron.bridge  # noqa: E402, F401
PYTHON
    echo "$recipe" > "$stamp"
}
