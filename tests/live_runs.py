"""Runs that go on, of ranks that tell of steps without making any: what tests of `gradwire watch` look at."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from gradwire.drivers.traced import Span
from gradwire.profiling import StepRecord
from gradwire.profiling.live import LiveWriter
from gradwire.profiling.loop import LoopSpans


def writer(folder: Path, rank: int, world_size: int, run: str = "run") -> LiveWriter:
    """A rank that tells of steps without making any."""
    made = LiveWriter(folder, run, rank, world_size, [], LoopSpans(time.perf_counter), lambda: ["int4"], period_s=60.0)
    made.start()
    return made


def step(index: int, waits_s: float, length_s: float = 0.1) -> StepRecord:
    """A step whose loop waits at its end."""
    began = float(index)
    ended = began + length_s
    loop = [Span("train", "data", began, began + 0.01), Span("train", "backward", began + 0.01, ended)]
    waits = [Span("wait", "communication", ended - waits_s, ended)]
    return StepRecord(index, began, ended, loop, waits, [[Span("wire", "AllReduce", began, ended, 1000)]])


@contextmanager
def four_ranks(folder: Path) -> Generator[None]:
    """A run of four ranks that have told of ten steps; the third one comes last to every collective."""
    ranks = [writer(folder, rank, 4) for rank in range(4)]
    for index in range(10):
        for rank, each in enumerate(ranks):
            each.step(step(index, 0.02 if rank == 2 else 0.05))
            each.log(index, {"loss": 10.0 - index + rank})
    for each in ranks:
        each.tell()
    yield
    for each in ranks:
        each.stop()
