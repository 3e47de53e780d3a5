"""One rank of one run: trains a task with one method and one seed, and writes down what happened.

Started by `gradwire.bench.compare` as `python -m gradwire.bench.worker JOB.json`, once a rank, with the usual
variables (RANK, WORLD_SIZE, ...) in its environment. Besides `rankN.json` it writes lines of news to standard
output, for whoever watches. A task may print what it likes: news are told by the run's own token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import kernels
from gradwire.bench.news import News, write_news
from gradwire.bench.slow import SlowProcessor
from gradwire.bench.task import Task, TaskError
from gradwire.bench.tasks import make_task
from gradwire.bench.torch_hooks import TorchMethod, attach_torch, parse_torch, predicted_bytes
from gradwire.bench.wire import WireMeter, WireReading

AGREE_EVERY = 10
REPORT_EVERY_S = 0.25
SETTLE_S = 0.15


@dataclass(frozen=True)
class Job:
    """What a rank is to do.

    Attributes:
        method: a spec.
        seed: decides weights and data.
        task: name of the task.
        text: folder of the bytes task, or None.
        steps: how many to make, or None to go by time.
        seconds: of training time, or None to go by steps.
        bucket_mb: DDP's bucket size.
        evaluate_every: steps between evaluations, or None for the task's own.
        deadline_s: how long a collective may take.
        folder: where the ranks meet and leave their results.
        token: marks the news of this run, as no line of the task's own output does.
        slow: how many times slower each rank's processor is.
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
    token: str = ""
    slow: Sequence[float] = ()


@dataclass
class Log:
    """What a rank saw, step by step."""

    losses: list[float] = field(default_factory=list[float])
    times_s: list[float] = field(default_factory=list[float])
    tx_bytes: list[int] = field(default_factory=list[int])
    evaluations: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    compute_s: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    codec_cpu_s: float = 0.0
    cpu_s: float = 0.0
    payload: float = 0.0
    buffers: float = 0.0
    total: int = 0
    framing: int = 0
    setup: int = 0
    label: str = ""
    residual_norm: float | None = None
    report: dict[str, Any] | None = None


# ---------------------------------------------------------------------------------------- the two sides


class Communicator(Protocol):
    """What the worker asks of a method, whoever implements it."""

    label: str

    def codec_cpu_s(self) -> float:
        """CPU seconds spent on coding so far."""
        ...

    def exposed_encode_s(self, exposed_s: float) -> float:
        """How much of the `exposed_s` seconds after the last gradients was spent on coding."""
        ...

    def predicted_bytes(self) -> float:
        """Payload that this rank has sent so far, by arithmetic."""
        ...

    def residual_norm(self) -> float | None:
        """Norm of what error feedback still owes, where there is any."""
        ...

    def report(self) -> dict[str, Any] | None:
        """What the method says of itself: `handle.report().as_dict()`, where there is a handle."""
        ...

    def link_changed(self) -> None:
        """The link has got its rate; every rank calls this."""
        ...

    def step_done(self) -> None:
        """A training step is over."""
        ...

    def close(self) -> None:
        """Let go of threads and groups."""
        ...


class TorchSide:
    """One of PyTorch's own hooks."""

    def __init__(self, ddp: DistributedDataParallel, method: TorchMethod) -> None:
        self.label = method.label
        self._method, self._ddp = method, ddp
        self._clock = attach_torch(ddp, method)
        self._steps = 0
        self._sent = 0.0

    def codec_cpu_s(self) -> float:
        """CPU seconds of the hook and its callbacks."""
        return self._clock.seconds

    def exposed_encode_s(self, exposed_s: float) -> float:
        """At most all of it: PyTorch does not say when it codes."""
        return min(self._clock.seconds, exposed_s)

    def predicted_bytes(self) -> float:
        """Sum over the steps made."""
        return self._sent

    def residual_norm(self) -> None:
        """PyTorch's hooks keep theirs to themselves."""

    def report(self) -> None:
        """PyTorch's hooks make none."""

    def link_changed(self) -> None:
        """Nobody has measured it."""

    def step_done(self) -> None:
        """Add this step's payload."""
        self._sent += predicted_bytes(self._method, self._ddp.module, self._steps, dist.get_world_size())
        self._steps += 1

    def close(self) -> None:
        """Nothing to let go of."""


