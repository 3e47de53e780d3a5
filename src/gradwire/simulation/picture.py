"""The first steps of some simulated ranks, as a trace for Perfetto and `chrome://tracing`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from gradwire.core.errors import SpecError
from gradwire.drivers.traced import Span
from gradwire.profiling.records import RankRecord, StepRecord
from gradwire.profiling.trace import write_chrome_trace
from gradwire.simulation.result import SimulatedRun
from gradwire.simulation.windows import StepOfAll

SHOWN_RANKS = 16
"""Ranks in a picture: as many of the first ones, and the one that computed longest."""


def write_picture(path: Path, run: SimulatedRun) -> None:
    """Write the steps that a run has kept, by the writer of profiles.

    Raises:
        SpecError: a run that kept none: ranks that push to servers, and elastic ones, have no steps in common.
    """
    write_chrome_trace(path, picture(run))


def picture(run: SimulatedRun) -> list[RankRecord]:
    """The records that `write_picture` writes."""
    if not run.shown:
        raise SpecError(f"{run.method!r} has no steps that all ranks make together, and so no trace: leave --trace out")
    slowest = int(torch.stack([step.computed_s - step.began_s for step in run.shown]).sum(dim=0).argmax())
    ranks = sorted({*range(min(SHOWN_RANKS, run.ranks)), slowest})
    return [
        RankRecord("simulated", rank, run.ranks, "a simulated host", [run.method], [], list(_steps(run, rank)))
        for rank in ranks
    ]


def _steps(run: SimulatedRun, rank: int) -> Iterator[StepRecord]:
    for index, step in enumerate(run.shown):
        began_s, computed_s, ended_s = (float(each[rank]) for each in (step.began_s, step.computed_s, step.ended_s))
        loop = [Span("train", "computing", began_s, computed_s)]
        waits = [Span("wait", "others and messages", computed_s, ended_s)] if ended_s > computed_s else []
        yield StepRecord(index, began_s, ended_s, loop, waits, [list(_wires(step))])


def _wires(step: StepOfAll) -> Iterator[Span]:
    if step.meeting is not None:
        yield Span("wire", "messages", step.meeting.began_s, step.meeting.done_s)
