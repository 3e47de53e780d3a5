"""The `gradwire` command: its parser, and what runs each part of it."""

from __future__ import annotations

import argparse
import errno
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gradwire.cli import (
    bench,
    cases,
    choose,
    config,
    doctor,
    federate,
    inform,
    nccl,
    net,
    overlap,
    plan,
    profile,
    run,
    schedule,
    simulate,
    stacks,
    state,
    store,
    topology,
    train,
    watch,
)
from gradwire.cli.commands import add
from gradwire.cli.option_arguments import add_options, read_options
from gradwire.compare.options import CompareOptions
from gradwire.core.errors import GradwireError

if TYPE_CHECKING:
    from gradwire.compare.results import Comparison

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

METHODS_HELP = """\
methods
  gradwire specs        int4, int8, topk:0.01, topk:0.01+int8, powersgd:4, sign, fp16, ...
  torch.fp32            DistributedDataParallel as it is
  torch.fp16, .bf16     PyTorch's half-precision hooks
  torch.powersgd:R      PyTorch's PowerSGD hook of rank R, in one bucket (it crashes with two on Gloo)
  torch.noop            sends nothing: the floor that computation sets

  under --engine fsdp2: gradwire specs that can end with shards, and torch.fp32, .bf16 (which computes in bfloat16,
  too) and .noop. parameters= is the codec that parameters are gathered in: int8,parameters=int8

tasks
  bytes                 a byte-level GPT of 1.85 M parameters on the standard library's sources, or on --text
  digits                8x8 handwritten digits, a small convolutional net
  package.module:name   your own: a function of a seed that returns a gradwire.tasks.task.Task,
                        or (model, batch, loss, metric)

targets
  (none)                the training loss torch.fp32 ends at, seed by seed
  2.1                   this training loss
  metric:98             this value of the metric on held-out data
  method:SPEC           the training loss this method ends at, such as method:torch.powersgd:4

examples
  gradwire compare
  gradwire compare --methods torch.fp32 torch.fp16 int4 --rate 1gbit --seeds 3
  gradwire compare --task digits --minutes 0.5 --target metric:98
  gradwire compare --engine fsdp2 --rate 1gbit
  gradwire compare --task mine.train:task --hosts 2 --steps 100 --out mine-report

A comparison that was interrupted goes on where it stopped when the same command is given again.
"""


GROUPS = {
    "train": ("run", "train", "compare", "report", "federate", "net", "store"),
    "choose a method": ("choose", "methods", "recipes", "cost"),
    "ask before you buy": ("plan", "simulate", "schedule", "cases"),
    "see what a run does": ("profile", "watch", "overlap", "stacks"),
    "keep what it has saved": ("state", "reshard"),
    "set up a cluster": ("doctor", "bench", "topology", "nccl", "config"),
}
"""Commands by what somebody wants, as `gradwire --help` shows them."""


class _Version(argparse.Action):
    """Prints what a bug report should say, and ends."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "nargs": 0})

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(inform.versions())
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="gradwire",
        usage="gradwire [-h] [--version] COMMAND ...",
        description="Train PyTorch models over networks slower than their processors.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action=_Version, help="show the versions of gradwire and of what it runs on")
    commands = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="gradwire", help=argparse.SUPPRESS
    )
    compare = add(
        commands,
        "compare",
        help="train with several methods on an emulated slow network, and report the time to the same loss",
        description="Train one task with several methods on an emulated slow network, and report what each sends, "
        "where its time goes, and how soon it reaches the same loss.",
        epilog=METHODS_HELP,
    )
    add_options(compare, CompareOptions)
    compare.set_defaults(run=run_compare)
    report = commands.add_parser("report", help="rebuild report and tables from a folder's results.json")
    report.add_argument("folder", type=Path, metavar="DIR", help="output folder of gradwire compare")
    report.set_defaults(run=run_report)
    net.add_commands(commands)
    federate.add_command(commands)
    inform.add_commands(commands)
    choose.add_command(commands)
    run.add_commands(commands)
    state.add_commands(commands)
    store.add_commands(commands)
    topology.add_commands(commands)
    overlap.add_command(commands)
    profile.add_command(commands)
    watch.add_command(commands)
    doctor.add_command(commands)
    nccl.add_commands(commands)
    config.add_commands(commands)
    bench.add_command(commands)
    plan.add_command(commands)
    simulate.add_command(commands)
    schedule.add_command(commands)
    train.add_command(commands)
    cases.add_command(commands)
    stacks.add_command(commands)
    lines = commands._get_subactions()  # pyright: ignore[reportPrivateUsage]
    root.epilog = _grouped({each.dest: each.help or "" for each in lines})
    return root


def _grouped(helps: Mapping[str, str]) -> str:
    """The commands by `GROUPS`, each with its line of help."""
    lines: list[str] = []
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            indent = " " * 12
            lines.append(textwrap.fill(helps[name], 79, initial_indent=f"  {name:10}", subsequent_indent=indent))
    return "\n".join([*lines[1:], "", "gradwire COMMAND --help tells of each."])


def run_compare(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire compare` and return its exit status."""
    from gradwire.cli.console import ConsoleView, show_table
    from gradwire.cli.lines import say
    from gradwire.compare import compare, verdict  # torch takes seconds to import: --help should not wait for it

    options = read_options(arguments, CompareOptions)
    view = ConsoleView(console)
    try:
        comparison = compare.compare(options, view)
    except KeyboardInterrupt:
        view.close()
        kept = f"finished runs are kept in {options.out}; the same command goes on from there"
        say(console, f"interrupted: {kept}")
        return INTERRUPTED
    finally:
        view.close()
    judged = verdict.judge(comparison)
    show_table(console, comparison, judged)
    _write_report(comparison, options.out, console)
    return FAILED if judged.alarm else OK


def run_report(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire report DIR` and return its exit status."""
    from gradwire.cli import federate
    from gradwire.cli.console import show_table
    from gradwire.compare import compare, storage, verdict
    from gradwire.federate import results as federation_results

    folder: Path = arguments.folder.parent if arguments.folder.name == "results.json" else arguments.folder
    results = folder / "results.json"
    if federation_results.is_federation(results):
        federate.show(federation_results.load(results), folder, console)
        return OK
    comparison = storage.load(results)
    compare.write_derived(comparison, folder)
    show_table(console, comparison, verdict.judge(comparison))
    _write_report(comparison, folder, console)
    return OK


def _write_report(comparison: Comparison, folder: Path, console: Console) -> None:
    from gradwire.cli.lines import say
    from gradwire.report import write_report

    write_report(comparison, folder / "report.html")
    say(console, f"\nreport: {folder / 'report.html'}")


def _console() -> Console:
    """Standard output; a pipe has no width, so tables there have the room they want."""
    console = Console()
    return console if console.is_terminal else Console(width=190)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0 is success, 1 a failed method, a loss or a metric that is not finite or anything else that went wrong, 2 a wrong
    command line, 130 an interrupt.
    """
    arguments = parser().parse_args(argv)
    run: Callable[[argparse.Namespace, Console], int] = arguments.run
    try:
        return run(arguments, _console())
    except KeyboardInterrupt:
        return INTERRUPTED
    except GradwireError as error:
        return _say(str(error), MISUSED if isinstance(error, ValueError) else FAILED)
    except OSError as error:
        return _say(_about(error), FAILED)


def _about(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"the disk is full{where}; finished runs are kept, the same command goes on once there is room"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission{where}; give another --out"
    return f"{error.strerror or error}{where}"


def _say(sentence: str, status: int) -> int:
    print(f"gradwire: {sentence}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
