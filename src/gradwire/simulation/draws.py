"""How long each rank computes in each step: drawn by a seed, alike for a rank whatever the number of ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.core.errors import SpecError
from gradwire.core.key import Key
from gradwire.core.nearest import meant

CHUNK = 64
"""Steps that are drawn at a time."""

Distribution = Literal["lognormal", "exponential"]


@dataclass(frozen=True)
class TimeSpread:
    """How the time of a step varies, with a mean of 1 and a standard deviation of `share`.

    "exponential" is (1 - share) + share * E with E of mean 1 (the shifted exponential of Lee et al. 2018, "Speeding up
    distributed machine learning using codes"), "lognormal" is exp(sigma Z - sigma^2 / 2) with
    sigma^2 = ln(1 + share^2).

    Args:
        distribution: one of the two.
        share: the standard deviation, in means; 0 for no spread, and at most 1 for "exponential".

    Raises:
        SpecError: another distribution, or a share out of its range.

    >>> TimeSpread.of("lognormal:0.1")
    TimeSpread(distribution='lognormal', share=0.1)
    """

    distribution: Distribution = "lognormal"
    share: float = 0.0

    def __post_init__(self) -> None:
        if self.distribution not in get_args(Distribution):
            raise SpecError(
                f"unknown distribution {self.distribution!r}: {meant(self.distribution, get_args(Distribution))}"
            )
        most = 1.0 if self.distribution == "exponential" else 100.0
        if not 0 <= self.share <= most:
            raise SpecError(f"a spread of {self.share} is none: give a standard deviation from 0 to {most:g} means")

    @classmethod
    def of(cls, text: str) -> TimeSpread:
        """Read "lognormal:0.1", or "0", which is none.

        Raises:
            SpecError: a text that reads otherwise.
        """
        name, _, share = text.partition(":")
        if text.strip() == "0":
            return cls()
        try:
            return cls(name.strip(), float(share))  # pyright: ignore[reportArgumentType] - it is checked
        except ValueError as error:
            if isinstance(error, SpecError):
                raise
            raise SpecError(
                f"spread {text!r} cannot be read: write lognormal:0.1 or exponential:0.1, the standard deviation in "
                "means of the computing time"
            ) from None

    def of_uniform(self, uniform: Tensor) -> Tensor:
        """Factors of mean 1 from numbers that are uniform in [0, 1): the inverse of the distribution function."""
        if self.share == 0:
            return torch.ones_like(uniform)
        if self.distribution == "exponential":
            return (1 - self.share) - self.share * torch.log1p(-uniform)
        variance = math.log1p(self.share**2)
        normal = torch.special.ndtri(uniform.clamp(min=2.0**-54))
        return torch.exp(math.sqrt(variance) * normal - variance / 2)


@dataclass(frozen=True)
class SlowInTurn:
    """In each step each rank takes `factor` times as long with a chance of `chance`, whatever it did before.

    Args:
        chance: from 0 to 1.
        factor: 1 or more.

    Raises:
        SpecError: numbers out of these ranges.

    >>> SlowInTurn.of("1%:3x")
    SlowInTurn(chance=0.01, factor=3.0)
    """

    chance: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1 or not 1 <= self.factor < math.inf:
            raise SpecError(f"{self.chance:.0%}:{self.factor:g}x is no chance from 0% to 100% and factor from 1x on")

    @classmethod
    def of(cls, text: str) -> SlowInTurn:
        """Read "1%:3x", or "0", which is none.

        Raises:
            SpecError: a text that reads otherwise.
        """
        if text.strip() == "0":
            return cls()
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*:\s*(\d+\.?\d*)\s*x?\s*", text)
        if match is None:
            raise SpecError(f"slow in turn {text!r} cannot be read: write CHANCE%:FACTORx, such as 1%:3x")
        return cls(float(match[1]) / 100, float(match[2]))


@dataclass(frozen=True)
class ComputingTimes:
    """How long each rank computes in each step, without communication.

    A rank has the same times in runs of any number of ranks. So where one thing is changed, what is seen is its effect
    and not another draw.

    Args:
        mean_s: of a rank that is not slow, above 0.
        spread: of every step of every rank.
        slow: how many times as long some ranks always take.
        in_turn: who is slow by chance.
        seed: two runs of one seed are alike.

    Raises:
        SpecError: a mean that is no time.

    >>> times = ComputingTimes(0.1, slow={1: 4.0})
    >>> next(times.steps(3))
    tensor([0.1000, 0.4000, 0.1000], dtype=torch.float64)
    """

    mean_s: float
    spread: TimeSpread = TimeSpread()
    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    in_turn: SlowInTurn = SlowInTurn()
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.mean_s < math.inf:
            raise SpecError(f"a step computes for more than 0 s, not for {self.mean_s} s")

    def chunk(self, ranks: int, number: int) -> Tensor:
        """The times of steps `CHUNK * number` and after: shape (ranks, CHUNK), seconds, float64."""
        found = self.mean_s * self.spread.of_uniform(self._uniform(ranks, number, "spread"))
        if self.in_turn.chance > 0:
            is_slow = self._uniform(ranks, number, "in turn") < self.in_turn.chance
            found = torch.where(is_slow, self.in_turn.factor * found, found)
        for rank, factor in self.slow.items():
            if rank < ranks:
                found[rank] *= factor
        return found

    def steps(self, ranks: int) -> Iterator[Tensor]:
        """Yield the times of each step, without end: shape (ranks,), seconds."""
        number = 0
        while True:
            yield from self.chunk(ranks, number).t().contiguous()
            number += 1

    def _uniform(self, ranks: int, number: int, name: str) -> Tensor:
        """Numbers in [0, 1), those of each rank next to each other, so that further ranks change none of them."""
        if name == "spread" and self.spread.share == 0:
            return torch.zeros(ranks, CHUNK, dtype=torch.float64)
        generator = torch.Generator().manual_seed(Key(seed=self.seed, step=number, name=name).stream_seed >> 1)
        return torch.rand(ranks, CHUNK, generator=generator, dtype=torch.float64)
