"""`gradwire overlap`: how much communication is hidden on this network, and settings that hide more."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from gradwire.cli.commands import Commands, add

OK = 0

OVERLAP_HELP = """\
Started by torchrun on all hosts, it trains nothing: it makes forward and backward passes of a task in
DistributedDataParallel, compares settings of when communication travels, and rank 0 prints what it found. The file of
--out is for gradwire.attach(ddp, METHOD, overlap=FILE).

examples
  torchrun --nnodes 2 --nproc-per-node 1 ... -m gradwire overlap --method int4 --out overlap.json
  torchrun --nnodes 2 --nproc-per-node 1 ... -m gradwire overlap --task mine.train:task
  gradwire net exec --hosts 2 --rate 100mbit -- torchrun --nproc-per-node 1 -m gradwire overlap --method int8
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    overlap = add(
        commands,
        "overlap",
        help="under torchrun, how much communication is hidden, and settings that hide more",
        description="Find by measurement when communication should travel, on the ranks and the network at hand.",
        epilog=OVERLAP_HELP,
    )
    overlap.add_argument("--task", default="bytes", help="bytes, digits or package.module:function (default: bytes)")
    overlap.add_argument("--method", metavar="SPEC", help="what attach will be given; without it DDP's own all-reduces")
    overlap.add_argument("--rounds", type=int, default=5, help="rounds of measurement (default: 5)")
    overlap.add_argument("--out", type=Path, metavar="FILE", help="keep the settings here")
    overlap.set_defaults(run=run_overlap)


def run_overlap(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire overlap` and return its exit status.

    Raises:
        AttachError: without a launcher, or with one rank: nothing is communicated then.
        SpecError, CompositionError, TaskError: a method or a task that cannot be built.
    """
    from gradwire.core.errors import AttachError  # torch takes seconds to import: --help should not wait for it

    if "RANK" not in os.environ:
        raise AttachError("one rank communicates nothing, so there is nothing to tune: start the command by torchrun")
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.cli.lines import say
    from gradwire.overlap import tune
    from gradwire.tasks.builtin import make_task

    task = make_task(arguments.task, 0)
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        inputs, targets = task.batch(0, rank, dist.get_world_size())
        batch = inputs if isinstance(inputs, dict) else (inputs,)
        ddp = DistributedDataParallel(task.model)
        found = tune(
            ddp, batch, arguments.method, loss=lambda outputs: task.loss(outputs, targets), rounds=arguments.rounds
        )
    finally:
        dist.destroy_process_group()
    if rank == 0:
        say(console, str(found))
        if arguments.out is not None:
            found.save(arguments.out)
            say(console, f"settings: {arguments.out}")
    return OK
