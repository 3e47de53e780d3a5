"""`gradwire federate`: train a task with a federation on this machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from gradwire.bench.federate import News, Options, Run
    from gradwire.bench.federation_results import Results
    from gradwire.cli.lines import Lines

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
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add it to the command line."""
    parser = commands.add_parser(
        "federate",
        help="train with a federation of uneven clients on this machine, and report accuracy against rounds and bytes",
        description="Train one task with many clients that have unequal data and are seldom there, in this process.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to train")
    what.add_argument("--task", default="digits", metavar="TASK", help="as in compare (default: digits)")
    what.add_argument("--text", type=Path, metavar="FOLDER", help="folder of text for the bytes task")
    what.add_argument("--rounds", type=int, default=50, metavar="N", help="(default: 50)")
    what.add_argument("--method", default="fedavg", metavar="METHOD", help="(default: fedavg)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")
    _add_clients(parser.add_argument_group("the clients"))
    sent = parser.add_argument_group("what is sent")
    sent.add_argument("--update", default="none", metavar="SPEC", help="clients' updates (default: none)")
    sent.add_argument("--broadcast", default="none", metavar="SPEC", help="the server's changes (default: none)")
    sent.add_argument("--aggregate", default="mean", metavar="RULE", help="what updates become (default: mean)")
    sent.add_argument("--quorum", type=int, default=1, metavar="N", help="updates a round needs (default: 1)")
    sent.add_argument(
        "--out",
        type=Path,
        default=Path("federate-report"),
        metavar="DIR",
        help="output folder (default: federate-report)",
    )
    parser.set_defaults(run=run_federate)


def _add_clients(clients: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    clients.add_argument("--clients", type=int, default=100, metavar="N", help="how many (default: 100)")
    clients.add_argument("--sample", type=int, default=10, metavar="N", help="of a round (default: 10)")
    clients.add_argument(
        "--partition", default="dirichlet:0.3", metavar="PARTITION", help="of the data (default: dirichlet:0.3)"
    )
    clients.add_argument("--lr", type=float, default=0.1, metavar="LR", help="of local steps (default: 0.1)")
    clients.add_argument("--momentum", type=float, default=0.0, metavar="M", help="of local steps (default: 0)")
    clients.add_argument("--epochs", type=int, default=5, metavar="N", help="over own data in a round (default: 5)")
    clients.add_argument("--batch", type=int, default=10, metavar="N", help="examples of a local step (default: 10)")
    clients.add_argument("--drop", type=float, default=0.0, metavar="P", help="probability of being lost (default: 0)")
    clients.add_argument(
        "--slow", type=float, default=0.0, metavar="P", help="probability of making fewer local steps (default: 0)"
    )


def _options(arguments: argparse.Namespace) -> Options:
    from dataclasses import fields

    from gradwire.bench.federate import Options

    return Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})


def run_federate(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire federate` and return its exit status."""
    import torch  # takes seconds: --help should not wait for it

    from gradwire.bench.federate import Run
    from gradwire.bench.federation_results import save
    from gradwire.cli.lines import lines, say

    options = _options(arguments)
    torch.set_num_threads(1)  # batches of a client are small: more threads cost more than they give
    run = Run(options)
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


def _write(run: Run, console: Console) -> None:
    """Keep and show what is known, also of a run that was cut short."""
    from gradwire.bench.federation_results import save

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

    def tell(self, news: News) -> None:
        """A round has ended."""
        from gradwire.report import text

        done = news.round.number + 1
        left = (time.monotonic() - self._start) / done * (self._rounds - done)
        detail = f"loss {news.round.loss:.3f}  {self._metric} {news.value:.4g}  {text.si_bytes(news.sent_bytes)} sent"
        detail += f"  {len(news.round.dropped)} dropped" if news.round.dropped else ""
        detail += f"  {text.seconds(max(1.0, left))} left" if done < self._rounds else ""
        self._lines.show(f"round {done} of {self._rounds}", detail, done, self._rounds)
