"""What a server makes of a push: w becomes another vector, given g, and w as the worker pulled it.

g is a gradient, or what local steps changed, with its sign turned: w_pulled - w_after.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.asynchronous.rates import Constant, Rate
from gradwire.core.errors import CompositionError

Memory = dict[str, Tensor]
"""What a rule remembers, each a vector like w."""

CONSTANT = Constant()

EPSILON = 1e-7
"""Added to the mean square of gradients in the experiments of Zheng et al. 2017."""


class Moment(NamedTuple):
    """When a push is applied.

    Attributes:
        version: updates that the server made before this one.
        staleness: tau, how many of them it made since the worker pulled.
    """

    version: int
    staleness: int


class ServerRule(ABC):
    """A rule for the server's parameters.

    Attributes:
        needs_backup: whether it looks at w as the worker pulled it, so that the server keeps a copy for each worker.
    """

    needs_backup: ClassVar[bool] = False

    def memory(self, w: Tensor) -> Memory:
        """What is remembered before the first push."""
        return {}

    @abstractmethod
    def move_(self, w: Tensor, g: Tensor, backup: Tensor, memory: Memory, moment: Moment) -> None:
        """Apply a push to `w` and `memory`, in place.

        Args:
            w: (d,) the server's parameters.
            g: (d,) what was pushed; left as it is.
            backup: (d,) w as the worker pulled it, where `needs_backup`; else w itself.
            memory: of `memory`.
            moment: when.
        """


@dataclass(frozen=True)
class ASGD(ServerRule):
    """w -= lr factor(tau) g: plain asynchronous SGD, or with a rate that falls with staleness.

    The plain rule is of no paper in particular; `Inverse` is that of Zhang, Gupta, Lian & Liu 2016.

    Args:
        lr: eta, above 0. Pushes are added and not averaged: n workers at rate eta / n move as one at rate eta.
        rate: e.g. `Inverse()`. A rate that falls as 1 / tau divides by about n itself, so it goes with eta, or with
            eta / n where it is `Relative` to the usual staleness n - 1.

    Raises:
        CompositionError: a rate that is not positive.

    >>> w = torch.zeros(1)
    >>> ASGD(0.5).move_(w, torch.ones(1), w, {}, Moment(version=9, staleness=3)); w
    tensor([-0.5000])
    """

    lr: float
    rate: Rate = CONSTANT

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)

    def move_(self, w: Tensor, g: Tensor, backup: Tensor, memory: Memory, moment: Moment) -> None:
        """Make a step of SGD."""
        w.sub_(g, alpha=self.lr * self.rate.factor(moment.staleness))


@dataclass(frozen=True)
class DCASGD(ServerRule):
    """w -= lr (g + lambda g*g*(w - w_pulled)), elementwise: delay compensation (Zheng et al. 2017, DC-ASGD-c).

    g*g stands for the diagonal of the Hessian, so the term in brackets is the gradient at w to first order, as far as
    that is true: for likelihoods, near their optimum, of gradients of single examples. Gradients of batches of b
    examples have squares b times smaller in their noise, so lambda grows with the batch.

    Args:
        lr: eta, above 0.
        strength: lambda, 0 or more; 0.04 is the paper's for CIFAR-10.

    Raises:
        CompositionError: a number out of range.

    >>> w = torch.tensor([1.0])
    >>> DCASGD(0.1, 0.5).move_(w, torch.tensor([2.0]), torch.tensor([0.0]), {}, Moment(1, 1)); w  # 1 - 0.1 (2 + 2)
    tensor([0.6000])
    """

    needs_backup: ClassVar[bool] = True

    lr: float
    strength: float = 0.04

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)
        require_strength(self.strength)

    def move_(self, w: Tensor, g: Tensor, backup: Tensor, memory: Memory, moment: Moment) -> None:
        """Make a step along the compensated gradient."""
        w.sub_(g + self.strength * g * g * (w - backup), alpha=self.lr)


@dataclass(frozen=True)
class AdaptiveDCASGD(ServerRule):
    """DC-ASGD whose lambda falls where gradients are large (Zheng et al. 2017, Algorithm 2, DC-ASGD-a), elementwise:

        v = decay v + (1 - decay) g*g
        w -= lr (g + lambda_0 / sqrt(v + epsilon) g*g*(w - w_pulled)),  and w -= lr g where v + epsilon is 0

    With epsilon = 0 the term in brackets is as many times longer as g is: the compensation of c g is c times that of g.
    So it is right for steps of any length that are pushed in place of gradients. Above 0 it fades where g*g is smaller
    than epsilon: of the compensation of steps of length 1e-4 a third is left at the paper's 1e-7, and of those of
    length 1e-5 three hundredths. In float32 squares of g below 1e-19 lose bits, and below 1e-23 they are 0.

    Args:
        lr: eta, above 0.
        strength: lambda_0, 0 or more; 2 is the paper's for CIFAR-10.
        decay: of the mean square v, in [0, 1).
        epsilon: 0 or more; the paper's for gradients by default.

    Raises:
        CompositionError: a number out of range.

    References:
        Zheng et al. 2017, "Asynchronous stochastic gradient descent with delay compensation".

    >>> w = torch.tensor([1.0])
    >>> rule = AdaptiveDCASGD(0.1, strength=1.0, decay=0.0)
    >>> rule.move_(w, torch.tensor([2.0]), torch.tensor([0.0]), rule.memory(w), Moment(1, 1)); w  # 1 - 0.1 (2 + 4 / 2)
    tensor([0.6000])
    """

    needs_backup: ClassVar[bool] = True

    lr: float
    strength: float = 2.0
    decay: float = 0.95
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)
        require_strength(self.strength)
        require_fraction("decay", self.decay)
        if not 0 <= self.epsilon < float("inf"):
            raise CompositionError(f"epsilon={self.epsilon}: give 0 or more")

    def memory(self, w: Tensor) -> Memory:
        """A mean square of zeros."""
        return {"mean_square": torch.zeros_like(w)}

    def move_(self, w: Tensor, g: Tensor, backup: Tensor, memory: Memory, moment: Moment) -> None:
        """Take up g*g, then make a step along the compensated gradient."""
        square = (g * g).clamp_(max=torch.finfo(g.dtype).max)  # infinity would stay in the mean for ever
        mean_square = memory["mean_square"].mul_(self.decay).add_(square, alpha=1 - self.decay)
        root = (mean_square + self.epsilon).sqrt_()
        strength = torch.where(root > 0, self.strength / root, 0.0)
        w.sub_(g + strength * square * (w - backup), alpha=self.lr)


@dataclass(frozen=True)
class DelayedNesterov(ServerRule):
    """Asynchronous DiLoCo's outer step: momentum that moves once in N pushes (Liu et al. 2024, Algorithm 3).

        w -= lr (c momentum m + g / N), d += g                              for each push but the N-th,
        m = momentum m + (d + g) / N, w -= lr ((1 - c N + c) momentum m + g / N), d = 0      for each N-th.

    g is what local steps changed, with its sign turned. N pushes make one step of SGD with Nesterov momentum along
    their mean, if c is 0; above 0 a share of the momentum is spread over the pushes between.

    Args:
        every: N, 1 or more; as many as there are workers suits.
        lr: the outer learning rate, above 0.
        momentum: in [0, 1).
        spread: c, in [0, 1 / N]; the paper found 0.1 no better than 0.

    Raises:
        CompositionError: a number out of range.

    >>> w, rule = torch.zeros(1), DelayedNesterov(every=2, lr=1.0, momentum=0.5)
    >>> memory = rule.memory(w)
    >>> for version in range(2): rule.move_(w, torch.ones(1), w, memory, Moment(version, 0))
    >>> w
    tensor([-1.5000])
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    spread: float = 0.0

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)
        require_fraction("momentum", self.momentum)
        if self.every < 1:
            raise CompositionError(f"momentum every {self.every} pushes: give 1 or more")
        if not 0 <= self.spread <= 1 / self.every:
            raise CompositionError(f"a spread of {self.spread}: it lies in [0, 1 / {self.every}]")

    def memory(self, w: Tensor) -> Memory:
        """No momentum yet, and no push since the last one."""
        return {"momentum": torch.zeros_like(w), "since": torch.zeros_like(w)}

    def move_(self, w: Tensor, g: Tensor, backup: Tensor, memory: Memory, moment: Moment) -> None:
        """Apply the push, with this push's share of the momentum."""
        m, since = memory["momentum"], memory["since"].add_(g)
        share = self.spread
        if (moment.version + 1) % self.every == 0:
            m.mul_(self.momentum).add_(since, alpha=1 / self.every)
            since.zero_()
            share = 1 - self.spread * self.every + self.spread
        w.sub_(share * self.momentum * m + g / self.every, alpha=self.lr)


def require_positive(name: str, value: float) -> None:
    """Refuse what is not above 0 and finite.

    Raises:
        CompositionError: with the name.
    """
    if not 0 < value < float("inf"):
        raise CompositionError(f"{name}={value}: give a number above 0")


def require_strength(value: float) -> None:
    """Refuse a compensation that is none.

    Raises:
        CompositionError: below 0, or not a number.
    """
    if not 0 <= value < float("inf"):
        raise CompositionError(f"strength={value}: a compensation has 0 or more")


def require_fraction(name: str, value: float) -> None:
    """Refuse what does not lie in [0, 1).

    Raises:
        CompositionError: with the name.
    """
    if not 0 <= value < 1:
        raise CompositionError(f"{name}={value}: give a number of 0 or more and below 1")
