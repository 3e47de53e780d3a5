"""What a method sends across the boundary of each group of a topology, and how long the links of each level take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from gradwire.core.agreement import Agree
from gradwire.core.axis import Axis
from gradwire.core.collective import AllGather, AllReduce, AllToAllV, Collective
from gradwire.core.link import Link
from gradwire.core.messages import SendRecv
from gradwire.drivers.cost import Parameters, form_of, requests_of, require_world, specs_of
from gradwire.drivers.plan import Unit, plan
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import PAST_WARM_UPS, Step
from gradwire.spec import as_method
from gradwire.topology.levels import Topology


@dataclass(frozen=True)
class LevelBytes:
    """What the groups of one level send in a step.

    Attributes:
        level: its name.
        sent: bytes that leave each group, for whatever other group; what a counter of its link would show.
        rounds: collectives that no group of the level can do by itself, one after the other.
    """

    level: str
    sent: tuple[int, ...]
    rounds: int

    def seconds(self, link: Link) -> float:
        """How long its links take for that, each of which is shared by the ranks of a group."""
        return link.seconds(max(self.sent), self.rounds)


def level_bytes(
    reducer: Reducer | str,
    model: Parameters,
    topology: Topology,
    step: int = PAST_WARM_UPS,
    grain_numel: int | None = None,
) -> tuple[LevelBytes, ...]:
    """Return what leaves each group of each level in one step, the finest level first.

    An all-reduce is counted as a ring, which sends to the next rank only, and an all-gather as messages to every other.
    Both are right where all ranks of the axis are in groups of their own. Each rank is simulated, so the time that this
    takes grows with their number; it hardly grows with the model.

    Args:
        reducer: a reducer, or a spec whose nodes are written down.
        model: as in `cost`.
        topology: of all ranks.
        step: which step.
        grain_numel: as in `plan`.

    Raises:
        SpecError, CompositionError: a method that cannot be built, or that other numbers of ranks are for.

    >>> import torch
    >>> two_nodes = Topology.of_keys(["a", "a", "b", "b"])
    >>> found = level_bytes("none,node=2", [torch.zeros(1024, requires_grad=True)], two_nodes)
    >>> [(each.level, each.sent) for each in found]
    [('rank', (6144, 6144, 6144, 6144)), ('node', (4096, 4096))]
    """
    reducer = as_method(reducer)
    require_world(reducer, topology.world_size)
    units = plan(specs_of(model), reducer, grain_numel).units
    known: list[Reducer] = []
    forms = [form_of(unit, known) for unit in units]
    distinct, times = dict(zip(forms, units, strict=True)), Counter(forms)
    sent = [[0] * len(level.groups) for level in topology.levels]
    rounds = [0] * len(topology.levels)
    for rank in range(topology.world_size):
        for nbytes, to, count in _messages(distinct, times, Step(step, rank, topology.world_size)):
            for place, level in enumerate(topology.levels):
                if level.group_of(rank) != level.group_of(to):
                    sent[place][level.group_of(rank)] += nbytes
                    rounds[place] += count * (rank == 0)
    names = [level.name for level in topology.levels]
    return tuple(LevelBytes(*each) for each in zip(names, map(tuple, sent), rounds, strict=True))


def _messages(
    distinct: Mapping[Hashable, Unit], times: Mapping[Hashable, int], step: Step
) -> Iterator[tuple[int, int, int]]:
    """What a rank sends: bytes, to whom, and how many rounds it is, which is told with one message of each request."""
    for form, unit in distinct.items():
        for request in requests_of(unit, step):
            for number, (to, nbytes) in enumerate(_letters(request, step)):
                yield times[form] * nbytes, to, times[form] * (number == 0)


def _letters(request: Collective, step: Step) -> list[tuple[int, int]]:
    """To which ranks a rank sends how many bytes, the farthest first."""
    axis = request.axis or Axis(step.world_size)
    ranks, place = axis.members(step.rank), axis.index(step.rank)
    if len(ranks) == 1:
        return []
    if isinstance(request, SendRecv):
        return [(ranks[message.to], message.tensor.nbytes) for message in request.sends]
    if isinstance(request, AllToAllV):
        return [(rank, nbytes) for rank, nbytes in zip(ranks, request.sends, strict=True) if rank != step.rank]
    if isinstance(request, AllReduce | Agree):
        return [(ranks[(place + 1) % len(ranks)], request.wire_bytes(len(ranks)))]
    others = [rank for rank in reversed(ranks) if rank != step.rank]
    each = request.nbytes if isinstance(request, AllGather) else request.wire_bytes(len(ranks)) // len(others)
    return [(rank, each) for rank in others]
