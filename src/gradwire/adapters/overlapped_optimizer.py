"""An optimizer that steps parameters as their means come, while those of others are still on their way.

Each parameter is stepped by the optimizer's own `step`, with what the optimizer remembers of it. So all parameters end
at the bits of a single step of all of them: PyTorch's optimizers make nothing of one parameter that depends on another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.core.errors import AttachError

_WHOLE = ("LBFGS", "SparseAdam")
"""PyTorch's optimizers that look at all parameters at once, or want gradients that nothing here sends."""


class OverlappedOptimizer:
    """Steps parameters in the course of a backward pass, and leaves them out of the script's own `optimizer.step()`.

    Args:
        optimizer: of `torch.optim`, as the script steps it. Its `step()` steps what is left, which is nothing where all
            its parameters are trained by the session, and schedulers of learning rates go on as before.
        parameters: by name, those whose means come.

    Raises:
        AttachError: an optimizer that cannot step parameters one by one.
    """

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        _require_separable(optimizer)
        self._optimizer = optimizer
        self._by_name = dict(parameters)
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if missing := next((name for name, parameter in parameters.items() if parameter not in held), None):
            raise AttachError(
                f"the optimizer has no parameter {missing!r}, whose gradients are combined: give optimizer= one of all "
                "trained parameters, or leave it out and step yours after the backward pass"
            )
        self._stepped: set[Tensor] = set()
        self._whole: list[list[Tensor]] | None = None  # of each group, while the script's own step has less
        self._hooks = [
            optimizer.register_step_pre_hook(self._leave_out),
            optimizer.register_step_post_hook(self._put_back),
        ]

    def begin(self) -> None:
        """A backward pass begins whose means are stepped by."""
        self._stepped = set()

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Step some parameters.

        Args:
            gradients: by name, in the shapes of the parameters: their means.
        """
        chosen = {self._by_name[name]: gradient for name, gradient in gradients.items()}
        before = {parameter: parameter.grad for parameter in chosen}
        try:
            for parameter, gradient in chosen.items():
                parameter.grad = gradient
            self._of(chosen).step()
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient
        self._stepped.update(chosen)

    def remove(self) -> None:
        """Have the script's own `step()` step all parameters again."""
        self._restore()
        self._stepped = set()
        while self._hooks:
            self._hooks.pop().remove()

    def _of(self, chosen: Mapping[Tensor, Tensor]) -> Optimizer:
        """The optimizer as one of some parameters: with its groups' settings of now, and its own memory."""
        own: Any = object.__new__(type(self._optimizer))
        vars(own).update(vars(self._optimizer))
        vars(own).pop("step", None)  # of a scheduler, which counts the script's steps
        own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks = OrderedDict[int, Any](), OrderedDict[int, Any]()
        groups = self._optimizer.param_groups
        own.param_groups = [{**group, "params": [p for p in group["params"] if p in chosen]} for group in groups]
        own.param_groups = [group for group in own.param_groups if group["params"]]
        return own

    def _leave_out(self, *_: object) -> None:
        """Before the script's own step: what was stepped by its mean is not stepped again."""
        self._restore()  # after a step that an exception ended
        groups = self._optimizer.param_groups
        self._whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in self._stepped]
        self._stepped = set()

    def _put_back(self, *_: object) -> None:
        """After the script's own step: its groups have all of their parameters again."""
        self._restore()

    def _restore(self) -> None:
        whole, self._whole = self._whole, None
        if whole is not None:
            for group, parameters in zip(self._optimizer.param_groups, whole, strict=True):
                group["params"] = parameters


def _require_separable(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if not kind.step.__module__.startswith("torch.optim") or kind.__name__ in _WHOLE:
        raise AttachError(
            f"optimizer= takes an optimizer of torch.optim that steps each parameter by itself, and {kind.__name__} is "
            "none: leave it out, and step yours after the backward pass"
        )


def require_plain_steps(
    optimizer: Optimizer | None, scaler: torch.amp.GradScaler | None, on_non_finite: str, unused: bool = False
) -> None:
    """Refuse an optimizer that steps early where something else decides after the backward pass whether it steps.

    Raises:
        AttachError: with what does.
    """
    if optimizer is None:
        return
    reasons: Sequence[tuple[bool, str]] = (
        (scaler is not None, "scaler=: it decides after the backward pass whether a step is made"),
        (on_non_finite == "skip", 'on_non_finite="skip": only the whole mean tells whether a step is skipped'),
        (unused, "find_unused_parameters=True: DDP finds out after the backward pass which parameters were used"),
    )
    for found, reason in reasons:
        if found:
            raise AttachError(f"optimizer= steps in the course of the backward pass, and does not go with {reason}")
