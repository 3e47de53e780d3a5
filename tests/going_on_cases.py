"""What each rank does in the law of saving: everything that trains, stopped where no window ends, and taken up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import gradwire
from everything import DEADLINE_S, RANKS, OptimizerOf, Running, Trained, everything
from gradwire import StateError, sync
from gradwire.sync.shards import held_state, sharded_state
from sync_cases import digest, loss_of, model

SAVED, STEPS = 7, 12
Act = Callable[[Trained, int, Path], dict[str, Any]]


__all__ = ["RANKS", "SAVED", "cases", "taken_up", "without_break"]


# More of what is under way after seven steps ------------------------------------------------------------------------


def _averaged(**options: Any) -> Callable[[nn.Module, OptimizerOf], Running]:
    def make(network: nn.Module, optimizer_of: OptimizerOf) -> Running:
        inner = optimizer_of(network)
        optimizer = sync.LocalSGD(inner, network, deadline_s=DEADLINE_S, **options)
        return Running(network, inner, optimizer, optimizer.step, optimizer.sync, optimizer.close)

    return make


def _mixed(
    method: sync.gossip.GossipMethod, graph: str, every: int | sync.Schedule
) -> Callable[[nn.Module, OptimizerOf], Running]:
    def make(network: nn.Module, optimizer_of: OptimizerOf) -> Running:
        inner = optimizer_of(network)
        gossip = sync.Gossip(network, graph, method, every=every, deadline_s=DEADLINE_S)
        optimizer = sync.AveragingOptimizer(inner, gossip)
        return Running(network, inner, optimizer, optimizer.step, optimizer.sync, optimizer.close)

    return make


def cases() -> Iterator[Trained]:
    """Everything that trains, and settings with more under way at the time."""
    yield from everything()
    diloco = sync.DiLoCo()
    yield Trained("delayed", _averaged(every=4, delay=4, method="int4"))
    yield Trained("streaming", _averaged(every=4, fragments=2, delay=2, outer=diloco, method="topk:0.2"))
    yield Trained("progress", _averaged(every=4, delay=3, merge="progress", method="int4", moments="average"))
    yield Trained("rising", _averaged(every=sync.Increasing(1, 4, 3), warmup=2, outer=sync.SlowMo()))
    yield Trained("drifting", _averaged(every=sync.DriftTriggered(0.02, 5), outer=sync.BMUF(0.5), moments="reset"))
    yield Trained("choco", _mixed(sync.CHOCO("topk:0.2+int8", 0.3), "ring", 3))
    yield Trained("pushing", _mixed(sync.SGP(), "one-peer", sync.Increasing(1, 4, 3)))


# Two runs ---------------------------------------------------------------------------------------------------------


def without_break(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Train by each of these, save after seven steps and go on: what each has at the end."""
    return {trained.name: _tried(_saved, trained, rank, folder) for trained in cases() if trained.name in names}


def taken_up(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Load what was saved, and do the steps that are left."""
    return {trained.name: _tried(_loaded, trained, rank, folder) for trained in cases() if trained.name in names}


def _tried(act: Act, trained: Trained, rank: int, folder: str) -> dict[str, Any]:
    try:
        with patch("gradwire.reducers.aggregate.private.add_noise", torch.Tensor.add_):  # else no run is like another
            return act(trained, rank, Path(folder) / trained.name.replace("/", "-"))
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _adam(network: nn.Module) -> Optimizer:
    return torch.optim.Adam(network.parameters(), lr=0.01)


def _trains(running: Running, rank: int, begin: int, end: int) -> None:
    for step in range(begin, end):
        loss_of(running.network, step, rank, torch.float32).backward()
        running.step()
        running.inner.zero_grad()


def _held(network: nn.Module) -> dict[str, Tensor]:
    """This rank's part of a model's parameters and buffers."""
    tensors = network.state_dict(keep_vars=True)
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}


def _saved(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    network = model(torch.float32)
    running = trained.make(network, _adam)
    with contextlib.closing(running):
        _trains(running, rank, 0, SAVED)
        try:
            gradwire.save(folder, running.trains)
        except StateError as error:
            running.finish()
            return {"refused": str(error), "written": folder.exists()}
        in_order = [parameter for group in running.inner.param_groups for parameter in group["params"]]
        inner = running.inner.state_dict()
        inner["state"] = held_state(inner["state"], in_order)
        own = {"model": {name: tensor.detach().clone() for name, tensor in _held(network).items()}, "inner": inner}
        torch.save(own, folder / f"own{rank}.pt")
        before = _digest(network)
        ended = _ended(running, network, rank)
        return {"moved": ended["own"] != before, **ended}


def _loaded(trained: Trained, rank: int, folder: Path) -> dict[str, Any]:
    network = model(torch.float32)
    running = trained.make(network, _adam)
    with contextlib.closing(running):
        own = folder / f"own{rank}.pt"
        if not own.exists():
            running.finish()
            return {}
        saved = torch.load(own, weights_only=True)
        with torch.no_grad():
            for name, tensor in _held(network).items():
                tensor.copy_(saved["model"][name])
        step = gradwire.load(folder, running.trains)
        if not isinstance(running.trains, Optimizer):
            in_order = [parameter for group in running.inner.param_groups for parameter in group["params"]]
            state = sharded_state(saved["inner"]["state"], in_order)
            running.inner.load_state_dict({**saved["inner"], "state": state})
        return {"step": step, **_ended(running, network, rank)}


def _ended(running: Running, network: nn.Module, rank: int) -> dict[str, Any]:
    """The bits of this rank's model after the last step, and after the end."""
    _trains(running, rank, SAVED, STEPS)
    own = _digest(network)
    running.finish()
    return {"own": own, "end": _digest(network)}


def _digest(network: nn.Module) -> str:
    return digest(_held(network).values())
