"""What a worker computes between a pull and a push: a gradient, or what some local steps changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.asynchronous.messages import Grant


class Result(NamedTuple):
    """What was computed.

    Attributes:
        gradient: g by name, with the names and shapes of the parameters.
        loss: for the record.
    """

    gradient: Mapping[str, Tensor]
    loss: float


Work = Callable[[Mapping[str, Tensor], Grant], Result]
"""Computes a push from parameters by name, which are this worker's own copy; the grant says for which number."""

Loss = Callable[[nn.Module, int, int], Tensor]
"""loss(model, worker, step): a scalar of this worker's batch at a step, which it counts for itself."""


class Gradient:
    """g = the gradient of the loss at the pulled parameters.

    Args:
        model: whose trained parameters the server keeps; this worker's own copy.
        loss: of a batch, which it draws by worker and number.

    Example:
        work = Gradient(model, lambda model, worker, number: loss_of(model, batch(worker, number)))
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss

    def __call__(self, parameters: Mapping[str, Tensor], grant: Grant) -> Result:
        """Compute what is pushed for a grant."""
        trained = trained_of(self.model)
        load(trained, parameters)
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(self.model, grant.worker, grant.number)
        loss.backward()
        gradient = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
        return Result(gradient, float(loss.detach()))


class LocalSteps:
    """g = pulled parameters - parameters after `grant.steps` steps of an optimizer of this worker's own.

    For the hybrid of local steps and asynchronous pushes, and for asynchronous DiLoCo, whose inner optimizer is AdamW.
    The optimizer's state stays with the worker from push to push.

    Args:
        model: as `Gradient`.
        loss: likewise; steps are counted over all pushes of this worker's life.
        optimizer: makes the inner optimizer of the model's parameters.
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.model, self.loss = model, loss
        self.optimizer = optimizer(list(trained_of(model).values()))
        self._step = 0

    def __call__(self, parameters: Mapping[str, Tensor], grant: Grant) -> Result:
        """Compute a push; its loss is the mean over the local steps."""
        trained = trained_of(self.model)
        load(trained, parameters)
        total = sum(self._stepped(grant.worker) for _ in range(grant.steps))
        changed = {name: parameters[name] - p.detach() for name, p in trained.items()}
        return Result(changed, total / grant.steps)

    def _stepped(self, worker: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, worker, self._step)
        loss.backward()
        self.optimizer.step()
        self._step += 1
        return float(loss.detach())


def trained_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters that are trained, by name; what `Server` takes, as it is."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load(trained: Mapping[str, nn.Parameter], parameters: Mapping[str, Tensor]) -> None:
    """Overwrite a model's parameters by what was pulled."""
    for name, parameter in trained.items():
        parameter.copy_(parameters[name])
