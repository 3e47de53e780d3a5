"""Lines that tell how far something has come: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

LINE_EVERY_S = 5.0


class Lines(Protocol):
    """Shows how far something has come."""

    def show(self, head: str, detail: str, done: float, total: float) -> None:
        """What is going on, and how much of the total is done."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainLines:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = 0.0

    def show(self, head: str, detail: str, done: float, total: float) -> None:
        """Print a line, if the last one is old enough."""
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            say(self._console, f"  {head}  {detail}")

    def close(self) -> None:
        """Lines need no clearing up."""


class ProgressBar:
    """A bar that stays where it is, for people."""

    def __init__(self, console: Console) -> None:
        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.fields[head]}", markup=False),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("runs", total=1.0, head="", detail="")
        self._progress.start()

    def show(self, head: str, detail: str, done: float, total: float) -> None:
        """Move the bar to where the work is."""
        self._progress.update(self._task, completed=done, total=total, head=head, detail=detail)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def lines(console: Console) -> Lines:
    """What suits the console."""
    return ProgressBar(console) if console.is_terminal else PlainLines(console)


def say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print a line as it is: names and descriptions are a user's, and brackets in them mean nothing to us."""
    console.print(Text.assemble(*parts), highlight=False, soft_wrap=True)
