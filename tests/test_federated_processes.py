"""Clients in processes of their own: the same bits as in this one, and a worker that dies loses one client."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from federations import CLIENTS, Classifier, Point, classifier, on_classifier, quadratics, small_model, state_bits
from gradwire.core.errors import CompositionError, FederationError
from gradwire.core.key import Key
from gradwire.federated import SGD, Client, Federation, Processes, Scaffold, Server, Simulation


def small(clients: int) -> tuple[nn.Module, Federation]:
    return small_model(), Federation(clients, Classifier(clients))


def troubled() -> tuple[nn.Module, Federation]:
    """Client 4 brings its worker down, client 6 hangs."""

    def client(i: int) -> Client:
        def loss(model: nn.Module, key: Key) -> Tensor:
            if i == 4:
                os._exit(7)
            time.sleep(60)
            raise AssertionError

        return Client(1, loss) if i in (4, 6) else quadratics().client(i)

    return Point(), Federation(CLIENTS, client)


@pytest.mark.one_draw_in(2)
def test_results_are_those_of_one_process_bit_for_bit() -> None:
    settings: dict[str, Any] = {"method": Scaffold(), "update": "topk:0.1", "broadcast": "int4"}
    here, there = on_classifier(**settings), on_classifier(**settings)
    there.engine = Processes(functools.partial(small, 12), workers=2)
    try:
        for _ in zip(here.run(4), there.run(4), strict=True):
            pass
    finally:
        there.close()
    assert torch.get_num_threads() == 1
    assert state_bits(here.server) == state_bits(there.server)
    assert str(here.state_dict()["clients"]) == str(there.state_dict()["clients"])
    with pytest.raises(FederationError, match="workers are closed"):
        there.round()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.draw(1)
@pytest.mark.turns("lost workers", 1)
def test_a_worker_that_fails_is_one_client_that_is_lost(workers: int) -> None:
    server = Server(Point(), CLIENTS, sample=CLIENTS, local=SGD(0.1))
    simulation = Simulation(server, quadratics(), engine=Processes(troubled, workers=workers, deadline_s=15))
    try:
        done = simulation.round()
    finally:
        simulation.close()
    assert done.dropped == {
        4: "client 4's worker died with status 7",
        6: "client 6 took longer than 15 s, and its worker was killed",
    }
    assert done.clients == (0, 1, 2, 3, 5, 7, 8, 9)


def fails() -> tuple[nn.Module, Federation]:
    raise FileNotFoundError("data of client 3")


@pytest.mark.one_draw_in(2)
def test_workers_that_cannot_be_made_are_told_of() -> None:
    simulation = on_classifier()
    simulation.engine = Processes(fails, workers=1)
    try:
        for _ in range(2):
            with pytest.raises(FederationError, match="could not be started: FileNotFoundError: data of client 3"):
                simulation.round()
    finally:
        simulation.close()
    simulation.engine = Simulation(simulation.server, classifier(12)).engine
    assert len(simulation.round().clients) == 4  # the round that failed was given up


def dies_once(folder: str) -> tuple[nn.Module, Federation]:
    """Whoever is first to come dies."""
    with contextlib.suppress(FileExistsError):
        (Path(folder) / "was here").touch(exist_ok=False)
        os._exit(3)
    return small(12)


@pytest.mark.turns("lost workers", 1)
def test_a_worker_that_could_not_be_started_is_started_in_the_next_round(tmp_path: Path) -> None:
    here, there = on_classifier(), on_classifier()
    engine = there.engine = Processes(functools.partial(dies_once, str(tmp_path)), workers=1)
    try:
        with pytest.raises(
            FederationError, match="could not be started: it died with status 3; see what it has printed"
        ):
            there.round()
        here.server.begin()
        here.server.abandon()
        assert there.round().clients == here.round().clients
        for process in multiprocessing.active_children():  # while nobody trains, which loses no client
            process.kill()
            process.join()
        assert there.round().dropped == here.round().dropped == {}
        assert state_bits(here.server) == state_bits(there.server)
    finally:
        engine.close()
    assert not multiprocessing.active_children()


def test_no_workers_are_refused() -> None:
    with pytest.raises(CompositionError, match="one at least"):
        Processes(functools.partial(small, 2), workers=0)


def test_the_default_engine_is_this_process() -> None:
    simulation = Simulation(Server(small_model(), 12, sample=2, local=SGD(0.1)), classifier(12))
    assert type(simulation.engine).__name__ == "InProcess"
