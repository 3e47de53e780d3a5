"""`gradwire run`: a training script as it is, with its gradients compressed."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from gradwire.cli.commands import Commands, add

OK, FAILED = 0, 1

RUN_HELP = """\
examples
  gradwire run --method int4 --nproc 2 train.py --epochs 3
  torchrun --nproc-per-node 8 -m gradwire run --method powersgd:8,factors=fp16 train.py
  gradwire run --method int4 --nproc 2 -m package.train --epochs 3
  gradwire run --method int4 --parameters int8 --nproc 4 train_fsdp2.py
  gradwire run --method int4 --records records --deadline 60 --nproc 2 train.py
  gradwire run --method int4 train_that_spawns.py
  gradwire run --profile profile --live --nproc 2 train.py

Whatever follows the script is the script's own. So is the status; with --nproc it is that of the first rank to fail.
"""


def add_commands(commands: Commands) -> None:
    """Add it to the command line."""
    run = add(
        commands,
        "run",
        help="run a training script as it is, and compress the gradients of its DDP or FSDP2 models, or profile them",
        description="Run a training script as it is, and let a method combine the gradients of every model of "
        "DistributedDataParallel or fully_shard (FSDP2) that it trains.",
        epilog=RUN_HELP,
        allow_abbrev=False,  # else what follows the script is searched for abbreviations of these options
    )
    run.add_argument("--method", metavar="SPEC", help="what combines gradients: int4, topk:0.01, ...")
    run.add_argument(
        "--profile", metavar="DIR", help="keep where steps go, for gradwire profile DIR; with or without --method"
    )
    run.add_argument(
        "--live", action="store_true", help="with --profile: tell how the run goes, for gradwire watch DIR"
    )
    run.add_argument(
        "--parameters", metavar="SPEC", help="what models of fully_shard gather parameters in: int8, int4, fp8, bf16"
    )
    run.add_argument(
        "--nproc", type=int, metavar="N", help="start N ranks on this machine (default: this process is a rank)"
    )
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of the method's random choices (default: 0)")
    run.add_argument(
        "--deadline", type=float, metavar="S", help="seconds after which a silent rank is an error (default: 300)"
    )
    run.add_argument(
        "--residuals",
        choices=("device", "host"),
        default="device",
        help="where what is owed lies between steps: host frees memory of a GPU (default: device)",
    )
    run.add_argument(
        "--records",
        type=Path,
        metavar="DIR",
        help="where each rank leaves its flight record when the run dies or hangs, for gradwire stacks DIR",
    )
    run.add_argument(
        "--no-states",
        dest="states",
        action="store_false",
        help="leave no FILE.gradwire beside each FILE that the script saves and no gradwire in the checkpoints of "
        "torch.distributed.checkpoint, and look for none",
    )
    run.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    run.add_argument(
        "script", nargs=argparse.PARSER, action=_Script, metavar="SCRIPT", help="the training script, and its arguments"
    )
    run.set_defaults(run=run_script)


class _Script(argparse.Action):
    """Takes the script and whatever follows it, a first `--` included: a positional of its own would lose that one."""

    def __call__(self, _: object, namespace: argparse.Namespace, values: Any, __: object = None) -> None:
        namespace.script, *namespace.arguments = values[1:] if values[0] == "--" and len(values) > 1 else values


def run_script(arguments: argparse.Namespace, _: Console) -> int:
    """`gradwire run --method SPEC [--nproc N] SCRIPT ...`."""
    from gradwire.adapters.fsdp2.gather import parameter_codec
    from gradwire.choosing.automatic import accuracy_of
    from gradwire.core.errors import SpecError
    from gradwire.flight.record import VARIABLE
    from gradwire.spec import for_shards

    if arguments.method is None and arguments.profile is None:
        raise SpecError("give --method SPEC, such as --method int4, or --profile DIR, or both")
    if arguments.live and arguments.profile is None:
        raise SpecError("--live goes with --profile DIR, the folder that gradwire watch is given")
    if arguments.method is None and arguments.parameters is not None:
        raise SpecError("--parameters goes with a --method: give one, such as --method int4")
    codec = arguments.parameters
    if arguments.method is not None and accuracy_of(arguments.method) is None:
        reducer, codec = for_shards(arguments.method, codec)  # refuses what cannot be built before anything starts
        if reducer.weighs:
            raise SpecError(
                f"weights=given in {arguments.method!r} needs a script that calls session.weigh() in each step: attach "
                "in the script, or write the weights of all ranks, as weights=3/1"
            )
    if codec is not None:
        parameter_codec(codec)
    if not arguments.module and not Path(arguments.script).is_file():
        raise SpecError(f"there is no script {arguments.script}: give its path, or -m and the name of a module")
    if arguments.records is not None:  # ranks, and processes that a script starts, inherit it
        os.environ[VARIABLE] = str(arguments.records.absolute())
    if arguments.nproc is None:
        return _as_rank(arguments)
    if arguments.nproc < 1:
        raise SpecError(f"--nproc {arguments.nproc}: there must be at least 1 rank")
    return _start_ranks(arguments)


def _start_ranks(arguments: argparse.Namespace) -> int:
    """Let torchrun start ranks that run this command without `--nproc`; returns the first failed one's status."""
    options = ["--method", arguments.method] if arguments.method is not None else []
    options += ["--seed", str(arguments.seed)]
    options += ["--profile", arguments.profile] if arguments.profile is not None else []
    options += ["--live"] if arguments.live else []
    options += ["--parameters", arguments.parameters] if arguments.parameters is not None else []
    options += ["--deadline", str(arguments.deadline)] if arguments.deadline is not None else []
    options += ["--residuals", arguments.residuals] if arguments.residuals != "device" else []
    options += [] if arguments.states else ["--no-states"]
    options += ["-m"] if arguments.module else []
    return start_ranks(arguments.nproc, ["run", *options, arguments.script, *arguments.arguments])


