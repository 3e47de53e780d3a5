"""What each rank does in the tests of optimizers that are compression: plain loops without DDP."""

from __future__ import annotations

import hashlib
import io
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.core.errors import CommunicationError
from gradwire.session import Session
from gradwire.sync.optimizers import DeMo, Dion, OneBitAdam, SharedOptimizer, ZeroOneAdam

STEPS = 8
DEADLINE_S = 60.0

Make = Callable[..., SharedOptimizer]


def one_bit_adam(network: nn.Module, **more: Any) -> OneBitAdam:
    return OneBitAdam(network, 1e-2, weight_decay=0.1, freeze_step=3, method="sign:64", **more)


def demo(network: nn.Module, **more: Any) -> DeMo:
    return DeMo(network, 1e-3, weight_decay=0.1, density=1 / 8, **more)


def dion(network: nn.Module, **more: Any) -> Dion:
    return Dion(network, 1e-2, weight_decay=0.1, rank=4, **more)


def dion_orthonormal(network: nn.Module, **more: Any) -> Dion:
    return Dion(network, 1e-2, rank=4, right="orthonormal", adam=("0.*",), **more)


def dion_every_matrix(network: nn.Module, **more: Any) -> Dion:
    """Of full rank in both matrices."""
    return Dion(network, 1e-2, rank=30, every_matrix=True, **more)


def zero_one_adam(network: nn.Module, **more: Any) -> ZeroOneAdam:
    """Refreshes in steps 0, 1, 2 and 4, exchanges in 3 and 5, then two steps alone, an exchange, and one alone."""
    return ZeroOneAdam(network, 1e-2, weight_decay=0.1, method="sign:64", **policy(1), **more)


def policy(local_step_scaler: int) -> dict[str, Any]:
    """Refreshes in steps 0, 1, 2 and 4, and up to two steps alone between exchanges."""
    return {
        "var_freeze_step": 5,
        "var_update_scaler": 2,
        "local_step_scaler": local_step_scaler,
        "local_step_clipper": 3,
    }


def zero_one_adam_without_loss(network: nn.Module, **more: Any) -> ZeroOneAdam:
    """No steps alone."""
    return ZeroOneAdam(network, 1e-2, var_update_scaler=1, local_step_clipper=1, method="none", **more)


def one_bit_adam_without_loss(network: nn.Module, **more: Any) -> OneBitAdam:
    return OneBitAdam(network, 1e-2, freeze_step=3, method="none", **more)


def demo_without_loss(network: nn.Module, **more: Any) -> DeMo:
    return DeMo(network, 1e-3, density=1.0, values="fp32", **more)


LOSSY: dict[str, Make] = {
    "one_bit_adam": one_bit_adam,
    "zero_one_adam": zero_one_adam,
    "demo": demo,
    "dion": dion,
    "dion_orthonormal": dion_orthonormal,
    "dion_every_matrix": dion_every_matrix,
}
LOSSLESS: dict[str, Make] = {
    **LOSSY,
    "one_bit_adam": one_bit_adam_without_loss,
    "zero_one_adam": zero_one_adam_without_loss,
    "demo": demo_without_loss,
}


def model() -> nn.Module:
    """Alike on every processor, which the generators of torch are not."""
    network = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8), nn.LayerNorm(8))
    with torch.no_grad():
        for parameter in network.parameters():
            drawn = (torch.arange(parameter.numel()) * 7919) % 257 - 128
            parameter.copy_(drawn.view(parameter.shape) / 512)
    return network


def give_gradients(network: nn.Module, step: int, rank: int) -> None:
    """Gradients that most ranks have in common: no element of their mean is near zero."""
    shared = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 * (rank + 1) + step)
    for parameter in network.parameters():
        sizes = 0.5 + torch.rand(parameter.shape, generator=shared)
        signs = torch.randint(0, 2, parameter.shape, generator=shared) * 2 - 1
        parameter.grad = sizes * signs + 0.2 * torch.rand(parameter.shape, generator=own)


def give_mean_gradients(network: nn.Module, step: int, world_size: int) -> None:
    """The mean of what `give_gradients` gives all ranks."""
    total = [torch.zeros_like(p) for p in network.parameters()]
    for rank in range(world_size):
        give_gradients(network, step, rank)
        for into, parameter in zip(total, network.parameters(), strict=True):
            into.add_(gradient_of(parameter))
    for parameter, into in zip(network.parameters(), total, strict=True):
        parameter.grad = into / world_size


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def digest(network: nn.Module) -> str:
    whole = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    return hashlib.blake2b(whole.numpy().tobytes(), digest_size=8).hexdigest()


