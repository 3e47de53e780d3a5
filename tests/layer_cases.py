"""What each rank does in the tests of policies by layer and of fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from ddp_cases import batches, digest, train

LAYERS = ("0.weight", "2.weight", "4.weight")
SPEC = "int4,layers=measured,measure=3"
STACK = "topk:0.1+int8,parameters=bf16"


def model(seed: int = 0) -> nn.Sequential:
    """Three layers of more than 4,096 elements, whose gradients differ in size."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 260), nn.ReLU(), nn.Linear(260, 64), nn.ReLU(), nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 4)
    )


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all cases."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


class Weighing(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300))

    def forward(self, gradient: Tensor) -> Tensor:
        """<weight, gradient>."""
        return (self.weight * gradient).sum()


def large_gradient(rank: int, world_size: int) -> list[float]:
    """Means of 100,000 on one rank and 1 on the others, in fp16."""
    found: list[float] = []
    for spec in ("fp16", "fp16_scaled"):
        ddp = DDP(Weighing())
        with gradwire.attach(ddp, spec, deadline_s=60):
            ddp(torch.full((300,), 1e5 if rank == 0 else 1.0)).backward()
            grad = ddp.module.weight.grad
            assert grad is not None
            assert len(grad.unique()) == 1
            found.append(float(grad[0]))
    return found


def overflow(rank: int, world_size: int) -> dict[str, list[Any]]:
    """A GradScaler's loop in fp16 in which one rank's gradient overflows on its way in step 3, and is finite itself."""
    ddp = DDP(Weighing())
    optimizer, scaler = sgd(ddp), torch.amp.GradScaler("cpu", init_scale=1024.0)
    found: dict[str, list[Any]] = {"moved": [], "scale": [], "model": []}
    with gradwire.attach(ddp, "fp16", deadline_s=60, scaler=scaler):
        for step in range(6):
            before = ddp.module.weight.detach().clone()
            optimizer.zero_grad()
            size = 1e3 if (step, rank) == (3, world_size - 1) else 1.0
            scaler.scale(ddp(torch.full((300,), size))).backward()
            scaler.step(optimizer)
            scaler.update()
            found["moved"].append(not torch.equal(before, ddp.module.weight.detach()))
            found["scale"].append(scaler.get_scale())
            found["model"].append(digest(ddp))
    return found


def measured(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train under DDP, save in mid-run, go on; and the same from the save."""
    net = DDP(model())
    optimizer = sgd(net)
    with gradwire.attach(net, SPEC, deadline_s=60) as session:
        train(net, batches(rank, 5), optimizer)
        gradwire.save(folder, session)
        torch.save([net.module.state_dict(), optimizer.state_dict()], Path(folder) / f"user{rank}.pt")
        saved = session.layer_bits()
        train(net, batches(rank, 10, start=5), optimizer)
        whole = {"bits": session.layer_bits(), "model": digest(net)}
        session.change("int4")
        train(net, batches(rank, 12, start=10), optimizer)
        changed = digest(net)
    weights, state = torch.load(Path(folder) / f"user{rank}.pt", weights_only=True)
    again = model(seed=5)
    again.load_state_dict(weights)
    net = DDP(again)
    optimizer = sgd(net)
    optimizer.load_state_dict(state)
    with gradwire.attach(net, SPEC, deadline_s=60) as session:
        assert gradwire.load(folder, session) == 5
        loaded = session.layer_bits()
        train(net, batches(rank, 10, start=5), optimizer)
        resumed = {"bits": session.layer_bits(), "model": digest(net)}
    return {"saved": saved, "loaded": loaded, "whole": whole, "resumed": resumed, "changed": changed}


def in_a_session(rank: int, world_size: int) -> dict[str, Any]:
    """A plain loop."""
    net = model()
    optimizer = sgd(net)
    with gradwire.Session(net, SPEC, deadline_s=60) as session:
        for x, y in batches(rank, 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            session.reduce_(net)
            optimizer.step()
        return {"bits": session.layer_bits(), "model": digest(net)}


def sharded(rank: int, world_size: int, specs: list[str]) -> list[dict[str, Any]]:
    """FSDP2, one group for all layers."""
    found: list[dict[str, Any]] = []
    for spec in specs:
        net: Any = model()
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in [*net, net] if "parameters" in spec else [net]:  # the root is gathered once
            fully_shard(layer, mesh=mesh)
        with gradwire.attach(net, spec, deadline_s=60) as session:
            loss = train(net, batches(rank, 8), sgd(net))
            bits = session.layer_bits() if "measured" in spec else {}
            sent = session.stats().wire_bytes / 8
            whole = [p.full_tensor() for p in net.parameters()]
        flat = torch.cat([p.detach().reshape(-1) for p in whole])
        found.append({"bits": bits, "loss": loss, "norm": float(flat.norm()), "sent": sent})
    return found


def others(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All of the above but `measured`, in one set of processes."""
    assert dist.get_world_size() == world_size
    return {
        "large": large_gradient(rank, world_size),
        "overflow": overflow(rank, world_size),
        "session": in_a_session(rank, world_size),
        "sharded": sharded(rank, world_size, [SPEC, "int4,layers=default", STACK]),
        "measured": measured(rank, world_size, folder),
    }
