"""Runs that hang or die: whether the rank at fault is named, with its stack, within the deadline.

Each trial is a real run of two or three processes that train with `gradwire.attach`. At a step that a seed draws, one
rank does one of four things. Looked at: the error on every other rank names that rank and where it is, in time; and so
does `gradwire.flight.stacks_of`, which `gradwire stacks DIR` prints, from the records.

    sleeps         the rank sleeps inside of C code
    killed         SIGKILL: it has no stack any more, and the records say that it was killed
    collectives    it enters the collectives of two sessions in another order than the others
    loader         its data loader never returns

`--cost` measures what an event of the flight recorder costs beside a step.

    python benchmarks/hangs.py --trials 100 --save
    python benchmarks/hangs.py --cost
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.flight import Diagnosis, recorder, stacks_of
from gradwire.ranks.supervised import RankFailure, run_function

KINDS = ("sleeps", "killed", "collectives", "loader")
DEADLINE_S = 2.0
NOTICE_S = 4.0
"""What errors may take beyond the deadline: ranks look for an alarm twice a second and wait 2.5 s for answers."""
PATIENCE_S = 60.0
STEPS = 8
FIRST = 2
"""The first step in which something may go wrong: DDP communicates by itself at the beginning of step 1."""
STACKS = {"sleeps": "oversleeps", "killed": "", "collectives": "in_another_order", "loader": "never_returns"}
"""The function that the stack of the rank at fault must show."""
DIAGNOSES = {"sleeps": "behind", "killed": "killed", "collectives": "different collectives", "loader": "behind"}


@dataclass(frozen=True)
class Trial:
    """One run: what goes wrong, on which of how many ranks, and in which step."""

    kind: str
    seed: int
    world_size: int
    victim: int
    step: int

    @classmethod
    def of(cls, kind: str, seed: int) -> Trial:
        """Draw it."""
        draw = random.Random(f"{kind} {seed}")
        world_size = draw.choice((2, 3))
        return cls(kind, seed, world_size, draw.randrange(world_size), draw.randrange(FIRST, STEPS))


# What ranks do -------------------------------------------------------------------------------------------------------


def oversleeps() -> None:
    """Sleep inside of C code."""
    time.sleep(PATIENCE_S)


def never_returns() -> Iterator[torch.Tensor]:
    """Look for a row that does not come."""
    while True:
        if time.monotonic() < 0:
            yield torch.zeros(4, 40)
        time.sleep(0.001)  # several trials share the processors


def batches(rank: int, trial: Trial, folder: str) -> Iterator[torch.Tensor]:
    """Rows of each step; of the rank at fault there may be no more of them. When that step begins is written down."""
    for step in range(STEPS):
        if step == trial.step:
            Path(folder, f"began{rank}").write_text(str(time.time()))
        if rank == trial.victim and step == trial.step and trial.kind == "loader":
            yield from never_returns()
        yield torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * step + rank))


class Training:
    """A model under `attach`, and a session for something else."""

    def __init__(self, records: Path) -> None:
        torch.manual_seed(0)
        # Kernels are loaded by now, which takes ranks unlike times where the machine is busy.
        gradwire.Session(nn.Linear(40, 30), "int4", deadline_s=PATIENCE_S).close()
        self.ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8)))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.1)
        session = gradwire.attach(self.ddp, "int4", deadline_s=PATIENCE_S, records=records)
        self.other = gradwire.Session({"x": torch.zeros(100)}, "none", deadline_s=PATIENCE_S)
        # Sessions have the time that they take where the machine is busy; the deadline holds once all ranks have them.
        dist.barrier()
        for each in (session, self.other):
            shorten(each, DEADLINE_S)

    def train(self, rows: torch.Tensor) -> None:
        """Make the step of the model."""
        self.optimizer.zero_grad()
        self.ddp(rows).square().mean().backward()
        self.optimizer.step()

    def step(self, rows: torch.Tensor) -> None:
        """Make both steps."""
        self.train(rows)
        self.other.reduce_({"x": torch.ones(100)})

    def in_another_order(self, rows: torch.Tensor) -> None:
        """Make both steps the other way round."""
        self.other.reduce_({"x": torch.ones(100)})
        self.train(rows)


def shorten(session: gradwire.Session, deadline_s: float) -> None:
    """Have a rank that is silent for so long be an error from now on."""
    lane = session.lane
    lane.deadline_s = lane.failures.deadline_s = deadline_s
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=deadline_s), lane.group)  # pyright: ignore[reportPrivateUsage]


def hang(rank: int, world_size: int, trial: dict[str, Any], folder: str) -> None:
    """Train until it goes wrong, and write down the error and when it came."""
    plan = Trial(**trial)
    training, is_victim = Training(Path(folder, "records")), rank == plan.victim
    if is_victim and plan.kind != "collectives":
        others = [Path(folder, f"error{other}.json") for other in range(world_size) if other != rank]
        threading.Thread(target=_end_after, args=(others,), daemon=True).start()
    try:
        for step, rows in enumerate(batches(rank, plan, folder)):
            if is_victim and step == plan.step:
                if plan.kind == "sleeps":
                    oversleeps()
                if plan.kind == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                training.in_another_order(rows)
            else:
                training.step(rows)
    except gradwire.CommunicationError as error:
        notes = list(getattr(error, "__notes__", []))
        told = {"text": str(error), "ranks": list(error.ranks), "notes": notes, "at_s": time.time()}
        path = Path(folder, f"error{rank}.json")
        path.with_suffix(".part").write_text(json.dumps(told))
        path.with_suffix(".part").replace(path)
        time.sleep(0.5)  # rank 0 holds the store, in which others still read


def _end_after(others: list[Path]) -> None:
    """End this process, which is stuck, once the other ranks have told what they found."""
    while not all(path.exists() for path in others):
        time.sleep(0.05)
    os._exit(3)


# Trials --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        late_s: the longest time from the trouble to an error of another rank, beyond the deadline.
        wrong: what was not as it must be, a sentence each.
        has_begun: whether the ranks came to the step of the trouble; a run in which they did not says nothing.
    """

    late_s: float
    wrong: list[str]
    has_begun: bool = True


