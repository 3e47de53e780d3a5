"""What a client does with its data: some steps of SGD from the global model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gradwire.core.errors import CompositionError


@dataclass(frozen=True)
class SGD:
    """Local steps: v = momentum v + g + weight_decay y; y -= lr v, from v = 0 in every round.

    Without momentum and decay this is ClientUpdate of McMahan et al. 2017 (Algorithm 1). A method changes g first
    (`Method.direction_`): a proximal term and control variates are therefore part of the momentum.

    Args:
        lr: eta_l, above 0.
        steps: in a round, where a client does not say how many it makes.
        momentum: in [0, 1). It begins anew in each round, so that a client need not keep it.
        weight_decay: of each step, as `torch.optim.SGD` has it.

    Raises:
        CompositionError: a number out of range.
    """

    lr: float
    steps: int = 10
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise CompositionError(f"a local lr of {self.lr}: give a number above 0")
        if self.steps < 1:
            raise CompositionError(f"{self.steps} local steps: a client makes one at least")
        if not 0 <= self.momentum < 1:
            raise CompositionError(f"a local momentum of {self.momentum}: it lies in [0, 1)")
        if not self.weight_decay >= 0:
            raise CompositionError(f"a local weight_decay of {self.weight_decay}: it is 0 or more")


@functools.lru_cache(maxsize=4096)
def normaliser(local: SGD, mu: float, steps: int) -> float:
    """Return |a|_1, with x - y = lr sum_k a_k g_k after `steps` local steps (Wang et al. 2020, section 4).

    a_k is how far y has moved, in units of -lr, after g_k = 1 alone: the impulse response of the local steps, which are
    linear in the gradients whatever these are. In closed form it is, with tau = steps, rho = momentum, alpha = lr mu,

        tau                                               for SGD,
        [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho) with momentum,
        [1 - (1 - alpha)^tau] / alpha                     with a proximal term,

    (the paper's examples) and what follows from the recursion where there are both, of which the paper says nothing.
    Weight decay counts as a part of the gradients.

    >>> normaliser(SGD(0.1), 0.0, 7), normaliser(SGD(0.1, momentum=0.5), 0.0, 2)
    (7.0, 2.5)
    """
    moved, velocity, total = 0.0, 0.0, 0.0
    for step in range(steps):
        velocity = local.momentum * velocity + (1.0 if step == 0 else -local.lr * mu * moved)
        moved += velocity
        total += abs(moved)
    return total
