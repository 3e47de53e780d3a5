"""`gradwire topology`: what a host sees of itself, and under a launcher who is near whom and what links carry."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from gradwire.cli.commands import Commands, add

OK = 0

TOPOLOGY_HELP = """\
By itself the command prints what this host can see: interfaces, RDMA ports, NUMA nodes and GPUs. Started by torchrun on
all hosts, it finds out together with the other ranks which of them share a node, measures the links of each level, and
rank 0 prints them. It takes about five seconds a level where a round trip takes 10 ms.

examples
  gradwire topology
  torchrun --nnodes 2 --nproc-per-node 2 ... -m gradwire topology --cache links.json
  gradwire net exec --hosts 2 --rate 50mbit -- torchrun --nproc-per-node 2 -m gradwire topology
"""


def add_commands(commands: Commands) -> None:
    """Add it to the command line."""
    topology = add(
        commands,
        "topology",
        help="what this host sees of itself; under torchrun, who is near whom and what links carry",
        description="What this host sees of itself; under torchrun, who is near whom and what links carry.",
        epilog=TOPOLOGY_HELP,
    )
    topology.add_argument(
        "--description", type=Path, metavar="FILE", help="TOML that says what cannot be seen: sites, their links"
    )
    topology.add_argument(
        "--cache", type=Path, metavar="FILE", help="keep what was measured here, and use it for the same hosts"
    )
    topology.set_defaults(run=run_topology)


def run_topology(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire topology` and return its exit status.

    Raises:
        CompositionError: a description or a cache without a launcher.
        TopologyError: a description that cannot be read or contradicts what was found.
    """
    from gradwire.cli.lines import say
    from gradwire.core.errors import CompositionError
    from gradwire.topology import read_host

    if "RANK" in os.environ:
        return _run_ranks(arguments, console)
    if arguments.description or arguments.cache:
        raise CompositionError("--description and --cache are about several ranks: start the command by torchrun")
    say(console, read_host().summary)
    return OK


def _run_ranks(arguments: argparse.Namespace, console: Console) -> int:
    import torch
    import torch.distributed as dist

    from gradwire.cli.lines import say
    from gradwire.drivers.link_profiler import LinkProfiler
    from gradwire.drivers.process_group import GroupTransport

    dist.init_process_group("gloo")
    try:
        group, device = dist.group.WORLD, torch.device("cpu")
        assert group is not None
        transport = GroupTransport(group)
        profiler = LinkProfiler(transport, device, arguments.cache, arguments.description)
        found, links = profiler.topology(), profiler.axis_links()
    finally:
        dist.destroy_process_group()
    if transport.rank == 0:
        say(console, f"{found.summary}\n{links.summary(found.topology)}")
    return OK