def run(
    optimizer: SharedOptimizer,
    network: nn.Module,
    rank: int,
    steps: range,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    for step in steps:
        give_gradients(network, step, rank)
        if step % 3 == rank % 3:
            network.get_parameter("3.bias").grad = None  # this rank did not use it
        if scaler is None:
            optimizer.step()
        else:
            step_scaled(optimizer, network, scaler, overflows=step in (1, 4) and rank == step % 3)


def step_scaled(optimizer: SharedOptimizer, network: nn.Module, scaler: torch.amp.GradScaler, overflows: bool) -> None:
    """A step as a loop with a scaler makes it; where it overflows this rank's scaler would skip it."""
    scale = scaler.scale(torch.ones(()))
    for parameter in network.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    if overflows:
        gradient_of(network.get_parameter("0.weight"))[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()


def scaler_of(rank: int) -> torch.amp.GradScaler:
    """Ranks have scales of their own."""
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank), growth_interval=2)


def alike(rank: int, world_size: int) -> dict[str, Any]:
    """Train by each optimizer: what the parameters are in the end, and what was sent."""
    torch.set_num_threads(1 + rank % 2)
    found: dict[str, Any] = {}
    for name, make in LOSSY.items():
        network = model()
        optimizer = make(network, grain_numel=500, deadline_s=DEADLINE_S)
        run(optimizer, network, rank, range(STEPS))
        if isinstance(optimizer, ZeroOneAdam):
            optimizer.sync()
        stats = optimizer.stats()
        found[name] = {"digest": digest(network), "steps": stats.steps, "ratio": stats.ratio, "bytes": stats.wire_bytes}
        optimizer.close()
    return found


def by_mean(rank: int, world_size: int) -> dict[str, float]:
    """How far training on n ranks ends from training in one process on the mean, by the length of the way."""
    alone = [dist.new_group([i]) for i in range(world_size)][rank]
    found: dict[str, float] = {}
    for name, make in LOSSLESS.items():
        together, apart = model(), model()
        first = make(together, deadline_s=DEADLINE_S)
        second = make(apart, group=alone, deadline_s=DEADLINE_S)
        for step in range(STEPS):
            give_gradients(together, step, rank)
            first.step()
            give_mean_gradients(apart, step, world_size)
            second.step()
        found[name] = distance(together, apart) / distance(apart, model())
        first.close()
        second.close()
    return found


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def resumed(rank: int, world_size: int, breaks: list[int]) -> dict[str, list[str]]:
    """Digests of training in one go, and of training that was interrupted after so many steps."""
    found: dict[str, list[str]] = {}
    for name, make in LOSSY.items():
        network = model()
        optimizer = make(network, deadline_s=DEADLINE_S)
        run(optimizer, network, rank, range(STEPS))
        optimizer.close()
        found[name] = [digest(network), *(interrupted(make, rank, after) for after in breaks)]
    return found


def interrupted(make: Make, rank: int, after: int, scaled: bool = False) -> str:
    network, scaler = model(), scaler_of(rank) if scaled else None
    optimizer = make(network, deadline_s=DEADLINE_S)
    run(optimizer, network, rank, range(after), scaler)
    file, holders = io.BytesIO(), {"model": network, "optimizer": optimizer} | ({"scaler": scaler} if scaler else {})
    torch.save({key: holder.state_dict() for key, holder in holders.items()}, file)
    optimizer.close()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = model()
    second = make(again, deadline_s=DEADLINE_S, seed=99)
    again.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    if scaler:
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        scaler.load_state_dict(saved["scaler"])
    run(second, again, rank, range(after, STEPS), scaler)
    second.close()
    return digest(again)