def run(trial: Trial) -> Outcome:
    """Make a run, and look at the errors of all ranks and at their records."""
    with tempfile.TemporaryDirectory(prefix="gradwire-") as name:
        folder = Path(name)
        try:
            run_function(f"{__file__}:hang", trial.world_size, {"trial": asdict(trial), "folder": name}, PATIENCE_S)
        except RankFailure as failure:
            if not (folder / f"began{trial.victim}").exists():
                return Outcome(0.0, [f"the ranks did not come to the step: {failure}"], has_begun=False)
            if failure.rank != trial.victim:
                return Outcome(0.0, [f"another rank failed: {failure}"])
        others = [rank for rank in range(trial.world_size) if rank != trial.victim]
        missing = [rank for rank in others if not (folder / f"error{rank}.json").exists()]
        if missing:
            return Outcome(0.0, [f"ranks {missing} raised no CommunicationError"])
        errors = {rank: json.loads((folder / f"error{rank}.json").read_text()) for rank in others}
        # The trouble begins once all are in that step: a rank whose processor is busy may come to it later.
        began_s = max(float(path.read_text()) for path in folder.glob("began*"))
        late_s = max(error["at_s"] for error in errors.values()) - began_s - DEADLINE_S
        wrong = [said for rank, error in errors.items() for said in _wrong_error(trial, rank, error)]
        wrong += _wrong_records(trial, stacks_of(folder / "records"))
    if late_s > NOTICE_S:
        wrong.append(f"the errors came {late_s:.1f} s after the deadline")
    return Outcome(late_s, wrong)


def run_at_once(trials: Sequence[Trial], most: int = 12, end_s: float = math.inf) -> dict[Trial, Outcome]:
    """Make runs side by side, so many at once, since a run mostly waits; begin none after `end_s`."""

    def in_time(trial: Trial) -> Outcome | None:
        return run(trial) if time.monotonic() < end_s else None

    with ThreadPoolExecutor(most) as pool:
        outcomes = pool.map(in_time, trials)
        return {trial: outcome for trial, outcome in zip(trials, outcomes, strict=True) if outcome is not None}


def _wrong_error(trial: Trial, rank: int, error: dict[str, Any]) -> Iterator[str]:
    # The store that ranks meet at ends with rank 0, which holds it here: then nobody can ask who has ended.
    store_gone = trial.kind == "killed" and trial.victim == 0 and "the process that holds it (rank 0," in error["text"]
    if error["ranks"] != [trial.victim] and not store_gone:
        yield f"rank {rank} blames {error['ranks']}: {error['text']}"
    if STACKS[trial.kind] not in " ".join(error["notes"]):
        yield f"rank {rank} has no stack of the rank at fault: {error['text']}"


