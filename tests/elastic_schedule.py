"""Elastic workers under a schedule that a seed gives: they do what real ones do, but time and order are made up.

Each worker is a thread with the real `Rounds`, `Heartbeat` and `ElasticWorker`. One thread runs at a time, and hands
the turn back at every call of the store and at every pause. So a worker can be stopped at each of these points, as
SIGSTOP would stop it, and continued or killed at any later moment. Only means and copies travel otherwise: over a table
in memory."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from elastic_runs import OVER
from gradwire import CommunicationError
from gradwire.spec import as_method
from gradwire.sync.elastic import heartbeat as pulse_module
from gradwire.sync.elastic import rounds as rounds_module
from gradwire.sync.elastic.heartbeat import Heartbeat
from gradwire.sync.elastic.link import digest_of
from gradwire.sync.elastic.messages import Hands
from gradwire.sync.elastic.owed import Owed
from gradwire.sync.elastic.protocol import Decision, Needs
from gradwire.sync.elastic.rounds import Rounds
from gradwire.sync.elastic.shared import SharedModel
from gradwire.sync.elastic.worker import ElasticWorker
from gradwire.sync.outer import Mean

LOST_AFTER_S, DEADLINE_S, JOIN_S = 2.0, 3.0, 60.0
OP_S = 0.002
"""What a call of the store takes."""

LONGEST_S = 600.0
"""A schedule that takes longer hangs."""


class Killed(BaseException):
    """Ends a worker's thread, as SIGKILL ends a process."""


class Stop(NamedTuple):
    """A worker is stopped as it comes to a point, and continued later.

    Attributes:
        worker: its place.
        point: which one of the turns of its main thread.
        for_s: how long; None: until all others have ended, or are stopped as well.
    """

    worker: int
    point: int
    for_s: float | None


class Kill(NamedTuple):
    """A worker is killed at one of the turns of its main thread, or as soon as it has averaged so many windows."""

    worker: int
    point: int = 1 << 30
    windows: int = 1 << 30


class Player:
    """A worker as the schedule sees it.

    Attributes:
        number: its place.
        turns: how many its main thread has had.
        windows: the digest of its model after each window.
        result: the window and the digest that it has ended with.
        error: what it has raised.
        stopped_until: while it is stopped: when it is continued.
    """

    def __init__(self, number: int) -> None:
        self.number, self.turns = number, 0
        self.windows: dict[int, str] = {}
        self.result: tuple[int, str] | None = None
        self.error: BaseException | None = None
        self.stopped_until: float | None = None
        self.killed = False

    @property
    def is_over(self) -> bool:
        return self.killed or self.result is not None or self.error is not None


class Turning:
    """A thread of a player, which runs when it has the turn."""

    def __init__(self, turns: Turns, player: Player, body: Callable[[], None], is_main: bool) -> None:
        self.player, self.is_main = player, is_main
        self._turns, self._body = turns, body
        self.turn, self.due_s, self.ended = threading.Semaphore(0), turns.now_s, False
        turns.threads.append(self)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        _mine.thread = self
        try:
            if not self.player.killed:
                self._body()
        except Killed:
            pass
        finally:
            self.ended = True
            self._turns.back.release()

    def pause(self, seconds: float = 0.0) -> None:
        """Hand the turn back, for so long at least."""
        self.due_s = self._turns.now_s + seconds
        self._turns.back.release()
        self.turn.acquire()
        if self.player.killed:
            raise Killed


class _Mine(threading.local):
    thread: Turning


_mine = _Mine()


class Turns:
    """Hands the turn to one thread at a time, in an order that a seed gives.

    Attributes:
        now_s: the time that all see.
        threads: all that there ever were.
        back: released by a thread that hands its turn back.
    """

    def __init__(self, seed: int) -> None:
        self.now_s, self.threads = 0.0, list[Turning]()
        self.back = threading.Semaphore(0)
        self._random = random.Random(seed)

    def next(self) -> None:
        """Let one thread go on, at the earliest moment at which one can."""
        waiting = [each for each in self.threads if not each.ended and each.player.stopped_until is None]
        earliest = min((each.due_s for each in waiting), default=self.now_s + 1.0)
        ready = [each for each in waiting if each.due_s <= self.now_s]
        if not ready:
            self.now_s = earliest
            return
        chosen = self._random.choice(ready)
        chosen.player.turns += chosen.is_main
        self.go(chosen)
        self.now_s += OP_S

    def go(self, thread: Turning) -> None:
        thread.turn.release()
        self.back.acquire()

    def end(self) -> None:
        """End all threads that are left."""
        for each in self.threads:
            each.player.killed = True
            while not each.ended:
                self.go(each)


