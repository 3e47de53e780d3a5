"""How many more steps theory predicts for compressed and for local SGD, with its assumptions.

Both estimates compare a bound on the mean of |grad f|^2 over K steps with that of plain SGD, each at the learning rate
that is best for plain SGD. Their terms have one unknown in common, kappa = L F0 / sigma^2: how smooth the loss is, how
far it has to fall, and how noisy gradients are. Plain SGD's bound falls as 1/sqrt(K), what compression or local steps
add falls as 1/K. So both say the same thing: the price goes to nothing in long runs.

Compressed SGD with error feedback (Karimireddy et al. 2019, Theorem II; Stich et al. 2018, Theorem 2.4 for strongly
convex functions), where each message keeps delta of the gradient's energy, and sigma^2 bounds E|g|^2:

    2 F0 / (eta K) + eta L sigma^2 / 2 + 4 eta^2 L^2 sigma^2 (1 - delta) / delta^2

Local SGD, H steps between two averages of m ranks (Wang and Joshi 2019, Theorem 1), where sigma^2 is the variance of
one rank's gradient and all ranks draw from the same data:

    2 F0 / (eta K) + eta L sigma^2 / m + eta^2 L^2 sigma^2 (H - 1)

With eta chosen for the first two terms these become 1/sqrt(K) + x/K times a constant, and a run of K steps is
equalled by one of r^2 K steps, where r^2 - r - x/sqrt(K) = 0:

    x/sqrt(K) = 8 sqrt(kappa / K) (1 - delta) / delta^2            compressed
    x/sqrt(K) = (H - 1) sqrt(m^3 kappa / (2 K))                    local
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradwire.core.errors import SpecError
from gradwire.core.grain import flat_grain, matrix_grain
from gradwire.spec import as_method

ASSUMPTIONS = (
    "The loss is smooth: gradients at two points differ by at most L times their distance. It need not be convex.",
    "Gradients are unbiased, and their noise is bounded by sigma^2 everywhere.",
    "The optimizer is SGD with one learning rate. AdamW, momentum, clipping and warm-up are in neither theorem.",
    "Compressed: every message keeps delta of the energy, whatever the gradient. Ranks are not told apart.",
    "Local: all ranks draw from the same data, and the learning rate is at most about 1/(L H). With other data on each "
    "rank there is a further term in H^2 (Koloskova et al. 2020, Theorem 2).",
    "Upper bounds are compared, not losses: what theory cannot exclude may not happen.",
)
"""What the estimates rest on."""


class ExtraSteps(NamedTuple):
    """What theory predicts for a method.

    Attributes:
        what: the method, or the window.
        factor: how many times the steps of plain SGD it takes to the same bound.
        vanishes: steps after which the added term is smaller than plain SGD's.
    """

    what: str
    factor: float
    vanishes: float


def compressed_steps(delta: float, steps: int, kappa: float = 1.0, what: str = "") -> ExtraSteps:
    """Return how many times the steps of SGD error-feedback SGD takes to the same bound.

    Args:
        delta: share of a gradient's energy that a message keeps, above 0 and at most 1.
        steps: of the uncompressed run, K.
        kappa: L F0 / sigma^2.
        what: a name for the row.

    Raises:
        SpecError: numbers that make no sense.

    References:
        Karimireddy et al. 2019, "Error feedback fixes SignSGD and other gradient compression schemes", Theorem II.

    >>> compressed_steps(1.0, steps=1000).factor
    1.0
    >>> round(compressed_steps(0.1, steps=1_000_000).factor, 2)
    2.2
    """
    _require(steps, kappa)
    if not 0 < delta <= 1:
        raise SpecError(f"delta={delta} is no share of a gradient's energy: write a number above 0 and at most 1")
    lost = (1 - delta) / delta**2
    return ExtraSteps(what, _factor(8 * math.sqrt(kappa / steps) * lost), 64 * lost**2 * kappa)


def local_steps(every: int, ranks: int, steps: int, kappa: float = 1.0, what: str = "") -> ExtraSteps:
    """Return how many times the steps of synchronous SGD local SGD takes to the same bound.

    Args:
        every: steps between two averages, H; 1 is synchronous SGD.
        ranks: that average, m.
        steps: of the synchronous run, K.
        kappa: L F0 / sigma^2, with the variance of one rank's gradient.
        what: a name for the row.

    Raises:
        SpecError: numbers that make no sense.

    References:
        Wang and Joshi 2019, "Adaptive communication strategies to achieve the best error-runtime trade-off in
        local-update SGD", Theorem 1; Stich 2019, "Local SGD converges fast and communicates little", Theorem 2.2 for
        strongly convex functions.

    >>> local_steps(1, ranks=4, steps=1000).factor
    1.0
    >>> round(local_steps(8, ranks=4, steps=1_000_000).factor, 3)
    1.078
    """
    _require(steps, kappa)
    if every < 1 or ranks < 1:
        raise SpecError(f"H={every} on {ranks} ranks: a window has 1 step or more, and there is 1 rank or more")
    added = (every - 1) ** 2 * ranks**3 * kappa / 2
    return ExtraSteps(what, _factor(math.sqrt(added / steps)), added)


def declared_delta(spec: str, numel: int = 1 << 20) -> float | None:
    """Return the share of a gradient's energy that a method keeps of any gradient, or None where it declares none.

    Args:
        spec: a method for gradients.
        numel: elements of the grain that it is asked for; a square matrix for methods of matrices.

    Raises:
        SpecError: a spec that cannot be parsed, or a method that is none for gradients.

    >>> declared_delta("sign:64"), declared_delta("int4")
    (0.015625, 0.00390625)
    """
    reducer = as_method(spec)
    side = math.isqrt(numel)
    return reducer.contraction(flat_grain(numel) if reducer.scope == "flat" else matrix_grain(side, side))


def _factor(added: float) -> float:
    """r^2 with r^2 - r = added."""
    return ((1 + math.sqrt(1 + 4 * added)) / 2) ** 2


def _require(steps: int, kappa: float) -> None:
    if steps < 1:
        raise SpecError(f"a run of {steps} steps: take 1 or more")
    if not 0 < kappa < math.inf:
        raise SpecError(f"kappa={kappa} is no L F0 / sigma^2: write a number above 0")
