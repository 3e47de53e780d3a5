"""What holds the model of a comparison together over its ranks: DistributedDataParallel, or FSDP2.

An engine takes the fresh model that every rank has made from the seed, gives it the form that a method wants, and puts
the method on it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

import gradwire
from gradwire.choosing.automatic import accuracy_of
from gradwire.compare.model_engine import ModelEngine
from gradwire.compare.options import DDP, FSDP2
from gradwire.compare.sides import GradwireSide, Side, SyncSide, TorchSide, UnwaitingSide
from gradwire.compare.torch_hooks import bucket_mb as bucket_mb_of
from gradwire.core.errors import SpecError
from gradwire.core.places import BASELINES, EVERY_STEP, UNWAITING, WINDOWS, Place, require_place
from gradwire.spec import as_method, find

ENGINES = (DDP, FSDP2)


class Replicated(ModelEngine):
    """Every rank has the whole model: in DDP, or as it is where ranks do not meet in every step."""

    @override
    def check(self, spec: str, hosts: int) -> None:
        if accuracy_of(spec) is not None:
            return  # it chooses among methods that any number of ranks can use
        made = gradwire.parse(spec)
        require_place(spec, made.place, EVERY_STEP, WINDOWS, UNWAITING, BASELINES)
        if made.place is EVERY_STEP:
            as_method(spec).require_ranks(hosts)

    def wrap(self, model: nn.Module, spec: str, bucket_mb: float) -> nn.Module:
        """In DDP with this size of buckets, or with the one that the method needs."""
        place = _place_of(spec)
        if place in (WINDOWS, UNWAITING):
            return model
        needed = bucket_mb_of(gradwire.parse(spec)) if place is BASELINES else None
        return DistributedDataParallel(model, bucket_cap_mb=needed or bucket_mb)

    def attach(self, model: nn.Module, optimizer: Optimizer, spec: str) -> Side:
        """By a communication hook, or by an optimizer around the task's own."""
        sides = {EVERY_STEP: GradwireSide, WINDOWS: SyncSide, UNWAITING: UnwaitingSide, BASELINES: TorchSide}
        side: type[Any] = sides[_place_of(spec)]
        return side(model, optimizer, spec)


def _place_of(spec: str) -> Place:
    """Where a method goes. What `auto` chooses goes into every step."""
    return EVERY_STEP if accuracy_of(spec) is not None else find(spec).place


def make_engine(name: str) -> ModelEngine:
    """The engine of that name, for one run.

    Raises:
        SpecError: there is none.

    >>> type(make_engine("ddp")).__name__
    'Replicated'
    """
    if name == DDP:
        return Replicated()
    if name == FSDP2:
        from gradwire.compare.sharded import ShardedEngine  # FSDP2 takes a while to import

        return ShardedEngine()
    raise SpecError(f"no engine {name!r}: there are {' and '.join(ENGINES)}")
