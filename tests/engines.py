"""Engines on threads of one process: what they send each other goes through `lockstep.perform`, as laws define it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from gradwire.core.collective import AllGather, AllReduce, AllToAll, Collective, SendRecv
from gradwire.drivers.coalesce import Batch
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.lockstep import perform
from gradwire.drivers.plan import plan
from gradwire.drivers.process_group import Engine, GroupTransport
from gradwire.drivers.virtual import Gradients, gathered
from gradwire.reducers import Reducer

PATIENCE_S = 20.0


class Exchange:
    """Where the ranks of a run meet: a batch of each, in the order in which all of them send."""

    def __init__(self, world_size: int) -> None:
        self.sent: list[list[Collective]] = [[] for _ in range(world_size)]
        self.results: dict[int, list[Tensor]] = {}
        self.changed = threading.Condition()

    def send(self, rank: int, request: Collective) -> int:
        """Note what a rank sends; return its number."""
        with self.changed:
            self.sent[rank].append(request)
            self.changed.notify_all()
            return len(self.sent[rank]) - 1

    def result(self, rank: int, number: int) -> Tensor:
        """Wait for all ranks, and return what one of them gets."""
        with self.changed:
            assert self.changed.wait_for(lambda: all(len(sent) > number for sent in self.sent), PATIENCE_S), (
                "a rank hangs"
            )
            if number not in self.results:
                self.results[number] = perform([sent[number] for sent in self.sent])
            return self.results[number][rank]


class Awaited(NamedTuple):
    """A collective under way between threads."""

    exchange: Exchange
    rank: int
    number: int

    def wait(self) -> Tensor:
        """The result."""
        return self.exchange.result(self.rank, self.number)


class ThreadTransport:
    """What an engine asks of `GroupTransport`, for one thread among others."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.world_size = exchange, rank, len(exchange.sent)
        self.batches: list[Batch] = []

    def issue(self, batch: Batch) -> Awaited:
        """Send a batch; a result is waited for later, as on a process group."""
        self.batches.append(batch)
        return Awaited(self.exchange, self.rank, self.exchange.send(self.rank, _as_request(batch)))


def _as_request(batch: Batch) -> Collective:
    """The batch as the one collective that it travels as."""
    kind, _, op, axis = batch.kind
    if kind is SendRecv:
        rounds = [request for request in batch.requests if isinstance(request, SendRecv)]
        sends = tuple(send for request in rounds for send in request.sends)
        receives = tuple(receive for request in rounds for receive in request.receives)
        return SendRecv(rounds[0].like, sends, receives, axis)
    if kind is AllGather:
        return AllGather(batch.buffer, axis)
    if kind is AllToAll:
        return AllToAll(batch.buffer, axis)
    return AllReduce(batch.buffer.clone(), "sum" if op == "sum" else "max", axis=axis)


class Engines:
    """A model's engine on each of `world_size` threads."""

    def __init__(
        self, reducer: Reducer, model: nn.Module, world_size: int, seed: int = 0, grain_numel: int | None = None
    ) -> None:
        planned, exchange = plan(parameter_specs(model.named_parameters()), reducer, grain_numel), Exchange(world_size)
        self.transports = [ThreadTransport(exchange, rank) for rank in range(world_size)]
        self.ranks = [Engine(planned, cast(GroupTransport, transport), seed) for transport in self.transports]

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
        means = [engine.mean(i).clone() for i in range(len(engine.plan.units))]
        if release:
            engine.release()
        return means
