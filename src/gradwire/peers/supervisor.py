"""Processes that are started, watched, started anew, and ended whatever happens."""

from __future__ import annotations

import multiprocessing.connection
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, Protocol, Self, TypeVar

import torch.multiprocessing as mp

_END_S = 5.0


class Child(Protocol):
    """What a supervisor has started."""

    def ended(self) -> str | None:
        """How it ended, "" where it ended well; None while it runs."""
        ...

    def kill(self) -> None:
        """End it now; nothing where it has ended."""
        ...


class ChildProcess:
    """A process that ends with this one. Tensors in shared memory stay shared.

    Args:
        target: its main function, which a new process must be able to import.
        *arguments: of it.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.process: SpawnProcess = mp.get_context("spawn").Process(target=target, args=arguments, daemon=True)
        self.process.start()

    @property
    def pid(self) -> int:
        """The number by which the system knows it."""
        assert self.process.pid is not None
        return self.process.pid

    def ended(self) -> str | None:
        """How it ended, "" where it ended well; None while it runs.

        Example:
            "was killed by SIGKILL", "ended with status 1"
        """
        code = self.process.exitcode
        if code is None or code == 0:
            return "" if code == 0 else None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def kill(self) -> None:
        """End it now, also where it is stopped; nothing where it has ended."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(_END_S)


C = TypeVar("C", bound=Child)


class Supervisor(Generic[C]):
    """Starts children by number, and starts those anew that ended before their time.

    Args:
        start: starts the child of a number.
        count: how many children.
        restarts: how often each may be started anew.

    Attributes:
        children: by number.
        lost: those that ended other than well, in order, as often as they did.
        restarted: how often each was started anew.
    """

    def __init__(self, start: Callable[[int], C], count: int, *, restarts: int = 0) -> None:
        self._start, self._restarts = start, restarts
        self.lost: list[int] = []
        self.restarted: Counter[int] = Counter()
        self._noted: dict[int, str] = {}
        self.children: list[C] = []
        try:
            for number in range(count):
                self.children.append(start(number))
        except BaseException:
            self.close()
            raise

    @property
    def dead(self) -> list[int]:
        """Those that have ended and were not started anew, well or not."""
        return sorted(self._noted)

    @property
    def how(self) -> dict[int, str]:
        """How those ended that are dead."""
        return dict(sorted(self._noted.items()))

    def look(self) -> list[int]:
        """Note who has ended, and start those anew that may be; return those who are dead since the last look."""
        found: list[int] = []
        for number, child in enumerate(self.children):
            how = None if number in self._noted else child.ended()
            if how is None:
                continue
            if how:
                self.lost.append(number)
            if how and self.restarted[number] < self._restarts:
                self.start_anew(number)
            else:
                self._noted[number] = how
                found.append(number)
        return found

    def start_anew(self, number: int) -> None:
        """Have another child in the place of one, which is ended first where it has not ended."""
        self.children[number].kill()
        self._noted.pop(number, None)
        self.restarted[number] += 1
        self.children[number] = self._start(number)

    def close(self) -> None:
        """End all children; a second call does nothing."""
        for child in self.children:
            child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_for_any(children: Iterable[ChildProcess], seconds: float) -> None:
    """Wait until one of the processes has ended, or so long."""
    running = [child.process.sentinel for child in children if child.ended() is None]
    multiprocessing.connection.wait(running, max(0.0, seconds))
