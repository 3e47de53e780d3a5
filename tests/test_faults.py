"""Faults of transports, by seeded plans: nothing hangs, survivors agree, and errors name their rank."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from fault_main import REDUCERS, check_virtual
from fault_plans import check_equal, run
from fault_runs import check_real
from gradwire.core.collective import AllGather, AllToAll
from gradwire.core.errors import PayloadError
from gradwire.core.program import once
from gradwire.drivers.checked import Checked
from gradwire.drivers.faulty import Fault, FaultKind, Faulty, InjectedFault, Never, plan_of
from gradwire.drivers.interpreter import ask, script_of
from gradwire.drivers.lockstep import Meeting, Stuck, VirtualTransport, outcomes, together
from gradwire.spec import parse

PLANS = 300


@pytest.mark.draw(1)
@pytest.mark.parametrize("first", range(0, PLANS, 50))
def test_what_holds_of_virtual_ranks_holds_under_every_plan(first: int) -> None:
    ended = {check_virtual(seed) for seed in range(first, first + 50)}
    assert "trained" in ended
    assert len(ended) > 1, "no plan did anything"


@pytest.mark.draw(1)
@pytest.mark.parametrize("seed", [1, 2, 7, 9, 11])
def test_what_holds_of_real_ranks_holds_under_every_plan(seed: int) -> None:
    assert check_real(seed)


@pytest.mark.parametrize("kind", ["raise", "die", "stall"])
def test_who_waits_for_a_rank_that_failed_is_told_its_name(kind: FaultKind) -> None:
    plan: list[dict[int, Fault]] = [{}, {4: Fault(kind)}, {}]
    outcome = run(parse("int4"), 3, plan)
    first, failed, last = outcome.ended
    for error in (first, last):
        assert isinstance(error, Stuck)
        assert error.ranks == (1,)
    assert isinstance(failed, Stuck if kind == "stall" else InjectedFault)


class Crooked(Meeting):
    """A meeting that tells one rank something else than the others."""

    def all_gather(self, requests: Sequence[AllGather]) -> list[torch.Tensor]:
        rows = super().all_gather(requests)
        rows[1][0, 0] ^= 1
        return rows


def test_ranks_that_differ_are_found() -> None:
    x = torch.tensor([1, 2], dtype=torch.uint8)
    meeting = Crooked(2)
    first, second = together([script_of(once(AllGather(x)), VirtualTransport(meeting, rank)) for rank in range(2)])
    with pytest.raises(AssertionError, match="survivors have different means"):
        check_equal([[first], [second]])


# Checksums ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind_of", [AllGather, AllToAll])
@pytest.mark.parametrize("fault", [Fault("flip", 0.1), Fault("truncate")])
def test_a_checksum_finds_what_was_damaged_on_its_way_and_names_the_sender(
    kind_of: type[AllGather | AllToAll], fault: Fault
) -> None:
    meeting, x = Meeting(2), torch.arange(1, 17, dtype=torch.uint8)
    request = kind_of(x if kind_of is AllGather else x.view(2, 8))
    ways = [Checked(Faulty(VirtualTransport(meeting, rank), {0: fault} if rank else {})) for rank in range(2)]
    first, second = outcomes([script_of(once(request), way) for way in ways])
    damaged = [first, second] if kind_of is AllGather else [first if fault.kind == "flip" else second]
    for error in damaged:
        assert isinstance(error, PayloadError)
        assert "payload of rank 1 was damaged on its way" in str(error)


def test_with_checksums_the_results_are_the_same() -> None:
    for request in (AllGather(torch.arange(5, dtype=torch.uint8)), AllGather(torch.empty(0, dtype=torch.uint8))):
        plain, checked = (VirtualTransport(Meeting(1), 0) for _ in range(2))
        assert torch.equal(ask(request, plain), ask(request, Checked(checked)))


# Plans --------------------------------------------------------------------------------------------------------


def test_plans_are_drawn_from_their_seed_and_reach_every_kind() -> None:
    kinds = {fault.kind for seed in range(60) for plan in plan_of(seed, 3, 12) for fault in plan.values()}
    assert kinds == {"delay", "raise", "stall", "die", "truncate", "flip"}
    assert plan_of(3, 4, 12, faults=5) == plan_of(3, 4, 12, faults=5) != plan_of(4, 4, 12, faults=5)


def test_a_rank_that_stalls_sends_nothing_more() -> None:
    meeting = Meeting(2)
    way = Faulty(VirtualTransport(meeting, 0), {0: Fault("stall")})
    x = torch.ones(1, dtype=torch.uint8)
    assert isinstance(way.issue(AllGather(x)), Never)
    assert isinstance(way.issue(AllGather(x)), Never)
    assert meeting.absent(0) == (0, 1)


def test_every_method_is_among_the_plans() -> None:
    assert len(REDUCERS) <= PLANS
    assert random.Random(1).randrange(2, 6) in range(2, 6)
