"""How tensors come to a session's engine, and their means back: what `SessionStep` and every port are made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import StepError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.engine import Engine, Fill, Sink
from gradwire.drivers.plan import within
from gradwire.drivers.window import Window
from gradwire.flight.recorder import LaneLog
from gradwire.session.step_times import StepBoard


class Piece(NamedTuple):
    """A tensor or a part of it.

    Attributes:
        name: as planned.
        flat: its elements, 1-d, over which their mean is written.
        begin: which of the tensor's elements is the first one here.
    """

    name: str
    flat: Tensor
    begin: int = 0


class _Target(NamedTuple):
    """Part of a named tensor, and where it lies in its unit's grain."""

    name: str
    piece: Tensor
    offset: int


Arrived = Callable[[list[str]], None]
"""Told the names of tensors whose means are written, as soon as they are."""


class Feed:
    """Feeds an engine, step after step, by two threads.

    The thread of the training loop calls `open` where a step begins, and `ready` for all that is complete. The thread
    where programs run calls `put` with the same tensors, as often as some come, and then `end`. A mean is written over
    its tensor as soon as it is known, while others are still on their way; after `end` all are, and nothing of the step
    is held any more.

    Args:
        engine: what reduces.
        specs: of the tensors.
        window: keeps figures of the last steps.
        scaler: the loss scaler of the training loop, if it has one: what is owed follows its scale.
        run: has a job done by the thread where programs run; the caller's own does without it.

    Attributes:
        board: where the other ranks are told how long steps take, if they are.
        log: is told of steps, for the flight recorder.
        scale: the loss scale of the step at hand.
        weight: what this rank has said to count for in the step that begins next.
        arrived: told of whole tensors whose means have come, where programs run, while others are still on their way.

    Example:
        feed = Feed(engine, specs)
        feed.open()
        feed.put(Piece(name, gradient.view(-1)) for name, gradient in gradients.items())
        feed.end()  # each gradient is its mean now
    """

    def __init__(
        self,
        engine: Engine,
        specs: Sequence[ParameterSpec],
        window: Window | None = None,
        scaler: torch.amp.GradScaler | None = None,
        run: Callable[[Callable[[], None]], None] = lambda job: job(),
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._scaler, self.scale, self._run = scaler, 1.0, run
        self.board: StepBoard | None = None
        self.log: LaneLog | None = None
        self.weight: float | None = None
        self.arrived: Arrived | None = None
        self._in_use = threading.Lock()
        self.serve_by(engine, window or Window())

    def serve_by(self, engine: Engine, window: Window) -> None:
        """Feed another engine, between two steps."""
        self.engine, self.window = engine, window
        self._slices, self._weighs = engine.plan.slices, engine.weighs
        self._targets: dict[int, list[_Target]] = {}
        self._missing: dict[str, int] = {}  # elements of each tensor whose means are still to be written
        self._is_begun = False

    # In the thread of the training loop --------------------------------------------------------------------------

    def occupy(self) -> None:
        """Have the engine for one step, or for something else that needs it between two steps.

        Raises:
            StepError: another one is under way.
        """
        if not self._in_use.acquire(blocking=False):
            raise StepError(
                "a step of this session is under way, here or in another thread: end it before the next one begins"
            )

    def vacate(self) -> None:
        """Let others have it; a step that has not ended will not."""
        self.window.under_way = False
        self._in_use.release()

    def open(self) -> None:
        """Begin a step: called before any tensor of it is put."""
        self.window.begin()
        if self.log is not None:
            self.log.step_began(self.engine.index)
        if (growth := self._growth_of_scale()) != 1.0:
            self._run(lambda: self.engine.rescale(growth))
        if self._weighs:
            weight, self.weight = self.weight, None
            self._run(lambda: self.engine.weigh(weight))

    def _growth_of_scale(self) -> float:
        """By what the loss scale has grown since the last step; a scale of powers of two makes this exact."""
        scaler = self._scaler if self._scaler is not None and self._scaler.is_enabled() else None
        before, self.scale = self.scale, float(scaler.get_scale()) if scaler else 1.0
        return self.scale / before

    def ready(self, nbytes: int) -> None:
        """So many bytes of gradients are complete, which are about to be put."""
        self.window.ready(time.perf_counter(), nbytes)

    # Where programs run ------------------------------------------------------------------------------------------

    def put(self, pieces: Iterable[Piece]) -> None:
        """Hand over tensors or parts of them, and go on as far as they allow. Leave them alone until `end`."""
        self._begin()
        for name, flat, begin in pieces:
            self._take_norm(flat)
            for unit, start, numel, offset in within(self._slices[name], begin, flat.numel()):
                piece = flat[start : start + numel]
                self.engine.deliver(unit, offset, piece)
                self._targets.setdefault(unit, []).append(_Target(name, piece, offset))
        self.engine.pump()

    def put_part(self, part: int, given: Tensor, fill: Fill, sink: Sink) -> None:
        """Reduce a part of the plan from beginning to end.

        Args:
            part: which one.
            given: its gradients, 1-d.
            fill: writes the gradient of a unit to the unit's buffer.
            sink: takes the mean of a unit.
        """
        self._begin()
        self._take_norm(given)
        self.engine.run_part(part, fill, sink)

    def _begin(self) -> None:
        """The first tensors of a step are here; of one that broke off nothing is left."""
        if not self._is_begun:
            self._targets = {}
            self._missing = {name: spec.numel for name, spec in self._specs.items()} if self.arrived else {}
            self.engine.begin(self._write)
            self._is_begun, self._is_first = True, True

    def _take_norm(self, flat: Tensor) -> None:
        if self.window.wants_norm:
            self.window.gradient(flat, self._is_first, self.scale)
        self._is_first = False

    def _write(self, unit: int, mean: Tensor) -> None:
        """Write a unit's mean over the tensors it was made of."""
        written = self._targets.pop(unit)
        for _, piece, offset in written:
            piece.copy_(mean[offset : offset + piece.numel()])
        if self.arrived is not None and (whole := self._whole(written)):
            self.arrived(whole)

    def _whole(self, written: Iterable[_Target]) -> list[str]:
        """Names of the tensors that have all of their means now."""
        whole = list[str]()
        for name, piece, _ in written:
            self._missing[name] -= piece.numel()
            if not self._missing[name]:
                whole.append(name)
        return whole

    def end(self, written: Callable[[], None] | None = None) -> None:
        """All tensors are here: run to the end, and count the step.

        Args:
            written: called once all means are written, as a part of the step.
        """
        self._begin()
        self.engine.finish()
        self._is_begun = False
        if written is not None:
            written()
        self.engine.release()
        ended_s, window, stats = time.perf_counter(), self.window, self.engine.stats
        if self.engine.plan.parts:  # each of which was waited for
            window.last_ready_s = ended_s
        stats.exposed_s += ended_s - window.last_ready_s
        window.end(ended_s, stats)
        if self.log is not None:
            self.log.step_ended()
        if self.board is not None:
            self.board.tell(window, self.engine.index)

    def drop(self) -> None:
        """Forget a step that broke off, or whose means nobody has taken."""
        self.engine.forget()
        self._is_begun = False

    # What it knows -----------------------------------------------------------------------------------------------

    def planned(self, name: str) -> ParameterSpec:
        """What was planned for a tensor.

        Raises:
            StepError: a name that was not planned.
        """
        if name not in self._specs:
            raise StepError(f"{name!r} is none of this session's {len(self._specs)} tensors")
        return self._specs[name]

    @property
    def names(self) -> Iterable[str]:
        """The planned tensors, in the order in which they were given."""
        return self._specs

    def where(self) -> str:
        """The step at hand, as training loops count them: " in step 7"."""
        return f" in step {self.engine.index}"
