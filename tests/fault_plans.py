"""Runs whose collectives fail by a seeded plan, on virtual ranks: what must hold of every one of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core import saved
from gradwire.drivers.checked import Checked
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.engine import Engine
from gradwire.drivers.faulty import Fault, Faulty, InjectedFault, plan_of
from gradwire.drivers.interpreter import Transport
from gradwire.drivers.lockstep import Meeting, Stuck, VirtualTransport, outcomes
from gradwire.drivers.plan import plan
from gradwire.drivers.virtual import gathered
from gradwire.reducers import Reducer

STEPS = 3
GRAIN = 60
DAMAGE = ("truncate", "flip")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 3, bias=False))


class Rank:
    """An engine that saves after each step, as a training loop may."""

    def __init__(self, reducer: Reducer, transport: Transport, method: str) -> None:
        self.engine = Engine(plan(parameter_specs(model().named_parameters()), reducer, GRAIN), transport)
        self.member = saved.Member(method, transport.rank, transport.world_size)
        self.means: list[list[Tensor]] = []
        self.saves = [self.save()]

    def save(self) -> saved.Saved:
        states = saved.pack(self.engine.states(), self.member, scale=1.0, step=self.engine.index, seed=0)
        return copy.deepcopy(states)

    def load(self, state: saved.Saved) -> None:
        loaded = saved.unpack(state, self.engine.states(), self.member)
        self.engine.set_states(loaded.states)
        self.engine.index = loaded.step

    def begin(self) -> None:
        """Deliver the gradients of the step at hand, which depend on the rank and the step alone."""
        generator = torch.Generator().manual_seed(1000 * self.engine.index + self.member.rank)
        own = {name: torch.randn(p.shape, generator=generator) for name, p in model().named_parameters()}
        self.engine.begin()
        for i, unit in enumerate(self.engine.plan.units):
            self.engine.deliver(i, 0, gathered(unit.grain, own).view(-1))

    def finish(self) -> None:
        self.engine.finish()
        self.means.append([self.engine.value(i).clone() for i in range(len(self.engine.plan.units))])
        self.engine.release()
        self.saves.append(self.save())


def trained(ranks: Sequence[Rank], steps: int) -> list[Exception | None]:
    """Train until all have made so many steps or some have failed; return how each rank ended."""
    while ranks[0].engine.index < steps:
        for rank in ranks:
            rank.begin()
        ended = outcomes([rank.engine.script() for rank in ranks])
        for rank, outcome in zip(ranks, ended, strict=True):
            if outcome is None:
                rank.finish()
        if any(ended):
            return ended
    return [None] * len(ranks)


@dataclass(frozen=True)
class Outcome:
    """How a run went: the planned faults that came to pass, and how each rank ended."""

    ranks: list[Rank]
    ended: list[Exception | None]
    met: list[Fault]


def run(reducer: Reducer, world_size: int, plans: Sequence[dict[int, Fault]]) -> Outcome:
    """Train under a plan.

    What a sub-group of ranks hears alone, as the ranks of a node do, no other rank can compare with what it heard. So
    methods with sub-groups send checksums where payloads are damaged: without them a flipped bit makes nodes differ,
    and nobody can tell.
    """
    meeting = Meeting(world_size)
    ways = [Faulty(VirtualTransport(meeting, rank), plans[rank]) for rank in range(world_size)]
    damaged = any(fault.kind in DAMAGE for faults in plans for fault in faults.values())
    checks = damaged and bool(reducer.axes(world_size))
    ranks = [Rank(reducer, Checked(way, range(world_size)) if checks else way, repr(reducer)) for way in ways]
    with torch.no_grad():
        ended = trained(ranks, STEPS)
    met = [fault for way, faults in zip(ways, plans, strict=True) for at, fault in faults.items() if at < way.number]
    return Outcome(ranks, ended, met)


def check(reducer: Reducer, world_size: int, seed: int) -> str:
    """Run under one plan and check it; return in a word how it ended.

    Raises:
        AssertionError: what does not hold.
    """
    outcome = run(reducer, world_size, plan_of(seed, world_size, 12))
    steps = [len(rank.means) for rank in outcome.ranks]
    assert max(steps) - min(steps) <= 1, f"ranks have made {steps} steps"
    for made in zip(*(rank.means[: min(steps)] for rank in outcome.ranks), strict=True):
        check_equal(made)
    check_equal([rank.means[-1] for rank in outcome.ranks if rank.means and len(rank.means) == max(steps)])
    failed = tuple(rank for rank, error in enumerate(outcome.ended) if error and not isinstance(error, Stuck))
    for rank, error in enumerate(outcome.ended):
        if isinstance(error, Stuck):
            assert error.ranks, "an error that names nobody"
            assert rank not in error.ranks or stalls(outcome), error
        elif isinstance(error, InjectedFault):
            assert f"rank {rank} " in str(error)
    if not any(outcome.ended):
        assert steps == [STEPS] * world_size
    if reducer.repeatable and not any(fault.kind in DAMAGE for fault in outcome.met):
        check_reconciled(reducer, outcome, min(steps))
    kinds = {type(outcome.ended[rank]).__name__ for rank in failed}
    return "/".join(sorted(kinds)) or ("stuck" if any(outcome.ended) else "trained")


def stalls(outcome: Outcome) -> bool:
    return any(fault.kind == "stall" for fault in outcome.met)


def check_equal(means: Sequence[list[Tensor]]) -> None:
    """All ranks have the same means bit for bit."""
    for of_unit in zip(*means, strict=True):
        first, *others = of_unit
        assert all(torch.equal(bits(first), bits(other)) for other in others), "survivors have different means"


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def check_reconciled(reducer: Reducer, outcome: Outcome, step: int) -> None:
    """Ranks that take up the last step that all have made go on as if nothing had been."""
    world_size = len(outcome.ranks)
    undisturbed = run(reducer, world_size, [{}] * world_size).ranks[0]
    meeting = Meeting(world_size)
    ranks = [Rank(reducer, VirtualTransport(meeting, rank), repr(reducer)) for rank in range(world_size)]
    for rank, before in zip(ranks, outcome.ranks, strict=True):
        rank.load(before.saves[step])
    with torch.no_grad():
        ended: list[Any] = trained(ranks, STEPS)
    assert not any(ended), ended
    for rank in ranks:
        for mine, other in zip(rank.means, undisturbed.means[step:], strict=True):
            check_equal([mine, other])
