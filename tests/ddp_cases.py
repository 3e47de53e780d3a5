"""What each rank does in the tests of `attach`: small models, a few steps, figures back."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from case_sets import many_of
from gradwire.core.collective import AllReduce as SumRequest
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers import Program, Reducer, Step

GRAIN = 2000


def mlp(seed: int = 0) -> nn.Sequential:
    """About 7,000 parameters in four layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)
    )


def four_buckets(model: nn.Module, **options: Any) -> DDP:
    """DDP with a bucket for about every layer."""
    return DDP(model, bucket_cap_mb=0.008, **options)


def batches(rank: int, steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that depend on rank and step alone."""
    for step in range(start, steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 16, generator=generator)
        yield x, x[:, :4].argmax(1)


def digest(model: nn.Module) -> str:
    """A fingerprint of all parameters, bit for bit."""
    flat = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def train(ddp: nn.Module, data: Iterator[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer) -> float:
    """Train and return the last loss."""
    loss = torch.zeros(())
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all cases."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def long_run(rank: int, world_size: int, spec: str, steps: int, variant: str = "plain") -> dict[str, Any]:
    """Many steps with four buckets; returns the fingerprint of the parameters."""
    make: dict[str, Callable[[], DDP]] = {
        "plain": lambda: four_buckets(mlp()),
        "unused": lambda: four_buckets(Branching(), find_unused_parameters=True),
        "collective": lambda: four_buckets(nn.Sequential(mlp(), SumInBackward())),
        "static": lambda: four_buckets(mlp(), static_graph=True),
        "wide": lambda: DDP(nn.Sequential(nn.Linear(16, 40_000), nn.Linear(40_000, 4))),
        "views": lambda: four_buckets(mlp(), gradient_as_bucket_view=True),
    }
    ddp = make[variant]()
    grain_numel = 1 << 20 if variant == "wide" else GRAIN
    with gradwire.attach(ddp, spec, grain_numel=grain_numel, deadline_s=60) as handle:
        loss = train(ddp, batches(rank, steps), sgd(ddp))
        stats = handle.stats()
    return {"digest": digest(ddp), "loss": loss, "steps": stats.steps, "wire_bytes": stats.wire_bytes}


def zeroed_in_place(rank: int, world_size: int, spec: str) -> dict[str, list[Any]]:
    """Gradients set to None and gradients zeroed in place, where branches go unused: parameters and residuals."""
    digests: list[str] = []
    residuals: list[float] = []
    for to_none in (True, False):
        ddp = four_buckets(Branching(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with gradwire.attach(ddp, spec, grain_numel=GRAIN, deadline_s=60) as handle:
            for x, y in batches(rank, 12):
                optimizer.zero_grad(set_to_none=to_none)
                nn.functional.cross_entropy(ddp(x), y).backward()
                optimizer.step()
            residuals.append(handle.residual_norm())
        digests.append(digest(ddp))
    return {"digests": digests, "residuals": residuals}


class Branching(nn.Module):
    """Uses one of two branches by turns, and a third one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(16, 48), nn.Linear(48, 4)
        self.left, self.right, self.never = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Even steps left; odd steps right, but on rank 0 left as well."""
        self.calls += 1
        branch = self.left if self.calls % 2 else self.right
        return self.head(branch(self.stem(x).relu()).relu())


class SumInBackward(nn.Module):
    """Does what SyncBatchNorm does: a collective of its own in forward and backward, on the default group."""

    def forward(self, x: Tensor) -> Tensor:
        """Pass through."""
        return _Sum.apply(x)  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x, after a collective."""
        dist.all_reduce(x.detach().sum())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient, after a collective."""
        dist.all_reduce(grads[0].sum())
        return grads[0]


def save_and_go_on(rank: int, world_size: int, spec: str, folder: str) -> dict[str, Any]:
    """60 steps without a break, saving everything at step 50."""
    ddp = four_buckets(mlp())
    optimizer = sgd(ddp)
    with gradwire.attach(ddp, spec, grain_numel=GRAIN, deadline_s=60) as handle:
        train(ddp, batches(rank, 50), optimizer)
        everything = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**everything, "gradwire": handle.state_dict()}, Path(folder) / f"{rank}.pt")
        digests: list[str] = []
        for step in range(50, 60):
            train(ddp, batches(rank, step + 1, start=step), optimizer)
            digests.append(digest(ddp))
    return {"digests": digests}


def resume(rank: int, world_size: int, spec: str, folder: str) -> dict[str, Any]:
    """Steps 51 to 60 from what was saved, in a new process."""
    loaded = torch.load(Path(folder) / f"{rank}.pt", weights_only=True)
    model = mlp(seed=99)
    model.load_state_dict(loaded["model"])
    ddp = four_buckets(model)
    optimizer = sgd(ddp)
    optimizer.load_state_dict(loaded["optimizer"])
    digests: list[str] = []
    with gradwire.attach(ddp, spec, grain_numel=GRAIN, deadline_s=60) as handle:
        handle.load_state_dict(loaded["gradwire"])
        for step in range(50, 60):
            train(ddp, batches(rank, step + 1, start=step), optimizer)
            digests.append(digest(ddp))
    return {"digests": digests}


def infinite_step(rank: int, world_size: int, specs: list[str]) -> dict[str, Any]:
    """A GradScaler loop in which one rank's gradients overflow at one step."""
    out: dict[str, Any] = {}
    for spec in specs:
        ddp = four_buckets(mlp())
        optimizer, scaler = sgd(ddp), torch.amp.GradScaler("cpu", init_scale=1024.0)
        finite: list[bool] = []
        with gradwire.attach(ddp, spec, grain_numel=GRAIN, deadline_s=60, scaler=scaler) as handle:
            for step, (x, y) in enumerate(batches(rank, 8)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(x), y)
                loss = loss * float("inf") if step == 4 and rank == world_size - 1 else loss
                scaler.scale(loss).backward()
                finite.append(all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None))
                scaler.step(optimizer)
                scaler.update()
            stats, norm = handle.stats(), handle.residual_norm()
        out[spec] = {
            "finite": finite,
            "digest": digest(ddp),
            "scale": scaler.get_scale(),
            "bad_steps": stats.bad_steps,
            "residual_finite": norm < float("inf"),
        }
    return out


