"""What a profile explains and costs: `python benchmarks/profiling.py [--methods ...] [--rate 100mbit] [--save]`.

Printed for each method, on emulated hosts:

- the least share of a step, over ranks, that the critical path explains, and the median over rounds of what a profile
  adds to a step, and one that tells how the run goes (`live=True`): stretches without one, with one and with a live one
  take turns, in the same processes and on the same model;
- who is named where one host computes four times slower than the others, and where its link has a tenth of the rate.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import network_arguments, save_result
from gradwire import kernels
from gradwire.core.rates import format_rate, parse_rate
from gradwire.network import Network
from gradwire.network.slow import SlowProcessor
from gradwire.profiling import Profile, read_records
from gradwire.profiling.account import account
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import make_task

DEFAULT = ["torch.fp32", "int4", "powersgd:8,factors=fp16"]
SLOW = 2
"""The host that is slower, where one is."""


class Training:
    """A model, its optimizer, and steps of it."""

    def __init__(self, task: str, method: str, slow: float = 1.0) -> None:
        self.task, self._processor = make_task(task, 0), SlowProcessor(slow)
        self._processor.watch(self.task.model)
        self.ddp = DistributedDataParallel(self.task.model)
        self.session = None if method == "torch.fp32" else gradwire.attach(self.ddp, method)
        self.optimizer = self.task.optimizer(self.ddp.parameters())
        self.index = 0
        if self.session is not None:
            self._processor.watch_coding(self.session.engine)

    def step(self) -> None:
        """Train a step."""
        self._processor.begin()
        inputs, targets = self.task.batch(self.index, dist.get_rank(), dist.get_world_size())
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.ddp(inputs), targets)
        self._processor.pay()
        loss.backward()
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.task.clip_norm)
        self.optimizer.step()
        self._processor.pay()
        self.index += 1

    def stretch_s(self, steps: int, profile: Profile | None = None) -> float:
        """Seconds of a step, the mean over some."""
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            self.step()
            if profile is not None:
                profile.step()
        dist.barrier()
        return (time.perf_counter() - began_s) / steps


def train(
    rank: int,
    world_size: int,
    *,
    task: str,
    method: str,
    rounds: int,
    stretch: int,
    folder: str,
    slow: float,
    links: bool,
) -> dict[str, Any]:
    """Alternate stretches without a profile, with one, and with one that tells how the run goes."""
    torch.set_num_threads(1)
    kernels.warm_up()
    training = Training(task, method, slow if rank == SLOW else 1.0)
    training.stretch_s(6)
    ratios: dict[str, list[float]] = {"profile": [], "live": []}
    for number in range(rounds):
        plain_s = training.stretch_s(stretch)
        for kind, found in ratios.items():
            name = str(number) if kind == "profile" else f"live{number}"
            with gradwire.profile(
                training.ddp, Path(folder) / name, session=training.session, links=links, live=kind == "live"
            ) as profile:
                found.append(training.stretch_s(stretch, profile) / plain_s)
    return {"ratio": statistics.median(ratios["profile"]), "live": statistics.median(ratios["live"]), "ratios": ratios}


def _cases(told: argparse.Namespace) -> Iterator[tuple[str, float, str | list[str]]]:
    """What is planted: its name, how many times slower host 2 is, and the rates of all links."""
    yield "plain", 1.0, told.rate
    yield "slow host", told.slow, told.rate
    rates = [told.rate] * told.hosts
    rates[SLOW] = format_rate(parse_rate(told.rate) / 10)
    yield "slow link", 1.0, rates


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = network_arguments(__doc__, 4, DEFAULT)
    parser.set_defaults(rounds=8, stretch=12)
    parser.add_argument("--slow", type=float, default=4.0, help="times that host 2 is slower in the second run")
    told = parser.parse_args()
    results = dict[str, Any]()
    for method in told.methods:
        for case, slow, rates in _cases(told):
            with tempfile.TemporaryDirectory() as folder, Network(told.hosts, rates) as network:
                options = {
                    "task": told.task,
                    "method": method,
                    "rounds": told.rounds if case == "plain" else 1,
                    "stretch": told.stretch,
                    "folder": folder,
                    "slow": slow,
                    "links": case == "slow link",
                }
                ranks = run_function(f"{__file__}:train", told.hosts, options, told.deadline, network=network)
                found = account(read_records(Path(folder) / "0"), 3)
                text = (Path(folder) / "0" / "summary.txt").read_text()
            explained = min(rank.accounted for rank in found.ranks)
            ratio, live = (max(rank[kind] for rank in ranks) for kind in ("ratio", "live"))
            print(f"{method}, {case}, {network.description}")
            print(f"explained {explained:.1%} of a step at least")
            print(f"a profiled step takes {ratio:.3f} of a plain one, one that tells of the run {live:.3f}")
            print(text, flush=True)
            row = {"explained": explained, "ratio": ratio, "live": live, "summary": text, "ranks": ranks}
            results.setdefault(method, {})[case] = row
    if told.save:
        print("wrote", save_result("profiling", {"hosts": told.hosts, "rate": told.rate, "methods": results}))


if __name__ == "__main__":
    main()
