"""`gradwire cases`: published trainings beside the planner's formulas, calculators, estimates of convergence."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add
from gradwire.core.errors import SpecError
from gradwire.core.figures import si_bits_per_s, si_bytes, significant, spoken_seconds
from gradwire.core.nearest import meant

if TYPE_CHECKING:
    from gradwire.cases import CaseStudy, ExtraSteps

OK = 0

CASES_HELP = """\
Each study tells what a GPU sends in a step by kind of parallelism, the memory of the fullest GPU, and the time. Each
number has the formula that it comes from, and the published figure beside it. docs/cases.md has all of them.

studies
  gpt3-175b      GPT-3 175B by Megatron-LM on 384 to 1,536 A100
  llama2-70b     Llama 2 70B on A100
  mixtral-8x7b   Mixtral 8x7B by Megatron-Core on 64 H100
  islands        training over the internet: INTELLECT-1 on up to 14 islands, by DiLoCo

calculators: bytes and seconds of float32, and what is saved
  precision      fewer bits an element
  density        the largest elements alone
  steps          averages of models every H steps
  accumulation   gradients that are sent once for several micro-batches

estimate
  convergence    how many more steps theory predicts for compressed and for local SGD

examples
  gradwire cases
  gradwire cases gpt3-175b
  gradwire cases islands --json
  gradwire cases precision --model llama2-7b --ranks 8 --rate 10gbit --compute 900
  gradwire cases convergence --methods int4 topk:0.01 --steps 10000 --ranks 8
"""
CALCULATING = ("model", "rate", "latency", "compute")
METHODS = ("int8", "int4", "topk:0.1", "topk:0.01", "sign:64", "powersgd:4")
ESTIMATING = ("methods", "steps", "kappa")


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    cases = add(
        commands,
        "cases",
        help="case studies of published trainings with formulas; calculators of what a setting saves",
        description="Show published trainings beside the planner's formulas, what precision, density, fewer averages "
        "and accumulation save, and how many more steps theory predicts.",
        epilog=CASES_HELP,
    )
    cases.add_argument("name", nargs="?", metavar="NAME", help="which one (default: list all)")
    cases.add_argument("--ranks", type=int, metavar="N", help="of a calculator or an estimate (default: 4)")
    calculator = cases.add_argument_group("calculators")
    calculator.add_argument("--model", metavar="NAME", help="by name, or a config.json (default: gpt2)")
    calculator.add_argument("--rate", metavar="RATE", help="of each rank's link (default: 1gbit)")
    calculator.add_argument("--latency", type=float, metavar="MS", help="of a message (default: 0.1 ms)")
    calculator.add_argument("--compute", type=float, metavar="MS", help="of a micro-batch, without communication")
    estimate = cases.add_argument_group("convergence")
    estimate.add_argument("--methods", nargs="+", metavar="SPEC", help="methods for gradients")
    estimate.add_argument("--steps", type=int, metavar="K", help="of the uncompressed run (default: 10000)")
    estimate.add_argument("--kappa", type=float, metavar="X", help="L F0 / sigma^2 (default: 1)")
    cases.add_argument("--json", action="store_true", help="print what a program reads")
    cases.set_defaults(run=run_cases)


def run_cases(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire cases` and return its exit status.

    Raises:
        SpecError: an unknown name, with the nearest; options that do not belong to it; numbers that make no sense.
    """
    from gradwire.cases import CALCULATORS, STUDIES, case_study

    name = arguments.name
    if name not in CALCULATORS:
        _refuse(arguments, CALCULATING, f"a calculator: {', '.join(CALCULATORS)}")
    if name != "convergence":
        _refuse(arguments, ESTIMATING, "gradwire cases convergence")
    if name in CALCULATORS:
        return _calculate(arguments, console)
    if name == "convergence":
        return _estimate(arguments, console)
    _refuse(arguments, ("ranks",), "a calculator or gradwire cases convergence")
    if name is not None and name not in STUDIES:
        known = (*STUDIES, *CALCULATORS, "convergence")
        raise SpecError(f"gradwire cases knows no {name!r}: {meant(name, known)}")
    found = [case_study(each) for each in ([name] if name else STUDIES)]
    if arguments.json:
        print(json.dumps([as_json(study) for study in found], indent=1))
    elif name:
        _show(found[0], console)
    else:
        _show_list(found, console)
    return OK


def _refuse(arguments: argparse.Namespace, options: Sequence[str], whose: str) -> None:
    for option in options:
        if getattr(arguments, option) is not None:
            raise SpecError(f"--{option} belongs to {whose}; leave it out, or name one")


def _calculate(arguments: argparse.Namespace, console: Console) -> int:
    from gradwire.cases import CALCULATORS, savings
    from gradwire.cli.lines import say
    from gradwire.core.link import Link
    from gradwire.network import parse_rate
    from gradwire.planning import model

    latency_ms = 0.1 if arguments.latency is None else arguments.latency
    if not 0 <= latency_ms < math.inf:
        raise SpecError(f"--latency {latency_ms} is no time: give milliseconds, 0 or more")
    try:
        rate = parse_rate(arguments.rate or "1gbit")
    except ValueError as error:
        raise SpecError(str(error)) from error
    trained, ranks = model(arguments.model or "gpt2"), 4 if arguments.ranks is None else arguments.ranks
    compute_s = None if arguments.compute is None else arguments.compute / 1e3
    rows = savings(arguments.name, trained, ranks, Link(latency_ms / 1e3, 8 / rate), compute_s)
    if arguments.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return OK
    say(
        console,
        f"{trained.name}: {significant(trained.parameters / 1e9, 3)} G parameters, {ranks} ranks, "
        f"{si_bits_per_s(rate)}, {latency_ms:g} ms a message; by micro-batch\n",
    )
    told = ["with computing", "sooner"] if compute_s else []
    table = _table(CALCULATORS[arguments.name], "method", "bytes", "less", "on the link", *told, "formula")
    for row in rows:
        cells = [row.setting, row.spec, si_bytes(row.nbytes), f"{rows[0].nbytes / row.nbytes:.1f}x"]
        cells.append(spoken_seconds(row.link_s))
        if row.total_s is not None and rows[0].total_s is not None:
            cells += [spoken_seconds(row.total_s), f"{rows[0].total_s / row.total_s:.2f}x"]
        table.add_row(*cells, row.formula)
    console.print(table)
    say(console, "\nIf nothing is hidden behind computing and coding takes no time. n ranks, N parameters.")
    say(console, "What a setting costs in steps: gradwire cases convergence, and docs/cases.md for what was measured.")
    return OK