def _wrong_records(trial: Trial, found: Diagnosis) -> Iterator[str]:
    both = trial.kind == "collectives" and trial.world_size == 2  # neither is more at fault than the other
    if found.kind != DIAGNOSES[trial.kind] or found.ranks != ((0, 1) if both else (trial.victim,)):
        yield f"the records say {found.kind} of ranks {found.ranks}: {found.sentence}"
    if STACKS[trial.kind] not in found.lines[trial.victim].stack:
        yield f"the records have no stack of the rank at fault: {found.lines[trial.victim]}"


# What an event costs -------------------------------------------------------------------------------------------------


def cost(rank: int, world_size: int) -> dict[str, float]:
    """Microseconds an event, events a step, and milliseconds a step of a small model on two ranks."""
    session = gradwire.Session({"x": torch.zeros(250_000)}, "int4", deadline_s=60.0)
    gradients, times_s = torch.randn(250_000), list[float]()
    for _ in range(30):
        began_s = time.perf_counter()
        session.reduce_({"x": gradients.clone()})
        times_s.append(time.perf_counter() - began_s)
    first = recorder().events()[-1].number
    session.reduce_({"x": gradients.clone()})
    events = recorder().events()[-1].number - first
    session.close()
    log, count = recorder().lane("cost", "cost", [0]), 30_000
    began_s = time.perf_counter()
    for _ in range(count):
        number = log.issue("AllReduce", 400)
        log.wait(number, "AllReduce", 400)
        log.take(number, "AllReduce", 400)
    event_us = 1e6 * (time.perf_counter() - began_s) / (3 * count)
    step_ms = 1e3 * sorted(times_s)[len(times_s) // 2]
    return {
        "microseconds an event": round(event_us, 3),
        "events a step": events,
        "milliseconds a step": round(step_ms, 2),
        "share of a step": round(event_us * events / (1e3 * step_ms), 5),
    }


def main() -> int:
    """Entry point."""
    from common import save_result  # in the processes of a trial, this folder is on no path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after so long")
    parser.add_argument("--at-once", type=int, default=4, help="trials side by side")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--cost", action="store_true", help="measure what an event costs, and make no trials")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    os.environ["GRADWIRE_TIME_LINK"] = "0"
    costs = run_function(f"{__file__}:cost", 2, {}, PATIENCE_S)[0]
    print(costs, flush=True)
    if options.cost:
        return 0
    wrong: list[str] = []
    late: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    not_begun: Counter[str] = Counter()
    seeds = range(options.first, options.first + options.trials)
    trials = [Trial.of(kind, seed) for seed in seeds for kind in options.kinds]
    outcomes = run_at_once(trials, options.at_once, time.monotonic() + options.seconds)
    for trial, outcome in outcomes.items():
        if not outcome.has_begun:
            not_begun[trial.kind] += 1
            continue
        late[trial.kind].append(outcome.late_s)
        wrong += [f"{trial.kind} {trial.seed}: {said}" for said in outcome.wrong]
    print("".join(f"WRONG {said}\n" for said in wrong), end="")
    named = Counter({kind: len(times) for kind, times in late.items()})
    for kind, seed in {tuple(said.split(":")[0].split()) for said in wrong}:
        named[kind] -= 1
        print(f"not named: {kind} {seed}")
    longest = {kind: round(max(times), 2) for kind, times in late.items() if times}
    made = {kind: len(times) for kind, times in late.items()}
    print(f"trials: {made}; not begun: {dict(not_begun)}; named: {dict(named)}")
    print(f"longest after the deadline, in s: {longest}")
    if options.save:
        figures = {
            "command": " ".join(["python benchmarks/hangs.py", *sys.argv[1:]]),
            "deadline_s": DEADLINE_S,
            "trials at once": options.at_once,
            "trials": made,
            "not begun, since the machine was busy": dict(not_begun),
            "named": dict(named),
            "longest after the deadline, in s": longest,
            "wrong": wrong,
            "cost": costs,
        }
        print(save_result("hangs", figures))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
