"""An exception at each point of a step, for every port: the others are told by the next step, or all go on in pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from exception_cases import BAD, STEPS
from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("exception_cases.py"))

TOLD: dict[str, list[str]] = {
    "Steps": ["forward", "before", "between", "after", "interrupt", "break", "nested", "generator"],
    "Attached": ["between", "hook", "after", "with"],
    "DropIn": ["between", "hook", "after"],
    "DropInPowerSGD": ["between", "hook", "after"],
    "PostLocal": ["between", "hook", "after"],
    "OfFSDP2": ["loss", "after"],
    "Local": ["inside"],
    "LocalLate": ["inside"],
    "Levels": ["inside"],
    "Gossips": ["inside"],
    "Compresses": ["inside", "forward", "between"],
}
"""Where an exception ends communication on all ranks."""

GO_ON: dict[str, list[str]] = {
    "Steps": ["optimizer"],
    "Reduces": ["forward", "before", "between", "after", "refused", "optimizer"],
    "Attached": ["forward", "before", "optimizer"],
    "DropIn": ["forward", "before", "optimizer"],
    "DropInPowerSGD": ["forward", "before", "optimizer"],
    "PostLocal": ["forward", "before", "optimizer"],
    "OfFSDP2": ["optimizer"],
    "Local": ["forward", "between", "optimizer"],
    "LocalLate": ["forward", "between", "optimizer"],
    "Levels": ["forward", "between", "optimizer"],
    "Gossips": ["forward", "between", "optimizer"],
    "Compresses": ["optimizer"],
}
"""Where a rank goes on with its next batch: the others pair that, or a whole window, with what they are at."""

UNLIKE = {"optimizer", "Local", "LocalLate", "Levels", "Gossips"}
"""Where ranks end with unlike parameters: one has not made the step that others made, or they train alone anyway."""

CAUSES = {
    "interrupt": "KeyboardInterrupt: broke at interrupt",
    "break": "StepError: 'layers.0.p' and 3 more was not delivered",
    "nested": "StepError: a step of this session is under way",
    "generator": "GeneratorExit",
    "with": "Broke: broke at between",
}


def cause(port: str, point: str) -> str:
    """What the others are told to be the reason: autograd does not say what ended a backward pass."""
    if point in CAUSES:
        return CAUSES[point]
    if port == "OfFSDP2":
        unseen = point == "loss"  # which FSDP2 knows nothing of
        return f"StepError: {'another forward pass began' if unseen else 'an exception ended the backward pass'}"
    if port in ("Attached", "DropIn", "DropInPowerSGD", "PostLocal"):
        return "StepError: an exception ended the backward pass"
    return f"Broke: broke at {point}"


def ranks_of(port: str) -> int:
    return 4 if port == "Levels" else 2


Outcomes = Callable[[str], list[dict[str, dict[str, Any]]]]
"""What each rank of a port saw, by the point and by who raised there."""


@pytest.fixture(scope="module")
def outcomes(asked: list[Mapping[str, Any]]) -> Outcomes:
    @functools.cache
    def of_port(port: str) -> list[dict[str, dict[str, Any]]]:
        cells = [(case["point"], case["who"]) for case in asked if case.get("port") == port]
        return run_function(f"{CASES}:cells", ranks_of(port), {"port": port, "cells": cells}, 280)

    return of_port


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("port", "point"), [(port, point) for port, points in TOLD.items() for point in points])
@pytest.mark.draw(3)
def test_the_others_are_told_by_the_next_step(port: str, point: str, who: int, outcomes: Outcomes) -> None:
    every = [outcome[f"{point} {who}"] for outcome in outcomes(port)]
    made = every[who]["made"]  # a window ends a step later
    assert every[who]["raised"], "the exception did not come"
    assert every[who]["told"], "it may not go on"
    assert made in ((BAD, BAD + 1) if port in ("Local", "LocalLate") else (BAD,))
    late = point == "after" or port in (
        "LocalLate",
        "Levels",
    )  # that step of the others ends; they are told in the next
    for rank, found in enumerate(every):
        if rank != who:
            assert found["made"] in ((made, made + 1) if late else (made,))
            assert f"rank {who} failed with {cause(port, point)}" in found["told"]
        if not late:
            assert found["kept"], "what it owes has changed"


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("port", "point"), [(port, point) for port, points in GO_ON.items() for point in points])
def test_a_rank_that_has_begun_nothing_goes_on_in_step(port: str, point: str, who: int, outcomes: Outcomes) -> None:
    found = [outcome[f"{point} {who}"] for outcome in outcomes(port)]
    assert [one["told"] for one in found] == [""] * ranks_of(port)
    assert [one["made"] for one in found] == [STEPS] * ranks_of(port)
    assert [bool(one["raised"]) for one in found] == [rank == who for rank in range(ranks_of(port))]
    if not UNLIKE & {port, point}:
        assert len({one["digest"] for one in found}) == 1


@pytest.mark.one_draw_in(2)
def test_ranks_of_fsdp2_that_leave_a_pass_alike_go_on_in_pairs() -> None:
    for point in ("forward", "loss", "between"):
        found = [outcome[f"{point} -1"] for outcome in left_alike()]
        assert [one["told"] for one in found] == ["", ""]
        assert [one["raised"] for one in found] == [f"Broke: broke at {point}"] * 2
        assert [one["made"] for one in found] == [STEPS, STEPS]


@functools.cache
def left_alike() -> list[dict[str, dict[str, Any]]]:
    given = {"port": "OfFSDP2", "cells": [(point, -1) for point in ("forward", "loss", "between")]}
    return run_function(f"{CASES}:cells", 2, given, 120)


@pytest.mark.one_draw_in(3)
def test_a_rank_of_fsdp2_makes_no_step_with_those_that_wait_in_a_gather() -> None:
    """FSDP2 alone ends that wait; meanwhile nothing is gathered for another pass."""
    given = {"port": "OfFSDP2", "cells": [("forward", 1)]}
    waited, left = (outcome["forward 1"] for outcome in run_function(f"{CASES}:cells", 2, given, 120))
    assert waited["made"] == left["made"] == BAD
    assert "Timed out waiting" in waited["told"]
    assert left["raised"] == "Broke: broke at forward"
    assert left["told"]