def _estimate(arguments: argparse.Namespace, console: Console) -> int:
    from gradwire.cases import ASSUMPTIONS, compressed_steps, declared_delta, local_steps
    from gradwire.cli.lines import say

    steps, ranks = (
        given if given is not None else default for given, default in ((arguments.steps, 10_000), (arguments.ranks, 4))
    )
    kappa = 1.0 if arguments.kappa is None else arguments.kappa
    rows: list[tuple[str, ExtraSteps]] = []
    silent: list[str] = []
    for spec in arguments.methods or METHODS:
        delta = declared_delta(spec)
        if delta is None:
            silent.append(spec)
        else:
            rows.append((f"{delta:.2g}", compressed_steps(delta, steps, kappa, spec)))
    rows += [("", local_steps(every, ranks, steps, kappa, f"local:{every}")) for every in (2, 4, 8, 16, 32, 100)]
    if arguments.json:
        print(json.dumps([row._asdict() for _, row in rows], indent=1))
        return OK
    say(console, f"{steps:,} steps of plain SGD, {ranks} ranks, kappa = L F0 / sigma^2 = {kappa:g}\n")
    table = _table("method", "declared delta", "times the steps, at most", "added term is the smaller after")
    for delta, row in rows:
        table.add_row(row.what, delta, f"{row.factor:,.2f}", f"{row.vanishes:,.0f} steps")
    console.print(table)
    if silent:
        say(console, f"\n{', '.join(silent)}: no share of the energy is declared, so the theorem says nothing")
    say(console, "\nAssumptions:")
    for assumption in ASSUMPTIONS:
        say(console, f"  {assumption}")
    say(console, "\nMeasured runs are far from these bounds: docs/cases.md shows both beside each other.")
    return OK


def as_json(study: CaseStudy) -> dict[str, object]:
    """A study as `--json` prints it."""
    return {
        "name": study.name,
        "title": study.title,
        "hardware": study.hardware.name,
        "layout": vars(study.layout),
        "figures": [figure._asdict() | {"error": figure.error} for figure in study.figures],
        "volumes": [volume._asdict() for volume in study.volumes],
        "memory_bytes": study.memory._asdict(),
        "parts_s": study.time._asdict(),
        "assumptions": list(study.assumptions),
    }


def _show_list(found: list[CaseStudy], console: Console) -> None:
    from gradwire.cases import spoken
    from gradwire.cli.lines import say

    for study in found:
        say(console, (study.name, "bold"), f": {study.title}")
        for figure in study.figures:
            if figure.published is not None and figure.error is not None:
                value, published = spoken(figure.value, figure.unit), spoken(figure.published, figure.unit)
                say(console, f"  {figure.name}: {value}, published {published} ({figure.error:+.1%})")
    say(console, "\ngradwire cases NAME shows a study with its formulas, volumes and memory.")


def _show(study: CaseStudy, console: Console) -> None:
    from gradwire.cases import MEMORY, SYMBOLS, spoken
    from gradwire.cli.lines import say

    say(console, (study.title, "bold"))
    say(console, f"{study.layout.gpus} {study.hardware.name}: {study.layout.says}\n")
    for figure in study.figures:
        beside = figure.source
        if figure.published is not None:
            beside = f"{spoken(figure.published, figure.unit)} published ({figure.error:+.1%}; {figure.source})"
        say(console, (figure.name, "bold"), f": {spoken(figure.value, figure.unit)}; {beside}")
        say(console, f"    {figure.formula}")
    console.print()
    table = _table("a GPU sends in a step", "bytes", "ranks", "over", "formula")
    for volume in study.volumes:
        over = "the network" if volume.leaves else "a node"
        table.add_row(volume.kind, si_bytes(volume.nbytes), str(volume.ranks), over, volume.formula)
    console.print(table)
    console.print()
    table = _table("memory of the fullest GPU", "GB", "formula")
    for name, nbytes in study.memory._asdict().items():
        if nbytes:
            table.add_row(name, f"{nbytes / 1e9:.1f}", MEMORY[name])
    table.add_row("total", f"{study.memory.total / 1e9:.1f}", f"of {study.hardware.memory_gb:g}")
    console.print(table)
    console.print()
    table = _table("part of the step", "seconds")
    for name, seconds in study.time._asdict().items():
        if seconds:
            table.add_row(name, spoken_seconds(seconds))
    table.add_row("total", spoken_seconds(study.time.total))
    console.print(table)
    say(console, "\nAssumptions:")
    for assumption in study.assumptions:
        say(console, f"  {assumption}")
    say(console, "\nSymbols:")
    for symbol, meaning in SYMBOLS.items():
        say(console, f"  {symbol}: {meaning}")


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, heading in enumerate(headings):
        left = place == 0 or heading in ("formula", "over", "method")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table
