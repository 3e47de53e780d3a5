"""What a worker does in a round: average with the other trainers, or be handed what they have."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError, StepError
from gradwire.drivers.engine import Stats
from gradwire.flight.recorder import recorder
from gradwire.session.direct_lane import DirectLane
from gradwire.session.report import Report
from gradwire.sync.elastic.attempt import Attempt
from gradwire.sync.elastic.handover import packed, unpacked
from gradwire.sync.elastic.heartbeat import Heartbeat
from gradwire.sync.elastic.link import WHAT, GroupLine, WorkerLink, digest_of
from gradwire.sync.elastic.messages import NO_COPY, Came
from gradwire.sync.elastic.owed import Owed
from gradwire.sync.elastic.protocol import Decision, RoundLog
from gradwire.sync.elastic.rounds import Behind, Rounds
from gradwire.sync.elastic.shared import SharedModel
from gradwire.sync.elastic.transfer import Transfer
from gradwire.sync.global_copy import not_finite, require_finite

_VOIDS = 8
"""After so many rounds in a row that came to nothing, the link is to blame and not the workers."""


Held = Sequence[Mapping[str, Tensor]]
"""What a trainer has got in a round, and has not taken yet: the means of each part, or the first global copy."""


class ElasticWorker:
    """One worker of a run.

    Until a round is committed nothing is changed: means are of new tensors, and what a method remembers is kept
    afterwards. So a worker goes from a void round to the next one with what it had.

    Args:
        store: a client of the run's keys.
        heartbeat: who is alive.
        rounds: those of the run.
        shared: what all workers have alike.
        owed: what this worker owes from the beginning on.
        seed: of all random choices, the same on every worker.
        deadline_s: the patience of process groups.

    Attributes:
        shared: see there.
    """

    def __init__(
        self,
        store: Store,
        heartbeat: Heartbeat,
        rounds: Rounds,
        shared: SharedModel,
        owed: Owed,
        seed: int,
        deadline_s: float,
    ) -> None:
        self._store, self._heartbeat, self._rounds, self.shared = store, heartbeat, rounds, shared
        self._owed, self._seed, self._deadline_s = owed, seed, deadline_s
        self._link: WorkerLink | None = None
        self._transfer = Transfer(store, heartbeat, rounds, deadline_s)
        self._earlier = Stats()
        self._log = recorder().lane(WHAT, WHAT, [heartbeat.number])

    @property
    def number(self) -> int:
        """The number of this worker."""
        return self._heartbeat.number

    def stats(self) -> Stats:
        """Bytes and times of all averages so far, among whatever workers."""
        return Stats.summed([self._earlier, self._link.stats()]) if self._link else replace(self._earlier)

    def report(self, workers: Sequence[int]) -> Report:
        """What averages cost among these workers.

        Raises:
            StepError: nothing was averaged among them yet.
        """
        if self._link is None or self._link.workers != tuple(workers):
            raise StepError(
                "a report is of averages among the same workers, and there was none yet among those of now: ask after "
                "the next window, or look at stats(), which counts all averages"
            )
        return self._link.report()

    @property
    def handed_bytes(self) -> int:
        """Sent to newcomers, and to who took over what this worker owed."""
        return self._transfer.sent_bytes

    def end_window(self, steps: int, samples: int, leaving: bool) -> RoundLog:
        """Come to rounds until one is committed with this worker in it; return it.

        Raises:
            StepError: a parameter is not finite on some worker, on all of them.
            CommunicationError: too few workers, a store that is out of reach, or a link that breaks again and again.
        """
        while True:
            counts = self.shared.counts
            came = Came(self.number, self._heartbeat.name, counts.copy, counts.windows, steps, samples, leaving)
            try:
                ended = self._round(came)
            except Behind:
                self._unlink()
                continue
            self._rounds.go_on(ended)
            if ended.decision and ended.state == "committed" and self.shared.counts.copy == ended.decision.copy:
                self._log.step_began(self.shared.counts.windows)
                return ended
            if self._rounds.head.voids >= _VOIDS:
                raise CommunicationError(f"{_VOIDS} averages in a row were given up, the last one since {ended.why}")

    def _round(self, came: Came) -> RoundLog:
        """Go through a round, to its end."""
        self._log.meet(f"the average of {WHAT}")
        try:
            decision = self._rounds.come(came).decision
        finally:
            self._log.met()
        assert decision is not None
        return self._train(decision, came.steps) if self.number in decision.trainers else self._join(decision)

    # As a trainer -------------------------------------------------------------------------------------------------

    def _train(self, decision: Decision, steps: int) -> RoundLog:
        """Get what the round is about with the other trainers; change nothing unless all of them hold it."""
        held: Held = ()
        try:
            held = self._held(decision)
            self._rounds.has(digest_of(held), self._norm() if decision.kind == "average" else 0.0)
        except CommunicationError as error:
            self._rounds.give_up(str(error))
        except BaseException as error:
            self._rounds.give_up(f"{self._heartbeat.name} failed: {error}")
            self._unlink()
            raise
        ended = self._rounds.outcome()
        if ended.state == "void":
            self._unlink()
        else:
            self._take(held, decision, steps)
        return ended

    def _held(self, decision: Decision) -> Held:
        if decision.kind == "average":
            return self._means(decision)
        return [{"copy": self._first_copy(decision)}] if decision.kind == "founding" else ()

    def _take(self, held: Held, decision: Decision, steps: int) -> None:
        """The round is committed: begin the next window, and hand over what others need for theirs."""
        if decision.kind == "founding" and self.number != decision.source:
            self._take_up(held[0]["copy"])
        means = held if decision.kind == "average" else ()
        if means and self._link is not None:
            self._link.keep(steps)
        self.shared.move_(means, decision, steps)
        self._hand_owed(decision)
        if self.number == decision.source and decision.newcomers:
            self._transfer.give_copy(self._packed(), decision.newcomers)

    def _first_copy(self, decision: Decision) -> Tensor:
        """The model that a run begins with: one worker's, held by all before anybody takes it."""
        if self.number != decision.source:
            return self._transfer.copy_from(decision.source)
        payload, others = self._packed(), [worker for worker in decision.trainers if worker != self.number]
        if self._transfer.give_copy(payload, others) < len(others):
            raise CommunicationError("a worker was lost before it had the model that the run begins with")
        return payload

    def _means(self, decision: Decision) -> list[dict[str, Tensor]]:
        """The mean of each part among the trainers."""
        if self._link is not None and self._link.workers != decision.trainers:
            self._unlink()
        name, line, old, owed = f"{self._rounds.name}/average", self._line(), self._link, self._owed
        made, window = list[WorkerLink](), self.shared.counts.windows

        def job() -> list[dict[str, Tensor]]:
            made.append(old or self._linked(line, name, decision, owed))
            parts = [part.changes() for part in self.shared.parts]
            made[0].mean_(parts, window)
            for means in parts:
                require_finite(not_finite(means))
            return parts

        try:
            parts = Attempt(job, line.close).result(self._is_open)
        except BaseException:
            line.close()
            self._unlink()
            raise
        self._link = made[0]
        return parts

    def _line(self) -> GroupLine:
        return GroupLine(self._link.transport if self._link else None)

    def _is_open(self) -> bool:
        """Whether the round may still be committed; makes it void where a trainer is lost."""
        now = self._rounds.now()
        self._rounds.watch(now)
        return now.state == "open" and now.decision is not None  # else the log was deleted while this worker was asleep

    def _linked(self, line: GroupLine, name: str, decision: Decision, owed: Owed) -> WorkerLink:
        transport = line.connected(self._store, name, decision.trainers, self.number, self._deadline_s)
        lane = DirectLane(transport.group, self._store, name, self._deadline_s, WHAT, decision.trainers)
        return WorkerLink(transport, decision.trainers, lane, self.shared, self._seed, owed)

    def _norm(self) -> float:
        return self._link.norm() if self._link else 0.0

    def _unlink(self) -> None:
        """Let go of the connections; keep what is owed."""
        if self._link is None:
            return
        self._link.close()
        self._link.forget()
        self._owed = self._link.owed()
        self._earlier = self.stats()
        self._link = None

    def _hand_owed(self, decision: Decision) -> None:
        """Those who leave give what they owe to the first of those who stay, which goes on owing it."""
        link, heir = self._link, decision.source
        if link is None or not decision.leaving or heir in decision.leaving:
            return
        if self.number not in (heir, *decision.leaving):
            return
        mine = link.owed().tensors()
        if not mine:
            return
        if self.number in decision.leaving:
            self._transfer.give_owed(link, mine, heir)
        else:
            given = [self._transfer.owed_from(link, mine, leaver) for leaver in decision.leaving]
            self._unlink()
            for tensors in filter(None, given):
                self._owed = self._owed.plus(tensors)

    def _packed(self) -> Tensor:
        return packed(self.shared.words(), self.shared.tensors().values())

    # As a newcomer ------------------------------------------------------------------------------------------------

    def _join(self, decision: Decision) -> RoundLog:
        """Be handed what the trainers have, once they have it. Where that fails this worker comes again."""
        ended = self._rounds.outcome()
        if ended.state == "committed":
            with contextlib.suppress(CommunicationError):
                self._take_up(self._transfer.copy_from(decision.source))
        return ended

    def _take_up(self, payload: Tensor) -> None:
        """Have the global copy. What this worker owed belongs to another one, unless both were resumed together."""
        words, tensors = unpacked(payload, list(self.shared.tensors().values()))
        before = self.shared.counts
        self._unlink()
        self.shared.take_up(words, tensors)
        if before.copy != NO_COPY or before.windows != self.shared.counts.windows:
            self._owed = Owed()

    # Ending -------------------------------------------------------------------------------------------------------

    def owed(self) -> Owed:
        """What this worker owes."""
        return self._link.owed() if self._link else self._owed

    def close(self) -> None:
        """Let go of the connections."""
        self._unlink()
        self._log.end()
