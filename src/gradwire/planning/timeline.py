"""The passes of a step on the stages of a pipeline, one after the other: when each begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple

from gradwire.planning.hardware import Hardware
from gradwire.planning.layout import ParallelLayout
from gradwire.planning.rates import Efficiencies
from gradwire.planning.step_time import StageTimes, StepTime, stage_times, step_time
from gradwire.planning.transformer import Transformer

Direction = Literal["forward", "backward"]
AFTERWARDS = ("data", "coding", "optimizer", "stragglers")
"""Parts of a step that are drawn after its passes: none of them depends on a micro-batch."""


class Visit(NamedTuple):
    """A pass of a micro-batch through one part of a stage.

    Attributes:
        direction: forward, or backward with what it computes anew.
        micro_batch: counted from 0.
        part: of the stage, counted from 0; an interleaved schedule has several.
    """

    direction: Direction
    micro_batch: int
    part: int


class PipelinePass(NamedTuple):
    """A visit with the seconds at which it begins and ends."""

    visit: Visit
    began_s: float
    ended_s: float


class StepTimeline(NamedTuple):
    """A step against time.

    Attributes:
        stages: the passes of each stage, in order. Between them a stage waits, which is the bubble.
        after: seconds of each of `AFTERWARDS`, which follow the last pass.
    """

    stages: tuple[tuple[PipelinePass, ...], ...]
    after: dict[str, float]

    @property
    def passes_s(self) -> float:
        """When the last pass ends."""
        return max(stage[-1].ended_s for stage in self.stages)

    @property
    def total_s(self) -> float:
        """When the step ends."""
        return self.passes_s + sum(self.after.values())


def step_timeline(
    model: Transformer, layout: ParallelLayout, on: Hardware, reached: Efficiencies | None = None
) -> StepTimeline:
    """Return when each pass of a step begins and ends.

    Stages follow 1F1B (Narayanan et al. 2019, PipeDream), or its interleaved form (Narayanan et al. 2021, Section 2.2).
    `step_time` has the closed form of what comes out here. The two are equal where all stages take equally long; where
    the last stage takes longer for the output layer, the closed form is an approximation, and this is not.

    Args:
        model, layout, on, reached: as in `step_time`.

    Raises:
        SpecError: as `step_time`.

    >>> from gradwire.planning import hardware, model
    >>> layout = ParallelLayout(pp=4, tp=8, batch=8)
    >>> drawn = step_timeline(model("gpt3-22b"), layout, hardware("a100-80g"))
    >>> [visit.direction[0] for visit, *_ in drawn.stages[3][:4]]
    ['f', 'b', 'f', 'b']
    """
    times = stage_times(model, layout, on, reached)
    predicted = step_time(model, layout, on, reached)
    return StepTimeline(_passes(layout, times), _afterwards(predicted))


def _afterwards(predicted: StepTime) -> dict[str, float]:
    return {name: getattr(predicted, name) for name in AFTERWARDS}


def visits_of_stage(stage: int, layout: ParallelLayout) -> list[Visit]:
    """The order in which a stage of a pipeline is visited.

    Warm-up is forward only, p - s - 1 visits of stage s, and with v parts a stage 2 (p - s - 1) + (v - 1) p. Then each
    forward visit is followed by a backward one, and the rest is backward. Micro-batches visit a part in groups of p.

    >>> order = visits_of_stage(0, ParallelLayout(pp=2, batch=3))
    >>> [f"{visit.direction[0]}{visit.micro_batch}" for visit in order]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    stages, parts = layout.pp, layout.interleave
    places = [divmod(number, stages * parts) for number in range(layout.micro_batches * parts)]
    forward = [Visit("forward", group * stages + rest % stages, rest // stages) for group, rest in places]
    backward = [Visit("backward", visit.micro_batch, parts - 1 - visit.part) for visit in forward]
    warm_up = stages - stage - 1 if parts == 1 else 2 * (stages - stage - 1) + (parts - 1) * stages
    warm_up = min(warm_up, len(forward))
    pairs = chain.from_iterable(zip(forward[warm_up:], backward, strict=False))
    return [*forward[:warm_up], *pairs, *backward[len(forward) - warm_up :]]


def _passes(layout: ParallelLayout, times: StageTimes) -> tuple[tuple[PipelinePass, ...], ...]:
    """Have each stage make its visits in order, each once the visit that it depends on has ended."""
    waiting = [iter(visits_of_stage(stage, layout)) for stage in range(layout.pp)]
    following = [next(visits) for visits in waiting]
    made: list[list[PipelinePass]] = [[] for _ in waiting]
    ended_s: dict[tuple[int, Visit], float] = {}
    stages = list(range(layout.pp))
    while stages:
        moved = False
        for stage in stages:
            visit: Visit | None = following[stage]
            while visit is not None and (ready_s := _ready_s(stage, visit, layout, ended_s)) is not None:
                began_s = max(ready_s, made[stage][-1].ended_s if made[stage] else 0.0)
                done = PipelinePass(visit, began_s, began_s + _seconds(stage, visit, layout, times))
                made[stage].append(done)
                ended_s[stage, visit] = done.ended_s
                visit, moved = next(waiting[stage], None), True
            if visit is not None:
                following[stage] = visit
        stages = [stage for stage in stages if len(made[stage]) < 2 * layout.micro_batches * layout.interleave]
        assert moved, "the order of a schedule waits for itself"
    return tuple(map(tuple, made))


def _ready_s(stage: int, visit: Visit, layout: ParallelLayout, ended_s: dict[tuple[int, Visit], float]) -> float | None:
    """When the visit that a visit depends on has ended; None where it has not been made yet."""
    place, last = visit.part * layout.pp + stage, layout.pp * layout.interleave - 1
    if visit.direction == "forward":
        if place == 0:
            return 0.0
        before, direction = place - 1, "forward"
    else:
        before, direction = (place, "forward") if place == last else (place + 1, "backward")
    part, at = divmod(before, layout.pp)
    return ended_s.get((at, Visit(direction, visit.micro_batch, part)))


def _seconds(stage: int, visit: Visit, layout: ParallelLayout, times: StageTimes) -> float:
    """What a visit takes, with what the stage sends for it."""
    parts = layout.interleave
    is_last = stage == layout.pp - 1 and visit.part == parts - 1
    halves = (times.transfer + times.host) / 2
    if visit.direction == "forward":
        return (times.forward.total + halves) / parts + is_last * times.loss_forward.total
    passes = times.backward.total + times.recomputed.total
    return (passes + halves) / parts + is_last * times.loss_backward.total


def drawn_stages(stages: int, most: int) -> Sequence[int]:
    """Which stages to draw where there are too many: the first, the last, and others evenly between them.

    >>> list(drawn_stages(16, 4))
    [0, 5, 10, 15]
    """
    if stages <= most:
        return range(stages)
    return [round(place * (stages - 1) / (most - 1)) for place in range(most)]
