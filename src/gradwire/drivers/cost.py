"""What a method sends, without sending it: the same programs on tensors that have a shape and no data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.collective import AllGather, AllReduce, AllToAll, Collective, SendRecv
from gradwire.core.errors import CompositionError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.interpreter import Answer, Interpreter, run, sent_bytes, served
from gradwire.drivers.plan import Plan, plan
from gradwire.reducers.base import Program, Reduced, Reducer, Step
from gradwire.spec import as_method


@dataclass(frozen=True)
class Cost:
    """Bytes of one step on one rank.

    Attributes:
        payload_bytes: what a rank hands to collectives, counted once (messages of an all-to-all and its gather each
            count), which does not depend on the algorithm of the collective.
        wire_bytes: what a rank sends: 2 (n - 1)/n of an all-reduce's buffer on a ring, n - 1 times an all-gather's,
            (n - 1)/n of an all-to-all's, messages between pairs as they are; n is the size of the axis.
        dense_bytes: the gradients' own size.
        collectives: how many calls.
        inside_bytes: of `wire_bytes`, what stays inside nodes: on an innermost axis of neighbouring ranks.
    """

    payload_bytes: int
    wire_bytes: int
    dense_bytes: int
    collectives: int
    inside_bytes: int = 0

    @property
    def between_bytes(self) -> int:
        """Of `wire_bytes`, what leaves the node of a rank: all of them where a method knows no nodes."""
        return self.wire_bytes - self.inside_bytes


def parameter_specs(parameters: Iterable[tuple[str, Tensor]], device: str | None = None) -> list[ParameterSpec]:
    """Return the specs of named parameters that ask for gradients."""
    return [
        ParameterSpec(name, tuple(p.shape), p.dtype, torch.device(device) if device else p.device)
        for name, p in parameters
        if p.requires_grad
    ]


Parameters = nn.Module | Iterable[ParameterSpec] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""A model, wrapped in DDP or not, what its `parameters()` or `named_parameters()` return, or specs."""


def meta_specs(model: Parameters) -> list[ParameterSpec]:
    """Return the specs of a model's parameters, on the device that has no data.

    Raises:
        CompositionError: something that has no parameters.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if isinstance(model, nn.Module):
        return parameter_specs(model.named_parameters(), device="meta")
    if isinstance(model, Tensor | str) or not isinstance(model, Iterable):
        raise CompositionError(f"{type(model).__name__} is no model: pass a module, or what its parameters() returns")
    return [spec for i, parameter in enumerate(model) for spec in _meta_spec(i, parameter)]


def _meta_spec(index: int, parameter: object) -> list[ParameterSpec]:
    """The spec of one parameter, which is called by its number where it has no name; none for a frozen one."""
    match parameter:
        case ParameterSpec():
            return [parameter._replace(device=torch.device("meta"))]
        case Tensor():
            return parameter_specs([(str(index), parameter)], device="meta")
        case (str(name), Tensor() as tensor):
            return parameter_specs([(name, tensor)], device="meta")
        case _:
            raise CompositionError(f"{parameter!r} is no parameter: pass a module, or what its parameters() returns")


def cost(
    reducer: Reducer | str,
    model: Parameters,
    world_size: int,
    step: int = 0,
    grain_numel: int | None = None,
    rank: int = 0,
) -> Cost:
    """Return what one step of a method sends on each rank: exact for methods of fixed size.

    Where a spec says `node=`, `inside_bytes` and `between_bytes` tell apart what stays in a node and what leaves it.

    Args:
        reducer: a reducer, or a spec such as `"topk:0.01"`, as `attach` takes it.
        model: a model, or what its `parameters()` or `named_parameters()` return; those that are trained count.
        world_size: how many ranks.
        step: which step, for methods that begin otherwise than they go on.
        grain_numel: as in `attach`.
        rank: whose bytes. Ranks send alike but for trees, whose leaves send less, and odd world sizes.

    Raises:
        SpecError, CompositionError: a method that cannot be built, or that needs more ranks; no model.

    >>> cost("none", nn.Linear(10, 10), world_size=2).wire_bytes
    440
    """
    reducer, specs = as_method(reducer), meta_specs(model)
    require_world(reducer, world_size)
    if not 0 <= rank < world_size:
        raise CompositionError(f"rank {rank} of {world_size}: ranks are counted from 0")
    planned = plan(specs, reducer, grain_numel)
    nowhere = MetaTransport(world_size, rank)
    _run(planned, nowhere, step)
    requests = nowhere.requests
    dense = sum(spec.numel * spec.dtype.itemsize for spec in specs)
    return Cost(
        payload_bytes=sum(request.nbytes for request in requests),
        wire_bytes=_sent(requests, world_size),
        dense_bytes=dense,
        collectives=len(requests),
        inside_bytes=_sent([r for r in requests if r.axis and r.axis.stride == 1], world_size),
    )


def _run(planned: Plan, transport: MetaTransport, index: int) -> None:
    """Run a step of one rank whose gradients have no data."""
    step = Step(index, transport.rank, transport.world_size)
    units = planned.units

    def programs(wave: int) -> list[Program]:
        return [
            reducer.reduce(grain, torch.empty(grain.shape, dtype=grain.dtype, device="meta"), state, step)
            for grain, reducer in (units[i] for i in planned.positions[wave])
            for state in [reducer.init(grain, step)]
        ]

    run(Interpreter[Reduced](transport).script(len(planned.waves), programs))


def _sent(requests: Iterable[Collective], world_size: int) -> int:
    return sum(sent_bytes(request, world_size) for request in requests)


def require_world(reducer: Reducer, world_size: int) -> None:
    """Refuse a number of ranks that there cannot be, or that are too few for the method.

    Raises:
        CompositionError: with the number that is needed.
    """
    if world_size < 1:
        raise CompositionError(f"world_size {world_size}: there must be at least 1 rank")
    reducer.require_ranks(world_size)


@dataclass
class MetaTransport:
    """Where nothing travels: answers have the right shape and no data, and what is asked for is noted."""

    world_size: int
    rank: int = 0
    requests: list[Collective] = field(default_factory=list[Collective])

    def issue(self, request: Collective) -> Answer:
        """Note a request."""
        self.requests.append(request)
        return Answer(self.answer(request))

    def answer(self, request: Collective) -> Tensor:
        """What a request is answered."""
        method: Any = served(self, request)
        return method(request)

    def all_reduce(self, request: AllReduce) -> Tensor:
        """The same shape."""
        return request.tensor

    def all_gather(self, request: AllGather) -> Tensor:
        """A row a rank."""
        ranks = request.axis.size if request.axis else self.world_size
        return request.tensor.new_empty((ranks, request.length))

    def all_to_all(self, request: AllToAll) -> Tensor:
        """The same shape."""
        return request.tensor

    def send_recv(self, request: SendRecv) -> Tensor:
        """What is received."""
        return request.like.new_empty(request.length)
