"""`Gossip`: ranks train alone, and mix their models with those of their neighbours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire import kernels
from gradwire.core.checked import facts
from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError, CompositionError, StateError, StepError
from gradwire.core.grain import Grain
from gradwire.core.program import Program
from gradwire.core.record import Count
from gradwire.core.state import State
from gradwire.drivers.engine import Stats
from gradwire.drivers.interpreter import Interpreter, ask, run
from gradwire.drivers.virtual import gathered
from gradwire.session import DEADLINE_S, Session
from gradwire.session.figures import ReportOfSession
from gradwire.session.lane import group_of
from gradwire.session.names import TrainedParameters, named, require_whole
from gradwire.session.pace import WindowPace
from gradwire.session.states import Unpacked, take_up, unpacked
from gradwire.session.together import Together
from gradwire.sync.alike import require_same_start
from gradwire.sync.averaging_state import check_head
from gradwire.sync.buffers import Buffers, Policy, persistent_buffers, require_policy
from gradwire.sync.fragment import travelling, wide
from gradwire.sync.gossip.graphs import Graph
from gradwire.sync.gossip.method import GossipMethod, OnGraph
from gradwire.sync.gossip.naming import graph as named_graph
from gradwire.sync.gossip.naming import method as named_method
from gradwire.sync.gossip.whole import apart, averaged
from gradwire.sync.schedules import Schedule, as_schedule
from gradwire.sync.swap import swapped, write_

T = TypeVar("T")
VERSION = 1


class CheckedGossip(NamedTuple):
    """A saved state that belongs here, with what the session makes of it."""

    saved: Mapping[str, Any]
    loaded: Unpacked


class Gossip(ReportOfSession):
    """Has ranks train alone, and mixes the parameters of each with those of its neighbours in a graph.

    Call `step` after each step of the optimizer, on every rank. No rank hears more than its neighbours, so a step costs
    what these send, however many ranks there are. Models of ranks differ: by `consensus_distance`, which is the smaller
    the larger the graph's `spectral_gap` and the smaller the learning rate. `sync` at the end makes them one.

    Mixed are the trained parameters of the model: those that require gradients when this is made.

    Args:
        model: alike on all ranks when this is made. Load checkpoints afterwards.
        graph: of as many ranks as there are, or its name: "ring", "torus", "exponential", "one-peer" or "complete".
        method: `DPSGD()`, `SGP()` or `CHOCO(codec, gamma)`, or one of the names "dpsgd" and "sgp".
        every: steps between two rounds, or a `Schedule`.
        buffers: what `sync` makes of BatchNorm's statistics and other buffers, see `gradwire.sync.buffers.Policy`. In
            between each rank keeps its own.
        group: whose ranks; None for the default group.
        seed: of all random choices, the same on every rank.
        deadline_s: seconds after which a silent rank is an error.
        what: the call that errors speak of.

    Attributes:
        parameters: those that are mixed, by name.
        steps: those of the run so far.
        since: those since the last round.
        session: carries the messages.

    Raises:
        CompositionError: a graph that is none for the method or is for other ranks, and settings that fit nothing.
        AttachError: models or settings that differ between ranks, by name; or no process group.
        CommunicationError: a rank that did not come within `deadline_s`, by its number.

    Example:
        gossip = gradwire.sync.Gossip(model, "ring")
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            gossip.step()
        gossip.sync()  # all ranks have the same model now
        gossip.close()
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph | str = "ring",
        method: GossipMethod | str = "dpsgd",
        *,
        every: int | Schedule = 1,
        buffers: Policy = "average",
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        deadline_s: float = DEADLINE_S,
        what: str = "gradwire.sync.Gossip",
    ) -> None:
        self.schedule = _without_limit(as_schedule(every))
        require_policy(buffers)
        graph = named_graph(graph, group_of(group).size()) if isinstance(graph, str) else graph
        self.graph, self.method = graph, named_method(method) if isinstance(method, str) else method
        self.settings = f"graph={self.graph}, method={self.method}, buffers={buffers!r}"
        self.steps = self.since = self._synced = 0
        self.model = model
        require_whole(model, what)
        self.parameters = named(model)
        self._trained = TrainedParameters(what, self.parameters)
        reducer = OnGraph(self.graph, self.method)
        self.session = Session(
            travelling(self.parameters), reducer, group=group, seed=seed, deadline_s=deadline_s, what=what
        )
        self._lane, self._transport = self.session.lane, self.session.transport
        self._ranks = self._transport.world_size
        self._head = {
            "version": VERSION,
            "settings": self.settings,
            "rank": self._transport.rank,
            "world_size": self._ranks,
        }
        try:
            self._device = next(iter(self.parameters.values())).device
            compared = self.parameters | (persistent_buffers(model) if buffers != "own" else {})
            whole = f"{self.settings}, every={self.schedule}"
            require_same_start(whole, compared, Together(what, self._lane, AttachError))
            self._remember_the_same()
        except BaseException:
            self.close()
            raise
        self.session.pace = self.pace = WindowPace.of("round", self.parameters)
        self.session.method = f"gossip by {self.method} on {self.graph}"
        self.buffers = Buffers(model, buffers, self._ask, self._transport.rank, self._ranks)

    def __repr__(self) -> str:
        return f"Gossip({self.settings}, every={self.schedule}, step={self.steps})"

    # Steps -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Count a step of this rank, and mix where a round is due. Every rank calls it equally often.

        A step that a `GradScaler` skipped counts too, so call this whether or not the optimizer moved.

        Returns:
            Whether there was a round.

        Raises:
            StepError: a parameter of this rank is not finite, or requires gradients and did not when this was made, and
                nothing was sent of it; or this was closed.
            CommunicationError: a rank failed (where its parameters are not finite, too) or fell silent, by its number.
        """
        self._require_open()
        self._trained.of(self.model)
        ended = self.since + 1 >= self.schedule.length(self.steps - self.since)
        if ended:
            with self._lane.telling():
                self._mix()
            self.pace.ended(self.since + 1)
        self.steps, self.since = self.steps + 1, 0 if ended else self.since + 1
        return ended

    def _mix(self) -> None:
        mixed = self._finite()
        self.session.reduce_(mixed)
        write_(self.parameters, mixed)

    def _wide(self) -> dict[str, Tensor]:
        """The parameters in 32 bits at least, contiguous copies."""
        return {name: wide(parameter) for name, parameter in self.parameters.items()}

    def _finite(self) -> dict[str, Tensor]:
        """The same, or an error of this rank's of which the others hear."""
        found = self._wide()
        for name, tensor in found.items():
            if not kernels.all_finite(tensor):
                raise self._lane.fail(
                    StepError(
                        f"{name!r} is not finite on rank {self._transport.rank} after step {self.steps + 1}; no rank "
                        "was sent it, so restart from a checkpoint, with a lower learning rate or clipped gradients"
                    ),
                    "",
                )
        return found

    def sync(self) -> None:
        """Average over all ranks now: afterwards all have the same model, bit for bit.

        What gossip converges to is taken: the mean of all ranks, with `SGP` by their weights. Every rank calls it at
        the same place, as after the last step. Where no rank has made a step since the last time, nothing is averaged
        again.

        Raises:
            StepError, CommunicationError: as `step`.
        """
        self._require_open()
        self._trained.of(self.model)
        steps = torch.tensor(float(self.steps - self._synced), dtype=torch.float64, device=self._device)
        with self._lane.telling():
            if float(self._ask(AllReduce(steps, "max"))):
                write_(self.parameters, self._average())
                self._remember_the_same()
                self.buffers.average_()
        self.since, self._synced = 0, self.steps

    averages_to_evaluate: ClassVar[bool] = True
    """No rank knows the average of all before they communicate."""

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model has the average of all ranks; afterwards this rank's own parameters are back.

        Every rank does this at the same place. It costs an all-reduce of the parameters; gossip goes on as if nothing
        had been. Buffers stay as they are.

        Raises:
            StepError, CommunicationError: as `step`.
        """
        self._require_open()
        return swapped(self.parameters, self._average())

    def consensus_distance(self) -> float:
        """How far ranks are apart: the mean over ranks of |x_i - mean x|^2, all parameters together.

        Every rank calls it at the same place, and gets the same number. It costs an all-reduce of 8 bytes a parameter.

        Raises:
            StepError, CommunicationError: as `step`.
        """
        self._require_open()
        return float(self._run(lambda _, x: apart(x, self._ranks), self._finite())[0])

    # What all ranks do --------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self.session.is_open:
            raise StepError("this gossip is closed: make a new one")

    def _ask(self, request: AllReduce) -> Tensor:
        return self._lane.call(lambda: ask(request, self._transport), f" in step {self.steps}")

    def _run(self, program: Callable[[int, Tensor], Program[T]], tensors: Mapping[str, Tensor]) -> list[T]:
        """Run a program for each grain of the parameters, in the session's order; return what each returned."""
        engine = self.session.engine
        units, waves = engine.plan.units, engine.plan.unit_numbers

        def start(wave: int) -> list[Program[T]]:
            return [program(unit, gathered(units[unit].grain, tensors)) for unit in waves[wave]]

        def job() -> list[T]:
            return run(Interpreter[T](self._transport, engine.stats).script(len(waves), start))

        return self._lane.call(job, f" in step {self.steps}")

    @torch.no_grad()
    def _average(self) -> dict[str, Tensor]:
        """What gossip converges to, the same bits on all ranks."""
        values, engine = self._finite(), self.session.engine
        states = [state for _, state in engine.states()]
        means = self._run(lambda unit, x: averaged(self.method, x, states[unit], self._ranks), values)
        for (grain, _), mean in zip(engine.plan.units, means, strict=True):
            for name, start, numel, offset in grain.segments:
                values[name].view(-1)[start : start + numel].copy_(mean[offset : offset + numel])
        return values

    def _remember_the_same(self) -> None:
        """All ranks have the same parameters now, and remember so."""
        tensors, engine = self._wide(), self.session.engine

        def fresh(grain: Grain) -> State:
            return self.method.begin(grain, gathered(grain, tensors))

        engine.set_states([fresh(grain) for grain, _ in engine.plan.units])

    # State, figures, ending ----------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return bytes and times of communication so far; a step of it is a round."""
        return self.session.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state in tensors, numbers and strings; save one a rank, next to this rank's model and optimizer.

        Models of ranks differ, so every rank saves its own. Nothing is communicated.
        """
        return {
            **self._head,
            "steps": self.steps,
            "since": self.since,
            "synced": self._synced,
            "session": self.session.state_dict(),
            "buffers": self.buffers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called, on the same rank. Load this rank's model and optimizer too.

        Raises:
            StateError: a damaged state, or one of another graph, method, model, rank or world size; nothing is changed
                then.
        """
        self.take_up(self.checked(state))

    def checked(self, state: Mapping[str, Any]) -> CheckedGossip:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: as `load_state_dict`.
        """
        check_head(state, self._head, _BODY)
        loaded = unpacked(self.session, state["session"])
        self.buffers.check(state["buffers"])
        return CheckedGossip(state, loaded)

    def take_up(self, checked: CheckedGossip) -> None:
        """Go on from what `checked` returned."""
        saved, loaded = checked
        take_up(self.session, loaded)
        self.buffers.take_up(saved["buffers"])
        self.steps, self.since, self._synced = (int(saved[key]) for key in ("steps", "since", "synced"))

    @property
    def kind(self) -> str:
        """What must be alike in a run that goes on from a save."""
        return f"Gossip({self.settings})"

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Refuse: with another number of ranks the graph is another, and each rank of the save had its own model.

        Raises:
            StateError: always, with what to do.
        """
        raise StateError(
            f"the {len(states)} ranks of the save each had a model of their own: call sync() before saving, and begin "
            "anew from that model"
        )

    def of_session(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The state for `checked` from that of the session alone, which is all that older versions saved.

        A round was made at the end of each window, so windows of one step are exact. Of longer ones nobody knows how
        many steps had been made since the last round, and a warning says so.
        """
        steps = 0
        for _ in range(int(saved["step"])):
            steps += self.schedule.length(steps)
        if self.schedule.length(steps) > 1:
            text = (
                f"an older version saved this gossip without the steps since its last round, which were lost: {steps}"
            )
            warnings.warn(f"{text} steps are taken up, and a window begins", stacklevel=2)
        return {**self.state_dict(), "steps": steps, "since": 0, "synced": 0, "session": saved}

    def close(self) -> None:
        """Stop communicating; a second call does nothing."""
        self.session.close()

    def __enter__(self) -> Gossip:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.session.__exit__(kind, error, trace)


_Kept = dict[Any, Any]
_BODY = facts({"steps": Count, "since": Count, "synced": Count, "session": _Kept, "buffers": _Kept})


def _without_limit(schedule: Schedule) -> Schedule:
    if schedule.limit is not None:
        raise CompositionError(
            f"{schedule} asks all ranks after each step how far they have moved, which gossip never does: give every= "
            "a number, or another schedule"
        )
    return schedule
