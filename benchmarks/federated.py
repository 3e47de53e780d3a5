"""Memory and time of federations in one process: `python benchmarks/federated.py [--rounds 100] [--save]`.

A linear model of 64 inputs and 10 outputs, ten local steps of 32 examples, FedAvg: federations of 1,000 clients and
more with 10 clients a round, and samples of 5 to 80 clients among 1,000. For each: milliseconds a round (processor
time, the first decile of all rounds), the greatest memory of Python objects within ten rounds by `tracemalloc`, which
does not see what PyTorch allocates, and the bytes of all tensors that are alive at a round's end, when every update is
there. Both against the sample have a straight line fitted by least squares. With --save also docs/federated.svg.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from common import save_result
from gradwire.core.key import Key
from gradwire.federated import SGD, Client, Federation, Round, Server, Simulation
from pages import DOCS, markdown, write
from plots import Line, Panel, figure

SAMPLES, SIZES = (5, 10, 20, 40, 80), (1_000, 10_000, 100_000, 1_000_000)
CLIENTS, SAMPLE = 1_000, 10


def client(i: int) -> Client:
    generator = torch.Generator().manual_seed(i)
    points = torch.randn(32, 64, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)

    def loss(model: nn.Module, key: Key) -> Tensor:
        return functional.cross_entropy(model(points), labels)

    return Client(32, loss)


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive."""
    return sum(found.nbytes for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter))


class Watched(Server):
    """A server that looks at memory where a round holds most, where it is told to."""

    watching, held = False, 0

    def end(self) -> Round:
        """Note the bytes of all tensors, then end the round."""
        if self.watching:
            self.held = tensor_bytes()
        return super().end()


def measured(clients: int, sample: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    server = Watched(nn.Linear(64, 10), clients, sample=sample, local=SGD(lr=0.1, steps=10))
    simulation = Simulation(server, Federation(clients, client))
    simulation.round()
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        simulation.round()
        seconds.append(time.process_time() - start)
    tracemalloc.start()
    for _ in simulation.run(10):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    server.watching = True
    simulation.round()
    return {
        "clients": clients,
        "sample": sample,
        "ms a round": round(1e3 * statistics.quantiles(seconds, n=10)[0], 2),
        "python kB": round(peak / 1e3, 1),
        "tensors kB": round(server.held / 1e3, 1),
    }


class Fit(NamedTuple):
    """y = intercept + slope x, and the share of y's variance that it explains."""

    slope: float
    intercept: float
    r_squared: float


def fitted(rows: Sequence[dict[str, Any]], what: str) -> Fit:
    """A straight line through a column against the sample."""
    x, y = [row["sample"] for row in rows], [row[what] for row in rows]
    slope, intercept = statistics.linear_regression(x, y)
    return Fit(slope, intercept, statistics.correlation(x, y) ** 2)


def plot(by_sample: Sequence[dict[str, Any]], by_size: Sequence[dict[str, Any]]) -> str:
    """Time against the sample, and memory against both."""
    time_fit, size_fit = fitted(by_sample, "ms a round"), fitted(by_sample, "tensors kB")
    ends = (0, SAMPLES[-1])

    def line(fit: Fit, name: str) -> Line:
        return Line(name, [(x, fit.intercept + fit.slope * x) for x in ends])

    def dots(rows: Sequence[dict[str, Any]], x: str, y: str, name: str, joined: bool = False) -> Line:
        return Line(name, [(row[x], row[y]) for row in rows], dots=True, joined=joined)

    measured_ms = dots(by_sample, "sample", "ms a round", "milliseconds")
    tensors, objects = (
        dots(by_sample, "sample", "tensors kB", "tensors"),
        dots(by_sample, "sample", "python kB", "Python"),
    )
    sizes = [
        dots(by_size, "clients", "tensors kB", "tensors", True),
        dots(by_size, "clients", "python kB", "Python", True),
    ]
    return figure(
        "Time and memory of a federation in one process",
        [
            Panel("processor time of a round, ms", "clients a round", [measured_ms, line(time_fit, "straight line")]),
            Panel("memory, kB", "clients a round", [tensors, objects, line(size_fit, "straight line")]),
            Panel("memory with 10 clients a round, kB", "clients of the federation", sizes, log_x=True),
        ],
    )


def table(rows: Sequence[dict[str, Any]], fits: dict[str, Any], name: str) -> str:
    """What docs/federated.md has."""
    head = ["clients", "a round", "ms a round", "kB of tensors", "kB of Python objects"]
    columns = ("clients", "sample", "ms a round", "tensors kB", "python kB")
    lines = [
        f"- {what} = {fit['intercept']:.2f} + {fit['slope']:.3f} times the sample, R² = {fit['r_squared']:.4f}"
        for what, fit in fits.items()
    ]
    cells = [[f"{row[column]:,}" for column in columns] for row in rows]
    return "\n".join([markdown(head, cells), "", *lines, "", f"Figures: `benchmarks/results/{name}`."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results, and the plot")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for clients, sample in [*((CLIENTS, sample) for sample in SAMPLES), *((clients, SAMPLE) for clients in SIZES)]:
        if (clients, sample) not in rows:
            rows[clients, sample] = measured(clients, sample, arguments.rounds)
            print("  ".join(f"{name} {value:>9,}" for name, value in rows[clients, sample].items()), flush=True)
    by_sample, by_size = [rows[CLIENTS, one] for one in SAMPLES], [rows[one, SAMPLE] for one in SIZES]
    fits = {what: fitted(by_sample, what)._asdict() for what in ("ms a round", "tensors kB", "python kB")}
    for what, fit in fits.items():
        print(f"{what} against the sample: " + ", ".join(f"{name} {value:.4g}" for name, value in fit.items()))
    if arguments.save:
        path = save_result("federated", {"rounds": arguments.rounds, "rows": list(rows.values()), "fits": fits})
        write("federated.md", "federated.py", table(list(rows.values()), fits, path.name))
        (DOCS / "federated.svg").write_text(plot(by_sample, by_size))


if __name__ == "__main__":
    main()
