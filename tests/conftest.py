"""Set up torch and Megatron before any test imports them, and add the option --fast."""

import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from helpers.inner_loop import forbid_what_is_slow

from mcore_reshard.validation.trainer import te_standin

# torch's store asks the DNS for the name of every address that connects: a lost answer would stall all ranks for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Of the cases of a sampled test those run whose multiples of this are small: no kind that comes at every second or fourth
# place is left out.
GOLDEN = (5**0.5 - 1) / 2

# What traces of earlier runs left there would hide what a loader does now.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mcore-reshard-tests-")

# The shell ignores interrupts for what runs beside it, as `make test` does, and the ranks of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Ranks are forked from this process: they need not search all that it holds for garbage.
os.register_at_fork(after_in_child=gc.freeze)

# More threads than idle cores would mostly wait for each other, in loops that keep the cores busy.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

# Megatron decides at import whether it has Transformer Engine, and some tests import it in this very process.
if find_spec("megatron") is not None:
    te_standin.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="skip tests as they start a process or import Megatron or transformers"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        forbid_what_is_slow()


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay to the end


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("slow") is None:
            (size,) = sampled.args
            test = item.nodeid.partition("[")[0]
            if cases[test] * GOLDEN % 1.0 >= 1 / size:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1
    if config.getoption("--fast"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes seconds: not with --fast"))
