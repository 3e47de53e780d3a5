"""What averages models after steps of an optimizer: `Averaging`, `Hierarchical`, `Elastic`, and what others make."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import nn

from gradwire.drivers.engine import Stats
from gradwire.session.report import Report


@runtime_checkable
class Averager(Protocol):
    """What `AveragingOptimizer` asks for. All ranks call `step` and `sync` equally often, at the same places.

    A state is taken up in two parts, so that nothing is changed where any part of a checkpoint is refused: `checked`
    raises `StateError` or returns what `take_up` wants, and `take_up` cannot fail.
    """

    averages_to_evaluate: ClassVar[bool]
    """Whether `evaluating` communicates, since no rank knows what all agree on."""

    @property
    def model(self) -> nn.Module:
        """Whose trained parameters are averaged."""
        ...

    def step(self) -> bool:
        """Count a step of this rank, average where that is due, and return whether a window has ended."""
        ...

    def sync(self) -> None:
        """Average now: afterwards all ranks have the same model, or as nearly as the method brings it about."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model is the one that ranks agreed on last."""
        ...

    def stats(self) -> Stats:
        """Bytes and times so far."""
        ...

    def report(self) -> Report:
        """What communication costs and saves in a step of training on this rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's state in tensors, numbers and strings."""
        ...

    def checked(self, state: Mapping[str, Any]) -> Any:
        """Return a saved state for `take_up`; until then nothing is changed."""
        ...

    def take_up(self, checked: Any) -> None:
        """Go on from what `checked` returned."""
        ...

    def close(self) -> None:
        """Stop communicating, for good."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close; the other ranks learn of an error, where there is one."""
        ...
