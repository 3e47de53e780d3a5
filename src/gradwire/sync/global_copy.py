"""What ranks agreed on last, and what an outer step makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.errors import StepError
from gradwire.sync.outer import Memory, Outer, Rates
from gradwire.sync.shards import local

_SAME_RATES = Rates(1.0, 1.0)


def wide(tensor: Tensor) -> Tensor:
    """A contiguous copy of what this rank holds, in 32 bits at least: in 16 an outer step would be lost in rounding."""
    return buffers.copied(local(tensor).detach(), torch.promote_types(tensor.dtype, torch.float32))


class GlobalCopy:
    """What all ranks had of named parameters at a window's beginning, and what the outer step remembers of them.

    Args:
        parameters: those of the model, alive. Of one that is sharded, what this rank holds of it counts.
        outer: what the copy becomes.
        device: where copies and memory lie; None for where each parameter is.

    Attributes:
        copies: of each tensor, the same bits on all ranks.
        memory: of the outer step, likewise.
    """

    def __init__(self, parameters: Mapping[str, Tensor], outer: Outer, device: torch.device | None = None) -> None:
        self.parameters, self.outer = dict(parameters), outer
        self.copies = {name: wide(p).to(device or p.device, copy=True) for name, p in parameters.items()}
        self.memory: dict[str, Memory] = {name: outer.memory(copy) for name, copy in self.copies.items()}

    def start(self, name: str) -> Tensor:
        """What a parameter was at the window's beginning: the global copy, as the parameter's dtype holds it."""
        copy, parameter = self.copies[name], self.parameters[name]
        return copy if parameter.dtype == copy.dtype else copy.to(parameter.dtype).to(copy.dtype)

    @torch.no_grad()
    def changes(self) -> dict[str, Tensor]:
        """x_H - x_0 of each parameter, in 32 bits or more: new tensors."""
        return {
            name: wide(parameter).to(self.copies[name].device).sub_(self.start(name))
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def move_(self, means: Mapping[str, Tensor], rates_of: Callable[[str], Rates] = lambda _: _SAME_RATES) -> None:
        """Make the outer step with the mean change of each parameter.

        Args:
            means: over ranks.
            rates_of: learning rates of the inner optimizer, by parameter.
        """
        for name in self.parameters:
            self.outer.move_(self.copies[name], means[name], self.memory[name], rates_of(name))

    @torch.no_grad()
    def write(self) -> None:
        """Give the parameters the global copy."""
        for name, parameter in self.parameters.items():
            local(parameter).copy_(self.copies[name])

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Take what the parameters are now for the global copy."""
        for name, parameter in self.parameters.items():
            self.copies[name].copy_(local(parameter))


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that is not finite, if there is one: alike on all ranks that have the same ones."""
    return next((name for name, tensor in tensors.items() if not kernels.all_finite(tensor)), None)


def require_finite(name: str | None) -> None:
    """Refuse a mean that is not finite.

    Args:
        name: what `not_finite` has found.

    Raises:
        StepError: with the name.
    """
    if name is not None:
        raise StepError(
            f"{name!r} is not finite on some rank at the end of a window; the global copy still has what all ranks "
            "began the window with"
        )
