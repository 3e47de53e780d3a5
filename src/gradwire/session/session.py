"""`Session`: what training needs around a method, without any framework."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.choosing.automatic import accuracy_of
from gradwire.core import saved
from gradwire.core.errors import StepError
from gradwire.core.grain import ParameterSpec
from gradwire.core.roles import roles_of
from gradwire.core.save_folder import SavedRun
from gradwire.drivers.engine import Engine
from gradwire.drivers.host_memory import host_memory
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.window import Window
from gradwire.reducers.base import Reducer
from gradwire.session.automatic import Automatic
from gradwire.session.ending import Ending
from gradwire.session.feed import Feed
from gradwire.session.figures import Figures, described_ranks, links_file, wants_times
from gradwire.session.form import WHOLE, Form
from gradwire.session.lane import Lane, group_of
from gradwire.session.making import WEIGHED, Maker
from gradwire.session.names import TrainedParameters, gradients_of, named, require_all_served, require_whole
from gradwire.session.non_finite import Culprits, NonFiniteWatch, require_reaction
from gradwire.session.overlap_settings import OverlapSettings, settings_of
from gradwire.session.own_file import require_own_file
from gradwire.session.repeated import RepeatedExchanges
from gradwire.session.states import packed, take_up, unpacked
from gradwire.session.step import SessionStep
from gradwire.session.watching import watch

DEADLINE_S = 300.0

Tensors = nn.Module | Mapping[str, Tensor]
"""A model, whose trained parameters count, or tensors by name."""


class Session(Figures):
    """Combines named tensors of all ranks of a process group by a method, step after step.

    Every rank makes one at the same place, with the same method and tensors of the same names, shapes and dtypes; what
    differs is told on every rank. The session plans grains, measures what `exchange=auto` asks for, and compiles what
    the method uses. It communicates over a process group of its own. Use it where no DDP is: in a plain training loop,
    or for tensors that are no gradients.

    Args:
        tensors: a model, whose parameters that require gradients count, or named tensors like those to be combined.
        method: a reducer, or a spec such as `"topk:0.01"`; or `"auto"`, which chooses by what it measures, within a
            class of accuracy: `"auto:lossless"`, `"auto:safe"` or `"auto:bold"` (docs/choosing.md).
        group: whose ranks; None for the default group.
        seed: of all random choices, the same on every rank.
        deadline_s: seconds after which a silent rank is an error.
        grain_numel: elements that are encoded together at most (default: as of `gradwire.attach`).
        scaler: the loss scaler of the training loop, if it has one: residuals follow its scale.
        checksum: send a CRC-32 with each payload, see `gradwire.attach`.
        lane: communication that others have made and use too, whose group and deadline count then. It is not closed
            with the session, and the link is not timed, since others may be using it. A `DirectLane` is over a group
            that the caller has made, without a default group. Without a lane the link is timed for `report()`, unless
            the environment has `GRADWIRE_TIME_LINK=0` on all ranks.
        what: the call that errors speak of.
        form: how tensors become grains; ports that do not deliver whole ones have one of their own.
        check_every: steps between two comparisons of the parameters of all ranks, which are `tensors` then: a model, or
            parameters by name. A comparison is made at the end of a step, of what the optimizer has made of the steps
            before; it reads all parameters and takes a few words through the store. None: they are not compared.
        on_drift: what happens where they differ, "warn", "stop" or "repair", see `gradwire.check_drift`.
        overlap: when gradients travel, as `gradwire.overlap.tune` has found it: its settings, or the file that they
            were saved to. A save has them, and a session that loads it goes on by them.
        on_non_finite: what happens where the mean of a step is not finite, and no `scaler` is there to skip the step.
            "warn": a `NonFiniteWarning`, once; the optimizer gets NaN. "skip": the optimizer gets nothing. After
            `reduce_(model)` gradients are None then, on every rank, and what the session remembers is as it was before
            the step. Named tensors hold NaN, and `skipped` tells. Methods that do not send a flag anyway look at the
            mean once more, and for a sharded model send a flag; on a GPU the end of a step waits for the device.
        records: the folder that this rank's flight record is written into when the run dies, for `gradwire stacks`;
            None: that of `GRADWIRE_RECORDS` in the environment, if there is one. With a `lane`: that of the lane.
        residuals: "host" keeps what the method owes in pinned memory of the host between steps, where tensors are on a
            GPU: no bit changes, and a save loads with either word. On a CPU it changes nothing, and a warning says so.

    Attributes:
        overlap: the settings of when gradients travel, in force.
        device: where the tensors lie.
        held_model: returns the model whose gradients are combined, where one is known and somebody still has it.
        repeated: warns of a loop that exchanges gradients in every micro-batch.
        begun_with: the method before any `change`, and what else the form says.
        saved_as: the run that its saves are of; None before `gradwire.save` and `gradwire.load`.
        non_finite: warns of gradients that are not finite.

    Raises:
        AttachError: ranks that disagree, tensors that cannot be served, or no process group.
        CommunicationError: a rank that did not come within `deadline_s`, by its number.
        SpecError, CompositionError: a method that cannot be built.

    Example:
        session = gradwire.Session(model, "int4", check_every=1000, on_drift="repair")
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            session.reduce_(model)  # every gradient is now the mean over ranks
            optimizer.step()
        session.close()
    """

    @torch.inference_mode(False)  # else no step outside of it could write to what is made here
    def __init__(
        self,
        tensors: Tensors,
        method: Reducer | str,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
        grain_numel: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        checksum: bool = False,
        lane: Lane | None = None,
        what: str = "gradwire.Session",
        form: Form = WHOLE,
        check_every: int | None = None,
        on_drift: str = "warn",
        on_non_finite: str = "warn",
        overlap: OverlapSettings | str | Path | None = None,
        records: str | Path | None = None,
        residuals: str = "device",
    ) -> None:
        require_reaction(on_non_finite, scaler)
        self.overlap = settings_of(overlap)
        self.when_adopted: Callable[[OverlapSettings], None] | None = None  # of a port, which has buckets, say
        self.on_non_finite = on_non_finite
        asks = accuracy_of(method) if what in WEIGHED else None  # of others a spec that chooses is refused
        method = method if asks is None else "none"
        self.reducer, self.uncounted, self.estimates = form.method(method), form.uncounted, form.times_link
        self.method = str(method)
        self.saved_as: SavedRun | None = None
        self._form, self._fed_by = form, form.fed_by
        require_whole(tensors, what)
        self.held_model: Callable[[], nn.Module | None] = lambda: None
        roles: Mapping[Tensor, str] = {}
        if isinstance(tensors, nn.Module):
            self.held_model, roles = weakref.ref(tensors), roles_of(tensors)
        self.repeated = RepeatedExchanges()
        specs = [
            ParameterSpec(name, tuple(t.shape), t.dtype, t.device, roles.get(t) or form.roles.get(name, ""))
            for name, t in named(tensors).items()
        ]
        self._trained = TrainedParameters(what, {spec.name: None for spec in specs})
        self.device = specs[0].device if specs else torch.device("cpu")
        require_all_served(specs, checksum)
        host = host_memory(residuals, self.device)
        self._watch = None if check_every is None else watch(tensors, check_every, on_drift)
        group = lane.group if lane else group_of(group)
        self.reducer.require_ranks(group.size())
        self.automatic = None if asks is None else Automatic.of(asks, specs, form, grain_numel, group.size())
        self.lane = lane or Lane(group, self.device, deadline_s, what, records)
        self.transport = transport = self.lane.transport()
        described, members = described_ranks(group)
        self._links = LinkProfiler(
            transport, self.device, links_file(group), described, backend=group.name(), members=members
        )
        self._link_times, self._board = None, None
        self._ending = Ending(self, self.lane, transport, shares_lane=lane is not None)
        try:
            self._maker = Maker(
                self.lane,
                transport,
                self._links,
                specs,
                grain_numel=grain_numel,
                checksum=checksum,
                what=what,
                form=form,
                says=", ".join(self._settings()),
                guards=on_non_finite == "skip",
                overlap=self.overlap,
                host=host,
            )
            self.reducer, first = self._maker.first(self.reducer, seed)
            self.begun_with = ", ".join(filter(None, (repr(self.reducer), form.says)))
            self.feed = Feed(first, specs, Window(form.caps), scaler, self.lane.executor.run)
            self.feed.log = self.lane.log
            if lane is None and form.times_link and wants_times():
                self._time_link()
            if self.automatic is not None:
                self.automatic.begin(self, self._link_times)
            for note in self._links.notes:
                warnings.warn(note, stacklevel=3)
            culprits = Culprits(self.lane.store, f"{self.lane.name}/{specs[0].name}", group.rank())
            self.non_finite = NonFiniteWatch(culprits, scaler, on_non_finite, self.device)
        except BaseException:
            self.close(at_once=True)
            raise

    def _settings(self) -> Iterator[str]:
        """What must be the same on all ranks besides the method."""
        if self._watch is not None:
            yield self._watch.says
        if not wants_times():
            yield "the link is not timed"
        if self._links.has_file:
            yield "what is measured of links is kept in a file"
        if told := self.overlap.as_dict():
            yield f"overlap={told}"
        if self.automatic is not None:
            yield f"auto:{self.automatic.accuracy}"
        if self.on_non_finite != "warn":
            yield f"on_non_finite={self.on_non_finite!r}"

    def __repr__(self) -> str:
        return f"Session({self.reducer!r}, grains={len(self.engine.plan.units)}, step={self.engine.index})"

    @property
    def session(self) -> Session:
        """Itself: what `attach` returned once was a handle with a session."""
        return self

    # Another method ----------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def change(self, method: Reducer | str) -> None:
        """Go on with another method. Every rank must call it at the same place, between two steps.

        What is owed under the old method is carried over, so that the sum over ranks of what was given is delivered
        all the same: added to the new method's residuals, or where it keeps none, to the gradients of the next step.
        What a shard's owner owes of the mean it owes n times over from then on, as one of n ranks. Factors, momentum
        and estimates are forgotten. The step's number goes on, so a `warmup=` counts from the beginning of the run;
        `stats` and `report` begin anew.

        A change that fails leaves the old method in place, on every rank.

        Args:
            method: a reducer, or a spec such as `"topk:0.01"`.

        Raises:
            SpecError, CompositionError: a method that cannot be built here.
            AttachError: ranks that want different methods, a rank where making it failed, or a private method: its
                steps are accounted for together, and what is owed was clipped by nobody.
            StepError: a step is under way, or the session is closed.
            CommunicationError: a rank that did not call it within `deadline_s`, by its number.

        Example:
            session = gradwire.Session(model, "none")
            for index, (inputs, targets) in enumerate(loader):
                if index == 100:
                    session.change("topk:0.01")
                ...
        """
        self.require_open()
        self.feed.occupy()
        try:
            if self.window.under_way:
                raise StepError("a step of this session is under way: change the method between two steps")
            self.lane.require_sound()
            self.reducer, engine = self._maker.next(method, self.reducer, self.engine)
            self.method = str(method)
            self.feed.serve_by(engine, Window(self.window.caps))
        finally:
            self.feed.vacate()

    def served_by(self, method: str) -> Reducer:
        """Return the reducer that a spec names here."""
        return self._form.method(method)

    def remade(self, overlap: OverlapSettings, reducer: Reducer | None = None) -> Engine:
        """Return an engine under other settings of when gradients travel, for `adopt`; nothing is communicated."""
        return self._maker.remade(self.engine, overlap, reducer)

    def adopt(self, overlap: OverlapSettings, engine: Engine, reducer: Reducer | None = None) -> None:
        """Go on with an engine that `remade` has returned, and its settings: on every rank, before or between steps."""
        self.overlap = overlap
        self._maker.adopt(overlap, reducer)
        self.feed.serve_by(engine, Window(self.window.caps))
        if self.when_adopted is not None:
            self.when_adopted(overlap)

    def before_step(self) -> None:
        """Let `auto` choose, where it is time to: every rank calls it before it begins a step."""
        if self.automatic is not None:
            self.automatic.before_step(self)

    # Steps -------------------------------------------------------------------------------------------------------

    def reduce_(self, tensors: Tensors) -> None:
        """Combine the tensors of all ranks, in place: each rank has the result in the tensors it gave.

        Args:
            tensors: a model, whose gradients are combined, or a mapping from names to tensors; as planned, all of them.

        Raises:
            StepError: a tensor is missing, unknown, or of another shape, dtype or device than planned; a step is under
                way already, in another thread too; or the session is closed. Nothing is communicated then and no step
                has begun: the other ranks wait until this one calls it with the right tensors.
            CommunicationError: a rank failed or fell silent, by its number.
        """
        trained = self._trained.all_of(tensors) if isinstance(tensors, nn.Module) else {}
        given = gradients_of(trained) if isinstance(tensors, nn.Module) else dict(tensors)
        step = self.step()
        step.require_fit(given)
        with step:
            step.deliver_all(given)
        self.repeated.exchanged(trained.values(), self.stats)
        if self.skipped:
            for parameter in trained.values():
                parameter.grad = None

    def step(self) -> SessionStep:
        """Begin a step whose tensors come one by one; use it in a `with` block, whose end waits for the results.

        Example:
            with session.step() as step:
                for name, gradient in as_they_become_ready():
                    step.deliver(name, gradient)  # returns at once; leave it alone until the block ends
            # every tensor that was delivered holds its mean now

        Raises:
            StepError: a step is under way already, the session is closed, or it is that of a sharded model.
            CommunicationError: an earlier step failed.
        """
        if self._fed_by:
            raise StepError(f"this session is fed by {self._fed_by}: make a gradwire.Session of your own for tensors")
        if self.is_open:
            self.before_step()
        return SessionStep(self.feed, self.lane, lambda: self.is_open, self._step_ended)

    def weigh(self, weight: float) -> None:
        """Say what this rank counts for in the step that begins next, where the method has `weights=given`.

        The result of the step is sum_i w_i x_i / sum_i w_i over ranks i. Where x_i is a mean over the samples of rank i
        and w_i their number, it is the mean over all samples, also where last batches are uneven. Every rank calls it
        before each step: before `backward()`, `reduce_` or `step()`; where gradients are accumulated, before the
        backward pass that synchronises them. A second call before the step counts in place of the first.

        A weight that makes no mean is refused in the step, in one sentence on all ranks, which names its rank: one that
        is negative, not finite or no number, one that was not given, or all of them 0. The session ends with it.

        Args:
            weight: w_i, 0 or more, in any unit that is the same on all ranks: a number of samples, a trust score.

        Raises:
            StepError: a method without `weights=given`.

        Example:
            session = gradwire.attach(ddp, "int4,weights=given")
            for inputs, targets in loader:
                session.weigh(len(inputs))
                loss_of(ddp(inputs), targets).backward()
        """
        if not self.engine.weighs:
            raise StepError(f"{self.method} takes no weights: attach with weights=given, as in 'int4,weights=given'")
        try:
            self.feed.weight = float(weight)
        except (TypeError, ValueError):  # told in the step, on all ranks: others may be in a collective of DDP's by now
            self.feed.weight = math.nan

    def _step_ended(self) -> None:
        """What is looked at once all tensors hold their means."""
        self.warn_of_non_finite()
        if self._watch is not None:  # every rank's step has ended, since means are here
            self._watch.step_ended(self)

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called."""
        return not self._ending.has_come

    def require_open(self) -> None:
        """Refuse what a closed session cannot do."""
        if not self.is_open:
            raise StepError("this session is closed: make a new one")

    @property
    def names(self) -> Iterable[str]:
        """The planned tensors, in the order in which they were given."""
        return self.feed.names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the planned tensors, by name."""
        return {name: self.feed.planned(name).shape for name in self.names}

    @property
    def skipped(self) -> bool:
        """Whether the optimizer is to skip the last step, since its mean is not finite; alike on all ranks.

        False unless `on_non_finite` is "skip".
        """
        return self.on_non_finite == "skip" and self.engine.last_was_bad()

    def warn_of_non_finite(self) -> None:
        """Say once that a gradient was not finite, where no loss scaler is known that would skip such steps."""
        self.non_finite.look(self.engine, self.window, self.skipped)

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> saved.Saved:
        """Return this rank's state by name; save one file a rank.

        Resuming with the same world size is exact; for another, pass all ranks' states to `gradwire.reshard`.
        `gradwire.save` and `gradwire.load` do all of it, files included.

        Raises:
            StateError: asked for by `torch.distributed.checkpoint`, which would keep what one rank has.
        """
        require_own_file(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        return packed(self)

    def load_state_dict(self, state: saved.Saved) -> None:
        """Take up a saved state, and what its method's `clip` was of.

        Raises:
            StateError: a damaged state, or one of another version, method, rank, world size or model; nothing is
                changed then.
        """
        take_up(self, unpacked(self, state))

    # Ending ------------------------------------------------------------------------------------------------------

    def close(self, at_once: bool = False) -> None:
        """Stop communicating: end the threads, then destroy the process groups. A second call does nothing.

        Args:
            at_once: do not wait for a step that is under way, as after an interrupt. A thread that is stuck in it ends
                at `deadline_s`, or with the process.
        """
        self._ending.come(at_once)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.lane.failures.leave_word(error)
        self.close(at_once=error is not None and not isinstance(error, Exception))
