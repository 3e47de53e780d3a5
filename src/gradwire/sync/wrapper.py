"""An optimizer around another one, which does something more after each of its steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.core.errors import AttachError
from gradwire.session.names import TrainedParameters
from gradwire.sync.scaling import ScaledOptimizer


class OptimizerWrapper(ScaledOptimizer):
    """A real optimizer: parameter groups and state are those of the inner one, so schedulers and hooks work as ever.

    A `GradScaler` hands it steps that it would skip elsewhere. The inner optimizer does not see those, but what comes
    after a step comes after them too, so that ranks whose scalers skip different steps stay in step.

    Args:
        inner: the optimizer that this rank trains with.
    """

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self._share()

    def _share(self) -> None:
        """Have the inner optimizer's groups and state for one's own."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the inner optimizer, do what comes after it, and return what it returned."""
        loss = None
        if not self.scaler_skips():
            self.unscale_()
            loss = self.step_inner(closure)
        self.after_step()
        return loss

    def step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """The inner optimizer's step."""
        return self.inner.step(closure) if closure else self.inner.step()

    @abstractmethod
    def after_step(self) -> None:
        """What comes after each step, also one that a scaler skips."""

    def require_fit(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters of a new group that cannot be added."""
        return

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        if any(group is param_group for group in self.inner.param_groups):  # as torch's constructor gives them
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        given = [params] if isinstance(params, Tensor) else list(params)
        self.require_fit(each[1] if isinstance(each, tuple) else each for each in given)
        self.inner.add_param_group({**param_group, "params": given})
        self._share()


class ModelWrapper(OptimizerWrapper):
    """A wrapper around an optimizer of a model whose trained parameters ranks exchange as planned when this is made.

    Args:
        inner: the optimizer that this rank trains with.
        model: whose parameters it trains, all of them or some.

    Raises:
        AttachError: a parameter of the optimizer that the model has not.
    """

    def __init__(self, inner: Optimizer, model: nn.Module) -> None:
        require_of_model(inner, model)
        self._model, self._trained = model, TrainedParameters.of_now(type(self).__name__, model)
        super().__init__(inner)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer, do what comes after it, and return what it returned.

        Raises:
            StepError: a parameter requires gradients that did not when this was made. Nothing is changed then.
        """
        self.require_planned()
        return super().step(closure)

    def require_planned(self) -> None:
        """Refuse a model that trains what ranks do not exchange.

        Raises:
            StepError: with the parameter's name.
        """
        self._trained.of(self._model)

    def require_fit(self, parameters: Iterable[Tensor]) -> None:
        """Refuse what ranks do not exchange.

        Raises:
            AttachError: a parameter that was not trained when this was made.
        """
        if not all(map(self._trained.has, parameters)):
            raise AttachError(
                f"a parameter of the new group was not trained when {type(self).__name__} was made, so ranks would not "
                "exchange it: make it require gradients before"
            )


def require_of_model(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimizer of another model.

    Raises:
        AttachError: a parameter of the optimizer that the model has not.
    """
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(cast("list[Tensor]", group["params"])):
            if id(parameter) not in known:
                raise AttachError(
                    f"parameter {position} of group {number} of the inner optimizer, of shape "
                    f"{tuple(parameter.shape)}, is none of the model's: ranks would not exchange it"
                )
