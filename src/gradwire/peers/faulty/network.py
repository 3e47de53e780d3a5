"""Servers and peers in simulated time, and the messages between them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

from typing_extensions import override

from gradwire.core.record import Record, pack, unpack
from gradwire.peers.clock import EventClock
from gradwire.peers.faulty.faults import CarrierFaults
from gradwire.peers.faulty.process import Life, Line, Process
from gradwire.peers.protocol import Connections, Served

TICK_S = 0.5
"""Between the ticks of a server."""
_NOTICE_S = 0.05
"""At most so long after its end a connection is found to have ended."""


class FaultyNetwork:
    """Servers and peers in simulated time, and what goes wrong between them.

    Args:
        faults: what goes wrong.
        seed: of all that is drawn.

    Attributes:
        clock: the simulated time.
        draw: where random numbers come from; whoever tests may draw from it too.
        servers, peers: the processes, by number.
        happened: how often what went wrong.
    """

    def __init__(self, faults: CarrierFaults, seed: int) -> None:
        self.faults, self.draw = faults, random.Random(seed)
        self.clock = EventClock[Callable[[], None]]()
        self.servers: list[Process] = []
        self.peers: dict[int, Process] = {}
        self.happened: Counter[str] = Counter()

    @property
    def now_s(self) -> float:
        """Simulated seconds since the beginning."""
        return self.clock.now_s

    @property
    def processes(self) -> list[Process]:
        """All of them, the servers first."""
        return [*self.servers, *self.peers.values()]

    def serve(self, make: Callable[[], Served]) -> Process:
        """Add the next server, and start it.

        Args:
            make: returns its protocol object, for each life.
        """

        def start(life: Life) -> None:
            life.served = make()
            self._tick(life)

        self.servers.append(Process(len(self.servers), start))
        self.start(self.servers[-1])
        return self.servers[-1]

    def join(self, number: int, main: Callable[[FaultyConnections], Iterator[float]], replies: Any) -> Process:
        """Add a peer, and start it.

        Args:
            number: its own.
            main: its main function.
            replies: as `Connections`.
        """

        def start(life: Life) -> None:
            connections = FaultyConnections(self, life, replies)
            connections.begin(main(connections))

        self.peers[number] = Process(number, start)
        self.start(self.peers[number])
        return self.peers[number]

    def run(self, end_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen until that time, or until something is so."""
        while self.clock.next_s <= end_s and not until():
            self.clock.next_event()()

    # What goes wrong ---------------------------------------------------------------------------------------------

    def plan_faults(self, spared: Container[Process] = ()) -> None:
        """Draw when processes are killed and stopped.

        Args:
            spared: nothing happens to these.
        """
        for process in self.processes:
            if process not in spared:
                for what, share in ((self.kill, self.faults.kills), (self.stop, self.faults.stops)):
                    self._plan_some(share, partial(what, process))

    def _plan_some(self, average: float, what: Callable[[], None]) -> None:
        while average > 0 and self.draw.random() < average / (1 + average):
            self.clock.plan(self.draw.uniform(self.now_s, self.faults.until_s), what)

    def kill(self, process: Process) -> None:
        """End a process, and start it anew later where it is to be; nothing where it is down."""
        if process.is_up:
            self.happened["kills"] += 1
            self.end(process)
            if process in self.servers or self.draw.random() < self.faults.anew:
                self.clock.plan(self.now_s + self.draw.uniform(0, self.faults.down_s), partial(self.start, process))

    def end(self, process: Process) -> None:
        """End a process, without having it started anew; what it has sent is under way nonetheless."""
        life, life.is_up = process.life, False
        for line, other in life.other_ends():
            at_s = max(line.last_s[other is line.peer] if self.faults.is_ordered else 0.0, self._soon_s(_NOTICE_S))
            self._at(at_s, other, partial(line.missed_by, other, ConnectionResetError("the other end is dead")))

    def start(self, process: Process) -> None:
        """Begin another life of a process; nothing where it is up."""
        if not process.is_up:
            process.life, process.lives = Life(process), process.lives + 1
            process.life.is_up = True
            process.start(process.life)

    def stop(self, process: Process, for_s: float | None = None) -> None:
        """Stop a process, as SIGSTOP does, and continue it later; nothing where it is down or stopped.

        Args:
            process: which one.
            for_s: how long; drawn by default.
        """
        life = process.life
        if life.is_up and not life.is_stopped:
            self.happened["stops"] += 1
            life.is_stopped, life.stops = True, life.stops + 1
            end_s = self._soon_s(self.faults.stopped_s) if for_s is None else self.now_s + for_s
            self.clock.plan(end_s, partial(self.resume, process))
            self._plan_silence(life)

    def resume(self, process: Process) -> None:
        """Continue a process that is stopped: all that has come meanwhile it receives now."""
        process.life.is_stopped = False
        self._go_on(process.life)

    def cut(self, line: Line) -> None:
        """Cut a connection: all that is under way there is lost, and both ends find out."""
        line.is_cut = True
        for end in (line.server, line.peer):
            error = ConnectionResetError("the connection was cut")
            self._at(self._soon_s(_NOTICE_S), end, partial(line.missed_by, end, error))

    def _plan_silence(self, life: Life) -> None:
        self.clock.plan(self.now_s + self.faults.silent_s, partial(self._silence, life, life.stops))

    def _silence(self, life: Life, stop: int) -> None:
        """The others have heard nothing of a stopped process for too long."""
        for line, other in life.other_ends():
            self._when_ready(other, partial(self._notice, line, life, stop))

    def _notice(self, line: Line, silent: Life, stop: int) -> None:
        if silent.is_stopped and silent.stops == stop and not line.is_cut:
            self.happened["silences"] += 1
            self.cut(line)

    # Time --------------------------------------------------------------------------------------------------------

    def _soon_s(self, longest_s: float) -> float:
        return self.now_s + self.draw.uniform(0, longest_s)

    def _at(self, at_s: float, life: Life, what: Callable[[], None]) -> None:
        """Have a process do something at a time, or as soon as it runs and has nothing else to do."""
        self.clock.plan(at_s, partial(self._when_ready, life, what))

    def _when_ready(self, life: Life, what: Callable[[], None]) -> None:
        if life.is_up:
            life.inbox.append(what)
            self._go_on(life)

    def _go_on(self, life: Life) -> None:
        while life.is_up and not life.is_stopped and self.now_s >= life.free_s and (life.outbox or life.inbox):
            (life.outbox or life.inbox).popleft()()

    def rest(self, life: Life, seconds: float) -> None:
        """Have a process compute for so long."""
        life.free_s = max(self.now_s, life.free_s) + seconds
        self.clock.plan(life.free_s, partial(self._go_on, life))

    def plan_turn(self, life: Life, seconds: float, what: Callable[[], None]) -> None:
        """Have a process do something in so many seconds."""
        self._at(max(self.now_s, life.free_s) + seconds, life, what)

    def _tick(self, life: Life) -> None:
        life.served.tick()
        self._at(self.now_s + TICK_S, life, partial(self._tick, life))

    # Messages ----------------------------------------------------------------------------------------------------

    def leave(self, life: Life, depart: Callable[[], None]) -> None:
        """Have a message depart, once its sender has computed."""
        if self.now_s < life.free_s:
            life.outbox.append(depart)
        else:
            depart()

    def connect(self, connections: FaultyConnections, server: int) -> Line:
        """Connect a peer to a server.

        Raises:
            ConnectionRefusedError: the server is down.
        """
        life = self.servers[server].life
        if not life.is_up:
            raise ConnectionRefusedError("nobody listens there")
        line = Line(life, connections.life, connections)
        life.open[line] = connections.life.open[line] = None
        if life.is_stopped:  # it was silent before somebody listened
            self._plan_silence(life)
        self._at(self._arrives_s(line, to_peer=False), life, partial(self._welcome, line))
        return line

    def _welcome(self, line: Line) -> None:
        """A peer that was here under its number is forgotten, without being lost."""
        line.server.lines[line.peer.process.number] = line

    def to_server(self, line: Line, number: int, request: Any) -> None:
        """Have a request travel to the server of a line, as record or as bytes."""
        packed = pack(request) if self.faults.is_packed else request
        self._travel(line, partial(self._ask, line, number, packed), to_peer=False)

    def _ask(self, line: Line, number: int, packed: Any) -> None:
        life = line.server if self.faults.is_ordered else self.servers[line.server.process.number].life
        request = unpack(packed, life.served.requests) if self.faults.is_packed else packed
        life.served.require_from(line.peer.process.number, request)
        life.served.ask(request, partial(self._reply, line, number))

    def _reply(self, line: Line, number: int, reply: Record) -> None:
        packed = pack(reply) if self.faults.is_packed else reply
        self._travel(line, partial(line.connections.taken, number, packed), to_peer=True)

    def _travel(self, line: Line, arrive: Callable[[], None], *, to_peer: bool) -> None:
        """Have a message arrive as often as the faults say."""
        faults = self.faults
        drawn = self.draw.random() if self.now_s < faults.until_s else 1.0
        fate = ""
        for kind, share in (("lost", faults.lost), ("cut", faults.cut), ("repeated", faults.repeated)):
            if 0 <= drawn < share:
                fate = kind
                self.happened[kind] += 1
            drawn -= share
        if fate == "cut":
            self.cut(line)
        elif fate != "lost":
            for _ in range(1 + (fate == "repeated")):
                at_s = self._arrives_s(line, to_peer=to_peer)
                self.clock.plan(at_s, partial(self._deliver, line, arrive, to_peer))

    def _arrives_s(self, line: Line, *, to_peer: bool) -> float:
        is_late = self.now_s < self.faults.until_s and self.draw.random() < self.faults.late
        self.happened["late"] += is_late
        at_s = self._soon_s(self.faults.late_s if is_late else self.faults.latency_s)
        if self.faults.is_ordered:
            at_s = max(at_s, line.last_s[to_peer])
            line.last_s = (line.last_s[0], at_s) if to_peer else (at_s, line.last_s[1])
        return at_s

    def _deliver(self, line: Line, arrive: Callable[[], None], to_peer: bool) -> None:
        if line.is_cut:
            return
        life = line.peer if to_peer else line.server
        if not to_peer and not self.faults.is_ordered:
            life = self.servers[life.process.number].life
        self._when_ready(life, arrive)


