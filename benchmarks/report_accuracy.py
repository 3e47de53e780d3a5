"""How near to the truth `session.report()` is: fp32 steps that were measured, beside those that it estimates.

Four hosts on an emulated network train a perceptron in turns, some steps with DDP alone and some with `int4`. The truth
is the mean of DDP's steps, without the first of each turn. Each cell is a network of another rate, delay and loss, with
links that differ or with a slow host. `ratio` is the estimate by the truth. Where it is not within a tenth of 1 the
report must say that it cannot tell, and the truth should lie in the range that it gives.

    python benchmarks/report_accuracy.py                     # all twelve cells: about ten minutes
    python benchmarks/report_accuracy.py --cells "20mbit 50ms"
    python benchmarks/report_accuracy.py --save              # and a dated file in benchmarks/results
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import save_result
from gradwire.network import Network
from gradwire.network.slow import SlowProcessor
from gradwire.ranks.supervised import run_function

HOSTS, LAYERS, BATCH = 4, 4, 4
WORST = 0.1


@dataclass(frozen=True)
class Cell:
    """A network, and a perceptron whose step its links dominate.

    Attributes:
        name: what the table says.
        width: of each of four layers.
        rates: of all links, or of each.
        delay: of a round trip.
        loss: share of frames.
        slower: how many times slower the last host computes.
        rounds: turns of both.
    """

    name: str
    width: int
    rates: str | tuple[str, ...]
    delay: str = "0"
    loss: str = "0"
    slower: float = 1.0
    rounds: int = 4


UNEQUAL = ("100mbit", "20mbit", "100mbit", "20mbit")
CELLS = (
    Cell("100mbit", 512, "100mbit"),
    Cell("20mbit 20ms", 256, "20mbit", "20ms"),
    Cell("20mbit 50ms", 256, "20mbit", "50ms"),
    Cell("5mbit 50ms", 160, "5mbit", "50ms"),
    Cell("100mbit 10ms 0.1%", 384, "100mbit", "10ms", "0.1%", rounds=8),
    Cell("20mbit 0.5%", 256, "20mbit", loss="0.5%", rounds=8),
    Cell("100/20/100/20mbit", 256, UNEQUAL),
    Cell("100mbit slow 4x", 512, "100mbit", slower=4.0),
    Cell("20mbit 20ms slow 4x", 256, "20mbit", "20ms", slower=4.0),
    Cell("1gbit", 1024, "1gbit"),
    Cell("200mbit 5ms", 768, "200mbit", "5ms"),
    Cell("100/20/100/20mbit 20ms slow 4x", 256, UNEQUAL, "20ms", slower=4.0),
)


# On the ranks -------------------------------------------------------------------------------------------------------


class Training:
    """One of two models that a rank trains in turn."""

    def __init__(self, width: int, slower: float) -> None:
        torch.manual_seed(0)
        self.width = width
        self.ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.processor = SlowProcessor(slower)
        self.processor.watch(self.ddp)

    def turn(self, steps: int) -> list[float]:
        """Make steps; return the seconds of each."""
        dist.barrier()
        self.processor.begin()
        ends = [time.perf_counter()]
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.ddp(torch.randn(BATCH, self.width)).square().mean()
            self.processor.pay()
            loss.backward()
            self.optimizer.step()
            self.processor.pay()
            ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends)]


def on_rank(rank: int, world_size: int, width: int, slower: float, rounds: int, method: str) -> dict[str, Any]:
    """Steps of DDP alone in seconds, and the report on the method, on one rank."""
    slower = slower if rank == world_size - 1 else 1.0
    plain, mine = Training(width, slower), Training(width, slower)
    began = time.perf_counter()
    with gradwire.attach(mine.ddp, method, deadline_s=120) as handle:
        attached_s = time.perf_counter() - began
        mine.processor.watch_coding(handle.session.engine)
        for training in (plain, mine):  # buckets are rebuilt, kernels loaded
            training.turn(6)
        steps: list[float] = []
        for _ in range(rounds):
            steps += plain.turn(4)[1:]
            mine.turn(6)
        report = handle.report()
    return {"steps_s": steps, "attached_s": attached_s, "text": str(report), "report": report.as_dict()}


# Here ---------------------------------------------------------------------------------------------------------------


def measured(cell: Cell, method: str) -> dict[str, Any]:
    """What came out of a cell; of the ranks' reports the one that is furthest from the truth."""
    rates = cell.rates if isinstance(cell.rates, str) else list(cell.rates)
    arguments = {"width": cell.width, "slower": cell.slower, "rounds": cell.rounds, "method": method}
    with Network(HOSTS, rates, delay=cell.delay, loss=cell.loss) as network:
        ranks = run_function(f"{__file__}:on_rank", HOSTS, arguments, 300, network)
    steps = [statistics.fmean(each) for each in zip(*(rank["steps_s"] for rank in ranks), strict=True)]
    true_ms = 1e3 * statistics.fmean(steps)
    worst = max(ranks, key=lambda rank: abs(rank["report"]["dense_step_ms"] - true_ms))
    report = worst["report"]
    low, high = report["dense_low_ms"], report["dense_high_ms"]
    return {
        "cell": asdict(cell),
        "true_ms": true_ms,
        "true_error_ms": 1e3 * statistics.stdev(steps) / len(steps) ** 0.5,
        "steps": len(steps),
        "estimated_ms": report["dense_step_ms"],
        "low_ms": low,
        "high_ms": high,
        "ratio": report["dense_step_ms"] / true_ms,
        "tells": "cannot tell" not in report["verdict"],
        "in_range": low <= true_ms and (high is None or true_ms <= high),
        "attach_s": max(rank["attached_s"] for rank in ranks),
        "verdict": report["verdict"],
        "report": report,
        "text": worst["text"],
    }


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    high = "more" if found["high_ms"] is None else f"{found['high_ms']:,.0f}"
    figures = (
        f"{found['true_ms']:7,.0f} ± {found['true_error_ms']:3.0f} {found['estimated_ms']:7,.0f} {found['ratio']:6.2f}"
    )
    about = f"{found['low_ms']:,.0f} to {high}"
    return f"{found['cell']['name']:31} {figures}  {about:15} {found['attach_s']:5.1f} s  {found['verdict']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells, print a row of each, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="only these")
    parser.add_argument("--method", default="int4")
    parser.add_argument("--text", action="store_true", help="print whole reports too")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args(arguments)
    print(f"{'cell':31} {'fp32 step, ms':>13} {'report':>7} {'ratio':>6}  {'range':15} {'attach':>7}  verdict")
    rows: list[dict[str, Any]] = []
    for cell in CELLS:
        if options.cells is None or cell.name in options.cells:
            rows.append(measured(cell, options.method))
            print(line(rows[-1]), flush=True)
            if options.text:
                print(rows[-1]["text"], flush=True)
    told = [row for row in rows if row["tells"]]
    wrong = [row["cell"]["name"] for row in told if abs(row["ratio"] - 1) > WORST]
    print(f"{len(told)} of {len(rows)} told; more than {WORST:.0%} from the truth: {', '.join(wrong) or 'none'}")
    if options.save:
        print(save_result("report_accuracy", {"hosts": HOSTS, "method": options.method, "cells": rows}))


if __name__ == "__main__":
    main()
