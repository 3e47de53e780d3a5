"""Methods and exchanges of gradwire, each timed as a user's session runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.bench.errors import BenchError
from gradwire.bench.options import ALL
from gradwire.methods import methods
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.lane import Lane
from gradwire.spec import as_method

_NAME = "matrix"
_SEED = 20_26
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def methods_of(specs: Sequence[str], dtype: torch.dtype) -> dict[str, Reducer]:
    """Return the reducers of specs; "all" stands for an example of every method of gradients.

    Raises:
        SpecError, CompositionError: a spec that names none, with the nearest name, or cannot be built.
        BenchError: elements that are no gradients.

    >>> list(methods_of(["int4", "none,exchange=ring"], torch.float32))
    ['int4', 'none,exchange=ring']
    """
    if specs and dtype not in _FLOATS:
        name = str(dtype).removeprefix("torch.")
        raise BenchError(f"methods reduce gradients, and {name} is no type of those: give --dtype float32")
    written = [spec for given in specs for spec in (_examples() if given == ALL else [given])]
    return {spec: as_method(spec) for spec in written}


def _examples() -> list[str]:
    return [method.example for method in methods().values()]


class MethodCall:
    """A method that reduces one matrix of normally distributed numbers, other ones on each rank.

    The matrix is as square as its count allows, since methods of low rank send a vector as it is.

    Args:
        spec: of the method.
        lane: where it communicates.
        device: of the matrix.
        dtype: of its elements.
        count: how many it has.

    Raises:
        AttachError, CompositionError, SpecError: the method cannot serve these ranks or this matrix.
    """

    def __init__(self, spec: str, lane: Lane, device: torch.device, dtype: torch.dtype, count: int) -> None:
        self._rank, self._ranks, self._dtype = lane.group.rank(), lane.group.size(), dtype
        self._shape = _shape(count)
        self._given = self._of_rank(self._rank).to(device)
        self._matrix = self._given.clone()
        self._session = Session({_NAME: self._given}, spec, lane=lane, what="gradwire bench")

    def _of_rank(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(_SEED + rank)
        return torch.randn(self._shape, generator=generator).to(self._dtype)

    def fill(self) -> None:
        """Write what this rank gives over what the last call has left."""
        self._matrix.copy_(self._given)

    def call(self) -> None:
        """Run the method once: the matrix holds its result then."""
        self._session.reduce_({_NAME: self._matrix})

    def error(self) -> float:
        """|result - mean| / |mean| after `fill` and one `call`, where the mean is exact: taken here, in float64."""
        mean = torch.zeros(self._shape, dtype=torch.float64)
        for rank in range(self._ranks):
            mean += self._of_rank(rank)
        mean /= self._ranks
        return float((self._matrix.cpu().double() - mean).norm() / mean.norm())

    @property
    def averages(self) -> bool:
        """Whether the method computes a mean, and not another rule."""
        return self._session.reducer.averages

    @property
    def wire_bytes(self) -> float:
        """What this rank has sent in a step, the mean over all steps so far."""
        stats = self._session.stats()
        return stats.wire_bytes / max(stats.steps, 1)

    def close(self) -> None:
        """End the session; the lane stays."""
        self._session.close()


def _shape(count: int) -> tuple[int, int]:
    """The two factors of a number that are nearest to each other."""
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return rows, count // rows
