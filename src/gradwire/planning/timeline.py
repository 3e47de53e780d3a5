"""The passes of a step on the stages of a pipeline, one after the other: when each begins and ends."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.parallel.pipelines.orders import one_forward_one_backward
from gradwire.parallel.pipelines.timeline import PassTimes, WorkTimeline, computed_timeline
from gradwire.planning.hardware import Hardware
from gradwire.planning.layout import ParallelLayout
from gradwire.planning.rates import Efficiencies
from gradwire.planning.step_time import StageTimes, stage_times, step_time
from gradwire.planning.transformer import Transformer

AFTERWARDS = ("data", "coding", "optimizer", "stragglers")
"""Parts of a step that are drawn after its passes: none of them depends on a micro-batch."""


class StepTimeline(NamedTuple):
    """A step against time, in seconds.

    Attributes:
        passes: the forward and backward passes of the stages, each with its parts in the order of the pipeline: part i
            of stage s is the stage i p + s of the timeline. Between passes a stage waits, which is the bubble.
        after: seconds of each of `AFTERWARDS`, which follow the last pass.
    """

    passes: WorkTimeline
    after: dict[str, float]

    @property
    def total_s(self) -> float:
        """When the step ends."""
        return self.passes.length + sum(self.after.values())


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
    >>> [str(span.work) for span in drawn.passes.ranks[3][:4]]
    ['F0', 'B0', 'F1', 'B1']
    """
    times = stage_times(model, layout, on, reached)
    predicted = step_time(model, layout, on, reached)
    order = one_forward_one_backward(layout.pp, layout.micro_batches, layout.interleave)
    after = {name: getattr(predicted, name) for name in AFTERWARDS}
    return StepTimeline(computed_timeline(order, _pass_times(layout, times)), after)


def _pass_times(layout: ParallelLayout, times: StageTimes) -> list[PassTimes]:
    """What a pass through each part of a stage takes, with what is sent for it; only the last part has the loss."""
    parts, sent = layout.interleave, (times.transfer + times.host) / 2
    forward = (times.forward.total + sent) / parts
    backward = (times.backward.total + times.recomputed.total + sent) / parts
    last = PassTimes(forward + times.loss_forward.total, backward + times.loss_backward.total, 0.0)
    return [*[PassTimes(forward, backward, 0.0)] * (layout.pp * parts - 1), last]