def under_scalers(rank: int, world_size: int) -> dict[str, list[Any]]:
    """Scalers that find infinities on one rank only: a whole run, an interrupted one, and one without a scaler."""
    found: dict[str, list[Any]] = {}
    for name, make in LOSSY.items():
        network, plain, scaler = model(), model(), scaler_of(rank)
        optimizer, without = make(network, deadline_s=DEADLINE_S), make(plain, deadline_s=DEADLINE_S)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a scaler explains what is not finite
            run(optimizer, network, rank, range(STEPS), scaler)
        skipped = [step for step in range(STEPS) if step in (1, 4) and step % 3 < world_size]
        for step in range(STEPS):
            if step in skipped:
                give_gradients(plain, step, rank)
                gradient_of(plain.get_parameter("0.weight"))[0, 0] = torch.nan
                without.step()
            else:
                run(without, plain, rank, range(step, step + 1))
        counted = [STEPS - optimizer.param_groups[0]["step"], len(skipped)]
        optimizer.close()
        without.close()
        found[name] = [digest(network), interrupted(make, rank, 3, scaled=True), digest(plain), *counted]
    return found


def unscaled_by_the_loop(rank: int, world_size: int) -> list[Any]:
    """The loop unscales and repairs gradients itself on the last rank; its scaler would skip the step all the same."""
    network, scaler = model(), scaler_of(rank)
    optimizer = LOSSY["demo"](network, deadline_s=DEADLINE_S)
    give_gradients(network, 0, rank)
    if rank == world_size - 1:
        gradient_of(network.get_parameter("0.weight"))[0, 0] = torch.inf
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    for parameter in network.parameters():
        gradient_of(parameter).nan_to_num_(0.0, 0.0, 0.0)
    scaler.step(optimizer)
    found = [digest(network) == digest(model()), optimizer.param_groups[0]["step"]]
    optimizer.close()
    return found


def told(rank: int, world_size: int) -> list[Any]:
    """The last rank's gradient cannot be combined: what each rank is told, and in how many seconds."""
    network = nn.Embedding(10, 4, sparse=rank == world_size - 1)
    optimizer = DeMo(network, deadline_s=DEADLINE_S)
    network(torch.tensor([1, 2])).sum().backward()
    began, said = time.monotonic(), "nothing"
    try:
        optimizer.step()
    except gradwire.GradwireError as error:
        said = f"{type(error).__name__}: {error}"
    dist.monitored_barrier()
    optimizer.close()
    return [said, time.monotonic() - began]


def not_finite(rank: int, world_size: int) -> dict[str, list[Any]]:
    """The last rank's gradient is not finite in some steps: is each of them skipped, and how does it end?"""
    found: dict[str, list[Any]] = {}
    for name, make in LOSSY.items():
        network = model()
        optimizer = make(network, deadline_s=DEADLINE_S)
        skipped: list[bool] = []
        for step in range(STEPS):
            give_gradients(network, step, rank)
            bad = step in (1, 5)
            if bad and rank == world_size - 1:
                gradient_of(network.get_parameter("2.weight"))[3, 4] = float("inf" if step == 1 else "nan")
            before = digest(network)
            optimizer.step()
            skipped.append((digest(network) == before) == bad)
        whole = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
        found[name] = [all(skipped), bool(whole.isfinite().all()), digest(network), optimizer.param_groups[0]["step"]]
        optimizer.close()
    return found


def absent(rank: int, world_size: int) -> str:
    """The last rank does not come to the second step."""
    network = model()
    optimizer = LOSSY["demo"](network, deadline_s=3.0)
    run(optimizer, network, rank, range(1))
    told = "nothing"
    if rank != world_size - 1:
        give_gradients(network, 1, rank)
        try:
            optimizer.step()
        except CommunicationError as error:
            told = str(error)
    dist.monitored_barrier()
    optimizer.close()
    return told


