"""What each rank does in the tests of `session.report()`."""

import functools
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
import gradwire.sync


def train(ddp: nn.Module, steps: int, width: int, factor: float = 1.0, poisoned: Sequence[int] = ()) -> None:
    """SGD on random inputs; the loss of `poisoned` steps is infinite on this rank."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)  # a poisoned step must not spoil those after it
    for step in range(steps):
        optimizer.zero_grad()
        loss = ddp(torch.randn(4, width)).square().mean() * factor
        (loss * float("inf") if step in poisoned else loss).backward()


def tiny(rank: int, world_size: int) -> dict[str, Any]:
    """A model of 108 parameters."""
    ddp = DDP(nn.Linear(8, 12))
    with gradwire.attach(ddp, "int8", deadline_s=60) as handle:
        train(ddp, 12, 8)
        report = handle.report()
    return {"text": str(report), **report.as_dict()}


def windows(rank: int, world_size: int, specs: list[str]) -> dict[str, Any]:
    """Reports of methods that combine models."""
    found: list[dict[str, Any]] = []
    for spec in specs:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = gradwire.sync.parse(spec).optimizer(inner, model, deadline_s=60)
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        gradient_bytes = sum(p.nbytes for p in model.parameters())
        found.append({"gradient_bytes": gradient_bytes, **optimizer.session.report().as_dict()})
        optimizer.close()
    return {"reports": found}


def figures(rank: int, world_size: int, spec: str, steps: int, width: int, deadline_s: float) -> dict[str, Any]:
    """A run's report, and what else is known of the same run."""
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), bucket_cap_mb=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with gradwire.attach(ddp, spec, deadline_s=deadline_s, scaler=scaler) as handle:
        early = handle.report()
        train(ddp, steps, width, factor=64.0)
        report, stats, residual = handle.report(), handle.stats(), handle.residual_norm()
        if rank == 0:  # ranks may ask unevenly
            handle.report()
        states = sum(t.nbytes for leaf in _tensors(handle.state_dict()["parameters"]) for t in [leaf])
        link = handle.measure_link()
    return {
        **report.as_dict(),
        "text": str(report),
        "early": str(early),
        "wire_bytes": stats.wire_bytes,
        "steps_made": stats.steps,
        "scaled_residual": residual,
        "saved_state_bytes": states,
        "dense_parameter_bytes": sum(p.nbytes for p in ddp.parameters()),
        "as_json": json.dumps(report.as_dict(), allow_nan=False),
        "link": [link.alpha_s, link.beta_s_per_byte] if link else None,
    }


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = list(tree.values()) if isinstance(tree, dict) else list(tree) if isinstance(tree, list | tuple) else []
    return [tensor for part in parts for tensor in _tensors(part)]


def non_finite(rank: int, world_size: int, spec: str, scaled: bool, steps: list[int]) -> dict[str, Any]:
    """Steps that are not finite on the last rank: what is warned about, and what the report counts."""
    ddp = DDP(nn.Linear(32, 32))
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    poisoned = steps if rank == world_size - 1 else ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gradwire.attach(ddp, spec, deadline_s=60, scaler=scaler) as handle:
            train(ddp, 12, 32, poisoned=poisoned)
            report = handle.report()
    kinds = [warning.category.__name__ for warning in caught]
    return {"warned": kinds, "said": [str(warning.message) for warning in caught], **report.as_dict()}


def shown(rank: int, world_size: int, jobs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Several cases in one set of processes."""
    return [globals()[case](rank, world_size, **arguments) for case, arguments in jobs]


def _wait(seconds: float, *_: object) -> None:
    time.sleep(seconds)


def beside_plain_steps(rank: int, world_size: int, spec: str, late_s: float) -> dict[str, Any]:
    """Steps of DDP alone and of a method in turn, where the last rank is late: the report, and the truth."""
    models = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))) for _ in range(2)]
    plain, mine = (DDP(model) for model in models)
    if rank == world_size - 1:
        for model in models:
            model.register_forward_pre_hook(functools.partial(_wait, late_s))
    with gradwire.attach(mine, spec, deadline_s=60) as handle:
        train(plain, 4, 256)
        train(mine, 6, 256)
        plain_s: list[float] = []
        for _ in range(3):
            train(plain, 1, 256)
            began = time.perf_counter()
            train(plain, 4, 256)
            plain_s.append((time.perf_counter() - began) / 4)
            train(mine, 5, 256)
        return {"plain_s": statistics.median(plain_s), **handle.report().as_dict()}
