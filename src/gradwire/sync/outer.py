"""Outer steps: what the global copy becomes once ranks know the mean of what their windows changed.

x_0 is the global copy that a window began with, x_H what a rank has at its end, and d = mean(x_H - x_0). Every rank
computes the outer step for itself from the same d, so an outer step uses operations that every processor rounds alike:
additions and multiplications that are not fused. A multiplication with a number and the addition of its product are
two calls here; `add(alpha=)`, `lerp` and `addcmul` may round once instead of twice, and a division by a number is a
multiplication on some processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.errors import CompositionError

Memory = dict[str, Tensor]
"""What an outer step remembers of one tensor."""


class Rates(NamedTuple):
    """Learning rates of the inner optimizer that all ranks agreed on: now, and at the end of the window before."""

    now: float
    before: float


class Outer(ABC):
    """A rule for the global copy.

    Attributes:
        needs_rates: whether it uses the learning rates of the inner optimizer.
    """

    needs_rates: ClassVar[bool] = False

    def memory(self, x: Tensor) -> Memory:
        """What is remembered of a tensor like `x` before the first window ends."""
        return {}

    @abstractmethod
    def move_(self, x: Tensor, d: Tensor, memory: Memory, rates: Rates) -> None:
        """Bring the global copy `x` to the next window's beginning, in place; `d` is as in the module's text."""


def _momentum(x: Tensor) -> Memory:
    return {"momentum": torch.zeros_like(x)}


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise CompositionError(f"{name}={value}: a momentum is 0 or more and below 1")


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise CompositionError(f"{name}={value}: give a number above 0")


def _require_momentum(momentum: float, nesterov: bool) -> None:
    if not (momentum or nesterov):
        raise CompositionError("nesterov is about momentum, and momentum=0 is none: leave nesterov out")


@dataclass(frozen=True)
class Mean(Outer):
    """x = x_0 + d, the mean of all ranks' parameters (Stich 2019, Algorithm 1).

    References:
        Stich 2019, "Local SGD converges fast and communicates little".
    """

    def move_(self, x: Tensor, d: Tensor, memory: Memory, rates: Rates) -> None:
        """Add the mean change."""
        x.add_(d)


@dataclass(frozen=True)
class DiLoCo(Outer):
    """b = momentum b + d; x = x_0 + lr (d + momentum b), or x_0 + lr b without Nesterov's look ahead.

    This is `torch.optim.SGD` on the gradient -d, to rounding (Douillard et al. 2023, Algorithm 1, with the outer
    optimizer that the paper recommends).

    References:
        Douillard et al. 2023, "DiLoCo: distributed low-communication training of language models".

    >>> x, d, rule = torch.zeros(1), torch.ones(1), DiLoCo(lr=0.5, momentum=0.5)
    >>> rule.move_(x, d, rule.memory(x), Rates(0.1, 0.1)); x
    tensor([0.7500])
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        _require_positive("lr", self.lr)
        _require_fraction("momentum", self.momentum)
        _require_momentum(self.momentum, self.nesterov)

    def memory(self, x: Tensor) -> Memory:
        """A momentum of zeros, if there is to be any."""
        return _momentum(x) if self.momentum else {}

    def move_(self, x: Tensor, d: Tensor, memory: Memory, rates: Rates) -> None:
        """Make a step of SGD."""
        x.add_(buffers.times(self._direction(d, memory), self.lr))

    def _direction(self, d: Tensor, memory: Memory) -> Tensor:
        if not self.momentum:
            return d
        b = memory["momentum"].mul_(self.momentum).add_(d)
        return buffers.times(b, self.momentum).add_(d) if self.nesterov else b


@dataclass(frozen=True)
class SlowMo(Outer):
    """u = beta u - d / gamma; x = x_0 - alpha gamma u, gamma the inner learning rate (Wang et al. 2020).

    Algorithm 1 of the paper. Where it deviates: what is kept is v = -gamma u, so v = (beta gamma / gamma') v + d and x
    = x_0 + alpha v, with gamma' of the window before. Ranks use the largest gamma of all, per parameter group, so that
    a scheduler that lags behind on one rank does not bring their global copies apart. Where gamma is 0 the mean is
    taken and v stays.

    References:
        Wang, Tantia, Ballas & Rabbat 2020, "SlowMo: improving communication-efficient distributed SGD with slow
        momentum".

    >>> x, d, rule = torch.zeros(1), torch.ones(1), SlowMo(beta=0.5)
    >>> memory = rule.memory(x)
    >>> for _ in range(2): rule.move_(x, d, memory, Rates(0.1, 0.1))
    >>> x
    tensor([2.5000])
    """

    needs_rates: ClassVar[bool] = True

    beta: float = 0.7
    alpha: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("alpha", self.alpha)
        _require_fraction("beta", self.beta)

    def memory(self, x: Tensor) -> Memory:
        """A momentum of zeros."""
        return _momentum(x)

    def move_(self, x: Tensor, d: Tensor, memory: Memory, rates: Rates) -> None:
        """Make a step along the slow momentum."""
        if rates.now == 0:
            x.add_(d)
            return
        v = memory["momentum"].mul_(self.beta * rates.now / rates.before).add_(d)
        x.add_(buffers.times(v, self.alpha))


@dataclass(frozen=True)
class BMUF(Outer):
    """D = momentum D + lr d; x = x_0 + D, or with Nesterov's look ahead x = x_0 + lr d + momentum D.

    Blockwise model update filtering (Chen & Huo 2016; d is their G, taken from what the window began with, and lr their
    block learning rate). A usual momentum is 1 - 1/n for n ranks. Without `nesterov` it is their classical block
    momentum, where W(t) = W(t-1) + D is both the global model and what the next block begins with.

    Where it deviates: with `nesterov` the paper keeps two models, W(t) = W(t-1) + D and the look-ahead
    W(t) + momentum D with which the next block begins. Here x is the look-ahead alone, as in fairseq's BMUF. Blocks are
    trained alike, but what `sync()` and `evaluating()` give is a step of momentum D ahead of the paper's global model.
    A momentum that changes between blocks, which the paper allows, is not possible here.

    References:
        Chen & Huo 2016, "Scalable training of deep learning machines by incremental block training with intra-block
        parallel optimization and blockwise model-update filtering".

    >>> x, d, rule = torch.zeros(1), torch.ones(1), BMUF(momentum=0.5, nesterov=False)
    >>> memory = rule.memory(x)
    >>> for _ in range(2): rule.move_(x, d, memory, Rates(0.1, 0.1))
    >>> x
    tensor([2.5000])
    """

    momentum: float
    lr: float = 1.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        _require_positive("lr", self.lr)
        _require_fraction("momentum", self.momentum)
        _require_momentum(self.momentum, self.nesterov)

    def memory(self, x: Tensor) -> Memory:
        """A momentum of zeros."""
        return _momentum(x)

    def move_(self, x: Tensor, d: Tensor, memory: Memory, rates: Rates) -> None:
        """Make a step along the filtered updates."""
        update = buffers.times(d, self.lr)
        filtered = memory["momentum"].mul_(self.momentum).add_(update)
        x.add_(update.add_(buffers.times(filtered, self.momentum)) if self.nesterov else filtered)
