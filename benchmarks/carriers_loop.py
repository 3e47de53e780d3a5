"""What both sides of `carriers.py` share: a pair of processes, of which one asks and the other serves."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch

SECRET = b"of a measurement"
WARM_UP = 0.1
"""Share of requests that are not counted."""

Serving = Callable[..., AbstractContextManager[Any]]
"""serving(...) serves in threads of its own while a `with` block lasts; its value says where."""


class Stopwatch:
    """Computes nothing, and notes when it is asked to.

    Args:
        result: what it returns.
    """

    def __init__(self, result: Any) -> None:
        self.result, self.times_s = result, list[float]()

    def __call__(self, parameters: Any, grant: Any) -> Any:
        """Compute nothing."""
        self.times_s.append(time.perf_counter())
        return self.result

    def for_worker(self, worker: int) -> Stopwatch:
        """What a job has for `work`."""
        return self

    def microseconds(self) -> float:
        """The median between two calls."""
        return median_us(self.times_s)


def median_us(times_s: list[float]) -> float:
    """The median between two of these times, but for the first ones."""
    counted = times_s[int(WARM_UP * len(times_s)) :]
    return 1e6 * statistics.median(b - a for a, b in pairwise(counted))


def pushed_us(push: Callable[[], object], pushes: int) -> float:
    """The median of a push and its grant."""
    times_s = [time.perf_counter()]
    for _ in range(pushes):
        push()
        times_s.append(time.perf_counter())
    return median_us(times_s)


class ServerProcess:
    """A process that serves what it is told to, one after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    @contextlib.contextmanager
    def serving(self, serving: Serving, *arguments: Any) -> Any:
        """Have it serve for as long as the block lasts; the value is what `serving` gives."""
        import torch.multiprocessing  # tensors in shared memory stay shared

        assert torch.multiprocessing
        self._pipe.send((serving, arguments))
        yield self._pipe.recv()
        self._pipe.send(None)
        self._pipe.recv()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            serving, arguments = pipe.recv()
            with serving(*arguments) as where:
                pipe.send(where)
                pipe.recv()
            pipe.send(None)


def answer(measure: Callable[[ServerProcess, str, int, int], float]) -> None:
    """Read lines `CARRIER PARAMETERS PUSHES`; print the microseconds of a push, its grant and the server's part."""
    torch.set_num_threads(1)
    server = ServerProcess()
    with contextlib.suppress(EOFError):
        while True:
            carrier, numel, pushes = input().split()
            print("microseconds", measure(server, carrier, int(numel), int(pushes)), flush=True)
