"""Parameters that optimizers round differently on different processors are found, and repaired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from engines import on_threads
from gradwire.ranks.supervised import run_function
from gradwire.session.drift import of_rank_0
from gradwire.session.fingerprints import digest
from processors import PLAIN

CASES = str(Path(__file__).with_name("drift_cases.py"))
ALIKE, UNLIKE = None, [{}, PLAIN]
FIRST = "parameter '0.weight' is not the same on rank 1 as on rank 0 after step"


def run(environments: Any, on_drift: str, **words: Any) -> list[dict[str, Any]]:
    arguments = {"on_drift": on_drift, "check_every": 4, "steps": 13, **words}
    return run_function(f"{CASES}:drift", 2, arguments, 180, environments=environments)


def test_ranks_on_processors_alike_do_not_drift() -> None:
    for rank in run(ALIKE, "stop"):
        assert rank == {"drifts": [], "left": None, "stopped": "", "done": 13}


@pytest.mark.one_draw_in(3)
def test_ranks_on_processors_unlike_drift_and_are_repaired() -> None:
    for rank in run(UNLIKE, "repair", micro=2):
        assert [text.split(";")[0] for text in rank["drifts"]] == [f"{FIRST} {step}" for step in (4, 8, 12)]
        assert all(text.endswith("all ranks have rank 0's parameters now") for text in rank["drifts"])
        assert rank["left"] is None
        assert rank["done"] == 13


def test_they_stop_where_that_is_wanted() -> None:
    for rank in run(UNLIKE, "stop"):
        assert rank["stopped"].startswith(f"{FIRST} 4: go on from a checkpoint that all ranks load alike, or pass")
        assert rank["done"] == 4


def test_a_warning_changes_nothing() -> None:
    for rank in run(UNLIKE, "warn"):
        assert [text.split(";")[0] for text in rank["drifts"]] == [f"{FIRST} {step}" for step in (4, 8, 12)]
        assert rank["left"] == "0.weight"
        assert rank["done"] == 13


def run_session(environments: Any, on_drift: str, **words: Any) -> list[dict[str, Any]]:
    arguments = {"on_drift": on_drift, "steps": 13, **words}
    return run_function(f"{CASES}:session_drift", 2, arguments, 180, environments=environments)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.draw(1)
def test_a_session_repairs_what_drifted(by_name: bool) -> None:
    for rank in run_session(UNLIKE, "repair", by_name=by_name):
        assert [text.split(";")[0] for text in rank["drifts"]] == [f"{FIRST} {step}" for step in (4, 8, 12)]
        assert rank["done"] == 13


def test_what_a_session_repaired_stays_so_on_processors_alike() -> None:
    for rank in run_session(ALIKE, "repair", spoiled=True):
        (said,) = rank["drifts"]
        assert said.startswith("parameter '2.bias' is not the same on rank 1 as on rank 0 after step 8; all ranks have")
        assert rank["left"] is None
    for rank in run_session(ALIKE, "stop"):
        assert rank == {"drifts": [], "left": None, "stopped": "", "done": 13}


def test_a_session_stops_where_that_is_wanted() -> None:
    for rank in run_session(ALIKE, "stop", spoiled=True):
        assert "'2.bias' is not the same on rank 1 as on rank 0 after step 8: go on from" in rank["stopped"]
        assert rank["done"] == 7
        assert rank["left"] == "2.bias"


def test_sessions_that_would_compare_at_other_steps_are_refused() -> None:
    for said in run_function(f"{CASES}:sessions_apart", 2, {}, 60):
        assert "check_every=4" in said
        assert "check_every=5" in said


def test_a_tensor_that_one_rank_lacks_is_told_to_all_at_once() -> None:
    told = run_function(f"{CASES}:other_names", 2, {}, 60)
    assert told == ["'extra' is not on all ranks: give check_drift the same model on all ranks"] * 2


@pytest.mark.parametrize(
    ("usual", "other", "said"),
    [
        (((4,), "float32"), ((6,), "float32"), "(4,) of float32 on ranks 0 and 2, and (6,) of float32"),
        (((2, 3), "float32"), ((3, 2), "float32"), "(2, 3) of float32 on ranks 0 and 2, and (3, 2) of float32"),
        (((4,), "float16"), ((4,), "bfloat16"), "(4,) of float16 on ranks 0 and 2, and (4,) of bfloat16"),
        (((0,), "float32"), ((0, 2), "float32"), "(0,) of float32 on ranks 0 and 2, and (0, 2) of float32"),
    ],
)
@pytest.mark.parametrize("on_drift", ["repair", "warn"])
@pytest.mark.draw(3)
def test_a_tensor_of_another_shape_is_refused_and_left(usual: Any, other: Any, said: str, on_drift: str) -> None:
    """Also where its bits are the same."""
    arguments = {"forms": [usual, other, usual], "on_drift": on_drift}
    for rank, (sentence, values) in enumerate(run_function(f"{CASES}:other_forms", 3, arguments, 60)):
        assert sentence == f"'w' is {said} on rank 1: give check_drift the same model on all ranks"
        assert set(values) <= {float(rank)}


def test_rank_0_gives_its_bits_also_those_that_a_sum_of_numbers_would_lose() -> None:
    numbers = torch.tensor([-0.0, 1.0, float("inf"), float("nan")])
    given = [
        numbers,
        numbers.bfloat16(),
        torch.tensor([[-1, 2], [3, 2**40]]).t(),
        torch.tensor(True),
        torch.zeros(0, 3),
    ]
    for tensor in given:
        own = [tensor.clone(), torch.ones_like(tensor), tensor.clone()]
        found = on_threads(3, lambda transport, own=own: of_rank_0(own[transport.rank], transport))
        assert len({(each.shape, each.dtype, digest(each)) for each in [tensor, *found]}) == 1
        assert torch.equal(own[1], torch.ones_like(tensor))


def test_a_rank_that_leaves_while_others_repair_is_named() -> None:
    first, second = run_function(f"{CASES}:unlike_reactions", 2, {}, 60)
    assert second.startswith(
        "DriftError: parameter 'w' is not the same on rank 1 as on rank 0 after step 0: go on from"
    )
    assert first.startswith("CommunicationError: ")
    assert "rank 1" in first


@pytest.mark.usefixtures("one_rank")
def test_what_a_session_cannot_watch_is_refused() -> None:
    model = nn.Linear(3, 2)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"check_every": 0}, "check_every=0: parameters are compared every 1, 2, 3 or more steps"),
        ({"check_every": 5, "on_drift": "mend"}, "on_drift='mend' is unknown: choose one of warn, stop, repair"),
    ]
    for words, sentence in refused:
        with pytest.raises(gradwire.AttachError, match=sentence):
            gradwire.Session(model, "int4", **words)
    with pytest.raises(gradwire.AttachError, match="'w' requires no gradient, so it is no parameter"):
        gradwire.Session({"w": torch.ones(2)}, "int4", check_every=5)
    gradwire.Session({"w": torch.ones(2)}, "int4").close()


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_watched_is_refused() -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(gradwire.AttachError, match="check_every=0"):
        gradwire.attach(ddp, "int4", check_every=0)
    with gradwire.attach(ddp, "int4") as handle:  # nothing was attached before
        with pytest.raises(gradwire.AttachError, match="wants a DistributedDataParallel model, got Linear"):
            gradwire.watch_drift(ddp.module, handle, 10)
        with pytest.raises(gradwire.AttachError, match="check_every=0"):
            gradwire.watch_drift(ddp, handle, 0)
        with pytest.raises(gradwire.AttachError, match="on_drift='mend' is unknown: choose one of warn, stop, repair"):
            gradwire.watch_drift(ddp, handle, 10, "mend")
        gradwire.watch_drift(ddp, handle, 1, "stop")
        for _ in range(2):
            ddp(torch.ones(1, 3)).sum().backward()
        assert gradwire.check_drift(handle, {"w": torch.ones(3)}) is None
