"""`gradwire nccl advise`: which variables of NCCL a kind of cluster wants."""

from __future__ import annotations

import argparse

from rich.console import Console

from gradwire.cli.commands import Commands, add

OK = 0

ADVISE_HELP = """\
The file has a reason and a source for each line. Lines that depend on your hosts are marked as examples. What you set
gradwire doctor checks.

examples
  gradwire nccl advise --cluster infiniband > nccl.env
  source nccl.env
"""


def add_commands(commands: Commands) -> None:
    """Add it to the command line."""
    nccl = commands.add_parser("nccl", help="which variables of NCCL a kind of cluster wants, and why")
    actions = nccl.add_subparsers(required=True, metavar="ACTION")
    advise = add(
        actions,
        "advise",
        help="print an environment file",
        description="Print an environment file for a kind of cluster, with a reason and a source for each line.",
        epilog=ADVISE_HELP,
    )
    advise.add_argument(
        "--cluster",
        required=True,
        metavar="KIND",
        help="single-node, infiniband, roce, efa (AWS), gcp, azure or ethernet",
    )
    advise.set_defaults(run=run_advise)


def run_advise(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire nccl advise` and return its exit status.

    Raises:
        SpecError: no such kind of cluster.
    """
    from gradwire.cli.lines import say
    from gradwire.doctor import advise

    say(console, str(advise(arguments.cluster)))
    return OK
