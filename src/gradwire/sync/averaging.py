"""`Averaging`: ranks train alone for a window of steps, then average what they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from gradwire.core.errors import AttachError, StateError, StepError
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import DEADLINE_S, Session
from gradwire.session.names import TrainedParameters, named
from gradwire.session.pace import WindowPace
from gradwire.session.together import Together
from gradwire.sync.alike import require_same_start
from gradwire.sync.all_ranks import AllRanks
from gradwire.sync.averaging_options import Merge, require_optimizer, require_windows
from gradwire.sync.averaging_saved import AveragingState
from gradwire.sync.buffers import Buffers, Policy, persistent_buffers, require_policy
from gradwire.sync.copies import shards_of
from gradwire.sync.fragment import Fragment, require_finite_means, split, travelling
from gradwire.sync.moments import (
    FIRST,
    SECOND,
    Moments,
    first_moments,
    forget_,
    has_second_moments,
    require_moments,
    take_,
    travelling_moments,
)
from gradwire.sync.outer import Mean, Outer
from gradwire.sync.schedules import Schedule, as_schedule
from gradwire.sync.shards import like, local, reshard_
from gradwire.sync.swap import swapped
from gradwire.sync.wrapper import require_of_model


class Averaging(AveragingState):
    """Has ranks train alone for windows of steps, and averages their parameters at the end of each.

    Call `step` after each step of the optimizer, on every rank. With x_0 what all ranks began the window with and x_H
    what a rank has at its end, the next window begins with

        x = outer(x_0, mean over ranks of (x_H - x_0)),

    which is the mean of all x_H where `outer` is `Mean()`. Averaged are the trained parameters of the model: those that
    require gradients when this is made, whatever gradients exist later. An expert that a rank did not use counts with
    what that rank has of it.

    Args:
        model: alike on all ranks when this is made. Load checkpoints afterwards. It may be sharded by `fully_shard`,
            each copy over ranks of its own: then `group` are ranks that hold the same shard, and what is kept has the
            size of a shard.
        every: steps of a window, or a `Schedule`.
        method: how what changed travels: a reducer, or a spec such as `"int4"`. Error feedback works.
        outer: the outer step, such as `DiLoCo()`.
        warmup: so many steps of the run are windows of one step, without the outer step. With `every=` after it, this
            is post-local SGD (Lin et al. 2020).
        fragments: the model is averaged in so many parts of about equally many bytes, each at a time of its own in the
            window (Streaming DiLoCo, Douillard et al. 2025).
        delay: steps that go on while an average is under way. It is taken up after them.
        merge: the share that stays of what a rank has by then; the rest is the global copy's. 0.5 where there is a
            delay, and else 0. "progress" is another rule: the rank goes on from the global copy plus all that it has
            changed since the average began, so that no step is lost. With a delay as long as the window and the plain
            mean this is CoCoD-SGD (Shen et al. 2019, Algorithm 1).
        buffers: "average", "rank0" or "own", see `gradwire.sync.buffers.Policy`.
        optimizer: that trains the model on this rank. Needed for `SlowMo`, and where moments are averaged or reset.
        moments: "own", "average" or "reset": what becomes of the optimizer's moments at a window's end, see
            `gradwire.sync.moments.Moments`.
        group: whose ranks; None for the default group. Of a sharded model `mesh["replicate"].get_group()`.
        seed: of all random choices, the same on every rank.
        deadline_s: seconds after which a silent rank is an error.
        what: the call that errors speak of.

    Attributes:
        steps: those of the run so far.
        since: those of the window so far.
        fragments: the parts in which the model is averaged.
        seconds: of each the second moments of its parameters, where these travel; else empty.
        replaced: fragments in whose place a save has put others; they are closed with the rest.

    Raises:
        CompositionError: a window of no steps, more fragments than layers, and other settings that fit nothing.
        AttachError: models or settings that differ between ranks, by name; no process group; an optimizer of another
            model; a sharded model with a group of ranks that hold different shards, or that is sharded over a mesh of
            two dimensions.
        SpecError: a method that cannot be built.
        CommunicationError: a rank that did not come within `deadline_s`, by its number.

    Example:
        averaging = gradwire.sync.Averaging(model, every=8)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            averaging.step()
        averaging.sync()  # all ranks have the same model now
        averaging.close()
    """

    def __init__(
        self,
        model: nn.Module,
        every: int | Schedule = 8,
        method: Reducer | str = "none",
        *,
        outer: Outer | None = None,
        warmup: int = 0,
        fragments: int = 1,
        delay: int = 0,
        merge: Merge | None = None,
        buffers: Policy = "average",
        optimizer: torch.optim.Optimizer | None = None,
        moments: Moments = "own",
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
        what: str = "gradwire.sync.Averaging",
    ) -> None:
        self.schedule, self.outer = as_schedule(every), outer or Mean()
        self.warmup, self.delay = warmup, delay
        self.merge: Merge = (0.5 if delay else 0.0) if merge is None else merge
        self.model, self.optimizer = model, optimizer
        self.moments: Moments = moments
        require_policy(buffers)
        require_moments(moments)
        require_windows(self.schedule, warmup, fragments, delay, self.merge)
        require_optimizer(optimizer, moments, self.outer)
        self.settings = f"outer={self.outer}, fragments={fragments}, buffers={buffers!r}, moments={moments!r}"
        self.steps = self.since = self._synced = 0
        self.fragments: list[Fragment] = []
        self.seconds: list[Fragment] = []
        self.replaced: list[Fragment] = []
        reshard_(model)
        if optimizer is not None:
            require_of_model(optimizer, model)
        parameters = named(model)
        self._names = [kind + name for kind in ("", FIRST, SECOND) for name in parameters]
        self._trained = TrainedParameters(what, parameters)
        self.shards = shards_of(model, group, deadline_s, what)
        self.settings += self.shards.says

        def session(tensors: Mapping[str, Tensor]) -> Session:
            return Session(
                travelling(tensors),
                self._method,
                group=group,
                seed=seed,
                deadline_s=deadline_s,
                lane=self.fragments[0].session.lane if self.fragments else None,
                what=what,
                form=self.shards.form,
            )

        self._new_session, self._method = session, method

        def make() -> None:
            for names in split({name: p.numel() * p.element_size() for name, p in parameters.items()}, fragments):
                self._add(self.fragments, self.seconds, names)
            compared = {name: local(parameter) for name, parameter in parameters.items()}
            compared |= persistent_buffers(model) if buffers != "own" else {}
            require_same_start(self._whole_text(), compared, Together(what, self.session.lane, AttachError))

        try:
            self.shards.require_alike(f"{self._whole_text()}, method={method!r}")
            self.shards.attempt(make)
        except BaseException:
            self.close()
            raise
        self._lane = self.session.lane
        self.pace = self.session.pace = WindowPace.of("window", parameters, waits=not delay)
        self.pace.others = [part.session for part in self.parts[1:]]
        self._ranks = ranks = AllRanks(self.session, self.shards, local(next(iter(parameters.values()))).device)
        self.buffers = Buffers(
            model, buffers, lambda request: ranks.ask(request, self._where()), ranks.rank, ranks.world_size
        )

    def _add(self, fragments: list[Fragment], seconds: list[Fragment], names: Collection[str]) -> None:
        """Make the fragment of some parameters, and that of their second moments where these travel."""
        part = self.shards.held({name: parameter for name, parameter in named(self.model).items() if name in names})
        averages = self.optimizer if self.moments == "average" else None
        firsts = {FIRST + name: parameter for name, parameter in part.items()} if averages else {}
        fragments.append(Fragment(part, self.outer, self._new_session({**part, **firsts}), firsts))
        if averages and has_second_moments(averages):
            roots = {SECOND + name: parameter for name, parameter in part.items()}
            seconds.append(Fragment({}, self.outer, self._new_session(roots), roots))

    @override
    def dealt_out(self, parts: Sequence[Collection[str]]) -> tuple[list[Fragment], list[Fragment]]:
        fragments, seconds = list[Fragment](), list[Fragment]()
        for names in parts:
            self._add(fragments, seconds, names)
        return fragments, seconds

    def __repr__(self) -> str:
        peak = f" (largest {self.peak_share:.0%} of the bytes)" if len(self.fragments) > 1 else ""
        settings = self.settings.replace(", buffers=", f"{peak}, buffers=", 1)
        return f"Averaging({settings}, every={self.schedule}, step={self.steps}, by {self.session.reducer!r})"

    def _whole_text(self) -> str:
        """All settings, which must be the same on all ranks."""
        return f"{self.settings}, every={self.schedule}, warmup={self.warmup}, delay={self.delay}, merge={self.merge}"

    @property
    def session(self) -> Session:
        """The session of the first fragment: its `report()` tells what averaging costs, all fragments together."""
        return self.fragments[0].session

    @property
    def peak_share(self) -> float:
        """The part of all bytes that travels at once: that of the largest fragment. 1 / fragments is the least."""
        sizes = [sum(copy.nbytes for copy in fragment.copies.values()) for fragment in self.fragments]
        return max(sizes) / max(sum(sizes), 1)

    @property
    def parts(self) -> list[Fragment]:
        """All that is averaged, each with a session of its own."""
        return [*self.fragments, *self.seconds]

    def stats(self) -> Stats:
        """Return bytes and times so far, over all fragments, buffers and what ranks agreed on."""
        summed = Stats.summed(part.session.stats() for part in self.parts)
        return dataclasses.replace(summed, wire_bytes=summed.wire_bytes + self._ranks.sent_bytes)

    def _where(self) -> str:
        return f" in step {self.steps}"

    def change(self, method: Reducer | str) -> None:
        """Have what changed travel by another method, see `Session.change`. Every rank calls it between two steps.

        Raises:
            StepError: an average is under way. Nothing is changed then.
            SpecError, CompositionError, AttachError, CommunicationError: as `Session.change`.
        """
        self._require_none_under_way()
        for part in self.parts:
            part.session.change(method)
        self._method = method

    # Steps -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count a step of this rank, and average where a window ends. Every rank calls it equally often.

        A step that a `GradScaler` skipped counts too, so call this whether or not the optimizer moved.

        Returns:
            Whether a window has ended.

        Raises:
            StepError: a parameter is not finite on some rank, on all of them; a parameter of this rank requires
                gradients that did not when this was made, and nothing is counted or sent then; or this was closed.
            CommunicationError: a rank failed or fell silent, by its number.
        """
        self._require_planned()
        self.steps, self.since = self.steps + 1, self.since + 1
        with self.telling():
            self._end_those_due()
            ended = self._is_over()
            for fragment in self.fragments if ended and self._is_warm_up else self._beginning(ended):
                self._begin(fragment)
            if ended:
                self.pace.ended(self.since)
                self.since = 0
                self.buffers.average_()
        return ended

    def telling(self) -> AbstractContextManager[None]:
        """In a `with` block: tell the other ranks what is raised inside, see `Whole.telling`."""
        return self.shards.telling(self._lane)

    def _require_planned(self) -> None:
        reshard_(self.model)  # else parameters that FSDP2 has gathered stand in the place of its own
        self._trained.of(self.model)

    @property
    def _is_warm_up(self) -> bool:
        return self.steps <= self.warmup

    @property
    def _length(self) -> int:
        """Steps of the window at hand, which depend on where it began."""
        began = self.steps - self.since
        return 1 if began < self.warmup else self.schedule.length(began)

    def _is_over(self) -> bool:
        if self.since >= self._length:
            return True
        limit = self.schedule.limit
        return limit is not None and self._ranks.drift(self.fragments, self._where()) > limit

    def _beginning(self, ended: bool) -> list[Fragment]:
        """The fragments whose average begins after this step; the last one's with the window's end."""
        length, parts = self._length, len(self.fragments)
        begins = [-(-(i + 1) * length // parts) for i in range(parts)]
        *others, last = zip(self.fragments, begins, strict=True)
        found = [fragment for fragment, at in others if at == self.since]
        return [*found, last[0]] if ended else found

    def _begin(self, fragment: Fragment) -> None:
        self._end(fragment)  # where it is still under way: two averages of one tensor would mix
        delay = 0 if self._is_warm_up else self.delay
        self._send(fragment, self.steps + delay, keeps_progress=self.merge == "progress" and delay > 0)
        if not delay:
            self._end(fragment)

    def _send(self, fragment: Fragment, due: int, *, keeps_progress: bool = False) -> None:
        moments, rates = self._travelling_moments(fragment), self._rates()
        for part in self._parts(fragment):
            part.begin(due, moments, rates, keeps_progress=keeps_progress)

    def _parts(self, fragment: Fragment) -> list[Fragment]:
        """A fragment, and the second moments of its parameters where these travel."""
        return [fragment, *self.seconds[(at := self.fragments.index(fragment)) : at + 1]]

    def _end_those_due(self) -> None:
        for fragment in self.fragments:
            if fragment.due <= self.steps:
                self._end(fragment)

    def _end(self, fragment: Fragment, own: float | None = None) -> None:
        if not fragment.is_under_way:
            return
        is_warm_up, parts = fragment.due <= self.warmup, self._parts(fragment)
        require_finite_means(parts, lambda name: self.shards.first(name, self._names, self._where()))
        came = {name for part in parts for name in part.deltas}
        moments = {name: its for name, its in self._travelling_moments(fragment).items() if name in came}
        for part in parts:
            keeps_progress = bool(part.sent)
            part.end(is_warm_up)
            if keeps_progress:
                part.merge_progress(moments)
            else:
                share = 0.0 if self.merge == "progress" else self.merge
                part.merge(moments, share if own is None else own)
        if moments and self.optimizer is not None:
            take_(self.optimizer, fragment.parameters, moments)
        reshard_(self.model)
        if self.moments == "reset" and not is_warm_up and self.optimizer is not None:
            forget_(first_moments(self.optimizer, fragment.parameters).values())

    def _rates(self) -> dict[str, float]:
        if self.optimizer is None or not self.outer.needs_rates:
            return {}
        return self._ranks.rates(self.optimizer, self.fragments, self._where())

    def _travelling_moments(self, fragment: Fragment) -> dict[str, Tensor]:
        """Those of this rank, by the names under which they travel."""
        if self.moments != "average" or self.optimizer is None:
            return {}
        return travelling_moments(self.optimizer, fragment.parameters, bool(self.seconds))

    def sync(self) -> None:
        """Average now, whatever is left of the window: afterwards all ranks have the same model.

        Every rank calls it at the same place, as after the last step. What is under way is taken up first. Where no
        rank has made a step since the last average, nothing is averaged again.

        Raises:
            StepError, CommunicationError: as `step`.
        """
        self._require_planned()
        with self.telling():
            for fragment in self.fragments:
                self._end(fragment)
            if self._ranks.largest([self._apart()], self._where())[0]:
                for fragment in self.fragments:
                    self._send(fragment, self.steps)
                    self._end(fragment, own=0.0)
                self.pace.ended(self.since)
                self.buffers.average_()
        self.since, self._synced = 0, self.steps

    def _apart(self) -> float:
        """How many steps ago this rank may have had the same model as the others; 0 if it has now."""
        return 0.0 if self.is_at_once and not self.since else float(self.steps - self._synced)

    @property
    def is_at_once(self) -> bool:
        """Whether the end of a window leaves no difference between ranks."""
        return len(self.fragments) == 1 and self.merge in (0.0, "progress") and not self.delay

    def begin_anew(self) -> None:
        """Begin a window with what this rank has now, on all ranks of the group, where they have the same.

        Raises:
            StepError: an average is under way.
        """
        self._require_none_under_way()
        for fragment in self.fragments:
            fragment.begin_anew()
        self.buffers.begin_anew()
        self.since, self._synced = 0, self.steps

    def _require_none_under_way(self) -> None:
        if any(fragment.is_under_way for fragment in self.fragments):
            raise StepError("an average is under way, of what the model was before: call sync() before")

    # The global copy ----------------------------------------------------------------------------------------------

    def global_copy(self) -> dict[str, Tensor]:
        """What all ranks agreed on last, by parameter; copies, in 32 bits at least. Of a sharded model `DTensor`s."""
        parameters = {name: p for fragment in self.fragments for name, p in fragment.parameters.items()}
        return {name: like(parameters[name], copy.clone()) for name, copy in self._copies().items()}

    def _copies(self) -> dict[str, Tensor]:
        return {name: fragment.copies[name] for fragment in self.fragments for name in fragment.parameters}

    averages_to_evaluate: ClassVar[bool] = False
    """All ranks have what is evaluated already."""

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model has the global copy; afterwards this rank's own parameters are back.

        Evaluate so in mid-window: all ranks measure the same model. Nothing is communicated. Buffers stay as they are.
        """
        parameters = {name: p for fragment in self.fragments for name, p in fragment.parameters.items()}
        return swapped(parameters, self._copies(), lambda: reshard_(self.model))

    def together(self, call: str) -> Together:
        """All ranks that have a part in this: those of all shards."""
        return self.shards.together(call, self._lane, StateError)

    # Ending ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop communicating; a second call does nothing. What is under way is forgotten: call `sync` before."""
        for part in (*self.seconds, *reversed(self.fragments), *reversed(self.replaced)):  # the first one has the lane
            part.session.close()
        self.shards.close()

    def __enter__(self) -> Averaging:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._lane.failures.leave_word(error)
            self.shards.leave_word(error)
        self.close()
