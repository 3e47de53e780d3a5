"""What each rank does in `test_unfreezing.py`: layers are unfrozen, frozen and replaced in mid-run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import gradwire
from everything import Running, by_name
from sync_cases import digest

STEPS, AT = 10, 5
"""Steps of a run, and the one before which something changes: in the middle of every window."""

FIRST, LAST = 0, 4
"""Layers of the model."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def whole(tensors: Any) -> list[Tensor]:
    """Tensors as they are on all ranks together."""
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


def state(running: Running) -> str:
    return digest(whole(running.network.parameters()))


def step(running: Running, number: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    running.inner.zero_grad()
    running.network(torch.randn(8, 6, generator=generator)).square().mean().backward()
    running.step()


def run(
    name: str, rank: int, model: nn.Sequential, change: Callable[[Running, nn.Sequential], object]
) -> dict[str, Any]:
    """Train, change something before a step, and say how that ended: the same words from all ranks, or an error."""
    running = by_name()[name].make(model, sgd)
    dist.barrier()
    found: dict[str, Any] = {}
    before = ""
    try:
        for number in range(STEPS):
            if number == AT:
                before = digest(whole(model[LAST].parameters()))
                change(running, model)
            step(running, number, rank)
        running.finish()
        found = {"model": state(running), "moved": digest(whole(model[LAST].parameters())) != before}
    except gradwire.GradwireError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    except RuntimeError as error:
        found = {"error": "RuntimeError", "text": str(error)[:300]}
    dist.barrier()  # a rank of those that do not wait may be told later than others
    running.close()
    dist.barrier()
    return found


def unfrozen(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """A layer that was frozen when all began is trained from some step on."""
    out: dict[str, Any] = {}
    for name in names:
        print("case", name, flush=True)
        model = network()
        model[LAST].requires_grad_(False)
        out[name] = run(name, rank, model, lambda _, model: model[LAST].requires_grad_(True))
    return out


def frozen(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """A layer that was trained is frozen from some step on."""
    out: dict[str, Any] = {}
    for name in names:
        print("case", name, flush=True)
        out[name] = run(name, rank, network(), lambda _, model: model[FIRST].requires_grad_(False))
    return out


def refused(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """A refused step changes nothing: with the layer frozen again the run ends as one in which nothing happened."""
    out: dict[str, Any] = {}
    for name in names:
        print("case", name, flush=True)
        ends = list[Any]()
        for is_disturbed in (False, True):
            model = network()
            model[LAST].requires_grad_(False)

            def disturb(running: Running, model: nn.Sequential, is_disturbed: bool = is_disturbed) -> None:
                if not is_disturbed:
                    return
                before = digest(model[LAST].parameters())
                model[LAST].requires_grad_(True)
                try:
                    step(running, AT, rank)
                except gradwire.StepError:
                    assert digest(model[LAST].parameters()) == before, "a refused step has changed the layer"
                else:
                    raise AssertionError("nothing was refused")
                finally:
                    model[LAST].requires_grad_(False)
                    model[LAST].zero_grad()

            ends.append(run(name, rank, model, disturb))
        out[name] = ends
    return out


def replaced(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """From some step on a layer is another one, which differs between ranks."""

    def replace(running: Running, model: nn.Sequential) -> None:
        torch.manual_seed(rank)
        model[LAST] = nn.Linear(8, 2)
        running.inner.add_param_group({"params": list(model[LAST].parameters())})

    out: dict[str, Any] = {}
    for name in names:
        print("case", name, flush=True)
        out[name] = run(name, rank, network(), replace)
    return out


def strange(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    """An optimizer of another model, and a group of parameters that were frozen when all began."""
    out: dict[str, Any] = {}
    for name in names:
        print("case", name, flush=True)
        out[name] = [_error(lambda name=name: by_name()[name].make(network(), lambda _: sgd(network())))]
        model = network()
        model[LAST].requires_grad_(False)
        first = list(model[FIRST].parameters())
        running = by_name()[name].make(model, lambda _, first=first: torch.optim.SGD(first, 0.05))
        out[name].append(_error(partial(running.trains.add_param_group, {"params": list(model[LAST].parameters())})))
        dist.barrier()
        running.close()
    return out


def _error(act: Callable[[], object]) -> str:
    try:
        act()
    except gradwire.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""
