"""What `gradwire bench` has measured: rows, links, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from gradwire.bench.errors import BenchError
from gradwire.bench.timing import CallTimes
from gradwire.core.atomic_file import write_atomically
from gradwire.core.checked import thread_safe

_FORMAT = 1


@dataclass(frozen=True)
class BenchRow:
    """One collective or method at one size, alike on all ranks.

    Attributes:
        name: of the collective, or the spec of the method.
        kind: which of the two.
        size_bytes: of the tensor that the figures are about: n times the count where ranks gather or scatter. Of a
            method it is what a user's tensor has, uncompressed.
        count: elements, as nccl-tests counts them.
        dtype: of the elements, such as "float32".
        redop: "sum" of a collective, "mean" or "rule" (a median, say) of a method; "none" where nothing is reduced.
        root: the rank that sends or receives all; -1 where there is none.
        bus_factor: bandwidth of the bus by that of the algorithm.
        times: what calls took; None where there are none, and `refused` says why.
        wrong: of a collective, elements of all ranks' results that were not what they should be.
        wire_bytes: of a method, what the rank that sends most sends in a call.
        error: of a method, |result - mean| / |mean| in the Euclidean norm, of its first call and the worst rank.
        refused: why there are no figures, in a sentence; "" where there are.
    """

    name: str
    kind: Literal["collective", "method"]
    size_bytes: int
    count: int
    dtype: str
    redop: str = "none"
    root: int = -1
    bus_factor: float = 1.0
    times: CallTimes | None = None
    wrong: int | None = None
    wire_bytes: int | None = None
    error: float | None = None
    refused: str = ""

    @property
    def algbw(self) -> float | None:
        """GB/s (1e9 bytes) of the algorithm: the size by the time of the slowest rank.

        >>> BenchRow("reduce", "collective", 10**9, 1, "uint8", times=CallTimes(3, 0.4, 0.5, 0.6)).algbw
        2.0
        """
        return self.size_bytes / self.times.slowest_s / 1e9 if self.times else None

    @property
    def busbw(self) -> float | None:
        """GB/s of the bus: what the slowest link must have carried, to be compared with what it can carry.

        >>> times = CallTimes(3, 0.4, 0.5, 0.6)
        >>> BenchRow("all_reduce", "collective", 10**9, 1, "uint8", bus_factor=1.5, times=times).busbw
        3.0
        """
        return None if self.algbw is None else self.algbw * self.bus_factor

    def as_dict(self) -> dict[str, Any]:
        """Plain data for programs, bandwidths in it."""
        return {**msgspec.to_builtins(self), "algbw_gb_per_s": self.algbw, "busbw_gb_per_s": self.busbw}


@dataclass(frozen=True)
class BenchLink:
    """The links of one level, as `gradwire.drivers.link_profiler` measures them and `gradwire topology` prints them.

    Attributes:
        level: whose groups they join.
        alpha_s: of an empty message, one way.
        beta_s_per_byte: of each byte of a long one.
    """

    level: str
    alpha_s: float
    beta_s_per_byte: float

    @property
    def bits_per_s(self) -> float | None:
        """The rate; None where none was seen.

        >>> BenchLink("node", 0.001, 8e-8).bits_per_s
        100000000.0
        """
        return 8 / self.beta_s_per_byte if self.beta_s_per_byte else None


@dataclass(frozen=True)
class BenchTable:
    """What was measured on some ranks.

    Attributes:
        ranks: how many.
        backend: of torch.distributed.
        device: "cpu" or "cuda".
        rows: in the order in which they were measured.
        links: of each level, the finest first.
        links_text: the same for people, with who shares a node.
        network: the emulated network in words; "" on what there is.
        variables: of the environment that a sweep has set.
    """

    ranks: int
    backend: str
    device: str
    rows: tuple[BenchRow, ...]
    links: tuple[BenchLink, ...] = ()
    links_text: str = ""
    network: str = ""
    variables: dict[str, str] | None = None

    def of_name(self, name: str) -> tuple[BenchRow, ...]:
        """The rows of a collective or a method, by rising size."""
        return tuple(row for row in self.rows if row.name == name)

    @property
    def wrong(self) -> int:
        """Elements of all collectives that were not what they should be."""
        return sum(row.wrong or 0 for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for programs; times in seconds, bandwidths in GB/s."""
        links = [{**msgspec.to_builtins(link), "bits_per_s": link.bits_per_s} for link in self.links]
        return {"format": _FORMAT, **vars(self), "rows": [row.as_dict() for row in self.rows], "links": links}

    @classmethod
    def of(cls, kept: object) -> BenchTable:
        """What `as_dict` made plain data of.

        Raises:
            BenchError: it is of another form.
        """
        try:
            if (form := msgspec.convert(kept, thread_safe(_OfForm)).format) != _FORMAT:
                raise BenchError(f"the table has format {form}, and {_FORMAT} is known: measure anew")
            return msgspec.convert(kept, thread_safe(cls))
        except msgspec.ValidationError as error:
            raise BenchError(f"this is no table of gradwire bench: {error}") from error


OnRow = Callable[[BenchTable, BenchRow], None]
"""Is told of a row as soon as it is there, with what is known of its table, which has no rows yet."""


@dataclass(frozen=True)
class _OfForm:
    format: int


def write_tables(tables: tuple[BenchTable, ...], file: Path) -> None:
    """Write tables for programs: JSON, a list of what `BenchTable.as_dict` says of each."""
    write_atomically(file, json.dumps([table.as_dict() for table in tables], indent=1) + "\n")


def read_tables(file: Path) -> tuple[BenchTable, ...]:
    """Read what `write_tables` has written.

    Raises:
        BenchError: the file cannot be read, or holds something else.
    """
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=thread_safe(list[Any]))
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"{file} holds no tables of gradwire bench: {error}") from error
    return tuple(BenchTable.of(each) for each in kept)
