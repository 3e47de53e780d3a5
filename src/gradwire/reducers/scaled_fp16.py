"""Half precision in the range that the gradient needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers, collective
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import Program, Reduced, Step


@dataclass(frozen=True, eq=False)
class _SentHalves:
    """Halves that stand for `scale` times as much."""

    halves: Tensor
    scale: Tensor

    def subtract_from(self, x: Tensor) -> None:
        x.view(-1).sub_(buffers.copied(self.halves, x.dtype).mul_(self.scale))


@dataclass(frozen=True)
class ScaledFP16(Reducer):
    """mean = 2^-k sum over ranks of fp16(2^k x / n): one all-reduce of halves, with k agreed on first.

    k is the same on all ranks and the greatest with 2^k max|x| < 2^15 over all of them (an all-reduce of one maximum a
    grain), so no sum overflows, and what is within n 2^-39 of the largest element does not vanish, however small
    gradients are: plain fp16 loses what is below 6e-8. Powers of two round nothing; k is at most 126, so that both
    powers are float32. Not a contraction: a rank whose gradient is far below the others' loses it.

    It is of no paper. Loss scaling (Micikevicius et al. 2018) has one factor for all gradients, found by trial.

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> ranks = Lockstep(ScaledFP16(), flat_grain(2), world_size=2)
    >>> ranks.step([torch.tensor([1e-9, 1e-12]), torch.tensor([3e-9, 3e-12])])[0]
    tensor([2.0009e-09, 2.0002e-12])
    """

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-reduce of the maximum, then of halves."""
        largest = yield collective.AllReduce(largest_magnitude(x.reshape(-1)), op="max", consumable=True)
        return (yield from mean_of_halves(x, largest, state, step))


def mean_of_halves(x: Tensor, largest: Tensor, state: State, step: Step) -> Program:
    """One all-reduce of halves, scaled to a largest magnitude that the ranks agreed on."""
    scale, inverse = scales(largest)
    halves = _halves(x.reshape(-1), scale / step.world_size)
    total = yield collective.AllReduce(halves)
    mean = buffers.as_dtype(buffers.copied(total, torch.float32).mul_(inverse), x.dtype)
    return Reduced(mean.view(x.shape), _SentHalves(halves, inverse * step.world_size), state)


def largest_magnitude(flat: Tensor) -> Tensor:
    """max|x| as one float32; infinity where it is not finite, since a backend's maximum may pass over NaN."""
    if not flat.numel():
        return torch.zeros(1, dtype=torch.float32, device=flat.device)
    low, high = torch.aminmax(flat)
    largest = torch.maximum(-low, high).to(torch.float32).view(1)
    return torch.where(torch.isfinite(largest), largest, float("inf"))


def scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """2^k and 2^-k, float32, from the exponent of the largest magnitude; k is at most 126."""
    exponent = (268 - (largest.view(torch.int32) >> 23)).clamp(max=253)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def _halves(flat: Tensor, factor: Tensor) -> Tensor:
    """factor * x, rounded to halves as it is written."""
    halves = buffers.empty(flat.shape, torch.float16, flat.device)
    if flat.dtype == torch.float16 or flat.device.type != "cpu":
        return torch.mul(flat, factor, out=halves)
    dtype = torch.promote_types(flat.dtype, factor.dtype)
    # Widened first: a product of two types would be made in memory of PyTorch's own.
    buffers.write_rounded(halves, flat, dtype, lambda piece, made: made.copy_(piece).mul_(factor))
    return halves
