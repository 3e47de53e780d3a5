"""What holds the model of a comparison together over its ranks: DistributedDataParallel, or FSDP2.

An engine takes the fresh model that every rank has made from the seed, gives it the form that a method wants, and puts
the method on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

import gradwire
from gradwire.asynchronous import is_asynchronous
from gradwire.asynchronous import parse as parse_asynchronous
from gradwire.bench.compare_options import DDP, FSDP2
from gradwire.bench.sides import GradwireSide, Side, SyncSide, TorchSide, UnwaitingSide
from gradwire.bench.torch_hooks import parse_torch
from gradwire.core.errors import SpecError
from gradwire.sync import is_sync
from gradwire.sync import parse as parse_sync

ENGINES = (DDP, FSDP2)


class Engine(ABC):
    """Makes the side of one method. An engine serves one run."""

    @abstractmethod
    def check(self, spec: str, hosts: int) -> None:
        """Refuse a spec that names no method, or one that wants more hosts, before anything is started.

        Raises:
            GradwireError: which says what is wrong with it.
        """

    @abstractmethod
    def wrap(self, model: nn.Module, spec: str, bucket_mb: float) -> nn.Module:
        """The model as its method wants it, what is called in training. Every rank calls this."""

    @abstractmethod
    def attach(self, model: nn.Module, optimizer: Optimizer, spec: str) -> Side:
        """Put a method on a model that `wrap` returned, and on its optimizer. Every rank calls this."""


class Replicated(Engine):
    """Every rank has the whole model: in DDP, or as it is where ranks do not meet in every step."""

    @override
    def check(self, spec: str, hosts: int) -> None:
        if spec.startswith("torch:"):
            parse_torch(spec)
        elif is_sync(spec):
            parse_sync(spec)
        elif is_asynchronous(spec):
            parse_asynchronous(spec)
        else:
            gradwire.parse(spec).require_ranks(hosts)

    def wrap(self, model: nn.Module, spec: str, bucket_mb: float) -> nn.Module:
        """In DDP with this size of buckets, or with the one that the method needs."""
        if is_sync(spec) or is_asynchronous(spec):
            return model
        needed = parse_torch(spec).bucket_mb if spec.startswith("torch:") else None
        return DistributedDataParallel(model, bucket_cap_mb=needed or bucket_mb)

    def attach(self, model: nn.Module, optimizer: Optimizer, spec: str) -> Side:
        """By a communication hook, or by an optimizer around the task's own."""
        if is_asynchronous(spec):
            return UnwaitingSide(model, optimizer, spec)
        if not isinstance(model, DistributedDataParallel):
            return SyncSide(model, optimizer, spec)
        side = TorchSide if spec.startswith("torch:") else GradwireSide
        return side(model, optimizer, spec)


def make_engine(name: str) -> Engine:
    """The engine of that name, for one run.

    Raises:
        SpecError: there is none.

    >>> type(make_engine("ddp")).__name__
    'Replicated'
    """
    if name == DDP:
        return Replicated()
    if name == FSDP2:
        from gradwire.bench.sharded import Sharded  # FSDP2 takes a while to import

        return Sharded()
    raise SpecError(f"no engine {name!r}: there are {' and '.join(ENGINES)}")
