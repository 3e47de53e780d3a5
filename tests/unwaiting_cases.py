"""What each rank does in the tests of optimizers that do not wait."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import AttachError, CommunicationError, StepError
from gradwire.asynchronous import AsynchronousOptimizer, Bounded, HogwildOptimizer, Sending, parse
from gradwire.asynchronous.remote_servers import GrantedValues, RemoteServers
from gradwire.codecs import TopK
from gradwire.core.version import VERSION
from sync_cases import flat

DEADLINE_S = 30.0


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def sgd(network: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(network.parameters(), lr=0.125, momentum=0.5)


def loss_of(network: nn.Module, step: int, rank: int, examples: int = 8) -> Tensor:
    inputs = torch.randn(examples, 5, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (network(inputs) - inputs[:, :2].sin()).square().mean()


def held_out(network: nn.Module) -> float:
    return float(loss_of(network, 0, 999, examples=1000).detach())


def local_step(network: nn.Module, inner: torch.optim.Optimizer, step: int, rank: int) -> float:
    inner.zero_grad()
    loss = loss_of(network, step, rank)
    loss.backward()
    inner.step()
    return float(loss.detach())


def no_staleness(rank: int, world_size: int) -> float:
    """How far ranks that wait for all others are from the mean of what all inner optimizers would do.

    The last one joins late, when the others could have pushed.
    """
    network, reference = model(), model()
    join = RemoteServers.join

    def late(servers: RemoteServers) -> GrantedValues:
        time.sleep(0.5 * (rank == world_size - 1))
        return join(servers)

    theirs, worst = sgd(reference), 0.0
    with patch.object(RemoteServers, "join", late):
        optimizer = AsynchronousOptimizer(sgd(network), network, pace=Bounded(0), deadline_s=DEADLINE_S)
    for step in range(6):
        local_step(network, optimizer, step, rank)
        local_step(reference, theirs, step, rank)
        mean = flat(reference)
        dist.all_reduce(mean)
        with torch.no_grad():
            nn.utils.vector_to_parameters((mean / world_size).float(), list(reference.parameters()))
        worst = max(worst, float((flat(network) - flat(reference)).abs().max()))
    optimizer.finish()
    optimizer.close()
    return worst


def uneven(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """Rank 0 is slow; what each rank did, and what came of it."""
    network = model()
    steps, first = 0, held_out(network)
    with parse(spec).optimizer(sgd(network), network, deadline_s=DEADLINE_S) as optimizer:
        while optimizer.version < 80 * world_size:
            local_step(network, optimizer, steps, rank)
            steps += 1
            if rank == 0:
                time.sleep(0.05)
        with optimizer.evaluating():
            seen = flat(network)
        again = flat(network)
        optimizer.finish()
    stats = optimizer.stats()
    assert (stats.steps, stats.wire_bytes, stats.wait_s) == (steps, optimizer.sent_bytes, optimizer.waited_s)
    with pytest.raises(StepError, match="has finished"):
        optimizer.step()
    return {
        "steps": steps,
        "first": first,
        "last": held_out(network),
        "model": flat(network).tolist(),
        "finite": bool(seen.isfinite().all() and again.isfinite().all()),
        "sent": optimizer.sent_bytes,
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What is said of other models, of other frames, of numbers that are not finite, and of steps after the end."""
    said: dict[str, str] = {}
    network = model()
    with torch.no_grad():
        next(network.parameters()).add_(rank)
    for kind in (AsynchronousOptimizer, HogwildOptimizer):
        try:
            kind(sgd(network), network, deadline_s=DEADLINE_S)
        except AttachError as error:
            said[kind.__name__] = str(error)
    network = model()
    version = "0.0.1" if rank == world_size - 1 else VERSION
    with patch("gradwire.asynchronous.optimizer.VERSION", version):
        try:
            AsynchronousOptimizer(sgd(network), network, deadline_s=DEADLINE_S)
        except AttachError as error:
            said["version"] = str(error)
    sending = Sending(TopK(0.5), 1.0)
    optimizer = AsynchronousOptimizer(sgd(network), network, sending=sending, deadline_s=DEADLINE_S)
    before = flat(network)
    with torch.no_grad():
        next(network.parameters()).fill_(float("nan"))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except StepError as error:
        said["nan"] = str(error)
    optimizer.finish()
    said["untouched"] = str(torch.equal(flat(network), before))
    try:
        optimizer.step()
    except StepError as error:
        said["finished"] = str(error)
    optimizer.close()
    return said


def one_ends(rank: int, world_size: int) -> dict[str, Any]:
    """The last rank closes in the middle, which takes its part of the parameters away."""
    network = model()
    optimizer = AsynchronousOptimizer(sgd(network), network, deadline_s=DEADLINE_S)
    try:
        for step in range(10**6):
            local_step(network, optimizer, step, rank)
            if rank == world_size - 1 and step == 3:
                return {}
    except CommunicationError as error:
        return {"said": str(error), "ranks": list(error.ranks)}
    finally:
        optimizer.close()
        dist.barrier()
    return {}


def one_memory(rank: int, world_size: int) -> dict[str, Any]:
    """Steps of whole numbers by one rank after another: none is lost, and each sees those before."""
    network = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(network.weight)
    optimizer = HogwildOptimizer(torch.optim.SGD(network.parameters(), lr=float(world_size)), network)
    seen: list[float] = []
    for turn in range(2 * world_size):
        dist.barrier()
        if turn % world_size == rank:
            seen.append(float(network.weight.detach()[0, 0]))
            network.weight.grad = -torch.ones(1, 3)
            optimizer.step()
    dist.barrier()
    version = optimizer.version
    with optimizer.evaluating(), torch.no_grad():
        network.weight.fill_(100.0)
        dist.barrier()
    dist.barrier()
    shared = network.weight.detach().clone()
    optimizer.finish()
    with torch.no_grad():
        network.weight.add_(rank)  # a copy of its own
    dist.barrier()
    return {"seen": seen, "version": version, "shared": shared.tolist(), "own": network.weight.tolist()}
