"""When a training loop computes what: told by hooks of the model, of autograd and of optimizers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradwire.drivers.traced import Span


class LoopSpans:
    """Spans of a training loop, one after the other: where one begins, the one before it has ended.

    Only the thread that made it is watched: an optimizer that steps where programs run is part of communication.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._thread = clock, threading.get_ident()
        self._open: tuple[str, float] | None = None
        self._passes = 0  # a backward pass may have others inside, of reentrant checkpoints
        self._spans: list[Span] = []

    def begin(self, what: str) -> None:
        """End the span that is open, and begin one."""
        if threading.get_ident() == self._thread:
            now_s = self._clock()
            self._end(now_s)
            self._open = what, now_s

    def end(self) -> None:
        """End the span that is open, if one is."""
        if threading.get_ident() == self._thread:
            self._end(self._clock())

    def _end(self, now_s: float) -> None:
        if self._open is not None:
            what, began_s = self._open
            self._spans.append(Span("train", what, began_s, now_s))
            self._open = None

    def under_way(self) -> tuple[str, float]:
        """Return the span that is open and for how many seconds it is; "" and 0 where none is. For any thread."""
        now = self._open
        return (now[0], max(0.0, self._clock() - now[1])) if now is not None else ("", 0.0)

    def take(self) -> list[Span]:
        """Return the spans so far, and keep none of them."""
        self.end()
        spans, self._spans = self._spans, []
        return spans

    @contextmanager
    def watching(self, model: nn.Module) -> Generator[None]:
        """Watch the passes of a model and the steps of all optimizers, for as long as the block runs.

        In training "loss" follows a forward pass, until the backward pass begins, and "gradients" follows that until an
        optimizer's step begins: clipping, unscaling, and what else the loop does with them.
        """
        with ExitStack() as stack:
            hooks = (
                model.register_forward_pre_hook(self._forward_begins),
                model.register_forward_hook(self._forward_ended, always_call=True),
                register_optimizer_step_pre_hook(self._optimizer_begins),
                register_optimizer_step_post_hook(self._optimizer_ended),
            )
            for hook in hooks:
                stack.callback(hook.remove)
            plain = torch.autograd.backward
            torch.autograd.backward = self._watched(plain)
            stack.callback(setattr, torch.autograd, "backward", plain)
            yield

    def _forward_begins(self, *_: Any) -> None:
        self.begin("forward")

    def _optimizer_begins(self, *_: Any) -> None:
        self.begin("optimizer")

    def _optimizer_ended(self, *_: Any) -> None:
        self.end()

    def _forward_ended(self, module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self.begin("loss")
        else:
            self.end()

    def _watched(self, plain: Callable[..., None]) -> Callable[..., None]:
        """`torch.autograd.backward`, which `Tensor.backward` calls too, with a span around it."""

        @functools.wraps(plain)
        def backward(*arguments: Any, **options: Any) -> None:
            if not self._passes:
                self.begin("backward")
            self._passes += 1
            try:
                plain(*arguments, **options)
            finally:
                self._passes -= 1
                if not self._passes:
                    self.begin("gradients")

        return backward
