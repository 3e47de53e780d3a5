"""Other values in a model for a while, and its own ones back afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping

import torch
from torch import Tensor

from gradwire.sync.shards import local


@torch.no_grad()
def write_(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into parameters of the same names; values of other names are left out."""
    for name, parameter in parameters.items():
        local(parameter).copy_(values[name])


@contextlib.contextmanager
def swapped(
    parameters: Mapping[str, Tensor], values: Mapping[str, Tensor], written: Callable[[], None] = lambda: None
) -> Generator[None]:
    """In a `with` block parameters have these values; afterwards they have what they had before.

    Args:
        parameters: of a model.
        values: by the same names.
        written: is called after each change.

    >>> x = torch.zeros(1)
    >>> with swapped({"x": x}, {"x": torch.ones(1)}): print(x)
    tensor([1.])
    >>> x
    tensor([0.])
    """
    own = {name: local(parameter).detach().clone() for name, parameter in parameters.items()}
    try:
        write_(parameters, values)
        written()
        yield
    finally:
        write_(parameters, own)
        written()
