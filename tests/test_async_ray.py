"""Training on Ray, in processes of its own: a worker and a server are killed, and at each server a push counts once."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_cases import START
from async_processes import even
from gradwire import CommunicationError, CompositionError
from gradwire.asynchronous import ASGD, Bounded, snapshots
from gradwire.asynchronous.ray_actors import Job, actors, run, running
from gradwire.asynchronous.several import JournalRow, ServerWatch
from ray_fake import FakeRay
from scripts import ROOT, Script, said_by

DEADLINE_S = 560.0
"""For machines that are busy with other things: on two cores with a load of 12 the two took 45 and 37 seconds."""
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def rows(plain: list[list[Any]]) -> list[JournalRow]:
    return [JournalRow(*fields) for fields in plain]


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_killed_worker_and_a_killed_server_and_each_push_counts_once(tmp_path: Path) -> None:
    script = Script(tmp_path / "log", "tests/ray_main.py", tmp_path / "snapshots", **RAY)
    [said] = said_by([script], DEADLINE_S)
    found = json.loads(said.splitlines()[-1])
    assert found["lost"] == [2]
    assert found["restarts"] == [0, 1]
    for part, name in enumerate(("first", "last")):
        journal, kept = rows(found["journals"][part]), rows(found["histories"][part])
        named = Counter((row.life, row.worker, row.number) for row in journal)
        assert set(named.values()) == {1}
        counts: Counter[int] = Counter()
        for version, row in enumerate(kept):
            assert (row.version, row.number) == (version, counts[row.worker])
            counts[row.worker] += 1
        assert len(kept) >= 240
        assert found["parameters"][name] == [float(counts[worker]) for worker in range(4)]
        assert counts[2] < min(counts[worker] for worker in (0, 1, 3))
    assert {row.life for row in rows(found["histories"][1])} == {0, 1}
    assert len(found["journals"][1]) > len(found["histories"][1])  # what the restart lost is told too
    loss = torch.tensor(found["parameters"]["x"], dtype=torch.float64).square().sum() / 2
    assert loss < 0.01 * 36
    # one more job, whose only worker was killed, started anew, and raised at its push 3
    assert re.fullmatch(
        "no worker is left at push . of 5: worker 0 ValueError: there is no data any more", found["failed"]
    )
    assert found["pushes"] == 3


@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    [said] = said_by([Script(tmp_path / "log", ROOT / "examples" / "ray_servers.py", **RAY)], DEADLINE_S)
    words = said.splitlines()[-1].split()
    assert float(words[3]) < 0.5 * float(words[1]), said
    assert int(words[5]) >= 600


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CompositionError, match=r"need Ray: pip install 'gradwire\[ray\]'"):
        run(Job(START, ASGD(0.1), even, workers=1, pushes=1))


def test_more_servers_than_parameters_are_refused_before_ray_begins() -> None:
    with pytest.raises(CompositionError, match="9 servers for 8 parameters"):
        run(Job(START, ASGD(0.1), even, workers=1, pushes=1), servers=9)
    with pytest.raises(CompositionError, match="-1 restarts of a worker"):
        run(Job(START, ASGD(0.1), even, workers=1, pushes=1), worker_restarts=-1)


# Without Ray's processes ----------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    made = FakeRay()
    monkeypatch.setattr(running, "imported_ray", lambda: made)
    monkeypatch.setattr(actors, "_was_restarted", lambda: False)
    yield made
    made.close()


def job_of(**settings: Any) -> Job:
    return Job(
        START, ASGD(0.05), even, workers=settings.pop("workers", 2), pushes=settings.pop("pushes", 20), **settings
    )


def test_a_job_over_three_servers_is_run_to_its_last_push(fake: FakeRay) -> None:
    outcome = run(job_of(), servers=3, server_options={"num_cpus": 2}, deadline_s=60)
    assert min(map(len, outcome.histories)) >= 20
    assert outcome.parameters.keys() == START.keys()
    assert (outcome.lost, outcome.restarts) == ((), (0, 0, 0))
    spread = {"scheduling_strategy": "SPREAD"}
    assert fake.options == [{**spread, "max_restarts": 0, "num_cpus": 2}, spread]


def test_a_worker_that_died_is_left_and_started_anew(fake: FakeRay) -> None:
    with running.RunningActors(job_of(pace=Bounded(1), pushes=40), servers=2, worker_restarts=1) as made:
        made.wait_for(4, 60)
        fake.kill(made.workers.children[1].handle)
        made.wait_for(20, 60)
        fake.kill(made.workers.children[1].handle)
        outcome = made.wait(60)
    assert outcome.lost == (1, 1)
    for history in outcome.histories:
        assert len({(row.worker, row.number) for row in history}) == len(history) >= 40


def test_a_server_without_snapshots_is_missed(fake: FakeRay) -> None:
    with running.RunningActors(job_of(pushes=10**6), servers=2) as made:
        made.wait_for(4, 60)
        fake.kill(made.servers.handles[1])
        with pytest.raises(CommunicationError, match=r"server 1 died at push \d+ of 1000000: give the job a folder"):
            made.wait(60)


def test_a_server_that_cannot_begin_is_told(fake: FakeRay, tmp_path: Path) -> None:
    run(job_of(folder=tmp_path), deadline_s=60)
    with pytest.raises(
        CommunicationError, match=r"server 0 died at push 0 of 20 and is not started again: StateError: "
    ):
        run(job_of(folder=tmp_path, workers=1), deadline_s=60)


def test_a_snapshot_that_cannot_be_written_ends_the_run(
    fake: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running.RunningActors(job_of(folder=tmp_path, pushes=10**6, snapshot_every=1)) as made:
        made.wait_for(4, 60)

        def full(*_: Any) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(snapshots, "save", full)
        with pytest.raises(CommunicationError, match="server 0 fails: OSError: no space left"):
            made.wait(60)


def test_deadlines_say_what_was_waited_for(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommunicationError, match=r"push \d+ of 1000000 was the last after 0.5 s"):
        run(job_of(pushes=10**6), deadline_s=0.5)
    monkeypatch.setattr(ServerWatch, "poll", lambda self, dead, seconds: None)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(CommunicationError, match=r"server 0 was not started within 0.2 s: Ray has 2 processors: give"):
        run(job_of(), deadline_s=0.2)
