"""A Megatron-Core train group and vLLM engines as Ray actors, with refits between them.

    python examples/ray/refit.py --model Qwen/Qwen3-0.6B --train-gpus 2 --engines 1 --gen-tp 1 --steps 3

Four kinds of processes: the driver, which calls and holds no weights; train ranks, one GPU each; engines, `gen-tp` GPUs
each; and the store, which needs no GPU and outlives both groups, so either may restart. The optimizer's step is yours: here
it halves the weights.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

Build = Callable[[str, int], tuple[list[Any], Any]]


@ray.remote(num_cpus=0)
class Store:
    """The place where all ranks meet. Its actor holds no weights, and stays when a group restarts."""

    def __init__(self) -> None:
        from mcore_reshard.session.store_server import serve_store

        self._served = serve_store(host=ray.util.get_node_ip_address())

    def address(self) -> str:
        return self._served.address


@ray.remote
class TrainRank:
    """One rank of the policy."""

    def __init__(self, rank: int, world: int, model: str, build: Build) -> None:
        self._rank, self._world, self._model, self._build = rank, world, model, build

    def free_address(self) -> str:
        """An address of this rank's node, for torch's own process group."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            return f"{host}:{free.getsockname()[1]}"

    def start(self, address: str) -> None:
        """Join the training world, and build and load this rank's share of the model."""
        import torch

        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)  # Ray shows an actor its own GPU alone
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"tcp://{address}", rank=self._rank, world_size=self._world
        )
        self._chunks, self._bridge = self._build(self._model, self._world)

    def connect(self, gen: str, store: str, **options: Any) -> None:
        import mcore_reshard as mr

        self._trainer = mr.megatron.connect(
            self._chunks, self._bridge, self._model, gen=gen, store=store, options=mr.Options(**options)
        )

    def step(self) -> None:
        """Your optimizer's step."""
        import torch

        with torch.no_grad():
            for parameter in (parameter for chunk in self._chunks for parameter in chunk.parameters()):
                parameter.mul_(0.5)

    def refit(self, step: int) -> dict[str, Any]:
        report = self._trainer.refit(step)
        return {"bytes": report.nbytes, "seconds": report.seconds, "transport": report.transport}

    def close(self) -> None:
        self._trainer.close()


@ray.remote
class Engine:
    """A vLLM engine. `llm` are further arguments of vLLM's `LLM`."""

    def __init__(self, model: str, tp: int, llm: dict[str, Any] | None = None) -> None:
        from vllm import LLM

        extension = "mcore_reshard.vllm.RefitWorker"
        self.llm = LLM(model, tensor_parallel_size=tp, worker_extension_cls=extension, **llm or {})

    def connect(self, store: str, replica: int, **options: Any) -> list[str]:
        return self.llm.collective_rpc("connect_refit", kwargs={"store": store, "replica": replica, **options})

    def refit(self, step: int) -> list[dict[str, Any]]:
        """The reports of the engine's workers. Requests see the new weights from here on."""
        reports = self.llm.collective_rpc("refit", args=(step,))
        self.llm.reset_prefix_cache()
        return reports

    def generate(self, prompt: str) -> str:
        return self.llm.generate([prompt])[0].outputs[0].text

    def close(self) -> None:
        self.llm.collective_rpc("close_refit")


class Groups:
    """Both groups and the store, on placement groups of their own."""

    def __init__(
        self,
        model: str,
        *,
        train_ranks: int,
        engines: int,
        gen_tp: int = 1,
        device: str = "GPU",
        build: Build | None = None,
        llm: dict[str, Any] | None = None,
    ) -> None:
        """`device` is what a rank reserves one of: GPU, or CPU for a trial without any. `build` makes a rank's model."""
        self._gen = f"tp={gen_tp},dp={engines}"
        self._reserved = [
            placement_group([{device: 1.0}] * train_ranks, strategy="PACK"),
            placement_group([{device: float(gen_tp)}] * engines, strategy="PACK"),
        ]
        ray.get([group.ready() for group in self._reserved])
        self.store = Store.remote()
        self.train = [
            TrainRank.options(**self._place(0, rank, device, 1)).remote(
                rank, train_ranks, model, build or build_with_bridge
            )
            for rank in range(train_ranks)
        ]
        self.engines = [
            Engine.options(**self._place(1, replica, device, gen_tp)).remote(model, gen_tp, llm)
            for replica in range(engines)
        ]
        address = ray.get(self.train[0].free_address.remote())
        ray.get([rank.start.remote(address) for rank in self.train])

    def _place(self, group: int, bundle: int, device: str, count: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._reserved[group], placement_group_bundle_index=bundle)
        return {f"num_{device.lower()}s": count, "scheduling_strategy": strategy} | (
            {"num_cpus": 0} if device == "GPU" else {}
        )

    def connect(self, **options: Any) -> None:
        """Both sides wait for each other, so both are called before the driver waits for either."""
        store = ray.get(self.store.address.remote())
        ray.get(
            [rank.connect.remote(self._gen, store, **options) for rank in self.train]
            + [engine.connect.remote(store, replica, **options) for replica, engine in enumerate(self.engines)]
        )

    def step(self) -> None:
        ray.get([rank.step.remote() for rank in self.train])

    def refit(self, step: int) -> list[dict[str, Any]]:
        """Move the trainer's weights to all engines; the reports of the train ranks.

        An error of an actor comes back as Ray's, which is also ours: `except mr.RefitError as error`, with `error.cause`.
        """
        engines = [engine.refit.remote(step) for engine in self.engines]
        reports = ray.get([rank.refit.remote(step) for rank in self.train])
        ray.get(engines)
        return reports

    def close(self) -> None:
        ray.get([member.close.remote() for member in (*self.train, *self.engines)])


def build_with_bridge(model: str, world: int) -> tuple[list[Any], Any]:
    """The policy over tensor parallelism alone, by Megatron-Bridge: its chunks and the AutoBridge."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(model)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.tensor_model_parallel_size = world
    provider.sequence_parallel = world > 1
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    return provider.provide_distributed_model(wrap_with_ddp=False, bf16=True), bridge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face model, or a folder with one")
    parser.add_argument("--train-gpus", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--gen-tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    ray.init()
    groups = Groups(args.model, train_ranks=args.train_gpus, engines=args.engines, gen_tp=args.gen_tp)
    groups.connect()
    for step in range(1, args.steps + 1):
        groups.step()
        reports = groups.refit(step)
        slowest = max(report["seconds"] for report in reports)
        moved = sum(report["bytes"] for report in reports)
        print(f"step {step}: {moved / 1e9:.2f} GB by {reports[0]['transport']} in {slowest:.3f} s")
        print(ray.get(groups.engines[0].generate.remote("The capital of France is")))
    groups.close()


if __name__ == "__main__":
    main()
