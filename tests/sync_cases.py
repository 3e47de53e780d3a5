"""What each rank does in the tests of `gradwire.sync`: small models, trained with rare averages."""

import copy
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.sync import (
    BMUF,
    Averaging,
    AveragingOptimizer,
    DiLoCo,
    DriftTriggered,
    Hierarchical,
    Increasing,
    LocalSGD,
    Mean,
    Outer,
    SlowMo,
)
from gradwire.sync.moments import Moments

STEPS = 12
DEADLINE_S = 30.0

OUTERS: dict[str, Outer] = {
    "mean": Mean(),
    "diloco": DiLoCo(),
    "slowmo": SlowMo(0.6, 0.9),
    "bmuf": BMUF(0.5),
}
METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "int4": {"method": "int4"},
    "sparse": {"method": "topk:0.2+int2", "outer": DiLoCo(0.7, 0.5)},
    "powersgd": {"method": "powersgd:2"},
    "warm": {"warmup": 3, "outer": DiLoCo()},
    "diloco": {"outer": DiLoCo()},
    "slowmo": {"outer": SlowMo()},
    "bmuf": {"outer": BMUF(0.5)},
    "moments": {"moments": "average"},
    "forgetful": {"moments": "reset", "outer": SlowMo()},
    "streaming": {"outer": DiLoCo(), "fragments": 2, "delay": 1},
    "late": {"delay": 4, "method": "int4"},
    "progress": {"delay": 3, "merge": "progress", "method": "int4", "moments": "average"},
    "rising": {"every": Increasing(1, 4, 3)},
    "drift": {"every": DriftTriggered(0.01, 5)},
}
"""Settings of every kind, each of which resumes exactly."""


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same on all processors, which PyTorch's random numbers are not."""
    network = nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 4))
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            values = torch.arange(parameter.numel()) * 37 + 11 * number
            parameter.copy_((values % 101 - 50).view(parameter.shape) / 128)
    return network.to(dtype)


def loss_of(network: nn.Module, step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return network(torch.randn(8, 12, generator=generator).to(dtype)).square().mean()


def digest(tensors: Iterable[Tensor]) -> str:
    whole = b"".join(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


def flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])


def adam(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), 0.02)


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), 0.1)


def wrapped(
    make: Callable[[nn.Module], torch.optim.Optimizer], network: nn.Module, settings: dict[str, Any]
) -> LocalSGD:
    whole: dict[str, Any] = {"every": 4, "deadline_s": DEADLINE_S, **settings}
    return LocalSGD(make(network), network, **whole)


def trained(rank: int, make: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **settings: Any) -> nn.Module:
    """A model after some steps under `LocalSGD`, and a final average."""
    network = model()
    with wrapped(make, network, settings) as optimizer:
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            loss_of(network, step, rank).backward()
            optimizer.step()
        optimizer.sync()
    return network


def far(one: nn.Module, other: nn.Module) -> float:
    return float((flat(one) - flat(other)).abs().max())


# Equalities ---------------------------------------------------------------------------------------------------------


