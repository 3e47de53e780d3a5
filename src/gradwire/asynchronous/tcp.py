"""Servers and workers as processes that are started by hand or by a launcher, on several machines, joined by TCP."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Sequence

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several.client import run_worker
from gradwire.asynchronous.several.cut import sizes
from gradwire.asynchronous.several.messages import Progress, ServerReply
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.asynchronous.several.watching import ServerWatch
from gradwire.core.errors import CommunicationError, CompositionError, first_line
from gradwire.core.flat_layout import FlatLayout
from gradwire.peers.greeting import SECRET_BYTES
from gradwire.peers.protocol import ANY_LENGTH
from gradwire.peers.sockets import SocketConnections, SocketServer, listening, shown

__all__ = ["SECRET_VARIABLE", "Job", "ServersOutcome", "run"]

SECRET_VARIABLE = "GRADWIRE_SECRET"
"""The environment variable that `run` reads where it is given no secret."""

_WATCHER = -1
"""The number of rank 0's watcher, among the servers' peers."""
_TICK_S = 0.1
_CONNECT_S = 10.0


def run(
    job: Job, *, rank: int, addresses: Sequence[str], secret: str | None = None, deadline_s: float = 600.0
) -> ServersOutcome | None:
    """Take part in a job; every process calls this, with the same arguments but its rank.

    Ranks 0 to S - 1 are the servers, where S is the number of addresses, and those behind them the workers. Rank 0
    waits until every server has applied the job's pushes, and is the only one to get what came of it.

    A worker that dies is missed at once, and the others go on; when it is started anew, it takes its place again. When
    a server dies, nobody computes: start it again with the same arguments, and it goes on from its snapshot, where the
    job has a folder that it finds again.

    Args:
        job: what to do; its patience is how long a server may be away, and how long servers wait where no worker is
            left.
        rank: of this process, from 0.
        addresses: host and port at which each server listens, as the others reach it: "10.0.0.1:29500", "[::1]:29500".
        secret: 16 characters or more; without one, that of the environment variable GRADWIRE_SECRET. Whoever does not
            know it is refused. What is sent is not encrypted.
        deadline_s: seconds that rank 0 waits for the last push.

    Raises:
        CompositionError: a rank, an address or a number of servers that cannot be, or no secret.
        CommunicationError: a port in use, another secret or version of gradwire, a server that is away for too long,
            no worker left, or the deadline.
        StateError: a snapshot of another job.
    """
    servers = len(addresses)
    require_rank(job, rank, servers)
    places, known = [address_of(text) for text in addresses], secret_bytes(secret)
    if len(set(places)) < servers:
        raise CompositionError(f"addresses {', '.join(addresses)}: give each server one of its own")
    if rank >= servers:
        return work(job, rank - servers, places, known)
    return ServerProcess(job, rank, servers, places[rank], known).run(places, deadline_s)


def require_rank(job: Job, rank: int, servers: int) -> None:
    """Refuse what cannot be before anything is started.

    Raises:
        CompositionError: a rank that there is not, or more servers than parameters.
    """
    sizes(FlatLayout(job.parameters).numel, servers)
    world = servers + job.workers
    if not 0 <= rank < world:
        raise CompositionError(f"rank {rank} of {servers} servers and {job.workers} workers: it is 0 to {world - 1}")


def address_of(text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        CompositionError: a text that is no address.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise CompositionError(f"address {text!r}: give host:port, as in 10.0.0.1:29500 or [::1]:29500")
    return bare, int(port)


def secret_bytes(secret: str | None = None) -> bytes:
    """Return what connections prove to know: a hash of the secret, or of the one that the environment has.

    Raises:
        CompositionError: no secret, or one that is too short.
    """
    text = os.environ.get(SECRET_VARIABLE, "") if secret is None else secret
    if len(text) < SECRET_BYTES:
        raise CompositionError(
            f"a run over TCP needs a secret of {SECRET_BYTES} characters or more, the same for all processes: pass "
            f"secret= or set {SECRET_VARIABLE} to what this prints: "
            'python -c "import secrets; print(secrets.token_hex(16))"'
        )
    return hashlib.sha256(text.encode()).digest()


def own_address(there: str) -> str:
    """Return the address of this machine by which it would reach another one.

    Raises:
        OSError: there is no way there.
    """
    family, kind, _, _, place = socket.getaddrinfo(there, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # UDP: connecting sends nothing
        probe.connect(place)
        return str(probe.getsockname()[0])


def work(job: Job, number: int, places: Sequence[tuple[str, int]], secret: bytes) -> None:
    """Be a worker of servers at these places, until one says that all is done.

    Raises:
        CommunicationError, PushError, StateError, StepError: as `WorkerClient.run`.
    """
    run_worker(job, number, _connections(job, list(places), secret, number))


def _connections(
    job: Job, places: Sequence[tuple[str, int] | SocketServer], secret: bytes, peer: int
) -> SocketConnections:
    return SocketConnections(
        ServerReply,
        places,
        secret,
        peer,
        most_bytes=ANY_LENGTH,
        connect_s=min(_CONNECT_S, job.patience_s),
        silent_s=job.silent_s,
    )


class ServerProcess:
    """The process of a server, which listens in a thread of its own from now on.

    Args:
        job: what to serve.
        part: p, from 0.
        servers: S.
        place: where to listen; port 0 is any free one.
        secret: what peers must know.

    Attributes:
        host: its end of the connections.

    Raises:
        CommunicationError: a place where nobody can listen.
        StateError, OSError: as `PartServer`.
    """

    def __init__(self, job: Job, part: int, servers: int, place: tuple[str, int], secret: bytes) -> None:
        self._job, self._part, self._secret = job, part, secret
        listening(place).close()  # a port in use is said before a snapshot begins a new life
        self._served = PartServer(job, part, servers)
        self.host = SocketServer(self._served, place, secret, silent_s=job.silent_s)
        self._living_s = time.monotonic()
        self._missing: dict[int, tuple[float, Progress | None]] = {}
        self.host.start()

    def run(self, places: Sequence[tuple[str, int]], deadline_s: float) -> ServersOutcome | None:
        """Serve until all is done, and close the connections. The first server leads, and gets what came of it.

        Args:
            places: of all servers.
            deadline_s: seconds that the first one waits for the last push.

        Raises:
            CommunicationError: a server that is away for too long, no worker left, or the deadline.
        """
        self._places = places
        try:
            return self._lead(deadline_s) if self._part == 0 else self._follow()
        finally:
            self.host.close()

    def _follow(self) -> None:
        """Serve until the first server says that all is done."""
        while not self._served.is_done:
            time.sleep(_TICK_S)
            self._look()
        self._linger()

    def _lead(self, deadline_s: float) -> ServersOutcome:
        """Serve, and watch until every server is done; return what came of it."""
        connections = _connections(self._job, [self.host, *self._places[1:]], self._secret, _WATCHER)
        self._watch = ServerWatch(self._job, connections, self._missed)
        try:
            self._await(time.monotonic() + deadline_s, deadline_s)
            outcome = self._watch.outcome(self._served.losses)
        finally:
            connections.close()
        self._linger()
        return outcome

    def _await(self, end_s: float, deadline_s: float) -> None:
        while min(self._watch.versions) < self._job.pushes:
            self._look()
            before = list(self._watch.progress)
            self._watch.poll((), _TICK_S)
            for part, (old, new) in enumerate(zip(before, self._watch.progress, strict=True)):
                _require_same(part, old, new)
            if time.monotonic() > end_s and min(self._watch.versions) < self._job.pushes:
                raise CommunicationError(f"{self._where()} was the last after {deadline_s:g} s")

    def _where(self) -> str:
        return f"push {min(self._watch.versions)} of {self._job.pushes}"

    def _look(self) -> None:
        """Give up where nobody is served any more."""
        if self.host.failure is not None:
            raise self.host.failure
        now_s, served = time.monotonic(), self._served
        if served.living or served.is_done:
            self._living_s = now_s
        elif now_s - self._living_s > self._job.patience_s:
            where = f"push {served.server.version} of {self._job.pushes}"
            raise CommunicationError(f"no worker is left at {where}, and none came for {self._job.patience_s:g} s")

    def _missed(self, part: int, error: Exception) -> None:
        """A server cannot be reached: whoever started it may start it again."""
        now_s, heard = time.monotonic(), self._watch.progress[part]
        since_s, before = self._missing.get(part, (now_s, heard))
        if heard is not before:
            since_s = now_s  # it was there meanwhile
        self._missing[part] = (since_s, heard)
        if now_s - since_s > self._job.patience_s:
            raise CommunicationError(
                f"server {part} at {shown(self._places[part])} was not there for {self._job.patience_s:g} s, at "
                f"{self._where()}: start it ({first_line(error)})",
                (part,),
            ) from error

    def _linger(self) -> None:
        """Wait until workers have heard that all is done: those that compute do so with their next push."""
        end_s = time.monotonic() + self._job.patience_s
        while self.host.peers and time.monotonic() < end_s:
            time.sleep(_TICK_S)


def _require_same(part: int, before: Progress | None, now: Progress | None) -> None:
    if before is not None and now is not None and now.version < before.version and now.life <= before.life:
        raise CommunicationError(
            f"server {part} was started again and begins anew, where push {before.version} had been applied: give the "
            "job a folder for snapshots, and start all again",
            (part,),
        )
