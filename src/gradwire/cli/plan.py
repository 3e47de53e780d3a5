"""`gradwire plan`: which layout of a model on a cluster takes the least time, and what it needs."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add
from gradwire.core.errors import SpecError
from gradwire.core.figures import significant, spoken_seconds
from gradwire.core.rates import count_in

if TYPE_CHECKING:
    from gradwire.planning import PlannedLayout, ScalingPlan

OK = 0

PLAN_HELP = """\
The search tries data, tensor, pipeline, context and expert parallelism, micro-batches, interleaving, sharding and
recomputation, and keeps what fits into memory. docs/plan.md tells the formulas, the assumptions and how far predictions
are from published step times.

models       gpt3-175b, llama2-70b, llama3-8b, mixtral-8x7b, ..., or the config.json of a model on Hugging Face
hardware     v100-32g, a100-40g, a100-80g, h100-80g, h800-80g, h200-141g, b200-180g, a TOML file of your own, or here:
             this machine, measured in a second

examples
  gradwire plan --model gpt3-175b --hardware a100-80g --gpus 1024 --batch 1536
  gradwire plan --model mixtral-8x7b --hardware h100-80g --gpus 64 --batch 256 --sequence 8192
  gradwire plan --model llama3-70b --hardware h100-80g --scale 64..4096 --batch 1024 --tokens 15T --price 2.5
  gradwire plan --model llama2-7b --hardware cluster.toml --gpus 64 --batch 512 --methods none fp16 int4 --every 1 8 64
  gradwire plan --model llama3-70b --hardware h100-80g --gpus 64 --batch 1024 --write megatron --out ./llama
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
    plan.add_argument("--hardware", required=True, metavar="NAME", help="by name, a TOML file, or here")
    plan.add_argument(
        "--links", type=Path, metavar="FILE", help="links as gradwire topology --cache FILE measured them"
    )
    many = plan.add_mutually_exclusive_group(required=True)
    many.add_argument("--gpus", type=int, metavar="N", help="how many")
    many.add_argument("--scale", metavar="N..M", help="a line for N, twice as many, ... to M: 8..16384")
    plan.add_argument("--batch", required=True, type=int, metavar="N", help="samples of a step, over all GPUs")
    plan.add_argument("--sequence", type=int, metavar="N", help="tokens of a sample (default: the model's)")
    plan.add_argument(
        "--methods",
        nargs="+",
        default=["none"],
        metavar="SPEC",
        help="by which gradients may be sent, as in gradwire methods (default: none). Others change training",
    )
    plan.add_argument(
        "--every",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="after how many steps replicas may be averaged (default: 1). Others change training",
    )
    plan.add_argument("--tokens", metavar="N", help="to train on, such as 300G: tells hours, and with --price money")
    plan.add_argument("--price", type=float, metavar="X", help="of a GPU and hour")
    plan.add_argument("--show", type=int, default=5, metavar="N", help="how many layouts to print (default: 5)")
    plan.add_argument(
        "--write",
        metavar="NAME",
        help="write the configuration of the fastest layout that torchrun (with FSDP2), deepspeed or megatron can have",
    )
    plan.add_argument("--out", type=Path, metavar="DIR", help="the folder for --write")
    plan.add_argument("--page", type=Path, metavar="FILE", help="write a page with pictures of the fastest steps")
    plan.add_argument("--json", action="store_true", help="print what a program reads")
    plan.set_defaults(run=run_plan)