# What stands for the store, for time and for threads ------------------------------------------------------------------


class Table:
    """The calls of a store that elastic workers make; whoever calls hands the turn back first."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.board: dict[tuple[Any, ...], Any] = {}

    def clone(self) -> Table:
        return self

    def get(self, key: str) -> bytes:
        _mine.thread.pause()
        while key not in self.values:  # it waits, as a real one does
            _mine.thread.pause(0.01)
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        _mine.thread.pause()
        self.values[key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        _mine.thread.pause()
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        _mine.thread.pause()
        return [self.values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        _mine.thread.pause()
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def append(self, key: str, value: str) -> None:
        _mine.thread.pause()
        self.values[key] = self.values.get(key, b"") + value.encode()

    def delete_key(self, key: str) -> bool:
        _mine.thread.pause()
        return self.values.pop(key, None) is not None

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        _mine.thread.pause()
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values.get(key, expected.encode())


class LateTable(Table):
    """A store some of whose calls are late: on their way to it, or as it replies.

    Args:
        seed: of which ones, and how late.
        share: of the calls, each way.
        late_s: at most.
    """

    def __init__(self, seed: int, share: float, late_s: float) -> None:
        super().__init__()
        self._draw, self._share, self._late_s = random.Random(seed), share, late_s

    def delay(self) -> None:
        if self._draw.random() < self._share:
            _mine.thread.pause(self._draw.uniform(0, self._late_s))


def _late_call(name: str) -> Callable[..., Any]:
    def call(table: LateTable, *arguments: Any) -> Any:
        table.delay()
        reply = getattr(Table, name)(table, *arguments)
        table.delay()
        return reply

    return call


for _name in ("get", "set", "check", "multi_get", "add", "append", "delete_key", "compare_set"):
    setattr(LateTable, _name, _late_call(_name))


class _Time:
    """Stands for `time`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def monotonic(self) -> float:
        return self._turns.now_s

    def sleep(self, seconds: float) -> None:
        _mine.thread.pause(seconds)


