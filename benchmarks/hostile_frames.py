"""Damaged and hostile frames at every carrier: nothing is accepted, nothing is unpickled, and memory stays flat.

A server of parameters (`PartServer`) listens in a process of its own, on TCP over the loopback interface and on a Unix
socket with shared rows. Strangers and peers that know the secret send it a million frames that no honest worker sends:
greetings that are missing, wrong, replayed or of another version; and after a right greeting random bytes, huge
lengths, cut frames, flipped bits of real requests, records with wrong fields, pickles, headers of huge or nested
tables, replays, requests in another's name, and pushes that are not due. Most of them end their connection. The same
frames go straight into `gradwire.core.record.unpack`, which is how the other carriers (Ray, federated processes) read
what comes.

Looked at: the server's version, values and journal are those of the honest worker's pushes; the file that unpickling
would make is not there; the server's memory before and after; what was refused, by reason; and the honest worker's
microseconds for a push before, during and after the attack.

    python benchmarks/hostile_frames.py --frames 1000000 --save
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attack import PEERS, Attack, Frames, attack
from common import save_result
from gradwire.asynchronous import ASGD
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several import PartedWorker, PartServer
from gradwire.asynchronous.several.messages import AnyRequest, PushRequest, ServerReply
from gradwire.core.errors import RecordError
from gradwire.core.record import unpack
from gradwire.peers import greeting
from gradwire.peers.sockets import Address, SharedRows, SocketConnections, SocketServer

NUMEL = 1000
PUSHES = 500
"""Of the honest worker, before the attack and after it."""
START = {"x": torch.zeros(NUMEL)}


def never(worker: int) -> Any:
    """The job's work: nobody computes it here."""
    raise NotImplementedError


# The server -----------------------------------------------------------------------------------------------------------


class Looked(NamedTuple):
    """What a server is, at a moment.

    Attributes:
        version, values: of the parameters.
        rows: of the journal, by worker.
        refused: counts by reason.
        rss_mib: memory that it holds.
    """

    version: int
    values: list[float]
    rows: Counter[int]
    refused: Counter[str]
    rss_mib: float


def rss_mib() -> float:
    """This process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def serve(pipe: Any, address: Address, secret: bytes, rows: SharedRows | None) -> None:
    """The server's process: serves in a thread, and says what it is when asked."""
    torch.set_num_threads(1)
    job = Job(START, ASGD(1.0), never, workers=2, pushes=10**9, silent_s=30.0)
    served = PartServer(job, 0, 1)
    server = SocketServer(served, address, secret, rows=rows)
    server.start()
    pipe.send(server.address)
    while pipe.recv():
        counts = Counter(row.worker for row in served.journal.rows())
        values = served.server.values.tolist()
        pipe.send(Looked(served.server.version, values, counts, Counter(server.refused), rss_mib()))
    server.close()


class Target:
    """A server in a process of its own. Leaving the `with` block ends it.

    Args:
        address: where it listens.
        rows: whether it shares memory with its peers.
    """

    def __init__(self, address: Address, *, rows: bool) -> None:
        self.secret, size = secrets.token_bytes(greeting.SECRET_BYTES), 1 << 17
        self.rows = SharedRows.of(2, size, size) if rows else None
        context = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, address, self.secret, self.rows), daemon=True)
        self._process.start()
        self.address: Address = self._pipe.recv()

    def look(self) -> Looked:
        """Ask what it is."""
        self._pipe.send(True)
        return self._pipe.recv()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(False)
        self._process.join(10)


class Honest:
    """A worker that pushes as it should; each push takes 1 from every parameter.

    Attributes:
        pushed: how often. Who knows the secret may greet under this worker's number too, and takes its place then.
        last: its last push.
    """

    last: PushRequest

    def __init__(self, target: Target) -> None:
        self.pushed = 0
        self.worker = PartedWorker(0, None, START, servers=1)
        rows = [target.rows] if target.rows else ()
        self.connections = SocketConnections(
            ServerReply, [target.address], target.secret, 0, most_bytes=1 << 20, rows=rows
        )
        self._send(self.worker.begin())
        self._wait()

    def _send(self, requests: list[Any]) -> None:
        for request in requests:
            self.connections.ask(0, request)

    def _wait(self) -> None:
        while self.worker.granted is None:
            arrived = self.connections.wait(30.0)
            if arrived is None or arrived.error is not None:
                raise AssertionError(f"the honest worker was cut off: {arrived}")
            self._send(self.worker.receive(arrived.request, arrived.reply))

    @property
    def applied(self) -> int:
        """How many of its pushes count, as its next grant says."""
        assert self.worker.granted is not None
        return self.worker.granted.number

    def push(self) -> float:
        """Push, and return the microseconds until the next grant."""
        began_s = time.perf_counter()
        [self.last] = [one for one in self.worker.push(torch.ones(NUMEL), 0.0, 0.001) if isinstance(one, PushRequest)]
        self._send([self.last])
        self._wait()
        self.pushed += 1
        return 1e6 * (time.perf_counter() - began_s)

    def push_many(self, count: int) -> float:
        """Push so often, and return the median of the microseconds."""
        return statistics.median(self.push() for _ in range(count))

    def push_until(self, event: threading.Event) -> float:
        """Push a hundred times a second until something has happened; return the median of the microseconds."""
        found: list[float] = []
        while not event.wait(0.01):
            found.append(self.push())
        return statistics.median(found) if found else float("nan")


