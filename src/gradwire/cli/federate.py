"""`gradwire federate`: train a task with a federation on this machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gradwire.cli.commands import Commands, add
from gradwire.cli.option_arguments import add_options, read_options
from gradwire.federate.options import FederateOptions

if TYPE_CHECKING:
    from gradwire.cli.lines import Lines
    from gradwire.federate.federation import FederationNews, FederationRun
    from gradwire.federate.results import Results

OK, INTERRUPTED = 0, 130

HELP = """\
methods
  fedavg, fedprox:MU, fednova, scaffold     what clients compute, and how they are averaged
  fedavgm:LR, fedadam:LR, fedyogi:LR, fedadagrad:LR
                                            the server's step, alone (after fedavg) or joined: fedprox:0.1+fedadam:0.03;
                                            options follow, as in fedadam:0.03,tau=0.01

partitions
  even, dirichlet:ALPHA, shards:NUMBER, quantity:ALPHA

updates and broadcast
  none, or a codec such as topk:0.05, int8, qsgd:15, topk:0.05+int8; biased ones with error memory

aggregates
  mean, median, trimmed:N, krum:N, multikrum:N, bulyan:N, rfa, clip:RADIUS, dp:CLIP

examples
  gradwire federate
  gradwire federate --method fednova --update topk:0.05 --aggregate trimmed:1
  gradwire federate --method scaffold --partition shards:2 --drop 0.1 --slow 0.3
  gradwire federate --sample 50 --sampling poisson --aggregate dp:0.5,noise=2
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    parser = add(
        commands,
        "federate",
        help="train with a federation of uneven clients on this machine, and report accuracy against rounds and bytes",
        description="Train one task with many clients that have unequal data and are seldom there, in this process.",
        epilog=HELP,
    )
    add_options(parser, FederateOptions)
    parser.set_defaults(run=run_federate)


def run_federate(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire federate` and return its exit status."""
    import torch  # takes seconds: --help should not wait for it

    from gradwire.cli.lines import lines, say
    from gradwire.federate.federation import FederationRun
    from gradwire.federate.results import save

    options = read_options(arguments, FederateOptions)
    torch.set_num_threads(1)  # batches of a client are small: more threads cost more than they give
    run = FederationRun(options)
    save(run.results, options.out / "results.json")  # whether the folder can be written shows before the work
    say(console, (str(run.results.task["description"]), "bold"))
    say(console, (f"{options.clients} clients, {options.sample} a round; results in {options.out}", "dim"))
    shown = lines(console)
    view = _View(shown, options.rounds, str(run.results.task["metric_name"]))
    interrupted = False
    try:
        run.train(view.tell)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        shown.close()
        _write(run, console)
    return INTERRUPTED if interrupted else OK


def _write(run: FederationRun, console: Console) -> None:
    """Keep and show what is known, also of a run that was cut short."""
    from gradwire.federate.results import save

    results = run.finish()
    save(results, run.options.out / "results.json")
    show(results, run.options.out, console)


def show(results: Results, folder: Path, console: Console) -> None:
    """Write the page of a federation's results, and say what they came to."""
    from gradwire.cli.lines import say
    from gradwire.report.federation import findings, headline, write_federation_report

    write_federation_report(results, folder / "report.html")
    say(console, (f"\n{headline(results)}", "bold"))
    for finding in findings(results):
        say(console, ("! ", "yellow"), finding)
    say(console, f"\nreport: {folder / 'report.html'}")


class _View:
    """Shows rounds as they end."""

    def __init__(self, lines: Lines, rounds: int, metric: str) -> None:
        self._lines, self._rounds, self._metric, self._start = lines, rounds, metric, time.monotonic()

    def tell(self, news: FederationNews) -> None:
        """A round has ended."""
        from gradwire.report import text

        done = news.round.number + 1
        left = (time.monotonic() - self._start) / done * (self._rounds - done)
        loss = f"loss {news.round.loss:.3f}" if news.round.clients else "no client took part"
        detail = f"{loss}  {self._metric} {news.value:.4g}  {text.si_bytes(news.sent_bytes)} sent"
        detail += f"  {len(news.round.dropped)} dropped" if news.round.dropped else ""
        detail += f"  {text.seconds(max(1.0, left))} left" if done < self._rounds else ""
        self._lines.show(f"round {done} of {self._rounds}", detail, done, self._rounds)
