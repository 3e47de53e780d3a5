"""The example on Flower's simulation, as a user starts it, has the results of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flower_runs import EXAMPLE, flwr_run, superlink
from gradwire.federated import Federation, FedNova, Simulation

ROUNDS = 20
DEADLINE_S = 200.0
"""It took 45 to 70 s on two cores with six times their work."""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("example")
@pytest.mark.long
def test_flower_equals_one_process(tmp_path: Path) -> None:
    """10 clients, 20 rounds, FedNova with a quarter of each update and error memory."""
    from points.server_app import server
    from points.task import CLIENTS, METHOD, UPDATE, client

    assert isinstance(METHOD, FedNova)
    assert (CLIENTS, UPDATE) == (10, "topk:0.25")
    model = tmp_path / "model.pt"
    with superlink(tmp_path) as home:
        said = flwr_run(home, tmp_path / "run.log", CLIENTS, f'rounds={ROUNDS} out="{model}"', DEADLINE_S)
    assert f"{ROUNDS} rounds held" in said
    assert "without client" not in said
    here = Simulation(server(), Federation(CLIENTS, client))
    before = {name: tensor.clone() for name, tensor in here.server.model.state_dict().items()}
    for done in here.run(ROUNDS):
        assert len(done.clients) == CLIENTS
    there = torch.load(model, weights_only=True)
    for name, tensor in here.server.model.state_dict().items():
        assert (there[name] - tensor).abs().max() <= 1e-5
        assert (tensor - before[name]).abs().max() > 0.01


@pytest.mark.usefixtures("example")
def test_the_example_learns() -> None:
    from points.server_app import server
    from points.task import CLIENTS, accuracy, client

    here = Simulation(server(), Federation(CLIENTS, client))
    assert accuracy(here.server.model) < 0.3
    for _ in here.run(10):
        pass
    assert accuracy(here.server.model) > 0.9
