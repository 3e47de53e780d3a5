"""`gradwire choose`: which method for a case, with what its step is predicted to take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gradwire.cli.commands import Commands, add, add_device
from gradwire.core.errors import SpecError
from gradwire.core.rates import TIMES, seconds_in, shortened

if TYPE_CHECKING:
    from gradwire.choosing import Case, Forecast, Training
    from gradwire.topology.link_profile import LinkProfile

OK = 0

_HELP = """\
classes of accuracy
  lossless     the mean of all gradients in fp32, and nothing else
  safe         and methods whose gradients lose little from the first steps on: fp16, int4
  bold         and PowerSGD, models that are averaged every few steps, ranks that do not wait, parameters in 8 bits

columns
  computing    what a step takes without communication (--step)
  coding       encoding, decoding and summing, as measured on this machine just now
  sending      the messages of a step on the link, one after the other
  hidden       of sending, what travels during the backward pass
  ms a step    computing + coding + sending - hidden

examples
  gradwire choose --rate 100mbit --parameters 125M --ranks 4 --step 400
  gradwire choose --rate links.json --task digits --step 30 --accuracy bold
  gradwire choose --rate 10gbit --delay 1ms --parameters 7B --ranks 8
  gradwire choose --rate 1gbit --layout fsdp2

docs/choosing.md has the rules in words.
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    choose = add(
        commands,
        "choose",
        help="which method for your link, model and step, with what its step is predicted to take",
        description="Predict a step of each method that may be chosen, by its messages on a link and its coding on "
        "this machine, and say which one to take, why, and which would come next.",
        epilog=_HELP,
    )
    rate = "of each rank's link, from 100kbit to 1tbit; or what was measured: the file of GRADWIRE_LINKS"
    choose.add_argument("--rate", required=True, metavar="RATE", help=rate)
    choose.add_argument("--delay", metavar="TIME", help="of a round trip: 20ms (default: a local network's)")
    choose.add_argument("--parameters", metavar="N", help="of the model: 1.85M, 7B (default: 100M)")
    task = "whose model, in place of --parameters: bytes, digits or package.module:name"
    choose.add_argument("--task", metavar="TASK", help=task)
    choose.add_argument("--text", type=Path, metavar="FOLDER", help="text of the bytes task")
    choose.add_argument("--ranks", type=int, metavar="N", help="how many (default: 4, or as many as were measured)")
    choose.add_argument("--step", type=float, metavar="MS", help="what a step takes without communication, in ms")
    accuracy = "what a method may lose: lossless, safe or bold (default: safe)"
    choose.add_argument("--accuracy", default="safe", metavar="CLASS", help=accuracy)
    layout = (
        "ddp (every rank has the whole model), fsdp2, sites (a slow line between groups), leaving (machines come and "
        "go) or clients (a federation)"
    )
    choose.add_argument("--layout", default="ddp", metavar="WORD", help=layout)
    slow = "who is slower: never, one (always the same) or any (in turn)"
    choose.add_argument("--slow", default="never", metavar="WORD", help=slow)
    add_device(choose, "cuda where PyTorch finds a GPU, and else cpu; with --task what its model lies on")
    choose.add_argument("--no-coding", action="store_true", help="do not measure coding, and count it as nothing")
    choose.set_defaults(run=run_choose)


def run_choose(arguments: argparse.Namespace, console: Console) -> int:
    """`gradwire choose --rate RATE`."""
    from gradwire import choosing
    from gradwire.choosing.rules import no_coding

    profile = _profile(arguments.rate)
    case = _case(arguments, profile)
    found = choosing.choose(case, no_coding if arguments.no_coding else choosing.coding_s)
    measured_on = profile.measured_on if profile else None
    console.print(*[case.says, *([measured_on] if measured_on else [])], "", sep="\n", highlight=False, soft_wrap=True)
    if found.forecasts:
        console.print(_table(found), "", sep="\n")
    for line in [*_conclusion(found), *_shared(profile, found)]:
        console.print(line, highlight=False, soft_wrap=True)
    return OK


def _profile(rate: str) -> LinkProfile | None:
    """What was measured, where --rate names a file of that.

    Raises:
        TopologyError: a file that cannot be read.
    """
    from gradwire.topology.link_profile import LinkProfile

    return LinkProfile.read(Path(rate)) if rate.endswith(".json") else None


