"""Half precision where the measured range fits it, more bits or another format where it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.cast import BF16, Identity
from gradwire.core import buffers, collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.reducers.base import Reducer
from gradwire.reducers.exchange import AllReduceExchange
from gradwire.reducers.scaled_fp16 import largest_magnitude, mean_of_halves, scales
from gradwire.reducers.step import Program, Step

SMALLEST_NORMAL = 2.0**-14
"""Of float16. Below it spacing no longer shrinks with the number."""

WIDE = {"fp32": Identity, "bf16": BF16}


@dataclass(frozen=True)
class AdaptivePrecision(Reducer):
    """fp16 for a grain whose range fits it, else what `wide` says; measured each step, and alike on all ranks.

    Of each grain the ranks agree, by an all-reduce of maxima, on the largest magnitude M and on the mean magnitude m_p
    of each parameter p in it. With the power of two 2^k that brings M just below 2^15 (as `ScaledFP16`, which sends
    what fits), fp16 fits where

        M is finite   and, for every p with m_p > 0,   2^k m_p / n >= 2^-14.

    The first keeps x / n and every sum of it, at most M, from overflowing. The second keeps what matters from
    underflowing: halves are 2^-24 apart below 2^-14, so rounding x / n takes 2^-25 from an element at most, and from a
    parameter no more, on average over its elements, than 2^-11 of their mean magnitude: what rounding takes where
    nothing underflows. Single elements far below their parameter's mean may vanish; a parameter far below the
    others of its grain may not, as it would in `fp16` (under 6e-8) or `fp16_scaled` (under 2^-39 n of M). fp16
    has 3 bits more than bfloat16, so it comes first; `bf16` is for those who want 16 bits whatever the range.

    A step costs an all-reduce of one float for the grain and one for each parameter in it before the gradient's own.
    On a GPU the host waits for its result, since the format of what is sent depends on it. Bytes without data
    (`gradwire cost`) are those of fp16. Not a contraction: a rank whose gradient is far below the others' loses it.

    Where it deviates: the paper scales the loss by one factor, so that few gradients underflow. To measure each grain
    and to choose its format by what was measured is of no paper.

    Args:
        wide: what a grain travels in that does not fit: "fp32", as it is (gradients of 16 bits stay so), or "bf16",
            which every backend that gradwire knows sums: Gloo, and NCCL since 2.10.

    Raises:
        CompositionError: another `wide`.

    References:
        Micikevicius et al. 2018, "Mixed precision training", Section 3.2, on gradients below float16's range.

    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import Lockstep
    >>> ranks = Lockstep(AdaptivePrecision(), flat_grain(2), world_size=2)
    >>> ranks.step([torch.tensor([65536.0, 0.5])] * 2)[0]  # 65536 is no half
    tensor([6.5536e+04, 5.0000e-01])
    """

    wide: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        if self.wide not in WIDE:
            raise CompositionError(f"wide={self.wide!r} is none of {', '.join(WIDE)}")

    @property
    def shows_non_finite(self) -> bool:
        """True: the range of such a gradient fits nothing, and each element is sent for itself."""
        return True

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return State()

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """All-reduce of the range, then of the gradient in the format that it allows."""
        flat = x.reshape(-1)
        ranges = yield collective.AllReduce(_measured(flat, grain), op="max", consumable=True)
        if _fits(ranges, step.world_size):
            return (yield from mean_of_halves(x, ranges[:1], state, step))
        return (yield from AllReduceExchange(WIDE[self.wide]()).reduce(grain, x, state, step))


def _measured(flat: Tensor, grain: Grain) -> Tensor:
    """The largest magnitude and each parameter's mean magnitude, float32."""
    found = torch.zeros(1 + len(grain.segments), dtype=torch.float32, device=flat.device)
    found[:1] = largest_magnitude(flat)
    for i, (_, _, numel, offset) in enumerate(grain.segments):
        if numel:  # where the sum overflows, the grain is sent as it is
            mean = _sum_of_magnitudes(flat[offset : offset + numel]) / numel
            found[1 + i] = torch.where(mean > 0, mean.clamp(min=2.0**-149), mean)  # no float32 is smaller but zero
    return found


def _sum_of_magnitudes(flat: Tensor) -> Tensor:
    """sum |x| in float64, 0-d; on a CPU a piece at a time, since PyTorch would copy all of it."""
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(flat, 1, dtype=torch.float64)
    pieces = (buffers.copied(piece, torch.float64) for piece in flat.split(buffers.PIECE))
    return torch.stack([torch.linalg.vector_norm(piece, 1) for piece in pieces]).sum()


def _fits(ranges: Tensor, world_size: int) -> bool:
    """Whether fp16 fits, from agreed maxima; True for tensors without data."""
    if ranges.is_meta:
        return True
    scale, _ = scales(ranges[:1])
    means = ranges[1:]
    enough = means * (scale / world_size) >= SMALLEST_NORMAL
    return bool(torch.isfinite(ranges).all() & (enough | (means == 0)).all())
