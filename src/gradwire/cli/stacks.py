"""`gradwire stacks`: why a run hangs or died, and which rank differs, from the flight records of all ranks."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gradwire.cli.commands import Commands, add

if TYPE_CHECKING:
    from gradwire.flight import Diagnosis

OK, DIFFERS = 0, 1
_WHY = 100
"""Characters of the reason of a record that a line shows."""

STACKS_HELP = """\
DIR is what GRADWIRE_RECORDS named when the run was started, records= of gradwire.attach or gradwire.Session, or
--records of gradwire run. The ranks of other hosts are read too where DIR is shared, or once their files are copied.

examples
  gradwire stacks records              the records as they are: of a run that died
  gradwire stacks records --ask        have every rank that is alive write what it does now: of a run that hangs
  gradwire stacks records --threads    all threads of all ranks
  gradwire stacks records --json

The status is 0 where no rank differs, 1 where one does, and 2 without records that can be read.
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    stacks = add(
        commands,
        "stacks",
        help="why a run hangs or died, and which rank differs: from the flight records of all ranks",
        description="Read the flight records of all ranks, and name the first rank that differs, with its stack.",
        epilog=STACKS_HELP,
    )
    stacks.add_argument("folder", type=Path, metavar="DIR", help="the folder with the records")
    stacks.add_argument("--ask", action="store_true", help="have every rank that is alive write what it does now")
    stacks.add_argument(
        "--wait", type=float, default=5.0, metavar="S", help="seconds to wait for answers to --ask (default: 5)"
    )
    stacks.add_argument(
        "--threads", action="store_true", help="show all threads of all ranks, not the first that differ"
    )
    stacks.add_argument("--json", action="store_true", help="print what a program reads")
    stacks.set_defaults(run=run_stacks)


def run_stacks(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire stacks` and return its exit status.

    Raises:
        FlightError: there are no records, or they do not belong together.
    """
    from gradwire.flight import stacks_of

    found = stacks_of(arguments.folder, arguments.ask, arguments.wait)
    if arguments.json:
        json.dump(asdict(found), sys.stdout, indent=1)
        print()
    else:
        _show(console, found, arguments.threads)
    return DIFFERS if found.ranks else OK


def _show(console: Console, found: Diagnosis, all_threads: bool) -> None:
    from gradwire.cli.lines import say

    say(console, (found.sentence, "bold"))
    for note in found.notes:
        say(console, ("! ", "yellow"), note)
    say(console, "")
    for line in found.lines:
        mark = ("✗ ", "red") if line.rank in found.ranks else "  "
        why = line.why if len(line.why) <= _WHY else f"{line.why[:_WHY]}..."
        said = f"  ({line.state}: {why})" if why else ""
        say(console, mark, (f"rank {line.rank}", "bold"), f" {line.doing}", (said, "dim"))
    for line in found.lines:
        if line.stack and (all_threads or line.rank in found.ranks):
            say(console, "")
            say(console, (f"rank {line.rank}", "bold"), f", {line.stack if all_threads else line.main_stack}")
