"""What a comparison looks like on a terminal, while it runs and when it is over."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.cli.lines import Lines, PlainLines, ProgressBar, say
from gradwire.compare.evidence import not_finite
from gradwire.compare.figures import Row, final_loss, summarise
from gradwire.compare.plan import ComparisonPlan
from gradwire.compare.results import FLOOR, Comparison, Run
from gradwire.compare.verdict import Verdict
from gradwire.ranks.news import News
from gradwire.report import text
from gradwire.report.page import cells, headings, notes

BETWEEN_RUNS_S = 3.0


class Remaining:
    """Guesses how long what is left will take.

    A method that has run with another seed takes as long again; one not seen yet takes as long as the others do on
    average. The time until a run's first news is no part of the guess: the first run waits for the hosts to start.
    """

    def __init__(self, plan: ComparisonPlan, done: Sequence[tuple[str, int]]) -> None:
        self._left = [cell for cell in plan.grid if cell not in done]
        self._plan = plan
        self._known: dict[str, float] = {}
        self._method = ""
        self._first: tuple[float, float] | None = None  # time and share of a run's first news
        self._share = 0.0

    def start(self, method: str, seed: int) -> None:
        """Begin to show a run."""
        self._method, self._first, self._share = method, None, 0.0

    def news(self, news: News) -> float:
        """The run has come a little further; returns the share of it that is done, from 0 to 1."""
        if self._plan.options.steps is not None:
            self._share = news.step / self._plan.options.steps
        else:
            self._share = min(1.0, news.time_s / (self._plan.seconds or 1))
        if self._first is None:
            self._first = (time.monotonic(), self._share)
        return self._share

    def finish(self, run: Run) -> None:
        """The run is over."""
        self._share = 1.0
        if (whole := self._whole()) is not None:
            self._known[run.method] = whole
        self._left.remove((run.method, run.seed))
        self._method, self._share = "", 0.0

    def seconds(self) -> float | None:
        """What is left of everything; None while nothing is known."""
        known = dict(self._known)
        if self._method not in known and (whole := self._whole()) is not None:
            known[self._method] = whole
        if not known:
            return None
        typical = sum(known.values()) / len(known)
        total = sum(known.get(method, typical) + BETWEEN_RUNS_S for method, _ in self._left)
        return total - self._share * known.get(self._method, typical)

    def _whole(self) -> float | None:
        """How long the run in progress takes as a whole, by how far it has come since its first news."""
        if self._first is None or self._share - self._first[1] < 0.03:
            return None
        return (time.monotonic() - self._first[0]) / (self._share - self._first[1])


class ConsoleView:
    """Shows a comparison while it runs: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: Lines = PlainLines(console)
        self._remaining: Remaining | None = None
        self._total = 0
        self._done = 0
        self._smoothing = 1

    def begin(self, plan: ComparisonPlan, network: str, kept: Sequence[tuple[str, int]]) -> None:
        """Say what is going to happen."""
        self._total, self._done, self._smoothing = len(plan.grid), len(kept), plan.smoothing
        self._remaining = Remaining(plan, kept)
        length = f"{plan.options.steps} steps" if plan.options.steps else f"{plan.options.minutes:g} minutes"
        say(self._console, (plan.options.task, "bold"), f": {plan.task.description}")
        say(self._console, (network, "dim"))
        resumed = f", {len(kept)} of them from an earlier run" if kept else ""
        say(self._console, (f"{self._total} runs of {length}{resumed}; results in {plan.options.out}", "dim"))
        if self._console.is_terminal:
            self._lines = ProgressBar(self._console)

    def start(self, method: str, seed: int) -> None:
        """Begin to show a run."""
        if self._remaining:
            self._remaining.start(method, seed)
        self._show(method, seed, "starting", 0.0)

    def news(self, method: str, seed: int, news: News) -> None:
        """A run has come a little further."""
        share = self._remaining.news(news) if self._remaining else 0.0
        sent = text.si_bytes(news.tx_bytes / max(1, news.step))
        self._show(method, seed, f"step {news.step}  loss {news.loss:.3f}  {sent}/step", share)

    def finish(self, run: Run) -> None:
        """A run is over: one line that stays."""
        if self._remaining:
            self._remaining.finish(run)
        self._done += 1
        wrong = run.reason.splitlines()[0] if run.status == "failed" else not_finite(run)
        if wrong:
            say(self._console, "  ", ("✗", "red"), f" {run.method} seed {run.seed}: {wrong}")
            return
        step_ms = 1000 * run.times_s[-1] / run.steps
        sent = text.si_bytes(run.wire.through_link / run.steps)
        loss = f"loss {final_loss(run, self._smoothing):.3f}, " if run.method != FLOOR else ""
        timed = f", timed over the first {run.timed_steps} steps" if run.timed_steps is not None else ""
        figures = f"{loss}{text.milliseconds(step_ms)} ms and {sent} a step{timed}"
        say(self._console, "  ", ("✓", "green"), f" {run.method} seed {run.seed}: {run.steps} steps, {figures}")
        if run.report:
            say(self._console, "    ", (f"session.report(): {run.report['verdict']}", "dim"))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._lines.close()

    def _show(self, method: str, seed: int, detail: str, share: float) -> None:
        left = self._remaining.seconds() if self._remaining else None
        if left is not None:
            detail += f"  {text.seconds(max(1.0, left))} left"
        self._lines.show(f"{method} seed {seed}", detail, self._done + share, self._total)


def show_table(console: Console, comparison: Comparison, verdict: Verdict) -> None:
    """Print the conclusion, a row a method, then what the target is and what failed."""
    rows = summarise(comparison)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title=None)
    for i, name in enumerate(headings(comparison)):
        table.add_column(Text(name), justify="left" if i == 0 else "right", no_wrap=i == 0, vertical="bottom")
    for row in rows:
        name = Text(row.method, style="" if row.method.startswith("torch.") else "bold")
        table.add_row(name, *map(Text, cells(row, verdict)))
    console.print()
    console.print(table)
    say(console, (notes(comparison, verdict), "dim"))
    show_verdict(console, verdict)
    show_failures(console, rows)


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print the headline, what else is to be said of the best method, and every finding."""
    console.print()
    say(console, (verdict.headline, "bold"))
    for said in verdict.beyond_headline:
        say(console, said)
    for finding in verdict.findings:
        say(console, ("✗ ", "red") if finding.forbids else ("! ", "yellow"), finding.text)


def show_failures(console: Console, rows: Sequence[Row]) -> None:
    """Print why methods failed, with what their ranks said last."""
    for row in rows:
        if row.failure:
            say(console, (f"\n{row.method} failed", "red"))
            say(console, row.failure)
