"""Are steps predicted as they are measured, and does `auto` choose well? `python benchmarks/choosing.py [--save]`.

On emulated hosts of each number and rate, in one run and in turn: DDP that sends nothing, each method, and `auto` of
each class that loses something. Printed for each cell are

- the measured step of each method by the predicted one (`gradwire.choosing.Demand.beside`, of what a step computes, of
  coding that is measured on all ranks, of the link as the session times it, and of what messages and computing take
  from each other). What a step computes is told by the steps under `none`, as `auto` finds it out; so the prediction of
  `none` itself is printed and does not count;
- what `auto` took, its step by that of the best candidate of its class, and by that of `none`; and the step of what it
  took, trained by itself, by that of the best. The last one tells how good the choice is, and the first one has in it
  how much two timings of a method differ.

A cell counts where a bare all-reduce reaches 90% of the link's rate; the others are listed. Hosts without a core each
share the cores that there are, which the prediction knows (`gradwire.topology.processors`). Timed steps take about
`--cell-s` seconds a cell, of one round at least, and `--cells 2:20mbit 4:100mbit` names the cells. `--task gpt2:task
--apart` trains 124 M parameters; give it MALLOC_MMAP_MAX_=0 MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=34359738368, or
what steps take depends on whether the system has to find new memory for each. With `--changing` the rate falls to the
second one and rises again while `auto` trains, and printed is how many steps later it has chosen again, and whether all
ranks have the same parameters.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import COUNTS, bare_rate, save_result
from gradwire import kernels
from gradwire.choosing import ACCURACIES, Demand, allowed, coding_s, demand
from gradwire.choosing.automatic import StepPace
from gradwire.core.link import Link
from gradwire.core.rates import parse_rate
from gradwire.drivers.contention import Contention, contention, message
from gradwire.drivers.window import START_UP
from gradwire.network import Network
from gradwire.overlap import Stopwatch
from gradwire.ranks.supervised import run_function
from gradwire.session.automatic import CHOOSES_AFTER, EARLY_AFTER, pace_of
from gradwire.tasks.builtin import make_task
from gradwire.topology.processors import Processors, has_core, own_cores

CANDIDATES = [candidate.spec for candidate in allowed("bold")]
OTHERS = ["bf16", "fp8", "int8", "int3", "topk:0.01", "topk:0.05+int4", "sign", "terngrad", "powersgd:2", "qsgd:4"]
AUTO = ["auto:safe", "auto:bold"]
FLOOR = "torch.noop"
HELD = "none"
"""Whose steps tell what a step computes."""
COUNTED = ("worked_s", "encode_s", "wait_s")
"""Of a step that is longer than predicted they tell whether computing, coding or messages are."""
STEPS_OF_PACE = 4
NEAR = 1.10
"""What a step under `auto` may take at most, by that of the best candidate."""
ASKED = {"a core each": 0.1, "shared cores": 0.2}
"""The median error that predictions may have."""


class Training:
    """Steps of a task under a method, on a model of its own.

    Attributes:
        steps_s: of all its steps, on this rank.
    """

    def __init__(self, task: str, method: str) -> None:
        self.steps_s = list[float]()
        self.task = make_task(task, 0)
        self.ddp = DistributedDataParallel(self.task.model)
        self.session: Any = None
        if method == FLOOR:
            self.ddp.register_comm_hook(None, noop_hook)
        else:
            self.session = gradwire.attach(self.ddp, method)
        self.optimizer = self.task.optimizer(self.ddp.parameters())
        self._batch = self.task.batch(0, dist.get_rank(), dist.get_world_size())

    def step(self) -> None:
        """Train a step, always on the same batch: what data costs is the same under all methods."""
        inputs, targets = self._batch
        began_s = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        self.task.loss(self.ddp(inputs), targets).backward()
        self.optimizer.step()
        self.steps_s.append(time.perf_counter() - began_s)

    def counted(self) -> dict[str, float]:
        """What the session has counted of a step on this rank, the median of each part."""
        samples = list(self.session.window.samples) if self.session is not None else []
        return {part: statistics.median(getattr(of, part) for of in samples) for part in COUNTED if samples}

    def close(self) -> None:
        """Communicate no more."""
        if self.session is not None:
            self.session.close()


@dataclass
class Timed:
    """What is measured of a cell.

    Attributes:
        steps_s: the step under each method.
        parts: what the session of each method has counted of a step.
        chosen: what each `auto` has taken.
        rounds: of the method that had the fewest.
    """

    watch: Stopwatch
    steps_s: dict[str, float] = field(default_factory=dict[str, float])
    parts: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    chosen: dict[str, str] = field(default_factory=dict[str, str])
    rounds: int = 10**6

    def take_turns(self, trainings: dict[str, Training], rounds: int, stretch: int, cell_s: float) -> None:
        """Time the steps of some trainings, in turn, for about so many seconds."""
        for name, training in trainings.items():
            before = EARLY_AFTER + CHOOSES_AFTER + 1 if name in AUTO else STEPS_OF_PACE * (name == HELD)
            for _ in range(before + START_UP):  # the first steps of a method also find its memory
                training.step()
        jobs = {name: each.step for name, each in trainings.items()}
        once = self.watch.interleaved(jobs, 1, 1)
        affordable = max(1, int(cell_s / sum((stretch + 1) * once.median_s(name) for name in jobs)))
        found = self.watch.interleaved(jobs, min(rounds, affordable), stretch)
        self.rounds = min(self.rounds, rounds, affordable)
        self.steps_s |= {name: found.median_s(name) for name in trainings}
        self.parts |= {name: counted for name, each in trainings.items() if (counted := each.counted())}
        self.chosen |= {name: trainings[name].session.automatic.choices[-1].spec for name in AUTO if name in trainings}


def on_rank(
    rank: int, world_size: int, task: str, methods: list[str], rounds: int, stretch: int, cell_s: float, apart: bool
) -> dict[str, Any]:
    """Measure and predict one cell."""
    torch.set_num_threads(1)
    kernels.warm_up()
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    timed, names = Timed(Stopwatch(group, torch.device("cpu"))), list(dict.fromkeys([HELD, FLOOR, *methods, *AUTO]))
    places, threads = [()] * world_size, [torch.get_num_threads()] * world_size
    dist.all_gather_object(places, own_cores())
    machines = [""] * world_size  # all hosts are emulated on one
    processors = Processors.fewest(machines, places, threads)
    pace, link = StepPace(0.0, 0.0, ()), Link(0.0, 0.0)
    beside = Contention(link, link)
    numel = sum(p.numel() for p in make_task(task, 0).model.parameters())
    bare = bare_rate(numel, world_size)  # neighbours of the machine can spoil a moment, so it is asked for again below
    for turn in [[name] for name in names] if apart else [names]:
        trainings = {name: Training(task, name) for name in turn}
        none = trainings[HELD].session if HELD in trainings else None
        if none is not None:
            link = message(none.timed_link().link, world_size)
            computes = has_core(rank, machines, places, threads)
            measured = functools.partial(contention, none.transport, link, computes)
            beside = none.lane.call(measured, " in a cell").among(processors)
        timed.take_turns(trainings, rounds, stretch, cell_s / (len(names) if apart else 1))
        if none is not None:
            pace = _slowest_pace(trainings[HELD])
        for each in trainings.values():
            each.close()
        none = None
        trainings.clear()
        gc.collect()  # a model of DDP lies in a cycle, and large ones are no more than one at a time
    model, demands = make_task(task, 0).model, dict[str, Demand]()
    for name in dict.fromkeys([HELD, *methods]):
        dist.barrier()
        coded = torch.tensor(coding_s(name, model, world_size), dtype=torch.float64)
        dist.all_reduce(coded, dist.ReduceOp.MAX)
        coded_s = processors.crowding * float(coded)
        demands[name] = demand(name, model, world_size, link, coding_s=coded_s, beside=beside)
    return {
        "steps_s": timed.steps_s,
        "parts": timed.parts,
        "chosen": timed.chosen,
        "bare_bits_per_s": max(bare, bare_rate(numel, world_size)),
        "link": [[each.alpha_s, each.beta_s_per_byte] for each in (link, *beside)],
        "pace": pace._replace(crowding=processors.crowding)._asdict(),
        "demands": {name: each._asdict() for name, each in demands.items()},
        "rounds": timed.rounds,
    }


def _slowest_pace(held: Training) -> StepPace:
    """What `auto` learns under `none`, by steps that are timed here: between two of them others may have trained."""
    samples = held.session.window.samples
    took_s = held.steps_s[-len(samples) :]
    mine = pace_of([of._replace(step_s=s) for of, s in zip(samples, took_s, strict=True)], (), sent_early=True)
    told = torch.tensor([mine.compute_s, mine.backward, mine.exposed_s, mine.worked_s])
    others = [torch.empty_like(told) for _ in range(dist.get_world_size())]
    dist.all_gather(others, told)
    return StepPace.slowest([StepPace(each[0], each[1], (), each[2], each[3]) for each in map(Tensor.tolist, others)])


def _parts(forecast: Any) -> dict[str, float]:
    named = ("compute_s", "coding_s", "serving_s", "sending_s", "hidden_s")
    return {name: getattr(forecast, name) for name in named} | {"step_s": forecast.step_s}


def _in_ms(parts: dict[str, float]) -> str:
    return ", ".join(f"{part.removesuffix('_s')} {1e3 * seconds:.0f}" for part, seconds in parts.items())


def changing(rank: int, world_size: int, task: str, method: str, every: int) -> dict[str, Any]:
    """Train while the rate changes: after `every` steps, and back after as many again."""
    torch.set_num_threads(1)
    kernels.warm_up()
    training = Training(task, method)
    times = list[float]()
    for step in range(3 * every):
        if step and step % every == 0:
            dist.barrier()
            if rank == 0:
                print("CHANGE", step // every, flush=True)
            time.sleep(1.0)
            dist.barrier()
        began = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - began)
    flat = torch.cat([parameter.detach().flatten() for parameter in training.ddp.parameters()])
    others = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(others, flat)
    choices = [(each.step, each.spec, each.why) for each in training.session.automatic.choices]
    training.close()
    return {
        "choices": choices,
        "alike": all(torch.equal(flat, other) for other in others),
        "median_step_s": [statistics.median(times[i * every + every // 2 : (i + 1) * every]) for i in range(3)],
    }


def cell(told: argparse.Namespace, hosts: int, rate: str) -> dict[str, Any]:
    """Measure a cell."""
    options = {"task": told.task, "methods": told.methods, "rounds": told.rounds, "stretch": told.stretch}
    options |= {"cell_s": told.cell_s, "apart": told.apart}
    with Network(hosts, rate) as network:
        found = run_function(f"{__file__}:on_rank", hosts, options, told.deadline, network=network)[0]
    found["counts"] = found["bare_bits_per_s"] >= COUNTS * parse_rate(rate)
    return found


def told_of(found: dict[str, Any], hosts: int, rate: str) -> dict[str, Any]:
    """Predict the steps of a cell by what was measured of it, and print both."""
    pace = StepPace(**found["pace"])
    demands = {name: Demand(**each) for name, each in found["demands"].items()}
    alone = pace.alone(demands[HELD])
    found["predicted"] = {name: _parts(each.beside(*alone)) for name, each in demands.items()}
    found["cores"] = "shared cores" if pace.crowding > 1 else "a core each"
    measured, predicted = found["steps_s"], found["predicted"]
    note = "" if found["counts"] else f", does not count: bare {found['bare_bits_per_s'] / 1e6:.0f} Mbit/s"
    print(f"{hosts} hosts, {rate}, {found['cores']}, computing {1e3 * measured[FLOOR]:.0f} ms{note}")
    found["errors"] = {name: predicted[name]["step_s"] / measured[name] - 1 for name in predicted if name != HELD}
    for name in predicted:
        ratio = measured[name] / predicted[name]["step_s"]
        said, counted = _in_ms(predicted[name]), found.get("parts", {}).get(name)  # older files have no parts
        of_it = f" (counted in it: {_in_ms(counted)})" if counted else ""
        print(f"  {name:24} {1e3 * measured[name]:8.1f} ms{of_it}, {ratio:.2f} of the predicted {said}")
    for name in AUTO:
        candidates = [each.spec for each in allowed(name.partition(":")[2]) if each.spec in measured]
        best = min(candidates, key=lambda spec: measured[spec])
        by_best, by_none = measured[name] / measured[best], measured[name] / measured["none"]
        took = found["chosen"][name]
        itself = measured.get(took, measured[name]) / measured[best]  # --methods may leave out what it took
        found[name] = {"took": took, "best": best, "by_best": by_best, "by_none": by_none, "itself_by_best": itself}
        said = f"{by_best:.2f} of {best}, {by_none:.2f} of none; {took} by itself {itself:.2f} of {best}"
        print(f"  {name:24} took {took}: {said}")
    sizes = [abs(error) for error in found["errors"].values()]
    print(f"  predictions are off by {statistics.median(sizes):.1%} in the median", flush=True)
    return found


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What all cells that count say together, those of hosts that share cores apart."""
    counted = [each for each in cells.values() if each["counts"]]
    left_out = [name for name, each in cells.items() if not each["counts"]]
    found: dict[str, Any] = {"cells": len(cells), "counted": len(counted), "left_out": left_out}
    print(f"{len(counted)} of {len(cells)} cells count; not counted: {', '.join(left_out) or 'none'}")
    for kind, asked in ASKED.items():
        errors = [abs(error) for each in counted if each["cores"] == kind for error in each["errors"].values()]
        if errors:
            found[kind] = {"median_error": statistics.median(errors), "worst_error": max(errors), "asked": asked}
            said = f"{found[kind]['median_error']:.1%} in the median (asked: {asked:.0%}) and {max(errors):.0%} at most"
            print(f"{kind}: {len(errors)} predictions are off by {said}")
    for name in AUTO if counted else ():
        near, itself = (sum(each[name][by] <= NEAR for each in counted) for by in ("by_best", "itself_by_best"))
        worst = max(each[name]["by_none"] for each in counted)
        found[name] = {"near_the_best": near, "itself_near_the_best": itself, "worst_by_none": worst}
        said = f"{near} of {len(counted)}, by what it took {itself}, at most {worst:.2f} of none"
        print(f"{name}: within {NEAR - 1:.0%} of its best candidate in {said}")
    return found


