"""What a session tells of its communication: bytes, times, the link, and what is owed."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from gradwire.core.errors import StepError
from gradwire.core.figures import listed
from gradwire.core.link import Link
from gradwire.core.state import square_sum, walk
from gradwire.drivers.contention import message
from gradwire.drivers.engine import Engine, Stats
from gradwire.drivers.groups import is_registered
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.traced import Traced
from gradwire.drivers.window import DDP_CAPS, Window
from gradwire.reducers.base import Reducer
from gradwire.reducers.measured import chosen_bits
from gradwire.session.automatic import Automatic
from gradwire.session.feed import Feed
from gradwire.session.lane import Lane
from gradwire.session.module_figures import FiguresOfModules
from gradwire.session.pace import WindowPace
from gradwire.session.report import Report, observed
from gradwire.session.step_times import StepBoard
from gradwire.topology.levels import Topology
from gradwire.topology.reduction_times import ReductionTimes

LINKS_VARIABLE = "GRADWIRE_LINKS"
"""Names the file in which what is measured of links is kept."""

DESCRIPTION_VARIABLE = "GRADWIRE_TOPOLOGY"
"""Names the file that says of the topology what cannot be seen, with the ranks of the default group."""


def wants_times() -> bool:
    """Whether sessions time their link as they begin, which takes seconds on slow links; alike on all ranks."""
    return os.environ.get("GRADWIRE_TIME_LINK") != "0"


def described_ranks(group: dist.ProcessGroup) -> tuple[Path | None, list[int] | None]:
    """The file that `GRADWIRE_TOPOLOGY` names, and which of its ranks a group has where these are not all.

    A group that the default group does not know has none: its ranks come and go.
    """
    named = os.environ.get(DESCRIPTION_VARIABLE)
    if not named or not is_registered(group):
        return None, None
    ranks = dist.get_process_group_ranks(group)
    return Path(named), None if len(ranks) == dist.get_world_size() else ranks


def links_file(group: dist.ProcessGroup) -> Path | None:
    """Where what is measured of a group's links is kept: what `GRADWIRE_LINKS` says; None where it says nothing.

    A group of some of the ranks has a file of its own beside that of all ranks, named by a digest of its ranks. A group
    that the default group does not know has none: its ranks come and go.
    """
    named = os.environ.get(LINKS_VARIABLE)
    if not named or not is_registered(group):
        return None
    file, ranks = Path(named), dist.get_process_group_ranks(group)
    if len(ranks) == dist.get_world_size():
        return file
    return file.with_stem(f"{file.stem}-{zlib.crc32(listed(ranks).encode()):08x}")


class Figures:
    """The figures of a session, which has the attributes below."""

    lane: Lane
    transport: GroupTransport
    method: str
    reducer: Reducer
    feed: Feed
    device: torch.device
    _links: LinkProfiler
    _link_times: ReductionTimes | None
    _board: StepBoard | None
    automatic: Automatic | None
    pace: WindowPace | None = None
    """Set by what combines models with this session."""
    uncounted: str = ""
    """What a report says that it does not count."""
    estimates = True
    """Whether a report estimates the step without the method, by the times of the link."""
    _modules: tuple[FiguresOfModules, ...] = ()

    @property
    def engine(self) -> Engine:
        """What runs the method's programs; another one after `change`."""
        return self.feed.engine

    def timed_link(self) -> ReductionTimes | None:
        """The times of the link, measured now where they are not known yet; every rank calls it at the same place."""
        if self._link_times is None:
            self._time_link()
        return self._link_times

    @property
    def seed(self) -> int:
        """Of all random choices."""
        return self.feed.engine.seed

    @property
    def window(self) -> Window:
        """Figures of the last steps."""
        return self.feed.window

    def report(self) -> Report:
        """Return what the method costs and saves on this rank, over the last hundred steps and without start-up.

        Ranks may ask whenever they like, and wait for no other rank: what the others have told of their last steps is
        read from the store that the ranks met at. See `Report` for what its figures mean.

        Example:
            print(session.report())                # for people
            session.report().as_dict()["saved_ms"] # for programs
        """
        owed = self.residual_norm() / self.feed.scale
        others = self._board.read() if self._board else None
        times = self._link_times if self.estimates else None
        averages = self.reducer.averages
        found = observed(
            self.engine, self.window, times, others, self.method, averages, owed, self.pace, self.uncounted
        )
        modules = tuple(module for figures in self._modules for module in figures())
        chosen = "" if self.automatic is None else str(self.automatic)
        return dataclasses.replace(found, chosen=chosen, modules=modules)

    def add_to_report(self, figures: FiguresOfModules) -> None:
        """Have `report` tell of modules that communicate by themselves, such as layers of experts.

        Args:
            figures: is asked for figures in each report.

        Example:
            session.add_to_report(lambda: expert_report(model))
        """
        self._modules = (*self._modules, figures)

    def layer_bits(self) -> dict[str, int]:
        """Return the bits that an element of each parameter's gradient has in the next step, alike on all ranks.

        Call it between two steps. The numbers change where a measurement is made, see `gradwire.reducers.MeasuredBits`.

        Raises:
            StepError: another method than one with `layers=measured`.

        Example:
            session = gradwire.attach(ddp, "int4,layers=measured")
            ...
            print(session.layer_bits())  # {"wte.weight": 5, "blocks.0.mlp.weight": 3, ...}
        """
        found = chosen_bits(self.engine.states())
        if not found:
            raise StepError(f"{self.method} chooses no widths by layer: add layers=measured to an intN method")
        return {name: found[name] for name in self.feed.names if name in found}

    def found_topology(self, where: str = "") -> Topology:
        """Return which ranks of this session share a node; every rank must call it at the same place.

        Raises:
            TopologyError: on every rank, for a description (`GRADWIRE_TOPOLOGY`) that cannot be used.
            CommunicationError: a rank failed or fell silent, by its number.
        """
        return self.lane.call(lambda: self._links.topology().topology, where)

    def measure_link(self) -> Link | None:
        """Measure how long an uncompressed all-reduce takes: again, since links change, or for the first time.

        A session does this as it begins, unless the environment has `GRADWIRE_TIME_LINK=0`. On Gloo rows of compressed
        gradients travel as suits the link from then on (docs/exchanges.md).

        Every rank must call it at the same place, between two steps. It takes a tenth of a second on fast
        links, and about fifteen at most on slow ones.

        Returns:
            The straight line through the times of the smallest all-reduce and of that of all gradients; None with one
            rank.

        Raises:
            StepError: a step is under way.
            CommunicationError: a rank failed or fell silent, by its number.
        """
        self.feed.occupy()
        try:
            self._time_link(again=True)
        finally:
            self.feed.vacate()
        return self._link_times.link if self._link_times else None

    def _time_link(self, *, again: bool = False) -> None:
        """Take the times of the link from its profile, where they are kept, or measure them."""
        nbytes, caps = self.engine.dense_bytes, self.window.caps or DDP_CAPS
        ask = functools.partial(self._links.reduction_times, nbytes, caps, again=again)
        self._link_times = times = self.lane.call(ask, " in measure_link")
        self.transport.link = times and message(times.link, self.transport.world_size)
        if self._board is None and self._link_times and self.estimates and self.device.type == "cpu":
            group = self.lane.group
            self._board = StepBoard(self.lane.store, self.lane.name, group.rank(), group.size())
            self.feed.board = self._board

    def trace(self, clock: Callable[[], float] = time.perf_counter) -> Traced:
        """Keep spans of all that communication does on this rank from the next step on; return what holds them.

        A span is a collective under way, a wait for one, or coding between them. `gradwire.profile` does this for you,
        beside the spans of training. Keeping one costs some microseconds. Clear `spans` now and then in a long run.

        Args:
            clock: that the spans' times are of, in seconds.

        Raises:
            StepError: a step is under way.

        Example:
            traced = session.trace()
            ...  # some steps
            print(sum(span.length_s for span in traced.spans if span.kind == "wait"))
        """
        self.feed.occupy()
        try:
            return self.engine.trace(clock)
        finally:
            self.feed.vacate()

    def stop_tracing(self) -> None:
        """Keep no spans from the next step on; what `trace` has returned holds those until then."""
        self.feed.occupy()
        try:
            self.engine.stop_tracing()
        finally:
            self.feed.vacate()

    def stats(self) -> Stats:
        """Return bytes and times so far, those of the step that has just ended among them."""
        self.engine.settle()
        return dataclasses.replace(self.engine.stats)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all that this rank owes: its residuals, and its shards' as an owner."""
        leaves = (leaf for _, state in self.engine.states() for _, leaf in walk(state))
        return sum(square_sum(leaf.tensor) for leaf in leaves if leaf.owed) ** 0.5

    def residual_norms(self) -> dict[str, float]:
        """Return the Euclidean norm of what this rank owes of each parameter, those of which it owes nothing left out.

        Their squares add up to that of `residual_norm()`. Call it between two steps.

        Example:
            print(session.residual_norms())  # {"wte.weight": 0.31, "blocks.0.mlp.weight": 0.12, ...}
        """
        squares: defaultdict[str, float] = defaultdict(float)
        for grain, state in self.engine.states():
            for _, leaf in walk(state):
                for segment in grain.segments if leaf.owed else ():
                    squares[segment.name] += square_sum(leaf.of_segment(segment, self.transport.rank))
        return {name: square**0.5 for name, square in squares.items()}


class HasFigures(Protocol):
    """What has a session."""

    @property
    def session(self) -> Figures:
        """The session whose report tells of all."""
        ...


class ReportOfSession:
    """The report of what trains by a session, as the session gives it."""

    def report(self: HasFigures) -> Report:
        """Return what communication costs and saves in a step of training on this rank, see `Report`.

        Example:
            print(optimizer.report())
        """
        return self.session.report()
