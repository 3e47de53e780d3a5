"""What a method sends, without sending it: the same programs on tensors that have a shape and no data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.core.collective import Agree, AllGather, AllToAll, Collective, SendRecv, Total
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.coalesce import Batch, add_grains, coalesce, sums_to_send
from gradwire.drivers.plan import Plan, plan
from gradwire.reducers.base import Program, Reduced, Reducer, Step, advance


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


def meta_specs(model: nn.Module | Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """Return the specs of a model's parameters, on the device that has no data."""
    if isinstance(model, nn.Module):
        return parameter_specs(model.named_parameters(), device="meta")
    return [spec._replace(device=torch.device("meta")) for spec in model]


def cost(
    reducer: Reducer,
    model: nn.Module | Sequence[ParameterSpec],
    world_size: int,
    step: int = 0,
    grain_numel: int | None = None,
    rank: int = 0,
) -> Cost:
    """Return what one step of `reducer` sends on each rank: exact for methods of fixed size.

    Ranks send alike but for trees, whose leaves send less, and odd world sizes: `rank` says which is asked for.

    >>> from gradwire.spec import parse
    >>> cost(parse("none"), nn.Linear(10, 10), world_size=2).wire_bytes
    440
    """
    specs = meta_specs(model)
    planned = plan(specs, reducer, grain_numel)
    batches = list(_batches(planned, Step(step, rank, world_size)))
    payload = sum(batch.nbytes for batch in batches)
    wire = sum(sent_bytes(batch, world_size) for batch in batches)
    dense = sum(spec.numel * spec.dtype.itemsize for spec in specs)
    inside = sum(sent_bytes(batch, world_size) for batch in batches if batch.axis and batch.axis.stride == 1)
    return Cost(payload, wire, dense, len(batches), inside)


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
