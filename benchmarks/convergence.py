"""Theory's extra steps beside measured ones, where the theorems hold best: plain SGD at one learning rate.

    python benchmarks/convergence.py [--seeds 3] [--save]

Trains digits by SGD without momentum on four virtual ranks, with error feedback by several methods, and by averages of
models every H steps. Each run ends once its training loss, smoothed over 20 steps, is that of uncompressed SGD after
200 steps with the same seed, which that run itself may reach a little before. Of the uncompressed run it measures what
the estimates need: the sharpness L (largest eigenvalue of the Hessian, by power iteration), the energy and the variance
of gradients, and F0, the loss at the beginning. Delta is what `benchmarks/quality.py` measured on the same task.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import gradwire
from common import RESULTS, rank_gradients, save_result
from gradwire.cases import compressed_steps, local_steps
from gradwire.drivers.virtual import VirtualRanks
from gradwire.tasks.builtin import make_task
from gradwire.tasks.task import Task

METHODS = ("int4", "int2", "sign:64", "powersgd:4", "topk:0.05+int8", "topk:0.01")
WINDOWS = (2, 4, 8, 16)
RANKS, STEPS, SMOOTHING, MOST = 4, 200, 20, 4
RATE = 0.05
QUALITY = RESULTS / "quality_2026-11-21.json"


class Noise(NamedTuple):
    """What the bounds' unknowns are in a step of the uncompressed run."""

    energy: float
    variance: float


def plain_task(seed: int) -> Task:
    """Digits by SGD with one learning rate and nothing else."""
    return dataclasses.replace(
        make_task("digits", seed, None),
        optimizer=_sgd,
        schedule=_constant,
    )


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def _constant(step: int, progress: float) -> float:
    return 1.0


def compressed(spec: str, task: Task, noises: list[Noise] | None = None) -> Iterator[float]:
    """Train by a method; yield the mean loss of each step."""
    losses: list[float] = []

    def noted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = task.loss(outputs, targets)
        losses.append(float(loss.detach()))
        return loss

    noting = dataclasses.replace(task, loss=noted)
    ranks, optimizer = VirtualRanks(gradwire.parse(spec), task.model, RANKS), task.optimizer(task.model.parameters())
    for step in range(MOST * STEPS):
        losses.clear()
        gradients = [rank_gradients(noting, optimizer, step, rank, RANKS) for rank in range(RANKS)]
        if noises is not None:
            flat = torch.stack([torch.cat([g.flatten() for g in each.values()]) for each in gradients])
            mean = flat.mean(0)
            noises.append(Noise(float(mean.square().sum()), float((flat - mean).square().sum()) / (RANKS - 1)))
        ranks.step(gradients)
        optimizer.step()
        yield statistics.mean(losses)


def averaged(every: int, task: Task) -> Iterator[float]:
    """Train a model on each rank and average them every few steps; yield the mean loss of each step."""
    models = [copy.deepcopy(task.model) for _ in range(RANKS)]
    for step in range(MOST * STEPS):
        losses: list[float] = []
        for rank, model in enumerate(models):
            inputs, targets = task.batch(step, rank, RANKS)
            loss = task.loss(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= RATE * gradient
            losses.append(float(loss.detach()))
        if (step + 1) % every == 0:
            with torch.no_grad():
                for copies in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(copies)).mean(0)
                    for parameter in copies:
                        parameter.copy_(mean)
        yield statistics.mean(losses)


def steps_to(losses: Iterator[float], target: float) -> int | None:
    """Steps until the smoothed loss is as low; None if it never is."""
    seen: list[float] = []
    for loss in losses:
        seen.append(loss)
        if len(seen) >= SMOOTHING and statistics.mean(seen[-SMOOTHING:]) <= target:
            return len(seen)
    return None


def sharpness(model: nn.Module, task: Task, iterations: int = 15) -> float:
    """The largest eigenvalue of the Hessian on the batches of eight ranks, by power iteration."""
    batches = [task.batch(0, rank, 8) for rank in range(8)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(task.loss(model(inputs), targets), parameters, create_graph=True)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    vector = torch.randn(flat.numel(), generator=torch.Generator().manual_seed(0))
    value = 0.0
    for _ in range(iterations):
        vector = vector / vector.norm()
        product = torch.autograd.grad(flat @ vector, parameters, retain_graph=True)
        vector = torch.cat([part.flatten() for part in product])
        value = float(vector.norm())
    return value


def baseline(seed: int) -> dict[str, float]:
    """Train uncompressed; return the target, and what kappa is made of."""
    task, noises = plain_task(seed), list[Noise]()
    losses: list[float] = []
    sharp: list[float] = []
    for loss in compressed("none", task, noises):
        losses.append(loss)
        if len(losses) in (1, STEPS // 4, STEPS // 2, STEPS):
            sharp.append(sharpness(task.model, task))
        if len(losses) == STEPS:
            break
    target = statistics.mean(losses[-SMOOTHING:])
    return {
        "target": target,
        "reached": steps_to(iter(losses), target) or STEPS,
        "first_loss": losses[0],
        "sharpness": statistics.median(sharp),
        "energy": statistics.mean(noise.energy for noise in noises),
        "variance": statistics.mean(noise.variance for noise in noises),
    }


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/convergence_DATE.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(QUALITY.read_text())["tasks"]["digits"]["methods"]
    bases = [baseline(seed) for seed in range(arguments.seeds)]
    kappas = {
        noise: statistics.mean(one["sharpness"] * one["first_loss"] / one[noise] for one in bases)
        for noise in ("energy", "variance")
    }
    print(bases, kappas, flush=True)
    rows: list[dict[str, Any]] = []
    for name in (*METHODS, *WINDOWS):
        taken: list[int | None] = []
        for seed, base in enumerate(bases):
            task = plain_task(seed)
            losses = compressed(name, task) if isinstance(name, str) else averaged(name, task)
            taken.append(steps_to(losses, base["target"]))
        if isinstance(name, str):
            delta = min(kept[name][stage]["contraction"] for stage in ("early", "middle", "late"))
            theory = compressed_steps(delta, STEPS, kappas["energy"])
        else:
            delta, theory = None, local_steps(name, RANKS, STEPS, kappas["variance"])
        row = {"what": name if isinstance(name, str) else f"local:{name}", "delta": delta, "steps": taken}
        rows.append(row | {"theory": theory.factor})
        print(rows[-1], flush=True)
    if arguments.save:
        figures = {"ranks": RANKS, "steps": STEPS, "rate": RATE, "baselines": bases, "kappa": kappas, "rows": rows}
        print("wrote", save_result("convergence", figures))


if __name__ == "__main__":
    main()
