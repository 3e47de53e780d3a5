"""How near to the truth `gradwire simulate` is: steps of real training on emulated hosts, beside simulated ones.

On 2, 4 and 8 hosts a perceptron trains plainly, with a host that is three times slower, with computing times that vary,
in windows, and with hosts that fail. What a rank computes is a sleep, drawn as the simulation draws it but with another
seed, and a pass over a small model: so hosts compute at the same time although the machine has fewer cores than hosts.
The simulation is told nothing of the runs but three measurements of their own, each beside the cell's run: the link
between two hosts (what `gradwire topology` measures between pairs), what a step takes on each host without messages,
before and after the run, and the processor's time of coding. Hosts share cores, so what a step takes beside its
sleep grows with them and with what else the machine does, which is why it is measured beside each run. Hosts code when
they meet, all at once, so coding takes as many times longer as there are hosts for a core.

An emulated link keeps its rate only while the machine has time for it. So a bare all-reduce of the gradients is timed
before and after each run, and the last line leaves out the cells in which one of the two is below 90% of the rate.

With failures a host kills itself at times that are drawn, all ranks end, and start anew from the last checkpoint. The
simulation is told these times of failures, and what a checkpoint and a restart took in the mean.

    python benchmarks/simulation.py                          # all cells: about 25 minutes
    python benchmarks/simulation.py --hosts 2 --cells plain slow
    python benchmarks/simulation.py --save                   # and a dated file in benchmarks/results
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import COUNTS, bare_rate, save_result
from gradwire.core.rates import parse_rate
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.network import Network
from gradwire.ranks.supervised import RankFailure, run_function
from gradwire.simulation import SimulatedRun, SimulateOptions, simulate_model
from gradwire.simulation.draws import ComputingTimes, TimeSpread
from gradwire.simulation.failures import run_with_failures
from gradwire.simulation.schedules import InWindows, schedule_of
from gradwire.topology.processors import Processors, cores

WIDTH, LAYERS, WARM_UP, CHECKPOINT_S, MOST_FAILURES = 256, 4, 4, 0.5, 2
ALONE = 12
"""Steps without messages that are timed before a run, and again after it."""


@dataclass(frozen=True)
class Cell:
    """A way to train.

    Attributes:
        name: what the table says.
        method: a spec.
        rate: of each link.
        sleep_s: what a rank computes in a step.
        slower: how many times slower the last host computes.
        spread: of the computing time.
        steps: how many are timed.
        checkpoint_every: steps; 0 for none, and no failures.
        mean_s: of training between failures.
    """

    name: str
    method: str
    rate: str = "100mbit"
    sleep_s: float = 0.1
    slower: float = 1.0
    spread: str = "0"
    steps: int = 40
    checkpoint_every: int = 0
    mean_s: float = 0.0

    @property
    def every(self) -> int:
        """Steps after which ranks meet."""
        schedule = schedule_of(self.method)
        return schedule.every if isinstance(schedule, InWindows) else 1


CELLS = (
    Cell("plain", "none", steps=30),
    Cell("plain 20mbit", "none", rate="20mbit", steps=16),
    Cell("plain int4", "int4", rate="20mbit", steps=30),
    Cell("slow", "none", slower=3.0, steps=20),
    Cell("spread", "none", spread="exponential:0.5", steps=60),
    Cell("windows", "local:H=4", steps=48),
    Cell("windows slow", "local:H=4", slower=3.0, steps=24),
    Cell("windows delay", "local:H=4,delay=2", rate="20mbit", steps=48),
    Cell("failures", "none", steps=90, checkpoint_every=15, mean_s=5.0),
)


# On the ranks -------------------------------------------------------------------------------------------------------


def perceptron() -> nn.Sequential:
    """The model that is trained."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


class Steps:
    """Steps of one rank: a sleep, a pass and the optimizer's step, by a method or by none.

    Args:
        rank, world_size: who.
        cell: what to train.
        method: its method, or "" for steps without messages.
    """

    def __init__(self, rank: int, world_size: int, cell: Cell, method: str) -> None:
        slow = {world_size - 1: cell.slower}
        times = ComputingTimes(cell.sleep_s, TimeSpread.of(cell.spread), slow, seed=1_000_001)
        self._sleeps = (float(step[rank]) for step in times.steps(world_size))
        self.model = perceptron()
        self._called: nn.Module = self.model
        self._optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self._averaging: Any = None
        self._session: gradwire.Session | None = None
        self.close: Callable[[], object] = lambda: None
        if method.startswith("local"):
            self._optimizer = self._averaging = gradwire.wrap(self._optimizer, self.model, method)
            self.close = self._optimizer.close
        elif method:
            self._called = DistributedDataParallel(self.model)
            self._session = gradwire.attach(self._called, method, deadline_s=120)
            self.close = self._session.close

    @property
    def coded_s(self) -> float:
        """Seconds of coding so far, with summing up what came."""
        communicates = self._session or self._averaging
        return communicates.stats().encode_s if communicates else 0.0

    def step(self) -> None:
        """Train a step."""
        time.sleep(next(self._sleeps))
        self._optimizer.zero_grad()
        self._called(torch.ones(2, WIDTH)).square().mean().backward()
        self._optimizer.step()

    def by_itself(self, steps: int) -> float:
        """The mean of so many steps of this rank, while the others make theirs."""
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began_s) / steps

    def timed(self, steps: int) -> float:
        """The mean of so many steps, from a moment at which all ranks begin."""
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        dist.barrier()
        return (time.perf_counter() - began_s) / steps


