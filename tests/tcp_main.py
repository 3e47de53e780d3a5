"""A process of a job over TCP. Rank 0 prints what came of it as JSON, or the sentence that was said.

python tests/tcp_main.py RANK ADDRESSES WORKERS PUSHES FOLDER

ADDRESSES are joined by commas. With DIES in the environment a worker kills itself at its push 5; with HOLDS it waits at
its push 20 until FOLDER/go is there.
"""

from __future__ import annotations

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
from gradwire.asynchronous import ASGD, Bounded, Grant, Result, Work
from gradwire.asynchronous.tcp import Job, run
from ray_main import START, counting


def troubled(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    if grant.number == 5 and "DIES" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    while grant.number == 20 and "HOLDS" in os.environ and not (Path(sys.argv[5]) / "go").exists():
        time.sleep(0.02)
    return counting(grant.worker)(parameters, grant)


def work(worker: int) -> Work:
    return troubled


def main() -> None:
    torch.set_num_threads(1)
    rank, workers, pushes = int(sys.argv[1]), int(sys.argv[3]), int(sys.argv[4])
    job = Job(
        START,
        ASGD(1 / 16),
        work,
        workers=workers,
        pushes=pushes,
        pace=Bounded(4),
        folder=Path(sys.argv[5]),
        snapshot_every=10,
        patience_s=60,
    )
    try:
        outcome = run(job, rank=rank, addresses=sys.argv[2].split(","), deadline_s=120)
    except GradwireError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    if outcome is not None:
        parameters = {name: tensor.tolist() for name, tensor in outcome.parameters.items()}
        print(json.dumps({**outcome._asdict(), "parameters": parameters}))


if __name__ == "__main__":
    main()
