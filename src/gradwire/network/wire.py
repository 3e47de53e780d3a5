"""What a rank has really sent and received, counted where it leaves the host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from gradwire.network.links import uplink_name

FRAMING_BYTES = 66
"""Ethernet (14), IPv4 (20) and TCP with timestamps (32): what each packet carries besides its payload."""

_SO_MAX_PACING_RATE = 47
_UNPACED = 2**64 - 1
_TCP_INFO_BYTES = 216
# offsets in the kernel's struct tcp_info, which only ever grows at its end
_BYTES_RECEIVED, _SEGMENTS, _BYTES_SENT = 128, 136, 200


class WireReading(NamedTuple):
    """Counters of one rank, which only ever grow; the difference of two says what happened in between.

    Ranks that share a host share its counters: `WireMeter.ranks` says how many do. What they send to each other does
    not leave the host and is counted apart, as `inside_bytes` in `inside_packets`; elsewhere these are 0.
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int
    inside_bytes: int = 0
    inside_packets: int = 0

    def since(self, earlier: WireReading) -> WireReading:
        """Return what was counted between `earlier` and this reading.

        >>> WireReading(300, 30, 3, 1).since(WireReading(100, 10, 1, 0))
        WireReading(tx_bytes=200, rx_bytes=20, tx_packets=2, rx_packets=1, inside_bytes=0, inside_packets=0)
        """
        return WireReading(*(now - then for now, then in zip(self, earlier, strict=True)))

    def plus(self, other: WireReading) -> WireReading:
        """Return what was counted in both of two times.

        >>> WireReading(200, 20, 2, 1).plus(WireReading(100, 10, 1, 0)).tx_bytes
        300
        """
        return WireReading(*(one + another for one, another in zip(self, other, strict=True)))

    @property
    def payload_tx_bytes(self) -> int:
        """What was sent without its framing; an acknowledgement is framing only and so counts nothing."""
        return self.tx_bytes - FRAMING_BYTES * self.tx_packets

    @property
    def all_bytes(self) -> int:
        """What was sent, also what did not leave the host."""
        return self.tx_bytes + self.inside_bytes

    @property
    def all_payload_bytes(self) -> int:
        """`all_bytes` without the framing."""
        return self.all_bytes - FRAMING_BYTES * (self.tx_packets + self.inside_packets)


class _Counter(Protocol):
    ranks: int

    def read(self) -> WireReading: ...
    def pace(self) -> bool: ...
    def lift(self) -> None: ...


class WireMeter:
    """Reads the counters of the rank that this process is.

    On a host of its own these are the counters of its interface, which see everything that crosses the wire.
    The kernel hands a packet of several frames to the interface as one: `tx_bytes` then lacks the framing of the
    others (4% at most) while `payload_tx_bytes` stays exact. On a shared loopback interface the counters are
    sums over this process's own TCP connections.

    Example::

        meter = WireMeter.from_environment()
        before = meter.read()
        dist.all_reduce(gradient)
        print(meter.read().since(before).payload_tx_bytes)

    Attributes:
        ranks: how many share these counters.
    """

    def __init__(self, counter: _Counter):
        self._counter = counter
        self.ranks = counter.ranks

    @classmethod
    def from_environment(cls) -> WireMeter:
        """Make the meter that `GRADWIRE_WIRE` describes; without it, one of this process's sockets."""
        wire = os.environ.get("GRADWIRE_WIRE", "sockets:inf")
        kind, _, what = wire.partition(":")
        if kind == "interface":
            name, _, ranks = what.partition(":")
            return cls(_Interface(name, int(ranks or 1)))
        if kind == "sockets":
            return cls(_Sockets(float(what), os.environ.get("MASTER_PORT", "")))
        raise ValueError(f'GRADWIRE_WIRE={wire!r} must read "interface:NAME[:RANKS]" or "sockets:BYTES_PER_S"')

    def read(self) -> WireReading:
        """Return the counters as they stand now."""
        return self._counter.read()

    def pace(self) -> bool:
        """Slow this process's connections down to its rate; call it after the process groups exist.

        Does nothing where the link itself is limited. Returns whether connections are slower than before.
        """
        return self._counter.pace()

    def lift(self) -> None:
        """Take the limit of `pace` off again, for what is not measured."""
        self._counter.lift()