class _Threads:
    """Stands for `threading`: a thread belongs to the player that starts it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def Event(self) -> _Event:
        return _Event()

    def Thread(self, target: Callable[[], None], **_: Any) -> _Thread:
        return _Thread(self._turns, target)


class _Thread:
    def __init__(self, turns: Turns, target: Callable[[], None]) -> None:
        self._turns, self._target = turns, target

    def start(self) -> None:
        Turning(self._turns, _mine.thread.player, self._target, is_main=False)

    def join(self, timeout_s: float) -> None:
        """It ends by itself, once it has the turn."""


class _Exits:
    """Stands for `atexit`: a worker that is killed has no orderly end."""

    def register(self, act: Callable[[], None]) -> None: ...

    def unregister(self, act: Callable[[], None]) -> None: ...


class _Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def wait(self, seconds: float) -> bool:
        _mine.thread.pause(seconds)
        return self._is_set


# A run ----------------------------------------------------------------------------------------------------------------


class _Hands:
    """Copies over the table."""

    sent_bytes = 0

    def __init__(self, table: Table, heartbeat: Heartbeat, rounds: Rounds) -> None:
        self._table, self._heartbeat, self._rounds = table, heartbeat, rounds

    def give_copy(self, payload: Tensor, others: Sequence[int]) -> int:
        self._rounds.append(Hands(self._heartbeat.number, payload.numel()))
        at, handed = self._rounds.name, 0
        for other in others:
            self._table.board[at, "to", other] = payload
        for other in others:
            for _ in range(200):  # one that has given this source up does not come for the copy any more
                if (at, "taken", other) in self._table.board or not self._heartbeat.alive(other):
                    break
                _mine.thread.pause(0.05)
            handed += (at, "taken", other) in self._table.board
        return handed

    def copy_from(self, source: int) -> Tensor:
        self._rounds.handed()
        at, me = self._rounds.name, self._heartbeat.number
        for _ in range(200):  # a real one waits as long while it is being connected
            if (at, "to", me) in self._table.board or not self._heartbeat.alive(source):
                break
            _mine.thread.pause(0.05)
        if (at, "to", me) not in self._table.board:
            raise CommunicationError("the source was lost")
        self._table.board[at, "taken", me] = True
        return self._table.board[at, "to", me]


class _Worker(ElasticWorker):
    """The real one, but for what goes over a link."""

    def __init__(self, table: Table, heartbeat: Heartbeat, rounds: Rounds, shared: SharedModel) -> None:
        store: Any = table
        super().__init__(store, heartbeat, rounds, shared, Owed(), 0, DEADLINE_S)
        self._table, self._transfer = table, _Hands(table, heartbeat, rounds)  # pyright: ignore[reportAttributeAccessIssue]

    def _means(self, decision: Decision) -> list[dict[str, Tensor]]:
        at, board = self._rounds.name, self._table.board
        board[at, "change", self.number] = [part.changes() for part in self.shared.parts]
        while not all((at, "change", worker) in board for worker in decision.trainers):
            if not self._is_open():
                raise CommunicationError("another worker has given up")
            _mine.thread.pause(0.01)
        given = [board[at, "change", worker] for worker in decision.trainers]
        parts = zip(*given, strict=True)
        return [{name: torch.stack([each[name] for each in part]).mean(0) for name in part[0]} for part in parts]


def _model() -> nn.Module:
    """The same on all workers."""
    torch.manual_seed(0)
    return nn.Linear(3, 2)


class VirtualRun:
    """Workers that train so many windows.

    Args:
        seed: of the order of events.
        workers: how many there are.
        windows: how many the run is to have.
        deeds: who is stopped and killed, and where.
        begin_with: how many found it.
        table: the store.
        anew_s: of those that are killed, one after the other: how soon another one is started in its place.

    Attributes:
        players: the workers, and those that were started anew.
    """

    def __init__(
        self,
        seed: int,
        workers: int,
        windows: int,
        deeds: Sequence[Stop | Kill] = (),
        begin_with: int = 1,
        *,
        table: Table | None = None,
        anew_s: Sequence[float] = (),
    ) -> None:
        self._begin_with = begin_with
        self.players = [Player(number) for number in range(workers)]
        self._turns, self._table, self._windows, self._deeds = Turns(seed), table or Table(), windows, list(deeds)
        self._anew_s, self._due = list(anew_s), list[tuple[float, int]]()

    def play(self) -> VirtualRun:
        """Go through it.

        Raises:
            AssertionError: it hangs.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds_module, "time", _Time(self._turns))
            patch.setattr(pulse_module, "threading", _Threads(self._turns))
            patch.setattr(pulse_module, "atexit", _Exits())
            for player in self.players:
                self._begin(player)
            try:
                while self._due or not all(player.is_over for player in self.players):
                    assert self._turns.now_s < LONGEST_S, (
                        f"hangs: {[(each.turns, each.windows, each.error) for each in self.players]}"
                    )
                    self._act()
                    self._turns.next()
            finally:
                self._turns.end()
        return self

    def _begin(self, player: Player) -> None:
        Turning(self._turns, player, lambda: self._body(player), is_main=True)

    def _begin_anew(self) -> None:
        """Start workers in the place of those that were killed."""
        for due in [due for due in self._due if due[0] <= self._turns.now_s]:
            self._due.remove(due)
            self.players.append(Player(due[1]))
            self._begin(self.players[-1])

    def _act(self) -> None:
        """Stop, continue, kill, and start anew."""
        now = self._turns.now_s
        self._begin_anew()
        for player in self.players:
            others = [each for each in self.players if each is not player]
            left_alone = all(each.is_over or each.stopped_until is not None for each in others)
            if player.stopped_until is not None and (player.stopped_until <= now or left_alone):
                player.stopped_until = None
        for deed in list(self._deeds):
            player = self.players[deed.worker]
            if player.turns >= deed.point or (
                isinstance(deed, Kill) and max(player.windows, default=0) >= deed.windows
            ):
                self._deeds.remove(deed)
                if isinstance(deed, Kill):
                    player.killed = not player.is_over
                    if player.killed and self._anew_s:
                        self._due.append((now + self._anew_s.pop(0), player.number))
                elif not player.is_over:
                    player.stopped_until = float("inf") if deed.for_s is None else now + deed.for_s

    def _body(self, player: Player) -> None:
        """What a script does."""
        store: Any = self._table
        try:
            heartbeat = Heartbeat(store, f"w{player.number}", LOST_AFTER_S)
            try:
                rounds = Rounds(store, heartbeat, "keep", Needs(1, self._begin_with), DEADLINE_S, JOIN_S)
                model = _model()
                shared = SharedModel(model, as_method("none"), Mean())
                self._train(player, model, _Worker(self._table, heartbeat, rounds, shared))
            finally:
                heartbeat.close(leaves=True)
        except CommunicationError as error:
            player.error = error

    def _train(self, player: Player, model: nn.Module, worker: _Worker) -> None:
        shared = worker.shared
        worker.end_window(0, 0, leaving=False)
        while True:
            windows, copies = shared.counts.windows, shared.parts[0].copy.copies
            player.windows[windows] = digest_of([copies])
            if windows >= self._windows:
                player.result = windows, player.windows[windows]
                return
            for parameter in model.parameters():
                generator = torch.Generator().manual_seed(1000 * windows + player.number)
                parameter.data += torch.randn(parameter.shape, generator=generator)
            _mine.thread.pause(0.01 * player.number)
            worker.end_window(1, 1, leaving=False)


