"""The server's core: parameters, versions, clocks and backups, without any I/O."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from torch import Tensor

from gradwire.asynchronous.clocks import Clocks, Phase
from gradwire.asynchronous.lengths import Fixed, Length
from gradwire.asynchronous.messages import Grant, Push, Receipt, push_key
from gradwire.asynchronous.pace import Free, Pace
from gradwire.asynchronous.rules import Moment, ServerRule
from gradwire.asynchronous.worker import is_finite
from gradwire.core.errors import CompositionError, PayloadError, PushError, StateError
from gradwire.core.flat_layout import FlatLayout
from gradwire.core.record import Count
from gradwire.core.renamed import same
from gradwire.core.saved_schema import VERSION, check_state, list_of, part_of, tensors_like
from gradwire.sending import Sending

_SERVER = "server"
"""The name under which vectors are saved."""
_Speed = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
_Grant = tuple[Count, Count, Count, Count, Count] | None


class CheckedServer(NamedTuple):
    """A saved state that belongs to a server."""

    vectors: dict[str, Tensor]
    clocks: tuple[list[int], list[Phase]]
    version: int
    seed: int
    life: int
    pushes: list[int]
    granted: list[Grant | None]
    speeds: list[float]


class ParameterServer:
    """Parameters that workers pull and push to, each at its own pace. What drives it hands messages to and fro.

        grants = server.join(worker)        # each with a copy of server.values to its worker
        receipt = server.receive(push)      # likewise receipt.grants
        grants = server.leave(worker)       # it is dead: those who waited for it go on

    A push is named by worker and number, and counts once: one that was applied before, that was computed from other
    parameters than the worker was given last, or for another life of the server, is refused with a sentence, and so is
    one of another model or that is not finite. What is refused changes nothing.

    Args:
        parameters: named tensors, all float32 or all float64; copied.
        rule: what becomes of a push.
        workers: n, how many there are; they are numbered from 0.
        pace: who may start when.
        length: local steps between pushes.
        sending: how pushes travel.
        seed: of what codecs draw at random.

    Attributes:
        values: (d,) the parameters as one vector.
        version: updates made.
        life: how often it was restarted.
        clocks: who is alive, and how many steps each worker has completed.
        pushes: of each worker, how many were applied.

    Raises:
        CompositionError: no worker, or tensors that a server cannot keep.

    >>> import torch
    >>> from gradwire.asynchronous import ASGD
    >>> server = ParameterServer({"x": torch.zeros(2)}, ASGD(0.5), workers=1)
    >>> [grant] = server.join(0)
    >>> wire, _ = server.sending.send(torch.ones(2), None, push_key(0, grant))
    >>> receipt = server.receive(Push(grant, wire, server.names.fingerprint, loss=1.0, seconds=0.1))
    >>> server.parameters()["x"], server.version, receipt.grants[0].number
    (tensor([-0.5000, -0.5000]), 1, 1)
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rule: ServerRule,
        *,
        workers: int,
        pace: Pace | None = None,
        length: Length | None = None,
        sending: Sending | None = None,
        seed: int = 0,
    ) -> None:
        if workers < 1:
            raise CompositionError(f"{workers} workers: a server needs 1 or more")
        self.names = FlatLayout(parameters)
        self.values = self.names.flat(parameters)
        self.rule, self.seed, self.version, self.life = rule, seed, 0, 0
        self.length, self.sending = length or Fixed(), sending or Sending()
        self.clocks = Clocks(workers, pace or Free())
        self.pushes = [0] * workers
        self._granted: list[Grant | None] = [None] * workers
        self._speeds = [0.0] * workers
        self._memory = rule.memory(self.values)
        self._backups = [self.values.clone() for _ in range(workers)] if rule.needs_backup else []

    @property
    def workers(self) -> int:
        """How many there are, dead ones included."""
        return len(self.pushes)

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the parameters, by name."""
        return self.names.named(self.values.clone())

    # Messages ----------------------------------------------------------------------------------------------------

    def expect(self, worker: int) -> int:
        """A worker is on its way, with nothing under way: others wait for it. Return the steps it has completed here.

        For a worker of several servers, which joins with a clock that all of them agree to.

        Raises:
            PushError: a worker that this server does not have.
        """
        self._require_known(worker)
        self._granted[worker] = None
        return self.clocks.expect(worker)

    def join(self, worker: int, clock: int | None = None) -> list[Grant]:
        """A worker is here, for the first time or again, with nothing under way; return who may compute now.

        One that was paused is among them whatever the pace says: it had a grant, and gave it back.

        Args:
            worker: who.
            clock: steps that it has completed, where it knows better than this server, which may be one of several
                and may have been restored from a snapshot.

        Raises:
            PushError: a worker that this server does not have, or a clock below 0.
        """
        self._require_known(worker)
        if clock is not None and clock < 0:
            raise PushError(f"worker {worker} says that it has completed {clock} steps: clocks are 0 or more")
        self._granted[worker] = None
        was_paused = self.clocks.phases[worker] is Phase.PAUSED
        self.clocks.join(worker, clock)
        if was_paused:
            self.clocks.resume(worker)
            return self._handed_out([worker])
        return self._grants()

    def pause(self, worker: int) -> list[Grant]:
        """A worker gives a grant back unused: nobody waits for it until it joins again. Return who may compute now.

        What is known of it stays, its speed too. Once all are paused nothing is under way, and nothing changes.

        Raises:
            PushError: a worker that this server does not have.
        """
        self._require_known(worker)
        self._granted[worker] = None
        self.clocks.pause(worker)
        return self._grants()

    def receive(self, push: Push) -> Receipt:
        """Apply a push.

        Raises:
            PushError: one that is refused, with the reason; nothing is changed then.
        """
        self._require_due(push)
        g = self._decoded(push)
        worker, staleness = push.grant.worker, self.version - push.grant.version
        backup = self._backups[worker] if self._backups else self.values
        self.rule.move_(self.values, g, backup, self._memory, Moment(self.version, staleness))
        self.version += 1
        self.pushes[worker] += 1
        self._speeds[worker] = push.grant.steps / push.seconds if push.seconds > 0 else 0.0
        self._granted[worker] = None
        self.clocks.complete(worker)
        return Receipt(staleness, self._grants())

    def leave(self, worker: int) -> list[Grant]:
        """A worker is dead or has ended: nobody waits for it any more. Return who may compute now.

        Raises:
            PushError: a worker that this server does not have.
        """
        self._require_known(worker)
        self._granted[worker], self._speeds[worker] = None, 0.0
        self.clocks.leave(worker)
        return self._grants()

    def _grants(self) -> list[Grant]:
        return self._handed_out(self.clocks.freed())

    def _handed_out(self, workers: Sequence[int]) -> list[Grant]:
        found = [self._grant(worker) for worker in workers]
        for grant in found:
            self._granted[grant.worker] = grant
            if self._backups:
                self._backups[grant.worker].copy_(self.values)
        return found

    def _grant(self, worker: int) -> Grant:
        steps = self.length.of(worker, self._speeds)
        return Grant(worker, self.pushes[worker], self.version, self.life, steps)

    # What is refused ---------------------------------------------------------------------------------------------

    def _require_known(self, worker: int) -> None:
        if not 0 <= worker < self.workers:
            raise PushError(f"worker {worker} is unknown: this server has workers 0 to {self.workers - 1}")

    def _require_due(self, push: Push) -> None:
        """Refuse what was not asked for."""
        worker, number, version, life, _ = push.grant
        self._require_known(worker)
        what = f"push {number} of worker {worker}"
        if life != self.life:
            raise PushError(
                f"{what} was computed before the server was restarted, so it is left out: have the worker join again"
            )
        if number < self.pushes[worker]:
            raise PushError(f"{what} was applied before: it is left out")
        if self.clocks.phases[worker] is Phase.DEAD:
            raise PushError(f"{what} is left out, since the worker was taken for dead: have it join again")
        granted = self._granted[worker]
        if granted is None:
            raise PushError(f"{what} is left out, since the worker was not told to start: have it join first")
        if push.grant != granted:
            raise PushError(
                f"{what} was computed from version {version}, and push {granted.number} from version "
                f"{granted.version} is due: it is left out"
            )

    def _decoded(self, push: Push) -> Tensor:
        what = f"push {push.grant.number} of worker {push.grant.worker}"
        if push.fingerprint != self.names.fingerprint:
            raise PushError(f"{what} is of another model, with other names, shapes or dtypes: it is left out")
        try:
            g = self.sending.receive(push.wire.to(self.values.device), self.values, push_key(self.seed, push.grant))
        except PayloadError as error:
            raise PushError(f"{what} is left out as damaged: {error}") from error
        if not is_finite(g):
            raise PushError(f"{what} is not finite: it is left out; lower the learning rates")
        return g

    # State -------------------------------------------------------------------------------------------------------

    def begin_life(self) -> None:
        """Go on after a crash, from what was saved: all workers join again, and pushes computed before are refused."""
        self.life += 1
        self._granted = [None] * self.workers
        self.clocks.disconnect()

    def settings(self) -> str:
        """What is the same in all servers that may go on from one saved state, as text."""
        parts = (self.rule, self.clocks.pace, self.length, self.sending, self.workers, self.names.fingerprint)
        return "asynchronous.Server(" + ", ".join(map(repr, parts)) + ")"

    def _vectors(self) -> dict[str, Tensor]:
        memory = {f"element:{name}": tensor for name, tensor in self._memory.items()}
        backups = {f"element:backup.{worker}": tensor for worker, tensor in enumerate(self._backups)}
        return {"element:values": self.values, **memory, **backups}

    def state_dict(self) -> dict[str, Any]:
        """All that the server goes on from, in the form of `gradwire.core.saved`; tensors are copies."""
        head = {"version": VERSION, "reducer": self.settings(), "step": self.version, "seed": self.seed, "scale": 1.0}
        granted = [None if grant is None else list(grant) for grant in self._granted]
        numbers = {"life": [self.life], "pushes": list(self.pushes), "granted": granted, "speeds": list(self._speeds)}
        vectors = {path: [{"start": 0, "values": tensor.clone()}] for path, tensor in self._vectors().items()}
        clocks = self.clocks.state_dict()
        return {**head, "rank": 0, "world_size": 1, **numbers, "clocks": clocks, "parameters": {_SERVER: vectors}}

    def load_state_dict(self, saved: object) -> None:
        """Go on exactly where `state_dict` was called. After a crash call `begin_life` too.

        Raises:
            StateError: the state of another model or of other settings, or what is no such state. Nothing is changed.
        """
        self.take_up(self.checked(saved))

    def checked(self, saved: object) -> CheckedServer:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: as `load_state_dict`.
        """
        state = check_state(saved)
        if not same(state["reducer"], self.settings()):
            raise StateError(f"the saved state is that of {state['reducer'][:200]}, and this is {self.settings()}")
        vectors = {path: pieces[0]["values"] for path, pieces in state["parameters"].get(_SERVER, {}).items()}
        found = tensors_like(vectors, self._vectors(), "server")
        clocks = self.clocks.checked(part_of(state, "clocks", Mapping[str, Any]))
        n = self.workers
        (life,) = part_of(state, "life", list_of(Count, 1))
        pushes = part_of(state, "pushes", list_of(Count, n), f"'pushes' of {n} workers")
        granted = part_of(state, "granted", list_of(_Grant, n), f"list of what {n} workers compute")
        speeds = part_of(state, "speeds", list_of(_Speed, n), f"speeds of {n} workers")
        grants = [None if grant is None else Grant(*grant) for grant in granted]
        return CheckedServer(found, clocks, int(state["step"]), int(state["seed"]), life, pushes, grants, speeds)

    def take_up(self, checked: CheckedServer) -> None:
        """Go on from what `checked` returned."""
        for path, tensor in self._vectors().items():
            tensor.copy_(checked.vectors[path])
        self.clocks.take_up(checked.clocks)
        self.version, self.seed, self.life = checked.version, checked.seed, checked.life
        self.pushes, self._granted, self._speeds = checked.pushes, checked.granted, checked.speeds