def start_ranks(ranks: int, words: list[str]) -> int:
    """Let torchrun start ranks of `gradwire WORDS` on this machine; returns the first failed one's status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    given = torchrun.parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "gradwire"])
    given.training_script_args = words  # not parsed: torchrun would search them for abbreviations of its own options
    try:
        torchrun.run(given)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _say(f"rank {rank} was the first to fail, {_ended(failure.exitcode)}")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return OK


def _ended(status: int) -> str:
    return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"


def _as_rank(arguments: argparse.Namespace) -> int:
    """Run the script in this process, and say on rank 0 what was attached to and saved.

    Raises:
        GradwireError: a model of the script could not be attached to.
    """
    from gradwire.adapters.watched import ScriptWatch, WatchedProcess

    given = {} if arguments.deadline is None else {"deadline_s": arguments.deadline}
    watch = ScriptWatch(
        arguments.method,
        arguments.parameters,
        arguments.seed,
        states=arguments.states,
        profile=arguments.profile,
        live=arguments.live,
        residuals=arguments.residuals,
        **given,
    )
    watched, status = WatchedProcess(watch), OK
    try:
        with watched.watching():
            _execute(arguments)
    except SystemExit as left:
        status = _status(left)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if error is watched.unchanged.refused:  # the script is not at fault: its place in it says nothing
            raise
        trace = _from_script(error.__traceback__, arguments.script)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return FAILED
    for sentence in watched.summary():
        watched.say(sentence)
    return status


def _status(left: SystemExit) -> int:
    """What Python would end with; a text is printed."""
    if left.code is None or isinstance(left.code, int):
        return left.code or OK
    print(left.code, file=sys.stderr)
    return FAILED


def _execute(arguments: argparse.Namespace) -> None:
    """What `python SCRIPT ...` or `python -m MODULE ...` would do."""
    script: str = arguments.script
    sys.argv = [script, *arguments.arguments]
    sys.path.insert(0, str(Path.cwd() if arguments.module else Path(script).resolve().parent))
    try:
        if arguments.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if left.code:  # a script may also end well by sys.exit()
            raise


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The part of a traceback that begins in the script, all of it where it never came there."""
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename != script:
        at = at.tb_next
    return at or trace


def _say(sentence: str) -> None:
    print(f"gradwire: {sentence}", file=sys.stderr, flush=True)
