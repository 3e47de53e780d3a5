"""`Elastic`: workers that come and go average what their windows changed, and all that are left have the same model."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, get_args

from torch import Tensor, nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CompositionError, StateError, StepError
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import DEADLINE_S
from gradwire.session.names import TrainedParameters
from gradwire.session.records import has_left, keep_records
from gradwire.session.report import Report
from gradwire.spec import as_method
from gradwire.sync.elastic.change import Change, change_of
from gradwire.sync.elastic.heartbeat import Heartbeat
from gradwire.sync.elastic.owed import Owed
from gradwire.sync.elastic.protocol import Lost, Needs
from gradwire.sync.elastic.rounds import Rounds
from gradwire.sync.elastic.shared import SharedModel
from gradwire.sync.elastic.store import connected, require_alike_run
from gradwire.sync.elastic.worker import ElasticWorker
from gradwire.sync.outer import Mean, Outer
from gradwire.sync.schedules import Schedule, as_schedule
from gradwire.sync.swap import swapped


class Elastic:
    """Averages models among workers that may be killed, leave and join while a run goes on.

    Call `step` after each step of the optimizer. With x_0 the global copy and x_H what a worker has at the end of its
    window, the next window begins with

        x = outer(x_0, mean over the workers at hand of (x_H - x_0)),

    with the same bits on all of them. Workers meet at a store (`gradwire store`), a process that outlives any of them,
    and need no default process group; each window's end is a round there (`docs/elastic.md`). A worker that begins
    waits for the end of the others' window, and is handed the global copy. The first ones begin with the model of one
    of them. The average travels over Gloo, from the CPU, whatever device the model is on. The outer step is what its
    paper says; how workers come and go is of no paper.

    It is an averager as `Averaging` is: `AveragingOptimizer(inner, elastic)` calls `step` after those of an optimizer,
    and `gradwire.wrap(optimizer, model, "elastic:50,update=int4", store="10.0.0.1:29400")` makes both.

    Args:
        model: whose trained parameters are averaged, and its buffers with a fraction. Parameters that are not trained
            are each worker's own to load.
        every: steps of a window, or a `Schedule`.
        method: how what changed travels: a reducer, or a spec such as `"int4"`. Error feedback works.
        store: "host:port" of a `gradwire store`, or a store of `torch.distributed`.
        run: the name of the run; workers of other runs may use the same store.
        name: of this worker, for people. One that comes back under the name of a worker that was killed takes its place
            at once, while otherwise the others wait until it gave no sign of life for `lost_after_s`.
        outer: the outer step, such as `DiLoCo()`.
        lost: what becomes of a window in which workers were lost. "keep": what it changed on the others is averaged.
            "discard": they go back to the global copy, and train it once more.
        least: with fewer workers than that the run waits, and gives up after `deadline_s`.
        begin_with: so many workers found the run (default: `least`).
        resume: what `state_dict` returned on a worker of another run, to begin with. Where a run is there already, its
            global copy counts.
        seed: of all random choices, the same on every worker.
        deadline_s: seconds to wait at the end of a window for workers that are alive; a worker that comes later has
            lost its window. Also the patience of each collective.
        lost_after_s: seconds without a sign of life after which a worker is lost.
        join_s: seconds that a newcomer waits for the end of the run's window.
        records: the folder that this worker's flight record is written into, for `gradwire stacks`; None: that of
            `GRADWIRE_RECORDS` in the environment, if there is one. A worker is named there by its number in the run.

    Attributes:
        model: as given.
        method: what reports call it.
        last: what the last window's end has changed.
        changes: all that was not quiet: who joined, left and was lost.
        left: whether this worker has left, as `leave` asked it to.

    Raises:
        CompositionError: settings or a method that fit nothing: drift-triggered windows, an outer step that wants
            learning rates, private means, methods with sub-groups.
        AttachError: another model or other settings than the run's.
        StateError: a state that does not belong to this model.
        CommunicationError: a store that cannot be reached, too few workers, or a run whose model nobody has any more.

    Example:
        elastic = gradwire.sync.Elastic(model, every=50, method="int4", outer=DiLoCo(), store="10.0.0.1:29400")
        while elastic.samples < 1_000_000 and not elastic.left:
            inputs, targets = draw()
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            elastic.step(samples=len(inputs))
        elastic.close()
    """

    def __init__(
        self,
        model: nn.Module,
        every: int | Schedule = 8,
        method: Reducer | str = "none",
        *,
        store: str | Store,
        run: str = "default",
        name: str = "",
        outer: Outer | None = None,
        lost: Lost = "keep",
        least: int = 1,
        begin_with: int | None = None,
        resume: Mapping[str, Any] | None = None,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
        lost_after_s: float = 10.0,
        join_s: float = 3600.0,
        records: str | Path | None = None,
    ) -> None:
        self.schedule, self.outer, reducer = as_schedule(every), outer or Mean(), as_method(method)
        needs = Needs(least, least if begin_with is None else begin_with)
        require_settings(self.schedule, self.outer, reducer, lost, needs)
        shared = SharedModel(model, reducer, self.outer)
        self.model, self._trained = model, TrainedParameters.of_now("gradwire.sync.Elastic", model)
        owed = _resumed(resume, shared) if resume is not None else Owed()
        self.method = str(method)
        self.settings = f"{reducer!r}, every={self.schedule}, outer={self.outer}, lost={lost!r}, seed={seed}"
        self.left, self.changes = False, list[Change]()
        self._since = self._samples = 0
        self._leaving = False
        client = connected(store, run)
        require_alike_run(client, [self.settings, *shared.described()])
        self._heartbeat = Heartbeat(client, name, lost_after_s)
        try:
            keep_records(records, client, self._heartbeat.number)
            rounds = Rounds(client, self._heartbeat, lost, needs, deadline_s, join_s)
            self._worker = ElasticWorker(client, self._heartbeat, rounds, shared, owed, seed, deadline_s)
            self._members = self._end_window()
        except BaseException:
            self._heartbeat.close(leaves=True)
            raise

    def __repr__(self) -> str:
        return f"Elastic({self.settings}, windows={self.windows}, workers={self.world_size})"

    # Steps --------------------------------------------------------------------------------------------------------

    def step(self, samples: int = 0) -> bool:
        """Count a step of this worker, and average where its window ends.

        Args:
            samples: how many samples, or tokens, the step has learned from.

        Returns:
            Whether a window has ended. The model is the global copy then, the same bits on all workers.

        Raises:
            StepError: a parameter is not finite on some worker, on all of them; a parameter of this worker requires
                gradients that did not when this was made, and nothing is counted then; or this worker has left.
            CommunicationError: too few workers, a store that is out of reach, or a link that breaks again and again.
        """
        self._require_member()
        self._trained.of(self.model)
        self._heartbeat.require_sound()
        self._since, self._samples = self._since + 1, self._samples + samples
        if self._since < self.schedule.length(self._worker.shared.counts.depth):
            return False
        self._members = self._end_window()
        return True

    def sync(self) -> None:
        """Average now, whatever is left of the window: afterwards all workers have the same model.

        Every worker calls it at the same place, as after the last step; others come at the end of their window. Where
        this worker has made no step since the last average, nothing is averaged again.

        Raises:
            StepError, CommunicationError: as `step`.
        """
        self._require_member()
        self._trained.of(self.model)
        if self._since:
            self._members = self._end_window()

    def _require_member(self) -> None:
        if self.left:
            raise StepError("this worker has left its run: look at `left` in the loop, or make another Elastic")

    def _end_window(self) -> tuple[int, ...]:
        """Go through rounds until one is committed; return who goes on."""
        ended = self._worker.end_window(self._since, self._samples, self._leaving)
        self._since = self._samples = 0
        self.last = change_of(ended, self.windows)
        if not self.last.is_quiet:
            self.changes.append(self.last)
        assert ended.decision is not None
        if self._heartbeat.number in ended.decision.leaving:
            self._end()
        return tuple(sorted(ended.decision.staying + ended.decision.newcomers))

    # Who is there -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self._heartbeat.name

    @property
    def rank(self) -> int:
        """This worker's place among those that began the window, from 0 on. It may change with each window.

        Raises:
            StepError: this worker has left.
        """
        self._require_member()
        return self._members.index(self._heartbeat.number)

    @property
    def world_size(self) -> int:
        """How many workers began the window."""
        return len(self._members)

    @property
    def windows(self) -> int:
        """How many windows of the run were averaged."""
        return self._worker.shared.counts.windows

    @property
    def steps(self) -> int:
        """Steps of all workers in those windows, the same number on all of them."""
        return self._worker.shared.counts.steps

    @property
    def samples(self) -> int:
        """What `step` was told of them."""
        return self._worker.shared.counts.samples

    @property
    def sent_bytes(self) -> int:
        """What this worker has sent for averages."""
        return self.stats().wire_bytes

    @property
    def handed_bytes(self) -> int:
        """What it has handed to newcomers, and as it left."""
        return self._worker.handed_bytes

    def global_copy(self) -> dict[str, Tensor]:
        """What all workers began the window with, by parameter; copies on the CPU, in 32 bits at least."""
        return {name: copy.clone() for name, copy in self._worker.shared.parts[0].copy.copies.items()}

    averages_to_evaluate: ClassVar[bool] = False
    """All workers have what is evaluated already."""

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model has the global copy; afterwards this worker's own parameters are back.

        Nothing is communicated. Buffers stay as they are.
        """
        copy = self._worker.shared.parts[0].copy
        return swapped(copy.parameters, copy.copies)

    def stats(self) -> Stats:
        """Bytes and times of all averages so far, among whatever workers; `handed_bytes` are apart."""
        return self._worker.stats()

    def report(self) -> Report:
        """Return what averages cost and save in a step of training, see `Report`.

        It is of the workers at hand, since their list changed last: among others a window costs something else. Their
        links are not timed, since they last only as long as the list, so bytes are compared with DDP's and not times.

        Raises:
            StepError: nothing was averaged yet among the workers at hand, or this worker has left.
        """
        self._require_member()
        return dataclasses.replace(self._worker.report(self._members), method=self.method)

    # Leaving ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leave at the end of this window: take part in its average, and give what is owed then to another worker.

        May be called from a signal handler. `left` says when it is done.
        """
        self._leaving = True

    def leave_on(self, *signals: signal.Signals) -> None:
        """Have signals ask this worker to leave, such as the SIGTERM that comes before a machine is taken away.

        Call it in the main thread. The handlers stay after the end.
        """
        for number in signals:
            signal.signal(number, self._asked_to_leave)

    def _asked_to_leave(self, number: int, frame: object) -> None:
        self.leave()

    def close(self) -> None:
        """Stop at once: what this worker's window has changed is dropped. A second call does nothing.

        Call it after the last window, on all workers, or `leave` before.
        """
        if not self.left:
            self._end()

    def _end(self) -> None:
        self.left = True
        self._worker.close()
        self._heartbeat.close(leaves=True)
        has_left()

    def __enter__(self) -> Elastic:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # State --------------------------------------------------------------------------------------------------------

    kept_by: ClassVar[str] = (
        "its workers come and go, so no file belongs to each of them; save the state_dict() of one worker, or of each, "
        "and begin again with resume="
    )
    """What `gradwire.save` and `gradwire.load` say of it."""

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to begin again with `resume=`, in tensors, numbers and strings.

        It has the global copy, what the outer step remembers, buffers, counts, and what this worker owes. Steps of the
        window at hand are not in it. One of the workers' is enough; each with its own loses nothing that is owed.
        """
        return {"settings": self.settings, **self._worker.shared.state_dict(), "owed": self._worker.owed().state_dict()}

    def checked(self, state: Mapping[str, Any]) -> NoReturn:
        """Refuse a saved state: a run that is under way goes on from what its workers have.

        Raises:
            StateError: always.
        """
        raise StateError("a run that is under way takes up no saved state: begin another run (run=) with resume=")

    def take_up(self, checked: Any) -> None:
        """Nothing: `checked` has refused before."""


