"""One step of a session on the thread where programs run: tensors in, their means in the same memory."""

from __future__ import annotations

import time
from typing import NamedTuple

from torch import Tensor

from gradwire.core.errors import StepError
from gradwire.drivers.engine import Engine
from gradwire.drivers.plan import within
from gradwire.drivers.window import Window
from gradwire.session.step_times import StepBoard


class _Target(NamedTuple):
    """Part of a tensor, and where it lies in its unit's grain."""

    piece: Tensor
    offset: int


class Reduction:
    """Feeds an engine with named tensors, step after step: `begin`, `put` each, `finish`, `end`.

    A mean is written over its tensor as soon as it is known, while others are still on their way. What is called in the
    wrong order raises `StepError`; after `end` nothing of the step is held any more. Where there is a board the other
    ranks are told how long steps take.
    """

    def __init__(self, engine: Engine, window: Window, board: StepBoard | None = None) -> None:
        self.engine, self.window, self._board = engine, window, board
        self._slices = engine.plan.slices
        self._targets: dict[int, list[_Target]] = {}
        self._is_open = False
        self._first = True

    def begin(self) -> None:
        """Get ready for a step's tensors; one that was left unfinished is forgotten."""
        self._is_open, self._first = True, True
        self._targets = {}
        self.engine.begin(self._write)

    def put(self, name: str, flat: Tensor, scale: float = 1.0, begin: int = 0) -> None:
        """Hand over a tensor or a part of it, given as 1-d. Leave it alone until `finish`: it holds its mean then.

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
        for unit, start, numel, offset in within(self._slices[name], begin, flat.numel()):
            piece = flat[start : start + numel]
            self.engine.deliver(unit, offset, piece)
            self._targets.setdefault(unit, []).append(_Target(piece, offset))

    def _write(self, unit: int, mean: Tensor) -> None:
        """Write a unit's mean over the tensors it was made of."""
        for piece, offset in self._targets.pop(unit):
            piece.copy_(mean[offset : offset + piece.numel()])

    def pump(self) -> None:
        """Do what the tensors that are here allow."""
        self.engine.pump()

    def finish(self) -> None:
        """All tensors are here: run to the end, when they hold their means."""
        self._require(True, "begin a step before it is finished")
        self.engine.finish()
        self._is_open = False

    def end(self) -> None:
        """The means are where they belong: let go of the step, and count it."""
        self._require(False, "finish the step before it is ended")
        self.engine.release()
        ended_s = time.perf_counter()
        self.engine.stats.exposed_s += ended_s - self.window.last_ready_s
        self.window.end(ended_s, self.engine.stats)
        if self._board is not None:
            self._board.tell(self.window, self.engine.index)

    def _require(self, is_open: bool, otherwise: str) -> None:
        if self._is_open != is_open:
            raise StepError(otherwise)
