"""FedProx with stragglers on synthetic data: `python benchmarks/fedprox.py [--seeds 2] [--rounds 200] [--save]`.

Section 5.2 of Li et al. 2020, "Federated optimization in heterogeneous networks": Synthetic(1, 1), 30 devices whose
numbers of examples are log-normal, ten a round, 20 epochs of SGD at a rate of 0.01 in batches of 10, and 0, 50 or 90 %
of a round's devices that come to 1 to 19 epochs. FedAvg drops those; FedProx takes what they did. Devices, stragglers
and batches are the same for all methods.

Written down is the loss over all training data and the accuracy on the tenth of each device's data that is held out,
every five rounds; with --save also the plot docs/fedprox.svg. With --keep FILE each run that has ended is kept there,
and one that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from common import save_result
from gradwire.core.key import Key
from gradwire.federated import SGD, Client, Federation, FedProx, InProcess, Server, Simulation, Terms
from gradwire.federated.engines import ClientJob, Lost, Outcome
from gradwire.federated.sampling import generator
from pages import DOCS, markdown, shown, write
from plots import Line, Panel, figure
from synthetic import CLASSES, DEVICES, FEATURES, Device, synthetic

SAMPLE, EPOCHS, BATCH, RATE = 10, 20, 10, 0.01
MUS = (0.0, 0.001, 0.01, 0.1, 1.0)
SLOW = (0.0, 0.5, 0.9)
EVERY = 5


# Training -------------------------------------------------------------------------------------------------------


def client(devices: Sequence[Device], i: int) -> Client:
    """Device i: batches of ten in a new order in each epoch of each round."""
    x, y = devices[i].x, devices[i].y
    per_epoch = math.ceil(len(y) / BATCH)
    mixed: dict[int, tuple[Tensor, Tensor]] = {}

    def loss(model: nn.Module, key: Key) -> Tensor:
        epoch, at = divmod(key.micro_batch or 0, per_epoch)
        if epoch not in mixed:
            order = torch.from_numpy(generator(key.with_(micro_batch=None, stage=f"{epoch}")).permutation(len(y)))
            mixed.clear()
            mixed[epoch] = x[order], y[order]
        inputs, labels = mixed[epoch]
        part = slice(at * BATCH, (at + 1) * BATCH)
        return functional.cross_entropy(model(inputs[part]), labels[part])

    return Client(len(y), loss, steps=EPOCHS * per_epoch)


class Stragglers(InProcess):
    """An exact share of a round's devices comes to 1 to 19 of the 20 epochs, or is dropped."""

    def __init__(self, model: nn.Module, federation: Federation, slow: float, dropped: bool) -> None:
        super().__init__(model, federation)
        self.slow, self.dropped = slow, dropped

    def run(self, terms: Terms, jobs: Sequence[ClientJob]) -> Iterator[Outcome]:
        """Draw the stragglers of the round, then train."""
        draw = generator(Key(terms.seed, jobs[0].task.round, "stragglers"))
        slow = set(draw.permutation(len(jobs))[: round(self.slow * len(jobs))].tolist())
        epochs = draw.integers(1, EPOCHS, len(jobs)).tolist()
        for place, job in enumerate(jobs):
            if place in slow and self.dropped:
                yield Lost(job.task.client, "a straggler")
            else:
                share = epochs[place] / EPOCHS if place in slow else 1.0
                yield from super().run(terms, [job.replace(share=share)])


class Setting(NamedTuple):
    """One run."""

    seed: int
    slow: float
    mu: float
    dropped: bool

    @property
    def name(self) -> str:
        """As tables have it."""
        return "FedAvg" if self.dropped or not (self.slow or self.mu) else f"FedProx, mu = {self.mu:g}"


class Seen(NamedTuple):
    """After so many rounds."""

    round: int
    loss: float
    accuracy: float


@torch.no_grad()
def seen(model: nn.Module, devices: Sequence[Device], number: int) -> Seen:
    """The loss of all training data, and percent of held-out examples that are right."""
    loss = functional.cross_entropy(model(torch.cat([d.x for d in devices])), torch.cat([d.y for d in devices]))
    right = model(torch.cat([d.held_x for d in devices])).argmax(1) == torch.cat([d.held_y for d in devices])
    return Seen(number, float(loss), 100 * float(right.float().mean()))


def trained(setting: Setting, rounds: int) -> list[Seen]:
    """What becomes of the model."""
    torch.set_num_threads(1)
    devices = synthetic(1.0, 1.0, setting.seed)
    torch.manual_seed(setting.seed)
    local = SGD(RATE)
    server = Server(
        nn.Linear(FEATURES, CLASSES), DEVICES, sample=SAMPLE, method=FedProx(setting.mu), local=local, seed=setting.seed
    )
    federation = Federation(DEVICES, functools.partial(client, devices))
    simulation = Simulation(
        server, federation, engine=Stragglers(server.model, federation, setting.slow, setting.dropped)
    )
    numbers = (done.number + 1 for done in simulation.run(rounds))
    return [seen(server.model, devices, number) for number in itertools.chain([0], numbers) if number % EVERY == 0]


