"""What a session remembers, as it is saved: read first, and taken up once all ranks have read theirs."""

from __future__ import annotations

from typing import Protocol

from gradwire.core import saved
from gradwire.drivers.process_group import GroupTransport
from gradwire.reducers.as_saved import as_saved
from gradwire.reducers.base import Reducer
from gradwire.session.feed import Feed


class Remembering(Protocol):
    """What is saved of a session."""

    reducer: Reducer
    feed: Feed
    transport: GroupTransport


def packed(session: Remembering) -> saved.Saved:
    """Return this rank's state by parameter name."""
    feed, engine = session.feed, session.feed.engine
    own = _member(session, session.reducer)
    return saved.pack(engine.states(), own, scale=feed.scale, step=engine.index, seed=engine.seed)


def unpacked(session: Remembering, state: saved.Saved) -> saved.Loaded:
    """Return what a saved state says, for `take_up`; until then nothing is changed.

    Raises:
        StateError: a damaged state, or one of another version, method, rank, world size or model.
    """
    as_then = as_saved(session.reducer, saved.reducer_of(state))
    return saved.unpack(state, session.feed.engine.states(), _member(session, as_then(session.reducer)))


def take_up(session: Remembering, loaded: saved.Loaded) -> None:
    """Go on from what `unpacked` returned, and with what the method's settings meant when it was saved."""
    feed, engine = session.feed, session.feed.engine
    as_then = as_saved(session.reducer, loaded.reducer)
    session.reducer = as_then(session.reducer)
    engine.serve_by(as_then)
    engine.set_states(loaded.states)
    engine.index, engine.seed, feed.scale = loaded.step, loaded.seed, loaded.scale


def _member(session: Remembering, reducer: Reducer) -> saved.Member:
    return saved.Member(repr(reducer), session.transport.rank, session.transport.world_size)
