"""The schedules of `torch.distributed.pipelining`: what each of them needs, and in which order its ranks work.

The order of 1F1B stands in `orders.py`; that of the others is asked of PyTorch. Here stand what PyTorch refuses with an
assertion or not at all, and the formula of the bubble.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from gradwire.core.errors import SpecError
from gradwire.core.nearest import nearest
from gradwire.parallel.pipelines.bubble import bubble
from gradwire.parallel.pipelines.orders import StageWork, WorkKind, one_forward_one_backward


class ScheduleKind(NamedTuple):
    """What a schedule of PyTorch needs.

    Attributes:
        parts: stages of each rank: the usual number.
        fixed: whether it must be that number.
        v_shaped: whether the second half of the stages runs back over the ranks, so that the last one has two
            neighbours in one pipeline.
        splits: whether backward passes are split into gradients of inputs and of weights.
        what: in a sentence.
    """

    parts: int
    fixed: bool
    v_shaped: bool
    splits: bool
    what: str


SCHEDULES: dict[str, ScheduleKind] = {
    "GPipe": ScheduleKind(1, True, False, False, "all forward passes, then all backward passes"),
    "1F1B": ScheduleKind(
        1, True, False, False, "one forward and one backward pass in turn: fewer activations are kept"
    ),
    "LoopedBFS": ScheduleKind(2, False, False, False, "several stages a rank, breadth first: few and long runs"),
    "Interleaved1F1B": ScheduleKind(2, False, False, False, "1F1B with several stages a rank: a smaller bubble"),
    "InterleavedZeroBubble": ScheduleKind(
        2, False, False, True, "gradients of weights wait until there is nothing else to do"
    ),
    "ZBVZeroBubble": ScheduleKind(
        2, True, True, True, "two stages a rank in the form of a V, and split backward passes"
    ),
    "DualPipeV": ScheduleKind(2, True, True, True, "a V whose forward and backward passes are paired"),
}
"""The schedules that can be named, as `get_schedule_class` of PyTorch names them; it also knows two base classes."""


@dataclass(frozen=True)
class ScheduleShape:
    """A schedule for some ranks and micro-batches.

    Args:
        name: of `SCHEDULES`, in any case.
        ranks: of the pipeline.
        micro_batches: of a step.
        parts: stages of each rank; 0 takes the usual number of the schedule.

    Raises:
        SpecError: an unknown name, or numbers that the schedule cannot have, with numbers that it can.

    >>> shape = ScheduleShape("1f1b", ranks=4, micro_batches=8)
    >>> shape.name, shape.stages, shape.formula
    ('1F1B', 4, 0.375)
    >>> " ".join(map(str, shape.order[3][:4]))
    'F0 B0 F1 B1'
    """

    name: str
    ranks: int
    micro_batches: int
    parts: int = 0

    def __post_init__(self) -> None:
        known = {each.lower(): each for each in SCHEDULES}
        if self.name.lower() not in known:
            hint = nearest(self.name, dict.fromkeys(SCHEDULES, "")) or f"they are {', '.join(SCHEDULES)}"
            raise SpecError(f"unknown schedule {self.name!r}: {hint}")
        object.__setattr__(self, "name", known[self.name.lower()])
        object.__setattr__(self, "parts", self.parts or self.kind.parts)
        bubble(self.ranks, self.micro_batches, self.parts)  # refuses numbers below 1
        self._refuse_parts()
        self._refuse_micro_batches()

    def _refuse_parts(self) -> None:
        if self.kind.fixed and self.parts != self.kind.parts:
            raise SpecError(f"{self.name} has exactly {self.kind.parts} stages a rank, and not {self.parts}")
        if not self.kind.fixed and self.parts < 2:
            raise SpecError(f"{self.name} needs 2 or more stages a rank: with 1 take 1F1B or GPipe")

    def _refuse_micro_batches(self) -> None:
        m = self.micro_batches
        if self.name.startswith("Interleaved"):
            rounds = max(1, m // self.ranks)
            if m % rounds:
                raise SpecError(
                    f"{self.name} goes in rounds of {self.ranks} micro-batches or some more, and {m} cannot be divided "
                    f"into {rounds} equal rounds: take {rounds * (m // rounds)} or {(rounds + 1) * self.ranks}"
                )
        if self.name == "DualPipeV" and m < self.stages:
            raise SpecError(
                f"DualPipeV needs as many micro-batches as it has stages, {self.stages}, and there are {m}: give more, "
                "or take GPipe or ZBVZeroBubble"
            )

    @property
    def kind(self) -> ScheduleKind:
        """What PyTorch's schedule of that name needs."""
        return SCHEDULES[self.name]

    @property
    def stages(self) -> int:
        """Of the whole pipeline."""
        return self.ranks * self.parts

    @property
    def runs_as(self) -> str:
        """The schedule of PyTorch that is run.

        With fewer micro-batches than ranks PyTorch refuses 1F1B, which would keep as many activations as GPipe and wait
        as long.
        """
        return "GPipe" if self.name == "1F1B" and self.micro_batches < self.ranks else self.name

    @property
    def formula(self) -> float | None:
        """The bubble, (p - 1) / (v m); None where it depends on how long the two halves of a backward pass take."""
        return None if self.kind.splits else bubble(self.ranks, self.micro_batches, self.parts)

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage.

        >>> shape = ScheduleShape("ZBVZeroBubble", 3, 6)
        >>> [shape.rank_of(stage) for stage in range(6)]
        [0, 1, 2, 2, 1, 0]
        """
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.kind.v_shaped and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in their order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    @cached_property
    def order(self) -> list[list[StageWork]]:
        """What each rank does, in the order in which PyTorch runs it.

        ZBVZeroBubble plans for at least 2 p - 1 micro-batches, of which those that do not exist are left out.
        """
        if self.runs_as in ("1F1B", "Interleaved1F1B"):
            return one_forward_one_backward(self.ranks, self.micro_batches, self.parts)
        with contextlib.redirect_stdout(io.StringIO()):
            # one of PyTorch's own, which imports what draws only when something is drawn
            from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

            asked = self.parts if self.parts > 1 else None
            planned: list[list[Any]] = get_schedule_ops(self.runs_as, self.ranks, self.micro_batches, asked)
        works = [[work for action in actions if action is not None for work in _works(action)] for actions in planned]
        return [[work for work in each if work.micro_batch < self.micro_batches] for each in works]


_KINDS: dict[str, WorkKind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _works(action: Any) -> list[StageWork]:
    """What an action of PyTorch's is; two that are paired follow each other, and other actions are no work."""
    parts = [part for part in action.sub_actions or (action,) if part.computation_type.name in _KINDS]
    return [StageWork(_KINDS[part.computation_type.name], part.stage_index, part.microbatch_index) for part in parts]


def schedule_class(name: str) -> Any:
    """The class of PyTorch that a schedule is."""
    return get_schedule_class(name)


def require_pipelining() -> None:
    """Refuse a PyTorch whose pipelines are put together otherwise.

    Raises:
        SpecError: with the version that is needed.
    """
    if not hasattr(PipelineStage, "_warmup_forward_vote"):
        raise SpecError(f"pipelines need PyTorch 2.13, and this is {torch.__version__}: install a newer one")
