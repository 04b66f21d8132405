"""The command line. This module parses the arguments and imports nothing slow; each command has a module that runs it.

Exit codes: 0 done; 1 unexpected; 2 bad input or an impossible mesh; 3 the proof of a plan failed; 4 a validation found
bytes that differ; 130 interrupted. Errors are text on stderr, also with --json.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from mcore_reshard import __version__

from .printable import printable

EXIT_UNEXPECTED, EXIT_INPUT, EXIT_UNSOUND, EXIT_INTERRUPTED = 1, 2, 3, 130

_REQUIRED = ("numpy", "rich", "torch")  # installed with this package, but a plain checkout may lack them

_MESHES = """\
meshes:
  --train  tp=2,pp=2,ep=4,etp=1,cp=1,dp=2[,vpp=2][,layers=3+1]   axes left out are 1
           dp counts dense replicas; ranks = tp*pp*cp*dp; the experts' mesh (ep, etp) lies over the same ranks
           layers gives uneven pipelines: decoder layers per stage, or per model chunk where vpp > 1
  --gen    tp=4,pp=1,dp=1[,ep=4][,layers=3+1]   ep is 1 (experts cut by tp) or tp*dp (the engine's expert parallelism)
           layers are the decoder layers per stage, as vLLM's variable VLLM_PP_LAYER_PARTITION gives them
"""

_MACHINE = """\
machines:
  --topology  h100-8, h200-8 or gb200-nvl72; then ",shared": generation rank r on the GPU of training rank r;
              then other numbers: nic=50, nvlink=400, memory=2100 in GB/s for each GPU and direction, gpus=8 a host
"""

_MACHINES = f"""\
{_MACHINE}\
  --hosts     train=a*8+b*8,gen=c*4+b*4@4   ranks in order: 8 on host a, 8 on b; 4 on c, 4 on b from its GPU 4 on
"""

_ELEMENTS = """\
elements:
  PARAM[i,j]         an HF parameter, in the coordinates of the whole parameter
  NAME[i,j]          with --gen-rank the engine's tensor on that rank, with --train-rank the trainer's
  gen:NAME[i,j], train:NAME[i,j]   the same, where NAME is also an HF parameter, which otherwise is what is meant
"""

_EXIT_CODES = "exit codes: 0 done, 1 unexpected, 2 bad input or mesh, 3 proof failed, 4 bytes differ, 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what there is to say
        return stop.code if isinstance(stop.code, int) else EXIT_INPUT
    try:
        command = importlib.import_module(f"mcore_reshard.cli.{args.command}")
        code: int = command.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has gone; keep the interpreter from saying so at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNEXPECTED
    except Exception as error:
        if args.debug:
            print(printable(traceback.format_exc()), file=sys.stderr)
        return _fail(*_outcome_of(error, args.debug))


def _fail(message: str, code: int) -> int:
    print(printable(f"mcore-reshard: {message}"), file=sys.stderr)
    return code


def _outcome_of(error: Exception, debug: bool) -> tuple[str, int]:
    """What to print, and the exit code."""
    if isinstance(error, ModuleNotFoundError) and error.name in _REQUIRED:
        return f"{error.name} is not installed: pip install {error.name}", EXIT_UNEXPECTED
    if (code := _code_of(error)) is not None:
        return str(error), code
    hint = "" if debug else "\nThis is a bug, or this environment is at fault: --debug shows the traceback."
    return f"unexpected {type(error).__name__}: {error}{hint}", EXIT_UNEXPECTED


def _code_of(error: Exception) -> int | None:
    """The exit code of an error whose message says all; None for an unexpected one."""
    from mcore_reshard.kernels.errors import RefitError, TransportUnavailable  # these take numpy
    from mcore_reshard.planner.layout.mesh import MeshError
    from mcore_reshard.planner.layout.traced import TracedLayoutError
    from mcore_reshard.planner.model.families import ConfigError
    from mcore_reshard.planner.model.precision import PrecisionError
    from mcore_reshard.planner.plan.plan_file import PlanFileError
    from mcore_reshard.planner.plan.transfers import UnknownElementError
    from mcore_reshard.planner.proof.prove import ProofError
    from mcore_reshard.planning import InputError
    from mcore_reshard.validation.errors import BuildError, ProcessError, ValidationError

    if isinstance(error, ProofError):
        return EXIT_UNSOUND
    if isinstance(
        error,
        (
            InputError,
            ConfigError,
            MeshError,
            PlanFileError,
            PrecisionError,
            TransportUnavailable,
            UnknownElementError,
        ),
    ):
        return EXIT_INPUT
    if isinstance(error, (ValidationError, BuildError, TracedLayoutError)):
        return EXIT_INPUT
    names_the_extra = isinstance(error, ImportError) and "pip install" in str(error)
    return EXIT_UNEXPECTED if isinstance(error, (RefitError, ProcessError)) or names_the_extra else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-reshard",
        description="Plan, prove and validate the refit of a Megatron-Core trainer's weights into a generation engine.",
        epilog=f"example:\n  mcore-reshard plan tiny-qwen3-moe --train tp=2,pp=2,ep=2 --gen tp=2\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mcore-reshard {__version__}")
    _add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, *examples: str, more: str = ""
) -> Callable[..., argparse.Action]:
    """Add a command; returns its `add_argument`."""
    heading = "example" if len(examples) == 1 else "examples"
    epilog = "\n".join([f"{heading}:", *(f"  {example}" for example in examples)])
    command = commands.add_parser(
        name,
        help=what,
        description=what,
        epilog=f"{epilog}\n\n{more}{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command.add_argument


def _add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = partial(_command, commands)
    add = command(
        "plan",
        "Plan a refit and prove the plan, without a GPU and without a checkpoint.",
        "mcore-reshard plan tiny-qwen3-moe --train tp=2,pp=2,ep=2 --gen tp=2 --out plan.json",
        "mcore-reshard plan deepseek-v3 --train tp=8,pp=8,ep=32,dp=4,layers=8+8+8+8+8+7+7+7 --gen tp=32,dp=4 --json",
        "mcore-reshard plan llama-3.1-8b --train tp=2,dp=8 --gen tp=1,dp=16 --topology h200-8",
        "mcore-reshard plan tiny-olmoe --train tp=2,ep=2 --gen tp=2 --traced",
        more=f"{_MESHES}\n{_MACHINES}\n",
    )
    add("config", metavar="CONFIG", help="a Hugging Face config.json, a folder with one, or a built-in name")
    _mesh_arguments(add, required=True)
    _traced_argument(add)
    add("--engine", default="vllm", metavar="NAME", help="the generation engine: vllm or sglang (default: vllm)")
    _topology_arguments(add, "plan for this machine, e.g. h200-8: ranks take from near what is near")
    add("--out", metavar="FILE", help="write the plan here, if its proof holds")

    add = command(
        "show",
        "Show what a plan does: as a whole, for one rank, or for some parameters.",
        "mcore-reshard show plan.json",
        "mcore-reshard show plan.json --rank gen:1",
        "mcore-reshard show plan.json --parameter 'model.layers.0.*' --rank train:1",
    )
    add("plan", metavar="PLAN", help="a file written by `mcore-reshard plan --out`")
    add("--rank", metavar="WORLD:RANK", help="only what this rank sends or receives: train:0, gen:3")
    add("--parameter", metavar="GLOB", help="only parameters whose HF name matches (* ? [...])")

    add = command(
        "explain",
        "Say where one element comes from and where it goes: ranks, tensors, offsets, route and stage.",
        "mcore-reshard explain plan.json 'model.layers.0.self_attn.q_proj.weight[5,3]' --gen-rank 1",
        "mcore-reshard explain plan.json 'model.layers.0.self_attn.qkv_proj.weight[5,3]' --gen-rank 1",
        "mcore-reshard explain plan.json 'vp0.decoder.layers.0.self_attention.linear_qkv.weight[5,3]' --train-rank 0",
        more=f"{_ELEMENTS}\n",
    )
    add("plan", metavar="PLAN", help="a file written by `mcore-reshard plan --out`")
    add("element", metavar="'PARAM[i,j]'", help="the element, quoted against the shell")
    add("--gen-rank", metavar="N", type=int, help="only what this generation rank receives")
    add("--train-rank", metavar="N", type=int, help="only what this training rank sends")

    add = command(
        "validate",
        "Refit a real model between real processes and compare every byte with the golden path.",
        "mcore-reshard validate tiny-qwen3-moe --train tp=2,pp=2,ep=2 --gen tp=2",
        "mcore-reshard validate plan.json --transport gloo --json",
        more=f"{_MESHES}\n",
    )
    add("source", metavar="CONFIG|PLAN", help="a config as for `plan`, or a plan file with its meshes and policy")
    _mesh_arguments(add, required=False)
    _traced_argument(add)
    add("--config", metavar="CONFIG", help="with a PLAN of a model that is not built in: its config")
    add(
        "--transport",
        choices=("gloo", "nccl", "direct", "auto"),
        default="gloo",
        help="gloo moves a model on the CPU (default), the others one on this machine's GPUs",
    )
    add(
        "--engine",
        choices=("auto", "vllm", "slices"),
        default="auto",
        help="a real vLLM model, or plain slices of the golden tensors; auto: vLLM where it is installed",
    )
    add("--refits", type=int, default=3, metavar="N", help="each with new weights (default: 3)")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="deadline of every wait (default: 60)")

    add = command(
        "simulate",
        "Predict how long a refit takes on a machine, and what it waits for, without a GPU.",
        "mcore-reshard simulate plan.json --topology h200-8",
        "mcore-reshard simulate qwen3-235b-a22b --train tp=2,pp=8,ep=8,dp=4,layers=12+12+12+12+12+12+11+11 \\\n"
        "      --gen tp=8,dp=4 --gen tp=4,dp=8 --topology h200-8,nic=50",
        more=f"{_MESHES}\n{_MACHINES}\n",
    )
    add("source", metavar="PLAN|CONFIG", help="a file written by `plan --out`; or a config as for `plan`, with meshes")
    _topology_arguments(add, "the machine, e.g. h200-8 or h200-8,shared,nic=25 (default: the plan's)")
    add("--train", metavar="MESH", help="with a CONFIG: the training mesh")
    add("--gen", metavar="MESH", action="append", help="with a CONFIG: the generation mesh; several are compared")
    add("--engine", default="vllm", metavar="NAME", help="with a CONFIG: vllm or sglang (default: vllm)")
    _simulated_transport(add)

    add = command(
        "advise",
        "Find the meshes with the fastest refits among those that fit in memory, and say why.",
        "mcore-reshard advise qwen3-30b-a3b --gpus-train 16 --gpus-gen 8",
        "mcore-reshard advise llama-3.1-8b --gpus-train 8 --gpus-gen 8 --topology h200-8,shared --json",
        more=f"{_MACHINE}\n",
    )
    add("config", metavar="CONFIG", help="a Hugging Face config.json, a folder with one, or a built-in name")
    add("--gpus-train", metavar="N", type=int, required=True, help="GPUs of the trainer")
    add("--gpus-gen", metavar="N", type=int, required=True, help="GPUs of the engine")
    add("--topology", metavar="MACHINE", default="h200-8", help="the machine, as for `plan` (default: h200-8)")
    _dtype_arguments(add)

    add = command(
        "report",
        "Draw a plan as one HTML page that needs no network: who sends what to whom, when, and over which links.",
        "mcore-reshard report plan.json -o report.html",
        "mcore-reshard report plan.json -o report.html --topology h200-8",
        "mcore-reshard report plan.json -o report.html --topology h200-8 --measured traces/*.json",
        more=f"{_MACHINES}\n",
    )
    add("plan", metavar="PLAN", help="a file written by `mcore-reshard plan --out`")
    add("-o", "--out", metavar="FILE", required=True, help="write the page here")
    _topology_arguments(add, "the machine, e.g. h200-8: adds times and links (default: the plan's)")
    _simulated_transport(add)
    add(
        "--measured",
        metavar="TRACE",
        nargs="+",
        help="traces of a live run's ranks, as `write_trace` writes them: adds measured beside predicted",
    )

    add = command(
        "store",
        "Serve the store at which a refit's ranks meet, in a process that outlives them, until it is interrupted.",
        "mcore-reshard store --host 10.0.0.1 --port 29600",
    )
    add("--host", metavar="HOST", help="listen at this address alone (default: loopback, for ranks of this machine)")
    add("--port", metavar="PORT", type=int, default=29600, help="0: any that is free (default: 29600)")

    add = command(
        "watch",
        "Show who is in a session, which version each rank has, and who is late. It takes no part and changes nothing.",
        "mcore-reshard watch 10.0.0.1:29600",
        "mcore-reshard watch 10.0.0.1:29600 --session refit --once",
        more="A session with a token needs it in MCORE_RESHARD_TOKEN, or in a file.\n\n",
    )
    add("store", metavar="STORE", help="host:port of the store")
    add("--session", metavar="NAME", help="the session (default: the only one of the store)")
    add("--token-file", metavar="FILE", help="a file with the session's token")
    add("--once", action="store_true", help="print once (default: every second on a terminal, once elsewhere)")

    command("doctor", "Say what this machine can run, and why not the rest.", "mcore-reshard doctor")


def _mesh_arguments(add: Callable[..., argparse.Action], required: bool) -> None:
    add("--train", metavar="MESH", required=required, help="training mesh, e.g. tp=2,pp=2,ep=4,dp=2")
    add("--gen", metavar="MESH", required=required, help="generation mesh, e.g. tp=4,dp=2")
    _dtype_arguments(add)
    add(
        "--policy",
        choices=("exact", "conservative"),
        default="exact" if required else None,
        help="exact: cut or replicate KV heads wherever both ends allow it; conservative: with fewer KV heads than"
        " either tp, attention inputs take the misc route (default: exact)",
    )


def _dtype_arguments(add: Callable[..., argparse.Action]) -> None:
    for side, what in (("train", "the trainer"), ("gen", "the engine")):
        add(
            f"--{side}-dtype",
            metavar="bf16|fp32|fp8|mxfp8",
            help=f"what {what} holds: fp8 in the blocks of the config's quantization_config (default: the config's dtype)",
        )


def _topology_arguments(add: Callable[..., argparse.Action], purpose: str) -> None:
    add("--topology", metavar="MACHINE", help=purpose)
    add(
        "--hosts",
        metavar="PLACES",
        type=_hosts,
        help="with --topology: which ranks live on which host (default: in order)",
    )


def _hosts(text: str) -> str:
    if not text.strip():  # an unset variable of a script
        raise argparse.ArgumentTypeError("it is empty: leave it out, or say which ranks are on which host")
    return text


def _simulated_transport(add: Callable[..., argparse.Action]) -> None:
    add(
        "--transport",
        choices=("auto", "direct", "nccl", "gloo"),
        default="auto",
        help="what is simulated; auto (default): direct within an NVLink domain, nccl elsewhere",
    )


def _traced_argument(add: Callable[..., argparse.Action]) -> None:
    add(
        "--traced",
        action="store_true",
        help="read the layouts off the loaders of Megatron-Bridge and the engine, which must be installed: for any model that"
        " both can load, also without layout rules",
    )


if __name__ == "__main__":
    sys.exit(main())
