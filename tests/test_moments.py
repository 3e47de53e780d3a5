"""Averaged moments of optimizers: no step is longer than the optimizer's own can be, whatever ranks have seen."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import CompositionError
from gradwire.ranks.supervised import run_function
from gradwire.sync import LocalSGD
from gradwire.sync.moments import FIRST, SECOND, take_, travelling_moments
from moment_cases import MODELS, OPTIMIZERS

CASES = str(Path(__file__).with_name("moment_cases.py"))
RANKS = 2
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "int4": {"method": "int4"},
    "sparse": {"method": "topk:0.1+int4"},
    "fragments": {"fragments": 2, "delay": 2},
    "progress": {"delay": 3, "merge": "progress", "method": "int4"},
}
PAIRS = [*(("AdamW", way) for way in WAYS), *((name, "int4") for name in OPTIMIZERS if name != "AdamW")]
CASE_NAMES = [(model, *pair) for model, pair in itertools.product(MODELS, PAIRS)]


@functools.cache
def longest_steps() -> list[list[dict[str, float]]]:
    jobs = [(model, name, 40, {"moments": "average", **WAYS[way]}) for model, name, way in CASE_NAMES]
    return run_function(f"{CASES}:several", RANKS, {"jobs": jobs}, 240)


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(("model", "optimizer", "way"), CASE_NAMES)
def test_no_step_is_longer_than_gradients_alone_could_make_it(model: str, optimizer: str, way: str) -> None:
    """An element moves by |m| / sqrt(v) <= 7.3 learning rates at most, and by 10 with Nesterov's momentum."""
    place = CASE_NAMES.index((model, optimizer, way))
    for found in (of_rank[place] for of_rank in longest_steps()):
        assert 0.1 < found["longest"] < 10
        assert found["bound"]


@pytest.mark.parametrize("method", ["none", "int4"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.draw(1)
def test_averaged_moments_train_at_least_as_well_as_own(model: str, method: str) -> None:
    jobs = [(model, "AdamW", 160, {"moments": moments, "method": method}) for moments in ("own", "average")]
    own, average = run_function(f"{CASES}:several", RANKS, {"jobs": jobs}, 120)[0]
    assert average["loss"] < own["loss"]
    assert average["largest"] < 1.5 * own["largest"]
    assert 2.8 < average["bytes"] / own["bytes"] < 3.1


# One rank, in this process ------------------------------------------------------------------------------------------


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, **options)
    for _ in range(3):
        model(torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
    return optimizer


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.95, 0.9)])
def test_what_messages_lose_makes_no_second_moment_negative_and_no_first_one_too_large(
    betas: tuple[float, float],
) -> None:
    network = model()
    optimizer, parameters = adam(network, betas=betas), dict(network.named_parameters())
    noise = torch.Generator().manual_seed(1)
    averaged = travelling_moments(optimizer, parameters, with_seconds=True)
    for name, moment in averaged.items():
        moment.add_(torch.randn(moment.shape, generator=noise), alpha=50.0 if FIRST in name else 1.0)
    take_(optimizer, parameters, averaged)
    zeros = 0
    for parameter in parameters.values():
        first, second = (optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq"))
        assert bool((second >= 0).all())
        assert bool((first[second == 0] == 0).all())
        zeros += int((second == 0).sum())
        if betas == (0.9, 0.999):
            assert bool((first.abs() <= 7.28 * second.sqrt()).all())
            assert bool((first.abs() > 7.2 * second.sqrt())[second > 0].any())
    assert zeros > 0


def test_moments_that_were_not_averaged_are_left_alone() -> None:
    network = model()
    optimizer, parameters = adam(network), dict(network.named_parameters())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    first_only = {name: its for name, its in travelling_moments(optimizer, parameters, True).items() if FIRST in name}
    take_(optimizer, parameters, first_only)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(before[number][key], after[number][key]) for number in before for key in before[number])


def test_second_moments_travel_as_roots() -> None:
    network = model()
    optimizer, parameters = adam(network), dict(network.named_parameters())
    found = travelling_moments(optimizer, parameters, with_seconds=True)
    assert set(found) == {kind + name for kind in (FIRST, SECOND) for name in parameters}
    root = found[SECOND + "weight"]
    torch.testing.assert_close(root.square(), optimizer.state[network.weight]["exp_avg_sq"])


class Belief(torch.optim.Optimizer):
    """Divides its first moment by something that is not known here."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.999)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"exp_avg": torch.ones_like(parameter), "exp_avg_var": Tensor.abs(parameter)}


def test_an_optimizer_whose_second_moment_is_unknown_is_refused(one_rank: None) -> None:
    network = model()
    said = r"'exp_avg' of 'weight', .* 'exp_avg_var' is not known here"
    with (
        LocalSGD(Belief(network.parameters()), network, 1, moments="average") as optimizer,
        pytest.raises(CompositionError, match=said),
    ):
        optimizer.step()


def test_momentum_of_sgd_sends_no_second_moment(one_rank: None) -> None:
    network = model()
    with LocalSGD(torch.optim.SGD(network.parameters(), 0.1, 0.9), network, 1, moments="average") as optimizer:
        assert optimizer.averaging.seconds == []
        assert "seconds" not in optimizer.averaging.state_dict()


@pytest.mark.parametrize("settings", [{}, {"delay": 1}, {"delay": 1, "merge": "progress"}])
def test_a_save_without_second_moments_is_taken_up(settings: dict[str, Any], one_rank: None) -> None:
    """Those of older versions have none; one of them may have an average under way."""
    saves: list[dict[str, Any]] = []
    for is_loaded in (False, True):
        network = model()
        inner = torch.optim.AdamW(network.parameters(), 0.01)
        with LocalSGD(inner, network, 2, "int4", moments="average", **settings) as optimizer:
            if is_loaded:
                old = copy.deepcopy(saves[0])
                del old["sync"]["seconds"]
                optimizer.load_state_dict(old)
            for _ in range(6):
                optimizer.zero_grad()
                network(torch.ones(1, 4)).square().sum().backward()
                optimizer.step()
                assert all(bool(state["exp_avg_sq"].any()) for state in inner.state.values())
            saves.append(optimizer.state_dict())
    assert "seconds" in saves[1]["sync"]
