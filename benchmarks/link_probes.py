"""Latency and rate between two ranks of an emulated network, by plain sockets and by PyTorch's own messages.

They are what the library's own measurement is compared with. Every rank must make the same calls; those that are not
among the two wait.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from gradwire.network.links import address

PING_BYTES, TRIPS, STREAMS, PORT = 8, 200, 5, 5000
_PING = torch.zeros(PING_BYTES, dtype=torch.uint8)


def round_trips(ranks: Sequence[int], trip: Callable[[Sequence[int]], object]) -> float:
    """Half of the lower quartile of round trips between two ranks; the others wait."""
    dist.barrier()
    times = list[float]()
    for _ in range(TRIPS if dist.get_rank() in ranks else 0):
        began = time.perf_counter()
        trip(ranks)
        times.append(time.perf_counter() - began)
    return of_rank(ranks[0], statistics.quantiles(times)[0] / 2 if times else 0.0)


def gloo_trip(ranks: Sequence[int]) -> None:
    """A round trip of the messages that a Gloo group has; those of `dist.send` and `dist.recv` take 10 us longer."""
    first, group = dist.get_rank() == ranks[0], dist.group.WORLD
    assert group is not None
    peer = ranks[1] if first else ranks[0]
    for send in (first, not first):
        (group.send if send else group.recv)([_PING], peer, 0).wait()


def plain_sockets(ranks: Sequence[int], nbytes: int) -> tuple[float, float]:
    """Latency one way, and seconds a byte: what 3 times as many bytes take longer."""
    first, peer = dist.get_rank() == ranks[0], None
    if first:
        with socket.create_server((address(ranks[0]), PORT)) as server:
            dist.barrier()
            peer = server.accept()[0]
    else:
        dist.barrier()
        if dist.get_rank() == ranks[1]:
            peer = socket.create_connection((address(ranks[0]), PORT), timeout=30)
    if peer is None:
        round_trips(ranks, gloo_trip)
        return of_rank(ranks[0], 0.0), of_rank(ranks[0], 0.0)
    with peer:
        peer.settimeout(60)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        alpha_s = round_trips(ranks, lambda _: socket_trip(peer, PING_BYTES, first=first))
        times = list[list[float]]()
        for _ in range(STREAMS):
            times.append([socket_trip(peer, size, first=first) for size in (nbytes, 3 * nbytes)])
    one, three = map(statistics.median, zip(*times, strict=True))
    return of_rank(ranks[0], alpha_s), of_rank(ranks[0], (three - one) / (2 * nbytes))


def socket_trip(peer: socket.socket, nbytes: int, *, first: bool) -> float:
    """Seconds until so many bytes have gone to the second rank, and its answer has come back."""
    began = time.perf_counter()
    for send in (first, not first):
        size = nbytes if send == first else PING_BYTES
        if send:
            peer.sendall(bytes(size))
            continue
        while size:
            size -= len(peer.recv(min(size, 1 << 20)))
    return time.perf_counter() - began


def of_rank(rank: int, value: float) -> float:
    """What a rank has measured, on all of them."""
    told = torch.tensor([value if dist.get_rank() == rank else 0.0], dtype=torch.float64)
    dist.all_reduce(told)
    return float(told)
