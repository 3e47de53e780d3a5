"""What each rank does in the tests of methods that have ranks find their nodes."""

from __future__ import annotations

import os
from typing import Any

import torch

import gradwire
from gradwire.session.figures import DESCRIPTION_VARIABLE
from gradwire.topology import NODE_VARIABLE

STEPS = 3


def reduced(
    rank: int, world_size: int, method: str, nodes: str, change: str | None = None, topology: str | None = None
) -> dict[str, Any]:
    """Steps of a session whose ranks are on these nodes, a letter for each rank."""
    os.environ[NODE_VARIABLE] = nodes[rank]
    if topology is not None:
        os.environ[DESCRIPTION_VARIABLE] = topology
    generator = torch.Generator().manual_seed(rank)
    with gradwire.Session({"x": torch.zeros(3000)}, method, deadline_s=60) as session:
        if change is not None:
            session.change(change)
        sums: list[float] = []
        for _ in range(STEPS):
            x = torch.randn(3000, generator=generator)
            session.reduce_({"x": x})
            sums.append(float(x.double().square().sum()))
        return {"sums": sums, "reducer": repr(session.reducer), "method": session.method, "begun": session.begun_with,
                "bytes": session.stats().wire_bytes}  # fmt: skip


def refused(rank: int, world_size: int, methods: list[str], nodes: str) -> str:
    """What a rank is told whose group cannot have a method."""
    os.environ[NODE_VARIABLE] = nodes[rank]
    try:
        with gradwire.Session({"x": torch.zeros(3000)}, methods[rank], deadline_s=60):
            return "nothing"
    except gradwire.GradwireError as error:
        return f"{type(error).__name__}: {error}"


def averaged(rank: int, world_size: int, method: str, nodes: str) -> list[float]:
    """The model of a rank that averages now and then, after some steps."""
    os.environ[NODE_VARIABLE] = nodes[rank]
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    optimizer = gradwire.wrap(torch.optim.SGD(model.parameters(), 0.1), model, method)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return [float(parameter.double().square().sum()) for parameter in model.parameters()]
