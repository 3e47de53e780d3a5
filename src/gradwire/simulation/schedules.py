"""How the ranks of a method meet: what a spec says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.core.errors import SpecError
from gradwire.core.places import ELASTIC, EVERY_STEP, UNWAITING, WINDOWS
from gradwire.reducers.base import Reducer
from gradwire.sending import Sending
from gradwire.spec import as_method, find, parse
from gradwire.sync.methods import ElasticOptions, Windowed, Windows


@dataclass(frozen=True)
class EveryStep:
    """Ranks reduce gradients in every step."""

    reducer: Reducer
    name = "every step"


@dataclass(frozen=True)
class InWindows:
    """Ranks average models at the end of windows.

    Attributes:
        reducer: how what changed travels.
        every: steps of a window, of one that grows its last length.
        delay, fragments: see `gradwire.sync.Averaging`.
        vectors: how many vectors of the model's size travel: parameters, and moments where these are averaged.
    """

    reducer: Reducer
    every: int
    delay: int = 0
    fragments: int = 1
    vectors: int = 1
    name = "windows"


@dataclass(frozen=True)
class AmongThoseHere:
    """Ranks average models at the end of windows, and hosts come and go."""

    reducer: Reducer
    every: int
    name = "elastic"


@dataclass(frozen=True)
class WithServers:
    """Ranks push to servers and pull from them.

    Attributes:
        sending: how pushes travel.
        every: steps between pushes.
        bound: pushes that a rank may be ahead of the slowest one when it starts; None for no bound.
    """

    sending: Sending
    every: int
    bound: int | None
    name = "servers"


TrainingSchedule = EveryStep | InWindows | AmongThoseHere | WithServers


def schedule_of(spec: str) -> TrainingSchedule:
    """Return how ranks meet under a method.

    Raises:
        SpecError: a method that cannot be simulated, or as `gradwire.parse`.
        CompositionError: as `gradwire.parse`.

    >>> schedule_of("local:H=8,delay=1").every, schedule_of("ssp:4").bound
    (8, 4)
    """
    method = find(spec)
    if method.place is EVERY_STEP:
        return EveryStep(as_method(spec))
    recipe = parse(spec)
    if method.place is WINDOWS and isinstance(method, Windowed):
        return _windows(spec, recipe.options)
    if method.place is ELASTIC:
        elastic = ElasticOptions(**recipe.options)
        return AmongThoseHere(as_method(elastic.update), elastic.H)
    if method.place is UNWAITING and "update" in method.options:
        given = recipe.options
        return WithServers(Sending.of(given.get("update", "none")), given.get("H", 1), given.get("staleness"))
    raise SpecError(
        f"{spec!r} cannot be simulated: take a method of every step such as int4, windows such as local:H=8, "
        "elastic:50, or servers such as ssp:4"
    )


def _windows(spec: str, given: dict[str, Any]) -> InWindows:
    windows = Windows(**{name: value for name, value in given.items() if name in Windows.__dataclass_fields__})
    if windows.drift is not None:
        raise SpecError(f"drift= in {spec!r} ends windows by what gradients do, which is not simulated: leave it out")
    vectors = 3 if windows.moments == "average" else 1  # as Adam has two moments
    return InWindows(as_method(windows.outer), windows.last or windows.H, windows.delay, windows.fragments, vectors)
