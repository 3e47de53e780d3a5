"""Hooks of modules that may be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook as it is, also where the call that it belongs to is compiled."""
    return cast(Callable[..., None], torch.compiler.disable(hook))


def before_passes(model: nn.Module, act: Callable[[], None]) -> None:
    """Have something done before each pass that computes gradients; not in `ddp.join()`, where some ranks come no more.

    Args:
        model: a `DistributedDataParallel` model or the root of a sharded one, whose calls may be compiled.
        act: what is done, on every rank at the same place.
    """

    @uncompiled
    def before(*_: object) -> None:
        ddp = model if isinstance(model, DistributedDataParallel) else None
        ended_early = ddp is not None and ddp._join_config.enable  # pyright: ignore[reportPrivateUsage]
        if torch.is_grad_enabled() and not ended_early:
            act()

    model.register_forward_pre_hook(before)
