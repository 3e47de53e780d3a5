"""Random schedules of workers and several servers over the carrier with faults, and watchers that look at each step.

What they watch: each push counts once at each server; none whose grant of the next number has reached its worker is
lost, but by a server that was restored from an older snapshot; what a worker takes for applied is in the parameters,
and what it takes for lost is not; nobody computes beyond the bound of any worker that lives; and once nothing fails any
more, nobody waits for ever.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gradwire.asynchronous import ASGD, Barriers, Bounded, Free, Grant, Pace
from gradwire.asynchronous.clocks import Phase
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import Journal, PartedWorker, PartServer, WorkerClient
from gradwire.asynchronous.several.client import LOOK_S
from gradwire.asynchronous.several.journal import JournalRow
from gradwire.asynchronous.several.messages import (
    AnyRequest,
    Finish,
    Granted,
    Join,
    Pause,
    PushRequest,
    ServerReply,
    Watch,
    WorkerRequest,
)
from gradwire.peers.faulty import FaultyConnections, FaultyNetwork, Process
from gradwire.peers.protocol import Arrived, Reply
from promises import checked, faults_of, require

FAULTS_S = 5.0
END_S = 200.0
"""By then all have gone on, unless they wait for ever."""
WATCH_S = 1.0
PATIENCE_S = 100.0
ASK_AGAIN_S = 5.0


def never(worker: int) -> Any:
    raise NotImplementedError


class Kept:
    """What of a part's server outlives it, and what is watched over all its lives.

    Attributes:
        state: the newest snapshot.
        journal: of all lives.
        losses, workers: of each push in the parameters, what names it, its loss, and whose it is.
        all_losses: of each push that was ever applied.
        seen: rows of the journal that were looked at.
        left: whom nobody waited for, as the server gave its last grant of a version to a worker.
        processes: which process each worker was then, of those that had come.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.journal = Journal()
        self.losses: list[float] = []
        self.workers: list[int] = []
        self.all_losses: set[float] = set()
        self.seen = 0
        self.left: dict[tuple[int, int, int], set[int]] = {}
        self.processes: dict[tuple[int, int, int], dict[int, int]] = {}


class WatchedPart(PartServer):
    """Keeps snapshots in memory, and is looked at after each call.

    Its part of the parameters has an element for each worker, from which each push of that one takes 1.
    """

    def __init__(self, job: Job, part: int, servers: int, kept: Kept, clock: Callable[[], float]) -> None:
        self.kept = kept
        super().__init__(job, part, servers, clock=clock)
        self.journal = kept.journal

    def _restore(self, was_restarted: bool) -> None:
        if self.kept.state is not None:
            self.server.load_state_dict(self.kept.state)
            self.server.begin_life()
        self._save()

    def _save(self) -> None:
        self.kept.state = self.server.state_dict()

    def _hand(self, grants: Sequence[Grant]) -> None:
        phases = self.server.clocks.phases
        for grant in grants:
            self.kept.left[grant.worker, grant.version, grant.life] = {
                worker for worker, phase in enumerate(phases) if phase in (Phase.DEAD, Phase.PAUSED)
            }
            self.kept.processes[grant.worker, grant.version, grant.life] = {
                worker: process for worker, (process, _) in self._last.items()
            }
        super()._hand(grants)

    def ask(self, request: AnyRequest, reply: Reply) -> None:
        super().ask(request, reply)
        self.watch()

    def lost(self, peer: int) -> None:
        super().lost(peer)
        self.watch()

    def tick(self) -> None:
        super().tick()
        self.watch()

    def watch(self) -> None:
        """Look at the pushes that were applied since the last look, and at the parameters."""
        rows = self.journal.rows()[self.kept.seen :]
        for row in rows:
            self._take(row)
        self.kept.seen += len(rows)
        require(len(self.kept.losses) >= self.server.version, "the journal lacks pushes")
        del self.kept.losses[self.server.version :], self.kept.workers[self.server.version :]
        counts = Counter(self.kept.workers)
        wanted = [float(counts[worker]) for worker in range(self.job.workers)]
        require(self.server.values.tolist() == wanted, "the parameters lack pushes, or have more")

    def _take(self, row: JournalRow) -> None:
        kept = self.kept
        require(row.life == self.server.life, f"{row} is of another life")
        require(row.loss not in kept.all_losses, f"{row} was applied before")
        del kept.losses[row.version :], kept.workers[row.version :]
        require(row.version == len(kept.losses), f"{row} is not the next update")
        require(row.number == kept.workers.count(row.worker), f"{row} is not the next push of its worker")
        kept.losses.append(row.loss)
        kept.workers.append(row.worker)
        kept.all_losses.add(row.loss)


class Own(WatchedPart):
    """Has clocks of its own, whatever workers say."""

    def _join(self, request: Join, reply: Reply) -> None:
        clock = self.server.clocks.completed[request.worker]
        super()._join(Join(request.server, request.worker, request.process, request.serial, clock), reply)


