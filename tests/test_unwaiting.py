"""Optimizers whose ranks do not wait: what they compute, how they end, and what they refuse."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import CommunicationError, SpecError, StepError
from gradwire.asynchronous import is_asynchronous, parse
from gradwire.asynchronous.methods import METHODS
from gradwire.ranks.supervised import run_function

RANKS = 3


@functools.cache
def on_ranks(case: str, **arguments: Any) -> list[Any]:
    path = Path(__file__).with_name("unwaiting_cases.py")
    return run_function(f"{path}:{case}", RANKS, arguments, deadline_s=120)


def test_ranks_that_wait_for_all_make_steps_of_the_mean() -> None:
    assert max(on_ranks("no_staleness")) < 1e-6


@pytest.mark.parametrize(
    "spec", ["asgd", "asgd:inverse,H=2", "ssp:2,update=(topk:0.5,decay=0.9)", "dcasgd:0.5", "hogwild"]
)
@pytest.mark.draw(2)
def test_training_goes_on_while_one_rank_is_slow(spec: str) -> None:
    ranks = on_ranks("uneven", spec=spec)
    assert len({tuple(rank["model"]) for rank in ranks}) == 1
    assert all(rank["finite"] for rank in ranks)
    assert ranks[0]["last"] < 0.3 * ranks[0]["first"]
    assert all(rank["rates"] == [0.125] for rank in ranks)
    slow, *others = [rank["steps"] for rank in ranks]
    if spec.startswith("ssp"):
        assert all(abs(other - slow) <= 3 for other in others)
    else:
        assert min(others) > slow


def test_a_rank_sends_what_a_ring_sends() -> None:
    slow, *others = on_ranks("uneven", spec="asgd")
    parameters = 4 * len(slow["model"])
    for rank in others:
        pushed = rank["steps"] * parameters * (RANKS - 1) / RANKS
        served = (sum(r["steps"] for r in (slow, *others)) - rank["steps"]) * parameters / RANKS
        assert rank["sent"] == pytest.approx(pushed + served, rel=0.1)


def test_other_models_and_numbers_that_are_not_finite_are_refused() -> None:
    for said in on_ranks("refusals"):
        assert "differs between rank 0 and rank" in said["AsynchronousOptimizer"]
        assert "differs between rank 0 and rank" in said["HogwildOptimizer"]
        assert "gradwire 0.0.1, and rank 0 has" in said["version"], "before anybody connects"
        assert "not finite, and nothing was pushed" in said["nan"]
        assert said["untouched"] == "True"
        assert "has finished" in said["finished"]


def test_a_rank_that_ends_is_named() -> None:
    *others, _ = on_ranks("one_ends")
    for rank, said in enumerate(others):
        [ended] = said["ranks"]
        assert ended != rank
        assert f"server {ended}, in rank {ended}'s process, is lost" in said["said"]
    assert RANKS - 1 in [said["ranks"][0] for said in others]  # the first of them to notice ended then, too


def test_processes_of_one_machine_step_one_copy() -> None:
    for rank, seen in enumerate(on_ranks("one_memory")):
        assert seen["seen"] == [rank, RANKS + rank]
        assert seen["version"] == 2 * RANKS
        assert seen["shared"] == [[2.0 * RANKS] * 3]
        assert seen["own"] == [[2.0 * RANKS + rank] * 3]


# ------------------------------------------------------------------------------------------ the language


@pytest.fixture
def network(one_rank: None) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_every_method_trains(name: str, network: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    optimizer = parse(METHODS[name].example).optimizer(torch.optim.SGD(network.parameters(), 0.1), network)
    before = network.weight.detach().clone()
    network(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, network.weight)
    optimizer.finish()
    optimizer.close()
    assert optimizer.version == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ssp", "needs its staleness"),
        ("ssp:-1", "it is 0, which is synchronous"),
        ("asgd:rate=fast", "known are constant"),
        ("asgd:H=0", "give 1 or more"),
        ("asgd:update=nonsense", "nonsense"),
        ("dcasgd:-2", "0 or more"),
        ("hogwild:4", "nothing after a colon"),
        ("hogwild,H=4", "it has none"),
        ("async:4", "known are asgd, ssp, dcasgd, hogwild"),
    ],
)
def test_what_cannot_be_read_is_said(spec: str, said: str) -> None:
    with pytest.raises((SpecError, ValueError), match=said):
        parse(spec)


def test_names_do_not_overlap() -> None:
    assert [is_asynchronous(spec) for spec in ("ssp:2", " hogwild", "local:H=2", "topk:0.1")] == [
        True,
        True,
        False,
        False,
    ]


def test_without_a_way_to_the_others_the_address_is_asked_for(
    network: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    inner = torch.optim.SGD(network.parameters(), 0.1)
    with pytest.raises(CommunicationError, match="pass address="):
        parse("asgd").optimizer(inner, network)
    with pytest.raises(CommunicationError, match=r"no server can listen at .* 203\.0\.113\.1"):
        parse("asgd").optimizer(inner, network, address="203.0.113.1")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("with_closure", [False, True])
def test_hogwild_keeps_what_is_not_finite_from_the_shared_model(with_closure: bool) -> None:
    model = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = parse("hogwild").optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def closure() -> torch.Tensor:
        loss = model(torch.full((1, 3), float("nan"))).sum()
        loss.backward()
        return loss

    if not with_closure:
        closure()
    with pytest.raises(StepError, match=r"the gradient of 'weight' is not finite.*lower the learning rates"):
        optimizer.step(closure if with_closure else None)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.close()
