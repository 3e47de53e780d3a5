"""Arithmetic of updates, the same bits on every processor.

What every rank computes from what all received must be alike, since nothing would ever repair a difference. So updates
multiply, add, divide and take square roots one after the other, which IEEE 754 rounds alike everywhere. They never use
an operator that may fuse two of them (`addcmul_`, `add_` with `alpha`, `lerp_`), nor `torch.sqrt` on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.rounding import square_root


def power(base: float, exponent: int) -> float:
    """base^exponent by multiplications alone, since `pow` of C libraries rounds differently on different processors.

    >>> power(0.5, 3), power(0.9, 0)
    (0.125, 1.0)
    """
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result


def mix_(average: Tensor, x: Tensor, keep: float) -> None:
    """average = keep * average + (1 - keep) * x, in place and unfused."""
    average.mul_(keep).add_(buffers.times(x, 1.0 - keep))


def still_(x: Tensor, square: Tensor) -> Tensor:
    """Set `x` to 0 where the variance `square` is 0, in place: nothing moves there. Returns `x`."""
    return x.masked_fill_(torch.eq(square, 0, out=buffers.like(square, torch.bool)), 0.0)


def adam_denominator(square: Tensor, beta2: float, count: int, eps: float) -> Tensor:
    """sqrt(v / (1 - beta2^count)) + eps, with v = `square` after `count` updates (Kingma & Ba 2015, Algorithm 1)."""
    # Times the reciprocal, since a division by a number is that on a GPU and a division on a CPU.
    return square_root(square).mul_(1.0 / math.sqrt(1.0 - power(beta2, count))).add_(eps)


def adam_state(parameter: Tensor) -> dict[str, Tensor]:
    """Momentum and variance of zeros, under PyTorch's names."""
    return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def adam_step_(
    parameter: Tensor, mean: Tensor, square: Tensor, group: Mapping[str, Any], count: int, share: float = 1.0
) -> None:
    """Decay, then parameter -= share * lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^count)) + eps).

    m = `mean` after the group's `step` updates, v = `square` after `count`.
    """
    decay_(parameter, group, share)
    denominator = adam_denominator(square, group["betas"][1], count, group["eps"])
    step_size = share * float(group["lr"]) / (1.0 - power(group["betas"][0], group["step"]))
    parameter.sub_(torch.div(mean, denominator, out=denominator).mul_(step_size))


def adam_update_(
    parameter: Tensor,
    state: Mapping[str, Tensor],
    gradient: Tensor,
    group: Mapping[str, Any],
    count: int,
    share: float = 1.0,
) -> None:
    """Take a gradient up into the mean and the variance of `adam_state`, and make `adam_step_` with them."""
    beta1, beta2 = group["betas"]
    mix_(state["exp_avg"], gradient, beta1)
    mix_(state["exp_avg_sq"], torch.mul(gradient, gradient, out=buffers.like(gradient)), beta2)
    adam_step_(parameter, state["exp_avg"], state["exp_avg_sq"], group, count, share)


def decay_(parameter: Tensor, group: Mapping[str, Any], share: float = 1.0) -> None:
    """Decoupled weight decay (Loshchilov & Hutter 2019): parameter *= 1 - share * lr * weight_decay."""
    if group["weight_decay"]:
        parameter.mul_(1.0 - share * float(group["lr"]) * group["weight_decay"])


def check_rate(lr: float, weight_decay: float) -> None:
    """Refuse what no optimizer takes.

    Raises:
        ValueError: with the option and its range.
    """
    if not lr >= 0:
        raise ValueError(f"lr {lr} is negative")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay {weight_decay} is negative")


def check_adam(betas: tuple[float, float], eps: float) -> None:
    """Refuse what no Adam takes.

    Raises:
        ValueError: with the option and its range.
    """
    if not eps > 0:
        raise ValueError(f"eps {eps} is not positive")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas {betas} are outside [0, 1)")
