"""Averages of growing groups of ranks, each with a period of its own: often where links are fast, rarely where not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Self, Unpack

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire.core.errors import CompositionError, StateError
from gradwire.drivers import groups
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import DEADLINE_S, Session
from gradwire.session.figures import ReportOfSession
from gradwire.session.lane import group_of
from gradwire.session.together import Together
from gradwire.sync.averaging import Averaging
from gradwire.sync.averaging_options import Options
from gradwire.sync.averaging_saved import CheckedAveraging

_SHARED = ("buffers", "optimizer", "moments", "seed", "deadline_s")
"""Options of all levels; the others are those of the last one."""


class Hierarchical(ReportOfSession):
    """Several `Averaging`s of one model, from the smallest groups of ranks to all of them.

    Where the window of a larger group ends, smaller groups begin theirs anew from what it gave. Let the periods of
    larger groups be multiples of those of smaller ones: then every rank of a node has the same model when the nodes
    average. (Hierarchical local SGD, Lin et al. 2020.)

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
        pace = levels[-1].pace
        pace.others = [*pace.others, *(part.session for level in levels[:-1] for part in level.parts)]

    @classmethod
    def over(
        cls,
        mesh: DeviceMesh,
        model: nn.Module,
        periods: Mapping[str, int],
        method: Reducer | str = "none",
        **options: Unpack[Options],
    ) -> Self:
        """Make the levels for axes of a mesh: ranks that differ on the first axis only average most often.

        Args:
            mesh: with names for its axes.
            model: alike on all ranks.
            periods: steps of a window by axis, where links are fastest first; each a multiple of the one before. With
                `{"place": 4, "site": 32}` ranks of one site average every 4 steps, and all ranks every 32 steps.
            method: how what changed travels on the last level; below it nothing is compressed.
            options: as `Averaging` takes them, but for `group`, for the last level. Others have its `buffers`,
                `optimizer`, `moments`, `seed` and `deadline_s`.

        Raises:
            CompositionError: an axis that the mesh has not, less than two, or periods that are no multiples.
            AttachError, SpecError, CommunicationError: as `Averaging`.

        Example:
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("site", "place"))
            averaging = Hierarchical.over(mesh, model, {"place": 4, "site": 32}, method="int4", outer=DiLoCo())
        """
        _require_periods(mesh, periods, options)
        axes, every = list(periods), list(periods.values())
        below: Any = {key: value for key, value in options.items() if key in _SHARED}
        deadline_s = options.get("deadline_s", DEADLINE_S)
        with contextlib.ExitStack() as made:
            levels: list[Averaging] = []
            for number, period in enumerate(every):
                is_last = number == len(every) - 1
                with _group_along(mesh, axes[: number + 1], deadline_s) as group:
                    how: tuple[Any, Any] = (method, options) if is_last else ("none", below)
                    levels.append(Averaging(model, period, how[0], group=group, **how[1]))
                made.callback(levels[-1].close)
            whole = cls(*levels)
            made.pop_all()  # nothing has failed: they stay open
        return whole

    @property
    def model(self) -> nn.Module:
        """The model that all levels average."""
        return self.levels[0].model

    def step(self) -> bool:
        """Count a step, and average at each level whose window ends; return whether the last level's has.

        Raises:
            StepError, CommunicationError: as `Averaging.step`.
        """
        ended = False
        with self._telling():
            for number, level in enumerate(self.levels):
                ended = level.step()
                self._begin_anew_below(number if ended else 0)
        return ended

    def sync(self) -> None:
        """Average over all ranks now: afterwards they have the same model. See `Averaging.sync`."""
        with self._telling():
            self.levels[-1].sync()
            self._begin_anew_below(len(self.levels) - 1)

    @contextlib.contextmanager
    def _telling(self) -> Generator[None]:
        """Tell the ranks of all levels what is raised inside: those of larger groups wait for this rank, too."""
        with contextlib.ExitStack() as all_levels:
            for level in self.levels:
                all_levels.enter_context(level.telling())
            yield

    def _begin_anew_below(self, number: int) -> None:
        for level in self.levels[:number]:
            level.begin_anew()

    averages_to_evaluate: ClassVar[bool] = False
    """All ranks have what is evaluated already."""

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model is what all ranks agreed on last. See `Averaging.evaluating`."""
        return self.levels[-1].evaluating()

    def stats(self) -> Stats:
        """Return bytes and times so far, over all levels."""
        return Stats.summed(level.stats() for level in self.levels)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; save one a rank, as `Averaging.state_dict`."""
        return {"levels": [level.state_dict() for level in self.levels]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called.

        Raises:
            StateError: as `Averaging.load_state_dict`; nothing is changed then.
        """
        self.take_up(self.checked(state))

    def checked(self, state: Mapping[str, Any]) -> list[CheckedAveraging]:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: as `load_state_dict`.
        """
        levels = state.get("levels")
        if not isinstance(levels, list) or len(levels) != len(self.levels):
            raise StateError(f"this is no saved state of {len(self.levels)} levels: pass what state_dict() returned")
        return [level.checked(saved) for level, saved in zip(self.levels, levels, strict=True)]

    def take_up(self, checked: Sequence[CheckedAveraging]) -> None:
        """Go on from what `checked` returned."""
        for level, saved in zip(self.levels, checked, strict=True):
            level.take_up(saved)

    @property
    def session(self) -> Session:
        """The last level's, over all ranks."""
        return self.levels[-1].session

    @property
    def kind(self) -> str:
        """What must be alike in a run that goes on from a save."""
        return f"Hierarchical({', '.join(level.kind for level in self.levels)})"

    @property
    def steps(self) -> int:
        """Those of the run so far."""
        return self.levels[-1].steps

    def together(self, call: str) -> Together:
        """All ranks that have a part in this: those of the last level."""
        return self.levels[-1].together(call)

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Refuse: with another number of ranks the groups of small levels are others.

        Raises:
            StateError: always, with what to do.
        """
        raise StateError(
            f"the {len(states)} ranks of the save had other groups: call sync() before saving, and begin anew from "
            "that model"
        )

    def close(self) -> None:
        """Stop communicating at all levels."""
        for level in self.levels:
            level.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for level in self.levels:
            level.__exit__(kind, error, trace)


def _require_periods(mesh: DeviceMesh, periods: Mapping[str, int], options: Options) -> None:
    names = mesh.mesh_dim_names or ()
    for axis in periods:
        if axis not in names:
            has = ", ".join(map(repr, names)) or "none with a name"
            raise CompositionError(f"periods has an axis {axis!r} that the mesh has not; its axes are {has}")
    if len(periods) < 2:
        raise CompositionError("periods has less than two axes: with one, make an Averaging over that axis's group")
    if "group" in options:
        raise CompositionError("the mesh says whose ranks average: leave out group=")
    every = list(periods.values())
    for small, large in itertools.pairwise(every):
        if small < 1 or large % small:
            raise CompositionError(
                f"periods {dict(periods)}: give each axis a multiple of the period before it, the smallest first"
            )


@contextlib.contextmanager
def _group_along(mesh: DeviceMesh, axes: Sequence[str], deadline_s: float) -> Generator[dist.ProcessGroup]:
    """The group of the ranks that differ from this one on these axes only, to make other groups from."""
    names, here = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if here is None:
        raise CompositionError(f"rank {dist.get_rank()} is not in the mesh: call this on its ranks only")
    place = tuple(slice(None) if name in axes else at for name, at in zip(names, here, strict=True))
    ranks: list[int] = mesh.mesh[place].reshape(-1).tolist()
    whole = group_of(None)
    if ranks == dist.get_process_group_ranks(whole):
        yield whole
        return
    group = groups.new_group(whole, ranks, deadline_s, "Hierarchical.over")
    try:
        yield group
    finally:
        groups.destroy(group)
