"""How far ahead FSDP2 gathers parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradwire.session.names import is_fsdp2


def prefetchable(model: nn.Module) -> list[Any]:
    """The modules of a sharded model that `fully_shard` was called on, without the root, in registration order."""
    return [module for module in model.modules() if is_fsdp2(module) and module is not model]


def set_prefetch(model: nn.Module | None, depth: int | None) -> None:
    """Have each module gather the parameters of so many modules ahead, in the forward and in the backward pass.

    Modules are taken to compute in the order of their registration. More depth takes memory for more whole modules.

    Args:
        model: the root of a model of `fully_shard`; None: it is gone.
        depth: how many modules ahead; None: what FSDP2 does by default, which is one.
    """
    modules = [] if model is None else prefetchable(model)
    for place, module in enumerate(modules):
        ahead = modules[place + 1 : place + 1 + depth] if depth else []
        behind = modules[max(0, place - depth) : place][::-1] if depth else []
        module.set_modules_to_forward_prefetch(ahead)
        module.set_modules_to_backward_prefetch(behind)
