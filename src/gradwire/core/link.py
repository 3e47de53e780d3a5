"""The alpha-beta model of a link."""

from __future__ import annotations

from dataclasses import dataclass


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
