"""What each rank does in `test_non_finite.py`: one rank's gradient is not finite in one step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.state import flatten
from gradwire.flight import recorder
from sync_cases import digest

STEPS, BAD, RANK = 6, 3, 1
"""Steps of a run, the one that is not finite, and the rank whose gradient it is."""
DEADLINE_S = 30.0
BROKEN = "2.weight"

Made = tuple[nn.Module, gradwire.Session, Callable[[], None]]
"""What is called and trained, its session, and what is done after a backward pass."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def by_ddp(method: str, on_non_finite: str, **options: Any) -> Made:
    ddp = DistributedDataParallel(network(), **options)
    return ddp, gradwire.attach(ddp, method, on_non_finite=on_non_finite, deadline_s=DEADLINE_S).session, _nothing


def by_unused(method: str, on_non_finite: str) -> Made:
    return by_ddp(method, on_non_finite, find_unused_parameters=True)


def by_views(method: str, on_non_finite: str) -> Made:
    return by_ddp(method, on_non_finite, gradient_as_bucket_view=True)


def by_session(method: str, on_non_finite: str) -> Made:
    model = network()
    session = gradwire.Session(model, method, on_non_finite=on_non_finite, deadline_s=DEADLINE_S)
    return model, session, lambda: session.reduce_(model)


def by_fsdp2(method: str, on_non_finite: str) -> Made:
    model, mesh = network(), init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    sharded = cast(nn.Module, fully_shard(model, mesh=mesh))
    handle = gradwire.attach(sharded, method, on_non_finite=on_non_finite, deadline_s=DEADLINE_S)
    return sharded, handle.session, _nothing


def _nothing() -> None:
    return


WAYS: dict[str, Callable[[str, str], Made]] = {
    "ddp": by_ddp,
    "ddp with unused ones": by_unused,
    "ddp with views": by_views,
    "session": by_session,
    "fsdp2": by_fsdp2,
}


def held(tensors: Any) -> list[Tensor]:
    """What this rank has of tensors, copied."""
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def remembered(session: gradwire.Session) -> list[Tensor]:
    return [leaf.clone() for _, state in session.engine.states() for leaf in flatten(state).values()]


def trained(rank: int, world_size: int, way: str, method: str, on_non_finite: str) -> dict[str, Any]:
    """A run in which one gradient of one rank is not finite in one step, and what is as before after it."""
    model, session, after_backward = WAYS[way](method, on_non_finite)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    found: dict[str, Any] = {"skipped": []}
    before = after = list[str]()
    with session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gradwire.NonFiniteWarning)
        for number in range(STEPS):
            before = [digest(held(model.parameters())), digest(_memory(optimizer)), digest(remembered(session))]
            optimizer.zero_grad()
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * number + rank))
            loss = model(x).square().mean()
            if number == BAD and rank == RANK:
                _break(model, loss)
            else:
                loss.backward()
            after_backward()
            found["skipped"].append(session.skipped)
            optimizer.step()
            after = [digest(held(model.parameters())), digest(_memory(optimizer)), digest(remembered(session))]
            if number == BAD:
                found["none"] = all(parameter.grad is None for parameter in model.parameters())
                found["same"] = [one == other for one, other in zip(before, after, strict=True)]
        found["finite"] = all(bool(tensor.isfinite().all()) for tensor in held(model.parameters()))
        found["moves"] = before[0] != after[0]
        found["model"] = "" if way == "fsdp2" else after[0]
        report = session.report()
        found["counted"], found["row"] = report.bad_steps, "not finite" in str(report)
    found["said"] = [str(warning.message) for warning in caught]
    return found


def _break(model: nn.Module, loss: Tensor) -> None:
    """A backward pass that leaves a NaN in one gradient, where gradients are whole; else in all of them."""
    name = next((name for name, _ in model.named_parameters() if name.endswith(BROKEN)), "")
    parameter = dict(model.named_parameters())[name]
    if hasattr(parameter, "to_local"):
        (loss * float("nan")).backward()
        return

    def spoilt(gradient: Tensor) -> Tensor:
        return gradient * float("inf")

    with parameter.register_hook(spoilt):
        loss.backward()


def _memory(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return held(value for state in optimizer.state.values() for value in state.values())


def all_trained(rank: int, world_size: int, cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """One run after the other."""
    return [trained(rank, world_size, *case) for case in cases]


def overflown(rank: int, world_size: int) -> dict[str, Any]:
    """A gradient that is finite on every rank, and not as float16."""
    tensors = {"fits": torch.ones(8), "overflows": torch.full((8,), 7e4)}
    session = gradwire.Session(tensors, "fp16", on_non_finite="skip", deadline_s=DEADLINE_S, grain_numel=8)
    with session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gradwire.NonFiniteWarning)
        session.reduce_(tensors)
    first = recorder().not_finite
    return {"said": [str(warning.message) for warning in caught], "kept": None if first is None else vars(first)}


def refused(rank: int, world_size: int) -> list[str]:
    """Settings that differ between ranks, and combinations that do not go together."""
    said: list[str] = []
    for make in (
        lambda: gradwire.Session(network(), "int4", on_non_finite=("warn", "skip")[rank], deadline_s=DEADLINE_S),
        lambda: gradwire.Session(network(), "int4", on_non_finite="stop", deadline_s=DEADLINE_S),
        lambda: gradwire.Session(
            network(),
            "int4",
            on_non_finite="skip",
            scaler=torch.amp.GradScaler("cpu"),
            deadline_s=DEADLINE_S,
        ),
    ):
        try:
            make().close()
        except gradwire.GradwireError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
