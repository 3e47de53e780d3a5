"""Time by size of a message: the alpha-beta model of a link, and a curve through times that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gradwire.core.errors import CompositionError


@dataclass(frozen=True)
class Link:
    """A message of b bytes takes alpha_s + b * beta_s_per_byte seconds (Hockney 1994, Equation 1).

    A rank sends and receives at the same time, several messages in one direction after each other.

    >>> Link(0.001, 1e-6).seconds(500_000)
    0.501
    """

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float, rounds: float = 1) -> float:
        """Time of `rounds` messages that follow each other and have `nbytes` together."""
        return rounds * self.alpha_s + nbytes * self.beta_s_per_byte


class TimedSize(NamedTuple):
    """So many bytes took so long."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Curve:
    """Time by size: alpha + beta * bytes, with an alpha and a beta for each stretch between measured points.

    One alpha and one beta for each route are not enough: Gloo changes its algorithm with the size, and flows begin to
    meet at a receiver once they fill its queue.

    Args:
        points: by rising size. One alone is the time of every size.

    Raises:
        CompositionError: no points, or sizes that do not rise.

    >>> curve = Curve((TimedSize(0, 1.0), TimedSize(100, 2.0), TimedSize(200, 6.0)))
    >>> curve.seconds(50), curve.seconds(300)
    (1.5, 10.0)
    >>> Curve((TimedSize(100, 2.0),)).seconds(300)
    2.0
    """

    points: tuple[TimedSize, ...]

    def __post_init__(self) -> None:
        sizes = [point.nbytes for point in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise CompositionError(f"a curve needs sizes that rise, not {sizes}")

    def link(self, nbytes: float) -> Link:
        """The alpha and beta that hold for `nbytes`. The outer stretches go on for ever; the last one does not fall."""
        if len(self.points) == 1:
            return Link(self.points[0].seconds, 0.0)
        pairs = list(pairwise(self.points))
        low, high = next((pair for pair in pairs if nbytes < pair[1].nbytes), pairs[-1])
        beta = (high.seconds - low.seconds) / (high.nbytes - low.nbytes)
        if nbytes > high.nbytes:
            beta = max(beta, 0.0)
        return Link(high.seconds - beta * high.nbytes, beta)

    def seconds(self, nbytes: float) -> float:
        """Predicted time of `nbytes`."""
        return self.link(nbytes).seconds(nbytes)
