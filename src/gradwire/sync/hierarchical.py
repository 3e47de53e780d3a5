"""Averages of growing groups of ranks, each with a period of its own: often where links are fast, rarely where not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.core.errors import CompositionError, StateError
from gradwire.sync.averaging import Averaging


class Hierarchical:
    """Several `Averaging`s of one model, from the smallest groups of ranks to all of them.

    Where the window of a larger group ends, smaller groups begin theirs anew from what it gave. Let the periods of
    larger groups be multiples of those of smaller ones: then every rank of a node has the same model when the nodes
    average. (Hierarchical local SGD, Lin et al. 2020, section 5.)

    Args:
        levels: over the groups of each axis of a mesh, the smallest first; a group of a level lies within one of the
            next. Only the last one may have fragments or a delay. They are this object's from now on.

    Raises:
        CompositionError: less than two levels, levels of different models, or fragments or a delay below the last.

    Example:
        inside = Averaging(model, every=4, group=mesh.get_group("place"))
        between = Averaging(model, every=32, method="int4", outer=DiLoCo())
        averaging = Hierarchical(inside, between)
        ...  # averaging.step() after each step of the optimizer
    """

    def __init__(self, *levels: Averaging) -> None:
        if len(levels) < 2:
            raise CompositionError("a hierarchy has two levels at least; one level is an Averaging")
        if any(level.model is not levels[0].model for level in levels):
            raise CompositionError("the levels of a hierarchy average one model: pass each Averaging the same one")
        if not all(level.is_at_once for level in levels[:-1]):
            raise CompositionError("only the last level of a hierarchy may have fragments=, delay= or merge=")
        self.levels = levels

    def step(self) -> bool:
        """Count a step, and average at each level whose window ends; return whether the last level's has.

        Raises:
            StepError, CommunicationError: as `Averaging.step`.
        """
        ended = False
        for number, level in enumerate(self.levels):
            ended = level.step()
            self._begin_anew_below(number if ended else 0)
        return ended

    def sync(self) -> None:
        """Average over all ranks now: afterwards they have the same model. See `Averaging.sync`."""
        self.levels[-1].sync()
        self._begin_anew_below(len(self.levels) - 1)

    def _begin_anew_below(self, number: int) -> None:
        for level in self.levels[:number]:
            level.begin_anew()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; save one a rank, as `Averaging.state_dict`."""
        return {"levels": [level.state_dict() for level in self.levels]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called.

        Raises:
            StateError: as `Averaging.load_state_dict`; nothing is changed then.
        """
        levels = state.get("levels")
        if not isinstance(levels, list) or len(levels) != len(self.levels):
            raise StateError(f"this is no saved state of {len(self.levels)} levels: pass what state_dict() returned")
        checked = [level.checked(saved) for level, saved in zip(self.levels, levels, strict=True)]
        for level, saved in zip(self.levels, checked, strict=True):
            level.take_up(saved)

    def close(self) -> None:
        """Close all levels."""
        for level in self.levels:
            level.close()

    def __enter__(self) -> Hierarchical:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for level in self.levels:
            level.__exit__(kind, error, trace)
