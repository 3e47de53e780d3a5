"""Which models a script shards, found at the first pass with gradients: only then is the root known.

`fully_shard` is called on parts first and on the whole model last, and nothing says which call is the last one. FSDP2
itself takes for the root what is called first; so does this module, but for passes without gradients.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Generator, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwire.adapters.fsdp2.groups import is_fsdp2
from gradwire.adapters.told import replaced
from gradwire.adapters.uncompiled import uncompiled

PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Modules that a script may import `fully_shard` from; the last two are its older place."""


class Roots:
    """Finds the roots of sharded models while `watching`.

    Args:
        react: called with each root once, at the first pass with gradients through it or a part of it, before FSDP2
            gathers parameters for that pass.

    Attributes:
        sharded: how often `fully_shard` was called.

    Example:
        with Roots(lambda root: print(type(root).__name__)).watching():
            runpy.run_path("train.py", run_name="__main__")
    """

    def __init__(self, react: Callable[[nn.Module], None]) -> None:
        self.sharded = 0
        self._react = react
        self._waiting: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Note what is sharded inside, wherever `fully_shard` was imported from or is from then on."""
        held = [place for name in PLACES if (place := _found(name)) is not None]
        plain = vars(held[0])["fully_shard"]

        @functools.wraps(plain)  # also its `state`, which FSDP2 asks for by this name
        def noting(module: Any, *arguments: Any, **options: Any) -> Any:
            sharded = plain(module, *arguments, **options)
            self._note([module] if isinstance(module, nn.Module) else module)
            return sharded

        with replaced([(place, plain, noting) for place in held]):
            yield

    def _note(self, modules: Iterable[nn.Module]) -> None:
        self.sharded += 1
        for module in filter(is_fsdp2, modules):
            # In front of FSDP2's own hook, which gathers.
            self._waiting[module] = module.register_forward_pre_hook(uncompiled(self._before_pass), prepend=True)

    def _before_pass(self, module: nn.Module, *_: object) -> None:
        if not torch.is_grad_enabled() or module not in self._waiting:
            return
        around = [other for other in self._waiting if any(part is module for part in other.modules())]
        root = max(around, key=lambda other: sum(1 for _ in other.modules()))
        for part in root.modules():
            if (hook := self._waiting.pop(part, None)) is not None:
                hook.remove()
        self._react(root)


def _found(name: str) -> ModuleType | None:
    """A module, where this version of PyTorch has it and `fully_shard` in it."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return module if "fully_shard" in vars(module) else None
