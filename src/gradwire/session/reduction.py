"""One step of a session on the thread where programs run: pieces of tensors in, their means out."""

from __future__ import annotations

import time

from torch import Tensor

from gradwire.core.errors import StepError
from gradwire.drivers.engine import Engine
from gradwire.drivers.plan import within
from gradwire.drivers.window import Window


class Reduction:
    """Feeds an engine with named tensors, step after step: `begin`, `put` each, `finish`, `take` each, `end`.

    What is called in the wrong order raises `StepError`; after `end` no mean is held any more.
    """

    def __init__(self, engine: Engine, window: Window) -> None:
        self.engine, self.window = engine, window
        self._places = engine.plan.places
        self._is_open = False
        self._first = True

    def begin(self) -> None:
        """Get ready for a step's tensors; one that was left unfinished is forgotten."""
        self._is_open, self._first = True, True
        self.engine.begin()

    def put(self, name: str, flat: Tensor, scale: float = 1.0, begin: int = 0) -> None:
        """Take a copy of a tensor or of a part of it, given as 1-d, and start what is complete with it.

        Args:
            name: as planned.
            flat: its elements from `begin` on.
            scale: the loss scale, which a norm in a report is without.
            begin: the first element that is given.
        """
        self._require(True, "begin a step before tensors are handed over")
        if self.window.wants_norm:
            self.window.gradient(flat, self._first, scale)
        self._first = False
        for unit, start, numel, offset in within(self._places[name], begin, flat.numel()):
            self.engine.deliver(unit, offset, flat[start : start + numel])

    def pump(self) -> None:
        """Do what the tensors that are here allow."""
        self.engine.pump()

    def finish(self) -> None:
        """All tensors are here: run to the end."""
        self._require(True, "begin a step before it is finished")
        self.engine.finish()
        self._is_open = False

    def take(self, name: str, flat: Tensor, begin: int = 0) -> None:
        """Write the mean of a tensor, from element `begin` on, into `flat`, 1-d."""
        self._require(False, "finish the step before means are taken")
        for unit, start, numel, offset in within(self._places[name], begin, flat.numel()):
            flat[start : start + numel].copy_(self.engine.mean(unit)[offset : offset + numel])

    def end(self) -> None:
        """Means are written: let go of them, and count the step."""
        self._require(False, "finish the step before it is ended")
        self.engine.release()
        ended_s = time.perf_counter()
        self.engine.stats.exposed_s += ended_s - self.window.last_ready_s
        self.window.end(ended_s, self.engine.stats)

    def _require(self, is_open: bool, otherwise: str) -> None:
        if self._is_open != is_open:
            raise StepError(otherwise)
