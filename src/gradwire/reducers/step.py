"""What a program is told of the step that it runs in, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.core import buffers, program
from gradwire.core.grain import Grain
from gradwire.core.key import Key
from gradwire.core.state import State

PAST_WARM_UPS = 1_000_000
"""A step behind all that methods begin with: it stands for most of a run."""


@dataclass(frozen=True)
class Step:
    """Where a program runs: the step, the rank, the number of ranks, and the seed of the run.

    `weight` is what this rank has said to count for in this step, None where it has said nothing. `largest` is the
    number of elements of the largest part that a rank of a node has of the grain; None where no hierarchy cuts it. What
    all ranks must do alike goes by it.
    """

    index: int
    rank: int
    world_size: int
    seed: int = 0
    weight: float | None = None
    largest: int | None = None

    def empty(self, numel: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for a mean, 1-d, on the device and in the dtype of `like`."""
        return buffers.empty((numel,), dtype or like.dtype, like.device)

    def largest_of(self, numel: int) -> int:
        """The elements of the largest part of a grain; `numel`, which are all, where no hierarchy cuts it."""
        return numel if self.largest is None else self.largest

    def key(self, grain: Grain, stage: str = "", rank: int | None = None) -> Key:
        """Return the key of `rank` (default: this one) for a stage of coding `grain`."""
        return Key(self.seed, self.index, grain.name, stage, self.rank if rank is None else rank)


class Sent(Protocol):
    """What this rank's contribution decodes to on the other side."""

    def subtract_from(self, x: Tensor) -> None:
        """x -= sent, in place; `x` has the grain's shape, and the values that were reduced."""
        ...


class Reduced(NamedTuple):
    """What a program returns.

    `value` is the mean over ranks where the reducer `averages`, and elsewhere what it makes of all ranks' tensors: the
    same on every rank where it `ends_alike`, and this rank's shard where it `scatters`. `sent` is what this rank sent,
    and `state` the new state.

    `bad` is None, or a 0-d bool tensor, the same on every rank, that is true where the step must not be kept: the
    driver then forgets the new state of every grain of the step.
    """

    value: Tensor
    sent: Sent
    state: State
    bad: Tensor | None = None


Program = program.Program[Reduced]
"""What `reduce` returns."""
