"""The unit of coding and of state: some parameters as one flat tensor, or a batch of equal matrices.

Grains are planned once, from names, shapes, dtypes and policy alone. DDP's buckets only deliver gradients, so
nothing in a grain changes when DDP rebuilds them or when a run is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.core.roles import role_of_name


class ParameterSpec(NamedTuple):
    """What planning may know of a parameter.

    Attributes:
        name, shape, dtype, device: of the parameter.
        known_role: what it is for, where its module told; empty where only its name is known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    known_role: str = ""

    @property
    def role(self) -> str:
        """What it is for in its model: one of `core.roles.ROLES`."""
        return self.known_role or role_of_name(self.name, self.shape)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The parameter seen as a matrix: its first dimension by all the others."""
        rows = self.shape[0] if self.shape else 1
        return rows, self.numel // rows if rows else 0


class Segment(NamedTuple):
    """Elements [start, start + numel) of parameter `name`, at `offset` in the grain."""

    name: str
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class Grain:
    """Segments of parameters that are encoded together.

    `shape` is `(numel,)` for a flat grain and `(batch, rows, columns)` for equal matrices, one per segment.

    >>> Grain("w", (Segment("w", 0, 6, 0),), (6,), torch.float32, torch.device("cpu")).numel
    6
    """

    name: str
    segments: tuple[Segment, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.shape).numel()


def flat_grain(numel: int, name: str = "x", dtype: torch.dtype = torch.float32, device: str = "cpu") -> Grain:
    """Return a grain that is all of one parameter: what tests and one-off calls want."""
    return Grain(name, (Segment(name, 0, numel, 0),), (numel,), dtype, torch.device(device))


def matrix_grain(
    rows: int,
    columns: int,
    batch: int = 1,
    name: str = "x",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Grain:
    """Return a grain of `batch` matrices of one shape."""
    size = rows * columns
    segments = tuple(Segment(f"{name}{i}", 0, size, i * size) for i in range(batch))
    return Grain(name, segments, (batch, rows, columns), dtype, torch.device(device))
