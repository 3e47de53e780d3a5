"""Whose saves a folder holds: a new save removes the older ones, and those must not be another session's."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

from gradwire.core.renamed import alike
from gradwire.core.save_folder import Manifest, SavedRun


class Saver(Protocol):
    """Who saves: a session, or what stands in its place where there is none.

    Attributes:
        saved_as: the run that its saves are of; None before the first.
        is_open: whether it goes on.
        seed: of all random choices.
        begun_with: the method that the run began with.
        shapes: of its tensors, by name.
    """

    saved_as: SavedRun | None

    @property
    def is_open(self) -> bool:
        """What the class says of it."""
        ...

    @property
    def seed(self) -> int:
        """What the class says of it."""
        ...

    @property
    def begun_with(self) -> str:
        """What the class says of it."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What the class says of it."""
        ...


_SAVERS: weakref.WeakValueDictionary[str, Saver] = weakref.WeakValueDictionary()
"""Those of this process, by the run of what they have saved or loaded."""


def run_of(saver: Saver, method: str) -> SavedRun:
    """The run that somebody's saves are of; before the first one it has no id yet.

    Args:
        saver: who saves.
        method: that the run began with.
    """
    if saver.saved_as is not None:
        return saver.saved_as
    # First dimensions are left out: of a sharded model ranks have different ones.
    told = repr([(name, shape[1:]) for name, shape in saver.shapes.items()])
    return SavedRun("", hashlib.blake2b(told.encode(), digest_size=8).hexdigest(), method)


def remember(saver: Saver, run: SavedRun | None) -> None:
    """Note that somebody has saved for a run, or goes on with it; None is one of an older version."""
    saver.saved_as = run
    if run is not None:
        _SAVERS[run.id] = saver


def stranger(found: Iterable[Manifest], saver: Saver, run: SavedRun, world_size: int) -> str | None:
    """What another session has saved that a save of this run would remove; None where there is nothing.

    A run that begins anew, with the same model and method, may take the place of the one before. Methods are not
    compared with those of another number of ranks, since some of them name it.
    """
    for manifest in found:
        its = manifest.run
        if its is None or its.id == run.id:
            continue
        other = _SAVERS.get(its.id)
        where = f"gradwire-{manifest.number}, step {manifest.step}"
        if other is not None and other is not saver and other.is_open:
            return f"what another session of this process has saved ({where})"
        if its.tensors != run.tensors:
            return f"what a run of another model has saved ({where})"
        if not alike(its.method, run.method) and manifest.world_size == world_size:
            return f"what a run with another method has saved ({where}; it began with {its.method})"
    return None
