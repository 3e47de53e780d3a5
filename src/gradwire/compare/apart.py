"""Training of ranks that do not wait for each other: nobody may be held up while the clock runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compare.sides import UnwaitingSide
from gradwire.compare.trainer import RankJob, Trainer
from gradwire.network.wire import WireMeter, WireReading
from gradwire.tasks.task import Task


class _Kept(NamedTuple):
    """A model to be evaluated later."""

    step: int
    time_s: float
    values: list[Tensor]


class ApartTrainer(Trainer):
    """Makes steps until all ranks together have made as many as a synchronous run's, or until the time is over.

    A step is counted once n of any ranks' steps were made, so that it has as many examples as a synchronous one. Rank
    0 keeps copies of its model as it comes by the steps that are evaluated, and evaluates them once all have ended.
    """

    def __init__(self, job: RankJob, task: Task, side: UnwaitingSide, meter: WireMeter) -> None:
        super().__init__(job, task, side, meter)
        self._unwaiting = side
        self._every = job.evaluate_every or task.evaluate_every
        self._kept: list[_Kept] = []
        self.log.apart = True

    @property
    def _made(self) -> int:
        """Steps of all ranks together, in those of a synchronous run."""
        return self._unwaiting.made // self.world_size

    def _spent(self, step: int) -> bool:
        if self.job.steps is not None:
            return self._unwaiting.made >= self.job.steps * self.world_size
        return self.elapsed_s >= (self.job.seconds or 0)

    def _progress(self, step: int) -> float:
        if self.job.steps is not None:
            return min(1.0, self._made / self.job.steps)
        return self.elapsed_s / (self.job.seconds or 1)

    def _agree(self, step: int) -> None:
        """Nothing is agreed upon: each rank goes by what the servers say, or by its own clock."""
        due = self._made // self._every * self._every
        if self.rank == 0 and due and (not self._kept or self._kept[-1].step < due) and not self._spent(step):
            values = [parameter.detach().clone() for parameter in self.task.model.parameters()]
            self._kept.append(_Kept(due, self.elapsed_s, values))

    def _factor(self, step: int) -> float:
        return self.task.schedule(self._made, self._progress(step))

    def _evaluate(self, step: int) -> None:
        """Nobody stops for it."""

    def _finish(self) -> None:
        """End together, off the clock: a rank that has ended waits for a step that changes nothing any more."""
        self.side.finish()

    @torch.no_grad()
    def _end(self, start: WireReading, steps: int) -> None:
        """Count, and evaluate what was kept and what came of it all."""
        self._count(self._settled().since(start), steps)
        if self.rank == 0:
            last = [parameter.detach().clone() for parameter in self.task.model.parameters()]
            for kept in [*self._kept, _Kept(self.job.steps or self._made, self.elapsed_s, last)]:
                for parameter, value in zip(self.task.model.parameters(), kept.values, strict=True):
                    parameter.copy_(value)
                self.log.evaluations.append((kept.step, kept.time_s, self._metric(self.task.model)))
        dist.barrier()
