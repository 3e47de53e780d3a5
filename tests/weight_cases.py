"""What each rank does in the tests of weights that are given in each step: uneven batches by every port."""

import hashlib
import math
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

import gradwire
from case_sets import many_of
from gradwire.sync import LocalSGD

DEADLINE_S = 30.0
SIZES = [[8, 5, 2], [1, 8, 8], [0, 3, 7], [4, 0, 0]]
"""Samples of each rank, step after step; the first two ranks' where there are two."""


def network() -> nn.Sequential:
    """Four layers, so that DDP has several buckets and a step several waves."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(step: int, rank: int) -> Tensor:
    """The samples of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SIZES[step % len(SIZES)][rank], 12, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over samples; zero where there are none."""
    return model(x).square().sum() / max(1, len(x))


def centralised(step: int, ranks: int) -> dict[str, Tensor]:
    """The gradient of one process that has all samples in one batch, in float64."""
    model = network().double()
    loss_of(model, torch.cat([batch(step, rank) for rank in range(ranks)]).double()).backward()
    return {name: gradient(p) for name, p in model.named_parameters()}


def gradient(parameter: Tensor) -> Tensor:
    """What the optimizer would see, whole."""
    found = parameter.grad
    assert found is not None
    return cast(Any, found).full_tensor() if hasattr(found, "full_tensor") else found


class Trained:
    """A model with a session, whatever the port is.

    Args:
        port: "ddp", "reduce", "deliver" or "fsdp2".
        spec: the method.
        more: options of the session.
    """

    def __init__(self, port: str, spec: str, **more: Any) -> None:
        self.port, self.model = port, network()
        options: dict[str, Any] = {"grain_numel": 600, "deadline_s": DEADLINE_S, **more}
        if port == "ddp":
            self.called: nn.Module = DDP(self.model, bucket_cap_mb=0.002)
            self.session = gradwire.attach(self.called, spec, **options)
        elif port == "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in (self.model[0], self.model[2]):
                fully_shard(layer, mesh=mesh)
            self.called = cast(nn.Module, fully_shard(self.model, mesh=mesh))
            self.session = gradwire.attach(self.called, spec, **options)
        else:
            self.called = self.model
            self.session = gradwire.Session(self.model, spec, **options)

    def step(self, x: Tensor) -> None:
        """Gradients become means."""
        self.called.zero_grad()
        if self.port in ("ddp", "fsdp2"):
            loss_of(self.called, x).backward()
            return
        loss_of(self.model, x).backward()
        if self.port == "reduce":
            self.session.reduce_(self.model)
        else:
            with self.session.step() as step:
                for name, parameter in reversed(list(self.model.named_parameters())):
                    step.deliver(name, gradient(parameter))


def uneven(rank: int, world_size: int, port: str) -> dict[str, Any]:
    """How far weighted means are from the gradient of all samples, and what they cost more than plain means."""
    worst, sent = 0.0, dict[str, int]()
    for spec in ("none", "none,weights=given"):
        trained = Trained(port, spec)
        for step in range(len(SIZES)):
            x = batch(step, rank)
            if "given" in spec:
                trained.session.weigh(len(x))
            trained.step(x)
            if "given" in spec:
                wanted = centralised(step, world_size)
                for name, parameter in trained.model.named_parameters():
                    off = (gradient(parameter).double() - wanted[name]).abs().max() / wanted[name].abs().max()
                    worst = max(worst, float(off))
        sent[spec] = trained.session.stats().wire_bytes
        trained.session.close()
    cost = {} if port == "fsdp2" else {s: gradwire.cost(s, network(), world_size, grain_numel=600) for s in sent}
    return {"worst": worst, "sent": sent, "cost": {spec: c.wire_bytes for spec, c in cost.items()}}


WRONG: dict[str, tuple[Any, Any]] = {
    "negative": (3.0, -2.0),
    "nan": (3.0, math.nan),
    "infinite": (3.0, math.inf),
    "zero": (0.0, 0.0),
    "huge": (1.5e308, 1.5e308),
    "missing": (3.0, None),
    "text": (3.0, "many"),
}
"""What rank 0 says it counts for, and what the last rank says."""


def refused(rank: int, world_size: int, port: str) -> dict[str, dict[str, Any]]:
    """What ranks are told of weights that make no mean, in the second step, and how long that takes."""
    found: dict[str, dict[str, Any]] = {}
    for name, (first, last) in WRONG.items():
        trained = Trained(port, "none,weights=given")
        trained.session.weigh(1)
        trained.step(batch(0, rank))
        began = time.monotonic()
        try:
            weight = last if rank == world_size - 1 else first
            if weight is not None:
                trained.session.weigh(weight)
            trained.step(batch(1, rank))
            text, kind = "nothing", ""
        except gradwire.GradwireError as error:
            text, kind = str(error), type(error).__name__
        found[name] = {"text": text, "kind": kind, "s": time.monotonic() - began}
        trained.session.close()
        dist.barrier()
    return found


def digest(model: nn.Module) -> str:
    """Of all parameters of this rank."""
    local: list[Tensor] = [cast(Any, p).to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return hashlib.blake2b(torch.cat([p.detach().reshape(-1) for p in local]).numpy().tobytes()).hexdigest()


def resumed(rank: int, world_size: int, port: str, spec: str, folder: str) -> list[str]:
    """The end of a run without a break, and of one that was saved in the middle and taken up by a new session."""
    found: list[str] = []
    for breaks in (False, True):
        trained = Trained(port, spec)
        optimizer = torch.optim.SGD(trained.called.parameters(), 0.1)
        for step in range(6):
            if breaks and step == 3:
                gradwire.save(Path(folder) / port, trained.session)
                before, state = trained, trained.called.state_dict()
                before.session.close()
                trained = Trained(port, spec)
                trained.called.load_state_dict(state)
                optimizer = torch.optim.SGD(trained.called.parameters(), 0.1)
                assert gradwire.load(Path(folder) / port, trained.session) == 3
            x = batch(step, rank)
            trained.session.weigh(len(x))
            trained.step(x)
            optimizer.step()
        found.append(digest(trained.model))
        trained.session.close()
    return found


def joined(rank: int, world_size: int) -> float:
    """How far means are from those of the ranks that have data left, where rank 0 ends two steps before the others."""
    trained, worst = Trained("ddp", "none,weights=given"), 0.0
    ddp = cast(DDP, trained.called)
    with ddp.join():
        for step in range(1 if rank == 0 else 2):
            x = batch(1, rank)
            trained.session.weigh(len(x))
            trained.step(x)
            if step == 1:
                model = network().double()
                left = torch.cat([batch(1, other) for other in range(1, world_size)])
                loss_of(model, left.double()).backward()
                for p, q in zip(trained.model.parameters(), model.parameters(), strict=True):
                    off = (gradient(p).double() - gradient(q)).abs().max() / gradient(q).abs().max()
                    worst = max(worst, float(off))
    trained.session.close()
    return worst


def nobody_could(rank: int, world_size: int) -> list[str]:
    """What is said where no training loop has the session that would have to be told."""
    model = network()
    said: list[str] = []
    calls: list[Callable[[], Any]] = [
        lambda: LocalSGD(torch.optim.SGD(model.parameters(), 0.1), model, 2, "none,weights=given"),
        lambda: Trained("fsdp2", "none,weights=given", replicate=dist.new_group(list(range(world_size)))),
    ]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except gradwire.GradwireError as error:
            said.append(str(error))
    return said


def changed(rank: int, world_size: int) -> dict[str, Any]:
    """A method without weights is told what to do, and one with them may follow it in mid-run."""
    trained = Trained("reduce", "none")
    try:
        trained.session.weigh(3)
        said = "nothing"
    except gradwire.StepError as error:
        said = str(error)
    trained.step(batch(1, rank))
    trained.session.change("none,weights=given")
    trained.session.weigh(len(batch(1, rank)))
    trained.step(batch(1, rank))
    wanted = centralised(1, world_size)
    off = [float((gradient(p) - wanted[n]).abs().max()) for n, p in trained.model.named_parameters()]
    trained.session.close()
    return {"said": said, "off": max(off)}


CASES: dict[str, Callable[..., Any]] = {
    "uneven": uneven,
    "refused": refused,
    "resumed": resumed,
    "joined": joined,
    "nobody_could": nobody_could,
    "changed": changed,
}
many = many_of(CASES)