def zero_one_by_hand(rank: int, world_size: int) -> dict[str, Any]:
    """How far 0/1 Adam is from its paper's lines after each step, in which ranks were alike, and its bytes."""
    network, lr, (beta1, beta2), eps = model(), 1e-2, (0.9, 0.99), 1e-6
    optimizer = ZeroOneAdam(network, lr, (beta1, beta2), eps, method="none", deadline_s=DEADLINE_S, **policy(3))
    refreshes, exchanges = (0, 1, 2, 4), (3, 5, 6, 7, 9, 12, 15)
    x = [flat(model()).double()] * world_size
    m, u = ([torch.zeros_like(x[0])] * world_size for _ in range(2))
    last, v, rates, refreshed = x[0], torch.zeros_like(x[0]), 0.0, 0
    worst, alike_after = 0.0, list[bool]()
    for step in range(16):
        g = [flat_gradients(step, each) for each in range(world_size)]
        if step in refreshes:
            g = [sum(g, torch.zeros_like(v)) / world_size] * world_size
            v, refreshed = beta2 * v + (1 - beta2) * g[0].square(), refreshed + 1
        rate, root = lr / (1 - beta1 ** (step + 1)), (v / (1 - beta2**refreshed)).sqrt() + eps
        m = [beta1 * mine + (1 - beta1) * its for mine, its in zip(m, g, strict=True)]
        x = [here - rate * mine / root for here, mine in zip(x, m, strict=True)]
        u = [before + rate * mine for before, mine in zip(u, m, strict=True)]
        rates += rate
        if step in (*refreshes, *exchanges):
            mean = sum(u, torch.zeros_like(v)) / world_size
            m, x = [mean / rates] * world_size, [last - mean / root] * world_size
            last, rates, u = x[0], 0.0, [torch.zeros_like(v)] * world_size
        give_gradients(network, step, rank)
        optimizer.step()
        worst = max(worst, float((flat(network).double() - x[rank]).abs().max()))
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, digest(network))
        alike_after.append(len(set(everyone)) == 1)
    stats, dense = optimizer.stats(), optimizer.dense.stats()
    optimizer.close()
    return {
        "far": worst / float((x[rank] - flat(model())).abs().max()),
        "alike": alike_after == [step in (*refreshes, *exchanges) for step in range(16)],
        "steps": [dense.steps, stats.steps],
        "bytes": stats.payload_bytes / flat(network).nbytes,
    }


def flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])


def flat_gradients(step: int, rank: int) -> Tensor:
    network = model()
    give_gradients(network, step, rank)
    return torch.cat([gradient_of(parameter).reshape(-1) for parameter in network.parameters()]).double()


def with_slow_averaging(rank: int, world_size: int) -> dict[str, list[bool]]:
    """Every rank trains in a group of its own, and a session averages parameters: when are they alike?"""
    alone = [dist.new_group([i]) for i in range(world_size)][rank]
    found: dict[str, list[bool]] = {}
    for name, make in LOSSY.items():
        network = model()
        optimizer = make(network, group=alone, deadline_s=DEADLINE_S)
        parameters = {key: parameter.detach() for key, parameter in network.named_parameters()}
        slow = Session(parameters, "none", deadline_s=DEADLINE_S)
        alike_after: list[bool] = []
        for step in range(STEPS):
            run(optimizer, network, rank, range(step, step + 1))
            if step % 4 == 3:
                slow.reduce_(parameters)
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, digest(network))
            alike_after.append(len(set(everyone)) == 1)
        found[name] = alike_after
        optimizer.close()
        slow.close()
    return found


def resharded(rank: int, world_size: int) -> dict[str, list[float]]:
    """One process goes on from all ranks' states: how far what it owes is from their mean, and how large that is."""
    alone = [dist.new_group([i]) for i in range(world_size)][rank]
    found: dict[str, list[float]] = {}
    for name, make in LOSSY.items():
        network, again = model(), model()
        optimizer = make(network, deadline_s=DEADLINE_S)
        second = make(again, group=alone, deadline_s=DEADLINE_S)
        run(optimizer, network, rank, range(STEPS))
        state = optimizer.state_dict()
        states: list[Any] = [None] * world_size
        dist.all_gather_object(states, state["communication"])
        second.load_state_dict({**state, "communication": gradwire.reshard(states, 1)[0]})
        again.load_state_dict(network.state_dict())
        mean = torch.stack([owed(each, world_size) for each in states]).mean(0)
        found[name] = [float((owed(second.session.state_dict(), 1) - mean).abs().max()), float(mean.abs().max())]
        run(second, again, 0, range(STEPS, STEPS + 1))
        optimizer.close()
        second.close()
    return found


def owed(state: Any, world_size: int) -> Tensor:
    """All that a rank owes of the first weight; what it owes as an owner counts for all ranks."""
    whole = torch.zeros(40 * 30)
    for path, pieces in state["parameters"].get("0.weight", {}).items():
        for piece in pieces:
            values = piece["values"].reshape(-1)
            if path.endswith(("residual", "momentum", "owner")):
                share = world_size if path.endswith("owner") else 1
                whole[piece["start"] : piece["start"] + values.numel()] += share * values
    return whole