def run_changing(told: argparse.Namespace) -> dict[str, Any]:
    """Have the rate change under way, and print what `auto` does."""
    high, low = told.changing
    rates = {"CHANGE 1": low, "CHANGE 2": high}
    with Network(told.hosts[0], high) as network:

        def on_line(rank: int, line: str) -> None:
            if (rate := rates.get(line.strip())) is not None:
                network.change_rate(rate)

        options = {"task": told.task, "method": told.auto, "every": told.every}
        found = run_function(
            f"{__file__}:changing", told.hosts[0], options, told.deadline, network=network, on_line=on_line
        )
    print(f"{told.auto} at {high}, {low} from step {told.every} on, {high} from step {2 * told.every} on:")
    for step, spec, why in found[0]["choices"]:
        print(f"  from step {step:4} on {spec}: {why}")
    print(f"  parameters are {'alike' if all(each['alike'] for each in found) else 'NOT ALIKE'} on all ranks")
    return found[0]


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    shape: Callable[..., Any] = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--task", default="bytes")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit", "500mbit", "2gbit"])
    parser.add_argument("--methods", nargs="+", default=[*CANDIDATES, *OTHERS])
    parser.add_argument("--cells", nargs="+", default=[], metavar="HOSTS:RATE", help="in place of --hosts and --rates")
    parser.add_argument("--cell-s", type=float, default=300.0, help="seconds of timed steps in a cell, about")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict anew what a file has, and add cells to it")
    parser.add_argument("--apart", action="store_true", help="one method after the other, for large models")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stretch", type=int, default=3)
    parser.add_argument("--changing", nargs=2, metavar="RATE", help="of these two rates: 500mbit 20mbit")
    parser.add_argument("--auto", default="auto:bold", choices=[f"auto:{name}" for name in ACCURACIES])
    parser.add_argument("--every", type=int, default=120, help="steps between two changes of the rate")
    parser.add_argument("--deadline", type=float, default=900.0)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    told = parser.parse_args()
    memory = {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")}
    setting = {"task": told.task, "environment": memory}
    if told.changing:
        result = {"changing": run_changing(told), "rates": told.changing, "hosts": told.hosts[0], "every": told.every}
        name = "choosing_changing"
    else:
        named = [tuple(each.split(":", 1)) for each in told.cells]
        wanted = named or [(str(hosts), rate) for hosts in told.hosts for rate in told.rates]
        kept = json.loads(told.again.read_text(encoding="utf-8"))["cells"] if told.again else {}
        of_kept = [tuple(name.split(" hosts ", 1)) for name in kept]
        cells = dict[str, Any]()
        for hosts, rate in [*of_kept, *(named if kept else wanted)]:
            name = f"{hosts} hosts {rate}"
            cells[name] = told_of(kept.get(name) or cell(told, int(hosts), rate), int(hosts), rate)
            if told.save:  # what a run that is cut short has measured is kept
                save_result("choosing", setting | {"cells": cells})
        result = {"cells": cells, "summary": summary(cells)}
        name = "choosing"
    if told.save:
        print("wrote", save_result(name, setting | result))


if __name__ == "__main__":
    main()
