"""Engines on threads of one process: what they send each other meets as that of virtual ranks does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradwire.core.collective import Collective
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.engine import Engine
from gradwire.drivers.host_memory import HostMemory
from gradwire.drivers.interpreter import Pending
from gradwire.drivers.lockstep import Meeting, VirtualTransport
from gradwire.drivers.plan import plan
from gradwire.drivers.virtual import Gradients, gathered
from gradwire.reducers import Reducer

PATIENCE_S = 20.0

T = TypeVar("T")


class Exchange(Meeting):
    """A meeting of threads, which wait for each other."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._changed = threading.Condition()

    def hand_over(self, rank: int, request: Collective) -> int:
        """Note what a rank asks for; return its number."""
        with self._changed:
            number = super().hand_over(rank, request)
            self._changed.notify_all()
            return number

    def take(self, rank: int, number: int) -> Tensor:
        """Wait for all ranks, and return what one of them gets."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.is_here(number), PATIENCE_S), "a rank hangs"
            return super().take(rank, number)


class ThreadTransport(VirtualTransport):
    """One thread's way to the others; it remembers what it sent."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(exchange, rank)
        self.requests: list[Collective] = []

    def issue(self, request: Collective) -> Pending:
        """Send a request; a result is waited for later, as on a process group."""
        self.requests.append(request)
        return super().issue(request)


def on_threads(world_size: int, function: Callable[[ThreadTransport], T]) -> list[T]:
    """What a function returns on each of so many threads, which it is given a transport between."""
    exchange = Exchange(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, [ThreadTransport(exchange, rank) for rank in range(world_size)]))


class Engines:
    """A model's engine on each of `world_size` threads."""

    def __init__(
        self,
        reducer: Reducer,
        model: nn.Module,
        world_size: int,
        seed: int = 0,
        grain_numel: int | None = None,
        host: Callable[[], HostMemory | None] = lambda: None,
    ) -> None:
        planned, exchange = plan(parameter_specs(model.named_parameters()), reducer, grain_numel), Exchange(world_size)
        self.transports = [ThreadTransport(exchange, rank) for rank in range(world_size)]
        self.ranks = [Engine(planned, transport, seed, host=host()) for transport in self.transports]

    def step(self, gradients: Sequence[Gradients]) -> list[list[Tensor]]:
        """The means of every unit on every rank."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(run_step, self.ranks, gradients))


def run_step(engine: Engine, gradients: Gradients, release: bool = True) -> list[Tensor]:
    """A step whose gradients come in two pieces a unit."""
    with torch.no_grad():
        engine.begin()
        for i, unit in enumerate(engine.plan.units):
            flat = gathered(unit.grain, gradients).view(-1)
            half = flat.numel() // 2
            engine.deliver(i, half, flat[half:])
            engine.pump()
            engine.deliver(i, 0, flat[:half])
            engine.pump()
        engine.finish()
        means = [engine.value(i).clone() for i in range(len(engine.plan.units))]
        if release:
            engine.release()
        return means