class Trusting(WatchedPart):
    """Takes what comes for new, and what was computed from other parameters for good."""

    def _is_newest(self, request: WorkerRequest) -> bool:
        if isinstance(request, PushRequest):
            granted = self.server._granted  # pyright: ignore[reportPrivateUsage]
            granted[request.worker] = request.push.grant
            self.server.pushes[request.worker] = request.number
        return True


class Forgetful(WatchedPart):
    """Does not write a push down until the next one."""

    def _save(self) -> None:
        super()._save()
        if self.server.version:
            assert self.kept.state is not None
            self.kept.state = {**self.kept.state, "step": self.server.version - 1}


class Blind(PartedWorker):
    """Never looks whether a server whose grant it holds is still the same."""

    def poll(self) -> list[WorkerRequest]:
        return []


class WatchedClient(WorkerClient):
    """Is looked at whenever a grant reaches it.

    Attributes:
        pushed: the last push to each server, until the next grant tells what became of it.
        paused: the servers that have replied to a pause.
        has_resumed: whether its next push is the one after a pause, for which it was let go before.
    """

    def __init__(self, schedule: Schedule, worker: PartedWorker, connections: FaultyConnections) -> None:
        super().__init__(worker, connections, PATIENCE_S)
        self.schedule = schedule
        self.pushed: dict[int, PushRequest] = {}
        self.paused: set[int] = set()
        self.has_resumed = False

    def send(self, requests: Sequence[WorkerRequest]) -> None:
        for request in requests:
            if isinstance(request, PushRequest):
                self.pushed[request.server] = request
        super().send(requests)

    def arrived(self, arrived: Arrived) -> None:
        if isinstance(arrived.request, Pause):
            self.paused.add(arrived.server)
        counts = self.worker._counts(arrived.request)  # pyright: ignore[reportPrivateUsage]
        if counts and isinstance(arrived.reply, Granted):
            self._granted(arrived.server, arrived.reply)
        super().arrived(arrived)

    def _granted(self, server: int, reply: Granted) -> None:
        """The push before is in the parameters of this grant where its number says so, and only there."""
        push = self.pushed.pop(server, None)
        if push is not None:
            self.schedule.require_applied(server, push, reply)


