"""What each rank does in the tests of overlap."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.adapters.communication import BucketPort
from gradwire.adapters.unwrapped import HookedSession
from gradwire.overlap import Stopwatch, all_reduce_alone, reduce_alone

CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8), nn.LayerNorm(8))


def loss_of(network: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return network(torch.randn(16, 40, generator=generator)).square().mean()


def slowest_counts(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 takes 30 ms for a job that takes the others 10."""
    calls: list[str] = []
    spans: list[tuple[float, float]] = []

    def job(name: str, seconds: float) -> None:
        calls.append(name)
        began_s = time.monotonic()
        time.sleep(seconds)
        spans.append((began_s, time.monotonic()))

    slow = 0.03 if rank == 1 else 0.01
    jobs = {"slow": lambda: job("slow", slow), "quick": lambda: job("quick", 0.002)}
    found = Stopwatch(world(), CPU).interleaved(jobs, rounds=3, stretch=2, untimed=1)
    overlap = Stopwatch(world(), CPU).overlap(
        lambda: time.sleep(0.05), lambda: time.sleep(0.03), lambda: time.sleep(0.04), rounds=2, stretch=1
    )
    said = {"calls": calls, "spans": spans, "overlap": overlap}
    return said | {"rounds_s": found.rounds_s, "median_s": found.median_s("slow")}


def alone(rank: int, world_size: int) -> dict[str, Any]:
    """Communication by itself gives the mean that a backward pass gives, and all of a model's buckets."""
    ddp = DDP(model())
    loss_of(ddp.module, 0, rank).backward()
    gradients = {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}
    with gradwire.attach(ddp, "none") as session:
        reduce_alone(session, gradients)
        sent = session.stats().payload_bytes
        ddp.zero_grad()
        loss_of(ddp, 0, rank).backward()
        same = all(
            torch.equal(gradients[name], p.grad) for name, p in ddp.module.named_parameters() if p.grad is not None
        )
        twice = session.stats().payload_bytes
    plain, counted = DDP(model()), list[int]()
    real = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        counted.append(tensor.numel())
        return real(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        all_reduce_alone(plain)
    finally:
        dist.all_reduce = real
    numel = sum(p.numel() for p in plain.parameters())
    return {"same": same, "sent": sent, "twice": twice, "reduced": sum(counted), "numel": numel}


# Models that nobody wraps -----------------------------------------------------------------------------------------


class Crossed(nn.Module):
    """Registers its layers in another order than the one in which it computes: gradients come as b, head, a."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b = nn.Linear(30, 30)
        self.a = nn.Linear(40, 30)
        self.head = nn.Linear(30, 30)
        self.head.weight.data = self.head.weight.data.t().contiguous().t()  # dense, and not row by row
        self.spare = nn.Linear(5, 5)
        self.spare.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.head(self.a(x).tanh()).tanh())


def digest(network: nn.Module) -> str:
    whole = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    return hashlib.blake2b(whole.numpy().tobytes(), digest_size=8).hexdigest()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


def trained(network: nn.Module, optimizer: Any, rank: int, steps: range) -> str:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(steps.start):
        optimizer.step()
        schedule.step()
    for step in steps:
        optimizer.zero_grad()
        loss_of(network, step, rank).backward()
        optimizer.step()
        schedule.step()
    return digest(network)


def in_order(rank: int, world_size: int, specs: list[str], folder: str) -> dict[str, Any]:
    """Six steps at a time and three by three, with a save between; beside them a session in a plain loop."""
    found: dict[str, Any] = {}
    for spec in specs:
        whole, here, kept = Crossed(), Path(folder) / spec.replace(":", "_"), dict[str, Tensor]()
        with gradwire.attach(whole, spec, grain_numel=500) as session:
            planned = [unit.grain.name for unit in session.engine.plan.units]
            optimizer = torch.optim.SGD(whole.parameters(), 0.1)
            for step in range(6):
                optimizer.zero_grad()
                loss_of(whole, step, rank).backward()
                optimizer.step()
                if step == 2:
                    gradwire.save(here, session)
                    kept = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
            order, units = session.overlap.order, [unit.grain.name for unit in session.engine.plan.units]
        again = Crossed()
        again.load_state_dict(kept)
        with gradwire.attach(again, spec, grain_numel=500) as session:
            at = gradwire.load(here, session)
            resumed = [unit.grain.name for unit in session.engine.plan.units]
            optimizer = torch.optim.SGD(again.parameters(), 0.1)
            for step in range(3, 6):
                optimizer.zero_grad()
                loss_of(again, step, rank).backward()
                optimizer.step()
        found[spec] = {"whole": digest(whole), "resumed": digest(again), "at": at, "order": order}
        found[spec] |= {"planned": planned, "units": units, "units_resumed": resumed}
    return found


def rank_0_decides(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks compute in different orders: the order of rank 0 counts on all."""
    network = Crossed()
    if rank:
        network.forward = lambda x: network.head(network.b(network.a(x).tanh()).tanh())  # type: ignore[method-assign]
    with gradwire.attach(network, "none", grain_numel=500) as session:
        for step in range(2):
            network.zero_grad()
            loss_of(network, step, rank).backward()
        means = torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None])
        return {"order": session.overlap.order, "mean": float(means.double().sum())}


