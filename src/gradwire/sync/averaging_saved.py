"""What an `Averaging` saves and takes up again: the states of its fragments, its buffers and its counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gradwire.session import Session
from gradwire.session.figures import ReportOfSession
from gradwire.session.states import Unpacked
from gradwire.sync.averaging_state import SECONDS, VERSION, check_state, resharded
from gradwire.sync.buffers import Buffers
from gradwire.sync.copies import WholeCopy
from gradwire.sync.fragment import Fragment


class CheckedAveraging(NamedTuple):
    """A saved state that belongs here, the fragments that go on from it, and what their sessions make of it."""

    saved: Mapping[str, Any]
    fragments: list[Fragment]
    seconds: list[Fragment]
    loaded: list[Unpacked]
    loaded_seconds: list[Unpacked]


class AveragingState(ReportOfSession, ABC):
    """The state of an `Averaging`, which has the attributes below."""

    settings: str
    steps: int
    since: int
    fragments: list[Fragment]
    seconds: list[Fragment]
    buffers: Buffers
    shards: WholeCopy
    replaced: list[Fragment]
    _synced: int

    @abstractmethod
    def dealt_out(self, parts: Sequence[Collection[str]]) -> tuple[list[Fragment], list[Fragment]]:
        """Make the fragments of other parts of the model, and those of second moments, on all ranks at once."""

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session of the first fragment."""

    @property
    @abstractmethod
    def is_at_once(self) -> bool:
        """Whether the end of a window leaves no difference between ranks."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state in tensors, numbers and strings; save one a rank, next to this rank's model and optimizer.

        An average that is under way is waited for, and saved as received. Nothing else is communicated.
        """
        return {
            **self._head(),
            "steps": self.steps,
            "since": self.since,
            "synced": self._synced,
            "fragments": [fragment.state_dict() for fragment in self.fragments],
            **({SECONDS: [second.state_dict() for second in self.seconds]} if self.seconds else {}),
            "buffers": self.buffers.state_dict(),
        }

    def _head(self) -> dict[str, Any]:
        """What a state must have in common with whoever loads it."""
        transport = self.session.transport
        member = {"rank": transport.rank, "world_size": transport.world_size}
        shard = {"shard": self.shards.number} if self.shards.says else {}
        return {"version": VERSION, "settings": self.settings, **member, **shard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called, on the same rank. Load this rank's model and optimizer too.

        Raises:
            StateError: a damaged state, or one of another method, model, rank or world size; nothing is changed then.
        """
        self.take_up(self.checked(state))

    def checked(self, state: Mapping[str, Any]) -> CheckedAveraging:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: as `load_state_dict`.
        """
        check_state(state, self._head())
        fragments, seconds = self._as_saved(state)
        loaded = [own.unpacked(its) for own, its in zip(fragments, state["fragments"], strict=True)]
        # Saves of version 0.2 and before have none: the first average then begins from zeros.
        second = [own.unpacked(its) for own, its in zip(seconds, state.get(SECONDS, ()), strict=False)]
        self.buffers.check(state["buffers"])
        return CheckedAveraging(state, fragments, seconds, loaded, second)

    def _as_saved(self, state: Mapping[str, Any]) -> tuple[list[Fragment], list[Fragment]]:
        """The fragments at hand, and where the save was made with other ones, new ones like those.

        Versions up to 0.3 dealt layers out in turn, whatever their bytes. All ranks load such a save at the same time.
        """
        dealt = [set(fragment.parameters) for fragment in self.fragments]
        here = set[str]().union(*dealt)
        saved = [here.intersection(part["copies"]) for part in state["fragments"]]
        is_of_this_model = len(saved) == len(dealt) and all(saved) and set[str]().union(*saved) == here
        return self.dealt_out(saved) if is_of_this_model and saved != dealt else (self.fragments, self.seconds)

    def take_up(self, checked: CheckedAveraging) -> None:
        """Go on from what `checked` returned."""
        saved, fragments, seconds, loaded, second = checked
        if fragments is not self.fragments:
            self.replaced += [*self.seconds, *self.fragments]
            self.fragments, self.seconds = fragments, seconds
        for own, its, session in zip(self.fragments, saved["fragments"], loaded, strict=True):
            own.take_up(its, session)
        for own, its, session in zip(self.seconds, saved.get(SECONDS, ()), second, strict=False):
            own.take_up(its, session)
        self.buffers.take_up(saved["buffers"])
        self.steps, self.since, self._synced = (int(saved[key]) for key in ("steps", "since", "synced"))

    @property
    def kind(self) -> str:
        """What must be alike in a run that goes on from a save."""
        return f"Averaging({self.settings}, by {self.session.reducer!r})"

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This rank's state from those of all ranks of another run, at a place where these had the same model.

        What ranks owe is conserved in the mean over ranks, see `gradwire.reshard`.

        Raises:
            StateError: states of another form, or from within a window.
        """
        return resharded([states[place] for place in self.same_shard(states)], self._head(), self.is_at_once)

    def same_shard(self, states: Sequence[Mapping[str, Any]]) -> list[int]:
        """Which of the states of all ranks are of ranks that held this one's shard."""
        return [place for place, state in enumerate(states) if state.get("shard", 0) == self.shards.number]