class FaultyConnections(Connections):
    """A peer's connections in a `FaultyNetwork`, which makes them.

    Args:
        network: where they are.
        life: of the peer's process.
        replies: as `Connections`.
    """

    def __init__(self, network: FaultyNetwork, life: Life, replies: Any) -> None:
        super().__init__(replies, len(network.servers))
        self.network, self.life, self._turns = network, life, 0

    def begin(self, main: Iterator[float]) -> None:
        """Run the peer's main function until it waits."""
        self._main = main
        self._turn()

    def _turn(self) -> None:
        """Go on in the main function, which waits; where it ends, the process does."""
        self._turns += 1
        timeout_s = next(self._main, None)
        if timeout_s is None:
            self.network.leave(self.life, partial(self.network.end, self.life.process))
        else:
            self.network.plan_turn(self.life, 0.0 if self._arrived else timeout_s, partial(self._late, self._turns))

    def _late(self, turns: int) -> None:
        if turns == self._turns:
            self._turn()

    @override
    def now_s(self) -> float:
        return max(self.network.now_s, self.life.free_s)

    @override
    def sleep(self, seconds: float) -> None:
        """Sleep, or compute: what is sent afterwards departs afterwards, and what comes meanwhile waits."""
        self.network.rest(self.life, seconds)

    @override
    def send(self, server: int, number: int, request: Any) -> None:
        self.network.leave(self.life, partial(self._depart, server, number, request))

    def _depart(self, server: int, number: int, request: Any) -> None:
        line = self.life.lines.get(server)
        try:
            line = self.life.lines[server] = line or self.network.connect(self, server)
        except OSError as error:
            self.fail(server, error)
            self.network.plan_turn(self.life, 0.0, partial(self._late, self._turns))
        else:
            self.network.to_server(line, number, request)

    @override
    def receive(self, timeout_s: float) -> None:
        """Time passes where the main function yields."""

    def taken(self, number: int, packed: Any) -> None:
        """A reply has arrived."""
        if self.network.faults.is_packed:
            self.arrive_packed(number, packed)
        else:
            self.arrive(number, packed)
        self._take_up()

    def missed(self, line: Line, error: Exception) -> None:
        """A connection has ended."""
        if self.life.lines.get(line.server.process.number) is line:
            del self.life.lines[line.server.process.number]
            self.fail(line.server.process.number, error)
            self._take_up()

    def _take_up(self) -> None:
        if self._arrived:
            self._turn()
