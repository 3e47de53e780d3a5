"""Parameters that a session compares between ranks after every so many of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from gradwire.core.errors import AttachError
from gradwire.session.drift import Holder, check_drift, require_reaction
from gradwire.session.names import named


def require_rhythm(check_every: int, on_drift: str) -> None:
    """Refuse what no comparison can be made by, before anything is done.

    Raises:
        AttachError: a number below 1, or another word than "warn", "stop" and "repair".
    """
    if check_every < 1:
        raise AttachError(f"check_every={check_every}: parameters are compared every 1, 2, 3 or more steps")
    require_reaction(on_drift)


@dataclass(frozen=True)
class DriftWatch:
    """What is compared, and when.

    Attributes:
        tensors: a model, whose parameters that require gradients are compared, or parameters by name.
        check_every: steps between two comparisons.
        on_drift: see `gradwire.check_drift`.
    """

    tensors: nn.Module | Mapping[str, Tensor]
    check_every: int
    on_drift: str

    @property
    def says(self) -> str:
        """What must be the same on all ranks."""
        return f"check_every={self.check_every}, on_drift={self.on_drift!r}"

    def step_ended(self, holder: Holder) -> None:
        """Compare if it is time: a step of every rank has ended, and none is under way."""
        if holder.session.engine.index % self.check_every == 0:
            check_drift(holder, self.tensors, self.on_drift)


def watch(tensors: nn.Module | Mapping[str, Tensor], check_every: int, on_drift: str) -> DriftWatch:
    """Return the watch of a session over these tensors.

    Args:
        tensors: a model, whose parameters that require gradients are watched; or parameters by name.
        check_every: steps between two comparisons.
        on_drift: see `gradwire.check_drift`.

    Raises:
        AttachError: as `require_rhythm`, or a tensor that is no parameter.

    >>> import torch
    >>> watch({"w": torch.ones(2, requires_grad=True)}, 1000, "warn").says
    "check_every=1000, on_drift='warn'"
    >>> watch({"w": torch.ones(2)}, 1000, "warn")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    gradwire.core.errors.AttachError: 'w' requires no gradient, so it is no parameter that check_every= could ...
    """
    require_rhythm(check_every, on_drift)
    for name, tensor in named(tensors).items():
        if not tensor.requires_grad:
            raise AttachError(
                f"{name!r} requires no gradient, so it is no parameter that check_every= could compare: make the "
                "session of the model or of its parameters, or call gradwire.check_drift on them"
            )
    return DriftWatch(tensors, check_every, on_drift)
