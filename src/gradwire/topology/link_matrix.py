"""Latency and bandwidth of pairs of hosts, and which of their links are slow among fast ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.core.rates import spoken_rate
from gradwire.topology.axis_links import MeasuredPair

SLOW_SHARE = 0.5
"""A link is slow among others where it has less than this share of the rate that the fastest quarter of them reach. The
median would not do: one slow host among four makes half of all pairs slow."""

LATE_TIMES, LATE_S = 3.0, 1e-3
"""A link is late where its latency is more than so many times that of the fastest quarter, and so many seconds above
it: below that it is the transport and the processors that are measured."""


@dataclass(frozen=True)
class SlowLink:
    """A link that is slower than others of its kind.

    Attributes:
        pair: its ranks.
        is_rate: whether the rate is low, or else the latency high.
        seen: the rate in bit/s, or the latency in seconds.
        usual: what the fastest quarter of all pairs reach.
    """

    pair: tuple[int, int]
    is_rate: bool
    seen: float
    usual: float


@dataclass(frozen=True)
class LinkMatrix:
    """What a message takes between hosts, each of which a rank stands for.

    Attributes:
        ranks: one of each host, by rising number.
        names: of their hosts.
        pairs: that were measured; of many hosts not all of them.

    >>> pairs = [MeasuredPair((0, 1), 1e-3, 8e-8), MeasuredPair((0, 2), 1e-3, 8e-7), MeasuredPair((1, 2), 1e-3, 8e-7)]
    >>> matrix = LinkMatrix((0, 1, 2), ("a", "b", "c"), tuple(pairs))
    >>> print(matrix)
    Mbit/s    rank 0  rank 1  rank 2
    rank 0 a       -     100      10
    rank 1 b     100       -      10
    rank 2 c      10      10       -
    ms        rank 0  rank 1  rank 2
    rank 0 a       -       1       1
    rank 1 b       1       -       1
    rank 2 c       1       1       -
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    pairs: tuple[MeasuredPair, ...]

    def __str__(self) -> str:
        return f"{self._table('Mbit/s', megabits)}\n{self._table('ms', _milliseconds)}"

    def _table(self, unit: str, figure: Any) -> str:
        found = {pair.ranks: figure(pair) for pair in self.pairs}
        heads = [f"rank {rank} {name}" for rank, name in zip(self.ranks, self.names, strict=True)]
        left = max(len(unit), *map(len, heads))
        titles = [f"rank {rank}" for rank in self.ranks]
        rows = [[unit, *titles]]
        for head, one in zip(heads, self.ranks, strict=True):
            rows.append([head, *(found.get((min(one, other), max(one, other)), "-") for other in self.ranks)])
        wide = max(len(cell) for row in rows for cell in row[1:])
        return "\n".join(f"{row[0]:<{left}}  {'  '.join(f'{cell:>{wide}}' for cell in row[1:])}" for row in rows)

    def to_words(self) -> dict[str, Any]:
        """The same for programs: latencies in seconds one way, rates in bits per second."""
        pairs = [
            {"ranks": list(pair.ranks), "latency_s": pair.alpha_s, "bits_per_s": bits_per_s(pair)}
            for pair in self.pairs
        ]
        return {"ranks": list(self.ranks), "hosts": list(self.names), "pairs": pairs}


def bits_per_s(pair: MeasuredPair) -> float | None:
    """The rate of a pair; None where a byte took no time that could be seen."""
    return 8 / pair.beta_s_per_byte if pair.beta_s_per_byte > 0 else None


def slow_links(pairs: Sequence[MeasuredPair]) -> list[SlowLink]:
    """Return links that are slow or late among the others; one pair alone has no others.

    >>> fast = [MeasuredPair((0, other), 1e-4, 8e-8) for other in (1, 2, 3)]
    >>> [each.pair for each in slow_links([*fast, MeasuredPair((1, 2), 1e-4, 8e-7)])]
    [(1, 2)]
    """
    if len(pairs) < 2:
        return []
    rates = sorted((rate for pair in pairs if (rate := bits_per_s(pair)) is not None), reverse=True)
    fast = rates[len(rates) // 4] if rates else 0.0
    soon_s = sorted(pair.alpha_s for pair in pairs)[len(pairs) // 4]
    found: list[SlowLink] = []
    for pair in pairs:
        rate = bits_per_s(pair)
        if rate is not None and rate < SLOW_SHARE * fast:
            found.append(SlowLink(pair.ranks, True, rate, fast))
        if pair.alpha_s > LATE_TIMES * soon_s and pair.alpha_s > soon_s + LATE_S:
            found.append(SlowLink(pair.ranks, False, pair.alpha_s, soon_s))
    return found


def shared_end(slow: Sequence[SlowLink], pairs: Sequence[MeasuredPair]) -> int | None:
    """The rank whose pairs are the slow ones, all of them and no others; None where there is no such rank, or only two.

    >>> slow = [SlowLink(pair, True, 10e6, 100e6) for pair in ((0, 2), (1, 2))]
    >>> shared_end(slow, [MeasuredPair(ranks, 0.0, 0.0) for ranks in ((0, 1), (0, 2), (1, 2))])
    2
    """
    named = {each.pair for each in slow}
    ends = {rank for pair in pairs for rank in pair.ranks}
    at_fault = [rank for rank in sorted(ends) if named == {pair.ranks for pair in pairs if rank in pair.ranks}]
    return at_fault[0] if len(ends) > 2 and len(at_fault) == 1 else None


def said_of(link: SlowLink) -> str:
    """What was seen of a link, and what is usual.

    >>> said_of(SlowLink((0, 1), True, 10e6, 100e6))
    'ranks 0 and 1: 10 Mbit/s, where the fastest quarter of the pairs reach 100 Mbit/s'
    >>> said_of(SlowLink((0, 1), False, 0.02, 0.001))
    'ranks 0 and 1: 20 ms one way, where the fastest quarter of the pairs take 1 ms'
    """
    start = f"ranks {link.pair[0]} and {link.pair[1]}: "
    if link.is_rate:
        return (
            f"{start}{spoken_rate(link.seen)}, where the fastest quarter of the pairs reach {spoken_rate(link.usual)}"
        )
    soon, late = (f"{1e3 * seconds:.3g} ms" for seconds in (link.usual, link.seen))
    return f"{start}{late} one way, where the fastest quarter of the pairs take {soon}"


def megabits(pair: MeasuredPair) -> str:
    """The rate of a pair in Mbit/s, with three digits."""
    rate = bits_per_s(pair)
    return "-" if rate is None else _three_digits(rate / 1e6)


def _milliseconds(pair: MeasuredPair) -> str:
    return _three_digits(1e3 * pair.alpha_s)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
