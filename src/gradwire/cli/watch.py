"""`gradwire watch`: follow a run that goes on, in the terminal or on a page of this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradwire.cli.commands import Commands, add

if TYPE_CHECKING:
    from gradwire.watch import Follower, RunView

OK, FAILED = 0, 1

EVERY_S = 1.0
"""Between two looks."""

LINE_EVERY_S = 10.0
"""Between two lines where standard output is no terminal."""

WATCH_HELP = """\
Start the run with gradwire.profile(..., live=True) around its loop, or with gradwire run --profile DIR --live. Then
every rank tells once a second, in DIR/live, how it goes, and this command reads that. It is a process of its own, so it
can begin and end when you like; what the ranks told last stays in the folder.

examples
  gradwire watch profile                 in the terminal, until the run has ended
  gradwire watch profile --serve         a page, whose address is printed; it stays until you press Ctrl-C
  gradwire watch profile --serve 8765    with a port of your choice, as for ssh -L 8765:127.0.0.1:8765 HOST
  gradwire watch profile --once --json   the figures of now, for programs

The status is 0 where the run goes on or has ended well, 1 where a rank failed, and 2 without anything to read.
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    watch = add(
        commands,
        "watch",
        help="follow a run that goes on: loss, bytes, waits and ranks that lag, in the terminal or on a page",
        description="Follow a run that goes on: loss, bytes, ratio, residuals, waits, and ranks that lag or have died.",
        epilog=WATCH_HELP,
    )
    watch.add_argument("folder", type=Path, metavar="DIR", help="the folder of the profile")
    watch.add_argument(
        "--serve",
        nargs="?",
        type=int,
        const=0,
        metavar="PORT",
        help="serve a page on 127.0.0.1 to who has the address that is printed (default port: one that is free)",
    )
    watch.add_argument("--once", action="store_true", help="print what is known now, and end")
    watch.add_argument("--json", action="store_true", help="print what a program reads; with --once")
    watch.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="seconds to wait for a run to begin (default: 0)"
    )
    watch.set_defaults(run=run_watch)


def run_watch(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire watch DIR` and return its exit status.

    Raises:
        ProfileError: nothing to read, or a port that cannot be taken.
        SpecError: options that do not go together.
    """
    from gradwire.core.errors import SpecError
    from gradwire.watch import Follower

    if arguments.json and not arguments.once:
        raise SpecError("--json prints the figures of one moment: give --once too, or read figures.json of --serve")
    if arguments.once and arguments.serve is not None:
        raise SpecError("--once ends at once, and --serve stays: give one of them")
    follower = Follower(arguments.folder)
    view = _first(follower, arguments.wait)
    if arguments.serve is not None:
        return _serve(follower, arguments.serve, console)
    if arguments.json:
        json.dump(view.to_builtins(), sys.stdout, indent=1, allow_nan=False)
        print()
    elif arguments.once:
        console.print(_shown(view))
    else:
        view = _follow(follower, console)
    return FAILED if view.failed else OK


def _first(follower: Follower, wait_s: float) -> RunView:
    """What there is, once there is something."""
    from gradwire.profiling import ProfileError

    end_s = time.monotonic() + wait_s
    while True:
        try:
            return follower.view()
        except ProfileError:
            if time.monotonic() >= end_s:
                raise
        time.sleep(0.2)


def _serve(follower: Follower, port: int, console: Console) -> int:
    from gradwire.cli.lines import say
    from gradwire.watch import RunServer

    with RunServer(follower, port) as server:
        say(console, "page: ", (server.url, "bold"))
        say(console, "Whoever has this address can read the page on this machine. Ctrl-C ends it; the run goes on.")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return OK


def _follow(follower: Follower, console: Console) -> RunView:
    """Show the run until it has ended."""
    if not console.is_terminal:
        return _print_lines(follower, console)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            view = follower.view()
            live.update(_shown(view, console.height), refresh=True)
            if view.is_over:
                return view
            time.sleep(EVERY_S)


def _print_lines(follower: Follower, console: Console) -> RunView:
    """A line now and then, and findings as they come: for logs and pipes."""
    from gradwire.cli.lines import say
    from gradwire.watch import words

    told, next_s = "", 0.0
    while True:
        view = follower.view()
        findings = [said.text for said in words.findings(view)]
        line = ". ".join(part for part in (words.headline(view), words.figures(view), *findings[:2]) if part)
        if view.is_over or time.monotonic() >= next_s:
            if line != told:
                say(console, line)
            told, next_s = line, time.monotonic() + LINE_EVERY_S
        if view.is_over:
            return view
        time.sleep(EVERY_S)


def _shown(view: RunView, height: int = 0) -> Group:
    """The view in a terminal.

    Args:
        view: of the run.
        height: lines of the terminal, which a table of many ranks is cut to; 0 shows all.
    """
    from gradwire.watch import words
    from gradwire.watch.page import HEADINGS, cells, lede

    findings = list(words.findings(view))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, heading in enumerate(HEADINGS):
        table.add_column(Text(heading), justify="left" if place < 2 else "right", no_wrap=place != 1)
    room = max(3, height - len(findings) - 7) if height else len(view.ranks)
    most = sorted(view.ranks, key=lambda rank: (not rank.is_silent, rank.state == "running", -rank.caused_ms))[:room]
    for rank in sorted(most, key=lambda rank: rank.rank):
        table.add_row(*map(Text, cells(rank)))
    said = [Text.assemble(("✗ ", "red") if each.is_fault else ("! ", "yellow"), each.text) for each in findings]
    more = len(view.ranks) - len(most)
    rest = [Text(f"and {more} ranks more, which the others wait for less", style="dim")] if more else []
    return Group(Text(words.headline(view), style="bold"), Text(lede(view)), *said, Text(), table, *rest)
