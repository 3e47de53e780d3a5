"""The carrier within one process: requests are handed over as they are, and nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from gradwire.peers.protocol import Connections, Served


class LocalConnections(Connections):
    """Connections to protocol objects of this thread, which reply within `ask` or within a later one of it.

    Args:
        servers: by number. One may take the place of another; what the old one was asked is then lost (`fail`).
    """

    def __init__(self, servers: Sequence[Served]) -> None:
        super().__init__(Any, len(servers))
        self.served = list(servers)

    @override
    def send(self, server: int, number: int, request: Any) -> None:
        self.served[server].ask(request, partial(self.arrive, number))

    @override
    def receive(self, timeout_s: float) -> None:
        self.sleep(timeout_s)  # whatever is to come comes by the next request
