"""`gradwire methods` and `gradwire cost`: what there is, and what it would send."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rich.console import Console
from rich.table import Table

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
    cost.add_argument("--hosts", type=int, default=4, metavar="N", help="ranks (default: 4)")
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
    table = Table("method", "what is sent", "exchange", "error feedback", "options", box=None, header_style="bold")
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
    table = Table(box=None, header_style="bold")
    table.add_column("method")
    for heading in ("sent a step", "ratio", "payload", "collectives"):
        table.add_column(heading, justify="right")
    dense = gradwire.cost(gradwire.parse("none"), model, arguments.hosts).wire_bytes
    for spec, reducer in reducers.items():
        found = gradwire.cost(reducer, model, arguments.hosts, step=arguments.step)
        ratio = f"{dense / found.wire_bytes:.1f}" if found.wire_bytes else "-"
        row = (f"{found.wire_bytes:,} B", ratio, f"{found.payload_bytes:,} B", str(found.collectives))
        table.add_row(spec, *row)
    console.print(table)
    return OK
