"""A task: a model, its data, a loss, and a metric on data that was held out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.core.errors import GradwireError

Batch = Callable[[int, int, int], tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]
Metric = Callable[[nn.Module], float | Tensor]
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Schedule = Callable[[int, float], float]


class TaskError(GradwireError, ValueError):
    """A task that cannot be found, or returned something that cannot be trained."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW at 1e-3: the optimizer of a task that names none."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


def warm_cosine(step: int, progress: float, *, warm_up: int = 20, floor: float = 0.1) -> float:
    """Learning-rate factor: a linear warm-up over `warm_up` steps times a cosine from 1 down to `floor`.

    Args:
        step: the step about to be made, from 0.
        progress: the fraction of the budget (steps or minutes) already spent, from 0 to 1.
        warm_up: how many steps the linear rise takes.
        floor: what the cosine ends at.

    Example:
        >>> warm_cosine(0, 0.0, warm_up=10)
        0.1
        >>> round(warm_cosine(500, 1.0), 6)
        0.1
    """
    rise = min(1.0, (step + 1) / warm_up)
    fall = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return rise * fall


@dataclass(frozen=True)
class Examples:
    """A task's training data by number, as a federation deals it out to clients.

    Attributes:
        count: how many there are.
        labels: (count,) whole numbers, or None where examples have none; partitions by label need them.
        batch: `(indices, generator) -> (inputs, targets)` of these examples.
    """

    count: int
    labels: Tensor | None
    batch: Callable[[Tensor, torch.Generator], tuple[Any, Any]]


@dataclass(frozen=True)
class Task:
    """One training job, ready to run on any rank.

    Attributes:
        model: fresh, initialised from the seed alone.
        batch: `(step, rank, world_size) -> (inputs, targets)`, deterministic.
        loss: `(outputs, targets) -> scalar`.
        metric: evaluates a model on held-out data: a number, or a tensor with a number for each held-out example, such
            as 100 where it is right and 0 where it is wrong. Its mean is the metric then, and its spread tells what
            chance does to it.
        metric_name: what the metric is called in tables, with its unit where it has one.
        higher_is_better: direction of the metric.
        optimizer: builds the optimizer from the parameters.
        schedule: `(step, progress) -> factor` on the learning rate.
        clip_norm: limit on the norm of the averaged gradient, or None.
        steps: how long a comparison trains by default.
        evaluate_every: steps between two evaluations, off the clock, where the target is a value of the metric. A
            comparison by training loss evaluates at the end only.
        target: training loss that counts as reached, or None for the loss that fp32 ends at.
        description: one line for the report.
        fingerprint: identifies the data, so that a resumed comparison notices when it changed.
        examples: the data by number, for `gradwire federate`; None for a task that cannot be dealt out.
    """

    model: nn.Module
    batch: Batch
    loss: Loss
    metric: Metric
    metric_name: str = "metric"
    higher_is_better: bool = True
    optimizer: Optimizer = adamw
    schedule: Schedule = warm_cosine
    clip_norm: float | None = None
    steps: int = 200
    evaluate_every: int = 25
    target: float | None = None
    description: str = ""
    fingerprint: str = ""
    examples: Examples | None = None


MOST_VALUES = 10_000
"""Single values of a metric that are kept of a run; of more examples, means over neighbours are."""


class Measured(NamedTuple):
    """A metric, and that of each held-out example where the task tells it."""

    value: float
    by_example: list[float]


@torch.no_grad()
def measure(metric: Metric, model: nn.Module) -> Measured:
    """Evaluate a model as it is.

    Example:
        >>> measure(lambda model: torch.tensor([100.0, 0.0, 100.0, 100.0]), nn.Identity())
        Measured(value=75.0, by_example=[100.0, 0.0, 100.0, 100.0])
        >>> measure(lambda model: 75.0, nn.Identity())
        Measured(value=75.0, by_example=[])
    """
    found = metric(model)
    if not isinstance(found, Tensor) or found.numel() < 2:
        return Measured(float(found), [])
    values = found.detach().double().flatten().cpu()
    parts = values.tensor_split(MOST_VALUES) if values.numel() > MOST_VALUES else [values]
    kept = values if len(parts) == 1 else torch.stack([part.mean() for part in parts])
    return Measured(float(values.mean()), kept.tolist())


def count(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(p.numel() for p in model.parameters())


def stream(*numbers: int) -> int:
    """A 63-bit seed from several numbers, the same on every machine (unlike `hash`)."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
