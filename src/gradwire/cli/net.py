"""`gradwire net`: programs of one's own on emulated hosts, and what crashed comparisons have left behind."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from gradwire.cli.commands import Commands, add

OK, FAILED, MISUSED = 0, 1, 2

EXEC_HELP = """\
The program runs once on each host, in the folder and with the files of this one. It finds the variables that launchers
set (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK), and torchrun takes its --nnodes, --node-rank,
--master-addr and --master-port from PET_... variables, so neither needs arguments. If one copy fails all are ended, and
the command ends with the status of that one.

examples
  gradwire net exec -- torchrun train.py
  gradwire net exec --hosts 4 --rate 1gbit --delay 20ms -- python train.py
  gradwire net exec --rate 100mbit -- gradwire run --method int4 train.py
"""


def add_commands(commands: Commands) -> None:
    """Add them to the command line."""
    net = commands.add_parser("net", help="emulated networks: run a script of yours on one; clean up")
    actions = net.add_subparsers(required=True, metavar="ACTION")
    execute = add(
        actions,
        "exec",
        help="run a program of your own, unchanged, on hosts that slow links join",
        description="Run a program of your own, unchanged, on hosts that slow links join.",
        epilog=EXEC_HELP,
    )
    execute.add_argument("--hosts", type=int, default=2, metavar="N", help="how many (default: 2)")
    execute.add_argument(
        "--rate", default="100mbit", metavar="RATE", help="of every link: 100mbit, 1gbit, ... (default: 100mbit)"
    )
    execute.add_argument(
        "--delay", default="0", metavar="TIME", help="of a round trip between two hosts, as ping shows it: 50ms"
    )
    execute.add_argument(
        "--loss", default="0", metavar="SHARE", help="of frames between two hosts, in each direction: 0.1%%"
    )
    execute.add_argument(
        "--deadline", type=float, metavar="S", help="seconds after which all are ended (default: none)"
    )
    execute.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep what each host writes here, as rank0.log and so on"
    )
    execute.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what to run")
    execute.set_defaults(run=run_exec)
    clean = actions.add_parser("clean", help="remove what crashed comparisons have left behind")
    clean.set_defaults(run=run_clean)


def run_exec(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire net exec` and return its exit status."""
    from gradwire.cli.lines import say
    from gradwire.core.figures import si_bytes
    from gradwire.ranks.net_exec import execute
    from gradwire.ranks.supervised import RankFailure

    program: list[str] = arguments.program
    if program[:1] == ["--"]:
        program = program[1:]
    try:
        executed = execute(
            program,
            hosts=arguments.hosts,
            rate=arguments.rate,
            delay=arguments.delay,
            loss=arguments.loss,
            deadline_s=arguments.deadline,
            logs=arguments.logs,
            on_line=lambda host, line: say(console, f"host {host} | {line}"),
            on_network=lambda text: say(console, text),
        )
    except ValueError as error:
        print(f"gradwire: {error}", file=sys.stderr)
        return MISUSED
    except RankFailure as failure:
        print(f"gradwire: {_which(failure.rank, failure.status)}", file=sys.stderr)
        return failure.status if failure.status is not None and failure.status > 0 else FAILED
    say(console, f"all ended after {executed.seconds:.1f} s")
    for host, (sent, received) in enumerate(zip(executed.sent_bytes, executed.received_bytes, strict=True)):
        say(console, f"host {host} sent {si_bytes(sent)} and received {si_bytes(received)}, headers included")
    return OK


def _which(host: int, status: int | None) -> str:
    """What ended a run, whose output has been shown already."""
    if status is None:
        return f"host {host} was still running at the deadline, and all were ended"
    if status < 0:
        return f"host {host} was killed by signal {-status}, and the others were ended"
    return f"host {host} ended with status {status}, and the others were ended"


def run_clean(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire net clean` and return its exit status."""
    from gradwire import network as net
    from gradwire.cli.lines import say

    for line in net.clean() or ["nothing to clean"]:
        say(console, line)
    return OK