def accumulated(rank: int, world_size: int) -> dict[str, Any]:
    """Passes of `no_sync` add up; a branch that one rank leaves out counts as zeros."""
    network = Crossed()
    with gradwire.attach(network, "none") as session:
        assert isinstance(session, HookedSession)
        with session.no_sync():
            loss_of(network, 0, rank).backward()
        idle = session.stats().steps
        loss_of(network, 1, rank).backward()
        summed = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
        network.zero_grad()
        if rank:
            loss_of(network, 0, rank).backward()
        else:
            network.b.weight.square().sum().backward()
        partly = network.a.weight.grad
        assert partly is not None
        mine = partly.clone()
        steps = session.stats().steps
    network.zero_grad()
    loss_of(network, 0, rank).backward()
    loss_of(network, 1, rank).backward()
    for p in network.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world_size
    close = all(torch.allclose(summed[n], p.grad) for n, p in network.named_parameters() if p.grad is not None)
    network.zero_grad()
    loss_of(network, 0, 1).backward()
    expected = network.a.weight.grad
    assert expected is not None
    return {"idle": idle, "steps": steps, "close": close, "partly": torch.allclose(mine, expected / world_size)}


def broken_off(rank: int, world_size: int) -> str:
    """An exception ends the backward pass of rank 1: the others are told."""
    network = Crossed()
    with gradwire.attach(network, "int8", deadline_s=20) as session:
        loss_of(network, 0, rank).backward()

        def fail(_: Tensor) -> None:
            raise ValueError("no gradient today")

        if rank:
            network.head.weight.register_hook(fail)
        try:
            loss_of(network, 1, rank).backward()
            loss_of(network, 2, rank).backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"{session.stats().steps} steps"


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What each of these calls raises."""
    said: dict[str, str] = {}

    def attach(name: str, network: nn.Module, **options: Any) -> None:
        try:
            gradwire.attach(network, "int8", **options).close()
        except gradwire.AttachError as error:
            said[name] = str(error)

    different = Crossed()
    with torch.no_grad():
        different.a.bias[0] += rank
    attach("parameters", different)
    network = Crossed()
    attach("lbfgs", network, optimizer=torch.optim.LBFGS(network.parameters()))
    attach("others", network, optimizer=torch.optim.SGD(network.a.parameters(), 0.1))
    attach("scaler", network, optimizer=torch.optim.SGD(network.parameters(), 0.1), scaler=torch.amp.GradScaler("cpu"))
    attach("skip", network, optimizer=torch.optim.SGD(network.parameters(), 0.1), on_non_finite="skip")
    attach("part", nn.Sequential(DDP(Crossed())))
    with gradwire.attach(network, "none"):
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        try:
            inner = checkpoint(nn.Sequential(network.a, network.head), x, use_reentrant=True)
            network.b(inner).sum().backward()
        except gradwire.StepError as error:
            said["reentrant"] = str(error)
    return said


def early(rank: int, world_size: int, specs: list[str]) -> dict[str, Any]:
    """Parameters that are stepped as their means come, and all of them after the pass: without a wrapper and in DDP."""
    found: dict[str, Any] = {}
    for spec in specs:
        for name, make in OPTIMIZERS.items():
            for wrapped in (False, True):
                ends = list[str]()
                seen = list[int]()
                for steps_early in (False, True):
                    network: nn.Module = Crossed()
                    groups = [{"params": [*network.a.parameters()]}, {"params": [], "lr": 0.02}]  # type: ignore[operator]
                    groups[1]["params"] = [p for n, p in network.named_parameters() if n[0] in "bh"]
                    optimizer = make(groups)
                    network = DDP(network) if wrapped else network
                    early = optimizer if steps_early else None
                    with gradwire.attach(network, spec, grain_numel=500, optimizer=early) as session:
                        if steps_early:
                            arrived, steps = session.feed.arrived, seen
                            assert arrived is not None

                            def noting(whole: list[str], arrived: Any = arrived, steps: list[int] = steps) -> None:
                                steps.append(len(whole))
                                arrived(whole)

                            session.feed.arrived = noting
                        ends.append(trained(network, optimizer, rank, range(5)))
                    held = sum(len(group["params"]) for group in optimizer.param_groups)
                counts = {"calls": len(seen), "stepped": sum(seen), "held": held}
                found[f"{spec} {name} {wrapped}"] = {"ends": ends, **counts}
    return found


# Tuning -----------------------------------------------------------------------------------------------------------


class Normed(Crossed):
    """With a buffer that each pass changes, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(30)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(super().forward(x)), 0.1)


