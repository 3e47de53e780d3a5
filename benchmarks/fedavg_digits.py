"""FedAvg on digits: `python benchmarks/fedavg_digits.py [--seeds 2] [--keep FILE] [--save]`.

Tables 1 and 2 of McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data", with
scikit-learn's digits in the place of MNIST: 100 clients of 14 images of 8x8 pixels (there 600 of 28x28), dealt out
evenly (IID) or as two shards of images that are sorted by label (non-IID); a perceptron with two hidden layers of 200
units, their 2NN of table 1 (table 2 has a convolutional net). Written down are rounds until 95 % of 359 held-out images
are right (there 97 % of 10,000). As there, accuracy is the best so far, joined by straight lines, and the local
learning rate is the best of a grid; here the grid is tried with the first seed, and the best rate taken for the others.
E are epochs, B is the size of batches, u the updates of a client in a round; FedSGD is E = 1 with all images in one
batch.
"""

from __future__ import annotations

import argparse
import functools
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
from gradwire.core.errors import FederationError
from gradwire.core.key import Key
from gradwire.federated import SGD, Client, Federation, Server, Simulation
from gradwire.federated.partition import DataPartition, Even, LabelShards
from gradwire.federated.sampling import generator
from gradwire.tasks.builtin import load_digits
from pages import markdown, shown, write

CLIENTS, IMAGES, TARGET = 100, 14, 95.0
RATES = (0.03, 0.1, 0.3, 1.0)
MOST = 1500
PARTITIONS: dict[str, DataPartition] = {"IID": Even(), "non-IID": LabelShards(2)}
SAMPLES = (1, 10, 20, 50, 100)
WORK = ((1, 14), (5, 14), (1, 5), (20, 14), (5, 5), (20, 5))
"""E and B, by the number of updates; 14 is all images of most clients."""

PAPER_SAMPLES = {"IID": (316, 87, 77, 75, 70), "non-IID": (3275, 664, 619, 443, 380)}
"""Table 1, the 2NN with E = 1 and B = 10; rounds to 97 %."""

PAPER_WORK = {
    "IID": (626, 179, 34, 234, 20, 18),
    "non-IID": (483, 1000, 350, 672, 229, 173),
}
"""Table 2, the convolutional net with C = 0.1, for the E of `WORK` and B = 10 where that has 5; rounds to 99 %."""


class Setting(NamedTuple):
    """What is trained."""

    partition: str
    sample: int
    epochs: int
    batch: int

    @property
    def updates(self) -> int:
        """u."""
        return self.epochs * math.ceil(IMAGES / self.batch)


def client(parts: Sequence[Tensor], setting: Setting, i: int) -> Client:
    """Client i, its images in a new order in each epoch."""
    data, own = load_digits(), parts[i]
    images, labels = data.train_images[own].flatten(1), data.train_labels[own]
    size = setting.batch if setting.batch < IMAGES else len(own)
    per_epoch = math.ceil(len(own) / size)

    def loss(model: nn.Module, key: Key) -> Tensor:
        if per_epoch == 1:
            return functional.cross_entropy(model(images), labels)
        epoch, at = divmod(key.micro_batch or 0, per_epoch)
        order = generator(key.with_(micro_batch=None, stage=f"{epoch}")).permutation(len(own))
        part = torch.from_numpy(order[at * size : (at + 1) * size])
        return functional.cross_entropy(model(images[part]), labels[part])

    return Client(len(own), loss, steps=setting.epochs * per_epoch)


def perceptron(seed: int) -> nn.Module:
    """The 2NN, for 64 pixels."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Percent of held-out images that are right."""
    data = load_digits()
    return 100 * float((model(data.test_images.flatten(1)).argmax(1) == data.test_labels).float().mean())


def accuracies(setting: Setting, rate: float, seed: int, rounds: int) -> Iterator[float]:
    """After each round, as long as training does not diverge."""
    key = Key(seed, name="federated.partition")
    parts = PARTITIONS[setting.partition].split(load_digits().train_labels, CLIENTS, key)
    server = Server(perceptron(seed), CLIENTS, sample=setting.sample, local=SGD(rate), seed=seed)
    simulation = Simulation(server, Federation(CLIENTS, functools.partial(client, parts, setting)))
    try:
        for _ in simulation.run(rounds):
            yield accuracy(server.model)
    except FederationError:
        return


