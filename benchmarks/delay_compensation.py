"""DC-ASGD beside plain ASGD, in the simulator; a part of `asynchronous.py`, whose text says what is measured."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.asynchronous import (
    ASGD,
    DCASGD,
    AdaptiveDCASGD,
    AsynchronousSimulation,
    Grant,
    Hyperbolic,
    Machine,
    ParameterServer,
    Result,
    ServerRule,
    Worker,
)
from gradwire.core.errors import StepError
from gradwire.core.key import Key
from pages import markdown
from plots import Line, Panel, figure

PUSHES, LAST = 2000, 500
DIVERGED = 1e6
RATES, STALENESS = (0.05, 0.2), (8, 16, 32)
RULES: dict[str, Callable[[float], ServerRule]] = {
    "ASGD": ASGD,
    "ASGD, lr / (1 + tau)": lambda lr: ASGD(lr, Hyperbolic()),
    "DC-ASGD-c, 0.5": lambda lr: DCASGD(lr, 0.5),
    "DC-ASGD-c, 1": lambda lr: DCASGD(lr, 1.0),
    "DC-ASGD-a, 0.5": lambda lr: AdaptiveDCASGD(lr, 0.5),
    "DC-ASGD-a, 1": lambda lr: AdaptiveDCASGD(lr, 1.0),
}
PLOTTED = ("ASGD", "ASGD, lr / (1 + tau)", "DC-ASGD-c, 0.5", "DC-ASGD-a, 0.5")


def gaussian(seed: int, parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    """-log likelihood of one example of N(x, 1), whose mean is 0."""
    key = Key(seed=seed, step=grant.number, name="example", rank=grant.worker)
    example = torch.randn(20, generator=torch.Generator().manual_seed(key.stream_seed >> 1), dtype=torch.float64)
    return Result({"x": parameters["x"] - example}, float(parameters["x"].square().mean()) / 2)


def losses(rule: ServerRule, staleness: int, seed: int) -> list[float]:
    """The loss that each push was computed from; it ends where training has diverged."""
    start = {"x": torch.full((20,), 2.0, dtype=torch.float64)}
    server = ParameterServer(start, rule, workers=staleness + 1)
    workers = [Worker(functools.partial(gaussian, seed), start) for _ in range(server.workers)]
    simulation = AsynchronousSimulation(server, workers, [Machine() for _ in workers])
    with contextlib.suppress(StepError):  # a gradient that is not finite any more
        while server.version < PUSHES and (not simulation.history or simulation.history[-1].loss < DIVERGED):
            simulation.run(pushes=20)
    return [one.loss for one in simulation.history]


def dc(seeds: int) -> dict[str, Any]:
    """The table: a row for each rule."""
    columns = [(lr, tau) for lr in RATES for tau in STALENESS]
    found: dict[str, Any] = {}
    print(f"{'':26}" + "".join(f"{f'tau={tau}, lr={lr}':>18}" for lr, tau in columns))
    for name, rule in RULES.items():
        found[name] = [cell([losses(rule(lr), tau, s) for s in range(seeds)]) for lr, tau in columns]
        print(f"{name:26}" + "".join(f"{one:>18}" for one in found[name]), flush=True)
    return {"columns": [{"lr": lr, "tau": tau} for lr, tau in columns], "rows": found}


def cell(runs: Sequence[Sequence[float]]) -> str:
    """The mean at the end, or after how many pushes it was given up."""
    if any(len(one) < PUSHES for one in runs):
        return f"diverged at {min(map(len, runs))}"
    return f"{statistics.mean(statistics.mean(one[-LAST:]) for one in runs):.3g}"


def table(found: dict[str, Any]) -> str:
    """What docs/asynchronous.md has."""
    head = ["rule"] + [f"lr {column['lr']}, tau {column['tau']}" for column in found["columns"]]
    return markdown(head, [[name, *cells] for name, cells in found["rows"].items()])


def plot(lr: float = 0.2) -> str:
    """Loss against pushes, a panel for each staleness."""
    panels = list[Panel]()
    for staleness in STALENESS:
        lines = list[Line]()
        for name in PLOTTED:
            run = losses(RULES[name](lr), staleness, 0)
            lines.append(Line(name, [(n, max(loss, 1e-4)) for n, loss in enumerate(run) if n % 5 == 0]))
        title = f"loss above the optimum, staleness {staleness}, lr {lr}"
        panels.append(Panel(title, "pushes", lines, log_y=True, low=1e-4, high=DIVERGED))
    return figure("Loss against pushes under delay, with and without compensation", panels)
