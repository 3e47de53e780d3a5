"""Steps of a server: what the global model becomes once the clients' mean change is known.

d is the mean of what clients changed (of models, so it points downhill), x the global model, both vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.kernels.rounding import square_root

Memory = dict[str, Tensor]
"""What a step remembers: vectors as long as the model."""


class ServerStep(ABC):
    """x from d. A frozen dataclass: settings alone; what it remembers is handed in."""

    lr: float

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise CompositionError(f"lr={self.lr} of {type(self).__name__}: give a number above 0")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name, 0.0) < 1:
                raise CompositionError(f"{name}={getattr(self, name)} of {type(self).__name__}: it lies in [0, 1)")
        if not getattr(self, "tau", 1.0) > 0:
            raise CompositionError(f"tau={getattr(self, 'tau')} of {type(self).__name__}: give a number above 0")  # noqa: B009

    def memory(self, x: Tensor) -> Memory:
        """What is remembered before the first round."""
        return {}

    @abstractmethod
    def move_(self, x: Tensor, d: Tensor, memory: Memory) -> None:
        """Change `x` and `memory` in place."""


@dataclass(frozen=True)
class Mean(ServerStep):
    """x += lr d: with lr = 1 the mean of the clients' models (McMahan et al. 2017, Algorithm 1).

    Another lr is eta_g of SCAFFOLD (Karimireddy et al. 2020, Algorithm 1) and of FedBuff (Nguyen et al. 2022,
    Algorithm 1), and the server's SGD of Reddi et al. 2021 (Algorithm 1, FedOpt).

    Args:
        lr: the server's learning rate.

    Raises:
        CompositionError: an lr that is not above 0.
    """

    lr: float = 1.0

    def move_(self, x: Tensor, d: Tensor, memory: Memory) -> None:
        """Add a multiple of the change."""
        x.add_(d, alpha=self.lr)


@dataclass(frozen=True)
class FedAvgM(ServerStep):
    """v = momentum v + d; x += lr v (Hsu, Qi & Brown 2019, their update of FedAvgM, which has no number).

    The paper has no `lr`: it is 1 there. Its change has the opposite sign, which comes to the same. As far as we know,
    its experiments took Nesterov's form of momentum; this is the plain form of its text.

    Args:
        lr: the server's learning rate; effective steps are 1 / (1 - momentum) times as long.
        momentum: in [0, 1).

    Raises:
        CompositionError: a number out of range.

    References:
        Hsu, Qi & Brown 2019, "Measuring the effects of non-identical data distribution for federated visual
        classification".

    >>> x, d, rule = torch.zeros(1), torch.ones(1), FedAvgM(lr=1.0, momentum=0.5)
    >>> memory = rule.memory(x)
    >>> for _ in range(2): rule.move_(x, d, memory)
    >>> x
    tensor([2.5000])
    """

    lr: float = 1.0
    momentum: float = 0.9

    def memory(self, x: Tensor) -> Memory:
        """A momentum of zeros."""
        return {"v": torch.zeros_like(x)}

    def move_(self, x: Tensor, d: Tensor, memory: Memory) -> None:
        """Make a step of momentum."""
        x.add_(memory["v"].mul_(self.momentum).add_(d), alpha=self.lr)


@dataclass(frozen=True)
class Adaptive(ServerStep):
    """m = beta1 m + (1 - beta1) d;  v as the subclass says;  x += lr m / (sqrt(v) + tau).

    Algorithm 2 of Reddi et al. 2021, with v = tau^2 (the least that it allows) and m = 0 before the first round and
    without the bias correction that Adam has elsewhere. `tau` bounds how far a coordinate that hardly changes is scaled
    up, so it belongs to the size of d: the paper finds 1e-3 good in most of its tasks. Algorithm 2 has d as the plain
    mean over the clients of a round. Here it is what the method makes of them: with `FedAvg` they count by examples, as
    we believe they do in the paper's experiments.

    Args:
        lr: the server's learning rate.
        beta1: of the momentum, in [0, 1); 0 for none.
        tau: the degree of adaptivity, above 0; smaller is more adaptive.

    Raises:
        CompositionError: a number out of range.

    References:
        Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar & McMahan 2021, "Adaptive federated optimization".
    """

    lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def memory(self, x: Tensor) -> Memory:
        """m = 0, v = tau^2."""
        return {"m": torch.zeros_like(x), "v": torch.full_like(x, self.tau**2)}

    def move_(self, x: Tensor, d: Tensor, memory: Memory) -> None:
        """Make a step of the algorithm."""
        m = memory["m"].mul_(self.beta1).add_(d, alpha=1 - self.beta1)
        self._follow_(memory["v"], d.square())
        x.add_(m / square_root(memory["v"]).add_(self.tau), alpha=self.lr)

    @abstractmethod
    def _follow_(self, v: Tensor, square: Tensor) -> None:
        """Bring v up to date with d^2, in place."""


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """v = v + d^2 in the step of `Adaptive` (Reddi et al. 2021, Algorithm 2, line for FedAdagrad).

    The paper takes beta1 = 0 for it in all experiments, and so does the default.

    >>> x, rule = torch.zeros(1), FedAdagrad(lr=1.0, beta1=0.0, tau=1.0)
    >>> rule.move_(x, torch.tensor([1.0]), rule.memory(x)); x
    tensor([0.4142])
    """

    lr: float = 0.01
    beta1: float = 0.0
    tau: float = 1e-3

    def _follow_(self, v: Tensor, square: Tensor) -> None:
        v.add_(square)


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """v = beta2 v + (1 - beta2) d^2 in the step of `Adaptive` (Reddi et al. 2021, Algorithm 2, line for FedAdam).

    >>> x, rule = torch.zeros(1), FedAdam(lr=1.0, beta1=0.0, beta2=0.0, tau=1.0)
    >>> rule.move_(x, torch.tensor([3.0]), rule.memory(x)); x
    tensor([0.7500])
    """

    beta2: float = 0.99

    def _follow_(self, v: Tensor, square: Tensor) -> None:
        v.mul_(self.beta2).add_(square, alpha=1 - self.beta2)


@dataclass(frozen=True)
class FedYogi(Adaptive):
    """v = v - (1 - beta2) d^2 sign(v - d^2) in the step of `Adaptive` (Reddi et al. 2021, Algorithm 2, for FedYogi).

    >>> x, rule = torch.zeros(1), FedYogi(lr=1.0, beta1=0.0, beta2=0.0, tau=1.0)
    >>> rule.move_(x, torch.tensor([2.0]), rule.memory(x)); x  # v = 1 + 4
    tensor([0.6180])
    """

    beta2: float = 0.99

    def _follow_(self, v: Tensor, square: Tensor) -> None:
        v.sub_(square * (v - square).sign(), alpha=1 - self.beta2)
