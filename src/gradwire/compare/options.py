"""The options of `gradwire compare`. Nothing here needs torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradwire.core.errors import GradwireError
from gradwire.core.grammar import current
from gradwire.option_fields import AtLeast, Positive, option

DDP, FSDP2 = "ddp", "fsdp2"

DEFAULT_METHODS = {
    DDP: (
        "torch.fp32",
        "torch.fp16",
        "torch.powersgd:4",
        "torch.noop",
        "int4",
        "powersgd:8,factors=fp16",
        "topk:0.01",
    ),
    FSDP2: (
        "torch.fp32",
        "torch.bf16",
        "torch.noop",
        "none,parameters=none",
        "int8",
        "int8,parameters=int8",
        "int4,parameters=int8",
    ),
}

BUCKET_MB = 25.0
"""DDP's own choice."""

MOST_RANKS = 1000

TRAINED, NETWORK, RESULT = "what to train", "the network", "the result"


class CompareError(GradwireError, ValueError):
    """Options that make no comparison, or that clash with what an output folder already holds."""


@dataclass(frozen=True)
class CompareOptions:
    """What to compare, and under which conditions. Each field says what it is, and `gradwire compare --help` shows it.

    `methods` are specs, those of PyTorch's own methods (`torch.fp32`) among them; where there are none, they are
    `DEFAULT_METHODS` of the engine.

    >>> CompareOptions(task="digits", rate="1gbit").methods[0]
    'torch.fp32'
    """

    task: str = option(
        "bytes", "digits, bytes, or package.module:function", group=TRAINED, metavar="TASK", condition="task"
    )
    methods: tuple[str, ...] = option(
        (), "methods, in the order to show", group=TRAINED, metavar="SPEC", unset="a good selection"
    )
    engine: Literal["ddp", "fsdp2"] = option(DDP, "what holds the model together over the ranks", group=TRAINED)
    text: Path | None = option(
        None, "folder of text for the bytes task", group=TRAINED, metavar="FOLDER", unset="Python's standard library"
    )
    steps: int | None = option(
        None, "steps of each run", group=TRAINED, metavar="N", unset="the task's own number",
        limits=AtLeast(1, most=10**9), condition="steps",
    )  # fmt: skip
    minutes: float | None = option(
        None, "train each method for M minutes instead", group=TRAINED, metavar="M",
        limits=Positive(most=1e6), instead_of="steps", condition="minutes",
    )  # fmt: skip
    seeds: int = option(
        1, "runs of each method, each with its own weights and data order", group=TRAINED, metavar="N",
        limits=AtLeast(1, most=1000),
    )  # fmt: skip
    whole_baselines: bool = option(
        False, "make every step of torch.fp32, :fp16 and :bf16 on these links; without it, once the time of a step is "
        "known to 2 %, the rest is trained without a limit on the links, and its time is estimated", group=TRAINED,
    )  # fmt: skip
    bucket_mb: float = option(
        BUCKET_MB, "DDP's bucket size", group=TRAINED, metavar="MB",
        limits=Positive(most=1e6), condition="bucket size (MB)",
    )  # fmt: skip
    hosts: int = option(
        4, "hosts, one rank each", group=NETWORK, metavar="N", limits=AtLeast(1), condition="hosts"
    )  # fmt: skip
    nodes: str | None = option(
        None, "nodes by the ranks on each, 2x2: ranks of a node reach each other without a limit", group=NETWORK,
        metavar="NxM", instead_of="hosts", condition="nodes",
    )  # fmt: skip
    rate: str = option("100mbit", "of every link: 100mbit, 1gbit, ...", group=NETWORK, metavar="RATE")
    rates: tuple[str, ...] = option(
        (), "of each host's link: 100mbit,20mbit,...", group=NETWORK, metavar="RATE,RATE,...",
        separator=",", instead_of="rate",
    )  # fmt: skip
    rate_between: str | None = option(
        None, "of the links between --nodes: 50mbit, ...", group=NETWORK, metavar="RATE", unset="--rate",
        instead_of="rate",
    )  # fmt: skip
    delay: str = option("0", "of a round trip between two hosts, as ping shows it: 50ms", group=NETWORK, metavar="TIME")
    loss: str = option("0", "of frames between two hosts, in each direction: 0.1%", group=NETWORK, metavar="SHARE")
    slow: tuple[str, ...] = option(
        (), "hosts that compute slower, counted from 0: 3:4x", group=NETWORK, metavar="HOST:FACTOR"
    )
    network: Literal["auto", "root", "user", "paced"] = option(
        "auto", "namespaces made as root or as a user, or paced sockets, an approximation", group=NETWORK,
        unset="the best that works",
    )  # fmt: skip
    deadline_s: float | None = option(
        None, "seconds a rank may keep the others waiting", group=NETWORK, metavar="S", flag="--deadline",
        unset="from model and rate", limits=Positive(most=1e6),
    )  # fmt: skip
    target: str | None = option(
        None, "what time-to-target means", group=RESULT, metavar="TARGET",
        unset="the task's own, or the loss torch.fp32 ends at",
    )  # fmt: skip
    out: Path = option(Path("compare-report"), "output folder", group=RESULT, metavar="DIR")
    fresh: bool = option(False, "forget the runs that the output folder holds", group=RESULT, kept=False)
    evaluate_every: int | None = option(
        None, "steps between evaluations", unset="the task's own number for a target by the metric, else only the end",
        limits=AtLeast(1), condition="evaluate every",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Fill in the methods, as they are written now."""
        methods = self.methods or DEFAULT_METHODS.get(self.engine, ())
        object.__setattr__(self, "methods", tuple(current(spec) for spec in methods))
        object.__setattr__(self, "target", self.target and current(self.target))

    @property
    def ranks_per_host(self) -> int:
        """How many ranks each host has.

        Raises:
            CompareError: `nodes` makes no sense.
        """
        return 1 if self.nodes is None else parse_nodes(self.nodes)[1]

    @property
    def ranks(self) -> int:
        """How many ranks train, on all hosts."""
        return self.hosts * self.ranks_per_host


def parse_nodes(text: str) -> tuple[int, int]:
    """Read "NxM" and return how many nodes there are, and how many ranks on each.

    Raises:
        CompareError: it reads otherwise, or there are fewer than two nodes, no ranks, or more than 1,000.

    >>> parse_nodes("2x4")
    (2, 4)
    """
    match = re.fullmatch(r"(\d{1,9})x(\d{1,9})", text.strip())
    if not match:
        raise CompareError(f"--nodes {text[:40]!r} cannot be read: write nodes by the ranks on each, such as 2x2")
    nodes, ranks = int(match[1]), int(match[2])
    if nodes < 2 or ranks < 1:
        raise CompareError(f"--nodes {text}: links join at least 2 nodes of at least 1 rank, such as 2x2")
    if nodes * ranks > MOST_RANKS:
        raise CompareError(f"--nodes {text} makes {nodes * ranks:,} ranks: at most {MOST_RANKS:,} can be emulated")
    return nodes, ranks
