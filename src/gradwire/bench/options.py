"""The options of `gradwire bench`. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.bench.errors import BenchError
from gradwire.bench.sizes import sizes_between
from gradwire.core.nearest import fold, meant
from gradwire.option_fields import AtLeast, Positive, check_fields, option, stored

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
ALL = "all"

MEASURED, SIZES, RANKS, RESULT = "what to measure", "sizes", "where, without a launcher", "the result"
_MOST_RANKS = 1000


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, in which sizes and on which ranks. Each field says what it is, as `gradwire bench --help` does.

    Without `collectives` all of them are measured; where `methods` are given, `all_reduce` alone, to compare with.

    Raises:
        BenchError: sizes that make no sense, an unknown collective or type with the nearest name, a number out of its
            range, or options that exclude each other.

    >>> BenchOptions(min_bytes="1K", max_bytes="16K").sizes
    (1024, 4096, 16384)
    >>> BenchOptions(collectives=("allreduce", "AllGather")).collectives_in_order
    ('all_reduce', 'all_gather')
    """

    collectives: tuple[str, ...] = option(
        (), "collectives, in the order to show", group=MEASURED, metavar="NAME",
        unset="all of them; with --methods, all_reduce",
    )  # fmt: skip
    methods: tuple[str, ...] = option(
        (), "methods and exchanges of gradwire by their specs, or all", group=MEASURED, metavar="SPEC", unset="none"
    )
    dtype: str = option("float32", f"type of the elements: {', '.join(DTYPES)}", group=MEASURED, metavar="TYPE")
    root: int = option(
        0, "rank that sends or receives all in broadcast, reduce, gather and scatter", group=MEASURED, metavar="RANK",
        limits=AtLeast(0, most=_MOST_RANKS),
    )  # fmt: skip
    backend: str | None = option(
        None, "backend of torch.distributed", group=MEASURED, metavar="NAME", unset="nccl on GPUs, else gloo"
    )
    min_bytes: str = option("8", "smallest size", group=SIZES, metavar="SIZE")
    max_bytes: str = option("64M", "largest size", group=SIZES, metavar="SIZE")
    factor: int = option(4, "how much each size is larger", group=SIZES, metavar="N", limits=AtLeast(2, most=1 << 20))
    calls: int | None = option(
        None, "calls that count in each row", group=SIZES, metavar="N", unset="as many as --seconds takes",
        limits=AtLeast(1, most=1_000_000),
    )  # fmt: skip
    seconds: float = option(
        0.5, "what the calls of a row take, about: at least 3 calls and at most 1000", group=SIZES, metavar="S",
        limits=Positive(most=3600), instead_of="calls",
    )  # fmt: skip
    hosts: int | None = option(
        None, "hosts of an emulated network, one rank each", group=RANKS, metavar="N", unset="none",
        limits=AtLeast(2, most=_MOST_RANKS),
    )  # fmt: skip
    ranks: int | None = option(
        None, "ranks on this machine as it is", group=RANKS, metavar="N", unset="none",
        limits=AtLeast(2, most=_MOST_RANKS), instead_of="hosts",
    )  # fmt: skip
    rate: str = option("100mbit", "of every link of --hosts: 100mbit, 1gbit, ...", group=RANKS, metavar="RATE")
    delay: str = option("0", "of a round trip between two of --hosts: 50ms", group=RANKS, metavar="TIME")
    loss: str = option("0", "of frames between two of --hosts, in each direction: 0.1%", group=RANKS, metavar="SHARE")
    sweep: bool = option(
        False, "with --ranks or --hosts: measure NCCL's algorithms and protocols, each in new processes", group=RANKS
    )
    deadline: float = option(
        3600.0, "seconds after which ranks are ended, and each waits for others", group=RANKS, metavar="S",
        limits=Positive(most=1e7),
    )  # fmt: skip
    no_links: bool = option(
        False, "leave out latency and bandwidth of the links, which take about 5 s a level", group=RESULT
    )
    cache: Path | None = option(
        None, "keep what was measured of links here, and use it for the same hosts", group=RESULT, metavar="FILE"
    )
    description: Path | None = option(
        None, "TOML that says what cannot be seen: sites, their links", group=RESULT, metavar="FILE"
    )
    json: Path | None = option(None, "write the result here, for programs", group=RESULT, metavar="FILE")

    def __post_init__(self) -> None:
        check_fields(self, BenchError)
        _ = self.sizes, self.collectives_in_order  # refuse what cannot be used
        if self.dtype not in DTYPES:
            raise BenchError(f"unknown type {self.dtype!r}: {meant(self.dtype, DTYPES)}")
        if self.hosts is None and (self.rate, self.delay, self.loss) != ("100mbit", "0", "0"):
            raise BenchError("--rate, --delay and --loss are of emulated links: give --hosts 2 as well")
        if self.no_links and (self.cache or self.description):
            raise BenchError("--cache and --description are about links: leave --no-links out")

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> BenchOptions:
        """The options that `stored` made plain data of.

        >>> BenchOptions.of(stored(BenchOptions(methods=("int4",)))) == BenchOptions(methods=("int4",))
        True
        """
        given: dict[str, Any] = dict(kept)
        for name in ("collectives", "methods"):
            given[name] = tuple(given[name])
        for name in ("cache", "description", "json"):
            given[name] = None if given[name] is None else Path(given[name])
        return cls(**given)

    def as_words(self) -> dict[str, Any]:
        """Plain data, for `of`."""
        return stored(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the rows, in bytes."""
        return sizes_between(self.min_bytes, self.max_bytes, self.factor)

    @property
    def collectives_in_order(self) -> tuple[str, ...]:
        """The names of the collectives to measure."""
        return known(self.collectives) or (("all_reduce",) if self.methods else COLLECTIVES)


def known(names: Iterable[str]) -> tuple[str, ...]:
    """Return collectives by their names here; `AllReduce` and nccl-tests' `all_reduce_perf` are `all_reduce`.

    Raises:
        BenchError: an unknown name, with the nearest one.

    >>> known(["sendrecv", "Reduce-Scatter", "all_reduce_perf"])
    ('send_recv', 'reduce_scatter', 'all_reduce')
    """
    found: list[str] = []
    for name in names:
        spelled = {fold(each): each for each in COLLECTIVES} | {"alltoall": "all_to_all"}
        if name == ALL:
            found += COLLECTIVES
        elif (key := fold(name).removesuffix("perf")) in spelled:
            found.append(spelled[key])
        else:
            raise BenchError(f"unknown collective {name!r}: {meant(name, COLLECTIVES)}")
    return tuple(dict.fromkeys(found))