class _Interface:
    """Counters of a network interface, and of the loopback interface where several ranks share the host.

    They are read from /proc/net/dev and not from /sys/class/net: one read gives all four at one time, and
    /proc shows the reader's own network namespace, where /sys shows the one it was mounted in.
    """

    def __init__(self, name: str, ranks: int):
        self._name = name
        self.ranks = ranks

    def read(self) -> WireReading:
        found = _interfaces(Path("/proc/net/dev"))
        if self._name not in found:
            raise ValueError(f"no interface {self._name!r} here: does this process run on a host of the network?")
        if self.ranks == 1:
            return found[self._name]
        inside = found["lo"]
        return found[self._name]._replace(inside_bytes=inside.tx_bytes, inside_packets=inside.tx_packets)

    def pace(self) -> bool:
        """Nothing to do: the link is limited."""
        return False

    def lift(self) -> None:
        """Nothing to do: whoever made the link lifts its limit."""


def _interfaces(file: Path) -> dict[str, WireReading]:
    """The counters of each interface, from a file like /proc/net/dev."""
    lines = (line.partition(":") for line in file.read_text().splitlines())
    columns = {name.strip(): [int(count) for count in counts.split()] for name, colon, counts in lines if colon}
    return {name: WireReading(each[8], each[0], each[9], each[1]) for name, each in columns.items()}


class UplinkMeter:
    """Reads the counters of the links between groups of hosts of a `Network` with `uplinks`, on any of its ranks.

    Args:
        switch: the process in whose network namespace they are.
        groups: how many groups each level has, the smallest groups first.

    Example::

        meter = UplinkMeter.from_environment()
        before = meter.read()
        dist.all_reduce(gradient)
        sites = meter.read()[-1]  # the largest groups
        print([now.since(then).payload_tx_bytes for now, then in zip(sites, before[-1], strict=True)])
    """

    def __init__(self, switch: int, groups: Sequence[int]) -> None:
        self._file, self._groups = Path(f"/proc/{switch}/net/dev"), groups

    @classmethod
    def from_environment(cls) -> UplinkMeter:
        """Make the meter that `GRADWIRE_UPLINKS` describes; without it, one of no links."""
        words = os.environ.get("GRADWIRE_UPLINKS", "0").split(":")
        if not all(word.isdigit() for word in words):
            raise ValueError(f'GRADWIRE_UPLINKS={":".join(words)!r} must read "PROCESS:GROUPS:..."')
        switch, *groups = map(int, words)
        return cls(switch, groups)

    def read(self) -> tuple[tuple[WireReading, ...], ...]:
        """Return the counters of each group's link, for each level: sent is what leaves the group."""
        if not self._groups:
            return ()
        found = _interfaces(self._file)
        return tuple(
            tuple(found[uplink_name(level, group)] for group in range(groups))
            for level, groups in enumerate(self._groups)
        )


class _Sockets:
    """Counters of this process's TCP connections; one that has closed keeps what was last seen of it."""

    ranks = 1

    def __init__(self, bytes_per_s: float, store_port: str):
        self._bytes_per_s = bytes_per_s
        self._store_port = int(store_port) if store_port.isdigit() else None
        self._seen: dict[int, WireReading] = {}

    def read(self) -> WireReading:
        for inode, connection in _connections():
            self._seen[inode] = _tcp_counters(connection)
        columns = zip(WireReading(0, 0, 0, 0), *self._seen.values(), strict=True)
        return WireReading(*(sum(column) for column in columns))

    def pace(self) -> bool:
        """Give each connection to a peer an equal share of the rate, so that together they obey it."""
        if self._bytes_per_s == float("inf"):
            return False
        self._set_pace(self._bytes_per_s)
        return True

    def lift(self) -> None:
        """Let each connection send as fast as it can."""
        self._set_pace(None)

    def _set_pace(self, bytes_per_s: float | None) -> None:
        """Limit what all connections to peers send together; None for no limit."""
        with contextlib.ExitStack() as stack:
            peers = [
                stack.enter_context(socket.socket(fileno=os.dup(connection.fileno())))
                for _, connection in _connections()
                if self._store_port not in (connection.getsockname()[1], connection.getpeername()[1])
            ]
            for peer in peers:
                share = _UNPACED if bytes_per_s is None else max(1, int(bytes_per_s / len(peers)))
                peer.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("Q", share))


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, socket) of each TCP connection of this process; the socket is closed at the next step."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:  # a duplicate: closing it closes nothing
                if connection.type == socket.SOCK_STREAM and connection.family in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    connection.getpeername()  # a listener has none, and no counters that matter
                    yield int(link[8:-1]), connection


def _tcp_counters(connection: socket.socket) -> WireReading:
    """Return payload plus framing of the segments counted, so that a payload comes out as on an interface."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED)
    segments_out, segments_in = struct.unpack_from("II", info, _SEGMENTS)
    (sent,) = struct.unpack_from("Q", info, _BYTES_SENT)
    return WireReading(
        sent + FRAMING_BYTES * segments_out, received + FRAMING_BYTES * segments_in, segments_out, segments_in
    )
