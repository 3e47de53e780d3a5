"""A process of a job over TCP or rpc. Rank 0 prints what came of it as JSON, or the sentence that was said.

python tests/job_main.py RANK WORKERS PUSHES PLACES PATIENCE_S [FOLDER]

PLACES are the addresses of the servers, joined by commas; for rpc their number, an @, and the address where all meet.
With DIES in the environment a worker kills itself at its push 5; with HOLDS it waits at its push 20 until FOLDER/go is
there.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gradwire import GradwireError
from gradwire.asynchronous import ASGD, Bounded, Grant, Result, Work, rpc, tcp
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import ServersOutcome
from ray_main import START, counting


def troubled(folder: Path | None, parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    if grant.number == 5 and "DIES" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    while folder is not None and grant.number == 20 and "HOLDS" in os.environ and not (folder / "go").exists():
        time.sleep(0.02)
    return counting(grant.worker)(parameters, grant)


def ran(job: Job, rank: int, places: str) -> ServersOutcome | None:
    servers, at, address = places.partition("@")
    if at:
        return rpc.run(job, rank=rank, servers=int(servers), address=address, deadline_s=120)
    return tcp.run(job, rank=rank, addresses=places.split(","), deadline_s=120)


def main() -> None:
    torch.set_num_threads(1)
    rank, workers, pushes = map(int, sys.argv[1:4])
    folder = Path(sys.argv[6]) if len(sys.argv) > 6 else None

    def work(worker: int) -> Work:
        return functools.partial(troubled, folder)

    job = Job(
        START,
        ASGD(1 / 16),
        work,
        workers=workers,
        pushes=pushes,
        pace=Bounded(4),
        folder=folder,
        snapshot_every=10,
        patience_s=float(sys.argv[5]),
    )
    try:
        outcome = ran(job, rank, sys.argv[4])
    except GradwireError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    if outcome is not None:
        parameters = {name: tensor.tolist() for name, tensor in outcome.parameters.items()}
        print(json.dumps({**outcome._asdict(), "parameters": parameters}))


if __name__ == "__main__":
    main()
