"""How large a mean difference is against its standard error, and how large it must be not to be called chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.compare.figures import mean

CONFIDENCE = 0.995
"""How often pure chance stays below what is called a difference in one direction: 199 times in 200."""

_NORMAL = 2.5758293
"""The quantile of the normal distribution at `CONFIDENCE`."""

_FEW = (63.657, 9.925, 5.841, 4.604, 4.032)
"""Quantiles of Student's t at `CONFIDENCE` for 1 to 5 degrees of freedom, for which the series is too rough."""


def students_t(freedom: float) -> float:
    """The quantile of Student's t distribution at `CONFIDENCE`; fractions of a degree of freedom are rounded down.

    For 6 degrees of freedom and more it is Fisher's series in 1/freedom (Abramowitz and Stegun 26.7.5), which is right
    to 0.2 %.

    Example:
        >>> [round(students_t(freedom), 2) for freedom in (1, 2, 4.9, 9, math.inf)]
        [63.66, 9.93, 4.6, 3.25, 2.58]
    """
    if freedom < len(_FEW) + 1:
        return _FEW[max(0, int(freedom) - 1)]
    z, n = _NORMAL, freedom if math.isinf(freedom) else int(freedom)
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return sum(terms)


class Estimate(NamedTuple):
    """A mean of differences, and how far chance may have moved it.

    Attributes:
        mean: of the differences.
        error: its standard error; None where it is not known, as with one difference.
        freedom: degrees of freedom of that error: how well it is known itself.
    """

    mean: float
    error: float | None = None
    freedom: float = 0.0

    @property
    def detectable(self) -> float:
        """The smallest difference that would be told from chance; infinite where the error is not known."""
        return math.inf if self.error is None else students_t(self.freedom) * self.error

    @property
    def stands_out(self) -> bool:
        """Whether the mean is farther from 0 than chance explains."""
        return abs(self.mean) > self.detectable


def estimate(differences: Sequence[float]) -> Estimate:
    """The mean of independent differences, and its standard error, their standard deviation over sqrt(number).

    Example:
        >>> estimate([1.0, 2.0, 3.0])
        Estimate(mean=2.0, error=0.5773502691896257, freedom=2)
        >>> estimate([1.0]).detectable
        inf
    """
    number, middle = len(differences), mean(differences)
    if number < 2:
        return Estimate(middle)
    squares = math.fsum((difference - middle) ** 2 for difference in differences)
    return Estimate(middle, math.sqrt(squares / (number - 1) / number), number - 1)


def with_both_errors(one: Estimate, other: Estimate) -> Estimate:
    """One mean with two sources of chance, seeds and held-out examples: their variances add up.

    What chance does to single examples with single seeds is in both, so the sum is a little too large and never too
    small. Degrees of freedom are those of Welch and Satterthwaite: `v^2 / sum(v_i^2 / freedom_i)` of variances v_i.

    Example:
        >>> both = with_both_errors(Estimate(1.0, 0.3, 2), Estimate(1.0, 0.4, 99))
        >>> both.error, round(both.freedom, 1)
        (0.5, 14.5)
    """
    known = [each for each in (one, other) if each.error is not None]
    if len(known) < 2:
        return known[0]._replace(mean=one.mean) if known else one
    variances = [(each.error or 0.0) ** 2 for each in known]
    whole = sum(variances)
    spent = sum(v**2 / each.freedom for v, each in zip(variances, known, strict=True))
    freedom = whole**2 / spent if spent else min(each.freedom for each in known)
    return Estimate(one.mean, math.sqrt(whole), freedom)