def one_run(setting: Setting, rounds: int) -> tuple[Setting, list[Seen]]:
    """With its setting, for a pool that returns runs as they end."""
    return setting, trained(setting, rounds)


def kept(path: Path | None, rounds: int) -> dict[Setting, list[Seen]]:
    """Runs of so many rounds that have ended before."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    runs = {Setting(*setting): [Seen(*one) for one in run] for setting, run in map(json.loads, lines)}
    return {setting: run for setting, run in runs.items() if run[-1].round == rounds}


# Results --------------------------------------------------------------------------------------------------------


def settings(seeds: int) -> list[Setting]:
    """All runs; FedAvg without stragglers is FedProx with mu = 0."""
    rows = list[Setting]()
    for seed in range(seeds):
        for slow in SLOW:
            rows += [Setting(seed, slow, 0.0, True)] if slow else []
            rows += [Setting(seed, slow, mu, False) for mu in MUS]
    return rows


def summary(runs: Sequence[Sequence[Seen]]) -> dict[str, float]:
    """Means over seeds: of the last 50 rounds, since single rounds jump, and of how far the loss jumps in them."""
    lasts = [[one for one in run if one.round > run[-1].round - 50] for run in runs]
    return {
        "loss": statistics.mean(one.loss for last in lasts for one in last),
        "accuracy": statistics.mean(one.accuracy for last in lasts for one in last),
        "jumps": statistics.mean(statistics.stdev([one.loss for one in last]) for last in lasts),
        "worst accuracy": statistics.mean(min(one.accuracy for one in last) for last in lasts),
    }


def grouped(found: dict[Setting, list[Seen]]) -> dict[tuple[float, str], list[list[Seen]]]:
    """Runs by stragglers and method."""
    groups: dict[tuple[float, str], list[list[Seen]]] = {}
    for setting, run in found.items():
        groups.setdefault((setting.slow, setting.name), []).append(run)
    return groups


def plot(found: dict[Setting, list[Seen]]) -> str:
    """Training loss against rounds, a panel for each share of stragglers, the mean of the seeds."""
    panels = list[Panel]()
    for slow in SLOW:
        lines = [
            Line(name, [(at[0].round, statistics.mean(one.loss for one in at)) for at in zip(*runs, strict=True)])
            for (share, name), runs in grouped(found).items()
            if share == slow
        ]
        panels.append(Panel(f"training loss, {slow:.0%} stragglers", "rounds", lines, low=0.0, high=3.0))
    return figure("FedAvg and FedProx on Synthetic(1, 1): training loss against rounds", panels)


def table(rows: Sequence[dict[str, Any]], name: str) -> str:
    """What docs/federated.md has: a row for each method. Without stragglers FedAvg is FedProx with mu = 0."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    head = ["method"] + [f"{what}, {slow:.0%}" for what in ("loss", "jumps", "accuracy", "worst") for slow in SLOW]
    known = {(row["method"], row["slow"]): row for row in rows}

    def cell(method: str, slow: float, what: str) -> str:
        row = known.get((method if slow or method != "FedProx, mu = 0" else "FedAvg", slow), {})
        return shown(row.get(what))

    columns = [(what, slow) for what in ("loss", "jumps", "accuracy", "worst accuracy") for slow in SLOW]
    cells = [[method, *(cell(method, slow, what) for what, slow in columns)] for method in methods]
    return f"{markdown(head, cells)}\n\nFigures: `benchmarks/results/{name}`."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of the runs that have ended")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results, and the plot")
    options = parser.parse_args()
    began, found = time.monotonic(), kept(options.keep, options.rounds)
    missing = [setting for setting in reversed(settings(options.seeds)) if setting not in found]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for setting, run in pool.imap_unordered(functools.partial(one_run, rounds=options.rounds), missing):
            found[setting] = run
            print(f"{time.monotonic() - began:6.0f} s  {setting} {json.dumps(summary([run]))}", flush=True)
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps([setting, run]) + "\n")
    found = {setting: found[setting] for setting in settings(options.seeds)}
    rows = [{"slow": slow, "method": name, **summary(runs)} for (slow, name), runs in grouped(found).items()]
    for row in rows:
        print(
            "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
    if options.save:
        sizes = [[len(device.y) for device in synthetic(1.0, 1.0, seed)] for seed in range(options.seeds)]
        curves = [{**setting._asdict(), "seen": run} for setting, run in found.items()]
        path = save_result("fedprox", {"rounds": options.rounds, "sizes": sizes, "rows": rows, "curves": curves})
        write("federated.md", "fedprox.py", table(rows, path.name))
        (DOCS / "fedprox.svg").write_text(plot(found))


if __name__ == "__main__":
    main()
