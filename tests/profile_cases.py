"""What each rank does in the tests of profiles."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.profiling import Account, RankRecord

STEPS = 12


class Busy(nn.Module):
    """A model whose forward pass takes at least so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64))
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        return self.inner(x)


def _figures(found: Account) -> dict[str, Any]:
    ranks = [
        {
            "accounted": each.accounted,
            "seconds": dict(each.seconds),
            "loop": dict(each.loop),
            "waited_for": dict(each.waited_for),
            "step_s": each.step_s,
            "sent": each.sent_bytes,
        }
        for each in found.ranks
    ]
    return {"ranks": ranks, "caused_s": [found.caused_s(each.rank) for each in found.ranks], "steps": found.steps}


def trained(
    rank: int,
    world_size: int,
    *,
    folder: str,
    method: str | None,
    sleeps_s: list[float],
    fails_at: int | None = None,
    links: bool = False,
) -> dict[str, Any] | None:
    """Train under a profile; of each rank the forward pass takes as long as it is told."""
    torch.set_num_threads(1)
    ddp = DDP(Busy(sleeps_s[rank]))
    session = None if method is None else gradwire.attach(ddp, method)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    try:
        with gradwire.profile(ddp, folder, session=session, links=links) as profile:
            for step, batch in enumerate(profile.steps(torch.randn(8, 256) for _ in range(STEPS))):
                optimizer.zero_grad()
                ddp(batch).square().mean().backward()
                optimizer.step()
                if step == fails_at:
                    raise ValueError("planted")
    except ValueError:
        return None
    found = _figures(profile.account()) if rank == 0 else None
    if session is not None:
        session.close()
    return found


def told(rank: int, world_size: int, *, folder: str, sleeps_s: list[float]) -> None:
    """Train with `int4`, and tell how it goes; of each rank the forward pass takes as long as it is told."""
    torch.set_num_threads(1)
    ddp = DDP(Busy(sleeps_s[rank]))
    session = gradwire.attach(ddp, "int4")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with gradwire.profile(ddp, folder, session=session, live=True) as profile:
        for batch in profile.steps(torch.randn(8, 256) for _ in range(60)):
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            loss.backward()
            optimizer.step()
            profile.log(loss=loss)
    session.close()


def looped(rank: int, world_size: int, *, folder: str) -> list[str]:
    """A session that nobody feeds but the loop, which ends its steps itself, in two profiles one after the other."""
    model = Busy(0.002)
    session = gradwire.Session(model, "none")
    texts = list[str]()
    for number in range(2):
        with gradwire.profile(model, Path(folder) / str(number), session=session) as profile:
            for _ in range(6):
                model(torch.randn(8, 256)).square().mean().backward()
                session.reduce_(model)
                profile.step()
        texts.append(str(profile))
    assert torch.autograd.backward.__module__ == "torch.autograd"
    session.close()
    return texts


def sharded(rank: int, world_size: int, *, folder: str, sleeps_s: list[float]) -> dict[str, Any] | None:
    """FSDP2 by itself, and then with a method: its own all-gathers are watched in both, and given back in the end."""
    torch.set_num_threads(1)
    model: Any = Busy(sleeps_s[rank])
    for layer in (model.inner[0], model.inner[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = dict[str, Any]()
    session = None
    for method in ("plain", "int4"):
        if method != "plain":
            optimizer.zero_grad()
            session = gradwire.attach(model, method)
        with gradwire.profile(model, Path(folder) / method, session=session) as profile:
            for batch in profile.steps(torch.randn(8, 256) for _ in range(STEPS)):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        whats = sorted({span.what for step in profile.records[0].steps for of in step.communication for span in of})
        found[method] = {**_figures(profile.account()), "whats": whats, "methods": profile.account().methods}
    if session is not None:
        session.close()
    groups = [module._get_fsdp_state()._fsdp_param_groups[0] for module in (model.inner[0], model.inner[2])]
    found["after"] = [type(group._all_gather_comm).__name__ for group in groups]
    found["after"] += [type(group._reduce_scatter_comm).__name__ for group in groups]
    return found if rank == 0 else None


def clocks(rank: int, world_size: int, *, folder: str, skew_s: float, drift: float) -> list[float]:
    """How far a moment is off by clocks that differ by a skew and a drift, and the longest trip of a reading."""

    def shown(true_s: float) -> float:  # ranks on one machine share the true clock, which is that of rank 0
        return true_s * (1 + drift * rank) + skew_s * rank

    with gradwire.profile(nn.Linear(2, 2), folder, clock=lambda: shown(time.perf_counter())) as profile:
        time.sleep(2.0)
        true_s = time.perf_counter()
        time.sleep(2.0)
    record = RankRecord("run", rank, world_size, "host", [], profile.readings, [])
    error_s = record.on_common_clock(shown(true_s)) - true_s
    return [error_s, max(reading.round_trip_s for reading in profile.readings)]
