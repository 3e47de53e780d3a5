"""What a session remembers, as it is saved: read first, and taken up once all ranks have read theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from gradwire.choosing.automatic import Chosen
from gradwire.core import saved
from gradwire.core.saved_schema import CHOICES, OVERLAP
from gradwire.drivers.engine import Engine
from gradwire.drivers.process_group import GroupTransport
from gradwire.reducers.as_saved import as_saved
from gradwire.reducers.base import Reducer
from gradwire.session.automatic import Automatic, method_of
from gradwire.session.feed import Feed
from gradwire.session.overlap_settings import OverlapSettings


class Remembering(Protocol):
    """What is saved of a session."""

    reducer: Reducer
    method: str
    automatic: Automatic | None
    feed: Feed
    transport: GroupTransport
    overlap: OverlapSettings

    def served_by(self, method: str) -> Reducer:
        """What a spec names here."""
        ...

    def remade(self, overlap: OverlapSettings, reducer: Reducer | None = None) -> Engine:
        """An engine under other settings or another method, whose states are those before the first step."""
        ...

    def adopt(self, overlap: OverlapSettings, engine: Engine, reducer: Reducer | None = None) -> None:
        """Go on with such an engine."""
        ...


class Unpacked(NamedTuple):
    """What a saved state says, and what takes it up.

    Attributes:
        loaded: the states.
        engine: that they are for.
        overlap: the settings that it was made by.
        reducer: that it was made for; None is the one at hand.
        choices: of a run whose method was `auto`; None of another one.
    """

    loaded: saved.Loaded
    engine: Engine
    overlap: OverlapSettings
    reducer: Reducer | None = None
    choices: tuple[Chosen, ...] | None = None


def packed(session: Remembering) -> saved.Saved:
    """Return this rank's state by parameter name."""
    feed, engine = session.feed, session.feed.engine
    own = _member(session, session.reducer)
    state = saved.pack(engine.states(), own, scale=feed.scale, step=engine.index, seed=engine.seed)
    state |= {OVERLAP: told} if (told := session.overlap.as_dict()) else {}
    if session.automatic is None:
        return state
    session.automatic.note_method(session.method, engine.index)
    return state | {CHOICES: session.automatic.packed()}


def unpacked(session: Remembering, state: saved.Saved) -> Unpacked:
    """Return what a saved state says, for `take_up`; until then nothing is changed.

    Gradients travel as in the run that saved, where it says how: grains are cut by that, so a resume is exact.

    Raises:
        StateError: a damaged state, or one of another version, method, rank, world size or model.
    """
    choices = session.automatic.unpacked(state, CHOICES) if session.automatic else None
    reducer, engine, overlap = session.reducer, session.feed.engine, _overlap_of(state, session.overlap)
    if choices is not None and (method := method_of(choices)) != session.method:
        reducer = session.served_by(method)
    as_then = as_saved(reducer, saved.reducer_of(state))
    if overlap != session.overlap or reducer is not session.reducer:
        engine = session.remade(overlap, reducer)
    loaded = saved.unpack(state, engine.states(), _member(session, as_then(reducer)))
    return Unpacked(loaded, engine, overlap, reducer, choices)


def _overlap_of(state: object, now: OverlapSettings) -> OverlapSettings:
    """The settings that a state was saved under; those of now where it says none."""
    if not isinstance(state, Mapping) or OVERLAP not in state:
        return now
    return OverlapSettings.of(state[OVERLAP])


def take_up(session: Remembering, found: Unpacked) -> None:
    """Go on from what `unpacked` returned, and with what the method's settings meant when it was saved."""
    loaded, engine, overlap, reducer, choices = found
    if engine is not session.feed.engine:
        session.adopt(overlap, engine, reducer)
    if session.automatic is not None and choices is not None:
        session.method, session.reducer = method_of(choices), reducer or session.reducer
        session.automatic.take_up(choices)
    feed = session.feed
    as_then = as_saved(session.reducer, loaded.reducer)
    session.reducer = as_then(session.reducer)
    engine.serve_by(as_then)
    engine.set_states(loaded.states)
    engine.index, engine.seed, feed.scale = loaded.step, loaded.seed, loaded.scale


def _member(session: Remembering, reducer: Reducer) -> saved.Member:
    return saved.Member(repr(reducer), session.transport.rank, session.transport.world_size)
