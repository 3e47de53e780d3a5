"""What travels in a federation conserves, and what rules make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federations import (
    CLIENTS,
    Point,
    centres,
    on_classifier,
    on_quadratics,
    quadratics,
    small_model,
    vector,
)
from gradwire.core.key import Key
from gradwire.federated import (
    SGD,
    Client,
    FedAvg,
    Federation,
    FedNova,
    Scaffold,
    Server,
    Simulation,
    train,
)
from gradwire.federated.client import Kept
from gradwire.federated.flat import FlatModel
from gradwire.federated.sampling import shares_of
from gradwire.sending import Sending

# What is sent -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["topk:0.34", "int4", "sign", "int8", "topk:0.34,decay=0.9"])
def test_what_is_sent_and_what_is_owed_add_up(update: str) -> None:
    """Sum of what arrived + what is owed = sum of what was to be sent (decay 1); with decay, step by step."""
    sending, memory = Sending.of(update), None
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        x = torch.randn(40, generator=generator)
        key = Key(step=step)
        owed = torch.zeros(40) if memory is None else memory.owed
        wire, memory = sending.send(x, memory, key)
        assert memory is not None
        assert wire.nbytes == sending.nbytes(x)
        arrived = sending.receive(wire, x, key)
        assert torch.allclose(arrived + memory.owed, x + (sending.decay or 0) * owed, atol=1e-5)


@pytest.mark.parametrize("update", ["topk:0.34", "int4", "topk:0.34+int8"])
def test_compressed_updates_lose_nothing_over_rounds(update: str) -> None:
    """The model and what clients owe, weighted, come to the sum of all changes that clients made."""
    simulation = on_quadratics(torch.float32, update=update)
    server, federation, model = simulation.server, quadratics(torch.float32), FlatModel(Point(dtype=torch.float32))
    kept = {i: Kept() for i in range(CLIENTS)}
    shares = torch.tensor(shares_of([federation.client(i).examples for i in range(CLIENTS)]), dtype=torch.float64)
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(15):
        for task in server.begin():
            done = train(server.terms, task, federation.client(task.client), kept[task.client], model)
            total += shares[task.client] * (model.values - task.model).double()
            server.receive(done.update)
            kept[task.client] = done.kept
        server.end()
    owed = sum(shares[i] * kept[i].memories["model"].owed.double() for i in range(CLIENTS))
    assert torch.allclose(vector(server).double() + owed, total, atol=1e-5)


@pytest.mark.parametrize("method", [FedAvg(), FedNova(), Scaffold()])
@pytest.mark.parametrize("way", ["update", "broadcast"])
@pytest.mark.draw(3)
def test_compression_does_not_move_the_limit_by_much(method: Any, way: str) -> None:
    exact, compressed = (
        on_quadratics(torch.float32, method=method),
        on_quadratics(torch.float32, method=method, **{way: "int8"}),
    )
    for simulation in (exact, compressed):
        for _ in simulation.run(80):
            pass
    assert (vector(exact.server) - vector(compressed.server)).abs().max() < 2e-2
    assert vector(exact.server).abs().max() > 0.1


@pytest.mark.parametrize("broadcast", ["int4", "topk:0.34", "bf16"])
def test_clients_know_the_server_but_for_what_it_owes(broadcast: str) -> None:
    """What the server still owes them closes with the changes that it makes."""
    simulation = on_quadratics(torch.float32, broadcast=broadcast, method=Scaffold())
    for _ in simulation.run(60):
        pass
    task = simulation.server.begin()[0]
    assert (task.model - vector(simulation.server)).abs().max() < 0.05
    assert not torch.equal(task.model, torch.zeros(3))


def test_a_client_that_was_away_gets_what_it_missed_or_everything() -> None:
    simulation = on_classifier(clients=12, broadcast="int4")
    server = simulation.server
    whole = sum(v.nbytes for v in (vector(server),)) + FlatModel(small_model()).buffers().nbytes
    seen: dict[int, int] = {}
    change = Sending.of("int4").nbytes(vector(server))
    statistics = FlatModel(small_model()).buffers().nbytes
    for done in simulation.run(12):
        for client, received in done.received_bytes.items():
            missed = done.number - seen[client] if client in seen else 10**9
            assert received == min(whole, missed * change + statistics)
            seen[client] = done.number
    assert len(set(seen.values())) > 2


def test_bytes_are_those_of_the_payloads() -> None:
    dense, sparse = on_classifier().round(), on_classifier(update="topk:0.05").round()
    d = vector(on_classifier().server).numel()
    statistics = FlatModel(small_model()).buffers().nbytes
    assert set(dense.sent_bytes.values()) == {4 * d + statistics + 4 * d % 8}
    assert set(sparse.sent_bytes.values()) == {Sending.of("topk:0.05").nbytes(torch.empty(d)) + statistics}


# Rules --------------------------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("aggregate", ["median", "trimmed:2", "krum:2", "multikrum:2", "rfa", "bulyan:1"])
def test_rules_leave_bad_clients_out(aggregate: str) -> None:
    """Two of ten clients pull to 1e6; the model stays among the others."""

    def client(i: int) -> Client:
        towards = 1e6 if i in (2, 7) else float(centres()[i, 0])

        def loss(model: nn.Module, key: Key) -> Tensor:
            return 0.5 * (next(model.parameters()) - towards).square().sum()

        return Client(1e9 if i == 2 else 1.0, loss)

    server = Server(Point(), CLIENTS, sample=CLIENTS, local=SGD(0.1), aggregate=aggregate)
    for _ in Simulation(server, Federation(CLIENTS, client)).run(40):
        pass
    good = [float(centres()[i, 0]) for i in range(CLIENTS) if i not in (2, 7)]
    assert min(good) - 0.1 < float(vector(server)[0]) < max(good) + 0.1


def test_centred_clipping_remembers_its_last_result() -> None:
    simulation = on_quadratics(aggregate="clip:0.5")
    for _ in simulation.run(3):
        pass
    assert "model" in simulation.server.state_dict()["last"]


def test_the_private_mean_is_clipped_and_noisy() -> None:
    quiet, noisy = on_quadratics(aggregate="dp:0.1,noise=0"), on_quadratics(aggregate="dp:0.1,noise=1")
    for simulation in (quiet, noisy):
        simulation.round()
    assert vector(quiet.server).norm() <= 0.1 + 1e-9
    assert not torch.equal(vector(quiet.server), vector(noisy.server))
    assert (vector(quiet.server) - vector(noisy.server)).norm() < 10 * 0.1 / CLIENTS * 3
