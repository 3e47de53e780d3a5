"""`gradwire train`: a small GPT on a mesh of ranks, as a TOML file says."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gradwire.cli.commands import Commands, add
from gradwire.cli.run import start_ranks
from gradwire.core.errors import SpecError

if TYPE_CHECKING:
    from gradwire.training import MeshTrainer, StepFigures, TrainingConfiguration

OK = 0

TRAIN_HELP = """\
a file
  [dp]                  each axis of the mesh has a table: pp, dp, ep, cp and tp
  ranks = 2             the product of the ranks of all axes is how many run
  method = "int8"       what combines gradients

  [tp]
  ranks = 2

docs/together.md has all tables and keys.

examples
  gradwire train examples/dense.toml
  gradwire train examples/experts.toml --save saves --every 25
  gradwire train examples/experts.toml --save saves --resume
  torchrun --nproc-per-node 8 -m gradwire train examples/dense.toml
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    train = add(
        commands,
        "train",
        help="train a small GPT on a mesh of data, tensor, pipeline, context and expert parallelism",
        description="Train a small GPT over bytes on a mesh of ranks, as a TOML file says. Ranks are started on this "
        "machine; under torchrun this process is one of them.",
        epilog=TRAIN_HELP,
    )
    train.add_argument("file", type=Path, metavar="FILE", help="the configuration")
    train.add_argument("--save", type=Path, metavar="DIR", help="save the training there at its end")
    train.add_argument("--every", type=int, default=0, metavar="N", help="with --save: every N steps too")
    train.add_argument("--resume", action="store_true", help="with --save: go on from the newest save there")
    train.add_argument(
        "--drop-owed", action="store_true", help="with --resume: leave out what the method owed to another layout"
    )
    train.add_argument("--log-every", type=int, default=10, metavar="N", help="print each N-th step (default: 10)")
    train.add_argument(
        "--deadline", type=float, default=300.0, metavar="S", help="until a silent rank is an error (default: 300)"
    )
    train.set_defaults(run=run_train)


def run_train(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire train` and return its exit status.

    Raises:
        GradwireError: a file or options that cannot be, or a training that failed.
    """
    from gradwire.training import read_configuration
    from gradwire.training.checkpoint import saves

    if arguments.save is None and (arguments.every or arguments.resume):
        raise SpecError("--every and --resume go with --save DIR, the folder of the saves")
    if arguments.drop_owed and not arguments.resume:
        raise SpecError("--drop-owed goes with --resume")
    if arguments.every < 0 or arguments.log_every < 1:
        raise SpecError("--every takes 0 or more steps, and --log-every 1 or more")
    if not 0 < arguments.deadline < math.inf:
        raise SpecError(f"--deadline {arguments.deadline:g}: give seconds, such as 300")
    configuration = read_configuration(arguments.file)
    if arguments.save is not None and not arguments.resume and saves(arguments.save):
        raise SpecError(f"{arguments.save} holds saves of a training: add --resume, or give another folder")
    if "RANK" not in os.environ:
        return start_ranks(configuration.ranks, ["train", *_words(arguments)])
    return _train(arguments, configuration, console)


def _words(arguments: argparse.Namespace) -> list[str]:
    """The command line of a rank."""
    words = [str(arguments.file), "--log-every", str(arguments.log_every), "--deadline", str(arguments.deadline)]
    words += ["--save", str(arguments.save), "--every", str(arguments.every)] if arguments.save is not None else []
    return words + [f"--{name}" for name in ("resume", "drop-owed") if getattr(arguments, name.replace("-", "_"))]


def _train(arguments: argparse.Namespace, configuration: TrainingConfiguration, console: Console) -> int:
    """Train as a rank; rank 0 tells."""
    import torch.distributed as dist

    from gradwire.training import MeshTrainer, load_training, save_training

    def tell(text: str) -> None:
        if dist.get_rank() == 0:
            console.print(text, soft_wrap=True, highlight=False, markup=False)

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=arguments.deadline))
    with contextlib.closing(MeshTrainer(configuration, deadline_s=arguments.deadline)) as trainer:
        tell(f"{configuration.layout}, method {configuration.dp.method}, {configuration.model.parameters:,} parameters")
        if arguments.resume:
            steps = load_training(trainer, arguments.save, drop_owed=arguments.drop_owed)
            tell(f"going on from step {steps}")
        first, began = trainer.steps, time.perf_counter()
        while trainer.steps < configuration.steps.count:
            found = trainer.step()
            if trainer.steps % arguments.log_every == 0 or trainer.steps == configuration.steps.count:
                tell(_line(trainer, found, time.perf_counter() - began))
            if arguments.every and trainer.steps % arguments.every == 0:
                tell(f"saved {save_training(trainer, arguments.save)}")
        is_saved = trainer.steps == first or (arguments.every and trainer.steps % arguments.every == 0)
        if arguments.save is not None and not is_saved:
            tell(f"saved {save_training(trainer, arguments.save)}")
    dist.destroy_process_group()
    return OK


def _line(trainer: MeshTrainer, found: StepFigures, passed_s: float) -> str:
    from gradwire.drivers.engine import Stats

    stats = [session.stats() for session in trainer.gradients.sessions.values()]
    a_step = Stats.summed(stats).wire_bytes / max([each.steps for each in stats], default=1)
    return (
        f"step {trainer.steps:5}: loss {found.loss:.4f}, gradient {found.norm:.3f}, {passed_s:.1f} s, rank 0 sends "
        f"{a_step / 1e6:.3f} MB a step by the method of [dp]"
    )
