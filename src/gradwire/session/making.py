"""Making the engine of a session, alike on all ranks: the first one, and those of the methods that follow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from gradwire.core.carry import carry_over
from gradwire.core.errors import AttachError, CompositionError, GradwireError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.checked import Checked
from gradwire.drivers.dry_run import dry_run
from gradwire.drivers.engine import Engine
from gradwire.drivers.host_memory import HostMemory
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.nodes import on_nodes
from gradwire.drivers.plan import Plan
from gradwire.drivers.process_group import GroupTransport
from gradwire.reducers.base import Reducer
from gradwire.session.agreement import Configuration, configuration, is_alike, tell_the_difference
from gradwire.session.form import Form
from gradwire.session.lane import Lane
from gradwire.session.overlap_settings import OverlapSettings
from gradwire.session.together import Together

WEIGHED = ("gradwire.attach", "gradwire.Session")
"""Calls whose session the training loop has, and can tell in each step what its rank counts for."""

DEFAULTS = OverlapSettings()


class Maker:
    """Makes engines for the same tensors, one method after another.

    Args:
        lane: where programs run.
        transport: what they communicate by.
        links: what is known of its links.
        specs: the tensors, all on one device.
        grain_numel: elements of a grain at most, or None.
        checksum: whether payloads travel with one.
        what: the call that errors speak of.
        form: how tensors become grains.
        says: what else must be the same on all ranks.
        guards: whether means that are not finite are found in every step, see `Engine`.
        overlap: in which order gradients come, and how many waves of them travel at a time.
        host: where residuals lie between steps, see `Engine`.
    """

    def __init__(
        self,
        lane: Lane,
        transport: GroupTransport,
        links: LinkProfiler,
        specs: Sequence[ParameterSpec],
        *,
        grain_numel: int | None,
        checksum: bool,
        what: str,
        form: Form,
        says: str = "",
        guards: bool = False,
        overlap: OverlapSettings = DEFAULTS,
        host: HostMemory | None = None,
    ) -> None:
        self._lane, self._transport, self._links, self._specs = lane, transport, links, specs
        self._grain_numel, self._checksum, self._what = grain_numel, checksum, what
        self._form, self._says = form, [text for text in (form.says, says) if text]
        self._guards, self._overlap, self._host = guards, overlap, host
        self._device = specs[0].device
        self._serving: Reducer | None = None  # with what it wanted to know of the link

    def first(self, reducer: Reducer, seed: int) -> tuple[Reducer, Engine]:
        """The reducer on the nodes that ranks have found, and the engine that a session begins with.

        The others are told where making it fails here.

        Raises:
            AttachError: ranks that disagree.
            CompositionError: weights that nobody could give.
            TopologyError: `node=auto` on nodes that it cannot serve.
        """
        where = f" in {self._what}"
        try:
            self._require_told(reducer)
            given, planned = reducer, self._plan(reducer)
            mine = self._configuration(reducer, planned, seed)
        except GradwireError:  # alike on all ranks: none is to close its group while another one still joins it
            self._is_alike(0, where)
            raise
        if not self._is_alike(mine.digest, where):
            tell_the_difference(mine, Together(self._what, self._lane, AttachError))
        reducer = self._on_nodes(reducer, where)
        self._serving = self._measured(reducer, where)
        try:
            if self._serving is not given:  # what was found of nodes or routes is in it
                planned = self._plan(self._serving)
            engine = self._engine(planned, seed)
        except Exception as error:
            raise self._lane.fail(error, where) from None
        self._is_alike(0, where)  # so that no rank's compiling falls into another's first step
        return reducer, engine

    def remade(self, old: Engine, overlap: OverlapSettings, reducer: Reducer | None = None) -> Engine:
        """An engine of the same step under other settings, whose states are those before the first step.

        Nothing is communicated: every rank must ask for it with the same settings, and with the same method, if it is
        to be another one, which knows neither nodes nor routes.
        """
        assert self._serving is not None, "no engine was made yet"
        engine = self._engine(self._plan(reducer or self._serving, overlap), old.seed, overlap)
        engine.index, engine.weight = old.index, old.weight
        return engine

    def adopt(self, overlap: OverlapSettings, reducer: Reducer | None = None) -> None:
        """Make engines by these settings from now on, and remake them for this method, if there is another one."""
        self._overlap, self._serving = overlap, reducer or self._serving

    def next(self, method: Reducer | str, now: Reducer, old: Engine) -> tuple[Reducer, Engine]:
        """The reducer and the engine of another method, with what `old` owes; that one is left as it is.

        Args:
            method: which every rank must give alike.
            now: the reducer at hand.
            old: its engine, between two steps.

        Raises:
            SpecError, CompositionError: a method that cannot be built here.
            AttachError: ranks that disagree, a rank where it failed, or a private method.
            CommunicationError: a rank that did not come.
        """
        ranks = Together("change", self._lane, AttachError)

        def propose() -> tuple[Reducer, Configuration]:
            reducer = self._proposed(method, now)
            return reducer, self._configuration(reducer, self._plan(reducer), old.seed, f" from step {old.index} on")

        proposed = ranks.attempt(propose, words=lambda own: own[1].digest)
        reducer, mine = proposed.own
        if len(set(proposed.words)) > 1:
            tell_the_difference(mine, ranks)
        reducer = self._on_nodes(reducer, " in change")
        serving = self._measured(reducer, " in change")
        engine = ranks.attempt(lambda: self._successor(self._plan(serving), old)).own
        self._serving = serving
        return reducer, engine

    def _configuration(self, reducer: Reducer, planned: Plan, seed: int, since: str = "") -> Configuration:
        """What must be the same on all ranks."""
        rest = ", ".join([f"{since}, seed={seed}, checksum={self._checksum}", *self._says])
        return configuration(f"{reducer!r}{rest}", f"{reducer}{rest}", self._specs, planned)

    def _is_alike(self, digest: int, where: str) -> bool:
        return self._lane.call(lambda: is_alike(digest, self._transport, self._device), where)

    def _plan(self, reducer: Reducer, overlap: OverlapSettings | None = None) -> Plan:
        overlap = overlap or self._overlap
        return self._form.plan(overlap.ordered(self._specs), reducer, self._grain_numel or overlap.grain_numel)

    def _on_nodes(self, reducer: Reducer, where: str) -> Reducer:
        return self._lane.call(lambda: on_nodes(reducer, self._links, self._specs, self._grain_numel), where)

    def _measured(self, reducer: Reducer, where: str) -> Reducer:
        """The reducer with what it wants to know of the link, once groups are made."""
        for glob in reducer.unmatched_globs({spec.name for spec in self._specs}):
            said = f"no trained parameter has a name like {glob!r}: that rule of the policy serves none"
            warnings.warn(said, stacklevel=6)
        transport = self._transport
        self._lane.call(lambda: transport.prepare(reducer.axes(transport.world_size)), where)
        return self._lane.call(lambda: self._links.with_times(reducer), where)

    def _engine(self, planned: Plan, seed: int, overlap: OverlapSettings | None = None) -> Engine:
        """An engine, with all that is compiled ready."""
        dry_run(planned.units, self._transport.world_size)
        checked = Checked(self._transport, self._lane.failures.ranks) if self._checksum else self._transport
        engine = Engine(planned, checked, seed, (overlap or self._overlap).waves_in_flight, self._host)
        engine.guards = self._guards
        return engine

    def _proposed(self, method: Reducer | str, now: Reducer) -> Reducer:
        """The reducer of another method, if it can take over here."""
        reducer = self._form.method(method)
        reducer.require_ranks(self._transport.world_size)
        self._require_told(reducer)
        if reducer.private or now.private:
            raise AttachError(
                f"{now} cannot be changed to {reducer}: the steps of a private mean are accounted for together, under "
                "one method; make a new session after close()"
            )
        return reducer

    def _require_told(self, reducer: Reducer) -> None:
        """Refuse weights that nobody could give: only a training loop that has the session calls `weigh`.

        Raises:
            CompositionError: with weights that can be given here.
        """
        if reducer.weighs and self._what not in WEIGHED:
            raise CompositionError(
                f"weights=given is for {' and '.join(WEIGHED)}, whose session.weigh() a training loop calls, and "
                f"nobody calls it for {self._what}: write the weights of all ranks, as weights=3/1"
            )

    def _successor(self, planned: Plan, old: Engine) -> Engine:
        """The engine that follows."""
        self._lane.executor.order()  # behind the last step
        engine, transport = self._engine(planned, old.seed), self._transport
        engine.set_states(carry_over(old.states(), engine.states(), transport.rank, transport.world_size))
        engine.index = old.index
        return engine
