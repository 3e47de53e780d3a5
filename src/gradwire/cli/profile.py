"""`gradwire profile`: the table and the trace of a profile, made of the records of its ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from gradwire.cli.commands import Commands, add

OK = 0

PROFILE_HELP = """\
gradwire.profile(model, "profile", session=session) around a training loop leaves the records in the folder, and rank 0
makes the rest of them. Where a run broke off, gather the files rankN.json of all ranks in one folder, and give that
folder to this command. Open trace.json at https://ui.perfetto.dev.

examples
  gradwire profile profile
  gradwire profile profile --skip 10
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    profile = add(
        commands,
        "profile",
        help="what the steps of a profiled run were spent on, and who was waited for",
        description="Make the table and the trace of a profile of the records of its ranks.",
        epilog=PROFILE_HELP,
    )
    profile.add_argument("folder", type=Path, metavar="DIR", help="with rank0.json, rank1.json, ...")
    profile.add_argument("--skip", type=int, default=3, metavar="N", help="first steps that do not count (default: 3)")
    profile.set_defaults(run=run_profile)


def run_profile(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire profile DIR` and return its exit status.

    Raises:
        ProfileError: a folder without records, or with some that cannot be read or do not belong together.
    """
    from gradwire.cli.lines import say
    from gradwire.profiling import account, read_records, summary, write_chrome_trace
    from gradwire.report.profile import write_profile_page

    trace, page = arguments.folder / "trace.json", arguments.folder / "profile.html"
    records = read_records(arguments.folder)
    write_chrome_trace(trace, records)
    write_profile_page(records, page, arguments.skip)
    say(console, summary(account(records, arguments.skip)))
    say(console, f"\ntrace: {trace}\npage: {page}")
    return OK
