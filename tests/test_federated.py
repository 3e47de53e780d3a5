"""Federations: rounds are atomic, updates count once, and clients that are lost are told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federations import (
    CLIENTS,
    Point,
    on_quadratics,
    quadratics,
    state_bits,
    vector,
)
from gradwire import StateError
from gradwire.core.errors import CompositionError, FederationError, SpecError
from gradwire.core.key import Key
from gradwire.federated import (
    SGD,
    ByWeight,
    Client,
    Conditions,
    Federation,
    Scaffold,
    Server,
    Simulation,
    Update,
    train,
)
from gradwire.federated.client import Kept
from gradwire.federated.flat import FlatModel
from gradwire.federated.sampling import shares_of

# Rounds and what is refused -----------------------------------------------------------------------------------------


class OneRound:
    """A server with an open round of quadratic clients, and their updates."""

    def __init__(self, **settings: Any) -> None:
        self.server = on_quadratics(torch.float64, **{"sample": 4, **settings}).server
        self.before = vector(self.server)
        self.tasks = self.server.begin()
        model, federation = FlatModel(Point()), quadratics()
        self.updates = [
            train(self.server.terms, task, federation.client(task.client), Kept(), model).update for task in self.tasks
        ]


BAD: dict[str, tuple[Callable[[Update], Update], str]] = {
    "another round": (lambda u: u.replace(round=3), "of round 3 in round 0"),
    "a client that was not drawn": (lambda u: u.replace(client=77), "client 77 was not drawn"),
    "another model": (lambda u: u.replace(fingerprint="0" * 16), "another model"),
    "no examples": (lambda u: u.replace(examples=0.0), "claims 0.0 examples"),
    "negative examples": (lambda u: u.replace(examples=-1.0), "claims -1.0 examples"),
    "NaN examples": (lambda u: u.replace(examples=float("nan")), "claims nan examples"),
    "no steps": (lambda u: u.replace(steps=0), "claims 0 local steps"),
    "NaN": (lambda u: u.replace(wires={"model": _nan(u.wires["model"])}), "not finite"),
    "a payload that was cut": (lambda u: u.replace(wires={"model": u.wires["model"][:-1]}), "damaged"),
    "another method": (lambda u: u.replace(wires={**u.wires, "control": u.wires["model"]}), "another method"),
    "buffers of another model": (lambda u: u.replace(buffers=torch.zeros(2, dtype=torch.float64)), "another model"),
}


def _nan(wire: Tensor) -> Tensor:
    values = wire.clone()
    values[:8].view(torch.float64).fill_(float("nan"))
    return values


@pytest.mark.parametrize("what", BAD)
def test_a_bad_update_is_refused_in_a_sentence_and_changes_nothing(what: str) -> None:
    spoil, says = BAD[what]
    good, spoiled = OneRound(), OneRound()
    with pytest.raises(FederationError, match=says) as caught:
        spoiled.server.receive(spoil(spoiled.updates[0]))
    assert "\n" not in str(caught.value)
    for round in (good, spoiled):
        for update in round.updates:
            round.server.receive(update)
        round.server.end()
    assert state_bits(good.server) == state_bits(spoiled.server)


def test_an_update_counts_once() -> None:
    once, twice = OneRound(), OneRound()
    for update in once.updates:
        once.server.receive(update)
    for update in twice.updates:
        twice.server.receive(update)
        with pytest.raises(FederationError, match="is here already: it counts once"):
            twice.server.receive(update)
    once.server.end()
    twice.server.end()
    assert state_bits(once.server) == state_bits(twice.server)
    with pytest.raises(FederationError, match="no round is open"):
        twice.server.receive(twice.updates[0])
    with pytest.raises(FederationError, match="no round is open"):
        twice.server.end()


def test_the_order_of_arrival_does_not_matter() -> None:
    one, other = OneRound(), OneRound()
    for update in one.updates:
        one.server.receive(update)
    for update in reversed(other.updates):
        other.server.receive(update)
    one.server.end()
    other.server.end()
    assert state_bits(one.server) == state_bits(other.server)


@pytest.mark.parametrize("received", [0, 2])
def test_a_round_below_its_quorum_applies_nothing_and_is_drawn_anew(received: int) -> None:
    round = OneRound(quorum=3)
    for update in round.updates[:received]:
        round.server.receive(update)
    with pytest.raises(FederationError, match=f"has {received} updates of 4 clients, and it needs 3: nothing was"):
        round.server.end()
    assert torch.equal(vector(round.server), round.before)
    again = round.server.begin()
    assert again[0].round == 0
    assert [task.client for task in again] != [task.client for task in round.tasks]
    left = next(update for update in round.updates if update.client not in {task.client for task in again})
    with pytest.raises(FederationError, match="was not drawn"):
        round.server.receive(left)


def test_one_round_at_a_time() -> None:
    round = OneRound()
    with pytest.raises(FederationError, match="is open"):
        round.server.begin()
    with pytest.raises(StateError, match="is open"):
        round.server.state_dict()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sample": 11}, "larger than the federation of 10"),
        ({"sample": 0}, "draw one at least"),
        ({"sample": 4, "quorum": 5}, "quorum of 5 among 4"),
        ({"sample": 4, "quorum": 0}, "quorum of 0 among 4"),
        ({"sample": 4, "aggregate": "krum:1"}, "needs 5 clients a round and would get 4"),
        ({"sample": ByWeight(2, (1.0, 2.0))}, "2 weights for 10 clients"),
        ({"update": "powersgd:4"}, "is no codec"),
        ({"update": "int4,node=2"}, "belongs to exchanges"),
        ({"update": "topk:0.1,ef=ef21"}, "take ef=on"),
        ({"broadcast": "qsgd:3"}, "without bound"),
        ({"broadcast": "topk:0.1,decay=0.5"}, "lose parts of the model"),
        ({"aggregate": "adasum"}, "is no rule"),
        ({"aggregate": "dp:1", "method": Scaffold()}, "without control variates"),
    ],
)
def test_parts_that_do_not_fit_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises((CompositionError, SpecError), match=says):
        on_quadratics(**settings)


@pytest.mark.parametrize("weights", [[], [1.0, -1.0], [1.0, float("nan")], [float("inf")], [0.0, 0.0]])
def test_weights_that_make_no_mean_are_refused(weights: list[float]) -> None:
    with pytest.raises(CompositionError):
        shares_of(weights)
    with pytest.raises(CompositionError):
        ByWeight(1, tuple(weights))


def test_a_simulation_of_another_federation_is_refused() -> None:
    with pytest.raises(CompositionError, match="a federation of 5 clients, and a server of 10"):
        Simulation(on_quadratics().server, Federation(5, quadratics().client))


def test_models_that_cannot_be_averaged_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    for model, says in ((mixed, "differ in dtype"), (frozen, "no parameter"), (nn.Linear(2, 2).half(), "float32")):
        with pytest.raises(CompositionError, match=says):
            Server(model, 3, sample=1, local=SGD(0.1))


# Clients that are lost ----------------------------------------------------------------------------------------------


def test_clients_that_fail_are_dropped_by_name_and_the_round_goes_on() -> None:
    whole = quadratics()

    def client(i: int) -> Client:
        def nan(model: nn.Module, key: Key) -> Tensor:
            return next(model.parameters()).sum() * float("nan")

        def broken(model: nn.Module, key: Key) -> Tensor:
            raise KeyError("file 3")

        losses = {1: nan, 4: broken}
        return Client(0 if i == 2 else 1, losses[i]) if i in losses else whole.client(i) if i != 2 else Client(0, nan)

    server = Server(Point(), CLIENTS, sample=CLIENTS, local=SGD(0.1))
    done = Simulation(server, Federation(CLIENTS, client)).round()
    assert done.clients == (0, 3, 5, 6, 7, 8, 9)
    assert "client 1's model is not finite after 10 local steps" in done.dropped[1]
    assert "client 2 has no examples" in done.dropped[2]
    assert "client 4 raised KeyError: 'file 3'" in done.dropped[4]
    wanted = Simulation(Server(Point(), CLIENTS, sample=CLIENTS, local=SGD(0.1)), whole)
    tasks = wanted.server.begin()
    model = FlatModel(Point())
    for task in tasks:
        if task.client in done.clients:
            wanted.server.receive(train(wanted.server.terms, task, whole.client(task.client), Kept(), model).update)
    wanted.server.end()
    assert torch.equal(vector(server), vector(wanted.server))


def test_a_loss_that_replaces_gradients_is_told() -> None:
    def loss(model: nn.Module, key: Key) -> Tensor:
        model.zero_grad()
        return next(model.parameters()).sum()

    server = Server(Point(), 2, sample=2, local=SGD(0.1))
    with pytest.raises(FederationError, match="replaced the model's gradients"):
        Simulation(server, Federation(2, lambda i: Client(1, loss))).round()


def test_conditions_drop_and_slow_clients_down_alike_each_time() -> None:
    def rounds() -> list[tuple[Any, Any]]:
        simulation = on_quadratics(quorum=1)
        simulation.conditions = Conditions(drop=0.3, slow=0.5, least=0.2)
        return [(done.clients, sorted(done.dropped)) for done in simulation.run(20)]

    first = rounds()
    assert first == rounds()
    lost = sum(len(dropped) for _, dropped in first)
    assert 30 < lost < 90
    shares = [Conditions(slow=0.5, least=0.2).share(Key(step=i)) for i in range(400)]
    slow = [share for share in shares if share < 1]
    assert 140 < len(slow) < 260
    assert min(slow) >= 0.2


def test_what_a_client_owes_is_kept_where_its_round_fails() -> None:
    """Of a round that was given up neither the model nor any client's memory takes notice."""
    simulation = on_quadratics(torch.float32, update="topk:0.34", method=Scaffold(), quorum=10)
    simulation.round()
    before = simulation.state_dict()
    simulation.conditions = Conditions(drop=0.5)
    with pytest.raises(FederationError, match="nothing was applied"):
        simulation.round()
    after = simulation.state_dict()
    assert str(before["clients"]) == str(after["clients"])
    assert torch.equal(before["server"]["model"]["model"], after["server"]["model"]["model"])
    assert after["server"]["attempt"] == 1
