"""A switch in user space that holds every frame for a time, for kernels that lack netem.

It runs as a script of its own in the switch's namespace and needs nothing but the standard library. Between the ports
it takes the place of the bridge:

    port0 --> [ held for `delay` ] --> port1        a frame goes to the port that its address names,
    port1 --> [ held for `delay` ] --> port0        a broadcast goes to all others

Large packets stay whole: a packet socket with a `virtio_net_hdr` in front of each frame passes on what the kernel's
offloads would do, so that a step in Python is paid once for many frames on the wire. One of which a frame gets lost is
cut there, so that what is lost is what would be lost on a wire. The time is counted from when the
kernel saw the frame, so a late turn on a busy processor is made up for.

It speaks with its creator by two pipes: it writes "ready", and for each line it reads it writes how much processor
time it has used and how many frames it was too slow for. A line with two numbers changes delay and loss before that. It
ends with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_STATISTICS, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 6, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 32, 33, 35
_PR_SET_TIMERSLACK = 29
_BUFFER_BYTES = 16 << 20
_VNET = struct.Struct("=BBHHHH")  # flags, kind, length of headers, payload of a frame, begin and place of the checksum
_GSO_TCPV4, _GSO_ECN = 1, 0x80
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80
_LARGEST = _VNET.size + 14 + 65536
_STAMP = struct.Struct("qq")
_RETRY_S = 1e-3
_EARLY_S = 1e-4  # what it takes to wake up and to pass a frame on, both ways through the kernel; measured

Held = tuple[float, int, bytes]
"""When to send, by which port, and the frame with its header."""


def _open_port(name: str) -> socket.socket:
    """Return a socket that receives and sends the frames of an interface."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    for force, ask in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            port.setsockopt(socket.SOL_SOCKET, force, _BUFFER_BYTES)
        except PermissionError:  # only the machine's own root may go beyond what the machine allows everybody
            port.setsockopt(socket.SOL_SOCKET, ask, _BUFFER_BYTES)
    port.setblocking(False)
    port.bind((name, _ETH_P_ALL))
    return port


class Losses:
    """Which frames get lost: each with the same probability, whatever became of the others.

    Args:
        share: the probability.
    """

    def __init__(self, share: float) -> None:
        self._random = random.Random(0)
        self._log_kept = math.log1p(-share)
        self._until = self._passing()

    def _passing(self) -> int:
        """How many frames pass before the next one is lost, which has a geometric distribution."""
        return int(math.log(1.0 - self._random.random()) / self._log_kept)

    def among(self, frames: int) -> list[int]:
        """Which of the next frames get lost."""
        lost: list[int] = []
        while self._until < frames:
            lost.append(self._until)
            self._until += 1 + self._passing()
        self._until -= frames
        return lost

    def survivors(self, packet: bytes) -> list[bytes]:
        """What arrives of a packet: itself, parts of it, or nothing."""
        large = Large.read(packet)
        lost = self.among(large.frames if large else 1)
        if not lost:
            return [packet]
        return large.without(lost) if large else []