def rounds_to_target(setting: Setting, rate: float, seed: int, most: int = MOST) -> float:
    """Rounds, between two of them by a straight line; infinite where the target was not reached."""
    best = 0.0
    for number, value in enumerate(accuracies(setting, rate, seed, most), 1):
        if value >= TARGET:
            return number - 1 + (TARGET - best) / (value - best) if number > 1 else 1.0
        best = max(best, value)
    return math.inf


def best_rate(setting: Setting) -> tuple[float, float]:
    """Rounds and rate of the first seed. A rate need not be tried for longer than the best so far took."""
    found = (math.inf, RATES[-1])
    for rate in (0.3, 0.1, 1.0, 0.03):
        most = MOST if found[0] == math.inf else math.ceil(found[0])
        found = min(found, (rounds_to_target(setting, rate, 0, most), rate))
    return found


def measured(seeds: int, setting: Setting) -> dict[str, Any]:
    """A row: the mean of seeds; None where one of them did not come to the target."""
    torch.set_num_threads(1)
    first, rate = best_rate(setting)
    runs = [first, *(rounds_to_target(setting, rate, seed) for seed in range(1, seeds))]
    shown = [None if run == math.inf else round(run, 1) for run in runs]
    mean = None if None in shown else round(statistics.mean(runs), 1)
    return {**setting._asdict(), "u": setting.updates, "rate": rate, "rounds": mean, "seeds": shown}


def setting_of(row: dict[str, Any]) -> Setting:
    """What a row is of."""
    return Setting(*(row[part] for part in Setting._fields))


def kept(path: Path | None) -> dict[Setting, dict[str, Any]]:
    """Rows that a file has."""
    rows = map(json.loads, path.read_text().splitlines() if path and path.exists() else [])
    return {setting_of(row): row for row in rows}


def settings() -> list[Setting]:
    """Of both tables, each once: C with E = 1, and E and B with ten clients a round."""
    rows = [Setting(name, 10, epochs, batch) for name in PARTITIONS for epochs, batch in WORK]
    rows += [Setting(name, sample, 1, 5) for name in PARTITIONS for sample in SAMPLES]
    return list(dict.fromkeys(rows))


def tables(rows: Sequence[dict[str, Any]], name: str) -> str:
    """What docs/federated.md has: both tables, each figure beside the paper's."""
    known = {setting_of(row): row["rounds"] for row in rows}
    work = list[list[str]]()
    for at, (epochs, batch) in enumerate(WORK):
        ours = [known[Setting(partition, 10, epochs, batch)] for partition in PARTITIONS]
        first = [known[Setting(partition, 10, *WORK[0])] for partition in PARTITIONS]
        cells = [f"{'FedSGD' if at == 0 else 'FedAvg'}, E = {epochs}, B = {'all' if batch == IMAGES else batch}"]
        for partition, rounds, base in zip(PARTITIONS, ours, first, strict=True):
            theirs = PAPER_WORK[partition]
            cells += [timed(rounds, base), timed(theirs[at], theirs[0])]
        work.append(cells)
    head = ["", *(f"{partition}{whose}" for partition in PARTITIONS for whose in ("", ", paper"))]
    return f"{markdown(head, work)}\n\n{sample_table(known)}\n\nFigures: `benchmarks/results/{name}`."


def sample_table(known: dict[Setting, float | None]) -> str:
    """Rounds against clients a round."""
    rows = list[list[str]]()
    for at, sample in enumerate(SAMPLES):
        cells = [f"{sample} a round"]
        for partition, theirs in PAPER_SAMPLES.items():
            cells += [shown(known[Setting(partition, sample, 1, 5)]), shown(theirs[at])]
        rows.append(cells)
    return markdown(["E = 1, B = 5", *(f"{name}{whose}" for name in PARTITIONS for whose in ("", ", paper"))], rows)


def timed(rounds: float | None, base: float | None) -> str:
    """Rounds, and how many times fewer than FedSGD's they are."""
    return shown(rounds) + (f" ({base / rounds:.1f}x)" if rounds and base else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of the rows that are known")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    began, found = time.monotonic(), kept(options.keep)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        missing = [setting for setting in settings() if setting not in found]
        for row in pool.imap_unordered(functools.partial(measured, options.seeds), missing):
            found[setting_of(row)] = row
            print(f"{time.monotonic() - began:6.0f} s  {row}", flush=True)
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    rows = [found[setting] for setting in settings()]
    if options.save:
        figures = {"target": TARGET, "rates": RATES, "rounds at most": MOST, "rows": rows}
        write("federated.md", "fedavg_digits.py", tables(rows, save_result("fedavg_digits", figures).name))


if __name__ == "__main__":
    main()
