"""DDP's buckets as the steps of a session that runs PowerSGD as PyTorch's hook does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.communication import BucketPort, BucketStep, queue_callback
from gradwire.adapters.power_sgd_layout import BucketLayout, LayOut
from gradwire.adapters.power_sgd_memory import Memory
from gradwire.core import saved
from gradwire.core.state import walk
from gradwire.drivers.plan import Unit
from gradwire.reducers import Reducer
from gradwire.session import Session
from gradwire.session.feed import Piece
from gradwire.session.lane import Lane
from gradwire.session.states import Unpacked, take_up


class PowerSGDSettings(Protocol):
    """What a port asks of a `PowerSGDState`."""

    start_powerSGD_iter: int  # noqa: N815 - PyTorch's name
    draw_order: list[list[str]] | None

    @property
    def iter(self) -> int:
        """How many steps have ended."""
        ...

    def pending(self) -> Memory | None:
        """What was loaded before the first step, once."""
        ...

    def draw(self, layout: BucketLayout, buckets: Sequence[GradBucket]) -> dict[str, Tensor]:
        """The factors to begin this step with, by matrix; none where those of the last step serve."""
        ...

    def count(self, units: Sequence[Unit]) -> None:
        """Count the elements of a PowerSGD step."""
        ...


class PowerPort(BucketPort):
    """Follows one model: a session is made in the first step, when all buckets are known."""

    def __init__(self, lane: Lane, lay_out: LayOut, reducer: Reducer, state: PowerSGDSettings) -> None:
        super().__init__(lane)
        self.lay_out, self.reducer = lay_out, reducer
        self.session: Session | None = None
        self._state = state
        self._layout = BucketLayout([], {}, [])

    def hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hand a bucket over and return at once."""
        if self.session is not None:
            if not self._step.buckets:
                self.session.feed.open()
            self.session.feed.ready(bucket.buffer().nbytes)
        return super().hook(bucket)

    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Deliver gradients; where all of a step's buckets must be known first, at the last one."""
        compressing = self._state.iter >= self._state.start_powerSGD_iter
        waits = self.session is None or (compressing and self._state.draw_order is None)
        if waits and not last:
            return
        arrived = buckets if waits else buckets[-1:]
        session = self.session or self._made(buckets)
        if arrived[0] is buckets[0]:
            if compressing:
                _set_factors(session, self._state.draw(self._layout, buckets))
            session.feed.put(self._padding(session))
        session.feed.put(
            Piece(name, gradient, begin)
            for bucket in arrived
            for (name, begin), gradient in self._layout.pieces(bucket)
        )
        if last:
            session.feed.end()
            if compressing:
                self._state.count(session.engine.plan.units)

    def _made(self, buckets: Sequence[GradBucket]) -> Session:
        self._layout = self.lay_out(buckets)
        session = self.session = Session(self._layout.tensors, self.reducer, lane=self.lane, what="a PowerSGD hook")
        session.window.caps = None  # each bucket for itself
        if (memory := self._state.pending()) is not None:
            self.load(session, memory)
        session.feed.open()
        session.feed.ready(sum(bucket.buffer().nbytes for bucket in buckets))
        return session

    def _padding(self, session: Session) -> Iterator[Piece]:
        """Zeros that make squares of the vectors."""
        for name, begin, numel in self._layout.padding:
            spec = session.feed.planned(name)
            yield Piece(name, torch.zeros(numel, dtype=spec.dtype, device=spec.device), begin)

    def load(self, session: Session, memory: Memory) -> None:
        """Take up saved states.

        Raises:
            StateError: of another model; nothing is changed then.
        """
        memory.check_drawn(list(session.names))
        engine, unstarted = session.engine, memory.iter == 0 and not memory.parameters
        rank = session.transport.rank
        states = engine.initial_states() if unstarted else saved.load_all(engine.states(), memory.parameters, rank)
        loaded = saved.Loaded(memory.iter, session.seed, session.feed.scale, states)
        take_up(session, Unpacked(loaded, engine, session.overlap, session.reducer))

    def after_backward(self, step: BucketStep) -> None:
        """Once DDP has written gradients: where it left one as it was, the mean was dropped and is owed still."""
        if not self._layout.padding:  # a square mixes parameters, and cannot be taken back in part
            queue_callback(lambda: self._take_back_unused(step))

    def _take_back_unused(self, step: BucketStep) -> None:
        unused = {self._layout.homes[parameter].name for parameter in step.unwritten()}
        if unused and self.session is not None:
            self.session.engine.take_back(unused)


def _set_factors(session: Session, Q: dict[str, Tensor]) -> None:
    for grain, state in session.engine.states() if Q else ():
        for path, leaf in walk(state):
            if path.endswith("Qt"):
                for i, segment in enumerate(grain.segments):
                    leaf.tensor[i].copy_(Q[segment.name].T)
