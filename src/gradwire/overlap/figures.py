"""How much of communication a backward pass hides: exposed and isolated times, and the overlap efficiency."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gradwire.drivers.traced import Span, covered_s, in_flight_s


class Overlap(NamedTuple):
    """Times of a training step, in seconds: the median over rounds of what the slowest rank took.

    Attributes:
        step_s: a step as it is trained.
        floor_s: the same step where nothing is sent, as of `torch.noop`.
        isolated_s: the communication of a step by itself, its coding included, with nothing to hide behind.

    >>> found = Overlap(step_s=0.130, floor_s=0.100, isolated_s=0.120)
    >>> round(found.exposed_s, 3), round(found.hidden_s, 3), round(found.efficiency, 2)
    (0.03, 0.09, 0.75)
    >>> print(found)
    30.0 ms of 120.0 ms of communication are exposed: overlap efficiency 75%
    """

    step_s: float
    floor_s: float
    isolated_s: float

    @property
    def exposed_s(self) -> float:
        """Seconds that communication adds to a step: step_s - floor_s, and 0 where noise makes that negative."""
        return max(0.0, self.step_s - self.floor_s)

    @property
    def hidden_s(self) -> float:
        """Seconds of communication that computation hides: isolated_s - exposed_s, and 0 at least."""
        return max(0.0, self.isolated_s - self.exposed_s)

    @property
    def exposed_share(self) -> float:
        """Exposed communication as a share of the isolated one; above 1 where a step makes communication slower."""
        return self.exposed_s / self.isolated_s if self.isolated_s > 0 else 0.0

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: hidden_s / isolated_s, from 0 (nothing is hidden) to 1 (all is); 1 for no communication.

        A trace has the same figure as |communication and computation at once| / |communication| (`hidden_share`).
        """
        return self.hidden_s / self.isolated_s if self.isolated_s > 0 else 1.0

    def __str__(self) -> str:
        exposed, isolated = f"{1e3 * self.exposed_s:.1f}", f"{1e3 * self.isolated_s:.1f}"
        return f"{exposed} ms of {isolated} ms of communication are exposed: overlap efficiency {self.efficiency:.0%}"


def hidden_share(spans: Iterable[Span], computing: Span) -> float:
    """Overlap efficiency by a trace: the share of the time with a collective under way that lies within `computing`.

    |communication and computation at once| / |communication|, by unions of intervals. 1 where there was none.

    >>> hidden_share([Span("wire", "a", 0.0, 2.0), Span("wire", "b", 1.0, 4.0)], Span("train", "backward", 0.0, 3.0))
    0.75
    """
    spans = list(spans)
    whole = in_flight_s(spans)
    return covered_s(spans, computing) / whole if whole > 0 else 1.0