def _case(arguments: argparse.Namespace, profile: LinkProfile | None) -> Case:
    """What the arguments tell.

    Raises:
        SpecError: numbers or words that make no sense, or two that tell the same.
        TopologyError: links that have no measured rate.
    """
    from gradwire.choosing import Case, parameters_in
    from gradwire.choosing.coding import coding_device
    from gradwire.tasks.builtin import make_task

    rate, delay_s, ranks = _link(arguments, profile)
    facts: dict[str, Any] = {
        "rate": rate,
        "delay_s": delay_s,
        "ranks": ranks,
        "step_s": None if arguments.step is None else arguments.step / 1e3,
        "layout": arguments.layout,
        "slow": arguments.slow,
        "accuracy": arguments.accuracy,
    }
    if arguments.task is None:
        facts["device"] = arguments.device or coding_device(()).type
        return Case(parameters=parameters_in(arguments.parameters or "100M"), **facts)
    if arguments.parameters is not None:
        raise SpecError("--task tells the model, and so does --parameters: give one of them")
    if arguments.device is not None:
        facts["device"] = arguments.device
    return Case.of_model(make_task(arguments.task, 0, arguments.text).model, **facts)


def _link(arguments: argparse.Namespace, profile: LinkProfile | None) -> tuple[float, float | None, int]:
    """Bits a second, seconds of a round trip where these are known, and ranks."""
    from gradwire.core.rates import parse_rate

    rate, ranks = arguments.rate, arguments.ranks
    if profile is not None:
        if arguments.delay is not None:
            raise SpecError(f"--delay belongs to a rate, and {rate} has measured delays: leave it out")
        count = len(profile.hosts)
        if ranks not in (None, count):
            raise SpecError(f"{rate} was measured with {count} ranks: give --ranks {count}, or leave it out")
        link = profile.link_between(range(count))
        return 8 / link.beta_s_per_byte, 2 * link.alpha_s, count
    try:
        return parse_rate(rate), _delay_s(arguments.delay), 4 if ranks is None else ranks
    except ValueError as error:
        raise SpecError(str(error)) from error


def _delay_s(text: str | None) -> float | None:
    """Seconds of a round trip; None where nobody tells. Nothing is emulated, so it may be as short as it is."""
    if text is None:
        return None
    found = seconds_in(text)
    if found is None:
        raise SpecError(
            f"--delay {shortened(text)} is no time: write a number and a unit of {', '.join(TIMES)}, such as 20ms"
        )
    return found


def _table(found: Training) -> Table:
    """One row a method, with the parts of its step."""
    from gradwire.choosing.rules import loses

    knows_step = found.case.step_s is not None
    headings = ["computing", "coding", "sending", "hidden", "ms a step"] if knows_step else ["coding", "sending"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method", no_wrap=True, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("ended at")
    for forecast in found.forecasts:
        table.add_row(forecast.spec, *_parts(forecast, knows_step), loses(forecast.spec))
    return table


def _parts(forecast: Forecast, knows_step: bool) -> list[str]:
    from gradwire.core.figures import milliseconds

    coding_s, sending_s = forecast.coding_s, forecast.sending_s
    parts = [coding_s, sending_s]
    if knows_step:
        parts = [forecast.compute_s, coding_s, sending_s, forecast.hidden_s, forecast.step_s]
    return [milliseconds(1e3 * seconds) for seconds in parts]


def _conclusion(found: Training) -> list[str]:
    """What to write, why, what would come next, and where it goes on."""
    from gradwire.core.figures import milliseconds

    said = list[str]()
    if found.take is not None:
        said.append(f"Take {found.call}")
    elif found.forecasts and found.case.step_s is not None:
        said.append("Use PyTorch alone.")
    said.append(f"{found.why[0].upper()}{found.why[1:]}{'' if found.why.endswith('.') else '.'}")
    if (other := found.runner_up) is not None:
        name = "PyTorch alone" if other.spec == "none" else other.spec
        said.append(f"The runner-up is {name}, with {milliseconds(1e3 * other.step_s)} ms a step.")
    said.append(f"Page: docs/{found.page}. What it brings you, gradwire compare measures.")
    return said


def _shared(profile: LinkProfile | None, found: Training) -> list[str]:
    """What the times leave out where several ranks share the link of a node, if they were measured on such nodes."""
    from gradwire.topology.levels import NODE

    nodes = profile.levels.get(NODE, ()) if profile else ()
    most = max(map(len, nodes), default=1)
    if most == 1 or len(nodes) == 1 or all(forecast.spec != "int4" for forecast in found.forecasts):
        return []
    return [
        f"Up to {most} ranks share the link of a node, and these times count a link for each: the all-to-all of int4 "
        "crosses it once for each rank, and a ring of fp32 once in all, so try int4,node=auto as well."
    ]
