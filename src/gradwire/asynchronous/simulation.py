"""A deterministic simulation: workers of given speeds, delays and failures, and the server's own core."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.server import ParameterServer
from gradwire.asynchronous.worker import Worker
from gradwire.core.errors import CompositionError, PushError
from gradwire.core.key import Key
from gradwire.peers.clock import EventClock


@dataclass(frozen=True)
class Machine:
    """A worker's processor and its link.

    Args:
        step_s: seconds of a local step, above 0.
        delay_s: seconds of a message, each way.
        jitter: steps and messages take up to this share longer, drawn at random.
        dies_at_s: when it dies; what it computes then is lost, what it sent is not.
        returns_at_s: when it is back, after that.

    Raises:
        CompositionError: a time that cannot be.
    """

    step_s: float = 1.0
    delay_s: float = 0.0
    jitter: float = 0.0
    dies_at_s: float = math.inf
    returns_at_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.step_s < math.inf or not 0 <= self.delay_s < math.inf or not 0 <= self.jitter < math.inf:
            raise CompositionError(f"{self}: a step takes more than 0 seconds, a delay and a jitter are 0 or more")
        if self.returns_at_s < self.dies_at_s:
            raise CompositionError(f"{self}: a machine returns after it has died")


@dataclass(frozen=True)
class Faults:
    """What goes wrong beside machines that die.

    Args:
        repeats: the share of pushes that arrive twice, the second time later.
        detection_s: seconds until the server knows that a worker has died, after its last message has come.
        crashes_at_s: when the server dies; updates since its last snapshot are lost.
        restart_s: seconds until it is back.
        snapshot_every: updates between snapshots.

    Raises:
        CompositionError: a share or a time that cannot be.
    """

    repeats: float = 0.0
    detection_s: float = 1.0
    crashes_at_s: tuple[float, ...] = ()
    restart_s: float = 1.0
    snapshot_every: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.repeats <= 1 or self.snapshot_every < 1:
            raise CompositionError(f"{self}: repeats lie in [0, 1], and snapshots are 1 or more updates apart")
        if self.detection_s < 0 or self.restart_s < 0:
            raise CompositionError(f"{self}: times are 0 or more")


class Applied(NamedTuple):
    """A push that the server applied.

    Attributes:
        at_s: when, in simulated seconds.
        worker: whose.
        number: of that worker's pushes.
        version: updates before it.
        staleness: tau.
        loss: as the worker said.
    """

    at_s: float
    worker: int
    number: int
    version: int
    staleness: int
    loss: float


@dataclass
class _WorkerState:
    """What the simulation knows of a worker."""

    is_up: bool = True
    grant: Grant | None = None


class AsynchronousSimulation:
    """Runs a server and its workers in simulated time. The same arguments give the same run.

    Args:
        server: driven as any transport does.
        workers: one for each of the server's, with the same sending and seed.
        machines: likewise.
        faults: none by default.
        seed: of jitter and repeats.

    Attributes:
        history: what the server applied, in order. What it lost by a crash is taken out again.
        refused: what the server said to pushes that it left out.

    Raises:
        CompositionError: other numbers of workers or machines than the server has.

    >>> import torch
    >>> from gradwire.asynchronous import ASGD, Bounded, Result
    >>> start = {"x": torch.ones(1)}
    >>> server = ParameterServer(start, ASGD(0.1), workers=2, pace=Bounded(1))
    >>> workers = [Worker(lambda parameters, grant: Result(parameters, 0.0), start) for _ in range(2)]
    >>> simulation = AsynchronousSimulation(server, workers, [Machine(step_s=1.0), Machine(step_s=4.0)])
    >>> simulation.run(pushes=4)
    >>> [(one.at_s, one.worker, one.staleness) for one in simulation.history]
    [(1.0, 0, 0), (2.0, 0, 0), (4.0, 1, 2), (5.0, 0, 0)]
    """

    def __init__(
        self,
        server: ParameterServer,
        workers: Sequence[Worker],
        machines: Sequence[Machine],
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        if not len(workers) == len(machines) == server.workers:
            raise CompositionError(
                f"the server has {server.workers} workers, and {len(workers)} were given on {len(machines)} machines"
            )
        self.server, self.workers, self.machines, self.faults = server, workers, machines, faults or Faults()
        self.history, self.refused = list[Applied](), list[str]()
        self._random = random.Random(Key(seed=seed, name="simulation").stream_seed)
        self._states = [_WorkerState() for _ in workers]
        self._is_up, self._saved = True, server.state_dict()
        self._clock = EventClock[Callable[[], None]]()
        self._begin()

    @property
    def now_s(self) -> float:
        """Simulated seconds since the beginning."""
        return self._clock.now_s

    def _begin(self) -> None:
        for at_s in self.faults.crashes_at_s:
            self._at(at_s, self._crash)
        for worker, machine in enumerate(self.machines):
            self._at(machine.dies_at_s, self._die, worker)
            self._at(machine.returns_at_s, self._return, worker)
            self._send(worker, self._join, worker)

    def run(self, pushes: int | None = None, seconds: float = math.inf) -> None:
        """Go on until so many more pushes were applied, so many more seconds have passed, or nothing is to come.

        Args:
            pushes: further ones; None for any number.
            seconds: further simulated ones.
        """
        end_s = self.now_s + seconds
        last = math.inf if pushes is None else self.server.version + pushes
        while self._clock and self._clock.next_s <= end_s and self.server.version < last:
            self._clock.next_event()()

    # Time --------------------------------------------------------------------------------------------------------

    def _at(self, at_s: float, handle: Callable[..., None], *arguments: Any) -> None:
        self._clock.plan(at_s, functools.partial(handle, *arguments))

    def _lasting(self, worker: int, seconds: float) -> float:
        return seconds * (1 + self.machines[worker].jitter * self._random.random())

    def _send(self, worker: int, handle: Callable[..., None], *arguments: Any) -> None:
        """A message between a worker and the server, either way."""
        self._at(self.now_s + self._lasting(worker, self.machines[worker].delay_s), handle, *arguments)

    # At a worker -------------------------------------------------------------------------------------------------

    def _start(self, grant: Grant, values: Tensor) -> None:
        state = self._states[grant.worker]
        if not state.is_up or grant.life != self.server.life:
            return
        state.grant = grant
        seconds = self._lasting(grant.worker, self.machines[grant.worker].step_s * grant.steps)
        self._at(self.now_s + seconds, self._finish, grant, values, seconds)

    def _finish(self, grant: Grant, values: Tensor, seconds: float) -> None:
        if self._states[grant.worker].grant is not grant:
            return  # it died meanwhile, or was told to start anew
        push = self.workers[grant.worker].compute(grant, values)._replace(seconds=seconds)
        self._send(grant.worker, self._receive, push)
        if self._random.random() < self.faults.repeats:
            self._at(self.now_s + self._lasting(grant.worker, 2 * seconds), self._receive, push)

    def _refuse(self, grant: Grant, reason: str) -> None:
        state = self._states[grant.worker]
        if state.grant == grant and self.workers[grant.worker].refused(grant, reason):
            state.grant = None
            self._send(grant.worker, self._join, grant.worker)

    def _die(self, worker: int) -> None:
        self._states[worker] = _WorkerState(is_up=False)
        self._miss(worker)

    def _miss(self, worker: int) -> None:
        """Have the server find out, behind the last message: a join that came later would bring a dead worker back."""
        longest_s = self.machines[worker].delay_s * (1 + self.machines[worker].jitter)
        self._at(self.now_s + longest_s + self.faults.detection_s, self._detect, worker)

    def _return(self, worker: int) -> None:
        self._states[worker] = _WorkerState()
        self._send(worker, self._join, worker)

    # At the server -----------------------------------------------------------------------------------------------

    def _grant(self, grants: Sequence[Grant]) -> None:
        for grant in grants:
            self._send(grant.worker, self._start, grant, self.server.values.clone())

    def _join(self, worker: int) -> None:
        if self._is_up:
            self._grant(self.server.join(worker))

    def _detect(self, worker: int) -> None:
        if self._is_up and not self._states[worker].is_up:
            self._grant(self.server.leave(worker))

    def _receive(self, push: Push) -> None:
        if not self._is_up:
            return
        version, (worker, number, *_) = self.server.version, push.grant
        try:
            receipt = self.server.receive(push)
        except PushError as error:
            self.refused.append(str(error))
            self._send(worker, self._refuse, push.grant, str(error))
            return
        self.history.append(Applied(self.now_s, worker, number, version, receipt.staleness, push.loss))
        if self.server.version % self.faults.snapshot_every == 0 and self.faults.crashes_at_s:
            self._saved = self.server.state_dict()
        self._grant(receipt.grants)

    def _crash(self) -> None:
        if self._is_up:
            self._is_up = False
            self._at(self.now_s + self.faults.restart_s, self._restart)

    def _restart(self) -> None:
        """Go on from the last snapshot, with a snapshot of the new life; all workers find the server again."""
        self._is_up = True
        self.server.load_state_dict(self._saved)
        self.server.begin_life()
        self._saved = self.server.state_dict()
        self.history = [one for one in self.history if one.version < self.server.version]
        for worker, state in enumerate(self._states):
            state.grant = None
            if state.is_up:
                self._send(worker, self._join, worker)
            else:
                self._miss(worker)
