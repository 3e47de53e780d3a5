"""Figures of modules that communicate by themselves, such as layers of experts, for the report of a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable


class ModuleFigures(ABC):
    """Figures of one module on this rank. Subclasses are dataclasses, so that `Report.as_dict` names each figure."""

    @property
    @abstractmethod
    def row(self) -> tuple[str, str, str]:
        """A line of the report: a name, a number with its unit, and what it means."""


FiguresOfModules = Callable[[], Iterable[ModuleFigures]]
"""What a session calls when it makes a report."""
