"""`gradwire cases`: published trainings beside the planner's formulas."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add
from gradwire.core.figures import si_bytes, spoken_seconds

if TYPE_CHECKING:
    from gradwire.cases import CaseStudy

OK = 0

CASES_HELP = """\
Each study tells what a GPU sends in a step by kind of parallelism, the memory of the fullest GPU, and the time. Each
number has the formula that it comes from, and the published figure beside it. docs/cases.md has all of them.

studies
  gpt3-175b      GPT-3 175B by Megatron-LM on 384 to 1,536 A100
  llama2-70b     Llama 2 70B on A100
  mixtral-8x7b   Mixtral 8x7B by Megatron-Core on 64 H100
  islands        training over the internet: INTELLECT-1 on up to 14 islands, by DiLoCo

examples
  gradwire cases
  gradwire cases gpt3-175b
  gradwire cases islands --json
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    cases = add(
        commands,
        "cases",
        help="case studies of published trainings: bytes, memory and time with formulas, and what was reported",
        description="Show published trainings beside the planner's formulas.",
        epilog=CASES_HELP,
    )
    cases.add_argument("name", nargs="?", metavar="NAME", help="which one (default: list all)")
    cases.add_argument("--json", action="store_true", help="print what a program reads")
    cases.set_defaults(run=run_cases)


def run_cases(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire cases` and return its exit status.

    Raises:
        SpecError: an unknown name, with the nearest.
    """
    from gradwire.cases import STUDIES, case_study

    names = [arguments.name] if arguments.name else list(STUDIES)
    found = [case_study(name) for name in names]
    if arguments.json:
        print(json.dumps([as_json(study) for study in found], indent=1))
    elif arguments.name:
        _show(found[0], console)
    else:
        _show_list(found, console)
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
        left = place == 0 or heading in ("formula", "over")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table
