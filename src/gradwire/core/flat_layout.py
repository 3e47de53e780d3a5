"""Named tensors as one vector: what servers compute with, and what travels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError, StepError


class FlatLayout:
    """Where each named tensor stands in one vector, in the order of the mapping.

    Args:
        like: tensors that are all float32 or all float64.

    Attributes:
        numel: d, the length of the vector.
        dtype: of the tensors and the vector.
        fingerprint: a number of 63 bits that depends on names, shapes and dtype; models whose numbers are alike may
            be pushed to each other.

    Raises:
        CompositionError: no tensor at all, or tensors of another dtype.

    >>> layout = FlatLayout({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    >>> layout.flat({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    tensor([1., 1., 1., 1., 0., 0.])
    >>> layout.named(torch.arange(6.0))["bias"]
    tensor([4., 5.])
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        self._numels = [tensor.numel() for tensor in like.values()]
        self.numel = sum(self._numels)
        self.dtype = _one_dtype(like)
        told = repr([(name, tuple(shape)) for name, shape in self.shapes.items()]) + str(self.dtype)
        self.fingerprint = int.from_bytes(fingerprint_of(told), "little") >> 1

    @property
    def nbytes(self) -> int:
        """How many bytes the vector has."""
        return self.numel * self.dtype.itemsize

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a new vector (d,) of the tensors' elements.

        Raises:
            StepError: a name that is missing or too many, or a tensor of another shape.
        """
        if tensors.keys() != self.shapes.keys():
            odd = sorted(tensors.keys() ^ self.shapes.keys())[0]
            raise StepError(f"tensor {odd!r} is missing or unknown: give exactly the tensors that the server has")
        for name, shape in self.shapes.items():
            if tensors[name].shape != shape:
                raise StepError(f"tensor {name!r} has shape {tuple(tensors[name].shape)}, and {tuple(shape)} is wanted")
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.shapes])

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a vector (d,), by name."""
        parts = flat.split_with_sizes(self._numels)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def fingerprint_of(told: str) -> bytes:
    """Return 8 bytes that depend on a text."""
    return hashlib.blake2b(told.encode(), digest_size=8).digest()


def _one_dtype(like: Mapping[str, Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in like.values()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        shown = ", ".join(sorted(map(str, dtypes))) or "no tensors"
        raise CompositionError(f"a server keeps tensors that are all float32 or all float64, and was given {shown}")
    return dtypes.pop()
