"""Synthetic(alpha, beta): devices whose models and data differ (Li et al. 2020, section 5.1)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.core.key import Key
from gradwire.federated.sampling import generator

DEVICES, FEATURES, CLASSES = 30, 60, 10


class Device(NamedTuple):
    """A device's examples, nine tenths to train on and one tenth held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@functools.cache
def synthetic(alpha: float, beta: float, seed: int) -> tuple[Device, ...]:
    """y = argmax(W_k x + b_k) with W_k, b_k ~ N(u_k, 1), u_k ~ N(0, alpha); x ~ N(v_k, Sigma), Sigma_jj = j^-1.2,
    v_k ~ N(B_k, 1), B_k ~ N(0, beta). A device has 50 examples and a log-normal number more."""
    draw = generator(Key(seed, name=f"synthetic {alpha:g} {beta:g}"))
    counts = draw.lognormal(4, 2, DEVICES).astype(int) + 50
    spread = np.arange(1, FEATURES + 1) ** -0.6
    return tuple(_device(draw, int(count), alpha, beta, spread) for count in counts)


def _device(draw: np.random.Generator, count: int, alpha: float, beta: float, spread: Any) -> Device:
    u, v = alpha * draw.standard_normal(), beta * draw.standard_normal() + draw.standard_normal(FEATURES)
    weight, bias = u + draw.standard_normal((FEATURES, CLASSES)), u + draw.standard_normal(CLASSES)
    points = v + spread * draw.standard_normal((count, FEATURES))
    labels = (points @ weight + bias).argmax(1)
    x, y, cut = torch.from_numpy(points).float(), torch.from_numpy(labels), int(0.9 * count)
    return Device(x[:cut], y[:cut], x[cut:], y[cut:])
