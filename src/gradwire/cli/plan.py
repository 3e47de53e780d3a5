"""`gradwire plan`: which layout of a model on a cluster takes the least time, and what it needs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add

if TYPE_CHECKING:
    from gradwire.planning import PlannedLayout, ScalingPlan

OK = 0

PLAN_HELP = """\
The search tries data, tensor, pipeline, context and expert parallelism, micro-batches, interleaving, sharding and
recomputation, and keeps what fits into memory. docs/plan.md tells the formulas, the assumptions and how far predictions
are from published step times.

models       gpt3-175b, llama2-70b, llama3-8b, mixtral-8x7b, ..., or the config.json of a model on Hugging Face
hardware     v100-32g, a100-40g, a100-80g, h100-80g, h800-80g, h200-141g, b200-180g, or a TOML file of your own

examples
  gradwire plan --model gpt3-175b --hardware a100-80g --gpus 1024 --batch 1536
  gradwire plan --model mixtral-8x7b --hardware h100-80g --gpus 64 --batch 256 --sequence 8192
  gradwire plan --model ./my-model/config.json --hardware cluster.toml --gpus 64 --batch 512 --json
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    plan = add(
        commands,
        "plan",
        help="which layout of a model on a cluster takes the least time, and what memory it needs",
        description="Predict memory and step time of a transformer on a cluster, and print the fastest layouts.",
        epilog=PLAN_HELP,
    )
    plan.add_argument("--model", required=True, metavar="NAME", help="by name, or a config.json")
    plan.add_argument("--hardware", required=True, metavar="NAME", help="by name, or a TOML file")
    plan.add_argument("--gpus", required=True, type=int, metavar="N", help="how many")
    plan.add_argument("--batch", required=True, type=int, metavar="N", help="samples of a step, over all GPUs")
    plan.add_argument("--sequence", type=int, metavar="N", help="tokens of a sample (default: the model's)")
    plan.add_argument("--show", type=int, default=5, metavar="N", help="how many layouts to print (default: 5)")
    plan.add_argument("--json", action="store_true", help="print what a program reads")
    plan.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire plan` and return its exit status.

    Raises:
        SpecError: unknown names, broken files, numbers that make no sense, a model that fits nowhere.
    """
    from gradwire import planning

    model = planning.model(arguments.model)
    if arguments.sequence is not None:
        model = model.with_sequence(arguments.sequence)
    found = planning.plan(
        model, planning.hardware(arguments.hardware), arguments.gpus, arguments.batch, show=arguments.show
    )
    if arguments.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        _show(found, console)
    return OK


def as_json(found: ScalingPlan) -> dict[str, object]:
    """A plan as `--json` prints it; bytes, seconds and the sizes of each layout."""
    return {
        "model": found.model.name,
        "parameters": found.model.parameters,
        "hardware": found.hardware.name,
        "gpus": found.gpus,
        "batch": found.batch,
        "tried": found.tried,
        "fitting": found.fitting,
        "model_flops_utilisation": found.utilisation,
        "best": [_layout_json(one) for one in found.best],
        "neighbours": [{"change": one.change, "why": one.why} for one in found.neighbours],
        "helps": [{"change": change, "saved_s": saved} for change, saved in found.helps],
    }


def _layout_json(one: PlannedLayout) -> dict[str, object]:
    return {
        "layout": vars(one.layout),
        "step_s": one.time.total,
        "parts_s": one.time._asdict(),
        "memory_bytes": one.memory.total,
        "memory_parts_bytes": one.memory._asdict(),
    }


def _show(found: ScalingPlan, console: Console) -> None:
    from gradwire.cli.lines import say
    from gradwire.core.figures import significant
    from gradwire.planning.search import spoken_seconds

    model, best = found.model, found.best[0]
    say(
        console,
        f"{model.name}: {significant(model.parameters / 1e9, 3)} G parameters, {model.sequence} tokens a sample, "
        f"{found.batch} samples a step, on {found.gpus} {found.hardware.name}",
    )
    say(console, f"{found.tried} layouts tried, {found.fitting} fit into {found.hardware.memory_gb:g} GB\n")
    table = _table("step", "memory", "tokens/s", "layout")
    for one in found.best:
        rate = found.batch * model.sequence / one.time.total
        table.add_row(
            spoken_seconds(one.time.total), f"{one.memory.total / 1e9:.1f} GB", f"{rate:,.0f}", one.layout.says
        )
    console.print(table)
    say(
        console,
        f"\nThe fastest reaches {found.utilisation:.1%} of the peak in model FLOPs (MFU). Its step, its memory:\n",
    )
    parts = _table("part of the step", "seconds", "share", left=1)
    for name, seconds in best.time._asdict().items():
        if seconds:
            parts.add_row(name, spoken_seconds(seconds), f"{seconds / best.time.total:.1%}")
    parts.add_row("total", spoken_seconds(best.time.total), "100%")
    console.print(parts)
    console.print()
    held = _table("part of the memory", "GB", left=1)
    for name, nbytes in best.memory._asdict().items():
        held.add_row(name, f"{nbytes / 1e9:.1f}")
    held.add_row("total", f"{best.memory.total / 1e9:.1f}")
    console.print(held)
    say(console, "\nWhy its neighbours lost:")
    for one in found.neighbours:
        say(console, f"  {one.change}: {one.why}")
    say(console, "\nWhat would help this layout most:")
    for change, saved in found.helps:
        say(console, f"  {change}: {spoken_seconds(saved)} less a step")


def _table(*headings: str, left: int = 0) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, heading in enumerate(headings):
        last = not left and place == len(headings) - 1
        table.add_column(heading, justify="left" if place < left or last else "right", no_wrap=True)
    return table
