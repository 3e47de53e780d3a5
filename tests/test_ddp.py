"""`attach` on real processes over Gloo: no hang, no mismatch, exact resumes, errors that reach the user."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gradwire.ranks.supervised import RankFailure, run_function

CASES = str(Path(__file__).with_name("ddp_cases.py"))
INT4, TOPK, POWER = "int4", "topk:0.05", "powersgd:2"
RESUMED = (INT4, TOPK, POWER)

LONG_RUNS = [
    (INT4, 2, 300, "plain"),
    (POWER, 2, 300, "plain"),
    (INT4, 3, 100, "plain"),
    (POWER, 3, 100, "plain"),
    (INT4, 2, 100, "unused"),
    (POWER, 3, 50, "unused"),
    (INT4, 3, 100, "collective"),
    (POWER, 2, 100, "collective"),
    (TOPK, 2, 50, "static"),
    (INT4, 2, 50, "views"),
    ("int8", 3, 5, "wide"),
]
COMEBACKS = ("powersgd:1", INT4, TOPK)
INFINITE = [INT4, TOPK, POWER, "sign", "randomk:0.2", "fp16", "none"]
AWKWARD = ["sign,vectors=off", "none", "fp16", INT4, TOPK, POWER, "sign", "qsgd:15", "randomk:0.1"]

Job = tuple[str, dict[str, Any]]


def run(case: str, ranks: int, deadline_s: float = 120, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, deadline_s)


def long_name(spec: str, steps: int, variant: str) -> str:
    return f"{spec} {variant} {steps}"


def jobs(ranks: int, asked: list[Mapping[str, Any]]) -> dict[str, Job]:
    """All cases that one set of processes runs, by name."""
    long_runs: dict[str, Job] = {
        long_name(case["spec"], case["steps"], case["variant"]): ("long_run", {**case})
        for case in ({**case} for case in asked if "variant" in case)
        if case.pop("ranks") == ranks
    }
    if ranks == 3:
        return {**long_runs, "subgroup": ("subgroup", {"spec": INT4})}
    comebacks: dict[str, Job] = {f"zero {spec}": ("zero_layer", {"spec": spec}) for spec in COMEBACKS}
    loops: dict[str, Job] = {f"loops {spec}": ("loops", {"spec": spec}) for spec in (INT4, POWER)}
    others: dict[str, Job] = {
        "infinite": ("infinite_step", {"specs": INFINITE}),
        "awkward": ("awkward", {"specs": AWKWARD}),
        "refusals": ("refusals", {}),
        "zeroed": ("zeroed_in_place", {"spec": TOPK}),
    }
    return {**long_runs, **comebacks, **loops, **others}


Outcomes = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(asked: list[Mapping[str, Any]]) -> Outcomes:
    """What every rank saw of all `jobs` of so many ranks."""

    @functools.cache
    def of_ranks(ranks: int) -> list[dict[str, Any]]:
        return run("many", ranks, jobs=jobs(ranks, asked), deadline_s=240)

    return of_ranks


@functools.cache
def resumed(ranks: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What runs without a break saw, and what new processes saw that took them up at step 50."""
    with tempfile.TemporaryDirectory() as folder:
        places = {spec: Path(folder) / str(i) for i, spec in enumerate(RESUMED)}
        for place in places.values():
            place.mkdir()
        both = [
            run("many", ranks, jobs={s: (case, {"spec": s, "folder": str(p)}) for s, p in places.items()})
            for case in ("save_and_go_on", "resume")
        ]
    return both[0], both[1]


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(("spec", "ranks", "steps", "variant"), LONG_RUNS)
@pytest.mark.draw(1)
def test_many_steps_end_with_equal_parameters(
    spec: str, ranks: int, steps: int, variant: str, outcomes: Outcomes
) -> None:
    results = [outcome[long_name(spec, steps, variant)] for outcome in outcomes(ranks)]
    assert {r["steps"] for r in results} == {steps}
    assert len({r["digest"] for r in results}) == 1


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", RESUMED)
@pytest.mark.one_of("ranks")
def test_a_resume_is_exact(spec: str, ranks: int) -> None:
    whole, again = ([outcome[spec]["digests"] for outcome in run] for run in resumed(ranks))
    assert again == whole
    assert len({tuple(digests) for digests in whole}) == 1


def test_an_infinite_step_is_skipped_everywhere_and_forgotten(outcomes: Outcomes) -> None:
    first, second = (outcome["infinite"] for outcome in outcomes(2))
    for spec in INFINITE:
        one, other = first[spec], second[spec]
        assert one == other, spec
        assert one["finite"] == [True] * 4 + [False] + [True] * 3, spec
        assert one["scale"] == 512.0, spec
        assert one["residual_finite"], spec


def test_unused_branches_owe_alike_however_gradients_are_zeroed(outcomes: Outcomes) -> None:
    for outcome in outcomes(2):
        digests, residuals = outcome["zeroed"]["digests"], outcome["zeroed"]["residuals"]
        assert digests[0] == digests[1]
        assert residuals[0] == residuals[1] > 0


@pytest.mark.parametrize("spec", COMEBACKS)
def test_a_layer_without_gradient_comes_back(spec: str, outcomes: Outcomes) -> None:
    for outcome in outcomes(2):
        norms = outcome[f"zero {spec}"]["norms"]
        assert norms[:10] == [0.0] * 10
        assert sum(norms[10:]) > 0.05
        assert all(norm == norm for norm in norms)


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_exception_in_a_reducer_is_raised_there_and_named_on_the_other_ranks(everywhere: bool) -> None:
    for rank, result in enumerate(run("exception", 3, everywhere=everywhere, deadline_s=60)):
        elsewhere = "" if everywhere or rank == 2 else "CommunicationError: rank 2 failed with "
        assert result["seen"].startswith(f"{elsewhere}ZeroDivisionError: the reducer broke"), result
        assert result["steps"] == 2
        # the handle refuses, if DDP, whose own step was cut short, does not come first
        assert result["after"] in ("CommunicationError", "RuntimeError")


def test_awkward_models_work(outcomes: Outcomes) -> None:
    one, other = (outcome["awkward"] for outcome in outcomes(2))
    assert one == other
    assert list(one) == AWKWARD


@pytest.mark.parametrize("spec", [INT4, POWER])
def test_no_sync_join_and_a_second_model(spec: str, outcomes: Outcomes) -> None:
    one, other = (outcome[f"loops {spec}"] for outcome in outcomes(2))
    assert one == other
    assert one["synced"] == 4


def test_a_group_that_is_not_the_world(outcomes: Outcomes) -> None:
    _, one, other = (outcome["subgroup"] for outcome in outcomes(3))
    assert one == other
    assert one["digest"]


def test_what_cannot_be_served_is_refused_with_the_reason(outcomes: Outcomes) -> None:
    for outcome in outcomes(2):
        refused = outcome["refusals"]
        assert "wrap the whole model, or no part" in refused["ddp inside"]
        assert "hook already" in refused["hooked"]
        assert "sparse=False" in refused["sparse"]
        assert "float32" in refused["complex"]
        assert "disagree" in refused["disagree"]
        assert "checksum=" in refused["checksums disagree"]


def test_a_rank_that_dies_stops_the_others_in_time() -> None:
    with pytest.raises(RankFailure, match="rank 2"):
        run("rank_dies", 3, deadline_s=60)
