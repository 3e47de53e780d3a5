"""Scripts that know nothing of gradwire: every `DistributedDataParallel` model that they make is attached to.

The class itself is changed for a while, so it does not matter how a script imports it or derives from it. A model is
attached to when it is called with gradients for the first time: by then the script has made its `GradScaler`, and has
registered a communication hook if it wants one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.attach import attach
from gradwire.adapters.handle import Handle
from gradwire.adapters.uncompiled import uncompiled
from gradwire.core.figures import si_bytes, significant

Say = Callable[[str], None]
"""Tells people a sentence."""


class Unchanged:
    """What happens to the models of a script while `watching`.

    Args:
        method: a spec, such as `"int4"`.
        say: is told what is attached to.
        options: further arguments of `gradwire.attach`.

    Attributes:
        made: how many models the script has made.
        handles: one for each model that was trained, with the model's name.

    Example:
        with Unchanged("int4", print).watching() as unchanged:
            runpy.run_path("train.py", run_name="__main__")
        print(unchanged.summary())
    """

    def __init__(self, method: str, say: Say, **options: Any) -> None:
        self.made = 0
        self.handles: list[tuple[str, Handle]] = []
        self._method, self._say, self._options = method, say, options
        self._scalers: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self._attached: list[Callable[[DistributedDataParallel, Handle], None]] = []

    def on_attach(self, react: Callable[[DistributedDataParallel, Handle], None]) -> None:
        """Have a function called with every model and its handle, before the model's first step."""
        self._attached.append(react)

    @contextlib.contextmanager
    def watching(self) -> Generator[Unchanged]:
        """Attach to whatever models are made inside; the classes are as they were afterwards."""
        with (
            _after_making(DistributedDataParallel, self._note_model),
            _after_making(torch.amp.GradScaler, self._scalers.add),
        ):
            yield self

    def _note_model(self, ddp: DistributedDataParallel) -> None:
        self.made += 1

        @uncompiled
        def first_call(*_: object) -> None:
            if torch.is_grad_enabled():
                waiting.remove()
                self._attach(ddp)

        waiting = ddp.register_forward_pre_hook(first_call)

    def _attach(self, ddp: DistributedDataParallel) -> None:
        handle = attach(ddp, self._method, scaler=self._scaler(), **self._options)
        name = type(ddp.module).__name__
        self.handles.append((name, handle))
        for react in self._attached:
            react(ddp, handle)
        numel = sum(p.numel() for p in ddp.module.parameters() if p.requires_grad)
        ranks = handle.session.transport.world_size
        self._say(f"{self._method} is attached to {name}: {numel:,} parameters, {_ranks(ranks)}")

    def _scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the script, where it is clear which one that is."""
        enabled = [scaler for scaler in self._scalers if scaler.is_enabled()]
        if len(enabled) > 1:
            self._say(f"{len(enabled)} GradScalers: none is followed, so what is owed is wrong when a scale changes")
        return enabled[0] if len(enabled) == 1 else None

    def summary(self) -> list[str]:
        """What was saved, a sentence a model; or why nothing was."""
        if not self.made:
            return ["the script made no DistributedDataParallel model, so nothing was compressed"]
        if not self.handles:
            return ["the script made a DistributedDataParallel model and did not train it: nothing was compressed"]
        return [_saved(name, handle) for name, handle in self.handles]


def _ranks(count: int) -> str:
    return "1 rank, so nothing is sent" if count == 1 else f"{count} ranks"


def _saved(name: str, handle: Handle) -> str:
    """What a method sent for one model on this rank, and what the uncompressed gradients would have taken."""
    stats, report = handle.stats(), handle.report()
    if not stats.wire_bytes:
        return f"{name}: {handle.method} sent nothing in {stats.steps} steps; {report.verdict}"
    sent, dense = si_bytes(stats.wire_bytes), si_bytes(stats.dense_wire_bytes)
    factor = significant(stats.dense_wire_bytes / stats.wire_bytes, 2)
    return (
        f"{name}: {handle.method} sent {sent} in {stats.steps} steps where {report.dense_name} sends {dense} "
        f"({factor} times less); {report.verdict}"
    )


@contextlib.contextmanager
def _after_making(kind: type[Any], note: Callable[[Any], None]) -> Generator[None]:
    """Have every new object of a class noted once that class has made it."""
    name, plain = "__init__", kind.__init__

    @functools.wraps(plain)
    def noted(self: object, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        note(self)

    setattr(kind, name, noted)
    try:
        yield
    finally:
        setattr(kind, name, plain)