def measure(rank: int, world_size: int, cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a row of each cell; write the profile of the links beside it into the file that the cell is given for."""
    return {"rows": [train(rank, world_size, Cell(**cell), Path(file)) for file, cell in cells.items()]}


def train(rank: int, world_size: int, cell: Cell, profile: Path) -> dict[str, float]:
    """The mean step in seconds, what ranks code when they meet, the mean step without messages, and bare rates."""
    group, numel = dist.group.WORLD, sum(p.numel() for p in perceptron().parameters())
    assert group is not None
    LinkProfiler(GroupTransport(group), torch.device("cpu"), profile).axis_links()
    bare_before = bare_rate(numel, world_size)
    steps, alone = Steps(rank, world_size, cell, cell.method), Steps(rank, world_size, cell, "")
    steps.timed(2 * WARM_UP)
    alone_s = alone.by_itself(ALONE)
    before_s = steps.coded_s
    step_s, coded_s = steps.timed(cell.steps), steps.coded_s - before_s
    alone_s = (alone_s + alone.by_itself(ALONE)) / 2
    steps.close()
    found = {"step_s": step_s, "coding_s": coded_s / (cell.steps / cell.every), "alone_s": alone_s}
    return found | {"bare_before": bare_before, "bare_after": bare_rate(numel, world_size)}


def train_until_failure(
    rank: int, world_size: int, cell: dict[str, Any], folder: str, fails_after_s: float | None
) -> None:
    """Go on from the last checkpoint until all steps are made, or until rank 0 kills itself.

    Each start writes a line of JSON: when it began to train, when its checkpoints were written, when it ended.
    """
    what, log, kept = Cell(**cell), Path(folder) / "log.jsonl", Path(folder) / "model.pt"
    steps, done = Steps(rank, world_size, what, what.method), 0
    if kept.exists():
        saved = torch.load(kept)
        steps.model.load_state_dict(saved["model"])
        done = saved["done"]
    dist.barrier()
    began_s, spent_s, made = time.time(), [], 0
    dies_at_s = began_s + fails_after_s if fails_after_s is not None else float("inf")

    def note(**facts: Any) -> None:
        if rank == 0:
            with log.open("a") as file:
                file.write(json.dumps({"began_s": began_s, "checkpoints_s": spent_s, "steps": made, **facts}) + "\n")

    def wait_for(at_s: float) -> None:
        if rank == 0 and dies_at_s <= at_s:
            time.sleep(max(0.0, dies_at_s - time.time()))
            note(failed_s=time.time())
            os._exit(1)

    while done < what.steps:
        wait_for(time.time() + what.sleep_s)
        steps.step()
        done, made = done + 1, made + 1
        if done % what.checkpoint_every == 0 and done < what.steps:
            dist.barrier()
            started_s = time.time()
            wait_for(started_s + CHECKPOINT_S)
            time.sleep(CHECKPOINT_S)  # a model this small is written at once
            if rank == 0:
                torch.save({"model": steps.model.state_dict(), "done": done}, kept.with_suffix(".new"))
                kept.with_suffix(".new").replace(kept)
            dist.barrier()
            spent_s.append(time.time() - started_s)
    dist.barrier()
    note(ended_s=time.time())
    steps.close()  # a lane that still waits for its group keeps the process from ending


# Here ---------------------------------------------------------------------------------------------------------------


def simulated(cell: Cell, hosts: int, profile: Path, of_ranks: Sequence[dict[str, float]]) -> SimulatedRun:
    """What the simulation says of a cell, told the link, the steps without messages, and coding."""
    *most, last = (each["alone_s"] for each in of_ranks)
    alone = statistics.fmean([*most, last] if cell.slower == 1 else most)
    spread = TimeSpread.of(cell.spread)
    coding_s = Processors(cores() / hosts, 1).crowding * max(each["coding_s"] for each in of_ranks)
    options = SimulateOptions(
        step=f"{1e3 * alone:.6f}ms",
        coding=f"{1e3 * coding_s:.6f}ms",
        ranks=hosts,
        rate=str(profile),
        slow=() if cell.slower == 1 else (f"{hosts - 1}:{last / alone:.9f}x",),
        spread=f"{spread.distribution}:{spread.share * cell.sleep_s / alone:.6f}",
        steps=400,
    )
    return simulate_model(cell.method, list(perceptron().named_parameters()), options)


def steps_row(cell: Cell, hosts: int, profile: Path, of_ranks: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A cell without failures."""
    found = simulated(cell, hosts, profile, of_ranks)
    measured = statistics.fmean(each["step_s"] for each in of_ranks)
    told = {"ranks": list(of_ranks), "load": os.getloadavg()[0]}
    return {"measured_s": measured, "simulated_s": found.step_s, "shares": found.shares._asdict(), **told}


def failures_row(
    cell: Cell, hosts: int, network: Network, profile: Path, of_ranks: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """A run that fails until it has made all of its steps, and the same failures in simulated time."""
    draws = random.Random(hosts)
    with tempfile.TemporaryDirectory() as folder:
        for number in itertools.count():
            after_s = draws.expovariate(1 / cell.mean_s) if number < MOST_FAILURES else None
            arguments = {"cell": asdict(cell), "folder": folder, "fails_after_s": after_s}
            try:
                run_function(f"{__file__}:train_until_failure", hosts, arguments, 300, network)
                break
            except RankFailure as failure:
                if failure.rank != 0 or after_s is None or failure.status is None:
                    raise  # it was not the failure that was drawn; without a status the deadline has passed
        starts = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    measured = starts[-1]["ended_s"] - starts[0]["began_s"]
    restarts = [after["began_s"] - before["failed_s"] for before, after in itertools.pairwise(starts)]
    restart = statistics.fmean(restarts) if restarts else 0.0
    spent = [seconds for start in starts for seconds in start["checkpoints_s"]]
    checkpoint = statistics.fmean(spent) if spent else CHECKPOINT_S
    step = simulated(cell, hosts, profile, of_ranks).step_s
    after = [start["failed_s"] - start["began_s"] for start in starts if "failed_s" in start]
    gaps = iter([seconds + restart * (place > 0) for place, seconds in enumerate(after)])
    run = run_with_failures(cell.steps * step, cell.checkpoint_every * step, checkpoint, restart, gaps)
    return {
        "measured_s": measured,
        "simulated_s": run.total_s,
        "failures": len(restarts),
        "simulated_failures": run.failures,
        "restart_s": restart,
        "checkpoint_s": checkpoint,
        "step_s": step,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells, print a row of each, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="only these")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print(f"{'cell':16} {'hosts':>5} {'measured':>10} {'simulated':>10} {'ratio':>6}   link's rate before, after")
    cells = [cell for cell in CELLS if options.cells is None or cell.name in options.cells]
    counts: list[int] = options.hosts
    for rate, hosts in itertools.product(dict.fromkeys(cell.rate for cell in cells), counts):
        of_rate = [cell for cell in cells if cell.rate == rate]
        with Network(hosts, rate) as network, tempfile.TemporaryDirectory() as folder:
            profiles = [Path(folder) / f"links_{place}.json" for place, _ in enumerate(of_rate)]
            given = {str(file): asdict(cell) for file, cell in zip(profiles, of_rate, strict=True)}
            ranks = run_function(f"{__file__}:measure", hosts, {"cells": given}, 900, network)
            for place, (cell, profile) in enumerate(zip(of_rate, profiles, strict=True)):
                of_ranks = [each["rows"][place] for each in ranks]
                if cell.checkpoint_every:
                    found = failures_row(cell, hosts, network, profile, of_ranks)
                else:
                    found = steps_row(cell, hosts, profile, of_ranks)
                row: dict[str, Any] = {"cell": asdict(cell), "hosts": hosts, **found}
                row["ratio"] = row["simulated_s"] / row["measured_s"]
                bare = [min(each[when] for each in of_ranks) for when in ("bare_before", "bare_after")]
                row["bare"] = [rate_bits_per_s / parse_rate(rate) for rate_bits_per_s in bare]
                rows.append(row)
                measured, said = (f"{row[name]:8.3f} s" for name in ("measured_s", "simulated_s"))
                kept = " ".join(f"{share:4.2f}" for share in row["bare"])
                print(f"{cell.name:16} {hosts:5} {measured} {said} {row['ratio']:6.3f}   {kept}", flush=True)
        if options.save:  # what is there is kept if the rest does not come
            command = " ".join(["python benchmarks/simulation.py", *sys.argv[1:]])
            save_result("simulation", {"command": command, "cores": os.cpu_count(), "rows": rows})
    counted = [row for row in rows if min(row["bare"]) >= COUNTS]
    for words, some in (("all cells", rows), (f"where links kept {COUNTS:.0%} of their rate", counted)):
        far = [f"{row['cell']['name']} on {row['hosts']}" for row in some if abs(row["ratio"] - 1) > 0.1]
        print(f"{words}: {len(some) - len(far)} of {len(some)} within 10%; not: {', '.join(far) or 'none'}")


if __name__ == "__main__":
    main()
