"""`gradwire simulate`: what training takes on ranks that need not exist."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add
from gradwire.cli.option_arguments import add_options, read_options
from gradwire.core.errors import SpecError
from gradwire.core.figures import spoken_seconds
from gradwire.simulation.options import MOST_RANKS, SimulateOptions

if TYPE_CHECKING:
    from gradwire.simulation import Interval, SimulatedRun

OK = 0
SHOWN_STEPS = 20
"""Steps in a trace."""

SIMULATE_HELP = """\
Ranks that meet in every step (int4, none, ...) or once in a window (local:H=8, diloco:H=20), hosts that come and go
(elastic:50), and ranks that push to servers (asgd, ssp:4, dcasgd). Shares are of a rank's time in a step: computing,
coding, waiting for slower ranks, and waiting for messages. docs/simulate.md tells what is modelled, by which formulas.

examples
  gradwire simulate none int4 local:H=8 --step 250ms --parameters 7B --ranks 64 --rate 10gbit
  gradwire simulate int4 ssp:4 --step 100ms --ranks 8 --slow 3:4x
  gradwire simulate none --step 2s --parameters 7B --ranks-per-host 8 --inside 1tbit --scale 8..16384 --mtbf 180d
  gradwire simulate elastic:50 --step 250ms --ranks 32 --mtbf 2h --restart 10min
  gradwire simulate local:H=8,delay=1 --step 100ms --spread exponential:0.1 --trace trace.json
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    simulate = add(
        commands,
        "simulate",
        help="what training takes on thousands of ranks, with slow ranks and failures, without having them",
        description="Simulate training on ranks that need not exist: step times, waiting, failures and checkpoints.",
        epilog=SIMULATE_HELP,
    )
    simulate.add_argument("methods", nargs="+", metavar="SPEC", help="methods, one line each")
    add_options(simulate, SimulateOptions)
    shown = simulate.add_argument_group("how to show it")
    shown.add_argument("--scale", metavar="N..M", help="a line for N ranks, twice as many, ... to M: 8..16384")
    shown.add_argument("--json", action="store_true", help="print what a program reads")
    shown.add_argument("--trace", type=Path, metavar="FILE", help="write the first steps of some ranks for Perfetto")
    simulate.set_defaults(run=run_simulate)


def run_simulate(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire simulate` and return its exit status.

    Raises:
        SpecError: options that make no sense.
        GradwireError: what `gradwire.simulation.simulate` raises.
    """
    scaled = _range(arguments)
    options = read_options(arguments, SimulateOptions)
    if arguments.trace is not None and (len(arguments.methods) > 1 or arguments.scale):
        raise SpecError("--trace shows one run: give one SPEC, and no --scale")
    from gradwire.simulation import refuse_idle, scale, simulate

    refuse_idle(arguments.methods, options)
    if scaled:
        runs = [run for method in arguments.methods for run in scale(method, options, *scaled)]
    else:
        shown = SHOWN_STEPS if arguments.trace is not None else 0
        runs = [simulate(method, options, shown) for method in arguments.methods]
    if arguments.trace is not None:
        from gradwire.simulation.picture import write_picture

        write_picture(arguments.trace, runs[0])
    if arguments.json:
        print(json.dumps({"options": _as_dict(options), "runs": [run.as_dict() for run in runs]}, indent=1))
        return OK
    if (said := _measured_on(options)) is not None:
        console.print(said, highlight=False, soft_wrap=True)
    console.print(_table(runs))
    for run in runs:
        if run.intervals and not arguments.scale:
            console.print()
            console.print(_checkpoints(run))
    return OK


def _range(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """The least and the most ranks of --scale, which stands for --ranks; None where there is one number of them."""
    text: str | None = arguments.scale
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text.strip())
    if match is None:
        raise SpecError(f"--scale {text} is no range: write two numbers of ranks, such as 8..16384")
    if arguments.ranks != SimulateOptions.ranks:
        raise SpecError("--scale tells how many ranks there are, and so does --ranks: give one of them")
    first, last = int(match[1]), int(match[2])
    arguments.ranks = min(max(first, 1), MOST_RANKS)  # whole hosts of them, which the default need not make
    return first, last


def _measured_on(options: SimulateOptions) -> str | None:
    """Which hosts the links were measured on; None where they were told."""
    if options.measured is None:
        return None
    from gradwire.topology.link_profile import LinkProfile

    return LinkProfile.read(options.measured).measured_on


def _as_dict(options: SimulateOptions) -> dict[str, object]:
    found = dataclasses.asdict(options)
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def _table(runs: Sequence[SimulatedRun]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method", no_wrap=True)
    has_lost, has_servers = any(run.lost for run in runs), any(run.staleness is not None for run in runs)
    headings = ["ranks", "step", "p50", "p99", "computing", "coding", "waiting", "messages"]
    headings += ["lost"] if has_lost else []
    headings += ["staleness"] if has_servers else []
    for heading in [*headings, "steps/h", "efficiency"]:
        table.add_column(heading, justify="right")
    for run in runs:
        times = [spoken_seconds(seconds) for seconds in (run.step_s, run.p50_s, run.p99_s)]
        shares = [f"{share:.1%}" for share in run.shares]
        shares += [f"{run.lost:.1%}"] if has_lost else []
        stale = ["" if run.staleness is None else f"{run.staleness:.1f}"] if has_servers else []
        rest = [f"{run.steps_per_h:,.0f}", f"{run.efficiency:.1%}"]
        table.add_row(run.method, f"{run.ranks:,}", *times, *shares, *stale, *rest)
    return table


def _checkpoints(run: SimulatedRun) -> Table:
    """Intervals between checkpoints; the first one is that of the run."""
    table = Table(box=None, header_style="bold", pad_edge=False, title_justify="left")
    table.add_column(f"checkpoints of {run.method}", no_wrap=True)
    for heading in ("training between two", "lost, by formula", "lost, simulated"):
        table.add_column(heading, justify="right")
    for each in run.intervals:
        table.add_row(*_interval_cells(each))
    return table


def _interval_cells(each: Interval) -> tuple[str, str, str, str]:
    minutes = f"{each.interval_s / 60:,.1f} min" if each.interval_s >= 60 else spoken_seconds(each.interval_s)
    return each.name, minutes, f"{each.lost:.2%}", f"{each.simulated:.2%}"
