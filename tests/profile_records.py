"""Records of profiles, made by hand."""

from __future__ import annotations

from gradwire.drivers.traced import Span
from gradwire.profiling import ClockReading, RankRecord, StepRecord


def wire(began_s: float, waited_s: float, ended_s: float, nbytes: int = 100, peers: tuple[int, ...] = ()) -> list[Span]:
    """A collective, and the wait for it."""
    return [
        Span("wait", "AllReduce", waited_s, ended_s, nbytes, peers),
        Span("wire", "AllReduce", began_s, ended_s, nbytes, peers),
    ]


def record(rank: int, *steps: StepRecord, size: int = 2, clock: list[ClockReading] | None = None) -> RankRecord:
    return RankRecord("run", rank, size, f"host{rank}", ["int4"], clock or [], list(steps))


def step(index: int, late_s: float = 0.0) -> StepRecord:
    """A step of 10 s whose one collective begins at 5 s, or later; all ranks have its result at 9 s."""
    began = 10.0 * index
    loop = [
        Span("train", "data", began, began + 1),
        Span("train", "forward", began + 1, began + 3),
        Span("train", "backward", began + 3, began + 9.5),
        Span("train", "optimizer", began + 9.5, began + 10),
    ]
    starts = began + 5 + late_s
    waits = [Span("wait", "communication", starts, began + 9.5)]
    communication = [
        Span("encode", "AllReduce", starts - 0.5, starts),
        *wire(starts, starts, began + 9),
        Span("decode", "pause", began + 9, began + 9.5),
    ]
    return StepRecord(index, began, began + 10, loop, waits, [communication])
