"""What ranks do in `test_drift.py`."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def attached(ddp: DistributedDataParallel, check_every: int, on_drift: str) -> gradwire.Session:
    return gradwire.attach(ddp, "int4", check_every=check_every, on_drift=on_drift)


def drift(rank: int, world_size: int, on_drift: str, check_every: int, steps: int, micro: int = 1) -> dict[str, Any]:
    """Train; what was warned of, whether parameters are equal in the end, and why it stopped."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 5)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    done, stopped = 0, ""
    with warnings.catch_warnings(record=True) as given, attached(ddp, check_every, on_drift) as handle:
        warnings.simplefilter("always")
        try:
            for _ in range(steps):
                optimizer.zero_grad()
                for last in [False] * (micro - 1) + [True]:
                    ddp.require_backward_grad_sync = last
                    ddp(torch.randn(16, 64, generator=data)).square().mean().backward()
                optimizer.step()
                done += 1
        except gradwire.DriftError as error:
            stopped = str(error)
        drifts = [str(one.message) for one in given if isinstance(one.message, gradwire.DriftWarning)]
        left = gradwire.check_drift(handle, ddp.module) if on_drift != "stop" else None
        if on_drift == "repair":
            gradwire.check_drift(handle, ddp.module, "repair")
            left = gradwire.check_drift(handle, ddp.module)
    return {"drifts": drifts, "left": left, "stopped": stopped, "done": done}


def session_drift(
    rank: int, world_size: int, on_drift: str, steps: int, by_name: bool = False, spoiled: bool = False
) -> dict[str, Any]:
    """The same in a loop of one's own, with a forward pass before the step begins; or with an element spoiled once."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    tensors = dict(net.named_parameters()) if by_name else net
    data = torch.Generator().manual_seed(rank)
    done, stopped = 0, ""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        session = gradwire.Session(tensors, "int4", check_every=4, on_drift=on_drift)
        try:
            for step in range(steps):
                optimizer.zero_grad()
                loss = net(torch.randn(16, 64, generator=data)).square().mean()
                with session.step() as under_way:
                    loss.backward()
                    for name, parameter in net.named_parameters():
                        assert parameter.grad is not None
                        under_way.deliver(name, parameter.grad)
                optimizer.step()
                done += 1
                if spoiled and rank == 1 and step == 4:
                    with torch.no_grad():
                        net.get_parameter("2.bias")[3] += 1e-3
        except gradwire.DriftError as error:
            stopped = str(error)
        drifts = [str(one.message) for one in given if isinstance(one.message, gradwire.DriftWarning)]
        left = gradwire.check_drift(session, net)
        session.close()
    return {"drifts": drifts, "left": left, "stopped": stopped, "done": done}


def sessions_apart(rank: int, world_size: int) -> str:
    """Ranks that would compare at other steps."""
    try:
        gradwire.Session(nn.Linear(3, 2), "int4", check_every=4 + rank, deadline_s=30)
    except gradwire.AttachError as error:
        return str(error)
    return ""


def other_forms(
    rank: int, world_size: int, forms: list[tuple[list[int], str]], on_drift: str
) -> tuple[str, list[float]]:
    """What is said where a rank's tensor has another shape or dtype, and what the tensor holds then."""
    shape, dtype = forms[rank]
    tensor = torch.full(shape, 1.0 * rank, dtype=getattr(torch, dtype))
    with gradwire.Session({"w": torch.zeros(3)}, "none") as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            gradwire.check_drift(session, {"same": torch.ones(2), "w": tensor}, on_drift)
        except gradwire.DriftError as error:
            return str(error), tensor.flatten().tolist()
    return "", tensor.flatten().tolist()


def other_names(rank: int, world_size: int) -> str:
    """What is said where one rank has a tensor that the other lacks."""
    with gradwire.Session({"w": torch.zeros(3)}, "none") as session:
        tensors = {"w": torch.zeros(3)} | ({"extra": torch.zeros(3)} if rank else {})
        try:
            gradwire.check_drift(session, tensors, "repair")
        except gradwire.DriftError as error:
            return str(error)
    return ""


def unlike_reactions(rank: int, world_size: int) -> str:
    """What is raised where one rank stops at a difference that the other one is about to repair."""
    with gradwire.Session({"x": torch.zeros(3)}, "none", deadline_s=1.0) as session:
        try:
            gradwire.check_drift(session, {"w": torch.full((3,), 1.0 * rank)}, ("repair", "stop")[rank])
        except gradwire.GradwireError as error:
            if rank:
                time.sleep(4.0)  # it is alive, and answers
            return f"{type(error).__name__}: {error}"
    return ""
