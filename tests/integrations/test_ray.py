"""The example of Ray: train ranks, an engine and the store are actors, and errors come back as ours."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mcore_reshard as mr
from mcore_reshard.kernels.errors import DeadlineError, SessionError, VersionError
from mcore_reshard.validation.tiny import tiny_config, write_checkpoint

MISSING = [name for name in ("ray", "vllm", "megatron") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: tools/make_frameworks_cpu.sh makes an environment with all"
)
ROOT = Path(__file__).parents[2]
OPTIONS = {"transport": "gloo", "timeout_s": 120}


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ.setdefault("RAY_agent_register_timeout_ms", "200000")  # for busy machines
    import ray
    from helpers.ray_parts import ENVIRONMENT

    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "engine", ROOT / "examples" / "ray")
    environment = ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("traces")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
        patch.syspath_prepend(str(ROOT / "examples" / "ray"))
        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20,
            runtime_env={"env_vars": environment}, _temp_dir=f"/tmp/ray-{os.getpid()}",
        )  # fmt: skip
        yield
        ray.shutdown()


def test_the_examples_groups_refit_and_the_store_outlives_the_engine(tmp_path: Path) -> None:
    import ray
    import refit
    from helpers import ray_parts

    for version in (1, 2):
        write_checkpoint(tiny_config("qwen3"), tmp_path / str(version), version)
    groups = refit.Groups(
        str(tmp_path / "1"), train_ranks=2, engines=1, device="CPU", build=ray_parts.build, llm=ray_parts.LLM
    )
    groups.connect(**OPTIONS)
    assert [report["transport"] for report in groups.refit(1)] == ["gloo", "gloo"]
    differing = groups.engines[0].__ray_call__
    assert ray.get(differing.remote(ray_parts.differing, str(tmp_path / "1")))[0] == []
    ray.get([rank.__ray_call__.remote(ray_parts.load, str(tmp_path / "2")) for rank in groups.train])
    groups.refit(2)
    wrong, compared = ray.get(differing.remote(ray_parts.differing, str(tmp_path / "2")))
    assert wrong == []
    wrong, _ = ray.get(differing.remote(ray_parts.differing, str(tmp_path / "1")))
    assert len(wrong) == compared  # the comparison can fail

    with pytest.raises(VersionError, match="version 2") as refused:  # not larger than the last
        groups.refit(2)
    assert isinstance(refused.value, mr.RefitError)
    groups.step()
    groups.refit(3)  # the session goes on

    ray.kill(groups.engines[0])
    with pytest.raises(SessionError):
        ray.get([rank.refit.remote(4) for rank in groups.train])
    assert ray.get(groups.store.address.remote())
    ray.get([rank.close.remote() for rank in groups.train])


def test_an_error_of_an_actor_is_ours_with_its_fields() -> None:
    import ray
    from helpers.ray_parts import fail

    with pytest.raises(mr.RefitError) as caught:
        ray.get(ray.remote(fail).remote())
    cause: Any = caught.value.cause  # type: ignore[attr-defined]
    assert type(cause) is DeadlineError and isinstance(caught.value, DeadlineError)
    assert cause.waiting.peer == "train:0" and cause.others[0].waiting.parameter == "norm"