def run_plan(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire plan` and return its exit status.

    Raises:
        SpecError: unknown names, broken files, numbers that make no sense, a model that fits nowhere.
    """
    from gradwire import planning
    from gradwire.cli.lines import say

    model = planning.model(arguments.model)
    is_here = arguments.hardware == "here"
    if arguments.sequence is not None:
        model = model.with_sequence(arguments.sequence)
    tokens = _tokens(arguments.tokens)
    on = planning.hardware_here() if is_here else planning.hardware(arguments.hardware)
    reached = planning.Efficiencies(1.0, 1.0) if is_here else planning.Efficiencies()
    if arguments.links is not None:
        on, reached = planning.with_links(on, arguments.links), replace(reached, links=1.0)
    if arguments.price is not None and (tokens is None or not 0 <= arguments.price < math.inf):
        raise SpecError("--price wants --tokens beside it, and is 0 or more for a GPU and hour")
    if (arguments.write is None) != (arguments.out is None) or (arguments.write and arguments.scale):
        raise SpecError("--write NAME and --out DIR go together, and with --gpus: a folder has one layout")
    if arguments.page is not None and arguments.scale:
        raise SpecError("--page goes with --gpus: it draws the layouts of one number of GPUs")
    if arguments.scale:
        first, last = _range(arguments.scale)
        rows = list(
            planning.scale(
                model, on, first, last, arguments.batch, reached, methods=arguments.methods, every=arguments.every
            )
        )
        if arguments.json:
            print(json.dumps([_scale_json(gpus, found, tokens, arguments.price) for gpus, found in rows], indent=1))
        else:
            _show_scale(rows, tokens, arguments.price, console)
        return OK
    found = planning.plan(
        model,
        on,
        arguments.gpus,
        arguments.batch,
        reached,
        show=arguments.show,
        methods=arguments.methods,
        every=arguments.every,
        suits=planning.written_by(arguments.write) if arguments.write else None,
    )
    if arguments.write:
        planning.write(arguments.write, model, found.best[0].layout, on, arguments.out)
    if arguments.page is not None:
        from gradwire.report.plan import write_plan_page

        write_plan_page(found, arguments.page, reached)
    if arguments.json:
        print(json.dumps(as_json(found, tokens, arguments.price), indent=1))
    else:
        _show(found, console)
        if tokens is not None:
            time, hours, *money = _shown_spent(found, tokens, arguments.price)
            cost = f", {money[0]} at {arguments.price:g} each" if money else ""
            say(console, f"\n{arguments.tokens} tokens take {time} without failures: {hours} GPU hours{cost}")
        if arguments.write:
            say(console, f"\nconfiguration of {arguments.write}, and launch.sh for each node: {arguments.out}")
        if arguments.page is not None:
            say(console, f"\npage: {arguments.page}")
    return OK


def _tokens(text: str | None) -> float | None:
    """A count with a unit: 300G."""
    if text is None:
        return None
    if (found := count_in(text)) is None:
        raise SpecError(f"--tokens {text} is no number of tokens: write one such as 300G or 15T")
    return found


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text.strip())
    if match is None:
        raise SpecError(f"--scale {text} is no range: write two numbers of GPUs, such as 8..16384")
    return int(match[1]), int(match[2])


def _spent(found: ScalingPlan, tokens: float, price: float | None) -> dict[str, float]:
    """Hours, GPU hours and, where there is a price, money."""
    hours = found.hours(tokens)
    spent = {"hours": hours, "gpu_hours": hours * found.gpus}
    return spent if price is None else {**spent, "money": spent["gpu_hours"] * price}


def _shown_spent(found: ScalingPlan, tokens: float, price: float | None) -> list[str]:
    """Time, GPU hours and, where there is a price, money, for people."""
    hours, *spent = _spent(found, tokens, price).values()
    time = f"{hours:,.1f} hours" if hours < 72 else f"{hours / 24:,.1f} days"
    return [time, *(f"{each:,.0f}" for each in spent)]


def _scale_json(gpus: int, found: ScalingPlan | str, tokens: float | None, price: float | None) -> dict[str, object]:
    return {"gpus": gpus, "why": found} if isinstance(found, str) else as_json(found, tokens, price)


def _show_scale(
    rows: list[tuple[int, ScalingPlan | str]], tokens: float | None, price: float | None, console: Console
) -> None:
    from gradwire.cli.lines import say

    spent = ["time", "GPU hours", *(["money"] if price is not None else [])] if tokens is not None else []
    table = _table("GPUs", "step", "MFU", "tokens/s", *spent, "layout")
    for gpus, found in rows:
        if isinstance(found, str):
            continue
        best = found.best[0]
        figures = [f"{gpus:,}", spoken_seconds(best.time.total), f"{found.utilisation:.1%}"]
        figures += [f"{found.tokens_per_s:,.0f}"]
        figures += _shown_spent(found, tokens, price) if tokens is not None else []
        table.add_row(*figures, best.layout.says)
    if table.rows:
        console.print(table)
    for gpus, found in rows:
        if isinstance(found, str):
            say(console, f"{gpus:,} GPUs: {found}")


def as_json(found: ScalingPlan, tokens: float | None = None, price: float | None = None) -> dict[str, object]:
    """A plan as `--json` prints it; bytes, seconds and the sizes of each layout, and what so many tokens take."""
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
        **(_spent(found, tokens, price) if tokens is not None else {}),
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
        if nbytes:
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
