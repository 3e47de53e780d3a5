"""Training on Ray whose workers and servers are killed, in a process of its own. Prints what came of it as JSON.

python tests/ray_main.py kills FOLDER
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
from typing import Any

import torch
from torch import Tensor

from gradwire import CommunicationError
from gradwire.asynchronous import ASGD, Bounded, Grant, Result, Work
from gradwire.asynchronous.ray_actors import Job, RunningActors, run
from gradwire.asynchronous.several import Journal

DEADLINE_S = 240.0
WORKERS = 4
START = {
    "first": torch.zeros(WORKERS, dtype=torch.float64),
    "x": torch.full((8,), 3.0, dtype=torch.float64),
    "last": torch.zeros(WORKERS, dtype=torch.float64),
}


def counted(worker: int, parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    """0.5 |x|^2 with noise; and of a push at either server, its worker's element there grows by 1 at a rate of 1/16."""
    time.sleep(0.01)
    x = parameters["x"]
    noise = torch.randn(8, generator=torch.Generator().manual_seed(1000 * worker + grant.number), dtype=x.dtype)
    count = torch.zeros(WORKERS, dtype=x.dtype)
    count[worker] = -16.0
    return Result({"first": count, "x": x + 0.1 * noise, "last": count}, float(x.square().sum()) / 2)


def counting(worker: int) -> Work:
    return functools.partial(counted, worker)


def failing(folder: Path, worker: int) -> Work:
    """The first process kills itself, and the second one raises at its push 3."""
    mark = folder / "began"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return short


def short(parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    if grant.number == 3:
        raise ValueError("there is no data any more")
    return counted(grant.worker, parameters, grant)


def kills(folder: Path) -> dict[str, Any]:
    """A worker is killed; then a server, between its snapshots at 64 and 128 pushes, so that some pushes are lost."""
    job = Job(
        START, ASGD(1 / 16), counting, workers=WORKERS, pushes=240, pace=Bounded(4), folder=folder, snapshot_every=64
    )
    with RunningActors(job, servers=2) as running:
        running.wait_for(20, DEADLINE_S)
        imported().kill(running.workers.children[2].handle)
        running.wait_for(80, DEADLINE_S)
        os.kill(imported().get(running.servers.handles[1].pid.remote()), signal.SIGKILL)
        outcome = running.wait(DEADLINE_S)
    return {
        "parameters": {name: tensor.tolist() for name, tensor in outcome.parameters.items()},
        "journals": outcome.journals,
        "histories": outcome.histories,
        "lost": outcome.lost,
        "restarts": outcome.restarts,
    }


def sentence(folder: Path) -> str:
    """What is said of a worker that fails, after it was started anew."""
    try:
        run(
            Job(START, ASGD(1 / 16), functools.partial(failing, folder), workers=1, pushes=5, folder=folder),
            worker_restarts=2,  # Ray was seen to lose the second process too, as "SYSTEM_ERROR"
            deadline_s=DEADLINE_S,
        )
    except CommunicationError as error:
        return str(error)
    return ""


def imported() -> Any:
    import ray

    return ray


def main() -> None:
    began_s = time.monotonic()
    imported().init(num_cpus=6, include_dashboard=False, object_store_memory=100 * 2**20)
    folder = Path(sys.argv[1])
    found = {"init_s": time.monotonic() - began_s, **kills(folder / "kills")}
    found["seconds"] = time.monotonic() - began_s
    found["failed"] = sentence(folder / "failing")
    found["pushes"] = len(Journal(folder / "failing" / "part-0-of-1" / "journal").rows())
    found["all_seconds"] = time.monotonic() - began_s
    print(json.dumps(found))


if __name__ == "__main__":
    main()
