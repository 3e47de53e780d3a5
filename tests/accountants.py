"""Accountants of privacy that share no code with the library's: closed forms, and distributions of losses on a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np

ORDERS = (*range(2, 64), 128)
"""Orders of Renyi divergence: whole ones, for which there are closed forms."""


def sampled_gaussian(sigma: float, steps: int, delta: float, q: float) -> float:
    """Epsilon for adding or removing one who takes part with probability q.

    Mironov, Talwar & Zhang 2019, section 3.3: of order alpha, a step costs

        1 / (alpha - 1) log sum_k C(alpha, k) (1 - q)^(alpha - k) q^k exp((k^2 - k) / (2 sigma^2)).
    """

    def cost(order: int) -> Any:
        terms = (
            mpmath.binomial(order, k)
            * mpmath.mpf(1 - q) ** (order - k)
            * mpmath.mpf(q) ** k
            * mpmath.exp(mpmath.mpf(k * k - k) / (2 * sigma**2))
            for k in range(order + 1)
        )
        return mpmath.log(mpmath.fsum(terms)) / (order - 1)

    return _cheapest(cost, steps, delta)


def sampled_at_once(sigma: float, steps: int, delta: float, q: float) -> float:
    """Epsilon for replacing one of whom a share q is drawn; sigma is in units of what that moves.

    Theorem 9 of Wang, Balle & Kasiviswanathan 2019, which holds for any mechanism. What they know of the Gaussian one
    beside that can only make epsilon smaller.
    """

    def cost(order: int) -> Any:
        def renyi(at: int) -> Any:
            return mpmath.mpf(at) / (2 * sigma**2)

        second = min(4 * mpmath.expm1(renyi(2)), 2 * mpmath.exp(renyi(2)))
        terms = [mpmath.mpf(1), mpmath.mpf(q) ** 2 * mpmath.binomial(order, 2) * second]
        terms += [
            mpmath.mpf(q) ** j * mpmath.binomial(order, j) * 2 * mpmath.exp((j - 1) * renyi(j))
            for j in range(3, order + 1)
        ]
        return mpmath.log(mpmath.fsum(terms)) / (order - 1)

    return _cheapest(cost, steps, delta)


def _cheapest(cost: Callable[[int], Any], steps: int, delta: float) -> float:
    """The least epsilon over all orders (Canonne, Kamath & Steinke 2020, Proposition 12)."""
    with mpmath.workdps(60):
        found = [
            steps * cost(order) + mpmath.log1p(-mpmath.mpf(1) / order) - mpmath.log(delta * order) / (order - 1)
            for order in ORDERS
        ]
        return float(min(found))


def gaussian(sigma: float, steps: int, delta: float) -> float:
    """The exact epsilon of `steps` Gaussian mechanisms (Balle & Wang 2018, Theorem 8)."""
    with mpmath.workdps(200):
        mu = mpmath.sqrt(steps) / sigma

        def excess(epsilon: Any) -> Any:
            a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
            return mpmath.ncdf(a) - mpmath.exp(epsilon) * mpmath.ncdf(b) - delta

        low, high = mpmath.mpf(0), mpmath.mpf(10_000)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return float(low)


def on_a_grid(p: tuple[float, float], q: tuple[float, float], sigma: float, steps: int, delta: float) -> float:
    """Not more than the exact epsilon of `steps` draws from P against Q, mixtures of Gaussians of deviation sigma.

    Each is given by a centre and a weight; the rest is centred on 0. The distribution of log P / Q under P is laid on a
    grid, every loss rounded down, and folded with itself: what comes out is a lower bound, close to the exact value.
    """
    width = 1e-3
    x = np.linspace(-14 * sigma - 2, 14 * sigma + 2, 400_001)

    def density(mixture: tuple[float, float]) -> np.ndarray:
        centre, weight = mixture
        near, far = (np.exp(-((x - at) ** 2) / (2 * sigma**2)) for at in (0.0, centre))
        return (1 - weight) * near + weight * far

    under_p = density(p)
    losses = np.floor((np.log(under_p) - np.log(density(q))) / width).astype(int)
    one = np.bincount(losses - losses.min(), under_p / under_p.sum())
    size = (one.size - 1) * steps + 1
    padded = 1 << (size - 1).bit_length()
    folded = np.fft.irfft(np.fft.rfft(one, padded) ** steps, padded)[:size].clip(min=0)
    at = (losses.min() * steps + np.arange(size)) * width
    low, high = 0.0, float(at[-1])
    for _ in range(60):
        middle = (low + high) / 2
        beyond = at > middle
        spent = float((folded[beyond] * -np.expm1(middle - at[beyond])).sum())
        low, high = (middle, high) if spent > delta else (low, middle)
    return low
