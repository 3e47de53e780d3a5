"""`gradwire config`: configurations for other frameworks, written with reasons, and checked."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gradwire.cli.commands import Commands, add
from gradwire.core.errors import SpecError

if TYPE_CHECKING:
    from gradwire.config import ConfigFile, TrainingShape
    from gradwire.doctor import Examination

OK = 0

_CHECKING = """\
exit status of --check
  0   nothing is worse than a note
  1   there is a warning or an error
  2   the command line is wrong, or the file is no configuration
"""

DEEPSPEED_HELP = f"""\
Without --out the configuration goes to standard output and its reasons to standard error, since JSON has no comments.
What --check finds is told as gradwire doctor tells it. Where DeepSpeed is installed, its own models are asked too.

{_CHECKING}
examples
  gradwire config deepspeed --world-size 16 --micro-batch 4 --batch 256 --stage 3 --out ds.json
  gradwire config deepspeed --world-size 16 --gpus-per-node 8 --stage 3 --zero++ qwz,hpz,qgz > ds.json
  gradwire config deepspeed --check ds.json --world-size 16 --gpus-per-node 8 --json findings.json
"""

FSDP2_HELP = """\
The script runs as it is, on a model and data that you replace by yours. With --gpus-per-node parameters are sharded
inside each node, and nodes hold copies (HSDP). With --method gradients travel by a method of gradwire.

examples
  gradwire config fsdp2 --world-size 8 --method int4,parameters=int8 --out train.py
  gradwire config fsdp2 --world-size 16 --gpus-per-node 8 --micro-batch 4 --batch 256 --method int4 --out train.py
"""

MEGATRON_HELP = f"""\
The arguments are an array of a shell script, each with its reason: source it, and pass "${{MEGATRON_ARGS[@]}}" on.
--check reads any script or list of arguments; ranks that torchrun is told there need not be given again.

{_CHECKING}
examples
  gradwire config megatron --world-size 16 --gpus-per-node 8 --tp 4 --pp 2 --batch 128 --out megatron.sh
  gradwire config megatron --check pretrain.sh --world-size 64 --json findings.json
"""


def add_commands(commands: Commands) -> None:
    """Add them to the command line."""
    config = commands.add_parser("config", help="write a configuration for DeepSpeed, FSDP2 or Megatron, or check one")
    frameworks = config.add_subparsers(required=True, metavar="FRAMEWORK")
    _add_deepspeed(frameworks)
    _add_fsdp2(frameworks)
    _add_megatron(frameworks)


def _add_deepspeed(frameworks: Commands) -> None:
    deepspeed = add(
        frameworks,
        "deepspeed",
        help="a JSON file for sharding, precision and communication",
        description="Write a configuration of DeepSpeed with a reason for each key, or check a given one.",
        epilog=DEEPSPEED_HELP,
    )
    _add_shape(deepspeed)
    deepspeed.add_argument("--stage", type=int, default=2, metavar="N", help="of ZeRO, 0 to 3 (default: 2)")
    deepspeed.add_argument(
        "--zero++",
        dest="zeropp",
        metavar="PARTS",
        help="parts of ZeRO++, by commas: qwz (parameters in 8 bits), hpz (a copy in each node), qgz (gradients in 4)",
    )
    deepspeed.add_argument("--offload", default="none", metavar="WHAT", help="none, optimizer or all (default: none)")
    deepspeed.add_argument("--hidden-size", type=int, metavar="N", help="of the model, for the buckets of stage 3")
    deepspeed.add_argument(
        "--clip", type=float, default=1.0, metavar="NORM", help="of gradients (default: 1.0; 0 for none)"
    )
    _add_check(deepspeed)
    deepspeed.set_defaults(run=run_deepspeed)


def _add_fsdp2(frameworks: Commands) -> None:
    fsdp2 = add(
        frameworks,
        "fsdp2",
        help="a training script for PyTorch's fully_shard",
        description="Write a training script for FSDP2 with a reason beside each setting.",
        epilog=FSDP2_HELP,
    )
    _add_shape(fsdp2)
    fsdp2.add_argument(
        "--stage", type=int, default=3, metavar="N", help="3, or 2 to keep parameters between the passes (default: 3)"
    )
    fsdp2.add_argument("--method", metavar="SPEC", help="what gradwire sends gradients by (default: FSDP2 alone)")
    fsdp2.add_argument("--offload", action="store_true", help="keep shards and the optimizer in the host's memory")
    fsdp2.set_defaults(run=run_fsdp2, check=None, json=None)


def _add_megatron(frameworks: Commands) -> None:
    megatron = add(
        frameworks,
        "megatron",
        help="arguments of Megatron-LM",
        description="Write arguments of Megatron with a reason for each, or check given ones.",
        epilog=MEGATRON_HELP,
    )
    _add_shape(megatron)
    for name, what in (
        ("tp", "each layer is cut over"),
        ("pp", "are stages of layers"),
        ("cp", "each sequence is cut over"),
    ):
        megatron.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"ranks that {what} (default: 1)")
    megatron.add_argument(
        "--stage",
        type=int,
        default=1,
        metavar="N",
        help="what copies shard, by ZeRO's numbers: 0 nothing, 1 optimizer, 2 gradients, 3 parameters (default: 1)",
    )
    _add_check(megatron)
    megatron.set_defaults(run=run_megatron)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("the training")
    shape.add_argument("--world-size", type=int, metavar="N", help="ranks in all, one for each GPU")
    shape.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks that share a node (default: all)")
    shape.add_argument("--micro-batch", type=int, default=1, metavar="N", help="samples of a rank at once (default: 1)")
    shape.add_argument("--batch", type=int, metavar="N", help="samples of a step (default: a micro-batch of each rank)")
    shape.add_argument("--precision", default="bf16", metavar="P", help="bf16, fp16 or fp32 (default: bf16)")
    shape.add_argument(
        "--reduce", default="fp32", metavar="P", help="what gradients are summed in: fp32, or the precision"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the configuration here")


def _add_check(parser: argparse.ArgumentParser) -> None:
    check = parser.add_argument_group("checking")
    check.add_argument("--check", type=Path, metavar="FILE", help="check this configuration, and write none")
    check.add_argument("--json", type=Path, metavar="FILE", help="write what is found here too")


def run_deepspeed(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire config deepspeed` and return its exit status.

    Raises:
        SpecError: a file that is no configuration, or a training that has none.
    """
    from gradwire.config import check_deepspeed, write_deepspeed

    if arguments.check is not None:
        found = check_deepspeed(arguments.check, arguments.world_size, arguments.gpus_per_node)
        return _told(found, arguments, console)
    parts = [part.strip().lower() for part in (arguments.zeropp or "").split(",") if part.strip()]
    written = write_deepspeed(
        _shape(arguments), arguments.stage, parts, arguments.offload, arguments.hidden_size, arguments.clip or None
    )
    return _give(written, arguments, console)