class GradwireSide:
    """A gradwire method: the only place here that knows how the library is called."""

    def __init__(self, ddp: DistributedDataParallel, spec: str) -> None:
        self._handle = gradwire.attach(ddp, spec)
        self.label = repr(self._handle.reducer)

    def codec_cpu_s(self) -> float:
        """CPU seconds of encoding and decoding."""
        return self._handle.stats().encode_s

    def exposed_encode_s(self, exposed_s: float) -> float:
        """At most all of it: the handle does not say when it codes."""
        return min(self._handle.stats().encode_s, exposed_s)

    def predicted_bytes(self) -> float:
        """What the payloads and their exchange add up to."""
        return float(self._handle.stats().wire_bytes)

    def residual_norm(self) -> float | None:
        """Norm of this rank's residual."""
        return self._handle.residual_norm()

    def report(self) -> dict[str, Any]:
        """The handle's own."""
        return self._handle.report().as_dict()

    def link_changed(self) -> None:
        """Measure again: paced connections were not slow yet when the handle was made."""
        self._handle.measure_link()

    def step_done(self) -> None:
        """The handle counts by itself."""

    def close(self) -> None:
        """Join its thread before the group goes away."""
        self._handle.close()


def attach(ddp: DistributedDataParallel, spec: str) -> Communicator:
    """Put a method on a DDP model."""
    if spec.startswith("torch:"):
        return TorchSide(ddp, parse_torch(spec))
    return GradwireSide(ddp, spec)


def bucket_mb(job: Job) -> float:
    """The job's bucket size, unless its method cannot live with it."""
    needed = parse_torch(job.method).bucket_mb if job.method.startswith("torch:") else None
    return needed or job.bucket_mb


# -------------------------------------------------------------------------------------------- training


class LastGradient:
    """Notes when the latest gradient of the backward pass was accumulated."""

    def __init__(self, model: nn.Module) -> None:
        self.at = 0.0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _: torch.Tensor) -> None:
        self.at = time.perf_counter()


