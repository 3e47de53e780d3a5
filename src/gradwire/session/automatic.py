"""A session whose method is `auto`: it begins with `none`, measures, and goes on with what suits link and model.

All that decides is agreed upon: at fixed steps every rank tells the others what it has measured, through the store, and
all of them decide by the same numbers. A rank that fails or does not come is named there, as in `Session.change`, which
carries over what is owed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from gradwire.choosing.accuracy import allowed
from gradwire.choosing.automatic import Chosen, StepPace, decide, demands_of
from gradwire.choosing.coding import plan_coding_s
from gradwire.choosing.forecast import BACKWARD, PlanMessages
from gradwire.core.checked import checked, facts
from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError, CompositionError, StateError
from gradwire.core.grain import ParameterSpec
from gradwire.core.link import Link
from gradwire.core.record import Count
from gradwire.drivers.contention import Contention, contention, message
from gradwire.drivers.engine import Engine
from gradwire.drivers.interpreter import Transport, ask
from gradwire.drivers.plan import Plan
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.window import START_UP, Sample, Window
from gradwire.session.form import Form
from gradwire.session.lane import Lane
from gradwire.session.together import Together
from gradwire.topology.identity import HostIdentity
from gradwire.topology.processors import Processors, has_core, own_cores
from gradwire.topology.reduction_times import ReductionTimes

CHOOSES_AFTER = START_UP + 5
"""Steps under `none` before the choice: a window leaves the first ones out."""
EARLY_AFTER, EARLY_SHARE = 3, 0.5
"""It chooses after so many steps already where communication is this share of the last one on all ranks: seven more
steps under `none` would take longer than what is gained by knowing the pace well. It chooses again after ten others."""
CODING_REPEATS = 1
"""Timed steps of each candidate: whoever begins a session waits for them."""
LOOKS_EVERY = 20
"""Steps between two looks after that. Ranks tell each other through the store whether their steps have become longer or
shorter, and where one says so, or in each `PROBES_EVERY`th look, the link is probed."""
PROBES_EVERY = 5
RECENT = 5
"""Steps whose median tells how long steps take at a look."""
OTHERWISE = 1.2
"""How many times as long as at the first look after a choice steps take, or how many times as short, where they have
changed: then the link is probed, and where they have in two looks in a row, it chooses again."""
CHANGED = 1.5
"""How many times longer or shorter a message takes on a link that has changed; in two looks in a row, since something
else may have the link for a moment."""
PROBE_S = 0.02
"""What the message of a look takes about: long enough to be made of bytes and not of latency."""
LEAST_PROBE, MOST_PROBE = 1 << 14, 1 << 22
PROBES = 2
"""Messages of a look, of which the quickest counts."""
FEWEST_SAMPLES = 3

BY_HAND = "the training loop called session.change"
"""Why a method is held that `auto` has not chosen: it chooses no more after that."""

_REMEDY = ": pass what state_dict() returned"
_FORM = facts({"step": Count, "spec": str, "why": str, "runner_up": str})


class Choosing(Protocol):
    """The session that is chosen for."""

    lane: Lane
    transport: GroupTransport
    method: str

    @property
    def engine(self) -> Engine:
        """What runs the method at hand."""
        ...

    @property
    def window(self) -> Window:
        """Figures of the last steps."""
        ...

    def timed_link(self) -> ReductionTimes | None:
        """How long all-reduces take; None with one rank."""
        ...

    def change(self, method: str) -> None:
        """Go on with another method."""
        ...


def _ranks(lane: Lane) -> Together:
    """The ranks of a lane, which decide together."""
    return Together("auto", lane, AttachError)


class Automatic:
    """What `auto` has measured and chosen in a run.

    Args:
        accuracy: the class that the user names.
        plans: by which the gradients travel under each candidate, in the order in which they lose more.
        sent_early: whether gradients are sent while the backward pass goes on.
        world_size: ranks.

    Attributes:
        choices: so far, in order; the last one is the training loop's own where that has called `Session.change`.
        is_over: whether it has, after which nothing is chosen any more.
    """

    def __init__(
        self,
        accuracy: str,
        plans: Mapping[str, Plan],
        sent_early: bool,
        world_size: int,
    ) -> None:
        self.accuracy, self.choices = accuracy, list[Chosen]()
        self._plans, self._sent_early = plans, sent_early
        self.is_over = False
        self._world_size, self._alone = world_size, world_size == 1
        self._first: int | None = None  # step that this session, or what was loaded, has begun with
        self._last = -1  # step before which this was called last
        self._link_off = self._steps_off = 0  # looks in a row at which either was not as it had been
        self._looks, self._due = 0, CHOOSES_AFTER
        self._taken = "none"
        self._link: Link | None = None
        self._beside: Contention | None = None
        self._processors, self._has_core = Processors(1.0, 1), True  # until `begin` has asked the ranks
        self._probe_nbytes, self._probe_s = LEAST_PROBE, 0.0
        self._pace: StepPace | None = None
        self._coding_s, self._messages = tuple[float, ...](), dict[str, PlanMessages]()
        self._usual_s = 0.0  # of a step on this rank at the first look after a choice; 0 until then

    @classmethod
    def of(
        cls, accuracy: str, model: Sequence[ParameterSpec], form: Form, grain_numel: int | None, world_size: int
    ) -> Automatic:
        """Return what chooses for a model, among the candidates that its form can be served by.

        Args:
            accuracy: the class that the user names.
            model: the trained parameters.
            form: of the session.
            grain_numel: as of the session.
            world_size: ranks.

        Raises:
            AttachError: parameters that are not on the CPU, whose steps are not timed.
        """
        kinds = sorted({spec.device.type for spec in model} - {"cpu"})
        if kinds:
            raise AttachError(
                f"auto measures steps on the CPU, and the parameters are on {kinds[0]}: name a method, such as the one "
                "that `gradwire choose` tells for your link"
            )
        plans = dict[str, Plan]()
        for candidate in allowed(accuracy):
            with contextlib.suppress(CompositionError):  # such as PowerSGD, which wants whole matrices, for shards
                plans[candidate.spec] = form.plan(model, form.method(candidate.spec), grain_numel)
        return cls(accuracy, plans, form.sends_early, world_size)

    def __str__(self) -> str:
        if self.is_over:
            return f"auto:{self.accuracy} chooses no more, since session.change was called"
        if self._alone:
            return f"auto:{self.accuracy} stays with none: there is one rank, and nothing is sent"
        if not self.choices:
            return (
                f"auto:{self.accuracy} has not chosen yet: it does so after {CHOOSES_AFTER} steps that communicate, or "
                f"after {EARLY_AFTER} where these are mostly communication"
            )
        *_, last = self.choices
        other = f"; the runner-up was {last.runner_up}" if last.runner_up else ""
        again = ", ".join(f'"{each.spec}" before step {each.step}' for each in self.choices)
        return (
            f"auto:{self.accuracy} took {last.spec} from step {last.step} on, since {last.why}{other}. The same run "
            f'without auto: begin with "none", and call session.change with {again}'
        )

    def begin(self, session: Choosing, times: ReductionTimes | None) -> None:
        """Learn what can be known before the first step: every rank must call it.

        That is what each candidate codes and sends, and what messages and computing take from each other.

        Args:
            session: that is chosen for.
            times: of the link, if they are known already.
        """
        if self._alone:
            return
        self._coding_s = _ranks(session.lane).attempt(self._learn_plans).own
        self._learn_processors(session)
        if times is not None:
            self._learn_contention(session, message(times.link, self._world_size))

    def _learn_contention(self, session: Choosing, link: Link) -> None:
        """Learn what messages and computing take from each other, if they go on at the same time."""
        if self._sent_early:
            found = session.lane.call(lambda: contention(session.transport, link, self._has_core), " in auto")
            self._beside = found.among(self._processors)

    def _learn_plans(self) -> tuple[float, ...]:
        n = self._world_size
        self._messages = {spec: PlanMessages.of(planned, n) for spec, planned in self._plans.items()}
        return tuple(plan_coding_s(planned, n, CODING_REPEATS) for planned in self._plans.values())

    def before_step(self, session: Choosing) -> None:
        """Choose, or look at the link, where it is time to: called on every rank before a step begins.

        A step that did not begin, since a rank gave it the wrong tensors, counts once: its number is what counts. Once
        the training loop has called `Session.change` itself, nothing is chosen any more.
        """
        self.note_method(session.method, session.engine.index)
        if self.is_over:
            return
        step, before, self._last = session.engine.index, self._last, session.engine.index
        if self._first is None:
            self._first = step
        if self._alone or step == before:
            return
        since = step - self._first - self._due
        if step - self._first == EARLY_AFTER:
            self._choose_early(session)
        elif since >= 0 and since % LOOKS_EVERY == 0:
            if since == 0 or self._link is None:  # a rank had no step to tell of
                self._choose(session)
            else:
                self._look(session)

    def note_method(self, method: str, step: int) -> None:
        """Notice by the method of the next step whether the training loop has called `Session.change` itself."""
        if method != self._taken:
            self.is_over, self._taken = True, method
            self.choices.append(Chosen(step, method, BY_HAND))

    # Choosing --------------------------------------------------------------------------------------------------------

    def _choose_early(self, session: Choosing) -> None:
        """Choose by one step, if most of it was communication on every rank."""
        share = communicated(session.window)
        if min(_ranks(session.lane).gather(share)) >= EARLY_SHARE:
            self._choose(session)
            self._due = EARLY_AFTER + CHOOSES_AFTER

    def _choose(self, session: Choosing) -> None:
        """Choose by what is measured now, or by what is known of link and coding already."""
        if min(_ranks(session.lane).gather(self._knows_pace(session))):
            if self._link is None:
                self._measure(session)
            else:
                self._learn_pace(session)
            self._decide(session)

    def _learn_pace(self, session: Choosing) -> None:
        """Learn the pace of the slowest rank."""
        pace = StepPace.slowest(self._agreed(session, lambda: self._own_pace(session)))
        self._pace = pace._replace(crowding=self._processors.crowding)

    def _measure(self, session: Choosing) -> None:
        """Learn the link, what messages and computing take from each other, and the pace of the slowest rank."""
        times = session.timed_link()
        assert times is not None, "there are several ranks"
        link = message(times.link, self._world_size)
        if self._beside is None:
            self._learn_contention(session, link)
        wanted = int(PROBE_S / max(times.link.beta_s_per_byte, 1e-12))
        self._probe_nbytes = 4 * (min(max(wanted, LEAST_PROBE), MOST_PROBE) // 4)
        self._learn_pace(session)
        self._probe_s = self._probed(session)
        self._link = link

    def _agreed(self, session: Choosing, own: Callable[[], StepPace]) -> list[StepPace]:
        """What every rank has measured of its own steps."""
        said = _ranks(session.lane).attempt(own, words=list).words
        return [StepPace(told[0], told[1], tuple(told[2]), *told[3:]) for told in said]

    def _learn_processors(self, session: Choosing) -> None:
        """Learn those of the rank that has the fewest for itself, and whether there is a core for this one."""
        own = [HostIdentity.here().machine, own_cores(), torch.get_num_threads()]
        machines, cores, threads = zip(*_ranks(session.lane).gather(own), strict=True)
        self._processors = Processors.fewest(machines, cores, threads)
        self._has_core = has_core(session.transport.rank, machines, cores, threads)

    def _knows_pace(self, session: Choosing) -> bool:
        return bool(session.window.latest or self._pace)

    def _own_pace(self, session: Choosing) -> StepPace:
        found, latest = list(session.window.samples)[-LOOKS_EVERY:], session.window.latest
        if len(found) < FEWEST_SAMPLES and self._pace is not None:
            return self._pace
        assert latest is not None, "a rank that knows no pace does not come here"
        return pace_of(found or [latest], self._coding_s, self._sent_early)

    def _decide(self, session: Choosing) -> None:
        """Go on with the best method, if it is another one."""
        assert self._link is not None
        assert self._pace is not None
        step, now = session.engine.index, session.method
        demands = demands_of(self._messages, self._link, self._pace, self._beside)
        choice = decide(demands, self._pace, step, now)
        if choice.spec != now:
            session.change(choice.spec)
            self._taken, self._usual_s = choice.spec, 0.0
        if choice.spec != now or not self.choices:
            self.choices.append(choice)

    # Looking again ---------------------------------------------------------------------------------------------------

    def _look(self, session: Choosing) -> None:
        """See whether link and steps are what they were; where one of them is not, twice in a row, decide again."""
        self._looks += 1
        recent_s = recent_step_s(session.window)
        change = self._change_of_steps(session, recent_s)
        if 0 < change <= OTHERWISE and not self._link_off and self._looks % PROBES_EVERY:
            self._steps_off = 0
            return
        ratio = self._probed(session) / self._probe_s
        self._link_off = 0 if 1 / CHANGED <= ratio <= CHANGED else self._link_off + 1
        self._steps_off = self._steps_off + 1 if change > OTHERWISE else 0
        if not self._link_off:
            self._usual_s = self._usual_s or recent_s
        if (
            self._link_off == 1 or max(self._link_off, self._steps_off) < 2
        ):  # a link that may have changed is seen again
            return
        if self._link_off:
            self._take_link(session, ratio)
        self._link_off, self._steps_off, self._usual_s = 0, 0, 0.0
        self._learn_pace(session)
        self._decide(session)

    def _take_link(self, session: Choosing, ratio: float) -> None:
        """Go on with a link on which messages take so many times as long as they did."""
        assert self._link is not None
        self._probe_s *= ratio
        self._link = Link(ratio * self._link.alpha_s, ratio * self._link.beta_s_per_byte)
        self._learn_contention(session, self._link)

    def _change_of_steps(self, session: Choosing, recent_s: float) -> float:
        """How many times as long or as short as usual steps take, on the rank where that is most.

        It is 0 where a rank does not know, as at the first look after a choice.
        """
        change = recent_s / self._usual_s if self._usual_s and recent_s else 0.0
        said = _ranks(session.lane).gather(max(change, 1 / change) if change else 0.0)
        return max(said) if min(said) > 0 else 0.0

    def _probed(self, session: Choosing) -> float:
        """Seconds of a message of `PROBE_S` by what the link was, the same on all ranks."""
        nbytes = self._probe_nbytes
        took = session.lane.call(lambda: probe_s(session.transport, nbytes), " in auto")
        return max(min(_ranks(session.lane).gather(took)), 1e-9)

    # Saving ----------------------------------------------------------------------------------------------------------

    def packed(self) -> list[dict[str, Any]]:
        """The choices, for a save."""
        return [choice._asdict() for choice in self.choices]

    def unpacked(self, state: object, key: str) -> tuple[Chosen, ...] | None:
        """Return the choices that a saved state has under a key; None where it has no such key.

        Raises:
            StateError: they are no choices, or the last one is none that this class of accuracy allows.
        """
        if not isinstance(state, Mapping) or key not in state:
            return None
        found: object = state[key]
        if not isinstance(found, list | tuple):
            raise StateError(f"the saved state's {key!r} must be a list{_REMEDY}")
        for each in found:
            checked(each, _FORM, "a saved choice", StateError, "'s ", _REMEDY)
        choices = tuple(Chosen(**{name: each[name] for name in Chosen._fields}) for each in found)
        if choices and choices[-1].why != BY_HAND and choices[-1].spec not in self._plans:
            raise StateError(
                f"the run that was saved had chosen {choices[-1].spec!r}, which auto:{self.accuracy} does not allow: "
                "load it with the class that it had"
            )
        return choices

    def take_up(self, found: Sequence[Chosen]) -> None:
        """Go on from the choices of a save, and measure again."""
        self.choices, self._first, self._due = list(found), None, CHOOSES_AFTER
        self._link_off = self._steps_off = self._looks = 0
        self._link, self._pace, self._beside, self._usual_s = None, None, None, 0.0
        self._taken = method_of(found)
        self.is_over = bool(found) and found[-1].why == BY_HAND


def method_of(choices: Sequence[Chosen]) -> str:
    """Return the method that a run has after its choices: `none` before the first one."""
    return choices[-1].spec if choices else "none"


def pace_of(samples: Sequence[Sample], coded_s: tuple[float, ...], sent_early: bool) -> StepPace:
    """Return the pace of a rank, by a window of its steps.

    Of the backward pass the first bucket tells how long the others took, and so how long all took.

    Args:
        samples: of steps, one at least.
        coded_s: of each candidate.
        sent_early: whether gradients are delivered while the backward pass goes on.

    >>> from gradwire.drivers.window import Ready
    >>> buckets = (Ready(-0.3, 100), Ready(0.0, 300))
    >>> pace = pace_of([Sample(1.0, 0.15, 0.05, 0.1, 10, 80, buckets)], (0.0,), sent_early=True)
    >>> round(pace.compute_s, 3), round(pace.backward, 3), pace.exposed_s
    (0.85, 0.471, 0.15)
    """
    exposed_s, worked_s = (statistics.median(getattr(s, name) for s in samples) for name in ("exposed_s", "worked_s"))
    compute_s = max(statistics.median(s.step_s - s.exposed_s for s in samples), 1e-6)
    pace = StepPace(compute_s, 0.0, coded_s, exposed_s, worked_s)
    if not sent_early:
        return pace
    several = [sample.buckets for sample in samples if len(sample.buckets) > 1]
    if not several:
        return pace._replace(backward=BACKWARD)
    passes = [-first.at_s / (1 - first.nbytes / sum(b.nbytes for b in (first, *rest))) for first, *rest in several]
    return pace._replace(backward=min(statistics.median(passes) / compute_s, 1.0))


def recent_step_s(window: Window) -> float:
    """The median of the last few steps; 0 where there are too few yet."""
    return statistics.median(s.step_s for s in list(window.samples)[-RECENT:]) if len(window.samples) >= RECENT else 0.0


def communicated(window: Window) -> float:
    """The share of the last step in which the training loop waited for communication, and coding that this took."""
    return window.latest.exposed_s / window.latest.step_s if window.latest else 0.0


def probe_s(transport: Transport, nbytes: int) -> float:
    """Return how long an all-reduce of `nbytes` takes, the quickest of some, each after one that ranks wait for."""
    part, nothing, taken = torch.zeros(nbytes // 4), torch.zeros(1), list[float]()
    for _ in range(PROBES):
        ask(AllReduce(nothing), transport)
        began = time.perf_counter()
        ask(AllReduce(part), transport)
        taken.append(time.perf_counter() - began)
    return min(taken)