def run_fsdp2(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire config fsdp2` and return its exit status.

    Raises:
        SpecError, CompositionError: a training that FSDP2 has no script for.
    """
    from gradwire.config import write_fsdp2

    written = write_fsdp2(_shape(arguments), arguments.stage, arguments.method, arguments.offload)
    return _give(written, arguments, console)


def run_megatron(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire config megatron` and return its exit status.

    Raises:
        SpecError: a file without arguments, or a training that Megatron has none for.
    """
    from gradwire.config import check_megatron, write_megatron

    if arguments.check is not None:
        found = check_megatron(arguments.check, arguments.world_size, arguments.gpus_per_node)
        return _told(found, arguments, console)
    written = write_megatron(_shape(arguments), arguments.tp, arguments.pp, arguments.cp, arguments.stage)
    return _give(written, arguments, console)


def _shape(arguments: argparse.Namespace) -> TrainingShape:
    from gradwire.config import TrainingShape

    if arguments.json is not None:
        raise SpecError("--json is for what --check finds: give --check FILE too, or --out for the configuration")
    if arguments.world_size is None:
        raise SpecError("--world-size is missing: give the number of ranks")
    return TrainingShape(
        arguments.world_size,
        arguments.micro_batch,
        arguments.batch,
        arguments.gpus_per_node,
        arguments.precision,
        arguments.reduce,
    )


def _give(written: ConfigFile, arguments: argparse.Namespace, console: Console) -> int:
    """Write a configuration to its file, and its reasons to the terminal; or itself to standard output."""
    from gradwire.cli.lines import say

    reasons = console
    if arguments.out is None:
        sys.stdout.write(written.text)
        reasons = Console(stderr=True)
    else:
        arguments.out.write_text(written.text, encoding="utf-8")
        say(console, f"configuration: {arguments.out}")
    if arguments.out is not None or not written.has_reasons:
        for each in written.settings:
            say(reasons, str(each))
    return OK


def _told(found: Examination, arguments: argparse.Namespace, console: Console) -> int:
    """Print what was found, and write it down; return the exit status."""
    from gradwire.cli.lines import say

    say(console, str(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found.to_words(), indent=1) + "\n", encoding="utf-8")
        say(console, f"findings: {arguments.json}")
    return found.status
