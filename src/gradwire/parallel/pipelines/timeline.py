"""When each rank of a pipeline does what: computed from a schedule, or measured; and how long ranks wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gradwire.core.errors import SpecError
from gradwire.parallel.pipelines.orders import StageWork


class WorkSpan(NamedTuple):
    """A piece of work, and when it began and ended, in seconds or in any other unit."""

    work: StageWork
    began: float
    ended: float


class PassTimes(NamedTuple):
    """What a pass through one stage takes with one micro-batch, in any unit.

    Attributes:
        forward: of the forward pass.
        backward_inputs: of the gradients of inputs.
        backward_weights: of the gradients of weights. A whole backward pass takes both.
        message: of activations or gradients to another rank; they travel while ranks work.
    """

    forward: float = 1.0
    backward_inputs: float = 1.0
    backward_weights: float = 1.0
    message: float = 0.0

    def of(self, work: StageWork) -> float:
        """What a piece of work takes."""
        backward = {"I": self.backward_inputs, "W": self.backward_weights}
        return self.forward if work.kind == "F" else backward.get(work.kind, sum(backward.values()))


@dataclass(frozen=True)
class WorkTimeline:
    """What each rank did in one step, and when.

    Args:
        ranks: the work of each rank, in its order.
    """

    ranks: Sequence[Sequence[WorkSpan]]

    @cached_property
    def began(self) -> float:
        """When the first rank began."""
        return min(span.began for rank in self.ranks for span in rank)

    @cached_property
    def length(self) -> float:
        """From the first work of any rank to the last one."""
        return max(span.ended for rank in self.ranks for span in rank) - self.began

    @property
    def busy(self) -> list[float]:
        """How long each rank worked."""
        return [sum(span.ended - span.began for span in rank) for rank in self.ranks]

    @property
    def bubble(self) -> float:
        """What waiting adds to the step, as a share of the work of a rank: (T - w) / w, with w the mean over ranks."""
        work = sum(self.busy) / len(self.ranks)
        return (self.length - work) / work

    @property
    def idle(self) -> float:
        """The share of the step in which ranks wait, over all ranks: (T - w) / T."""
        return self.bubble / (1 + self.bubble)

    @property
    def kept(self) -> list[int]:
        """The most activations that each rank keeps at a time, in inputs of one stage for one micro-batch.

        They are kept from the forward pass to the end of the backward pass.
        """
        return [_most_kept(rank) for rank in self.ranks]


def _most_kept(spans: Sequence[WorkSpan]) -> int:
    most = kept = 0
    for span in sorted(spans, key=lambda span: span.ended):
        kept += {"F": 1, "B": -1, "W": -1}.get(span.work.kind, 0)
        most = max(most, kept)
    return most


def computed_timeline(
    order: Sequence[Sequence[StageWork]], times: PassTimes | Sequence[PassTimes] | None = None
) -> WorkTimeline:
    """Return when each rank does what, if ranks wait for nothing but their inputs.

    A piece of work begins as soon as its rank is free and its input is here: activations of the stage before,
    gradients of the stage after, each `message` after they were computed where that was on another rank.

    Args:
        order: the work of each rank, in its order.
        times: of the passes through each stage, or of all stages alike; None: a forward pass takes 1, a backward pass
            2, messages nothing.

    Raises:
        SpecError: negative times, times of another number of stages, or an order in which ranks wait for each other.

    >>> from gradwire.parallel.pipelines import ScheduleShape
    >>> computed_timeline(ScheduleShape("1F1B", 4, 8).order).bubble
    0.375
    >>> computed_timeline(ScheduleShape("Interleaved1F1B", 4, 8).order).bubble
    0.1875
    >>> [computed_timeline(ScheduleShape(name, 4, 8).order).kept for name in ("GPipe", "1F1B")]
    [[8, 8, 8, 8], [4, 3, 2, 1]]
    """
    rank_of = {work.stage: rank for rank, works in enumerate(order) for work in works}
    by_stage = _times_by_stage(PassTimes() if times is None else times, len(rank_of))
    ended: dict[StageWork, float] = {}
    spans: list[list[WorkSpan]] = [[] for _ in order]
    while (before := len(ended)) < sum(map(len, order)):
        for done, works in zip(spans, order, strict=True):
            while len(done) < len(works):
                work = works[len(done)]
                ready = _ready(work, ended, rank_of, by_stage)
                if ready is None:
                    break
                began = max(ready, done[-1].ended if done else 0.0)
                ended[work] = began + by_stage[work.stage].of(work)
                done.append(WorkSpan(work, began, ended[work]))
        if len(ended) == before:
            raise SpecError("the ranks wait for each other in this order: no one can go on")
    return WorkTimeline(spans)


def _times_by_stage(times: PassTimes | Sequence[PassTimes], stages: int) -> Sequence[PassTimes]:
    by_stage = [times] * stages if isinstance(times, PassTimes) else times
    if len(by_stage) != stages:
        raise SpecError(f"times of {len(by_stage)} stages for an order of {stages}: give one of each, or one for all")
    for each in by_stage:
        if min(each) < 0 or not each.forward + each.backward_inputs + each.backward_weights:
            raise SpecError(f"times of {tuple(each)}: none may be negative, and not all of the passes 0")
    return by_stage


def _ready(
    work: StageWork, ended: Mapping[StageWork, float], rank_of: Mapping[int, int], times: Sequence[PassTimes]
) -> float | None:
    """When the input of a piece of work is here; None where that is not known yet."""
    kind, stage, micro_batch = work
    if kind == "W":
        return ended.get(StageWork("I", stage, micro_batch))
    source = stage - 1 if kind == "F" else stage + 1
    if source not in rank_of:
        return 0.0 if kind == "F" else ended.get(StageWork("F", stage, micro_batch))
    made = [ended.get(StageWork(of, source, micro_batch)) for of in (("F",) if kind == "F" else ("B", "I"))]
    known = [at for at in made if at is not None]
    travels = rank_of[source] != rank_of[stage]
    return known[0] + times[source].message * travels if known else None
