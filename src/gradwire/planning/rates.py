"""What of a data sheet's rates is reached in training: constants that were fitted to published step times."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.core.axis import Axis
from gradwire.core.collective import AllGather, AllReduce, AllToAll, Collective
from gradwire.core.errors import SpecError
from gradwire.core.messages import SendRecv
from gradwire.planning.hardware import Hardware

TILE = 128 * 256
"""Elements of a matrix product's result that one multiprocessor works on at a time, as cuBLAS cuts large products."""
FILL = 128
"""Steps along the inner size of a product that a tile takes to fill its pipeline of loads and to write its result."""


@dataclass(frozen=True)
class Efficiencies:
    """Fractions of what hardware sustains that a training step reaches.

    `benchmarks/planning.py` fits the first two to published step times. The third is assumed: NCCL reaches about as
    much of a link's rate while a model trains.

    Args:
        matrix: of the rate that large matrix products sustain.
        memory: of the rate of a GPU's memory.
        links: of the rate of links, in nodes and between them.

    Raises:
        SpecError: a fraction that is not between 0 and 1.
    """

    matrix: float = 0.92
    memory: float = 0.73
    links: float = 0.7

    def __post_init__(self) -> None:
        for name, value in (("matrix", self.matrix), ("memory", self.memory), ("links", self.links)):
            if not 0 < value <= 1:
                raise SpecError(f"efficiency {name}={value} is no fraction: write a number above 0 and at most 1")


class ReachedRates(NamedTuple):
    """Hardware at the rates that training reaches."""

    hardware: Hardware
    reached: Efficiencies

    @property
    def flops_per_s(self) -> float:
        """Of a large matrix product."""
        return self.hardware.peak_tflops * 1e12 * self.hardware.sustained * self.reached.matrix

    @property
    def attention_flops_per_s(self) -> float:
        """Of fused attention."""
        return self.hardware.peak_tflops * 1e12 * self.hardware.attention * self.reached.matrix

    def memory_s(self, nbytes: float) -> float:
        """Seconds that so many bytes take to or from a GPU's memory."""
        return nbytes / (self.hardware.memory_gb_per_s * 1e9 * self.reached.memory)

    def product_s(self, m: float, k: float, n: float, result_bytes: float = 2) -> float:
        """Seconds of an m x k matrix times a k x n one, by a roofline.

        A product is cut into tiles of its result, and all multiprocessors work on a wave of tiles at a time. The last
        wave is on average half empty, so a product of w waves takes the time of w + 1/2, and a tile of inner size k
        that of k + 128. It takes no less time than its operands and its result need to and from memory (Williams et
        al. 2009).

        Args:
            m, k, n: sizes.
            result_bytes: that travel for each element of the result.
        """
        if min(m, k, n) <= 0:
            return 0.0
        waves = m * n / (TILE * self.hardware.processors)
        arithmetic = 2 * m * k * n / self.flops_per_s * (1 + 0.5 / waves) * (1 + FILL / k)
        return max(arithmetic, self.memory_s(2 * (m * k + k * n) + result_bytes * m * n))

    def link(self, size: int, stride: int) -> tuple[float, float]:
        """Bytes a second and seconds of latency of a ring through `size` ranks that are `stride` apart.

        Ranks of a group that share a node pass what crosses nodes through as many network cards as they are.
        """
        hardware = self.hardware
        inside = max(1, min(size, hardware.node // stride))
        node = hardware.node_gb_per_s * 1e9 * self.reached.links
        if inside == size:
            return node, hardware.node_latency_s
        network = hardware.network_gbit_per_s * 1e9 / 8 * self.reached.links
        return min(node, inside * network), hardware.network_latency_s

    def gather_s(self, nbytes: float, size: int, stride: int, messages: float = 1) -> float:
        """Seconds of all-gathers to, or reduce-scatters of, `nbytes`: (n - 1)/n of them on a ring.

        A ring passes each node after the other, so its latency grows with nodes, not with their logarithm.

        Args:
            nbytes: of all messages together.
            size, stride: of the group.
            messages: how many follow each other.
        """
        if size == 1:
            return 0.0
        rate, _ = self.link(size, stride)
        inside = max(1, min(size, self.hardware.node // stride))
        hops = (math.ceil(size / inside) - 1) * self.hardware.network_latency_s
        latency = hops + math.ceil(math.log2(inside)) * self.hardware.node_latency_s
        return (size - 1) / size * nbytes / rate + messages * latency

    def all_reduce_s(self, nbytes: float, size: int, stride: int, messages: float = 1) -> float:
        """Seconds of all-reduces of `nbytes`: 2 (n - 1)/n of them, and for each message the latency of a tree."""
        if size == 1:
            return 0.0
        rate, latency = self.link(size, stride)
        return 2 * (size - 1) / size * nbytes / rate + messages * 2 * math.ceil(math.log2(size)) * latency

    def all_to_all_s(self, nbytes: float, size: int, stride: int, messages: float = 1) -> float:
        """Seconds of all-to-alls of `nbytes` on each rank, in and between nodes at the same time."""
        if size == 1:
            return 0.0
        inside = max(1, min(size, self.hardware.node // stride))
        node = self.hardware.node_gb_per_s * 1e9 * self.reached.links
        network = self.hardware.network_gbit_per_s * 1e9 / 8 * self.reached.links
        here, away = nbytes * (inside - 1) / size, nbytes * (size - inside) / size
        latency = self.hardware.node_latency_s if inside == size else self.hardware.network_latency_s
        return max(here / node, away / network) + messages * math.ceil(math.log2(size)) * latency

    def collective_s(
        self, request: Collective, size: int, stride: int = 1, nbytes: float | None = None, messages: float = 1
    ) -> float:
        """Seconds of what a program asks for.

        Args:
            request: what, on the axis of the group that it names, or on the whole group.
            size, stride: of the group.
            nbytes: that this rank hands over, in all messages; None: those of the request, in one.
            messages: that follow each other.

        Raises:
            SpecError: a kind of collective, or an axis, whose time is not known.
        """
        if isinstance(request.axis, Axis):
            size, stride = request.axis.size, request.axis.stride * stride
        elif request.axis is not None:
            raise SpecError(f"the time of {request.axis} is not known: name nodes of one size, such as node=8")
        nbytes = request.nbytes if nbytes is None else nbytes
        match request:
            case AllReduce():
                return self.all_reduce_s(nbytes, size, stride, messages)
            case AllGather():
                return self.gather_s(size * nbytes, size, stride, messages)
            case AllToAll():
                return self.all_to_all_s(nbytes, size, stride, messages)
            case SendRecv():
                rate, latency = self.link(size, stride)
                return nbytes / rate + messages * latency
            case _:
                raise SpecError(f"the time of {type(request).__name__} is not known: take another method")

    def asked_s(self, requests: Iterable[Collective]) -> float:
        """Seconds of what a program asks for, one after the other, each on an axis of the layout."""
        return sum(self.collective_s(request, 1) for request in requests)
