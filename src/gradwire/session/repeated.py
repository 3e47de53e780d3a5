"""Loops that exchange gradients in every micro-batch, where once before the optimizer's step would do."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from gradwire.core.errors import AccumulationWarning
from gradwire.core.figures import si_bytes
from gradwire.drivers.engine import Stats

_SAMPLE = 64
"""Elements of a parameter that are compared on a CPU, since optimizers that step `parameter.data` leave its version."""


class _Seen(NamedTuple):
    """A parameter and its gradient as they were when the gradient had been exchanged."""

    gradient: weakref.ref[Tensor]
    version: int
    sample: list[float]

    def accumulates(self, gradient: Tensor, parameter: Tensor) -> bool:
        """Whether the gradient has grown since, while nobody has stepped the parameter."""
        same = self.gradient() is gradient and self.version == parameter._version
        return same and self.sample == _sample(parameter)


class RepeatedExchanges:
    """Counts the exchanges of one optimizer step by one parameter, and warns once where they are several.

    No optimizer is known here. A step has been made where the parameter has changed, and a gradient that was made anew
    is not accumulated. Two steps in a row must have several exchanges: where a loss scaler skips a step and gradients
    are zeroed in place, a single step seems to have two.

    Example:
        repeated = RepeatedExchanges()
        repeated.exchanged(model.parameters(), session.stats)  # at the end of every exchange
    """

    def __init__(self) -> None:
        self._seen: _Seen | None = None
        self._count = self._count_before = 1  # exchanges since the optimizer's last step, and in the step before that
        self._has_warned = False

    def exchanged(self, parameters: Iterable[Tensor], stats: Callable[[], Stats]) -> None:
        """Note that the gradients of parameters have been exchanged.

        Args:
            parameters: the same in every call; the first of them is looked at. None where there is no model.
            stats: returns the bytes and steps so far, for the warning.
        """
        parameter = next(iter(parameters), None)
        if self._has_warned or parameter is None or (gradient := parameter.grad) is None:
            return
        if self._seen is not None and self._seen.accumulates(gradient, parameter):
            self._count += 1
            return
        if self._count > 1 and self._count_before > 1:
            self._has_warned = True
            warnings.warn(AccumulationWarning(warning_text(self._count, stats())), stacklevel=2)
        self._count_before, self._count = self._count, 1
        self._seen = _Seen(weakref.ref(gradient), parameter._version, _sample(parameter))


def _sample(parameter: Tensor) -> list[float]:
    """A few elements where reading them waits for no device."""
    local: Tensor = getattr(parameter, "_local_tensor", parameter)  # of a DTensor, without importing that
    if local.device.type != "cpu":
        return []
    return local.detach().reshape(-1)[:_SAMPLE].tolist()


def warning_text(count: int, stats: Stats) -> str:
    """What an `AccumulationWarning` says.

    >>> warning_text(8, Stats(steps=9, wire_bytes=9_000_000))[:76]
    'gradients were exchanged in each of 8 backward passes before one step of the'
    """
    once = stats.wire_bytes / max(stats.steps, 1)
    return (
        f"gradients were exchanged in each of {count} backward passes before one step of the optimizer, so this rank "
        f"sent {si_bytes(count * once)} a step, and one exchange sends {si_bytes(once)}: put the passes into a block "
        "of gradwire.accumulate, or those before the last one into no_sync()"
    )