# What must hold -------------------------------------------------------------------------------------------------------


def stops_of(seed: int, workers: int, turns: int) -> list[Stop | Kill]:
    """One or two workers that are stopped anywhere, for any time; every third seed, those that are left are killed."""
    generator = random.Random(seed)
    chosen = generator.sample(range(workers), generator.choice((1, 1, 2)))
    times = (0.2, LOST_AFTER_S + 1.0, 20.0, None, None)
    deeds: list[Stop | Kill] = [Stop(each, generator.randint(1, turns), generator.choice(times)) for each in chosen]
    if seed % 3 == 0:
        others = [worker for worker in range(workers) if worker not in chosen]
        deeds += [Kill(worker, windows=generator.randint(1, 12)) for worker in others]
    return deeds


def check(run: VirtualRun, refused: str) -> Counter[str]:
    """Check that no two workers differ, and that a saved result is overwritten by the same one at most; count ends.

    Args:
        run: that was played.
        refused: what a worker may be told that was away for too long.

    Raises:
        AssertionError: it is not so.
    """
    by_window: dict[int, set[str]] = {}
    for player in run.players:
        for windows, digest in player.windows.items():
            by_window.setdefault(windows, set()).add(digest)
        assert player.error is None or refused in str(player.error), player.error
    forked = [windows for windows, digests in by_window.items() if len(digests) > 1]
    assert not forked, f"workers differ after windows {forked}"
    results = {player.result for player in run.players if player.result}
    assert len(results) < 2, results
    assert results or all(player.error or player.killed for player in run.players)
    kinds = [("killed", "refused", "finished")[2 if p.result else 1 if p.error else 0] for p in run.players]
    return Counter(kinds)


class Drawn(NamedTuple):
    """What came of a run that a seed drew.

    Attributes:
        counts: how workers ended, and what happened to them.
    """

    counts: Counter[str]


def drawn_run(seed: int) -> VirtualRun:
    """A short run whose workers are stopped, continued, killed and started anew; some calls of their store are late.

    Args:
        seed: of all of it.
    """
    draw = random.Random(f"elastic {seed}")
    workers, windows = draw.randint(2, 3), draw.randint(3, 6)
    chosen = draw.sample(range(workers), draw.randint(1, workers))
    times = (0.2, LOST_AFTER_S + 1.0, 10.0, None)
    stops = [Stop(each, draw.randint(1, 20 * windows), draw.choice(times)) for each in chosen if draw.random() < 0.7]
    kills = [Kill(each, draw.randint(1, 20 * windows)) for each in range(workers) if draw.random() < 0.3]
    table = LateTable(seed, draw.choice((0.0, 0.05)), 0.5)
    anew_s = [draw.uniform(0.0, 6.0) for _ in kills if draw.random() < 0.7]
    return VirtualRun(seed, workers, windows, [*stops, *kills], table=table, anew_s=anew_s)


def check_drawn(seed: int) -> Drawn:
    """Run what a seed draws.

    Raises:
        AssertionError: workers differ, a finished run has two results, or it hangs.
    """
    run = drawn_run(seed)
    counts = check(run.play(), OVER)
    return Drawn(counts + Counter(windows=sum(len(player.windows) for player in run.players)))
