"""What workers compute in the tests of `gradwire.asynchronous`: a quadratic problem, a likelihood, and a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.asynchronous import (
    AsynchronousSimulation,
    Grant,
    Machine,
    ParameterServer,
    Result,
    ServerRule,
    Work,
    Worker,
)
from gradwire.core.key import Key

START = {"x": torch.full((4,), 3.0, dtype=torch.float64), "y": torch.ones(2, 2, dtype=torch.float64)}


def optimum(worker: int) -> dict[str, Tensor]:
    """Where this worker's part of the loss is least."""
    generator = torch.Generator().manual_seed(worker + 1)
    return {name: torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in START.items()}


def quadratic(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    """0.5 |x - e_i|^2."""
    best = optimum(grant.worker)
    gradient = {name: tensor - best[name] for name, tensor in parameters.items()}
    return Result(gradient, sum(float(g.square().sum()) for g in gradient.values()) / 2)


def gaussian(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    """-log likelihood of an example of N(x, 1): at the optimum, 0, a gradient's square is the Hessian on average."""
    key = Key(seed=3, step=grant.number, name="example", rank=grant.worker)
    generator = torch.Generator().manual_seed(key.stream_seed >> 1)
    example = torch.randn(parameters["x"].shape, generator=generator, dtype=torch.float64)
    return Result({"x": parameters["x"] - example}, 0.0)


def simulation(
    rule: ServerRule,
    step_s: Sequence[float],
    work: Work = quadratic,
    start: Mapping[str, Tensor] = START,
    faults: Any = None,
    **settings: Any,
) -> AsynchronousSimulation:
    """A server and its workers, one for each of `step_s`."""
    server = ParameterServer(start, rule, workers=len(step_s), **settings)
    workers = [Worker(work, start, sending=server.sending, seed=server.seed) for _ in step_s]
    return AsynchronousSimulation(server, workers, [Machine(step_s=seconds) for seconds in step_s], faults)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(network: nn.Module, worker: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return (network(inputs) - inputs.sum(1, keepdim=True)).square().mean()
