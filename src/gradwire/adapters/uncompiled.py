"""Hooks of modules that may be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook as it is, also where the call that it belongs to is compiled."""
    return cast(Callable[..., None], torch.compiler.disable(hook))
