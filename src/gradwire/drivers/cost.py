"""What a method sends, without sending it: the same programs on tensors that have a shape and no data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.collective import Agree, AllGather, AllToAll, Collective, SendRecv, Total
from gradwire.core.errors import CompositionError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.coalesce import Batch, add_grains, coalesce, sums_to_send
from gradwire.drivers.plan import Plan, plan
from gradwire.reducers.base import Program, Reduced, Reducer, Step, advance
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


def wire_bytes(kind: type[Collective], buffer_bytes: int, world_size: int) -> int:
    """Bytes a rank sends for a collective whose buffer (all rows of an all-to-all) has `buffer_bytes`.

    >>> from gradwire.core.collective import AllReduce
    >>> wire_bytes(AllReduce, 1000, 4), wire_bytes(AllGather, 1000, 4), wire_bytes(AllToAll, 4000, 4)
    (1500, 3000, 3000)
    """
    n = world_size
    if kind is SendRecv:
        return buffer_bytes
    if kind is AllGather:
        return (n - 1) * buffer_bytes
    if kind is AllToAll:
        return buffer_bytes * (n - 1) // n
    return 2 * buffer_bytes * (n - 1) // n


def sent_bytes(sent: Batch | Collective, world_size: int) -> int:
    """Bytes a rank sends for a collective, or for several that travel as one."""
    kind = sent.kind[0] if isinstance(sent, Batch) else type(sent)
    return wire_bytes(kind, sent.nbytes, sent.axis.size if sent.axis else world_size)


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
    batches = list(_batches(planned, Step(step, rank, world_size)))
    payload = sum(batch.nbytes for batch in batches)
    wire = sum(sent_bytes(batch, world_size) for batch in batches)
    dense = sum(spec.numel * spec.dtype.itemsize for spec in specs)
    inside = sum(sent_bytes(batch, world_size) for batch in batches if batch.axis and batch.axis.stride == 1)
    return Cost(payload, wire, dense, len(batches), inside)


def require_world(reducer: Reducer, world_size: int) -> None:
    """Refuse a number of ranks that there cannot be, or that are too few for the method.

    Raises:
        CompositionError: with the number that is needed.
    """
    if world_size < 1:
        raise CompositionError(f"world_size {world_size}: there must be at least 1 rank")
    reducer.require_ranks(world_size)


def _batches(planned: Plan, step: Step) -> Iterable[Batch]:
    flags: list[tuple[int, Collective]] = []
    totals: list[Total] = []
    for wave in planned.waves:
        programs: list[Program] = [
            reducer.reduce(grain, torch.empty(grain.shape, dtype=grain.dtype, device="meta"), state, step)
            for grain, reducer in wave
            for state in [reducer.init(grain, step)]
        ]
        yield from _wave_batches(programs, step, flags, totals)
    yield from coalesce(sums_to_send(add_grains(totals)))
    yield from coalesce(flags)


def _wave_batches(
    programs: list[Program], step: Step, flags: list[tuple[int, Collective]], totals: list[Total]
) -> Iterable[Batch]:
    inbox: list[Tensor | None] = [None] * len(programs)
    while True:
        requests: list[tuple[int, Collective]] = []
        for i, program in enumerate(programs):
            turn = advance(program, inbox[i])
            while isinstance(turn, Agree | Total):
                if isinstance(turn, Total):
                    totals.append(turn)
                else:
                    flags.append((len(flags), turn))
                turn = advance(program, turn.flag if isinstance(turn, Agree) else turn.tensor)
            if not isinstance(turn, Reduced):
                requests.append((i, turn))
        if not requests:
            return
        programs = [programs[i] for i, _ in requests]
        requests = [(position, request) for position, (_, request) in enumerate(requests)]
        inbox = [answer(request, step.world_size) for _, request in requests]
        yield from coalesce(requests)


def answer(request: Collective, world_size: int) -> Tensor:
    """Return a tensor of the shape that a program is sent for a request."""
    if isinstance(request, Agree):
        return request.flag
    if isinstance(request, SendRecv):
        return request.like.new_empty(request.received_numel)
    if isinstance(request, AllGather):
        rows = request.axis.size if request.axis else world_size
        return request.tensor.new_empty((rows, request.tensor.numel()))
    return request.tensor