class Large(NamedTuple):
    """A TCP packet of several frames.

    Attributes:
        packet: with its header for the kernel.
        frames: how many it is on the wire.
        frame_bytes: payload of each frame but the last.
        tcp: where its TCP header begins.
        payload: where its payload begins.
        check: where the TCP checksum stands: for the kernel to complete, so it is that of the pseudo-header alone.
    """

    packet: bytes
    frames: int
    frame_bytes: int
    tcp: int
    payload: int
    check: int

    @classmethod
    def read(cls, packet: bytes) -> Large | None:
        """Read a packet; None for a single frame, and for what is not TCP."""
        _, kind, _, frame_bytes, start, check = _VNET.unpack_from(packet)
        if kind & ~_GSO_ECN != _GSO_TCPV4:
            return None
        tcp = _VNET.size + start
        payload = tcp + (packet[tcp + 12] >> 4) * 4
        return cls(packet, -(-(len(packet) - payload) // frame_bytes), frame_bytes, tcp, payload, tcp + check)

    def without(self, lost: Sequence[int]) -> list[bytes]:
        """The packets that are left when some frames are taken out."""
        borders = [-1, *lost, self.frames]
        return [self.part(a + 1, b) for a, b in pairwise(borders) if a + 1 < b]

    def part(self, first: int, end: int) -> bytes:
        """The packet of the frames from `first` to before `end`, with headers as the sender would have written them."""
        skipped = first * self.frame_bytes
        payload = self.packet[self.payload + skipped : self.payload + end * self.frame_bytes]
        head = bytearray(self.packet[: self.payload])
        flags, kind, _, frame_bytes, *checksum = _VNET.unpack_from(head)
        if end - first == 1:
            kind, frame_bytes = 0, 0
        _VNET.pack_into(head, 0, flags, kind, len(head) - _VNET.size, frame_bytes, *checksum)
        self._address(head, first, len(payload))
        _add(head, self.tcp + 4, skipped, 4)  # sequence number
        if end < self.frames:
            head[self.tcp + 13] &= ~(_FIN | _PSH)
        if first > 0:
            head[self.tcp + 13] &= ~_CWR
        return bytes(head) + payload

    def _address(self, head: bytearray, first: int, payload_bytes: int) -> None:
        """Correct what IP says, and the sum of the pseudo-header, which holds the length too."""
        ip, tcp_bytes = _VNET.size + 14, self.payload - self.tcp + payload_bytes
        head[ip + 2 : ip + 4] = (self.tcp - ip + tcp_bytes).to_bytes(2)
        _add(head, ip + 4, first, 2)  # identification
        head[ip + 10 : ip + 12] = bytes(2)
        head[ip + 10 : ip + 12] = (0xFFFF ^ _sum(head[ip : self.tcp])).to_bytes(2)
        pseudo = head[ip + 12 : ip + 20] + socket.IPPROTO_TCP.to_bytes(2) + tcp_bytes.to_bytes(2)
        head[self.check : self.check + 2] = _sum(pseudo).to_bytes(2)


def _sum(data: bytes | bytearray) -> int:
    """Sum of 16-bit words in ones' complement (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _add(head: bytearray, at: int, what: int, size: int) -> None:
    """Add to a number of some bytes, which wraps around."""
    field = slice(at, at + size)
    head[field] = ((int.from_bytes(head[field]) + what) % (1 << 8 * size)).to_bytes(size)


class DelayLine:
    """Moves frames between ports.

    Args:
        ports: to the hosts, or to groups of them.
        port_of: by host: to which of the ports its frames go.
        delay_s: how long each frame is held.
        losses: which frames get lost; None for none.
        queue_s: how much longer one may wait for its port's queue before it is thrown away.
    """

    def __init__(
        self,
        ports: Sequence[socket.socket],
        port_of: Sequence[int],
        delay_s: float,
        losses: Losses | None,
        queue_s: float,
    ) -> None:
        self._ports, self._port_of = ports, port_of
        self._delay_s, self._losses, self._queue_s = delay_s, losses, queue_s
        self._held: deque[Held] = deque()
        self._waiting: list[deque[Held]] = [deque() for _ in ports]
        self._blocked: set[int] = set()
        self._buffer = bytearray(_LARGEST)
        self._view = memoryview(self._buffer)
        self._missed = 0

    def run(self) -> None:
        """Serve until the standard input ends."""
        poll = select.epoll()
        poll.register(0, select.EPOLLIN)
        ranks = {port.fileno(): rank for rank, port in enumerate(self._ports)}
        for descriptor in ranks:
            poll.register(descriptor, select.EPOLLIN)
        while True:
            # epoll's own time-out has whole milliseconds
            select.select([poll], [], [], self._pause_s())
            ready = [descriptor for descriptor, _ in poll.poll(0)]
            if 0 in ready and not self._answer():
                return
            self._receive([ranks[descriptor] for descriptor in ready if descriptor != 0])
            self._send_due()

    def _pause_s(self) -> float | None:
        pause = max(0.0, self._held[0][0] - _EARLY_S - time.monotonic()) if self._held else None
        if self._blocked:
            return _RETRY_S if pause is None else min(pause, _RETRY_S)
        return pause

    def _answer(self) -> bool:
        """Tell what was used; False once nobody can ask any more."""
        question = os.read(0, 1 << 16)
        if not question:
            return False
        if change := question.split():
            self._change(*map(float, change))
        for port in self._ports:  # reading them sets the kernel's counters back
            self._missed += struct.unpack("II", port.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))[1]
        print(time.process_time(), self._missed, flush=True)
        return True

    def _change(self, delay_s: float, loss: float) -> None:
        """Hold frames for another time, and lose another share of them; those that are held leave in their order."""
        if delay_s < self._delay_s:
            now = time.monotonic()
            self._held = deque((min(when, now + delay_s), port, frame) for when, port, frame in self._held)
        self._delay_s, self._losses = delay_s, Losses(loss) if loss else None

    def _receive(self, ranks: Sequence[int]) -> None:
        arrived: list[Held] = []
        since = time.monotonic() - time.time() + self._delay_s
        for rank in ranks:
            with contextlib.suppress(BlockingIOError):
                while True:
                    size, notes, _, _ = self._ports[rank].recvmsg_into([self._buffer], 32)
                    seconds, nanoseconds = _STAMP.unpack(notes[0][2])
                    when = since + seconds + 1e-9 * nanoseconds
                    packet = bytes(self._view[:size])
                    for survivor in self._losses.survivors(packet) if self._losses else [packet]:
                        self._arrive(arrived, when, rank, survivor)
        arrived.sort(key=_when)  # ports are read one after the other
        self._held.extend(arrived)

    def _arrive(self, arrived: list[Held], when: float, rank: int, frame: bytes) -> None:
        if frame[_VNET.size] & 1:  # to all
            arrived += [(when, port, frame) for port in range(len(self._ports)) if port != rank]
            return
        host = int.from_bytes(frame[_VNET.size + 4 : _VNET.size + 6])
        # a bridge that does not know a host yet sends its frames to all, and so here, out of the host's own group
        if host < len(self._port_of) and self._port_of[host] != rank:
            arrived.append((when, self._port_of[host], frame))

    def _send_due(self) -> None:
        now = time.monotonic()
        for rank in list(self._blocked):
            self._retry(rank, now)
        held = self._held
        while held and held[0][0] <= now + _EARLY_S:
            one = held.popleft()
            if one[1] in self._blocked or not self._sent(one):
                self._blocked.add(one[1])
                self._waiting[one[1]].append(one)

    def _retry(self, rank: int, now: float) -> None:
        """Send what waits for a port whose queue was full, and forget what has waited too long."""
        waiting = self._waiting[rank]
        while waiting and (waiting[0][0] < now - self._queue_s or self._sent(waiting[0])):
            waiting.popleft()
        if not waiting:
            self._blocked.discard(rank)

    def _sent(self, one: Held) -> bool:
        """Send a frame; False where the socket can hold no more."""
        try:
            self._ports[one[1]].send(one[2])
        except BlockingIOError:
            return False
        except OSError:  # the port's queue threw it away, as that of a real switch would
            pass
        return True


def _when(one: Held) -> float:
    return one[0]


def _hurry() -> None:
    """Wake up in time also where many compete for the processor, as far as this process may."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main(ports: str, delay_s: str, loss: str, queue_s: str) -> None:
    """Entry point: `delay_line.py PORT:HOSTS,... DELAY_S LOSS QUEUE_S`."""
    pairs = [word.split(":") for word in ports.split(",")]
    sockets = [_open_port(name) for name, _ in pairs]
    port_of = [port for port, (_, hosts) in enumerate(pairs) for _ in range(int(hosts))]
    losses = Losses(float(loss)) if float(loss) else None
    line = DelayLine(sockets, port_of, float(delay_s), losses, float(queue_s))
    _hurry()
    print("ready", flush=True)
    line.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
