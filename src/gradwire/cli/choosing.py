"""`gradwire methods --for RATE`: which method for a case, on a terminal."""

from __future__ import annotations

import argparse
import re

from rich.console import Console
from rich.table import Table

from gradwire.core.errors import SpecError

_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def add_arguments(methods: argparse.ArgumentParser) -> None:
    """Add what tells a case to the arguments of `gradwire methods`."""
    case = methods.add_argument_group("which method for your case")
    case.add_argument(
        "--for", dest="rate", metavar="RATE", help="say which method for links of this rate, from 100mbit to 1tbit"
    )
    case.add_argument("--delay", default="0", metavar="TIME", help="of a round trip: 20ms (default: a local network's)")
    case.add_argument("--parameters", default="100M", metavar="N", help="of the model: 1.85M, 7B (default: 100M)")
    case.add_argument("--ranks", type=int, default=4, metavar="N", help="how many (default: 4)")
    case.add_argument("--step", type=float, metavar="MS", help="what a step takes without communication, in ms")
    case.add_argument(
        "--layout",
        default="ddp",
        metavar="WORD",
        help="ddp (every rank has the whole model), fsdp2, sites (a slow line between groups), leaving (machines come "
        "and go) or clients (a federation)",
    )
    case.add_argument(
        "--slow", default="never", metavar="WORD", help="who is slower: never, one (always the same) or any (in turn)"
    )


def print_choice(arguments: argparse.Namespace, console: Console) -> None:
    """Print which method serves the case that the arguments tell.

    Raises:
        SpecError: numbers or words that make no sense.
    """
    from gradwire.choosing import Case, choose
    from gradwire.core.figures import milliseconds
    from gradwire.network import parse_delay, parse_rate

    try:
        rate, delay_s = parse_rate(arguments.rate), parse_delay(arguments.delay)
    except ValueError as error:
        raise SpecError(str(error)) from error
    step_s = None if arguments.step is None else arguments.step / 1e3
    parameters = _number(arguments.parameters)
    case = Case(rate, delay_s, parameters, arguments.ranks, step_s, arguments.layout, arguments.slow)
    found = choose(case)
    console.print(f"{case.says}\n", highlight=False)
    if found.timed:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for heading in ("method", "ms on the link a step", *(["ms a step"] if step_s else []), "ended at"):
            table.add_column(heading, justify="left" if heading in ("method", "ended at") else "right")
        for timed in found.timed:
            whole = [milliseconds(1e3 * (step_s + timed.link_s))] if step_s else []
            table.add_row(timed.spec, milliseconds(1e3 * timed.link_s), *whole, timed.loses)
        console.print(table, "", sep="\n")
    if found.take is not None:
        console.print(f"Take {found.call}", highlight=False, soft_wrap=True)
    elif step_s:
        console.print("Use PyTorch alone.", highlight=False)
    console.print(f"{found.why[0].upper()}{found.why[1:]}{'' if found.why.endswith('.') else '.'}", highlight=False)
    console.print(f"Page: docs/{found.page}. What it brings you, gradwire compare measures.", highlight=False)


def _number(text: str) -> int:
    """A count with a unit: 1.85M.

    >>> _number("1.85M"), _number("7B"), _number("12")
    (1850000, 7000000000, 12)
    """
    match = re.fullmatch(r"(\d+\.?\d*)([kMGB]?)", text.strip())
    if match is None:
        raise SpecError(f"--parameters {text} is no number of parameters: write one such as 1.85M or 7B")
    return round(float(match[1]) * _SIZES[match[2]])
