"""One rank of one run: trains a task with one method and one seed, and writes down what happened.

Started by `gradwire.compare.compare` as `python -m gradwire.compare.worker JOB.json`, once a rank, with the usual
variables (RANK, WORLD_SIZE, ...) in its environment. Besides `rankN.json` it writes lines of news to standard
output, for whoever watches. A task may print what it likes: news are told by the run's own token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import kernels
from gradwire.compare.apart import ApartTrainer
from gradwire.compare.engines import make_engine
from gradwire.compare.sides import Side, UnwaitingSide
from gradwire.compare.trainer import SETTLE_S, Log, RankJob, Trainer
from gradwire.network.wire import WireMeter
from gradwire.ranks import group_end
from gradwire.tasks.builtin import make_task
from gradwire.tasks.task import Task, TaskError


def join_group(job: RankJob) -> None:
    """Meet the other ranks. Through a file: no port to be taken, no traffic on the wire that is measured."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = str(Path(job.folder) / "rendezvous")
    store = dist.FileStore(path, world_size)  # pyright: ignore[reportPrivateImportUsage]
    timeout = datetime.timedelta(seconds=job.deadline_s)
    group_end.before_init()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def warm_kernels() -> None:
    """Compile what is compiled on first use, off the clock."""
    kernels.warm_up()


def trainer(job: RankJob, task: Task, side: Side, meter: WireMeter) -> Trainer:
    """The trainer that suits a method."""
    if isinstance(side, UnwaitingSide):
        return ApartTrainer(job, task, side, meter)
    return Trainer(job, task, side, meter)


def run(job: RankJob) -> Log:
    """Do a job on this rank."""
    torch.set_num_threads(1)  # the hosts share this machine's cores; more threads would only fight
    task = make_task(job.task, job.seed, Path(job.text) if job.text else None)
    join_group(job)
    meter = WireMeter.from_environment()
    dist.barrier()
    before = meter.read()
    engine = make_engine(job.engine)
    model = engine.wrap(task.model, job.method, job.bucket_mb)
    dist.barrier()
    time.sleep(SETTLE_S)
    setup = meter.read().since(before).all_payload_bytes / meter.ranks
    side = engine.attach(model, task.optimizer(p for p in model.parameters() if p.requires_grad), job.method)
    if not job.method.startswith("torch."):
        warm_kernels()
    if meter.pace():
        side.link_changed()
    try:
        log = trainer(job, task, side, meter).train()
    finally:
        side.close()
    log.setup = setup
    return log


def prepare(task: str, text: str | None = None) -> None:
    """Import, compile and read what every run of a comparison needs. Starts no thread: a forked child has none."""
    torch.set_num_threads(1)
    with contextlib.suppress(TaskError):  # it was fine where the comparison began; if not, the run will tell
        made = make_task(task, 0, Path(text) if text else None)
        made.optimizer(p for p in made.model.parameters() if p.requires_grad)
    warm_kernels()


def main(path: str) -> None:
    """Entry point: `python -m gradwire.compare.worker JOB.json`."""
    job = RankJob(**json.loads(Path(path).read_text()))
    log = run(job)
    result = Path(job.folder) / f"rank{dist.get_rank()}.json"
    result.write_text(json.dumps(dataclasses.asdict(log)))
    dist.barrier()
    group_end.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
