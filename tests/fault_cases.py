"""What each real rank does under a plan of faults: it trains with `attach` and writes down how far it came."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.core.collective import Collective
from gradwire.drivers.faulty import Faulty, plan_of
from gradwire.drivers.interpreter import Pending
from gradwire.drivers.process_group import GroupTransport
from gradwire.session import lane

STEPS = 4
REQUESTS = 16
"""Faults befall one of so many of a rank's first collectives in training."""


class _Sound:
    """A transport before faults are added to it."""

    def __init__(self, transport: GroupTransport) -> None:
        self.transport, self.rank, self.world_size = transport, transport.rank, transport.world_size

    def issue(self, request: Collective) -> Pending:
        return GroupTransport.issue(self.transport, request)


class FaultyGroup(GroupTransport):
    """A process group that fails by a plan, once it is told to."""

    faults: Faulty | None = None

    def issue(self, request: Collective) -> Pending:
        return super().issue(request) if self.faults is None else self.faults.issue(request)


def train(rank: int, world_size: int, spec: str, seed: int, folder: str, deadline_s: float) -> None:
    """Train under the plan of `seed`; write the digests of the parameters after each step, and the error."""
    lane.GroupTransport = FaultyGroup
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 8)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    found: dict[str, Any] = {"digests": [], "error": "", "text": "", "ranks": []}
    began = time.monotonic()
    # What the ranks of a node hear alone only a checksum can tell from what was sent: see `fault_plans.run`.
    handle = gradwire.attach(ddp, spec, deadline_s=deadline_s, grain_numel=400, checksum="node=" in spec)
    transport = handle.session.transport
    assert isinstance(transport, FaultyGroup)
    plans = plan_of(seed, world_size, REQUESTS)
    try:
        with handle:
            for step in range(STEPS):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(100 * step + rank)
                ddp(torch.randn(4, 40, generator=generator)).square().mean().backward()
                optimizer.step()
                found["digests"].append(digest(ddp))
                if step == 1:  # at the beginning of the second step DDP communicates itself
                    transport.faults = Faulty(_Sound(transport), plans[rank], real=True, longest_s=0.3)
    except Exception as error:
        ranks = list(error.ranks) if isinstance(error, gradwire.CommunicationError) else []
        found |= {"error": type(error).__name__, "text": str(error), "ranks": ranks}
    found["s"] = time.monotonic() - began
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    time.sleep(1)  # rank 0 holds the store, in which the others still read


def digest(module: nn.Module) -> str:
    """The parameters' bits."""
    whole = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return hashlib.blake2b(whole.numpy().tobytes(), digest_size=8).hexdigest()
