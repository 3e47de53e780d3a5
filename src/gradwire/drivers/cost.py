"""What a method sends, without sending it: the same programs on tensors that have a shape and no data."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from gradwire.core.agreement import Agree, Once, Total
from gradwire.core.axis import SubGroups
from gradwire.core.collective import AllReduce, Collective
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.program import Program as AnyProgram
from gradwire.core.program import asking
from gradwire.core.roles import roles_of
from gradwire.core.shapes import Shapes
from gradwire.drivers.interpreter import Answer, Interpreter, run, run_program, sent_bytes, served
from gradwire.drivers.plan import Plan, Unit, Wave, plan
from gradwire.reducers.base import Reducer
from gradwire.reducers.hierarchical import Hierarchical
from gradwire.reducers.step import Program, Reduced, Step
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
        inside_bytes: of `wire_bytes`, what stays inside nodes.
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


def parameter_specs(parameters: Iterable[tuple[str, Tensor]]) -> list[ParameterSpec]:
    """Return the specs of named parameters that ask for gradients."""
    return [ParameterSpec(name, tuple(p.shape), p.dtype, p.device) for name, p in parameters if p.requires_grad]


def model_specs(model: nn.Module) -> list[ParameterSpec]:
    """Return the specs of a model's parameters that ask for gradients, with what they are for."""
    roles = roles_of(model)
    specs = parameter_specs(model.named_parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [spec._replace(known_role=roles[p]) for spec, p in zip(specs, trained, strict=True)]


Parameters = nn.Module | Iterable[ParameterSpec] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""A model, wrapped in DDP or not, what its `parameters()` or `named_parameters()` return, or specs."""


def specs_of(model: Parameters) -> list[ParameterSpec]:
    """Return the specs of a model's parameters, on their devices.

    Raises:
        CompositionError: something that has no parameters.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if isinstance(model, nn.Module):
        return model_specs(model)
    if isinstance(model, Tensor | str) or not isinstance(model, Iterable):
        raise CompositionError(f"{type(model).__name__} is no model: pass a module, or what its parameters() returns")
    return [spec for i, parameter in enumerate(model) for spec in _spec(i, parameter)]


def specs_on(device: torch.device | str | None, model: Parameters) -> list[ParameterSpec]:
    """Return the same as if all parameters lay on one device, which need not exist: plans differ by it.

    With None they lie where they lie.

    >>> [str(spec.device) for spec in specs_on("cuda", nn.Linear(2, 2))]
    ['cuda', 'cuda']
    """
    specs = specs_of(model)
    return specs if device is None else [spec._replace(device=torch.device(device)) for spec in specs]


def _spec(index: int, parameter: object) -> list[ParameterSpec]:
    """The spec of one parameter, which is called by its number where it has no name; none for a frozen one."""
    match parameter:
        case ParameterSpec():
            return [parameter]
        case Tensor():
            return parameter_specs([(str(index), parameter)])
        case (str(name), Tensor() as tensor):
            return parameter_specs([(name, tensor)])
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

    It takes time by what differs among waves, not by the size of the model: waves that are equal but for names are run
    once and counted as often as they come, so thousands of ranks and billions of parameters take part of a second. A
    reducer of your own may draw from names, but what it asks for must not depend on them.

    Where a spec says `node=`, `inside_bytes` and `between_bytes` tell apart what stays in a node and what leaves it.

    Args:
        reducer: a reducer, or a spec such as `"topk:0.01"`, as `attach` takes it.
        model: a model, or what its `parameters()` or `named_parameters()` return; those that are trained count.
        world_size: how many ranks.
        step: which step, for methods that begin otherwise than they go on.
        grain_numel: as in `attach`. Grains of parameters on a GPU are up to 16 times as large as those on a CPU. A
            model on the meta device has those of a CPU.
        rank: whose bytes. Ranks send alike but for trees, whose leaves send less, odd world sizes, and nodes of unequal
            size, of which only the first ranks send to other nodes.

    Raises:
        SpecError, CompositionError: a method that cannot be built, or that needs more ranks; no model.

    >>> cost("none", nn.Linear(10, 10), world_size=2).wire_bytes
    440
    """
    reducer, specs = as_method(reducer), specs_of(model)
    require_world(reducer, world_size)
    if not 0 <= rank < world_size:
        raise CompositionError(f"rank {rank} of {world_size}: ranks are counted from 0")
    return planned_bytes(plan(specs, reducer, grain_numel), specs, world_size, step, rank)


def planned_bytes(planned: Plan, specs: Iterable[ParameterSpec], world_size: int, step: int, rank: int = 0) -> Cost:
    """Return what one step of a plan sends on a rank, see `cost`.

    Args:
        planned: the plan.
        specs: of the parameters, all of them.
        world_size: how many ranks.
        step: which step.
        rank: whose bytes.
    """
    reducers = dict.fromkeys(unit.reducer for unit in planned.units)
    inside = frozenset[SubGroups]().union(*(axes_inside_nodes(reducer, world_size) for reducer in reducers))
    asked = asked_of(planned, world_size, step, rank)
    return Cost(
        payload_bytes=sum(times * request.nbytes for request, times in asked),
        wire_bytes=_sent(asked, rank, world_size),
        dense_bytes=sum(spec.numel * spec.dtype.itemsize for spec in specs),
        collectives=sum(times for _, times in asked),
        inside_bytes=_sent([(r, times) for r, times in asked if r.axis in inside], rank, world_size),
    )


def asked_of(planned: Plan, world_size: int, step: int, rank: int = 0) -> list[tuple[Collective, int]]:
    """Return what one step of a plan asks for on a rank, each collective with how often it does, see `cost`.

    Args:
        planned: the plan.
        world_size: how many ranks.
        step: which step.
        rank: whose collectives.
    """
    nowhere = _Tally(world_size, rank)
    _run(_distinct(planned.waves), nowhere, step)
    return [(r.request, r.times) if isinstance(r, _Repeated) else (r, 1) for r in nowhere.requests]


def axes_inside_nodes(reducer: Reducer, world_size: int) -> frozenset[SubGroups]:
    """Return the axes that join the ranks of a node; none where a method knows no nodes."""
    if isinstance(reducer, Hierarchical):
        return frozenset([reducer.nodes(world_size).inside])
    return frozenset[SubGroups]().union(*(axes_inside_nodes(child, world_size) for child in reducer.children()))


def _sent(asked: Iterable[tuple[Collective, int]], rank: int, world_size: int) -> int:
    return sum(times * sent_bytes(request, rank, world_size) for request, times in asked)


# Equal waves -------------------------------------------------------------------------------------------------


class _Waves(NamedTuple):
    """`times` equal waves: the units that ask for different things, each with how many of a wave are like it."""

    units: list[tuple[Unit, int]]
    times: int


def _distinct(waves: Iterable[Wave]) -> list[_Waves]:
    """The waves that ask for different things, in the order of the first ones.

    What a program asks for depends on its reducer and on the shape, dtype and cut of its grain. Names and offsets in
    parameters enter keys and saved states, which have one size whatever they hold.
    """
    reducers: list[Reducer] = []
    found: dict[Hashable, _Waves] = {}
    for wave in waves:
        forms = [form_of(unit, reducers) for unit in wave]
        counts, first = Counter(forms), dict(zip(reversed(forms), reversed(wave), strict=True))
        alike = frozenset(counts.items())
        known = found.get(alike) or _Waves([(first[form], copies) for form, copies in counts.items()], 0)
        found[alike] = known._replace(times=known.times + 1)
    return list(found.values())


def form_of(unit: Unit, reducers: list[Reducer]) -> Hashable:
    """All of a unit that decides what its program asks for. Units of equal forms ask for the same things.

    Args:
        unit: which.
        reducers: those of the units before, to which that of this one is added where it is new.
    """
    grain = unit.grain
    cut = tuple((segment.numel, segment.offset) for segment in grain.segments)
    return _number(unit.reducer, reducers), grain.shape, grain.dtype, grain.device, cut


def _number(reducer: Reducer, known: list[Reducer]) -> int:
    """The place of a reducer among those that are known, which need be no keys of a dictionary."""
    for i, other in enumerate(known):
        if other is reducer or other == reducer:
            return i
    known.append(reducer)
    return len(known) - 1


def _run(waves: Sequence[_Waves], transport: MetaTransport, index: int) -> None:
    """Run a step of one rank whose gradients have no data; each wave and unit stands for as many equal ones."""
    step = Step(index, transport.rank, transport.world_size)

    def programs(number: int) -> list[Program]:
        units, times = waves[number]
        return [
            asking(meta_program(unit, step), functools.partial(_repeated, copies=copies, times=times))
            for unit, copies in units
        ]

    run(Interpreter[Reduced](transport).script(len(waves), programs))


def meta_program(unit: Unit, step: Step) -> Program:
    """The program of a unit whose gradient has a shape and no data."""
    grain, reducer = without_data(unit.grain), unit.reducer
    x = torch.empty(grain.shape, dtype=grain.dtype, device=grain.device)
    return reducer.reduce(grain, x, reducer.init(grain, step), step)


def without_data(grain: Grain) -> Grain:
    """The same grain where its tensors and states have shapes and no data."""
    return replace(grain, device=torch.device("meta"))


def requests_of(unit: Unit, step: Step) -> list[Collective]:
    """All that the program of a unit asks for, which is what the programs of all equal units ask for."""
    return asked_by(meta_program(unit, step), step.world_size, step.rank)


def asked_by(program: AnyProgram[Any], world_size: int, rank: int = 0) -> list[Collective]:
    """Return all that a program asks for whose tensors have a shape and no data.

    Args:
        program: of one rank.
        world_size: how many ranks there are.
        rank: which of them it is.

    >>> from gradwire.core.program import once
    >>> [request.nbytes for request in asked_by(once(AllReduce(torch.empty(8, device="meta"))), 4)]
    [32]
    """
    asked: list[Collective] = []

    def note(request: Collective) -> Collective:
        asked.append(request)
        return request

    run_program(asking(program, note), MetaTransport(world_size, rank))
    return asked


def _repeated(request: Collective, copies: int, times: int) -> Collective:
    """The request of a program that stands for `copies` in a wave, and the wave for `times` equal ones."""
    if isinstance(request, Agree):
        return _Flags(request.flag, copies * times)
    if isinstance(request, Total | Once):  # one size, of however many grains
        return request
    return _Repeated(request, copies, times, request.axis)


@dataclass(frozen=True, eq=False)
class _Repeated(Collective):
    """A request that `copies` programs of a wave make together, and `times` equal waves each for itself.

    It is answered once, and each program is sent the part of one copy.
    """

    verb = "repeated"

    request: Collective
    copies: int
    times: int
    axis: SubGroups | None

    @property
    def nbytes(self) -> int:
        """Of one wave's copies."""
        return self.copies * self.request.nbytes

    @property
    def kind(self) -> Hashable:
        """That of the request; programs of one wave stand for equally many."""
        return self.request.kind

    @classmethod
    def joined(cls, requests: Sequence[Self]) -> _Repeated:
        """What the requests of a wave are joined to, as often."""
        first = requests[0]
        joined = type(first.request).joined([each.request for each in requests for _ in range(each.copies)])
        return _Repeated(joined, 1, first.times, first.axis)

    @property
    def length(self) -> int:
        """That of all copies."""
        return self.copies * self.request.length

    def received(self, part: Tensor) -> Tensor:
        """What the request makes of its part."""
        return self.request.received(part[..., : self.request.length])

    def wire_bytes(self, ranks: int) -> int:
        """Of the one request that travels."""
        return self.request.wire_bytes(ranks)


@dataclass(frozen=True, eq=False)
class _Flags(Agree):
    """The flags of `times` equal programs, which travel with all others of the step."""

    times: int = 1

    @property
    @override
    def nbytes(self) -> int:
        return self.times

    @classmethod
    def joined(cls, requests: Sequence[Agree]) -> AllReduce:
        """As many bytes as there are flags."""
        flags = sum(request.length for request in requests)
        return AllReduce(requests[0].flag.new_empty(flags, dtype=torch.uint8), "max", True)

    @property
    @override
    def length(self) -> int:
        return self.times

    def received(self, part: Tensor) -> Tensor:
        """One of them: all are alike where there is no data."""
        return part[0].bool()


def require_world(reducer: Reducer, world_size: int) -> None:
    """Refuse a number of ranks that there cannot be, or that are too few for the method.

    Raises:
        CompositionError: with the number that is needed.
    """
    if world_size < 1:
        raise CompositionError(f"world_size {world_size}: there must be at least 1 rank")
    reducer.require_ranks(world_size)


class MetaTransport(Shapes):
    """Where nothing travels: answers have the right shape and no data, and what is asked for is noted."""

    def __init__(self, world_size: int, rank: int = 0) -> None:
        super().__init__(world_size, rank)
        self.requests: list[Collective] = []

    def issue(self, request: Collective) -> Answer:
        """Note what a request would send."""
        self.requests.append(request)
        return Answer(self.answer(request))

    def answer(self, request: Collective) -> Tensor:
        """What a request is answered."""
        method: Any = served(self, request)
        return method(request)


class _Tally(MetaTransport):
    """Notes requests that stand for several, too."""

    def repeated(self, request: _Repeated) -> Tensor:
        """What one of them is answered."""
        return self.answer(request.request)
