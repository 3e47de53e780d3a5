"""When each rank of a pipeline does what: computed from a schedule, or measured; and how long ranks wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from gradwire.core.errors import SpecError
from gradwire.parallel.pipelines.schedules import ScheduleShape, StageWork


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


def computed_timeline(shape: ScheduleShape, times: PassTimes | None = None) -> WorkTimeline:
    """Return when each rank does what, if all stages take the same time and ranks wait for nothing but their inputs.

    A piece of work begins as soon as its rank is free and its input is here: activations of the stage before,
    gradients of the stage after, each `times.message` after they were computed where that was on another rank.

    Args:
        shape: the schedule.
        times: of the passes through a stage; None: a forward pass takes 1, a backward pass 2, messages nothing.

    Raises:
        SpecError: negative times, or an order in which ranks wait for each other.

    >>> computed_timeline(ScheduleShape("1F1B", 4, 8)).bubble
    0.375
    >>> computed_timeline(ScheduleShape("Interleaved1F1B", 4, 8)).bubble
    0.1875
    >>> computed_timeline(ScheduleShape("GPipe", 4, 8)).kept, computed_timeline(ScheduleShape("1F1B", 4, 8)).kept
    ([8, 8, 8, 8], [4, 3, 2, 1])
    """
    times = times or PassTimes()
    if min(times) < 0 or not times.forward + times.backward_inputs + times.backward_weights:
        raise SpecError(f"times of {tuple(times)}: none may be negative, and not all of the passes 0")
    ended: dict[StageWork, float] = {}
    places, free = [0] * shape.ranks, [0.0] * shape.ranks
    spans: defaultdict[int, list[WorkSpan]] = defaultdict(list)
    while any(place < len(order) for place, order in zip(places, shape.order, strict=True)):
        before = sum(places)
        for rank, order in enumerate(shape.order):
            while places[rank] < len(order):
                work = order[places[rank]]
                ready = _ready(work, shape, ended, times.message)
                if ready is None:
                    break
                began = max(free[rank], ready)
                free[rank] = ended[work] = began + times.of(work)
                spans[rank].append(WorkSpan(work, began, free[rank]))
                places[rank] += 1
        if sum(places) == before:
            raise SpecError(f"the ranks of {shape.name} wait for each other: no one can go on")
    return WorkTimeline([spans[rank] for rank in range(shape.ranks)])


def _ready(work: StageWork, shape: ScheduleShape, ended: dict[StageWork, float], message: float) -> float | None:
    """When the input of a piece of work is here; None where that is not known yet."""
    kind, stage, micro_batch = work
    if kind == "W":
        return ended.get(StageWork("I", stage, micro_batch))
    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < shape.stages:
        return 0.0 if kind == "F" else ended.get(StageWork("F", stage, micro_batch))
    made = [ended.get(StageWork(of, source, micro_batch)) for of in (("F",) if kind == "F" else ("B", "I"))]
    known = [at for at in made if at is not None]
    travels = shape.rank_of(source) != shape.rank_of(stage)
    return known[0] + message * travels if known else None
