"""What becomes of moments of a rank's optimizer when ranks average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.core.errors import CompositionError
from gradwire.sync.shards import local

Moments = Literal["own", "average", "reset"]
"""own: each rank keeps its optimizer's state. average: what makes a step is averaged with the parameters, first moments
and what they are divided by. reset: first moments become zero, and second ones stay. (The choices of SlowMo, Wang et
al. 2020.)"""

FIRST = "first moment of "
"""What stands before a parameter's name in the name of its first moment."""

SECOND = "second moment of "
"""The same for what steps divide the first moment by: the root of a mean of squares, or the largest gradient."""

_EXP_AVG, _EXP_AVG_SQ, _EXP_INF = "exp_avg", "exp_avg_sq", "exp_inf"
_FIRST_MOMENTS = (_EXP_AVG, "momentum_buffer")
"""What optimizers of PyTorch call their first moment."""


def require_moments(moments: str) -> None:
    """Refuse what is no choice.

    Raises:
        CompositionError: with those there are.
    """
    if moments not in get_args(Moments):
        raise CompositionError(f"moments={moments!r}: give one of {', '.join(map(repr, get_args(Moments)))}")


def has_second_moments(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one that divides by second moments, before it has made any: `Adam` and its kin."""
    return any("betas" in group for group in optimizer.param_groups)


def first_moments(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first moments that an optimizer has by now, alive, by parameter.

    An optimizer makes the state of a parameter in its first step with it, and wants it whole: where there is none
    yet, none is made.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        for key in _FIRST_MOMENTS:
            if isinstance(state.get(key), Tensor):
                found[name] = state[key]
    return found


def travelling_moments(optimizer: Optimizer, parameters: Mapping[str, Tensor], with_seconds: bool) -> dict[str, Tensor]:
    """What an optimizer has by now of what is averaged, by the names under which it travels.

    First moments are alive. Second ones are sqrt(v), a new tensor: v spans twice the orders of magnitude, and what is
    small in it would be lost in a compressed message; and sqrt(v) bounds m also in the mean over ranks (see `take_`).

    Args:
        optimizer: of this rank.
        parameters: some of those it trains.
        with_seconds: whether second moments travel, as `has_second_moments` has said.

    Raises:
        CompositionError: an optimizer of which it is not known what its first moments are divided by.
    """
    found = {FIRST + name: moment for name, moment in first_moments(optimizer, parameters).items()}
    for name, parameter in parameters.items():
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        if with_seconds and _EXP_AVG_SQ in state:
            found[SECOND + name] = local(state[_EXP_AVG_SQ]).sqrt()
        elif with_seconds and _EXP_INF in state:
            found[SECOND + name] = local(state[_EXP_INF]).clone()
        elif _EXP_AVG in state:
            _require_alone(name, state)
    return found


def _require_alone(name: str, state: Mapping[str, Any]) -> None:
    """Refuse to average a first moment that is divided by something unknown."""
    shape = state[_EXP_AVG].shape
    others = [key for key, its in state.items() if key != _EXP_AVG and isinstance(its, Tensor) and its.shape == shape]
    if others:
        raise CompositionError(
            f'moments="average" would average {_EXP_AVG!r} of {name!r}, and whether steps divide it by '
            f'{", ".join(map(repr, others))} is not known here: use moments="own" or moments="reset"'
        )


@torch.no_grad()
def take_(optimizer: Optimizer, parameters: Mapping[str, Tensor], averaged: Mapping[str, Tensor]) -> None:
    """Give second moments to an optimizer whose first ones were averaged, and bound the first by the second.

    By Cauchy's inequality gradients g_1, ..., g_t of any values give moments m and v with

        m^2 = ((1 - b1) sum_k b1^k g_{t-k})^2 <= c^2 v,   c^2 = (1 - b1)^2 / ((1 - b1^2 / b2) (1 - b2)),

    element by element, where c = 7.3 with the betas 0.9 and 0.999. So |mean m| <= mean |m| <= c mean sqrt(v). What is
    lost in compressed messages may break that: where v becomes 0, m / (sqrt(v) + eps) would be millions of learning
    rates. So |m| <= c sqrt(v) is enforced. `Adamax` divides by u_t = max(b2 u_{t-1}, |g_t|), and its m is at most
    (1 - b1) / (1 - b1 / b2) u.

    Args:
        optimizer: of this rank.
        parameters: some of those it trains.
        averaged: by the names under which they travel; those that are not among them are left alone.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if SECOND + name not in averaged:
            continue
        root, state = averaged[SECOND + name].clamp_(min=0), optimizer.state[parameter]
        if _EXP_AVG_SQ in state:
            local(state[_EXP_AVG_SQ]).copy_(root.square())
        else:
            local(state[_EXP_INF]).copy_(root)
        if isinstance(state.get(_EXP_AVG), Tensor):
            most = root * _most(groups[id(parameter)].get("betas", ()), _EXP_AVG_SQ in state)
            local(state[_EXP_AVG]).clamp_(-most, most)


def _most(betas: tuple[float, ...], squares: bool) -> float:
    """The largest |m| that gradients can bring about, in units of what it is divided by.

    >>> round(_most((0.9, 0.999), True), 2), round(_most((0.9, 0.999), False), 2)
    (7.27, 1.01)
    """
    b1, b2 = (*betas, 0.9, 0.999)[:2] if len(betas) >= 2 else (0.9, 0.999)
    b1, b2 = float(b1), min(float(b2), 1 - 1e-6)
    falls = 1 - (b1 * b1 / b2 if squares else b1 / b2)
    if falls <= 0:  # older gradients weigh more in m than in v: no bound holds for ever, and that of one step is taken
        falls = 1.0
    return (1 - b1) / (math.sqrt(falls * (1 - b2)) if squares else falls)


def forget_(moments: Iterable[Tensor]) -> None:
    """Make moments zero, in place."""
    for moment in moments:
        moment.zero_()
