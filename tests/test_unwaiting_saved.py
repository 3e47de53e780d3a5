"""Optimizers that do not wait are saved in mid-run and go on: servers, what they are owed, clocks and models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire import CommunicationError, StateError
from gradwire.asynchronous import ASGD, Bounded, Matched, ParameterServer, Push
from gradwire.asynchronous.clocks import Clocks, Phase
from gradwire.asynchronous.messages import push_key
from gradwire.asynchronous.own_part import OwnPart
from gradwire.core import save_folder
from gradwire.ranks.supervised import run_function
from unwaiting_cases import model
from unwaiting_saved_cases import OTHERS, of_one, stepped

RANKS = 3


def on_ranks(case: str, ranks: int = RANKS, **arguments: Any) -> list[Any]:
    path = Path(__file__).with_name("unwaiting_saved_cases.py")
    return run_function(f"{path}:{case}", ranks, arguments, deadline_s=120)


def saved_by(folder: Path, rank: int) -> dict[str, Any]:
    """A rank's file: numbers and text, and tensors by where they belong."""
    saved = save_folder.newest(folder).read(folder, rank)
    tensors = {name: leaves["matrix:value"][0]["values"] for name, leaves in saved["parameters"].items()}
    return {"words": {**saved, "parameters": None}, **tensors}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name, its in one.items()
        if not (torch.equal(its, other[name]) if isinstance(its, Tensor) else its == other[name])
    ]


@pytest.mark.parametrize(("staleness", "steps"), [(1, 2), (0, 1)])
@pytest.mark.draw(1)
def test_a_run_that_goes_on_and_one_that_loads_stand_at_the_same_bits(
    staleness: int, steps: int, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"folder": str(tmp_path), "staleness": staleness, "steps": steps}
    saved, loaded = on_ranks("saves", **arguments), on_ranks("loads", **arguments)
    assert saved[0]["version"] >= 30
    first = saved[0]["models"][0]
    assert all(found == first for rank in (*saved, *loaded) for found in rank["models"])
    assert len({rank["version"] for rank in (*saved, *loaded)}) == 1
    for rank in range(RANKS):
        at_once, after, again = (saved_by(tmp_path / name, rank) for name in ("first", "second", "loaded"))
        assert not differing(after, again)
        assert len(differing(at_once, after)) <= RANKS, "backups alone: all ranks have pulled since"
        assert "backup" in str(after["words"])
        assert "owed" in str(after["words"])
    for run in (saved, loaded):
        assert len({tuple(rank["end"]) for rank in run}) == 1
        assert run[0]["end"] != first
        assert torch.tensor(run[0]["end"]).isfinite().all()


@pytest.mark.parametrize("by", ["steps", "version"])
@pytest.mark.draw(1)
def test_no_rank_waits_for_ever_and_all_have_one_version_after_each_save(by: str, tmp_path: Path) -> None:
    first, *others = on_ranks("saves_often", folder=str(tmp_path), by=by)
    assert all(versions == first for versions in others)
    assert first == sorted(set(first))


