"""How processes on one machine meet without a network of their own: on the loopback interface."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 10_000, 65_535
_TRIES = 100


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on at `address` now.

    The system gives ports of its ephemeral range to outgoing connections and to whoever asks for any, so one of these
    may be taken before its user binds it. The port is therefore outside that range where the range is known.

    Args:
        address: of an interface of this machine.

    Raises:
        OSError: an address that this machine does not have.

    >>> 0 < free_port() <= 65_535
    True
    """
    for port in _candidates():
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if port and error.errno == errno.EADDRINUSE:
                    continue
                raise
            return int(probe.getsockname()[1])
    raise AssertionError("the last candidate is any port")


def _candidates() -> Iterator[int]:
    """Random ports outside the ephemeral range, then 0, which means any."""
    lowest, highest = _HIGHEST + 1, 0
    with contextlib.suppress(OSError, ValueError):
        lowest, highest = (int(number) for number in _EPHEMERAL.read_text().split())
    outside = [*range(_LOWEST, min(lowest, _HIGHEST + 1)), *range(max(highest + 1, _LOWEST), _HIGHEST + 1)]
    if highest and outside:
        yield from (secrets.choice(outside) for _ in range(_TRIES))
    yield 0


def loopback_environments(ranks: int, port: int | None = None) -> list[dict[str, str]]:
    """Return, for each rank, the variables that let `ranks` processes meet on the loopback interface."""
    port = free_port() if port is None else port
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**common, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"} for rank in range(ranks)]