class Schedule:
    """One schedule, drawn from a seed."""

    def __init__(
        self,
        seed: int,
        part: type[WatchedPart] = WatchedPart,
        worker: type[PartedWorker] = PartedWorker,
    ) -> None:
        draw = self.draw = random.Random(f"parts {seed}")
        faults = faults_of(draw, 0.03, late_s=1.0, down_s=2.0, stopped_s=3.0, until_s=FAULTS_S)
        self.network = FaultyNetwork(faults, seed)
        self.workers, self.servers = draw.randint(2, 5), draw.randint(1, 3)
        self.bound: int | None = draw.choice((None, 0, 1, 2, 3))
        self.numel = self.servers * self.workers  # part p counts the pushes of worker w to it in its element w
        self.start = {"x": torch.zeros(self.numel, dtype=torch.float64)}
        self.job = Job(
            self.start,
            ASGD(1.0),
            never,
            workers=self.workers,
            pushes=10**9,
            pace=self._pace(),
            snapshot_every=draw.choice((1, 3, 10)),
            patience_s=10.0,
        )
        self.seconds = [10 ** draw.uniform(-0.5, 0.3) for _ in range(self.workers)]
        self.kept = [Kept() for _ in range(self.servers)]
        self.clients: list[WatchedClient | None] = [None] * self.workers
        self.pauses = draw.choice((0.0, 0.1))
        self.made, self.computed, self.paused, self.is_over = worker, 0, 0, False
        for number in range(self.servers):
            self.network.serve(partial(self._serve, part, number))
        for number in range(self.workers):
            self.network.join(number, partial(self._work, number), ServerReply)
        watcher = self.network.join(self.workers, self._watch, ServerReply)
        self.network.plan_faults(spared=(watcher, self.network.peers[0]))  # so that there is something to go on

    def _pace(self) -> Pace:
        between = Free() if self.bound is None else Bounded(self.bound)
        return Barriers(3, between) if self.draw.random() < 0.3 else between

    # Processes ---------------------------------------------------------------------------------------------------

    def _serve(self, part: type[WatchedPart], number: int) -> WatchedPart:
        return part(self.job, number, self.servers, self.kept[number], lambda: self.network.now_s)

    def _work(self, number: int, connections: FaultyConnections) -> Iterator[float]:
        process = self.network.peers[number].lives
        worker = self.made(number, None, self.start, servers=self.servers, process=process)
        client = self.clients[number] = WatchedClient(self, worker, connections)
        client.send(worker.begin())
        while not worker.is_done:
            if worker.granted is None:
                yield LOOK_S
                client.turn()
            elif self.draw.random() < self.pauses:
                yield from self._pause(client)
            else:
                self._push(client)

    def _push(self, client: WatchedClient) -> None:
        """Compute: every push takes 1 from the element of its worker in each part, and its loss is its name."""
        number = client.worker.number
        if not client.has_resumed:
            self._require_bound(number)
        client.has_resumed = False
        client.connections.sleep(seconds := self.seconds[number] * self.draw.uniform(0.5, 1.5))
        g = torch.zeros(self.numel, dtype=torch.float64)
        g[number :: self.workers] = -1.0
        self.computed += 1
        client.send(client.worker.push(g, float(self.computed), seconds))

    def _pause(self, client: WatchedClient) -> Iterator[float]:
        """Give all grants back, as ranks do before a save, and come back after a while."""
        client.paused.clear()
        asked_s = client.connections.now_s()
        client.send(client.worker.pause())
        while len(client.paused) < self.servers:
            yield LOOK_S
            if client.connections.now_s() - asked_s > ASK_AGAIN_S:  # a request or its reply was lost
                asked_s = client.connections.now_s()
                client.send(client.worker.pause())
            client.turn()
        self.paused += 1
        yield self.draw.uniform(0.0, 3.0)
        client.has_resumed = True
        client.send(client.worker.resume())

    def _watch(self, connections: FaultyConnections) -> Iterator[float]:
        """Tell the servers who is dead, and in the end that all is done."""
        while True:
            dead = [number for number in range(self.workers) if not self.network.peers[number].is_up]
            for server in range(self.servers):
                connections.ask(server, Finish() if self.is_over else Watch(dead))
            end_s = connections.now_s() + WATCH_S
            while (left_s := end_s - connections.now_s()) > 0:
                connections.wait(0.0)
                yield left_s

    # What is looked at -------------------------------------------------------------------------------------------

    def _require_bound(self, number: int) -> None:
        """Nobody whom its servers waited for as they let this worker compute is further behind than the bound."""
        client = self.clients[number]
        assert client is not None
        own, left = client.worker.clock or 0, self._left(client.worker)
        for other, one in enumerate(self.clients):
            clock = None if one is None or other in left else one.worker.clock
            if self.bound is not None and clock is not None and self.network.peers[other].is_up:
                require(own - clock <= self.bound, f"{number} computes at {own}, and {other} is at {clock}")

    def _left(self, worker: PartedWorker) -> set[int]:
        found: set[int] = set()
        for kept, seat in zip(self.kept, worker._seats, strict=True):  # pyright: ignore[reportPrivateUsage]
            if (one := seat.held) is not None:
                key = one.worker, one.version, one.life
                found |= kept.left[key]
                if self.pauses:  # one that came anew since then began where a worker was that nobody had waited for
                    found |= {
                        other
                        for other, process in kept.processes[key].items()
                        if process != self.network.peers[other].lives
                    }
        return found

    def require_applied(self, server: int, push: PushRequest, reply: Granted) -> None:
        """Look whether the next grant tells truly what became of a push."""
        kept = self.kept[server]
        says_so, is_so = reply.number > push.number, push.loss in kept.all_losses
        if says_so:
            require(is_so, f"{push.worker}'s push {push.number} is lost, and its worker takes it for applied")
        elif reply.life == self.network.servers[server].lives - 1:
            require(push.loss not in kept.losses, f"{push.worker}'s push {push.number} was applied, and is taken back")

    def living(self) -> list[Process]:
        """The workers that are up."""
        return [self.network.peers[number] for number in range(self.workers) if self.network.peers[number].is_up]

    @property
    def counts(self) -> Counter[str]:
        """What happened."""
        pushes = sum(len(kept.all_losses) for kept in self.kept)
        lives = sum(one.lives for one in self.network.processes)
        return self.network.happened + Counter(pushes=pushes, pauses=self.paused, lives=lives)

    # The run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until nothing fails any more, then until all that live have gone on, and then to the end.

        Raises:
            Broken: a promise was.
        """
        faults = self.network.faults
        self.network.run(faults.until_s + max(faults.down_s, faults.stopped_s))
        before = self._pushes()
        self.network.run(END_S, until=lambda: self._went_on(before))
        require(self._went_on(before), "workers that live wait for ever")
        self.is_over = True
        self.network.run(2 * END_S, until=lambda: not self.living())
        require(not self.living(), "workers are not told that all is done")
        self.network.run(self.network.now_s + 1.0)

    def _pushes(self) -> list[list[int]]:
        return [
            list(process.life.served.server.pushes)
            for process in self.network.servers
            if isinstance(process.life.served, PartServer)
        ]

    def _went_on(self, before: list[list[int]]) -> bool:
        """Whether each worker that lives has pushed to each server since."""
        pairs = list(zip(before, self._pushes(), strict=True))
        return all(now[one.number] > then[one.number] for then, now in pairs for one in self.living())


def check(seed: int, part: type[WatchedPart] = WatchedPart, worker: type[PartedWorker] = PartedWorker) -> Schedule:
    """Run a schedule.

    Raises:
        Broken: it breaks a promise.
    """
    return checked(Schedule, seed, part, worker)
