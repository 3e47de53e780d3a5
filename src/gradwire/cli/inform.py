"""`gradwire methods`, `gradwire recipes` and `gradwire cost`: what there is, and what it would send."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add_device
from gradwire.cli.kernel_table import kernel_table
from gradwire.cli.links import MeasuredLinks, read_links
from gradwire.core.errors import SpecError

if TYPE_CHECKING:
    from gradwire.core.grain import ParameterSpec
    from gradwire.reducers import Reducer

OK = 0


def versions() -> str:
    """Return gradwire's version and, in brackets, those of what it runs on."""
    import gradwire

    found: list[str] = []
    for package, title in (("torch", "PyTorch"), ("numpy", "NumPy"), ("numba", "numba"), ("triton", "triton")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{title} {metadata.version(package)}")
    return f"gradwire {gradwire.__version__} (Python {platform.python_version()}, {', '.join(found)})"


def add_commands(commands: Commands) -> None:
    """Add them to the command line."""
    methods = commands.add_parser("methods", help="list the methods: those for most users first, each with its options")
    methods.add_argument("spec", nargs="*", metavar="SPEC", help="show these methods whole, or what these specs become")
    methods.add_argument("--kernels", action="store_true", help="show what each kernel runs in instead")
    methods.set_defaults(run=run_methods)
    recipes = commands.add_parser("recipes", help="recipes of precision: what travels in how many bits, and why")
    recipes.add_argument("names", nargs="*", metavar="NAME", help="which (default: all)")
    recipes.set_defaults(run=run_recipes)
    cost = commands.add_parser("cost", help="bytes that methods send each step, without sending them")
    cost.add_argument("methods", nargs="*", metavar="SPEC")
    cost.add_argument("--task", default="bytes", metavar="TASK", help="whose model (default: bytes)")
    cost.add_argument("--text", type=Path, default=None, metavar="FOLDER", help="text of the bytes task")
    hosts = "ranks (default: 4); several numbers show how bytes grow with them"
    cost.add_argument("--hosts", nargs="+", default=["4"], metavar="N", help=hosts)
    cost.add_argument(
        "--rate",
        default=None,
        metavar="RATE",
        help="also the time that links of this rate take: 100mbit, or what was measured: the file of GRADWIRE_LINKS",
    )
    cost.add_argument(
        "--latency", type=float, metavar="MS", help="of each message, in the times that --rate tells (default: 0.1 ms)"
    )
    coding = "also what a rank codes in a step, as measured on this machine just now"
    cost.add_argument("--coding", action="store_true", help=coding)
    computing = "with --rate and --coding: also the step, if it computes so long, and what of sending is hidden in it"
    cost.add_argument("--computing", type=float, metavar="MS", help=computing)
    add_device(cost)
    cost.add_argument("--step", type=int, default=1_000_000, metavar="N", help="which step (default: past any warm-up)")
    cost.add_argument(
        "--stack", action="store_true", help="what each layer of a spec saves: codecs joined by +, layers=, parameters="
    )
    levels = "what leaves each group of each level that this file describes, as GRADWIRE_TOPOLOGY does, in its place"
    cost.add_argument("--topology", type=Path, default=None, metavar="FILE", help=levels)
    cost.set_defaults(run=run_cost)


def run_methods(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire methods [SPEC ...]`, `gradwire methods --kernels`."""
    import gradwire
    from gradwire.cli.catalogue import print_catalogue, print_entry

    if arguments.kernels:
        if arguments.spec:
            raise SpecError("--kernels shows all kernels, whatever the method: give no SPEC with it")
        console.print(kernel_table())
        return OK
    if not arguments.spec:
        print_catalogue(console)
    entries = {entry.name: entry for entry in gradwire.catalogue()} if arguments.spec else {}
    for text in arguments.spec:
        if text in entries:
            print_entry(entries[text], console)
        else:
            console.print(f"{text}  =  {gradwire.parse(text)!r}", highlight=False, soft_wrap=True)
    return OK


def run_recipes(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire recipes [NAME ...]`."""
    from gradwire.recipes import RECIPES, recipe

    for name in arguments.names or RECIPES:
        console.print(str(recipe(name)), highlight=False, soft_wrap=True, markup=False)
    return OK


def run_cost(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire cost SPEC ...`."""
    from gradwire.drivers.cost import specs_on
    from gradwire.spec import as_method
    from gradwire.tasks.builtin import make_task

    model = specs_on(arguments.device, make_task(arguments.task, 0, arguments.text).model)
    hosts, behind = _hosts(arguments.hosts)
    if arguments.stack:
        return _print_stacks([*arguments.methods, *behind], model, hosts, arguments, console)
    reducers = {spec: as_method(spec) for spec in [*arguments.methods, *behind]}
    if not reducers:
        raise SpecError("name at least one method, such as: gradwire cost int4")
    if arguments.rate and len(hosts) > 1:
        raise SpecError("--rate tells times for one number of --hosts; give one")
    if arguments.topology and (len(hosts) > 1 or arguments.rate):
        raise SpecError("--topology describes one number of ranks: give one number of --hosts, and no --rate")
    for reducer in reducers.values():
        for ranks in hosts:
            reducer.require_ranks(ranks)
    if arguments.topology:
        console.print(_levels(reducers, model, hosts[0], arguments.step, arguments.topology))
        return OK
    asked = _asked(arguments, hosts)
    if len(hosts) > 1:
        console.print(_growth(reducers, model, hosts, arguments.step))
    else:
        console.print(_costs(reducers, model, hosts[0], arguments.step, asked))
    return OK


def _print_stacks(
    specs: Sequence[str],
    model: Sequence[ParameterSpec],
    hosts: Sequence[int],
    arguments: argparse.Namespace,
    console: Console,
) -> int:
    """One table a spec, one row a layer of it: what is sent with it, and what it saves of what was sent before it."""
    from gradwire.drivers.stack import stack

    if not specs:
        raise SpecError("name at least one method, such as: gradwire cost --stack topk:0.01+int8,parameters=bf16")
    if len(hosts) > 1 or arguments.rate or arguments.topology:
        raise SpecError("--stack tells bytes for one number of --hosts: give one, and no --rate and no --topology")
    for spec in specs:
        levels = stack(spec, model, hosts[0], arguments.step)
        sharded = any(level.parameter_bytes for level in levels)
        table = _table(*(["gradients", "parameters"] if sharded else []), "sent a step", "saved here", "ratio")
        for before, level in itertools.pairwise([levels[0], *levels]):
            kinds = [f"{level.gradient_bytes:,} B", f"{level.parameter_bytes:,} B"] if sharded else []
            saved, ratio = before.wire_bytes - level.wire_bytes, "-"
            if level.wire_bytes:
                ratio = f"{levels[0].wire_bytes / level.wire_bytes:.1f}"
            table.add_row(level.added, *kinds, f"{level.wire_bytes:,} B", f"{saved:,} B", ratio)
        console.print(table)
    return OK


def _hosts(given: Sequence[str]) -> tuple[list[int], list[str]]:
    """The numbers that follow --hosts, and the specs that follow these: argparse cannot tell one from the other."""
    numbers = list(itertools.takewhile(lambda text: re.fullmatch(r"[+-]?\d+", text), given))
    if not numbers:
        raise SpecError(f"--hosts {given[0]} is no number of ranks: give one or several, such as --hosts 4")
    hosts = [int(text) for text in numbers]
    if min(hosts) < 1:
        raise SpecError(f"--hosts {min(hosts)}: there must be at least 1")
    return hosts, list(given[len(hosts) :])


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("method", no_wrap=True, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


class _Asked(NamedTuple):
    """What `gradwire cost` tells beside bytes: times on links, coding, and the step that computes so many ms."""

    links: MeasuredLinks | None
    coding: bool
    computing_ms: float | None

    @property
    def headings(self) -> list[str]:
        """Of the columns."""
        found = ["ms on the link"] if self.links else []
        found += ["ms of coding"] if self.coding else []
        return found + (["ms hidden", "ms a step"] if self.computing_ms is not None else [])

    def times(self, reducer: Reducer, model: Sequence[ParameterSpec], hosts: int, step: int) -> list[str]:
        """The columns of a method."""
        from gradwire.choosing import coding_s, demand

        coded_s = coding_s(reducer, model, hosts) if self.coding else 0.0
        found = [coded_s] if self.coding else []
        if self.links is not None:
            of_axes = self.links.of_axes(reducer.axes(hosts))
            asked = demand(reducer, model, hosts, self.links.slowest, of_axes, coding_s=coded_s, step=step)
            found.insert(0, asked.sending_s)
            if self.computing_ms is not None:
                forecast = asked.beside(self.computing_ms / 1e3)
                found += [forecast.hidden_s, forecast.step_s]
        return [f"{1e3 * seconds:,.1f}" for seconds in found]


def _asked(arguments: argparse.Namespace, hosts: Sequence[int]) -> _Asked:
    """What the arguments want to know beside bytes.

    Raises:
        SpecError: times without what they are made of.
    """
    links = read_links(arguments.rate, arguments.latency, hosts[0])
    computing = arguments.computing
    if arguments.coding and len(hosts) > 1:
        raise SpecError("--coding tells times for one number of --hosts; give one")
    if computing is not None and not (arguments.coding and links):
        raise SpecError("--computing is a part of a step, and the others are missing: give --rate and --coding too")
    if computing is not None and not 0 < computing < float("inf"):
        raise SpecError(f"--computing {computing} is no time: give the milliseconds of a step without communication")
    return _Asked(links, arguments.coding, computing)


def _costs(
    reducers: Mapping[str, Reducer], model: Sequence[ParameterSpec], hosts: int, step: int, asked: _Asked
) -> Table:
    """One row a method: bytes, those inside nodes apart where a method has nodes, and the times that are asked for."""
    import gradwire

    costs = {spec: gradwire.cost(reducer, model, hosts, step=step) for spec, reducer in reducers.items()}
    nodes = any(found.inside_bytes for found in costs.values())
    sent = ["sent between nodes", "sent inside nodes"] if nodes else ["sent a step"]
    table = _table(*sent, "ratio", "payload", "collectives", *asked.headings)
    dense = gradwire.cost(gradwire.parse("none"), model, hosts).wire_bytes
    for spec, found in costs.items():
        inside = [f"{found.inside_bytes:,} B"] if nodes else []
        ratio = f"{dense / found.between_bytes:.1f}" if found.between_bytes else "-"
        row = (f"{found.between_bytes:,} B", *inside, ratio, f"{found.payload_bytes:,} B", str(found.collectives))
        table.add_row(spec, *row, *asked.times(reducers[spec], model, hosts, step))
    if nodes:
        table.caption = "ratio: uncompressed bytes to those sent between nodes"
        same = asked.links is not None and not asked.links.profile
        table.caption += "; ms: bytes inside nodes take the same rate" if same else ""
    return table


def _growth(reducers: Mapping[str, Reducer], model: Sequence[ParameterSpec], hosts: Sequence[int], step: int) -> Table:
    """One row a method, one column a number of ranks: bytes sent out of a node, in gradients."""
    import gradwire

    table = _table(*(f"n = {n}" for n in hosts))
    for spec, reducer in reducers.items():
        costs = [gradwire.cost(reducer, model, n, step=step) for n in hosts]
        table.add_row(spec, *(f"{c.between_bytes / c.dense_bytes:.3f}" for c in costs))
    table.caption = "bytes a rank sends out of its node each step, in uncompressed gradients"
    return table


def _levels(
    reducers: Mapping[str, Reducer], model: Sequence[ParameterSpec], ranks: int, step: int, file: Path
) -> Table:
    """One row a method, one column a level: the most bytes that leave one of its groups."""
    from gradwire.drivers.level_bytes import level_bytes
    from gradwire.topology import Topology, described

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise SpecError(f"--topology {file} cannot be read: {error}") from error
    topology = described(Topology.of_keys(range(ranks)), text, str(file))
    table = _table(*(f"a {level.name} sends" for level in topology.levels))
    for spec, reducer in reducers.items():
        sent = level_bytes(reducer, model, topology, step)
        table.add_row(spec, *(f"{max(each.sent):,} B" for each in sent))
    table.caption = "bytes that leave the group of a level that sends most, each step"
    return table
