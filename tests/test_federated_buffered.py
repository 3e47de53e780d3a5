"""FedBuff: steps are those of the formula, updates count once, and who is slow stops nobody."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from federations import CLIENTS, Point, centres, quadratics, state_bits, vector
from gradwire import StateError
from gradwire.core.errors import CompositionError, FederationError
from gradwire.core.key import Key
from gradwire.federated import (
    SGD,
    BufferedServer,
    BufferedSimulation,
    Conditions,
    FedAvgM,
    FedNova,
    FedProx,
    Mean,
    Scaffold,
    Update,
    train,
)
from gradwire.federated.client import Assignment, Kept
from gradwire.federated.flat import FlatModel


def server(**settings: Any) -> BufferedServer:
    given: dict[str, Any] = {"buffer": 3, "local": SGD(0.1), **settings}
    return BufferedServer(Point(), CLIENTS, **given)


def update_of(buffered: BufferedServer, task: Assignment) -> Update:
    return train(buffered.terms, task, quadratics().client(task.client), Kept(), FlatModel(Point())).update


def test_a_step_is_the_formula() -> None:
    """Eight clients start from x_0; after a first step the others are one step old, then two."""
    buffered = server(optimizer=Mean(0.5))
    tasks = [buffered.start() for _ in range(8)]
    assert len({task.client for task in tasks}) == 8
    x = torch.zeros(3, dtype=torch.float64)
    for number in range(2):
        moved = torch.zeros(3, dtype=torch.float64)
        step = None
        for task in tasks[3 * number : 3 * number + 3]:
            share = 1 - 0.9 ** (task.client + 1)
            moved += share * centres()[task.client] / math.sqrt(1 + number)
            step = buffered.receive(update_of(buffered, task))
        x += 0.5 * moved / 3
        assert step is not None
        assert (step.number, step.staleness) == (number, (number,) * 3)
        assert torch.allclose(vector(buffered), x, rtol=0, atol=1e-12)
    assert buffered.receive(update_of(buffered, tasks[6])) is None


def test_an_update_counts_once_and_only_where_somebody_waits_for_it() -> None:
    buffered = server(most_stale=0)
    tasks = [buffered.start() for _ in range(5)]
    updates = [update_of(buffered, task) for task in tasks]
    buffered.receive(updates[0])
    before = vector(buffered)
    others = [updates[0], updates[1].replace(round=4), updates[1].replace(client=11)]
    for update in others:
        with pytest.raises(FederationError, match="which nobody waits for"):
            buffered.receive(update)
    with pytest.raises(FederationError, match="claims 0 local steps"):
        buffered.receive(updates[1].replace(steps=0))
    assert torch.equal(vector(buffered), before)
    with pytest.raises(StateError, match="1 updates wait"):
        buffered.state_dict()
    buffered.receive(updates[1])
    step = buffered.receive(updates[2])
    assert step is not None
    assert step.clients == tuple(task.client for task in tasks[:3])
    with pytest.raises(FederationError, match="is 1 steps old, and 0 may be"):
        buffered.receive(updates[3])


def test_an_update_that_comes_again_after_its_client_was_drawn_again_counts_once() -> None:
    """Both assignments are of step 0, and the second update counts as the second one."""
    buffered = server(buffer=2)
    first, *_ = [buffered.start() for _ in range(CLIENTS)]
    update = update_of(buffered, first)
    assert buffered.receive(update) is None
    second = buffered.start()
    assert (second.client, second.round) == (first.client, first.round)
    with pytest.raises(FederationError, match="which nobody waits for"):
        buffered.receive(update)
    step = buffered.receive(update_of(buffered, second))
    assert step is not None
    assert step.clients == (first.client,) * 2


@pytest.mark.parametrize(
    "settings",
    [{"buffer": 0}, {"most_stale": -1}, {"method": Scaffold()}, {"aggregate": "krum:1"}],
    ids=["buffer", "stale", "scaffold", "krum"],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(CompositionError):
        server(**settings)


def test_nobody_trains_twice_at_once() -> None:
    buffered = server()
    assert {buffered.start().client for _ in range(CLIENTS)} == set(range(CLIENTS))
    with pytest.raises(FederationError, match="all 10 clients are training"):
        buffered.start()
    buffered.drop(4, "gone")
    assert buffered.start().client == 4
    with pytest.raises(CompositionError, match="no more at once"):
        BufferedSimulation(buffered, quadratics(), concurrency=11)


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("settings", [{}, {"method": FedNova(), "update": "int8"}, {"optimizer": FedAvgM(0.3, 0.5)}])
def test_runs_are_repeatable_and_come_near_the_mean(settings: dict[str, Any]) -> None:
    def run() -> Tensor:
        buffered = server(**settings)
        simulation = BufferedSimulation(buffered, quadratics(), concurrency=5, conditions=Conditions(0.1, 0.3))
        late = [vector(buffered) for step in simulation.run(300) if step.number >= 100]
        return torch.stack(late).mean(0)

    first = run()
    assert torch.equal(first, run())
    assert (first - centres().mean(0)).norm() < 0.35 * centres().mean(0).norm() + 0.1


def test_a_slow_client_stops_nobody() -> None:
    def duration(client: int, key: Key) -> float:
        return 1000.0 if client == 3 else 1.0

    simulation = BufferedSimulation(server(), quadratics(), concurrency=4, duration=duration)
    steps = list(simulation.run(60))
    assert simulation.now_s < 200
    assert max(max(step.staleness) for step in steps) < 10
    assert all(3 not in step.clients for step in steps)


def test_a_federation_in_which_everybody_is_lost_ends() -> None:
    simulation = BufferedSimulation(server(), quadratics(), concurrency=2, conditions=Conditions(drop=1.0))
    with pytest.raises(FederationError, match="200 clients in a row were lost"):
        next(simulation.run(1))


def test_a_server_goes_on_from_its_state() -> None:
    buffered, again = server(method=FedProx(0.1)), server(method=FedProx(0.1))
    for _ in BufferedSimulation(buffered, quadratics(), concurrency=4).run(5):
        pass
    again.load_state_dict(buffered.state_dict())
    assert state_bits(again) == state_bits(buffered)
    for _ in BufferedSimulation(again, quadratics(), concurrency=4).run(5):
        pass
    assert again.steps == 10
    with pytest.raises(StateError, match="with method FedAvg"):
        again.load_state_dict(server().state_dict())
