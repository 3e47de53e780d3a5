"""What the optimizers of ranks that do not wait for each other share: figures, and an end."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from gradwire.asynchronous.standing_still import StandingStill
from gradwire.core.errors import StateError, StepError
from gradwire.drivers.engine import Stats
from gradwire.sync.wrapper import ModelWrapper


class UnwaitingOptimizer(ModelWrapper):
    """An optimizer in whose steps no rank waits for all others. `close` it in the end, or leave a `with` block.

    It has no `report()`, which would compare a step with one of DDP: ranks of different speed make different numbers of
    steps here. `gradwire compare` trains by both, and compares the time to a loss.

    Args:
        inner: the optimizer of this rank.
        model: whose parameters it trains.
    """

    def __init__(self, inner: Optimizer, model: nn.Module) -> None:
        super().__init__(inner, model)
        self.model, self._made, self._waited_s, self._steps = model, 0, 0.0, True

    def step(self, closure: Any = None) -> Any:
        """Step the inner optimizer, exchange what it changed where that is due, and return the loss.

        Raises:
            StepError: what is not finite, a parameter that requires gradients and did not when this was made, or after
                `finish` or `close`. Nothing of it has reached the other ranks then.
            CommunicationError: a rank that has ended or does not answer.
        """
        self._require_open()
        loss = super().step(closure)
        self._made += 1
        return loss

    def _require_open(self) -> None:
        if not self._steps:
            raise StepError("this optimizer has finished: make a new one to go on from the model as it is")

    def _require_standing(self, call: str) -> None:
        """Refuse to stand still for a call where nobody steps any more, or with parameters that were not planned."""
        if not self._steps:
            raise StateError(f"{call}: this optimizer has finished; save and load before finish() and close()")
        self.require_planned()

    @property
    @abstractmethod
    def version(self) -> int:
        """Updates of all ranks, as far as this one knows."""

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent to others so far: pushes, and parameters of its own part."""
        return 0

    @property
    def waited_s(self) -> float:
        """Seconds spent in pushes and pulls so far."""
        return self._waited_s

    @property
    def coded_s(self) -> float:
        """Processor time that this rank has spent on coding its pushes so far."""
        return 0.0

    def stats(self) -> Stats:
        """Return bytes and times of this rank so far; its steps are those of its own."""
        return Stats(
            wire_bytes=self.sent_bytes,
            encode_s=self.coded_s,
            wait_s=self.waited_s,
            exposed_s=self.waited_s,
            steps=self._made,
        )

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model is the one that all ranks have a part in, as it is now."""

    @abstractmethod
    def standing_still(self, call: str) -> AbstractContextManager[StandingStill]:
        """In a `with` block all ranks have met, and none steps. `gradwire.save` and `gradwire.load` call it."""

    @abstractmethod
    def finish(self) -> None:
        """End training on all ranks, each of which calls this: afterwards all have the same model."""

    @abstractmethod
    def close(self) -> None:
        """End the steps of this rank."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
