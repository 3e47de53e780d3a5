"""Post-local SGD after PyTorch's names: `PostLocalSGDOptimizer` and `PeriodicModelAverager`.

The communication hook that belongs to them is in `gradwire.adapters.post_local_hook`; `gradwire.hooks` has all of it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradwire.drivers.groups import deadline_of
from gradwire.session import Session
from gradwire.session.lane import group_of
from gradwire.sync.wrapper import OptimizerWrapper

Params = Iterable[Tensor] | Iterable[dict[str, Any]]
"""Parameters of a model, or parameter groups of an optimizer."""


class ModelAverager(ABC):
    """Averages the parameters of all ranks when it is due.

    Args:
        process_group: whose ranks; None for the default group.

    Attributes:
        step: how often `average_parameters` was called.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group_of(process_group)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Params) -> None:
        """Count a step, and average the parameters if this is the time."""


class PeriodicModelAverager(ModelAverager):
    """Averages parameters in every `period`-th step after a warm-up: x = mean over ranks of x.

    Arguments are PyTorch's, and so are the steps it averages in: `warmup_steps`, `warmup_steps + period` and so on,
    counted from 0. What differs: all given parameters that require gradients are averaged, also those without a
    gradient on this rank (PyTorch leaves them out, so that ranks with different unused layers mix up tensors) and
    those that were frozen since the last average, each in its own memory and dtype; and a rank that does not come is
    named.

    Args:
        period: steps from one average to the next.
        warmup_steps: steps without one; as many as `start_localSGD_iter` of the hook.
        process_group: whose ranks; None for the default group.

    Raises:
        ValueError: a period below 1, or a negative warm-up.

    Example:
        averager = PeriodicModelAverager(period=4, warmup_steps=100)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(ddp(inputs), targets).backward()
            optimizer.step()
            averager.average_parameters(ddp.parameters())
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: give 0 or more")
        if period < 1:
            raise ValueError(f"period={period}: give 1 or more")
        if period == 1:
            warnings.warn(
                "period=1 sends as much as averaging gradients would: leave the averager and the hook out", stacklevel=2
            )
        self.period, self.warmup_steps = period, warmup_steps
        self._session: Session | None = None
        self._apart: set[int] = set()  # what was trained at any time since the last average, be it frozen by now

    def average_parameters(self, params: Params) -> None:
        """Count a step, and average in place where it is due.

        Raises:
            AttachError: parameters that differ between ranks.
            CommunicationError: a rank failed or did not come, by its number.
        """
        given = _all(params)
        self._apart |= {key for key, parameter in given.items() if parameter.requires_grad}
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            changed = [parameter.detach() for key, parameter in given.items() if key in self._apart]
            named = {str(number): tensor for number, tensor in enumerate(changed)}
            self._session_for(named).reduce_(named)
            self._apart = set()
        self.step += 1

    def _session_for(self, tensors: Mapping[str, Tensor]) -> Session:
        """A session for tensors of these shapes; another model than last time gets another one, on every rank."""
        forms = {name: (tuple(t.shape), t.dtype, t.device) for name, t in tensors.items()}
        if self._session is not None and forms == self._forms:
            return self._session
        if self._session is not None:
            self._session.close()
        deadline_s = deadline_of(self.process_group, next(iter(tensors.values())).device)
        self._session = Session(
            tensors, "none", group=self.process_group, deadline_s=deadline_s, what="PeriodicModelAverager"
        )
        self._forms = forms
        return self._session


def _all(params: Params) -> dict[int, Tensor]:
    """What is given, each tensor once, by its `id`."""
    found: dict[int, Tensor] = {}
    for given in params:
        for parameter in cast("list[Tensor]", given["params"]) if isinstance(given, dict) else [given]:
            found[id(parameter)] = parameter
    return found


class PostLocalSGDOptimizer(OptimizerWrapper):
    """Steps a local optimizer, then calls an averager with its parameters (post-local SGD, Lin et al. 2020).

    Arguments, `state_dict` and its key `"step"` are PyTorch's; either loads what the other saved. What differs: it is a
    whole optimizer, with closures and hooks; and a `GradScaler` that skips a step on one rank does not put averages out
    of step.

    Args:
        optim: the local optimizer.
        averager: a `PeriodicModelAverager`, of PyTorch's or this one.

    Example:
        state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        ddp.register_comm_hook(state, post_localSGD_hook)
        local = torch.optim.SGD(ddp.parameters(), 0.1)
        optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=4, warmup_steps=100))
    """

    def __init__(self, optim: Optimizer, averager: Any) -> None:
        self.optim, self.averager = optim, averager
        super().__init__(optim)

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, {self.averager!r})"

    def after_step(self) -> None:
        """Average, where it is due."""
        self.averager.average_parameters(params=self.param_groups)

    kept_by: ClassVar[str] = "its state_dict() is all there is to keep, so save that of each rank beside its model"
    """What `gradwire.save` and `gradwire.load` say of it."""

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state, and under "step" how many steps the averager has counted."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state of PyTorch's or of this one; without a step the averager begins anew, with a warning."""
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        self._share()
        if "step" not in state_dict:
            said = "the loaded state has no step of an averager, which begins at 0: its warm-up comes once more"
            warnings.warn(said, stacklevel=2)
        self.averager.step = state_dict.get("step", 0)
