"""Whose saves a folder holds: a new save removes the older ones, and those must not be another session's."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable

from gradwire.core.renamed import alike
from gradwire.core.save_folder import Manifest, SavedRun
from gradwire.session.session import Session

_SAVERS: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
"""The sessions of this process, by the run of what they have saved or loaded."""


def run_of(session: Session, method: str) -> SavedRun:
    """The run that saves of a session are of; before its first one it has no id yet.

    Args:
        session: of what is saved.
        method: that the run began with.
    """
    if session.saved_as is not None:
        return session.saved_as
    # First dimensions are left out: of a sharded model ranks have different ones.
    told = repr([(name, session.feed.planned(name).shape[1:]) for name in session.names])
    return SavedRun("", hashlib.blake2b(told.encode(), digest_size=8).hexdigest(), method)


def remember(session: Session, run: SavedRun | None) -> None:
    """Note that a session has saved for a run, or goes on with it; None is one of an older version."""
    session.saved_as = run
    if run is not None:
        _SAVERS[run.id] = session


def stranger(found: Iterable[Manifest], session: Session, run: SavedRun, world_size: int) -> str | None:
    """What another session has saved that a save of this run would remove; None where there is nothing.

    A run that begins anew, with the same model and method, may take the place of the one before. Methods are not
    compared with those of another number of ranks, since some of them name it.
    """
    for manifest in found:
        its = manifest.run
        if its is None or its.id == run.id:
            continue
        saver = _SAVERS.get(its.id)
        where = f"gradwire-{manifest.number}, step {manifest.step}"
        if saver is not None and saver is not session and saver.is_open:
            return f"what another session of this process has saved ({where})"
        if its.tensors != run.tensors:
            return f"what a run of another model has saved ({where})"
        if not alike(its.method, run.method) and manifest.world_size == world_size:
            return f"what a run with another method has saved ({where}; it began with {its.method})"
    return None