# The attack -----------------------------------------------------------------------------------------------------------


class Hit(NamedTuple):
    """What came of an attack.

    Attributes:
        sent, outcomes: counts by kind.
        connections: that it made.
    """

    sent: Counter[str]
    outcomes: Counter[str]
    connections: int


def hit(pipe: Any, address: Address, secret: bytes, push: PushRequest, marker: Path, seed: int, count: int) -> None:
    """The attacker's process."""
    peers = (*PEERS, "row") if isinstance(address, str) else PEERS
    made = Attack(address, secret, Frames(random.Random(seed), push, marker))
    attack(made, count, peers)
    pipe.send(Hit(made.sent, made.outcomes, made.connections))


def hit_from_aside(target: Target, push: PushRequest, marker: Path, count: int) -> tuple[Any, Any]:
    """Attack from a process of its own; return it and where it says what came of it."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, target.address, target.secret, push, marker, count, count)
    process = context.Process(target=hit, args=arguments, daemon=True)
    process.start()
    return process, ours


def at_port(address: Address, count: int, marker: Path) -> dict[str, Any]:
    """Attack a server at an address while an honest worker pushes; return what came of it.

    Raises:
        AssertionError: something was accepted.
    """
    with Target(address, rows=isinstance(address, str)) as target:
        honest = Honest(target)
        before_us, began, began_s = honest.push_many(PUSHES), target.look(), time.monotonic()
        process, pipe = hit_from_aside(target, honest.last, marker, count)
        over = threading.Event()
        threading.Thread(target=lambda: (process.join(), over.set()), daemon=True).start()
        during_us = honest.push_until(over)
        if not pipe.poll(1.0):
            raise AssertionError(f"the attacker ended with {process.exitcode}")
        found: Hit = pipe.recv()
        ended, seconds = target.look(), time.monotonic() - began_s
        after_us = honest.push_many(PUSHES)
        require_untouched(target.look(), honest, found, marker)
    return {
        "frames": sum(found.sent.values()),
        "accepted": 0,
        "seconds": round(seconds, 1),
        "connections": found.connections,
        "sent": dict(sorted(found.sent.items())),
        "outcomes": dict(sorted(found.outcomes.items())),
        "refused by the carrier": dict(sorted(ended.refused.items())),
        "rss MiB before, after": [round(began.rss_mib, 1), round(ended.rss_mib, 1)],
        "us per push before, during, after": [round(us, 1) for us in (before_us, during_us, after_us)],
        "honest pushes that count, and made anew": [honest.applied, honest.pushed - honest.applied],
        "load of the machine": round(os.getloadavg()[0], 1),
    }


def require_untouched(looked: Looked, honest: Honest, found: Hit, marker: Path) -> None:
    """The server is as the honest worker's pushes have left it.

    Raises:
        AssertionError: it is not.
    """
    if "ACCEPTED" in found.outcomes:
        raise AssertionError(f"something was accepted: {found.outcomes}")
    if (looked.version, looked.rows) != (honest.applied, Counter({0: honest.applied})):
        raise AssertionError(f"{honest.applied} pushes, and the server has {looked.version} of {looked.rows}")
    if set(looked.values) != {-float(honest.applied)}:
        raise AssertionError("the parameters are others than the honest worker's")
    if marker.exists():
        raise AssertionError("something was unpickled")


def unpacked(count: int, push: PushRequest, marker: Path) -> dict[str, Any]:
    """Unpack hostile records as each carrier does; pushes that are well formed and not due are left out.

    Raises:
        AssertionError: something was unpickled, or an error is none of those that carriers expect.
    """
    frames, outcomes = Frames(random.Random(count), push, marker), Counter[str]()
    kinds = [kind for kind in Frames.RECORDS if kind != "undue"]
    before, began_s = rss_mib(), time.monotonic()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        record = getattr(frames, kind)()
        try:
            unpack(record, frames.draw.choice((ServerReply, AnyRequest)))
            outcomes[f"{kind}: well formed"] += 1
        except RecordError:
            outcomes[f"{kind}: refused"] += 1
    if marker.exists():
        raise AssertionError("something was unpickled")
    return {
        "frames": count,
        "seconds": round(time.monotonic() - began_s, 1),
        "outcomes": dict(sorted(outcomes.items())),
        "rss MiB before, after": [round(before, 1), round(rss_mib(), 1)],
    }


def run(count: int, unpack_count: int) -> dict[str, Any]:
    """Attack both ports with half of the frames each, and `unpack` with so many."""
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "unpickled"
        found = {"TCP": at_port(("127.0.0.1", 0), count // 2, marker)}
        found["Unix socket, shared rows"] = at_port(f"{folder}/server", count - count // 2, marker)
        wire = torch.zeros(NUMEL * 4, dtype=torch.uint8)
        push = PushRequest(0, 0, 1, 2, 3, 4, 0, 1, wire, 5, 0.5, 0.1)
        found["unpack"] = unpacked(unpack_count, push, marker)
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=2000, help="at the ports together, and as many into unpack")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.frames, options.frames)
    for where, row in found.items():
        print(where)
        for name, value in row.items():
            print(f"    {name}: {value}")
    if options.save:
        command = " ".join(["python benchmarks/hostile_frames.py", *sys.argv[1:]])
        print(save_result("hostile_frames", {"command": command, "carriers": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
