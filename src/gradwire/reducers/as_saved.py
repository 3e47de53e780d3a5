"""The reducer that a save was made with, where a setting of the same name means something else today."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast, get_args

from gradwire.core.renamed import with_names_of_today
from gradwire.reducers.base import Reducer
from gradwire.reducers.momentum_correction import DGC, ClipOf, MomentumCorrection

_CLIPS: tuple[ClipOf, ...] = get_args(ClipOf)


def as_saved(reducer: Reducer, saved: str) -> Callable[[Reducer], Reducer]:
    """Return what makes of a reducer, or of a part of it that serves a grain, the one that a saved text names.

    The two may differ in what `clip` is of, see `MomentumCorrection`. A reducer that differs in anything else is left
    as it is: then the save is another method's.

    Args:
        reducer: of this run.
        saved: the `repr` of the save's.

    >>> from gradwire.spec import parse
    >>> dgc = parse("dgc:0.01,clip=2").inner
    >>> as_saved(dgc, "DGC(density=0.01, momentum=0.9, clip=2.0, ramp=0)")(dgc)
    DGC(density=0.01, momentum=0.9, clip=2.0, clip_of='sum', ramp=0)
    """
    wanted = with_names_of_today(saved)
    for clip_of in _CLIPS:
        if repr(reducer) != wanted == repr(_clipping(reducer, clip_of)):
            return lambda part: _clipping(part, clip_of)
    return lambda part: part


def could_be_saved(reducer: Reducer) -> list[Reducer]:
    """Reducers whose saves a run of this one goes on from, with what they were made with."""
    return [reducer, *(_clipping(reducer, clip_of) for clip_of in _CLIPS)]


def _clipping(value: Any, clip_of: ClipOf) -> Any:
    """A reducer, or what its fields hold, in which every clip is of `clip_of`."""
    if isinstance(value, tuple) and type(cast(object, value)) is tuple:
        return tuple(_clipping(one, clip_of) for one in cast("tuple[Any, ...]", value))
    if not isinstance(value, Reducer) or not dataclasses.is_dataclass(value):
        return value
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    changed = {name: _clipping(getattr(value, name), clip_of) for name in fields}
    if isinstance(value, DGC | MomentumCorrection) and value.clip:
        changed["clip_of"] = clip_of
    is_same = all(changed[name] == getattr(value, name) for name in fields)
    return value if is_same else dataclasses.replace(value, **changed)
