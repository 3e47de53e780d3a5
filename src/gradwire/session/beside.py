"""Parts of a model that communicate by themselves, such as layers of experts: a report tells of them too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable


class Beside(ABC):
    """Figures of one part of a model on this rank. They are a dataclass, so that `Report.as_dict` has them by name."""

    @property
    @abstractmethod
    def row(self) -> tuple[str, str, str]:
        """For people: a name, a number with its unit, and what it means."""


FiguresBeside = Callable[[], Iterable[Beside]]
"""What a session asks when it makes a report."""
