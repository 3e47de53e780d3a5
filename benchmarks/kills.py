"""Real processes that are killed, stopped and continued: workers and servers of a job over two servers.

Each run has three workers with a bound of 2, two servers with snapshots, and ten faults at random times: SIGKILL of a
worker or a server, and SIGSTOP for longer than `silent_s`, with SIGCONT after it. Whoever is killed is started anew,
and so is a server that is silent. Looked at: each push counts once at each server in each of its lives (the journals),
the histories have no gaps, the final parameters are those of the histories, and the run ends.

A push makes its worker's element of the first and of the last tensor grow by 1, one of which lies at either server.

    python benchmarks/kills.py --runs 10 --save
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import save_result
from gradwire.asynchronous import ASGD, Bounded, Grant, Result, Work
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.processes import RunningServers
from gradwire.asynchronous.several import JournalRow, ServersOutcome

WORKERS, SERVERS, BOUND = 3, 2, 2
SILENT_S, DEADLINE_S = 1.0, 180.0
FAULTS = ("kill worker",) * 3 + ("stop worker",) * 3 + ("kill server",) * 2 + ("stop server",) * 2
"""Of a run; each server may be started anew five times."""
START = {
    "first": torch.zeros(WORKERS, dtype=torch.float64),
    "x": torch.full((8,), 3.0, dtype=torch.float64),
    "last": torch.zeros(WORKERS, dtype=torch.float64),
}


class Broken(AssertionError):  # noqa: N818 - what is broken is a promise
    """A promise that a run broke."""


def require(holds: bool, what: str) -> None:
    """Raise `Broken` unless it holds."""
    if not holds:
        raise Broken(what)


def counted(worker: int, parameters: Mapping[str, Tensor], grant: Grant) -> Result:
    """0.5 |x|^2; and at a rate of 1/16 its worker's elements grow by 1."""
    time.sleep(0.01)
    count = torch.zeros(WORKERS, dtype=torch.float64)
    count[worker] = -16.0
    return Result({"first": count, "x": parameters["x"], "last": count}, float(parameters["x"].square().sum()) / 2)


def counting(worker: int) -> Work:
    """A worker's work."""
    return partial(counted, worker)


# A run ----------------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What goes wrong in a run, and when.

    Attributes:
        draw: where random numbers come from.
        left: faults to come.
        due_s: when the next one is due.
        stopped: processes that are stopped, and when they are continued.
    """

    draw: random.Random
    left: list[str]
    due_s: float = 0.0
    stopped: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    @classmethod
    def of(cls, seed: int, faults: Sequence[str]) -> Plan:
        """Draw the order."""
        draw = random.Random(seed)
        return cls(draw, draw.sample(list(faults), len(faults)))

    @property
    def is_over(self) -> bool:
        """Whether everything has gone wrong, and everyone who was stopped goes on."""
        return not self.left and not self.stopped

    def act(self, running: RunningServers) -> None:
        """Do what is due."""
        now_s = time.monotonic()
        for stop in [stop for stop in self.stopped if stop[0] <= now_s]:
            self.stopped.remove(stop)
            _signal(stop[1], signal.SIGCONT)
        if self.left and now_s >= self.due_s:
            self.due_s = now_s + self.draw.uniform(0.2, 3.0)
            self._fault(running, self.left.pop(0), now_s)

    def _fault(self, running: RunningServers, fault: str, now_s: float) -> None:
        what, whose = fault.split()
        pid = self.draw.choice((running.workers if whose == "worker" else running.servers).children).pid
        _signal(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "stop":
            self.stopped.append((now_s + SILENT_S * self.draw.uniform(1.2, 2.5), pid))


def _signal(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, what)


def run(seed: int, folder: Path, faults: Sequence[str] = FAULTS) -> dict[str, Any]:
    """Run a job under the faults that a seed draws; return what came of it.

    Raises:
        Broken: a promise was.
        CommunicationError: the run does not end.
    """
    job = Job(
        START,
        ASGD(1 / 16),
        counting,
        workers=WORKERS,
        pushes=10**9,
        pace=Bounded(BOUND),
        folder=folder,
        snapshot_every=16,
        silent_s=SILENT_S,
    )
    plan, began_s = Plan.of(seed, faults), time.monotonic()
    with RunningServers(job, servers=SERVERS, worker_restarts=1000) as running:
        running.wait_for(10, DEADLINE_S)
        while not plan.is_over:
            plan.act(running)
            running.look()
        running.wait_for(running.version + 60, DEADLINE_S)
        require_everybody(running)
        outcome = running.watch.outcome(running.workers.lost)
    require_counted_once(outcome)
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began_s, 1),
        "pushes": [len(rows) for rows in outcome.journals],
        "pushes in the parameters": [len(rows) for rows in outcome.histories],
        "server restarts": list(outcome.restarts),
        "worker restarts": len(outcome.lost),
    }


def require_everybody(running: RunningServers) -> None:
    """All workers go on: each makes pushes, or the others could not have made so many."""
    require(not running.workers.dead, f"workers {running.workers.dead} are dead")


# What must hold -------------------------------------------------------------------------------------------------------


def require_counted_once(outcome: ServersOutcome) -> None:
    """Each push counts once at each server in each of its lives, and the parameters are those of the histories."""
    for journal, history in zip(outcome.journals, outcome.histories, strict=True):
        named = Counter((row.life, row.worker, row.number) for row in journal)
        require(max(named.values()) == 1, "a push counted twice in a life")
        require_no_gaps(history)
    for name, history in zip(("first", "last"), outcome.histories, strict=True):
        counts = Counter(row.worker for row in history)
        wanted = [float(counts[worker]) for worker in range(WORKERS)]
        require(outcome.parameters[name].tolist() == wanted, f"{name} is {outcome.parameters[name]}, and not {wanted}")


def require_no_gaps(history: Sequence[JournalRow]) -> None:
    """Each row is the next update, and its worker's next push."""
    counts: Counter[int] = Counter()
    for version, row in enumerate(history):
        require((row.version, row.number) == (version, counts[row.worker]), f"{row} is not the next one")
        counts[row.worker] += 1


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for seed in range(options.first, options.first + options.runs):
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(run(seed, Path(folder)))
                print(rows[-1], flush=True)
            except Exception as error:
                broken.append(f"run {seed}: {type(error).__name__}: {error}")
                print(f"BROKEN {broken[-1]}", flush=True)
    faults = Counter({name: FAULTS.count(name) * options.runs for name in dict.fromkeys(FAULTS)})
    print(f"{options.runs} runs with {faults.total()} faults, {len(broken)} broken")
    if options.save:
        command = " ".join(["python benchmarks/kills.py", *sys.argv[1:]])
        figures = {"command": command, "faults": dict(faults), "broken": broken, "runs": rows}
        print(save_result("kills", figures))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
