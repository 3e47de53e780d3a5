"""All implementations of kernels for one type of device, whatever their family: for tests that compare these."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from gradwire.kernels.dispatch import KERNELS


def everything_in(module: str) -> Any:
    """What the modules of this name (`reference`, `cpu`, `cuda`) of all families define."""
    found: dict[str, object] = {}
    for package in sorted({kernel.package for kernel in KERNELS if module in ("reference", *kernel.devices)}):
        found |= vars(importlib.import_module(f"{package}.{module}"))
    return SimpleNamespace(**found)
