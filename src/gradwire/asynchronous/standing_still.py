"""Optimizers that do not wait, at a moment when all ranks have met: what `gradwire.save` and `gradwire.load` take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.optim import Optimizer

from gradwire.core.errors import StateError
from gradwire.core.renamed import same
from gradwire.core.save_folder import SavedRun
from gradwire.core.tree import taken_apart
from gradwire.session.names import named
from gradwire.session.together import Together
from gradwire.sync.scaling import require_groups

_VERSION = 1


@dataclass(eq=False)
class RunWithoutSession:
    """Who saves, where there is no session.

    Attributes:
        seed: of what codecs draw at random.
        begun_with: settings, as text.
        shapes: of the trained parameters, by name.
        saved_as: the run that its saves are of; None before the first.
        is_open: whether ranks still step.
    """

    seed: int
    begun_with: str
    shapes: dict[str, tuple[int, ...]]
    saved_as: SavedRun | None = None
    is_open: bool = True

    @classmethod
    def of(cls, model: nn.Module, begun_with: str, seed: int = 0) -> RunWithoutSession:
        """Return that of a model's trained parameters."""
        return cls(seed, begun_with, {name: tuple(parameter.shape) for name, parameter in named(model).items()})


class OwnState(Protocol):
    """What a rank has that others do not have, while nobody steps."""

    def state_dict(self) -> dict[str, Any]:
        """Copies, in tensors, numbers and strings."""
        ...

    def checked(self, saved: Mapping[str, Any]) -> Any:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: a damaged state, or one of another run.
        """
        ...

    def take_up(self, checked: Any) -> None:
        """Go on from what `checked` returned."""
        ...


class CheckedState(NamedTuple):
    """A saved state that belongs to this rank."""

    steps: int
    inner: Mapping[str, Any]
    own: Any


class StandingStill:
    """What all ranks of an optimizer save and load while none of them steps.

    Args:
        inner: this rank's optimizer, which is saved and loaded too.
        run: who saves.
        ranks: who have met.
        steps: updates that all ranks have made together.
        where: what the inner optimizer's steps go to, such as "pushed to servers".
        settings: what must be the same in the run that loads, by name.
        own: what this rank has.
    """

    def __init__(
        self,
        inner: Optimizer,
        run: RunWithoutSession,
        ranks: Together,
        steps: int,
        where: str,
        settings: Mapping[str, str],
        own: OwnState,
    ) -> None:
        self.session, self.steps = run, steps
        self._inner, self._ranks, self._where = inner, ranks, where
        self._settings, self._own = dict(settings), own

    @property
    def kind(self) -> str:
        """What must be alike in a run that goes on from a save."""
        return f"{type(self._inner).__name__} {self._where} by {self._ranks.world_size} ranks"

    def together(self, call: str) -> Together:
        """The ranks that have met for the call."""
        return self._ranks

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; where one rank has none, all ranks raise.

        Raises:
            StateError: an inner optimizer whose state cannot be saved.
        """
        return self._ranks.attempt(self._packed).own

    def _packed(self) -> dict[str, Any]:
        state = {
            "version": _VERSION,
            "rank": self._ranks.rank,
            "settings": self._settings,
            "shapes": {name: list(shape) for name, shape in self.session.shapes.items()},
            "steps": self.steps,
            "own": self._own.state_dict(),
            "inner": self._inner.state_dict(),
        }
        taken_apart(state)  # what cannot be saved is refused here, where the other ranks hear of it
        return state

    def checked(self, state: Mapping[str, Any]) -> CheckedState:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: a damaged state, or one of other settings, another model or another rank.
        """
        if state.get("version") != _VERSION or not {"settings", "shapes", "steps", "own", "inner"} <= state.keys():
            raise StateError("the save is of another version of gradwire, or damaged: load what this version saved")
        self._require_settings(state["settings"])
        self._require_model(state["shapes"])
        if state["rank"] != self._ranks.rank:
            raise StateError(f"this is the state of rank {state['rank']}, and this is rank {self._ranks.rank}")
        require_groups(self._inner, state["inner"])
        return CheckedState(int(state["steps"]), state["inner"], self._own.checked(state["own"]))

    def _require_settings(self, saved: Mapping[str, str]) -> None:
        for name, here in self._settings.items():
            if not same(saved.get(name), here):
                raise StateError(f"the save is of a run with {name} {saved.get(name)}, and this one has {here}: make "
                                 "the optimizer as it was")  # fmt: skip

    def _require_model(self, saved: Mapping[str, Sequence[int]]) -> None:
        here = self.session.shapes
        for name in [*here, *saved]:
            shapes = [tuple(found[name]) if name in found else None for found in (saved, here)]
            if shapes[0] != shapes[1]:
                said = ["no" if shape is None else f"one of shape {shape}" for shape in shapes]
                raise StateError(f"the save is that of another model: of parameter {name!r} it has {said[0]}, and "
                                 f"this model {said[1]}")  # fmt: skip
        if list(saved) != list(here):
            raise StateError("the save is that of another model: its parameters are in another order")

    def take_up(self, checked: CheckedState) -> None:
        """Go on from what `checked` returned, once all ranks have taken it up."""
        self._inner.load_state_dict(dict(checked.inner))
        self._own.take_up(checked.own)
        self.steps = checked.steps
        self._ranks.gather("has taken it up")  # else one that goes on would pull what another had before

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Refuse: each rank of the save had its own part of what there is.

        Raises:
            StateError: always, with what to do.
        """
        raise StateError(f"{len(states)} ranks have saved this, and as many must load it: to go on with another "
                         "number, call finish() before and begin anew from that model")  # fmt: skip
