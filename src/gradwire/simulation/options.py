"""The options of `gradwire simulate`. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradwire.core.errors import SpecError
from gradwire.core.rates import TIMES, seconds_in, shortened
from gradwire.option_fields import AtLeast, check_fields, flag_of, option, options_of

MOST_RANKS = 65_536

TRAINED, RANKS, PACE, FAILURES, SERVERS, RESULT = (
    "what is trained", "ranks and links", "whose speed varies", "failures", "servers of asgd, ssp and dcasgd",
    "the result",
)  # fmt: skip

_UNITS = TIMES | {"min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class SimulateOptions:
    """What is trained, on which ranks and links, and what goes wrong. `gradwire simulate --help` shows each field.

    Times are texts with a unit of us, ms, s, min, h, d; `seconds` reads them.

    Raises:
        SpecError: a number out of its range, a text that cannot be read, or options that exclude each other.

    >>> SimulateOptions(step="250ms", ranks=64).seconds("step")
    0.25
    """

    step: str | None = option(
        None, "what a rank computes in a step, without communication: 250ms", group=TRAINED, metavar="TIME",
        unset="none: it must be given",
    )  # fmt: skip
    task: str = option(
        "bytes", "digits, bytes, or package.module:function, whose model is trained", group=TRAINED, metavar="TASK"
    )
    text: Path | None = option(None, "folder of text for the bytes task", group=TRAINED, metavar="FOLDER")
    parameters: str | None = option(
        None, "of a model of square matrices, in place of a task: 7B", group=TRAINED, metavar="N", instead_of="task"
    )
    device: Literal["cpu", "cuda"] | None = option(
        None, "what ranks compute on: on a GPU more is coded and sent at a time", group=TRAINED,
        unset="what the model lies on, and cpu for --parameters",
    )  # fmt: skip
    coding: str = option("0", "what a rank codes before it sends, each time", group=TRAINED, metavar="TIME")
    overlap: float = option(
        0.0, "share of a step's computing beside which messages may travel, such as 0.6 for most of a backward pass",
        group=TRAINED, metavar="SHARE",
    )  # fmt: skip
    ranks: int = option(4, "how many", group=RANKS, metavar="N", limits=AtLeast(1, most=MOST_RANKS))
    ranks_per_host: int = option(
        1,
        "which share the link of their host, and its failures",
        group=RANKS,
        metavar="N",
        limits=AtLeast(1, most=1024),
    )
    rate: str = option(
        "1gbit", "of each host's link: 1gbit, or what was measured: the file of GRADWIRE_LINKS", group=RANKS,
        metavar="RATE",
    )  # fmt: skip
    latency: str = option("0.1ms", "of each message on that link, one way", group=RANKS, metavar="TIME")
    inside: str | None = option(None, "rate between the ranks of a host", group=RANKS, metavar="RATE", unset="no limit")
    topology: Path | None = option(
        None, "file of levels with rates, as GRADWIRE_TOPOLOGY has it", group=RANKS, metavar="FILE", instead_of="rate"
    )
    all_reduce: Literal["ring", "tree"] = option(
        "ring", "how sums travel: 2 (n - 1) rounds, or 2 log2(n) of twice the bytes, as NCCL's trees", group=RANKS
    )
    spread: str = option(
        "0", "of the computing time: lognormal:0.1 or exponential:0.1, the standard deviation in means", group=PACE,
        metavar="KIND:SHARE",
    )  # fmt: skip
    slow: tuple[str, ...] = option(
        (), "ranks that always compute slower, counted from 0: 3:4x", group=PACE, metavar="RANK:FACTOR"
    )
    slow_in_turn: str = option(
        "0", "in each step each rank is slower by chance: 1%:3x", group=PACE, metavar="CHANCE:FACTOR"
    )
    mtbf: str | None = option(
        None, "mean time between failures of one host: 30d", group=FAILURES, metavar="TIME", unset="no failures"
    )
    checkpoint: str = option("30s", "what a checkpoint takes, while no rank computes", group=FAILURES, metavar="TIME")
    restart: str = option(
        "5min", "from a failure until ranks train again; of elastic, until the host is back", group=FAILURES,
        metavar="TIME",
    )  # fmt: skip
    interval: str | None = option(
        None, "training between two checkpoints", group=FAILURES, metavar="TIME", unset="the best"
    )
    detection: str = option(
        "10s", "of elastic: until the others know that a host is lost", group=FAILURES, metavar="TIME"
    )
    servers: int = option(
        1, "which hold equal parts of the model", group=SERVERS, metavar="N", limits=AtLeast(1, most=MOST_RANKS)
    )
    server_rate: str | None = option(None, "of each server's link", group=SERVERS, metavar="RATE", unset="--rate")
    server_time: str = option(
        "0", "what a server computes for a push, one after the other", group=SERVERS, metavar="TIME"
    )
    steps: int = option(
        200, "of each rank, rounded up to whole windows", group=RESULT, metavar="N", limits=AtLeast(1, most=1_000_000)
    )
    seed: int = option(0, "of all that is drawn by chance", group=RESULT, metavar="N", limits=AtLeast(0, most=2**31))

    def __post_init__(self) -> None:
        check_fields(self, SpecError)
        if self.step is None:
            raise SpecError("nothing tells how long a rank computes in a step: give --step, such as --step 250ms")
        if not 0 <= self.overlap < 1:
            raise SpecError(f"--overlap {self.overlap:g} is no share of a step: give 0 to less than 1, such as 0.6")
        if self.ranks % self.ranks_per_host and self.ranks > self.ranks_per_host:
            raise SpecError(
                f"--ranks {self.ranks} make no whole hosts of {self.ranks_per_host}: take a multiple of that"
            )
        if self.inside is not None and self.ranks_per_host == 1:
            raise SpecError("--inside is between ranks of one host: give --ranks-per-host as well")
        if self.measured is not None or self.topology is not None:
            self._refuse_links_twice()
        if self.mtbf is None and (given := self._given("checkpoint", "restart", "interval", "detection")):
            raise SpecError(f"--{given[0]} is about failures, and there are none: give --mtbf as well")
        for name in ("step", "coding", "latency", "checkpoint", "restart", "detection", "server_time"):
            self.seconds(name)
        for name in ("mtbf", "interval"):
            if getattr(self, name) is not None and self.seconds(name) == 0:
                raise SpecError(
                    f"--{name} 0 is no time: give more than 0, such as {'30d' if name == 'mtbf' else '10min'}"
                )
        if self.seconds("step") == 0:
            raise SpecError("--step 0 is no time: a rank computes for some, such as 250ms")

    def _refuse_links_twice(self) -> None:
        source = "--topology" if self.topology is not None else f"--rate {self.rate}"
        if given := self._given("inside", "latency"):
            raise SpecError(f"{source} tells of each link what it takes: leave --{given[0]} out")

    def _given(self, *names: str) -> list[str]:
        """Which of these options are not at their defaults."""
        return [name for name, default, _ in options_of(type(self)) if name in names and getattr(self, name) != default]

    @property
    def measured(self) -> Path | None:
        """The file of measured links, where one was given as the rate."""
        return Path(self.rate) if self.rate.endswith(".json") else None

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return max(1, self.ranks // self.ranks_per_host)

    def seconds(self, name: str) -> float:
        """Read an option that is a time.

        Raises:
            SpecError: a text that is none.
        """
        text = str(getattr(self, name))
        found = seconds_in(text, _UNITS)
        if found is None:
            flag = next(flag_of(each, facts) for each, _, facts in options_of(type(self)) if each == name)
            raise SpecError(
                f"{flag} {shortened(text)} is no time: write a number and a unit of {', '.join(_UNITS)}, such as 250ms"
            )
        return found
