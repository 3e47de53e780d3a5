"""What each rank does in the tests of attaching, letting go, and of ranks that fail."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire


def model() -> DDP:
    """Small, the same on every rank."""
    torch.manual_seed(0)
    return DDP(nn.Linear(8, 4))


def step(ddp: DDP) -> None:
    """One backward pass."""
    ddp(torch.ones(2, 8)).sum().backward()


def first_steps(ddp: DDP) -> None:
    """Two steps: at the beginning of the second one DDP communicates itself, which nobody else can wait for."""
    step(ddp)
    step(ddp)


def seen(work: Any) -> dict[str, Any]:
    """What a rank sees of the error that `work` ends with, and after how long."""
    began = time.monotonic()
    try:
        work()
    except gradwire.CommunicationError as error:
        return {"ranks": list(error.ranks), "text": str(error), "s": time.monotonic() - began}
    return {"ranks": [], "text": "no error", "s": time.monotonic() - began}


def attach_again(rank: int, world_size: int, rounds: int) -> list[float]:
    """Attach, step and close again and again, ranks closing at different times; seconds of each round."""
    times: list[float] = []
    for i in range(rounds):
        began = time.monotonic()
        ddp = model()
        with gradwire.attach(ddp, "none,node=2", deadline_s=20):
            step(ddp)
            time.sleep(0.1 * ((rank + i) % world_size))
        times.append(time.monotonic() - began)
    return times


def absent_then_asleep(rank: int, world_size: int) -> dict[str, Any]:
    """The last rank does not attach in time, then does; then it sleeps past the deadline."""
    last = rank == world_size - 1
    out: dict[str, Any] = {}
    ddp = model()
    if not last:
        out["absent"] = seen(lambda: gradwire.attach(ddp, "none", deadline_s=1))
    dist.barrier()
    with gradwire.attach(ddp, "none", deadline_s=3) as handle:
        first_steps(ddp)
        if last:
            time.sleep(5)
        out["asleep"] = seen(lambda: step(ddp))
        out["steps"] = handle.stats().steps
    return out


def killed(rank: int, world_size: int, folder: str) -> None:
    """The last rank is killed between two steps; the others write down what they see."""
    ddp = model()
    with gradwire.attach(ddp, "none", deadline_s=30):
        first_steps(ddp)
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        found = seen(lambda: [step(ddp) for _ in range(3)])
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    time.sleep(1)  # rank 0 holds the store, in which the others still read


def interrupted() -> None:
    """Train until somebody interrupts rank 0, whose peer is stuck; a process of its own, which ends as any does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ddp = model()
    try:
        with gradwire.attach(ddp, "none", deadline_s=60):
            first_steps(ddp)
            print("ready", flush=True)
            if dist.get_rank() == 1:
                time.sleep(60)
            step(ddp)
    finally:
        print(time.monotonic(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
