"""A process of a job that rpc joins. Rank 0 prints what came of it as JSON, or the sentence that was said.

python tests/rpc_main.py RANK SERVERS WORKERS PUSHES ADDRESS PATIENCE_S [FOLDER]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gradwire import GradwireError
from gradwire.asynchronous import ASGD, Bounded, Grant, Result, Work
from gradwire.asynchronous.rpc import Job, run
from ray_main import START, counting


def dying(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    if grant.number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return counting(grant.worker)(parameters, grant)


def work(worker: int) -> Work:
    return dying if worker == 2 else counting(worker)


def main() -> None:
    torch.set_num_threads(1)
    rank, servers, workers, pushes = map(int, sys.argv[1:5])
    job = Job(
        START,
        ASGD(1 / 16),
        work,
        workers=workers,
        pushes=pushes,
        pace=Bounded(4),
        folder=Path(sys.argv[7]) if len(sys.argv) > 7 else None,
        snapshot_every=10,
        patience_s=float(sys.argv[6]),
    )
    try:
        outcome = run(job, rank=rank, servers=servers, address=sys.argv[5], deadline_s=120)
    except GradwireError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    if outcome is not None:
        parameters = {name: tensor.tolist() for name, tensor in outcome.parameters.items()}
        print(json.dumps({**outcome._asdict(), "parameters": parameters}))


if __name__ == "__main__":
    main()
