"""`gradwire doctor`: is this host, and are these ranks, set up right?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gradwire.cli.commands import Commands, add

if TYPE_CHECKING:
    from gradwire.doctor import Examination

OK, FAILED = 0, 1

DOCTOR_HELP = """\
By itself the command checks this host: versions, GPUs, NVLinks, RDMA and Ethernet ports, interfaces, limits, and the
variables of NCCL, Gloo and PyTorch. Started by torchrun on all hosts, it compares ranks as well, connects each host to
each other one, compares their clocks, sums a tensor up over all ranks and checks it, and measures latency and bandwidth
of each pair of hosts. --hosts does that on hosts that are emulated on this machine.

exit status
  0   nothing is worse than a note
  1   there is a warning or an error, or the examination failed
  2   the command line is wrong

examples
  gradwire doctor
  MASTER_ADDR=node0 MASTER_PORT=29500 gradwire doctor     is the port open from here?
  torchrun --nnodes 2 --nproc-per-node 1 ... -m gradwire doctor --json doctor.json
  gradwire doctor --hosts 2 --rate 100mbit
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    doctor = add(
        commands,
        "doctor",
        help="is this host set up right? under torchrun, are all ranks, and what do their links carry?",
        description="Check this host, or under torchrun all ranks and what lies between them; the worst comes first.",
        epilog=DOCTOR_HELP,
    )
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write all findings here too")
    doctor.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds to wait for ranks that do not come (default: 30)",
    )
    emulated = doctor.add_argument_group("on hosts that are emulated on this machine")
    emulated.add_argument("--hosts", type=int, metavar="N", help="how many; one rank runs on each")
    emulated.add_argument("--rate", metavar="RATE", help="of every link (default: 100mbit)")
    emulated.add_argument("--delay", metavar="TIME", help="of a round trip between two hosts: 50ms (default: 0)")
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire doctor` and return its exit status.

    Raises:
        SpecError: --rate or --delay without --hosts, or numbers that make no sense.
        NetworkError: hosts cannot be emulated here.
    """
    from gradwire.core.errors import SpecError
    from gradwire.doctor import examine_host, examine_ranks

    if not 0 < arguments.timeout < float("inf"):
        raise SpecError(f"--timeout {arguments.timeout:g} is no time to wait: give seconds, such as 30")
    if arguments.hosts is not None:
        return _on_emulated_hosts(arguments, console)
    if arguments.rate is not None or arguments.delay is not None:
        raise SpecError("--rate and --delay are of emulated hosts: give --hosts 2 too")
    if "RANK" not in os.environ:
        return _told(examine_host(), arguments.json, console)
    found = examine_ranks(arguments.timeout)
    # Rank 0 speaks for all, since all have the same, unless they have not met.
    is_speaker = os.environ["RANK"] == "0" or not found.have_met
    return _told(found, arguments.json, console) if is_speaker else found.status


def _told(found: Examination, file: Path | None, console: Console) -> int:
    """Print what was found, and write it down; return the exit status."""
    from gradwire.cli.lines import say

    say(console, str(found))
    if file is not None:
        file.write_text(json.dumps(found.to_words(), indent=1) + "\n", encoding="utf-8")
        say(console, f"findings: {file}")
    return found.status


def _on_emulated_hosts(arguments: argparse.Namespace, console: Console) -> int:
    """Run the same command on each of several emulated hosts; show what rank 0 says."""
    from gradwire.cli.lines import say
    from gradwire.core.errors import SpecError
    from gradwire.ranks.net_exec import execute
    from gradwire.ranks.supervised import RankFailure

    words = [sys.executable, "-m", "gradwire", "doctor", "--timeout", str(arguments.timeout)]
    words += [] if arguments.json is None else ["--json", str(arguments.json.absolute())]
    said: list[str] = []

    def show(host: int, line: str) -> None:
        if host == 0:
            said.append(line)
            say(console, line)

    try:
        execute(
            words,
            hosts=arguments.hosts,
            rate=arguments.rate or "100mbit",
            delay=arguments.delay or "0",
            on_line=show,
            on_network=lambda text: say(console, text),
        )
    except RankFailure as failure:
        if failure.status != FAILED or not said:  # it is no diagnosis that rank 0 has told
            raise
        return FAILED
    except ValueError as error:
        raise SpecError(str(error)) from error
    return OK