def next_to_ddp(rank: int, world_size: int) -> list[float]:
    """How far LocalSGD with windows of one step is from DDP, step after step; BatchNorm would see other means."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    ddp = DDP(copy.deepcopy(network))
    plain, found = sgd(ddp), list[float]()
    with LocalSGD(sgd(network), network, 1, deadline_s=DEADLINE_S) as optimizer:
        for step in range(STEPS):
            for trains, it in ((network, optimizer), (ddp, plain)):
                it.zero_grad()
                loss_of(trains, step, rank).backward()
                it.step()
            found.append(far(network, ddp))
    return found


def equalities(rank: int, world_size: int) -> dict[str, float]:
    """How far methods are from LocalSGD where they should be the same."""
    plain = trained(rank)
    return {
        "slowmo": far(plain, trained(rank, outer=SlowMo(beta=0.0, alpha=1.0))),
        "diloco": far(plain, trained(rank, outer=DiLoCo(lr=1.0, momentum=0.0))),
        "bmuf": far(plain, trained(rank, outer=BMUF(momentum=0.0))),
        "moved": far(plain, model()),
        "other": far(plain, trained(rank, outer=DiLoCo())),
        "streaming": far(trained(rank, outer=DiLoCo()), trained(rank, outer=DiLoCo(), fragments=1, delay=0)),
        "fragments": far(plain, trained(rank, fragments=2)),
        "progress": far(on_a_slope(rank), on_a_slope(rank, delay=3, merge="progress")),
        "late progress": far(on_a_slope(rank), on_a_slope(rank, delay=4, merge="progress")),
        "merged": far(on_a_slope(rank), on_a_slope(rank, delay=3)),
    }


def on_a_slope(rank: int, **settings: Any) -> nn.Module:
    """A model whose gradients do not depend on where it is, so that its end is the sum of all steps that count."""
    network = nn.Linear(6, 1, bias=False).double()
    nn.init.zeros_(network.weight)
    with wrapped(sgd, network, settings) as optimizer:
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + rank)
            network(torch.randn(6, generator=generator).double()).sum().backward()
            optimizer.step()
        optimizer.sync()
    return network


def by_hand(rank: int, world_size: int) -> dict[str, float]:
    """How far each outer step is from what its paper's equation gives, computed from all ranks' parameters."""
    rules: dict[str, Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]] = {
        "mean": lambda x, mean, kept: mean,
        "diloco": _sgd_step,
        "slowmo": _slowmo_step,
        "bmuf": _bmuf_step,
    }
    found: dict[str, float] = {}
    for name, rule in rules.items():
        network, other = model(), model()
        start, kept, worst = flat(other), dict[str, Tensor](), 0.0
        inner = sgd(other)
        with LocalSGD(sgd(network), network, 3, outer=OUTERS[name], deadline_s=DEADLINE_S) as optimizer:
            for step in range(STEPS):
                for trains, it in ((network, optimizer), (other, inner)):
                    it.zero_grad()
                    loss_of(trains, step, rank).backward()
                    it.step()
                if step % 3 == 2:
                    mean = flat(other)
                    dist.all_reduce(mean)
                    start = rule(start, mean / world_size, kept)
                    nn.utils.vector_to_parameters(start.clone(), other.parameters())
                    worst = max(worst, far(network, other))
        found[name] = worst
    return found


def cocod_by_hand(rank: int, world_size: int) -> list[float]:
    """How far `merge="progress"`, one window late, is from CoCoD-SGD (Shen et al. 2019, Algorithm 1) at each round.

    While k local steps are made from x_i, the mean of all x_i is on its way; then x_i = that mean + what they changed.
    """
    period, found = 3, list[float]()
    network, other = model(), model()
    inner, began = sgd(other), flat(other)
    with wrapped(sgd, network, {"every": period, "delay": period, "merge": "progress"}) as optimizer:
        for step in range(5 * period):
            for trains, it in ((network, optimizer), (other, inner)):
                it.zero_grad()
                loss_of(trains, step, rank).backward()
                it.step()
            if step % period == period - 1:
                mean = began.clone()
                dist.all_reduce(mean)
                began = mean / world_size + (flat(other) - began)
                nn.utils.vector_to_parameters(began.clone(), other.parameters())
                found.append(far(network, other))
    return found


def _sgd_step(x: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> Tensor:
    gradient = x - mean
    kept["b"] = 0.9 * kept["b"] + gradient if kept else gradient
    return x - 0.7 * (gradient + 0.9 * kept["b"])


def _slowmo_step(x: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> Tensor:
    kept["u"] = 0.6 * kept.get("u", torch.zeros_like(x)) + (x - mean) / 0.1
    return x - 0.9 * 0.1 * kept["u"]


def _bmuf_step(x: Tensor, mean: Tensor, kept: dict[str, Tensor]) -> Tensor:
    """Chen & Huo: W is what is filtered, and W_g = W + eta D what a block begins with."""
    filtered, update = kept.get("W", x), kept.get("D", torch.zeros_like(x))
    kept["D"] = 0.5 * update + (mean - x)
    kept["W"] = filtered + kept["D"]
    return kept["W"] + 0.5 * kept["D"]


def equal_copies(rank: int, world_size: int) -> dict[str, list[str]]:
    """Digests of the global copy after each window, and of the whole model at the end, on every rank."""
    found: dict[str, list[str]] = {}
    for name, settings in METHODS.items():
        network, seen = model(torch.float32), list[str]()
        with wrapped(adam, network, settings) as optimizer:
            for step in range(STEPS + 1):
                optimizer.zero_grad()
                loss_of(network, step, rank, torch.float32).backward()
                optimizer.step()
                seen.append(digest(optimizer.averaging.global_copy().values()))
            optimizer.sync()
            seen.append(digest(network.state_dict().values()))
        found[name] = seen
    return found


# Resuming -----------------------------------------------------------------------------------------------------------


def resumed(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """For each method the digests of a run without a break, and of one that went on from files in mid-window."""
    found: dict[str, list[str]] = {}
    for name, settings in METHODS.items():
        for breaks in (False, True):
            found.setdefault(name, []).append(_run(rank, settings, f"{folder}/{name}-{rank}.pt" if breaks else None))
    return found


def _run(rank: int, settings: dict[str, Any], path: str | None) -> str:
    """A run under a scaler that skips a step on one rank, with a scheduler; with a path it breaks off and goes on."""

    def parts() -> tuple[nn.Module, LocalSGD, Any, torch.amp.GradScaler]:
        network = model(torch.float32)
        optimizer = wrapped(adam, network, settings)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return network, optimizer, decay, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    network, optimizer, decay, scaler = parts()
    for step in range(STEPS):
        if path and step == 5:
            holders = {"model": network, "optimizer": optimizer, "decay": decay, "scaler": scaler}
            torch.save({key: holder.state_dict() for key, holder in holders.items()}, path)
            optimizer.close()
            network, optimizer, decay, scaler = parts()
            saved = torch.load(path, weights_only=True)
            network.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            decay.load_state_dict(saved["decay"])
            scaler.load_state_dict(saved["scaler"])
        optimizer.zero_grad()
        loss = loss_of(network, step, rank, torch.float32)
        if step in (3, 7) and rank == step % 2:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        decay.step()
    copies = digest(optimizer.averaging.global_copy().values())
    last = digest(network.state_dict().values())
    counted = optimizer.averaging.steps
    optimizer.close()
    return f"{copies} {last} {counted}"


def saves(rank: int, world_size: int, folder: str) -> str:
    """Save a run and this rank's model in mid-window and at a window's end; return how it ended."""
    network = model(torch.float32)
    with wrapped(adam, network, {"method": "int4", "outer": DiLoCo()}) as optimizer:
        for step in range(STEPS):
            if step in (6, 8):
                gradwire.save(f"{folder}/{step}", optimizer)
                torch.save(network.state_dict(), f"{folder}/{step}/model-{rank}.pt")
            _train(network, optimizer, step, rank)
    return digest(network.state_dict().values())


def loads(rank: int, world_size: int, folder: str, step: int) -> dict[str, Any]:
    """Go on from a save: how it ended, what was refused, and the mean over ranks of what is owed after loading."""
    network, found = model(torch.float32), dict[str, Any]()
    with wrapped(adam, network, {"method": "int4", "outer": DiLoCo()}) as optimizer:
        before = copy.deepcopy(optimizer.state_dict())
        found["refused"] = told(lambda: found.update(step=gradwire.load(f"{folder}/{step}", optimizer)))
        if "step" not in found:
            found["unchanged"] = repr(optimizer.state_dict()) == repr(before)
            return found
        network.load_state_dict(torch.load(f"{folder}/{step}/model-{rank}.pt", weights_only=True))
        residual = owed(optimizer.state_dict())
        dist.all_reduce(residual)
        found["owed"] = float((residual / world_size).norm())
        for later in range(step, STEPS):
            _train(network, optimizer, later, rank)
    return found | {"end": digest(network.state_dict().values())}


def _train(network: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    loss_of(network, step, rank, torch.float32).backward()
    optimizer.step()


def owed(state: dict[str, Any]) -> Tensor:
    """What this rank owes of the first weight; what it owes as an owner counts for all ranks."""
    session = state["sync"]["fragments"][0]["session"]
    whole = torch.zeros(120)
    for path, pieces in session["parameters"].get("0.weight", {}).items():
        share = session["world_size"] if path.startswith("owned") else 1
        for piece in pieces:
            whole[piece["start"] : piece["start"] + piece["values"].numel()] += share * piece["values"].reshape(-1)
    return whole


# A scaler -----------------------------------------------------------------------------------------------------------


def scaled(rank: int, world_size: int) -> dict[str, Any]:
    """A scaler's run next to one without, and what a rank that skips counts."""
    plain, network = model(torch.float32), model(torch.float32)
    inner, scaler = adam(plain), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    with wrapped(adam, network, {"every": 100}) as optimizer:
        for step in range(4):
            inner.zero_grad()
            loss_of(plain, step, rank, torch.float32).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1) if step % 2 else None
            inner.step()
            optimizer.zero_grad()
            scaler.scale(loss_of(network, step, rank, torch.float32)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(network.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        same = torch.equal(flat(plain), flat(network))
        before, scale = flat(network), scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale(loss_of(network, 5, rank, torch.float32) * (float("inf") if rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return {
            "same": same,
            "steps": optimizer.averaging.steps,
            "moved": not torch.equal(before, flat(network)),
            "scale": scaler.get_scale() / scale,
        }


# Experts, buffers, moments ----------------------------------------------------------------------------------------


def experts(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank trains an expert of its own; how far what all have then is from the mean, by name."""
    torch.manual_seed(0)
    network = nn.ModuleDict({f"expert{i}": nn.Linear(5, 5) for i in range(world_size)}).double()
    alone = copy.deepcopy(network)
    inner = torch.optim.Adam(alone.parameters(), 0.1)
    with LocalSGD(
        torch.optim.Adam(network.parameters(), 0.1), network, 2, moments="average", deadline_s=DEADLINE_S
    ) as optimizer:
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(3, 5, generator=generator).double()
            for trains, it in ((network, optimizer), (alone, inner)):
                it.zero_grad()
                trains[f"expert{rank}"](x).square().mean().backward()
                it.step()
        unused = [p for p in network.parameters() if p.grad is None]
        moment = optimizer.state[network.get_parameter(f"expert{rank}.weight")]["exp_avg"]
        its = inner.state[alone.get_parameter(f"expert{rank}.weight")]["exp_avg"]
        mean = flat(alone)
        dist.all_reduce(mean)
        return {
            "unused": len(unused),
            "without_state": sum(p not in optimizer.state for p in unused),
            "far": float((flat(network) - mean / world_size).abs().max()),
            "moment": float((moment - its / world_size).abs().max()),
        }


def buffers(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Each policy's buffers of BatchNorm after a window of which ranks have seen other data."""
    found: dict[str, dict[str, Any]] = {}
    for policy in ("average", "rank0", "own"):
        network, alone = model(), model()
        with Averaging(network, 2, buffers=policy, deadline_s=DEADLINE_S) as averaging:
            for step in range(2 + rank):
                loss_of(alone, step, rank)
                loss_of(network, step, rank)
            for _ in range(2):
                averaging.step()
        mine = alone.get_buffer("1.running_mean")
        mean = mine.clone()
        dist.all_reduce(mean)
        theirs = network.get_buffer("1.running_mean")
        found[policy] = {
            "digest": digest(network.buffers()),
            "to_mean": float((theirs - mean / world_size).abs().max()),
            "to_own": float((theirs - mine).abs().max()),
            "seen": int(network.get_buffer("1.num_batches_tracked")),
        }
    return found


def without_a_wrapper(rank: int, world_size: int) -> dict[str, Any]:
    """The loop's form trains what the wrapper does; evaluating in mid-window sees one model on all ranks."""
    network, inside = model(), list[str]()
    inner = sgd(network)
    with Averaging(network, 4, outer=DiLoCo(), deadline_s=DEADLINE_S) as averaging:
        ended: list[bool] = []
        for step in range(STEPS + 1):
            inner.zero_grad()
            loss_of(network, step, rank).backward()
            inner.step()
            ended.append(averaging.step())
            own = digest(network.parameters())
            with averaging.evaluating():
                inside.append(digest(network.parameters()))
            assert digest(network.parameters()) == own
        averaging.sync()
        averaging.sync()  # changes nothing
    whole = trained(rank, outer=DiLoCo())
    return {"ended": ended, "inside": inside, "same": torch.equal(flat(network), flat(whole))}


def hierarchy(rank: int, world_size: int) -> dict[str, Any]:
    """Pairs of ranks average every 2 steps, all four every 4; how far each rank is from what that means."""
    network, other = model(), model()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    assert isinstance(pair, dist.ProcessGroup)
    inside = Averaging(network, 2, group=pair, deadline_s=DEADLINE_S)
    averaging = Hierarchical(inside, Averaging(network, 4, deadline_s=DEADLINE_S))
    inner, alone = sgd(network), sgd(other)
    worst, ended, digests = 0.0, list[bool](), list[str]()
    for step in range(8):
        for trains, it in ((network, inner), (other, alone)):
            it.zero_grad()
            loss_of(trains, step, rank).backward()
            it.step()
        ended.append(averaging.step())
        if step % 2:
            mean, among = flat(other), None if step % 4 == 3 else pair
            dist.all_reduce(mean, group=among)
            nn.utils.vector_to_parameters(mean / dist.get_world_size(among), other.parameters())
        worst = max(worst, far(network, other))
        digests.append(digest(network.parameters()))
    averaging.sync()
    averaging.close()
    return {"far": worst, "ended": ended, "digests": digests}


def sites(rank: int, world_size: int) -> dict[str, Any]:
    """DDP within each of two sites, and averages of all ranks every 4 steps, whose bytes cross between sites once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "place"))
    network = model(torch.float32)
    ddp = DDP(network, process_group=mesh["place"].get_group())
    digests = list[str]()
    with gradwire.wrap(sgd(network), network, "local:4,outer=(int4,node=2)") as optimizer:
        for step in range(8):
            optimizer.zero_grad()
            loss_of(ddp, step, rank, torch.float32).backward()
            optimizer.step()
            digests.append(digest(network.parameters()))
        optimizer.sync()
    return {"digests": digests, "moved": far(network, model(torch.float32))}


def over_a_mesh(rank: int, world_size: int) -> dict[str, Any]:
    """A hierarchy made from a mesh in an optimizer is one made by hand in a loop; it resumes exactly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "place"))
    whole, state = _over(mesh, rank, None)
    broken, _ = _over(mesh, rank, 5)
    network = model()
    inner = sgd(network)
    pair = mesh.get_group("place")
    by_hand = Hierarchical(
        Averaging(network, 2, group=pair, deadline_s=DEADLINE_S),
        Averaging(network, 4, "int4", outer=DiLoCo(), deadline_s=DEADLINE_S),
    )
    with by_hand:
        for step in range(STEPS):
            inner.zero_grad()
            loss_of(network, step, rank).backward()
            inner.step()
            by_hand.step()
        by_hand.sync()
    return {"by_hand": digest(network.parameters()), "whole": whole, "broken": broken, **state}


def _over(mesh: DeviceMesh, rank: int, breaks: int | None) -> tuple[str, dict[str, Any]]:
    def parts() -> tuple[nn.Module, AveragingOptimizer]:
        network = model()
        averaging = Hierarchical.over(
            mesh, network, {"place": 2, "site": 4}, "int4", outer=DiLoCo(), deadline_s=DEADLINE_S
        )
        return network, AveragingOptimizer(sgd(network), averaging)

    network, optimizer = parts()
    copies: list[str] = []
    for step in range(STEPS):
        if step == breaks:
            saved = copy.deepcopy([network.state_dict(), optimizer.state_dict()])
            optimizer.close()
            network, optimizer = parts()
            network.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        loss_of(network, step, rank).backward()
        optimizer.step()
        with optimizer.evaluating():
            copies.append(digest(network.parameters()))
    optimizer.sync()
    steps = optimizer.stats().steps
    optimizer.close()
    return digest(network.parameters()), {"copies": copies, "steps": steps}


def own_momentum(rank: int, world_size: int) -> dict[str, list[bool]]:
    """After which steps each rank's momentum is zero, by what becomes of it; and how far it is from the mean."""
    found: dict[str, list[bool]] = {}
    for moments in get_args(Moments):
        network = model()
        inner = torch.optim.SGD(network.parameters(), 0.1, 0.9)
        settings: dict[str, Any] = {"warmup": 2, "moments": moments, "deadline_s": DEADLINE_S}
        with LocalSGD(inner, network, 3, **settings) as optimizer:
            found[moments] = []
            for step in range(8):
                optimizer.zero_grad()
                loss_of(network, step, rank).backward()
                optimizer.step()
                buffers = [inner.state[p]["momentum_buffer"] for p in network.parameters()]
                found[moments].append(not any(bool(buffer.any()) for buffer in buffers))
    return found


def sparseloco(rank: int, world_size: int) -> dict[str, float]:
    """How far `topk:0.1+int2,decay=0.95` with a plain outer step is from SparseLoCo, written down for this rank."""
    network, other = model(torch.float32), model(torch.float32)
    start, owed, worst = flat(other), torch.zeros_like(flat(other)), 0.0
    inner, settings = sgd(other), {"outer": DiLoCo(lr=0.5, momentum=0.0), "method": "topk:0.1+int2,decay=0.95"}
    with wrapped(sgd, network, settings) as optimizer:
        for step in range(STEPS):
            for trains, it in ((network, optimizer), (other, inner)):
                it.zero_grad()
                loss_of(trains, step, rank, torch.float32).backward()
                it.step()
            if step % 4 == 3:
                owed = 0.95 * owed + (flat(other) - start)
                sent = torch.zeros_like(owed)
                for elements in _grains(optimizer.averaging, other):
                    sent[elements] = _largest_in_two_bits(owed[elements], 0.1)
                owed -= sent
                mean = sent.clone()
                dist.all_reduce(mean)
                start = start + 0.5 * mean / world_size
                nn.utils.vector_to_parameters(start.clone(), other.parameters())
                worst = max(worst, far(network, other))
        residual = optimizer.averaging.session.residual_norm()
    moved = far(network, model(torch.float32))
    return {"far": worst / moved, "owed": abs(residual - float(owed.norm())) / residual}


def changes(rank: int, world_size: int) -> dict[str, Any]:
    """A run that goes on with another method in its middle: what is owed before and after, and what ranks end with."""
    network, owed = model(torch.float32), list[float]()
    with wrapped(sgd, network, {"fragments": 2, "method": "topk:0.1"}) as optimizer:
        for step in range(STEPS):
            if step == STEPS // 8 * 4:  # a window has ended
                owed.append(_owed(optimizer.averaging))
                optimizer.change("int4")
                owed.append(_owed(optimizer.averaging))
            optimizer.zero_grad()
            loss_of(network, step, rank, torch.float32).backward()
            optimizer.step()
        optimizer.sync()
        report, sent = optimizer.report(), optimizer.stats().wire_bytes
        methods = [part.session.method for part in optimizer.averaging.parts]
    return {"owed": owed, "methods": methods, "end": digest(network.state_dict().values()), "told": report.method,
            "sent": sent}  # fmt: skip


def _owed(averaging: Averaging) -> float:
    return math.hypot(*(part.session.residual_norm() for part in averaging.parts))


def _grains(averaging: Averaging, network: nn.Module) -> list[Tensor]:
    """Where the elements of each grain stand among all parameters: the largest of a grain are sent."""
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    at = dict(zip(sizes, itertools.accumulate([0, *sizes.values()]), strict=False))
    found: dict[int, list[Tensor]] = {}
    for name, slices in averaging.session.engine.plan.slices.items():
        for unit, start, numel, _ in slices:
            begin = at[name] + start
            found.setdefault(unit, []).append(torch.arange(begin, begin + numel))
    return [torch.cat(parts) for parts in found.values()]


def _largest_in_two_bits(x: Tensor, density: float) -> Tensor:
    """The largest elements, each as -1, 0 or 1 times the largest of all."""
    kept = x.abs().topk(max(1, round(density * x.numel()))).indices
    sent, scale = torch.zeros_like(x), x.abs().max()
    sent[kept] = (x[kept] / scale).round() * scale
    return sent


# What is wrong --------------------------------------------------------------------------------------------------------


def told(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def differing(rank: int, world_size: int) -> dict[str, str]:
    """What every rank is told where the last one has something else."""
    other, found = rank == world_size - 1, dict[str, str]()
    network = model()
    if other:
        with torch.no_grad():
            network.get_parameter("3.weight")[0, 0] += 1e-9
            network.get_parameter("3.bias").add_(1)
    found["weight"] = told(lambda: Averaging(network, deadline_s=DEADLINE_S))
    network = model()
    if other:
        network.get_buffer("1.running_var").mul_(2)
    found["buffer"] = told(lambda: Averaging(network, deadline_s=DEADLINE_S))
    found["own"] = told(lambda: Averaging(network, buffers="own", deadline_s=DEADLINE_S).close())
    network = model()
    found["settings"] = told(lambda: Averaging(network, 4 if other else 8, deadline_s=DEADLINE_S))
    averaging = Averaging(network, 1, deadline_s=DEADLINE_S)
    before = averaging.global_copy()
    if other:
        with torch.no_grad():
            network.get_parameter("0.weight")[0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradwire.NonFiniteWarning)
        found["nan"] = told(averaging.step)
    kept = averaging.global_copy()
    assert all(torch.equal(kept[name], before[name]) for name in before)
    averaging.close()
    return found


def shorter(rank: int, world_size: int) -> float:
    """Ranks whose data ends at different steps of one window have the same model after `sync`; how far they are."""
    network = model()
    with LocalSGD(sgd(network), network, 8, deadline_s=DEADLINE_S) as optimizer:
        for step in range(3 + rank):
            optimizer.zero_grad()
            loss_of(network, step, rank).backward()
            optimizer.step()
        optimizer.sync()
    whole = flat(network)
    dist.broadcast(whole, 0)
    return float((whole - flat(network)).abs().max())
