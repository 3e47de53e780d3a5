"""Everything that trains a model over ranks, made of the package's own lists: a registered method is here too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradwire
from gradwire import sync
from gradwire.asynchronous.methods import METHODS as UNWAITING
from gradwire.core.places import ELASTIC
from gradwire.hooks import PeriodicModelAverager, PostLocalSGDOptimizer
from gradwire.session.meeting import group_store
from gradwire.sync.methods import METHODS as SYNCHRONISED
from spec_places import where_of

RANKS = 2
DEADLINE_S = 60.0

OptimizerOf = Callable[[nn.Module], Optimizer]
"""Makes a rank's own optimizer of a model."""


@dataclass(frozen=True)
class Running:
    """A model that is being trained: call `network`, then `backward` on a loss, then `step`.

    Attributes:
        network: what the loss is computed with.
        inner: the rank's own optimizer.
        trains: what gradwire has made, which `gradwire.save` is given where it can be saved.
        step: what a loop calls after each backward pass.
        finish: after it all ranks have the same model, and step no more.
        close: stops communicating.
    """

    network: nn.Module
    inner: Optimizer
    trains: Any
    step: Callable[[], object]
    finish: Callable[[], object]
    close: Callable[[], object]


@dataclass(frozen=True)
class Trained:
    """One way to train.

    Attributes:
        name: of the way, and a spec where there is one: "attach int4".
        make: given a model that is alike on all ranks, and what makes its optimizer, begins to train it on every rank.
    """

    name: str
    make: Callable[[nn.Module, OptimizerOf], Running]


def everything() -> Iterator[Trained]:
    """Every method by its own example, and what has no spec."""
    for name, method in gradwire.methods().items():
        spec = method.examples[0] if method.examples else name
        if gradwire.parse(spec).fewest_ranks <= RANKS:
            yield Trained(f"session {spec}", _session(spec))
    yield Trained("attach int4", _attached("int4"))
    yield Trained("fsdp2 int4", _sharded("int4"))
    for method in SYNCHRONISED.values():
        kind = "elastic" if method.place is ELASTIC else "sync"
        yield Trained(f"{kind} {method.example}", _by_spec(method.example, "sync"))
    for method in UNWAITING.values():
        yield Trained(f"asynchronous {method.example}", _by_spec(method.example, "finish"))
    yield Trained("averaging", _averaging)
    yield Trained("hierarchical", _hierarchical)
    yield Trained("gossip", _gossip)
    yield Trained("elastic", _elastic)
    yield Trained("post-local", _post_local)


def by_name() -> dict[str, Trained]:
    """All of it, in order."""
    return {trained.name: trained for trained in everything()}


# Gradients of every step ------------------------------------------------------------------------------------------


def _session(spec: str) -> Callable[[nn.Module, OptimizerOf], Running]:
    def make(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
        session, inner = gradwire.Session(model, spec, deadline_s=DEADLINE_S), optimizer_of(model)

        def step() -> None:
            session.reduce_(model)
            inner.step()

        return Running(model, inner, session, step, _nothing, session.close)

    return make


def _attached(spec: str) -> Callable[[nn.Module, OptimizerOf], Running]:
    def make(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
        ddp = DistributedDataParallel(model)
        handle, inner = gradwire.attach(ddp, spec, deadline_s=DEADLINE_S), optimizer_of(model)
        return Running(ddp, inner, handle, inner.step, _nothing, handle.close)

    return make


def _sharded(spec: str) -> Callable[[nn.Module, OptimizerOf], Running]:
    def make(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
        sharded = cast(nn.Module, fully_shard(model))
        handle, inner = gradwire.attach(sharded, spec, deadline_s=DEADLINE_S), optimizer_of(sharded)
        return Running(sharded, inner, handle, inner.step, _nothing, handle.close)

    return make


# Models, and optimizers in place of one's own ---------------------------------------------------------------------


def _by_spec(spec: str, end: str) -> Callable[[nn.Module, OptimizerOf], Running]:
    """An optimizer by its spec, whose method `end` leaves all ranks with the same model."""

    def make(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
        inner = optimizer_of(model)
        optimizer = gradwire.wrap(inner, model, spec, deadline_s=DEADLINE_S, **where_of(spec))
        return Running(model, inner, optimizer, optimizer.step, getattr(optimizer, end), optimizer.close)

    return make


def _averaged(model: nn.Module, optimizer_of: OptimizerOf, averager: sync.Averager) -> Running:
    inner = optimizer_of(model)

    def step() -> None:
        inner.step()
        averager.step()

    return Running(model, inner, averager, step, averager.sync, averager.close)


def _averaging(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
    averaging = sync.Averaging(model, every=3, method="int4", outer=sync.DiLoCo(), deadline_s=DEADLINE_S)
    return _averaged(model, optimizer_of, averaging)


def _hierarchical(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
    levels = [sync.Averaging(model, every, deadline_s=DEADLINE_S) for every in (2, 4)]
    return _averaged(model, optimizer_of, sync.Hierarchical(*levels))


def _gossip(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
    return _averaged(model, optimizer_of, sync.Gossip(model, every=3, deadline_s=DEADLINE_S))


_elastic_runs = itertools.count()


def _elastic(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
    inner = optimizer_of(model)
    elastic = sync.Elastic(
        model,
        every=3,
        method="int4",
        store=group_store(),
        run=f"everything {next(_elastic_runs)}",
        least=dist.get_world_size(),
        deadline_s=DEADLINE_S,
    )

    def step() -> None:
        inner.step()
        elastic.step()

    def finish() -> None:
        while not elastic.step():
            pass

    return Running(model, inner, elastic, step, finish, elastic.close)


def _post_local(model: nn.Module, optimizer_of: OptimizerOf) -> Running:
    inner = optimizer_of(model)
    optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=3))

    def finish() -> None:
        PeriodicModelAverager(period=2).average_parameters(model.parameters())

    return Running(model, inner, optimizer, optimizer.step, finish, _nothing)


def _nothing() -> None:
    return
