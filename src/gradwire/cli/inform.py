"""`gradwire methods` and `gradwire cost`: what there is, and what it would send."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradwire.core.errors import SpecError
from gradwire.core.link import Link

if TYPE_CHECKING:
    from torch import nn

    from gradwire.reducers import Reducer

OK = 0


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add both to the command line."""
    methods = commands.add_parser("methods", help="list the methods and their options")
    methods.add_argument("spec", nargs="*", metavar="SPEC", help="show what these specs become instead")
    methods.set_defaults(run=run_methods)
    cost = commands.add_parser("cost", help="bytes that methods send each step, without sending them")
    cost.add_argument("methods", nargs="+", metavar="SPEC")
    cost.add_argument("--task", default="bytes", metavar="TASK", help="whose model (default: bytes)")
    cost.add_argument("--text", type=Path, default=None, metavar="FOLDER", help="text of the bytes task")
    hosts = "ranks (default: 4); several numbers show how bytes grow with them"
    cost.add_argument("--hosts", type=int, nargs="+", default=[4], metavar="N", help=hosts)
    cost.add_argument(
        "--rate", default=None, metavar="RATE", help="also the time that links of this rate take: 100mbit"
    )
    cost.add_argument("--latency", type=float, default=0.1, metavar="MS", help="of a message, with --rate (0.1 ms)")
    cost.add_argument("--step", type=int, default=1_000_000, metavar="N", help="which step (default: past any warm-up)")
    cost.set_defaults(run=run_cost)


def run_methods(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire methods [SPEC ...]`."""
    import gradwire
    from gradwire import spec

    if arguments.spec:
        for text in arguments.spec:
            console.print(f"{text}  =  {gradwire.parse(text)!r}", highlight=False, soft_wrap=True)
        return OK
    table = Table(box=None, header_style="bold")
    for heading in ("method", "what is sent", "exchange", "error feedback", "options"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "method")
    for method in gradwire.methods().values():
        own = [f.name for f in dataclasses.fields(method.build) if f.init and f.name not in method.fixed]  # type: ignore[arg-type]
        name = f"{method.name}:{method.argument.upper()}" if method.argument else method.name
        table.add_row(name, method.summary, method.exchange, "yes" if method.feedback else "", ", ".join(own))
    console.print(table)
    grammar = (spec.__doc__ or "").split("\n\n", 1)[1]
    console.print(f"\n{grammar.strip()}", highlight=False, markup=False)
    return OK


def run_cost(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire cost SPEC ...`."""
    import gradwire
    from gradwire.bench.tasks import make_task

    model = make_task(arguments.task, 0, arguments.text).model
    reducers = {spec: gradwire.parse(spec) for spec in arguments.methods}
    if min(arguments.hosts) < 1:
        raise SpecError(f"--hosts {min(arguments.hosts)}: there must be at least 1")
    if arguments.rate and len(arguments.hosts) > 1:
        raise SpecError("--rate tells times for one number of --hosts; give one")
    for reducer in reducers.values():
        reducer.require_ranks(min(arguments.hosts))
    if len(arguments.hosts) > 1:
        console.print(_growth(reducers, model, arguments.hosts, arguments.step))
    else:
        link = _link(arguments.rate, arguments.latency)
        console.print(_costs(reducers, model, arguments.hosts[0], arguments.step, link))
    return OK


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("method", no_wrap=True, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _link(rate: str | None, latency_ms: float) -> Link | None:
    from gradwire.bench.net import parse_rate

    if not 0 <= latency_ms < float("inf"):
        raise SpecError(f"--latency {latency_ms} is no time: give milliseconds, 0 or more")
    try:
        return Link(latency_ms * 1e-3, 8 / parse_rate(rate)) if rate else None
    except ValueError as error:
        raise SpecError(str(error)) from error


def _costs(reducers: Mapping[str, Reducer], model: nn.Module, hosts: int, step: int, link: Link | None) -> Table:
    """One row a method: bytes, and time where a link is given."""
    import gradwire
    from gradwire.drivers.timing import step_s

    table = _table("sent a step", "ratio", "payload", "collectives", *(["ms at the link's rate"] if link else []))
    dense = gradwire.cost(gradwire.parse("none"), model, hosts).wire_bytes
    for spec, reducer in reducers.items():
        found = gradwire.cost(reducer, model, hosts, step=step)
        ratio = f"{dense / found.wire_bytes:.1f}" if found.wire_bytes else "-"
        times = [f"{step_s(reducer, model, hosts, link, step=step) * 1e3:,.1f}"] if link else []
        row = (f"{found.wire_bytes:,} B", ratio, f"{found.payload_bytes:,} B", str(found.collectives))
        table.add_row(spec, *row, *times)
    return table


def _growth(reducers: Mapping[str, Reducer], model: nn.Module, hosts: Sequence[int], step: int) -> Table:
    """One row a method, one column a number of ranks: bytes sent out of a node, in gradients."""
    import gradwire

    table = _table(*(f"n = {n}" for n in hosts))
    for spec, reducer in reducers.items():
        costs = [gradwire.cost(reducer, model, n, step=step) for n in hosts]
        table.add_row(spec, *(f"{(c.wire_bytes - c.inside_bytes) / c.dense_bytes:.3f}" for c in costs))
    table.caption = "bytes a rank sends out of its node each step, in uncompressed gradients"
    return table
