"""A model as two vectors: all trained parameters, and all buffers of numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradwire.core.errors import CompositionError, FederationError
from gradwire.core.flat_layout import FlatLayout, fingerprint_of


class FlatModel:
    """A module whose trained parameters are views of one vector, and so are their gradients.

    So a step of a client, and what a server makes of many clients, is arithmetic on vectors. The module stays a module:
    it is called, moved between modes and saved as before. What is written to `values` is what it computes with.

    Args:
        module: taken over; hand in a copy to keep your own as it is.

    Attributes:
        values: (d,) the trained parameters in the order of `named_parameters`, tied weights once.
        gradient: (d,) where the backward pass adds to.
        fingerprint: 16 letters that depend on names, shapes and dtypes, alike for models that may be averaged.

    Raises:
        CompositionError: no trained parameter, or parameters that are not all float32 or all float64 on one device.

    >>> model = FlatModel(nn.Linear(2, 1))
    >>> model.values.zero_()
    tensor([0., 0., 0.])
    >>> model.module(torch.ones(2))
    tensor([0.], grad_fn=<ViewBackward0>)
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _require_one_kind(parameters)
        layout = FlatLayout(parameters)
        self.values = layout.flat(parameters)
        self.gradient = torch.zeros_like(self.values)
        values, gradients = layout.named(self.values), layout.named(self.gradient)
        self._gradients = [(parameter, gradients[name]) for name, parameter in parameters.items()]
        for name, parameter in parameters.items():
            parameter.data, parameter.grad = values[name], gradients[name]
        kept = module.state_dict(keep_vars=True)
        self._buffers = [b for name, b in module.named_buffers() if name in kept and b.dtype != torch.bool]
        told = [(name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items()]
        told += [("buffer", tuple(b.shape), str(b.dtype)) for b in self._buffers]
        self.fingerprint = fingerprint_of(repr(told)).hex()

    def require_bound(self) -> None:
        """Refuse a model whose gradients were taken out of the vector, as by `zero_grad()`: they would be missed.

        Raises:
            FederationError: with what to leave out.
        """
        if any(p.grad is None or p.grad.data_ptr() != bound.data_ptr() for p, bound in self._gradients):
            raise FederationError(
                "a client's loss has replaced the model's gradients: it computes a loss alone, without zero_grad(), "
                "backward() or an optimizer"
            )

    @torch.no_grad()
    def buffers(self) -> Tensor:
        """A copy of all buffers of numbers that a checkpoint has, in float64, which holds counts exactly."""
        parts = [buffer.reshape(-1).double() for buffer in self._buffers]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=self.values.device)

    @torch.no_grad()
    def load_buffers(self, values: Tensor) -> None:
        """Overwrite the buffers with what `buffers` returned, or with a mean of that; counts are rounded."""
        if not self._buffers:
            return
        for buffer, part in zip(self._buffers, values.split([b.numel() for b in self._buffers]), strict=True):
            buffer.copy_((part if buffer.is_floating_point() else part.round()).view(buffer.shape))


def _require_one_kind(parameters: Mapping[str, nn.Parameter]) -> None:
    if not parameters:
        raise CompositionError("the model has no parameter that is trained: set requires_grad on those that should be")
    first, like = next(iter(parameters.items()))
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise CompositionError(
                f"parameter {name!r} is {parameter.dtype}: a federation averages models in float32 or float64, so call "
                "model.float() and use torch.autocast in the loss for less"
            )
        if (parameter.dtype, parameter.device) != (like.dtype, like.device):
            raise CompositionError(
                f"parameters {first!r} and {name!r} differ in dtype or device: bring the model to one of each"
            )