@pytest.mark.one_draw_in(2)
def test_ranks_that_wait_for_all_make_the_same_steps_after_a_resume(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = on_ranks("whole_numbers", folder=folder, calls="", begin=0)
    saved = on_ranks("whole_numbers", folder=folder, calls="save", begin=0)
    resumed = on_ranks("whole_numbers", folder=folder, calls="load", begin=4)
    assert whole == saved
    assert [rank[4:] for rank in whole] == resumed
    assert len({tuple(step) for step in whole[0]}) == 8, "each step changes the model"


@pytest.mark.usefixtures("one_rank")
def test_one_rank_makes_the_same_steps_after_a_resume(tmp_path: Path) -> None:
    network = model()
    with of_one(network) as optimizer:
        whole = stepped(optimizer, network, 0, 8)
    network = model()
    with of_one(network) as optimizer:
        saved = stepped(optimizer, network, 0, 4)
        gradwire.save(tmp_path, optimizer)
        saved += stepped(optimizer, network, 4, 8)
    network = model()
    with of_one(network) as optimizer:
        assert gradwire.load(tmp_path, optimizer) == 4
        resumed = stepped(optimizer, network, 4, 8)
        assert optimizer.version == 8
    assert all(map(torch.equal, whole, saved))
    assert all(map(torch.equal, whole[4:], resumed))


@pytest.mark.one_draw_in(2)
def test_other_settings_models_and_numbers_of_ranks_are_refused_by_name(tmp_path: Path) -> None:
    here = {"rule": "ASGD(lr=0.25", "pace": "Bounded(staleness=2)", "length": "Fixed(steps=2)", "seed": "1"}
    for said in on_ranks("others_load", folder=str(tmp_path)):
        for what in OTHERS:
            if what == "inner":
                assert "SGD pushed to servers by 3 ranks, and this is AdamW pushed" in said[what]
            elif what == "model":
                assert "another model: of parameter '0.weight' it has one of shape (7, 5), and this model" in said[what]
            else:
                assert f"the save is of a run with {what} " in said[what]
                assert here.get(what, "decay=0.5") in said[what].partition("this one has")[2]
        assert "a run with another method has saved" in said["rule overwrites"]
        assert "a run of another model has saved" in said["model overwrites"]
        assert "this optimizer has finished; save and load before finish()" in said["finished"]
    for said in on_ranks("fewer_load", ranks=2, folder=str(tmp_path)):
        assert "SGD pushed to servers by 3 ranks, and this is SGD pushed to servers by 2 ranks" in said


@pytest.mark.turns("missing", 1)
def test_a_rank_that_has_ended_is_named_long_before_the_deadline(tmp_path: Path) -> None:
    *others, _ = on_ranks("one_is_missing", folder=str(tmp_path), how="closes")
    for said in others:
        assert f"server {RANKS - 1}, in rank {RANKS - 1}'s process, is lost" in said["said"]
        assert said["ranks"] == [RANKS - 1]
        assert said["took_s"] < 45  # the deadline is 90, and a busy machine may stand still for a while
    assert not save_folder.manifests(tmp_path)


class CallsAtOnce:
    """A server's host, without a thread."""

    def call(self, what: Callable[[], None]) -> None:
        what()


class EndsWhenAsked:
    """All servers, for another rank than the last one. That one ends right after its server has replied once."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks, self._last = clocks, len(clocks.phases) - 1

    def pause(self) -> None:
        if self._clocks.phases[self._last] is Phase.DEAD:
            raise CommunicationError(f"server {self._last} is lost", (self._last,))
        self._clocks.leave(self._last)


def test_a_rank_that_ends_right_after_it_was_asked_is_no_rank_that_calls_something_else() -> None:
    server = ParameterServer({"x": torch.zeros(2)}, ASGD(0.5), workers=RANKS)
    for worker in range(RANKS - 1):
        server.join(worker)
        server.pause(worker)
    host: Any = CallsAtOnce()
    servers: Any = EndsWhenAsked(server.clocks)
    with pytest.raises(CommunicationError, match=f"server {RANKS - 1} is lost"):
        OwnPart(host, server, servers, deadline_s=60.0).wait_for_all("gradwire.save")


@pytest.mark.turns("missing", 1)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(tmp_path: Path) -> None:
    *others, _ = on_ranks("one_is_missing", folder=str(tmp_path), how="waits")
    for said in others:
        assert said["said"] == f"rank {RANKS - 1} has not come to gradwire.save within 3 s: every rank must call it"
        assert said["ranks"] == [RANKS - 1]


@pytest.mark.turns("missing", 1)
def test_ranks_that_do_different_things_are_told_so(tmp_path: Path) -> None:
    for said in on_ranks("one_is_missing", folder=str(tmp_path), how="finishes"):
        assert "all ranks must call the same" in said["said"]


def test_shared_memory_is_saved_with_everybodys_steps(tmp_path: Path) -> None:
    saved = on_ranks("hogwild_saves", folder=str(tmp_path))
    for rank in on_ranks("hogwild_loads", folder=str(tmp_path)):
        assert rank["version"] == saved[0]["version"] == 3 + 4 + 5
        assert rank["model"] == saved[0]["model"]
        assert rank["end"] == rank["version"] + RANKS
        assert rank["momentum"]


@pytest.mark.usefixtures("one_rank")
def test_a_damaged_state_of_shared_memory_is_refused(tmp_path: Path) -> None:
    network = nn.Linear(4, 3)
    inner = torch.optim.SGD(network.parameters(), 0.1)
    with gradwire.asynchronous.HogwildOptimizer(inner, network) as optimizer, optimizer.standing_still("x") as still:
        state = still.state_dict()
        for own in ({}, {"count": 1}, {"count": -1, "values": torch.zeros(15)}, {"count": 1, "values": torch.zeros(3)}):
            with pytest.raises(StateError, match=r"damaged|another model"):
                still.checked({**state, "own": own})
        with pytest.raises(StateError, match="rank 1, and this is rank 0"):
            still.checked({**state, "rank": 1})
        with pytest.raises(StateError, match="another version"):
            still.checked({**state, "version": 2})
        with pytest.raises(StateError, match="1 ranks have saved this"):
            still.resharded([state])


# ------------------------------------------------------------------------------------------ a server


def pushed(server: ParameterServer, grant: Any) -> list[Any]:
    wire, _ = server.sending.send(torch.ones(2), None, push_key(server.seed, grant))
    return server.receive(Push(grant, wire, server.names.fingerprint, loss=0.0, seconds=0.5)).grants


def paused_server() -> ParameterServer:
    """Worker 0 waits for worker 1, which pauses; so 0 goes on, and pauses at its next push."""
    server = ParameterServer({"x": torch.zeros(2)}, ASGD(1.0), workers=2, pace=Bounded(0), length=Matched(4))
    [first] = server.join(0)
    [second] = server.join(1)
    assert pushed(server, second) == []
    [_, other] = pushed(server, first)
    assert pushed(server, other) == []
    [freed] = server.pause(0)
    assert freed.worker == 1
    server.pause(1)
    return server


def test_nobody_waits_for_a_worker_that_has_paused_and_all_go_on_as_they_were() -> None:
    server = paused_server()
    clocks, speeds = list(server.clocks.completed), server.state_dict()["speeds"]
    assert clocks == [1, 2]
    assert server.clocks.here == []
    assert min(speeds) > 0
    for worker in (1, 0):
        [grant] = server.join(worker, clocks[worker])
        assert (grant.worker, grant.version) == (worker, 3)
        assert server.clocks.phases[worker] is Phase.COMPUTING
    assert server.clocks.completed == clocks
    assert pushed(server, grant)[0].worker == 0


def test_a_server_that_was_saved_while_all_had_paused_grants_as_the_one_that_went_on() -> None:
    server, other = (
        paused_server(),
        ParameterServer({"x": torch.zeros(2)}, ASGD(1.0), workers=2, pace=Bounded(0), length=Matched(4)),
    )
    other.load_state_dict(server.state_dict())
    for worker in range(2):
        assert server.join(worker) == other.join(worker)
    assert str(server.state_dict()) == str(other.state_dict())
