"""`gradwire profile`: the table and the trace of a profile, made of the records of its ranks or of PyTorch's traces."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire.cli.commands import Commands, add
from gradwire.core.atomic_file import write_atomically

OK = 0

PROFILE_HELP = """\
gradwire.profile(model, "profile", session=session) around a training loop leaves the records in the folder, and rank 0
makes the rest of them. Where a run broke off, gather the files rankN.json of all ranks in one folder, and give that
folder to this command. Open trace.json at https://ui.perfetto.dev.

Traces of torch.profiler, of Gloo or NCCL, one a rank, are files .json or .json.gz, or a folder of them. Of these the
command tells communication and computation at once, idle time, bytes of collectives, and what took longest.

examples
  gradwire profile profile
  gradwire profile profile --skip 10 --tensorboard runs/int4
  gradwire profile traces/rank0.json.gz traces/rank1.json.gz
  gradwire profile traces --json overlap.json
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    profile = add(
        commands,
        "profile",
        help="what the steps of a profiled run were spent on, and who was waited for",
        description="Make the table and the trace of a profile of the records of its ranks, or read torch.profiler's.",
        epilog=PROFILE_HELP,
    )
    profile.add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="a folder with rank0.json, rank1.json, ..., or traces"
    )
    profile.add_argument("--skip", type=int, default=3, metavar="N", help="first steps that do not count (default: 3)")
    profile.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    profile.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="write each step's figures there as scalars, of records only"
    )
    profile.set_defaults(run=run_profile)


def run_profile(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire profile PATH ...` and return its exit status.

    Raises:
        ProfileError: no records and no traces, or some that cannot be read or do not belong together.
    """
    from gradwire.profiling import ProfileError
    from gradwire.profiling.torch_trace import holds_torch_traces

    paths: Sequence[Path] = arguments.paths
    if len(paths) == 1 and not holds_torch_traces(paths[0]):
        figures = _tell_records(paths[0], arguments.skip, arguments.tensorboard, console)
    else:
        if arguments.tensorboard is not None:
            raise ProfileError(
                "--tensorboard goes with the folder of a profile: traces of torch.profiler have no steps"
            )
        figures = _tell_torch_traces(paths, console)
    if arguments.json is not None:
        write_atomically(arguments.json, json.dumps(figures, indent=1) + "\n")
    return OK


def _tell_records(folder: Path, skip: int, scalars: Path | None, console: Console) -> dict[str, Any]:
    from gradwire.cli.lines import say
    from gradwire.profiling import account, read_records, summary, write_chrome_trace, write_scalars
    from gradwire.report.profile import write_profile_page

    trace, page = folder / "trace.json", folder / "profile.html"
    records = read_records(folder)
    write_chrome_trace(trace, records)
    write_profile_page(records, page, skip)
    if scalars is not None:
        write_scalars(records, scalars)
    found = account(records, skip)
    say(console, summary(found))
    say(console, f"\ntrace: {trace}\npage: {page}")
    return found.as_dict()


def _tell_torch_traces(paths: Sequence[Path], console: Console) -> dict[str, Any]:
    from gradwire.cli.lines import say
    from gradwire.profiling import read_torch_traces, torch_account, torch_summary

    found = torch_account(read_torch_traces(*paths))
    say(console, torch_summary(found))
    return found.as_dict()
