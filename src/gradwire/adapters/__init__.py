"""Connections to frameworks. Those that others make are imported when somebody asks for them.

>>> import gradwire
>>> gradwire.adapters.accelerate.__name__
'gradwire.adapters.accelerate'
"""

from __future__ import annotations

import importlib
from types import ModuleType

_LAZY = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