def tuned(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Each kind of model is tuned, left as it was, and trained by what was found."""
    found: dict[str, Any] = {}
    batch = torch.randn(16, 40, generator=torch.Generator().manual_seed(rank))
    for name, method in (("plain", None), ("ddp", "int4"), ("unwrapped", "int4")):
        network = Normed()
        model = network if name == "unwrapped" else DDP(network, bucket_cap_mb=1)
        torch.manual_seed(rank)
        network.a.bias.grad = torch.ones(30)
        before, random = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
        result = gradwire.overlap.tune(model, batch, method, rounds=3, stretch=1)
        same = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        kept = network.a.bias.grad.tolist() == [1.0] * 30 and network.b.weight.grad is None
        path = Path(folder) / f"{name}{rank}.json"
        result.save(path)
        network.zero_grad()
        if method is None:
            gradwire.overlap.apply(model, result.settings)
            loss_of(model, 0, rank).backward()
        else:
            with gradwire.attach(model, method, overlap=path) as session:
                loss_of(model, 0, rank).backward()
                assert session.overlap == result.settings
        means = [p.grad.reshape(-1) for p in network.parameters() if p.grad is not None]
        found[name] = {
            "settings": result.settings.as_dict(),
            "tried": len(result.trials),
            "same": same,
            "kept": kept,
            "random": rank_state_is(random),
            "text": str(result),
            "overlap": result.overlap is not None,
            "mean": float(torch.cat(means).double().sum()),
        }
    return found


def rank_state_is(state: Tensor) -> bool:
    """Whether random numbers go on as from this state, but for one pass with dropout since."""
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    nn.functional.dropout(torch.ones(16, 30), 0.1)
    return torch.equal(now, torch.get_rng_state())


def sharded_tuned(rank: int, world_size: int) -> dict[str, Any]:
    """FSDP2's prefetching."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    for layer in network:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    batch = torch.randn(16, 40, generator=torch.Generator().manual_seed(rank))
    result = gradwire.overlap.tune(network, batch, "int8", rounds=1, stretch=1)
    depths = [trial.settings.prefetch for trial in result.trials]
    with gradwire.attach(network, "int8", overlap=gradwire.overlap.OverlapSettings(prefetch=2)):
        states: list[Any] = [cast(Any, layer)._get_fsdp_state() for layer in network]
        ahead = [len(state._states_to_forward_prefetch) for state in states]
        behind = [len(state._states_to_backward_prefetch) for state in states]
        network(batch).sum().backward()
    return {"depths": depths, "ahead": ahead, "behind": behind, "overlap": result.overlap}


def buckets_follow(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """How many buckets DDP hands over under given settings, and after a load that takes them from the save."""
    seen = list[int]()
    real = BucketPort.hook

    def counting(self: BucketPort, bucket: Any) -> Any:
        seen.append(bucket.buffer().numel())
        return real(self, bucket)

    BucketPort.hook = counting
    settings = gradwire.overlap.OverlapSettings(bucket_bytes=4000, first_bucket_bytes=500, waves_in_flight=2)

    def buckets(ddp: DDP) -> list[int]:
        for step in range(3):
            seen.clear()
            loss_of(ddp, step, rank).backward()
        return list(seen)

    try:
        first = DDP(Crossed())
        with gradwire.attach(first, "int4", overlap=settings) as session:
            given = buckets(first)
            gradwire.save(Path(folder), session)
        second = DDP(Crossed())
        with gradwire.attach(second, "int4") as session:
            by_default = buckets(second)
        third = DDP(Crossed())
        with gradwire.attach(third, "int4") as session:
            gradwire.load(Path(folder), session)
            loaded = buckets(third)
            alike = session.overlap == settings
    finally:
        BucketPort.hook = real
    plain = DDP(Crossed())
    gradwire.overlap.apply(plain, settings)
    for step in range(3):
        loss_of(plain, step, rank).backward()
    sizes = [bucket.buffer().numel() for bucket in plain.reducer._get_zeros_like_grad_buckets()]  # pyright: ignore[reportPrivateUsage]
    return {"given": given, "default": by_default, "loaded": loaded, "alike": alike, "plain": sizes}


def nothing_to_tune(rank: int, world_size: int) -> dict[str, str]:
    """What `tune` says of models that communicate nothing."""
    said: dict[str, str] = {}
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    batch, attached = torch.zeros(2, 40), DDP(Crossed())
    cases: dict[str, Callable[[], object]] = {
        "unwrapped": lambda: gradwire.overlap.tune(Crossed(), batch),
        "alone": lambda: gradwire.overlap.tune(DDP(Crossed(), process_group=alone), batch),
        "attached": lambda: gradwire.overlap.tune(attached, batch),
        "rounds": lambda: gradwire.overlap.tune(Crossed(), batch, "int8", rounds=0),
        "apply": lambda: gradwire.overlap.apply(Crossed(), gradwire.overlap.OverlapSettings()),
    }
    with gradwire.attach(attached, "int8"):
        for name, call in cases.items():
            try:
                call()
            except gradwire.AttachError as error:
                said[name] = str(error)
    return said
