"""Runs of federations go on exactly, leave alone what is not theirs, and need little memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from federations import (
    Classifier,
    classifier,
    on_classifier,
    small_model,
    state_bits,
)
from gradwire import StateError
from gradwire.federated import (
    SGD,
    Conditions,
    FedAdam,
    FedAvgM,
    FedNova,
    FedProx,
    Scaffold,
    Server,
    Simulation,
)

# State --------------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaffold": {"method": Scaffold(), "update": "topk:0.2", "broadcast": "int4"},
    "adam": {"method": FedProx(0.1), "optimizer": FedAdam(lr=0.05), "update": "int4"},
    "clipped": {"method": FedNova(), "optimizer": FedAvgM(0.5, 0.5), "aggregate": "clip:1"},
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_goes_on_exactly(run: str) -> None:
    whole, broken, resumed = (on_classifier(**RUNS[run]) for _ in range(3))
    for simulation in (whole, broken):
        simulation.conditions = Conditions(drop=0.2, slow=0.3)
    resumed.conditions = whole.conditions
    for _ in whole.run(9):
        pass
    for _ in broken.run(5):
        pass
    torch.rand(3)  # whatever the rest of a program draws
    resumed.load_state_dict(broken.state_dict())
    for _ in resumed.run(4):
        pass
    assert state_bits(whole.server) == state_bits(resumed.server)
    assert str(whole.state_dict()["clients"]) == str(resumed.state_dict()["clients"])


def test_saved_states_hold_nothing_but_tensors_numbers_and_strings(tmp_path: Any) -> None:
    simulation = on_classifier(**RUNS["scaffold"])
    simulation.round()
    torch.save(simulation.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    again = on_classifier(**RUNS["scaffold"])
    again.load_state_dict(loaded)
    assert state_bits(again.server) == state_bits(simulation.server)


Spoil = Callable[[Any], object]
SPOILED: list[tuple[Spoil, str]] = [
    (lambda saved: saved.pop("server"), "no state of a simulation"),
    (lambda saved: saved["server"].pop("settings"), "no 'settings'"),
    (lambda saved: saved["server"].pop("seed"), "no 'seed'"),
    (lambda saved: saved["server"]["settings"].update(method="FedAvg()"), "a server with method FedAvg"),
    (lambda saved: saved["server"]["model"].pop("model"), "the saved model has"),
    (lambda saved: saved["server"]["shared"].update(control=torch.zeros(2)), "'control' of shared is none of"),
    (lambda saved: saved["clients"].update({3: {}}), "state of client 3"),
    (lambda saved: saved["clients"].update({3: {"vectors": {"x": torch.ones(1)}, "memories": {}}}), "client 3"),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILED)
def test_a_state_of_something_else_is_refused_and_changes_nothing(spoil: Spoil, says: str) -> None:
    simulation, saved = on_classifier(**RUNS["scaffold"]), on_classifier(**RUNS["scaffold"])
    for each in (simulation, saved):
        each.round()
    saved.round()
    state, before = saved.state_dict(), state_bits(simulation.server)
    spoil(state)
    with pytest.raises(StateError, match=says):
        simulation.load_state_dict(state)
    assert state_bits(simulation.server) == before


# What a run leaves alone, and what it costs -------------------------------------------------------------------------


def test_the_callers_model_and_random_numbers_stay_as_they_are() -> None:
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    simulation = Simulation(Server(model, 12, sample=4, local=SGD(0.1)), classifier(12))
    random = torch.get_rng_state()
    simulation.round()
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_statistics_of_layers_are_averaged() -> None:
    simulation = on_classifier()
    for _ in simulation.run(3):
        pass
    state = simulation.server.model.state_dict()
    assert state["1.running_mean"].abs().max() > 0
    assert int(state["1.num_batches_tracked"]) == 15  # 3 rounds of 5 steps


def test_training_learns() -> None:
    simulation = on_classifier(sample=12, local=SGD(0.2, steps=10))
    losses = [done.loss for done in simulation.run(30)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("settings", [{}, {"method": FedNova(), "update": "qsgd:15"}], ids=["dense", "qsgd"])
def test_memory_does_not_depend_on_the_size_of_the_federation(settings: dict[str, Any]) -> None:
    def peak(clients: int) -> int:
        simulation = on_classifier(clients, **settings)
        for _ in simulation.run(2):
            pass
        gc.collect()
        tracemalloc.start()
        for _ in simulation.run(10):
            pass
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not simulation.state_dict()["clients"]
        return found

    assert peak(10**9) < peak(100) + 20_000


def test_clients_keep_something_only_once_they_took_part() -> None:
    simulation = on_classifier(10**6, method=Scaffold())
    drawn = {client for done in simulation.run(5) for client in done.clients}
    assert set(simulation.state_dict()["clients"]) == drawn


def test_clients_can_be_sent_to_another_process() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(Classifier(3)))(1).examples == 20
