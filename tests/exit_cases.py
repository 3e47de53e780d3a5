"""Scripts that end while a thread of gradwire's is inside of C++: `exit_cases.py CASE`.

Each leaves Python while its thread still computes or waits, and has Python take a while to end (`Slow`), so that the
thread comes back while the interpreter is being taken apart. Where nobody waits for it, that aborts the process.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from gradwire import CommunicationError
from gradwire.core.record import Record
from gradwire.peers.protocol import Reply, Served
from gradwire.peers.sockets import SocketConnections, SocketServer
from gradwire.sync.elastic.attempt import Attempt
from gradwire.sync.elastic.link import GroupLine

BUSY_S, SLOW_S = 1.0, 4.0


class Slow:
    """Is destroyed with this module, and takes its time."""

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(SLOW_S)


slow = Slow()


def connecting() -> None:
    """A peer never comes, and is given up."""
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    line = GroupLine()
    attempt = Attempt(lambda: line.connected(store, "group", (0, 1), 0, 2 * BUSY_S), line.close)
    try:
        attempt.result(lambda: False)
    except CommunicationError:
        print("given up", flush=True)


class Ping(Record, frozen=True):
    """A request without a field."""


class Busy(Served):
    """Computes for whoever asks."""

    requests = Ping

    def __init__(self) -> None:
        self.began = threading.Event()

    def ask(self, request: Ping, reply: Reply) -> None:
        self.began.set()
        end, product = time.monotonic() + BUSY_S, torch.ones(1024, 1024)
        while time.monotonic() < end:
            product = product @ product / 1024


def serving() -> None:
    """A server computes for somebody, and nobody has closed it."""
    served = Busy()
    server = SocketServer(served, ("127.0.0.1", 0), b"s" * 16)
    server.start()
    SocketConnections(Ping, [server], b"s" * 16, 0, most_bytes=0).ask(0, Ping())
    served.began.wait()
    print("computing", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"connecting": connecting, "serving": serving}[sys.argv[1]]()
    if sys.argv[2] == "raises":
        raise ValueError("the script's own")
    sys.exit(int(sys.argv[2]))