def zero_layer(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """A layer whose gradient is zero for ten steps, then comes back; returns its mean gradients' norms."""
    ddp = four_buckets(mlp())
    layer = ddp.module[2]
    norms: list[float] = []
    with gradwire.attach(ddp, spec, grain_numel=GRAIN, deadline_s=60):
        for step, (x, y) in enumerate(batches(rank, 30)):
            ddp.zero_grad()
            hidden = ddp(x)
            loss = nn.functional.cross_entropy(hidden, y) * (0.0 if step < 10 else 1.0)
            loss.backward()
            norms.append(float(layer.weight.grad.norm()))
    return {"norms": norms}


class Exploding(Reducer):
    """Fails at its third step on the last rank, or on all."""

    def __init__(self, everywhere: bool) -> None:
        self.everywhere = everywhere

    def __repr__(self) -> str:
        return f"Exploding({self.everywhere})"

    def init(self, grain: Grain, step: Step) -> State:
        """Nothing."""
        return State()

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Sum, unless it is time."""
        if step.index == 2 and (self.everywhere or step.rank == step.world_size - 1):
            raise ZeroDivisionError("the reducer broke")
        total = yield SumRequest(x / step.world_size, consumable=True)
        from gradwire.reducers import Reduced
        from gradwire.reducers.sent import SentAll

        return Reduced(total, SentAll(), state)


def exception(rank: int, world_size: int, everywhere: bool) -> dict[str, Any]:
    """What the user sees of an exception inside a reducer."""
    ddp = four_buckets(mlp())
    handle = gradwire.attach(ddp, Exploding(everywhere), grain_numel=GRAIN, deadline_s=20)
    seen = ""
    try:
        train(ddp, batches(rank, 5), sgd(ddp))
    except Exception as error:
        seen = type(error).__name__ + ": " + str(error) + " | ".join(getattr(error, "__notes__", []))
    after = ""
    try:
        train(ddp, batches(rank, 1), sgd(ddp))
    except Exception as error:
        after = type(error).__name__
    handle.close()
    return {"seen": seen, "steps": handle.stats().steps, "after": after}


class Awkward(nn.Module):
    """Zero-element, scalar, frozen and half-precision parameters beside ordinary ones, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.low = nn.Parameter(torch.randn(16, dtype=torch.bfloat16))
        self.conv = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        """Something of everything."""
        image = self.conv(x.view(-1, 1, 4, 4).contiguous(memory_format=torch.channels_last)).mean((2, 3))
        hidden = self.frozen(self.second(self.first(x).relu())) * self.scale + self.low.float()
        return hidden[:, :4] + image + self.empty.sum()


def awkward(rank: int, world_size: int, specs: list[str]) -> dict[str, Any]:
    """Models that are easy to get wrong."""
    out: dict[str, Any] = {}
    for spec in specs:
        ddp = four_buckets(Awkward())
        with gradwire.attach(ddp, spec, grain_numel=100, deadline_s=60):
            train(ddp, batches(rank, 5), sgd(ddp))
        out[spec] = digest(ddp)
    return out


def loops(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """Accumulation with no_sync, then uneven input with join, then a second model on the same ranks."""
    ddp = four_buckets(mlp())
    other = four_buckets(mlp(seed=1))
    with gradwire.attach(ddp, spec, grain_numel=GRAIN) as handle, gradwire.attach(other, "topk:0.1") as second:
        optimizer = sgd(ddp)
        for step, (x, y) in enumerate(batches(rank, 8)):
            if step % 2 == 0:
                with ddp.no_sync():
                    nn.functional.cross_entropy(ddp(x), y).backward()
                continue
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        synced = handle.stats().steps
        train(other, batches(rank, 5), sgd(other))
        with ddp.join():
            train(ddp, batches(rank, 10 + rank, start=8), optimizer)
        return {"synced": synced, "digests": [digest(ddp), digest(other)], "second": second.stats().steps}


def subgroup(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """DDP over the last two ranks only. The first one has the store, so that it ends last."""
    group, found = dist.new_group([1, 2]), dict[str, Any]()
    if rank > 0:
        ddp = four_buckets(mlp(), process_group=group)
        with gradwire.attach(ddp, spec, grain_numel=GRAIN, deadline_s=60):
            train(ddp, batches(rank, 10), sgd(ddp))
        found = {"digest": digest(ddp)}
    dist.barrier()
    return found


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What attach says to what it cannot serve."""
    hooked = DDP(mlp())
    hooked.register_comm_hook(None, _plain_hook)
    cases: dict[str, Callable[[], Any]] = {
        "ddp inside": lambda: gradwire.attach(nn.Sequential(DDP(mlp())), "none"),
        "hooked": lambda: gradwire.attach(hooked, "none"),
        "sparse": lambda: gradwire.attach(DDP(nn.Embedding(4, 4, sparse=True)), "none"),
        "complex": lambda: gradwire.attach(DDP(nn.Linear(2, 2, dtype=torch.complex64)), "none"),
        "disagree": lambda: gradwire.attach(DDP(mlp()), "int4" if rank else "int8"),
        "checksums disagree": lambda: gradwire.attach(DDP(mlp()), "int4", checksum=rank == 0),
    }
    out: dict[str, str] = {}
    for name, case in cases.items():
        try:
            case()
        except gradwire.GradwireError as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def _plain_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def rank_dies(rank: int, world_size: int) -> dict[str, Any]:
    """The last rank is killed in the middle of training; the others report an error in time."""
    import os
    import signal
    import time

    ddp = four_buckets(mlp())
    gradwire.attach(ddp, "int4", grain_numel=GRAIN, deadline_s=15)
    optimizer = sgd(ddp)
    for step, (x, y) in enumerate(batches(rank, 100)):
        if step == 5 and rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    return {}


many = many_of(globals())
