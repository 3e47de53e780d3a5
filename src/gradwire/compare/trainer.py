"""Training of one rank with the clock running, and all that is off the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.compare.figures import mean
from gradwire.compare.options import DDP
from gradwire.compare.sides import Side
from gradwire.compare.step_time import LEAST, WARM_UP, is_known
from gradwire.network.slow import SlowProcessor
from gradwire.network.wire import WireMeter, WireReading
from gradwire.ranks.news import News, write_news, write_timed
from gradwire.tasks.task import Task, measure
from gradwire.topology.energy import EnergyMeter
from gradwire.topology.gpus import find_nvml

AGREE_EVERY = 10
REPORT_EVERY_S = 0.25
SETTLE_S = 0.15


@dataclass(frozen=True)
class RankJob:
    """What a rank is to do.

    Attributes:
        method: a spec.
        seed: decides weights and data.
        task: name of the task.
        text: folder of the bytes task, or None.
        steps: how many to make, or None to go by time.
        seconds: of training time, or None to go by steps.
        engine: what holds the model together, of `engines.ENGINES`.
        bucket_mb: DDP's bucket size.
        evaluate_every: steps between evaluations, or None for the task's own.
        deadline_s: how long a collective may take.
        folder: where the ranks meet and leave their results.
        token: marks the news of this run, as no line of the task's own output does.
        slow: how many times slower each rank's processor is.
        smoothing: steps that the losses it tells of are means of.
        precision: to which share of it the time of a step is to be known before the rest is trained without a limit on
            the links; None where every step is timed.
    """

    method: str
    seed: int
    task: str
    text: str | None
    steps: int | None
    seconds: float | None
    bucket_mb: float
    evaluate_every: int | None
    deadline_s: float
    folder: str
    engine: str = DDP
    token: str = ""
    slow: Sequence[float] = ()
    smoothing: int = 1
    precision: float | None = None


@dataclass
class Log:
    """What a rank saw, step by step; `apart` where ranks did not step together.

    `samples` are those that it has trained on, `energy_j` what the whole machine has used meanwhile; rank 0 tells that.

    Where not all steps were timed, sums of seconds and bytes are those of `timed_steps`.
    """

    losses: list[float] = field(default_factory=list[float])
    times_s: list[float] = field(default_factory=list[float])
    tx_bytes: list[int] = field(default_factory=list[int])
    evaluations: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    metric_values: list[float] = field(default_factory=list[float])
    compute_s: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    codec_cpu_s: float = 0.0
    cpu_s: float = 0.0
    payload: float = 0.0
    buffers: float = 0.0
    total: float = 0.0
    framing: float = 0.0
    setup: float = 0.0
    between: int = 0
    label: str = ""
    residual_norm: float | None = None
    report: dict[str, Any] | None = None
    apart: bool = False
    timed_steps: int | None = None
    samples: int = 0
    energy_j: float | None = None


class LastGradient:
    """Notes when the latest gradient of the backward pass was accumulated."""

    def __init__(self, model: nn.Module) -> None:
        self._at = 0.0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: torch.Tensor) -> None:
        self._at = time.perf_counter()

    def exposed_s(self, reduced: float) -> float:
        """Seconds of a backward pass that followed it, given when the pass was over."""
        return max(0.0, reduced - self._at)


class Trainer:
    """Makes steps with the clock running, and everything else with the clock stopped."""

    def __init__(self, job: RankJob, task: Task, side: Side, meter: WireMeter):
        self.job, self.task, self.side, self.meter = job, task, side, meter
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.base_lrs = [group["lr"] for group in side.optimizer.param_groups]
        self.processor = SlowProcessor(job.slow[self.rank] if job.slow else 1.0)
        side.slow_down(self.processor)
        self.processor.watch(task.model)  # before the next line: a gradient has come once it was slept for
        self.gradient = LastGradient(task.model) if side.reduces_behind_gradients else None
        self.log = Log()
        self.uncounted = WireReading(0, 0, 0, 0)
        self.elapsed_s = 0.0
        self.exposed_s = 0.0
        self.cpu_s = 0.0
        self.agreed_s = 0.0
        self.reported_s = 0.0
        # hosts share this machine: one rank tells for all
        nvml = find_nvml() if any(parameter.is_cuda for parameter in task.model.parameters()) else None
        self.energy = EnergyMeter(nvml=nvml) if self.rank == 0 else None

    def train(self) -> Log:
        """Train until the budget is spent; fill the log."""
        every = self.job.evaluate_every or self.task.evaluate_every
        start = self._settled()
        self.side.begin()
        step = 0
        if self.energy:
            self.energy.skip()
        while not self._spent(step):
            self._step(step, start)
            step += 1
            self._agree(step)
            if self._spent(step):
                self._finish()
            elif self._time_is_known():
                self._lift(start, step)
            if step % every == 0 and not self._spent(step):
                self._evaluate(step)
        self._end(start, step)
        return self.log

    def _end(self, start: WireReading, steps: int) -> None:
        """Count what was sent, unless that was done, and evaluate the model that came of it."""
        if self.log.timed_steps is None:
            self._count(self._settled().since(start).since(self.uncounted), steps)
        self._evaluate(steps)

    def _time_is_known(self) -> bool:
        """Whether the rest need not be timed. Rank 0 decides for all, in steps where it might be so."""
        precision, times_s = self.job.precision, self.log.times_s
        if precision is None or self.log.timed_steps is not None or len(times_s) < WARM_UP + LEAST:
            return False
        known = torch.tensor([is_known(times_s, precision)], dtype=torch.uint8)
        dist.broadcast(known, 0)
        return bool(known)

    def _lift(self, start: WireReading, steps: int) -> None:
        """Count what the timed steps took, and have the rest trained without a limit on the links."""
        self._count(self._settled().since(start).since(self.uncounted), steps)
        self.log.timed_steps = steps
        self.meter.lift()
        if self.rank == 0:
            print(write_timed(self.job.token), flush=True)

    def _spent(self, step: int) -> bool:
        if self.job.steps is not None:
            return step >= self.job.steps
        return self.agreed_s >= (self.job.seconds or 0)

    def _progress(self, step: int) -> float:
        return step / self.job.steps if self.job.steps else self.agreed_s / (self.job.seconds or 1)

    def _agree(self, step: int) -> None:
        """Going by time, rank 0's clock decides for all, so that learning rates and the end are the same."""
        if self.job.steps is None and step % AGREE_EVERY == 0:
            clock = torch.tensor([self.elapsed_s], dtype=torch.float64)
            dist.broadcast(clock, 0)
            self.agreed_s = float(clock)

    def _factor(self, step: int) -> float:
        """Of the learning rate."""
        return self.task.schedule(step, self._progress(step))

    def _step(self, step: int, start_reading: WireReading) -> None:
        factor = self._factor(step)
        for group, lr in zip(self.side.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * factor
        cpu_before = time.process_time()

        self.processor.begin()
        begun = time.perf_counter()
        inputs, targets = self.task.batch(step, self.rank, self.world_size)
        self.side.weigh(len(inputs))
        self.log.samples += len(inputs)
        self.side.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.side.model(inputs), targets)
        self.processor.pay()
        loss.backward()
        reduced = time.perf_counter()
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.task.model.parameters(), self.task.clip_norm)
        self.side.optimizer.step()
        self.processor.pay()
        ended = time.perf_counter()

        self.elapsed_s += ended - begun
        self.cpu_s += time.process_time() - cpu_before
        self.side.step_done()
        self.exposed_s += self.gradient.exposed_s(reduced) if self.gradient else 0.0
        self.log.losses.append(float(loss.detach()))
        self.log.times_s.append(self.elapsed_s)
        self.log.tx_bytes.append(self.meter.read().since(start_reading).since(self.uncounted).tx_bytes)
        if self.energy:
            self.energy.add_up()
        self._report(step + 1)

    def _finish(self) -> None:
        """Have all ranks end with one model; the last step takes as much longer."""
        begun = time.perf_counter()
        self.side.finish()
        took = time.perf_counter() - begun
        self.elapsed_s += took
        self.exposed_s += took
        self.log.times_s[-1] = self.elapsed_s

    def _evaluate(self, step: int) -> None:
        """Evaluate on rank 0 while the others wait, so that all start the next step together.

        Where ranks have to average for it, what they send is taken off what is counted, as its time is off the clock.
        """
        before = self._settled() if self.side.averages_to_evaluate else None
        with self.side.evaluating() as model:
            if before is not None:
                self.uncounted = self._settled().since(before).plus(self.uncounted)
            if self.rank == 0:
                self.log.evaluations.append((step, self.elapsed_s, self._metric(model)))
            dist.barrier()
        if self.energy:
            self.energy.skip()

    def _metric(self, model: nn.Module) -> float:
        """The metric of a model as it is now; what it is of single examples is kept of the last model."""
        model.eval()
        value, self.log.metric_values = measure(self.task.metric, model)
        model.train()
        return value

    def _settled(self) -> WireReading:
        """Counters once nothing is under way any more: what is in a queue has not been counted yet."""
        dist.barrier()
        time.sleep(SETTLE_S)
        return self.meter.read()

    def _count(self, sent: WireReading, steps: int) -> None:
        sharing = self.meter.ranks
        self.log.total = sent.all_bytes / sharing
        self.log.framing = (sent.all_bytes - sent.all_payload_bytes) / sharing
        self.log.between = sent.tx_bytes if sharing > 1 else 0
        self.log.payload, self.log.buffers = self.side.predicted_bytes(), self.side.buffer_bytes(steps)
        log = self.log
        self.exposed_s += self.side.exposed_in_steps_s()
        log.label = self.side.label
        log.cpu_s = self.cpu_s
        log.energy_j = self.energy.spent_j if self.energy and not log.apart else None
        log.codec_cpu_s = self.side.codec_cpu_s()
        log.compute_s = self.elapsed_s - self.exposed_s
        log.encode_s = self.side.exposed_encode_s(self.exposed_s)
        log.wait_s = self.exposed_s - log.encode_s
        self.log.residual_norm = self.side.residual_norm()
        self.log.report = self.side.report()

    def _report(self, step: int) -> None:
        now = time.perf_counter()
        if self.rank == 0 and now - self.reported_s > REPORT_EVERY_S:
            self.reported_s = now
            loss = mean(self.log.losses[-self.job.smoothing :])
            news = News(step, loss, self.elapsed_s, self.log.tx_bytes[-1])
            print(write_news(news, self.job.token), flush=True)