def require_settings(every: Schedule, outer: Outer, method: Reducer, lost: str, needs: Needs) -> None:
    """Refuse settings that fit nothing among workers that come and go.

    Raises:
        CompositionError: with what to change.
    """
    if lost not in get_args(Lost):
        raise CompositionError(f"lost={lost!r}: give one of {', '.join(map(repr, get_args(Lost)))}")
    if needs.least < 1 or needs.begin_with < needs.least:
        raise CompositionError(
            f"least={needs.least} and begin_with={needs.begin_with}: give 1 or more, and begin with the least at least"
        )
    if every.limit is not None:
        raise CompositionError("windows that drift ends want all workers in every step: give every= a number of steps")
    if outer.needs_rates:
        raise CompositionError(f"{outer} looks at the learning rates of all workers, which come and go: use DiLoCo()")
    if method.private:
        raise CompositionError(f"{method} accounts for a fixed number of ranks: use another method")
    if method.rank_multiple > 1:
        raise CompositionError(f"{method} has groups of ranks that are fixed: leave out node=")
    method.require_ranks(needs.least)


def _resumed(state: Mapping[str, Any], shared: SharedModel) -> Owed:
    """What a worker owes that begins with a saved state."""
    owed = Owed.from_state_dict(state.get("owed"))
    shared.load_state_dict(state)
    return owed
