"""Training on Ray, in processes of its own: a worker and a server are killed, and at each server a push counts once."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from async_cases import START
from async_processes import even
from gradwire import CompositionError
from gradwire.asynchronous import ASGD
from gradwire.asynchronous.ray_actors import Job, run
from gradwire.asynchronous.several import Row
from scripts import ROOT, Script, said_by

DEADLINE_S = 560.0
"""For machines that are busy with other things: on two free cores each of the two takes well below a minute."""
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def rows(plain: list[list[Any]]) -> list[Row]:
    return [Row(*fields) for fields in plain]


@pytest.mark.timeout(600)
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
