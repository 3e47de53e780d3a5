"""How processes on one machine meet without a network of their own: on the loopback interface."""

from __future__ import annotations

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on at `address` now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def loopback_environments(ranks: int, port: int | None = None) -> list[dict[str, str]]:
    """Return, for each rank, the variables that let `ranks` processes meet on the loopback interface."""
    port = free_port() if port is None else port
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**common, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"} for rank in range(ranks)]