class Trainer:
    """Makes steps with the clock running, and everything else with the clock stopped."""

    def __init__(self, job: Job, task: Task, ddp: DistributedDataParallel, side: Communicator, meter: WireMeter):
        self.job, self.task, self.ddp, self.side, self.meter = job, task, ddp, side, meter
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.optimizer = task.optimizer(p for p in ddp.parameters() if p.requires_grad)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.processor = SlowProcessor(job.slow[self.rank] if job.slow else 1.0)
        self.processor.watch(ddp.module)  # before the next line: a gradient has come once it was slept for
        self.gradient = LastGradient(ddp.module)
        self.buffer_bytes = sum(b.numel() * b.element_size() for b in ddp.module.buffers())
        self.log = Log(label=side.label)
        self.elapsed_s = 0.0
        self.exposed_s = 0.0
        self.agreed_s = 0.0
        self.reported_s = 0.0

    def train(self) -> Log:
        """Train until the budget is spent; fill the log."""
        every = self.job.evaluate_every or self.task.evaluate_every
        start = self._settled()
        step = 0
        while not self._spent(step):
            self._step(step, start)
            step += 1
            self._agree(step)
            if step % every == 0 and not self._spent(step):
                self._evaluate(step)
        self._count(self._settled().since(start), step)
        self._evaluate(step)
        return self.log

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

    def _step(self, step: int, start_reading: WireReading) -> None:
        factor = self.task.schedule(step, self._progress(step))
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * factor
        cpu_before = time.process_time()

        self.processor.begin()
        begun = time.perf_counter()
        inputs, targets = self.task.batch(step, self.rank, self.world_size)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.ddp(inputs), targets)
        self.processor.pay()
        loss.backward()
        reduced = time.perf_counter()
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.task.clip_norm)
        self.optimizer.step()
        self.processor.pay()
        ended = time.perf_counter()

        self.elapsed_s += ended - begun
        self.log.cpu_s += time.process_time() - cpu_before
        self.side.step_done()
        self.exposed_s += max(0.0, reduced - self.gradient.at)
        self.log.losses.append(float(loss.detach()))
        self.log.times_s.append(self.elapsed_s)
        self.log.tx_bytes.append(self.meter.read().since(start_reading).tx_bytes)
        self._report(step + 1)

    def _evaluate(self, step: int) -> None:
        """Evaluate on rank 0 while the others wait, so that all start the next step together."""
        if self.rank == 0:
            self.ddp.module.eval()
            with torch.no_grad():
                value = float(self.task.metric(self.ddp.module))
            self.ddp.module.train()
            self.log.evaluations.append((step, self.elapsed_s, value))
        dist.barrier()

    def _settled(self) -> WireReading:
        """Counters once nothing is under way any more: what is in a queue has not been counted yet."""
        dist.barrier()
        time.sleep(SETTLE_S)
        return self.meter.read()

    def _count(self, sent: WireReading, steps: int) -> None:
        self.log.total = sent.tx_bytes
        self.log.framing = sent.tx_bytes - sent.payload_tx_bytes
        self.log.payload = self.side.predicted_bytes()
        # a broadcast delivers the buffers to n - 1 ranks, whoever passes them on: the mean rank sends (n - 1) / n
        self.log.buffers = steps * self.buffer_bytes * (self.world_size - 1) / self.world_size
        log = self.log
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
            news = News(step, self.log.losses[-1], self.elapsed_s, self.log.tx_bytes[-1])
            print(write_news(news, self.job.token), flush=True)


# --------------------------------------------------------------------------------------------- process


def join_group(job: Job) -> None:
    """Meet the other ranks. Through a file: no port to be taken, no traffic on the wire that is measured."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = str(Path(job.folder) / "rendezvous")
    store = dist.FileStore(path, world_size)  # pyright: ignore[reportPrivateImportUsage]
    timeout = datetime.timedelta(seconds=job.deadline_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def warm_kernels() -> None:
    """Compile what is compiled on first use, off the clock."""
    kernels.warm_up()


def run(job: Job) -> Log:
    """Do a job on this rank."""
    torch.set_num_threads(1)  # the hosts share this machine's cores; more threads would only fight
    task = make_task(job.task, job.seed, Path(job.text) if job.text else None)
    join_group(job)
    meter = WireMeter.from_environment()
    dist.barrier()
    before = meter.read()
    ddp = DistributedDataParallel(task.model, bucket_cap_mb=bucket_mb(job))
    dist.barrier()
    time.sleep(SETTLE_S)
    setup = meter.read().since(before).payload_tx_bytes
    side = attach(ddp, job.method)
    if not job.method.startswith("torch:"):
        warm_kernels()
    meter.pace()
    side.link_changed()
    try:
        log = Trainer(job, task, ddp, side, meter).train()
    finally:
        side.close()
    log.setup = setup
    return log


def prepare(task: str, text: str | None = None) -> None:
    """Import, compile and read what every run of a comparison needs. Starts no thread: a forked child has none."""
    torch.set_num_threads(1)
    with contextlib.suppress(TaskError):  # it was fine where the comparison began; if not, the run will tell
        made = make_task(task, 0, Path(text) if text else None)
        made.optimizer(p for p in made.model.parameters() if p.requires_grad)
    warm_kernels()


def main(path: str) -> None:
    """Entry point: `python -m gradwire.bench.worker JOB.json`."""
    job = Job(**json.loads(Path(path).read_text()))
    log = run(job)
    result = Path(job.folder) / f"rank{dist.get_rank()}.json"
    result.write_text(json.dumps(dataclasses.asdict(log)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
