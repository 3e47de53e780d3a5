"""Random schedules of every protocol object over the carrier with faults, and of elastic workers, over all cores.

Messages are lost, late, repeated and out of order, connections are cut, and processes are killed, started anew, stopped
and continued (`gradwire.peers.faulty`). Watchers look at every step; the tests' modules say at which promises:

    parts       parameter servers and their workers, which pause now and then (tests/part_schedules.py)
    rounds      a federation's server in rounds, and its clients (tests/round_schedules.py)
    buffered    a federation's server with a buffer (the same)
    elastic     elastic workers at their store, in a made-up order of events (tests/elastic_schedule.py)

    python benchmarks/schedules.py --count 100000 --kinds parts rounds buffered --save schedules
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common import save_result

TESTS = Path(__file__).parents[1] / "tests"
KINDS = {
    "parts": ("part_schedules", "check"),
    "rounds": ("round_schedules", "check_rounds"),
    "buffered": ("round_schedules", "check_buffered"),
    "elastic": ("elastic_schedule", "check_drawn"),
}
CHUNK = 50
"""Schedules that a process runs in a row."""


class Chunk(NamedTuple):
    """What came of some schedules.

    Attributes:
        counts: of what happened in them.
        broken: the sentences of those that broke a promise.
        seconds: of the processor.
    """

    counts: Counter[str]
    broken: list[str]
    seconds: float


def run_chunk(kind: str, seeds: range) -> Chunk:
    """Run the schedules of some seeds in this process."""
    torch.set_num_threads(1)
    module, check = KINDS[kind]
    run = getattr(importlib.import_module(module), check)
    counts, broken, began_s = Counter[str](), list[str](), time.process_time()
    for seed in seeds:
        try:
            counts += run(seed).counts
        except AssertionError as error:
            broken.append(f"{kind} {seed}: {error}")
    return Chunk(counts, broken, time.process_time() - began_s)


def run_kind(pool: Any, kind: str, seeds: range) -> dict[str, Any]:
    """Run many schedules of a kind over all processes, and print what came of them."""
    began_s, counts, broken, seconds = time.monotonic(), Counter[str](), list[str](), 0.0
    for number, chunk in enumerate(pool.imap_unordered(partial(run_chunk, kind), _chunks(seeds)), 1):
        counts, seconds = counts + chunk.counts, seconds + chunk.seconds
        broken += chunk.broken
        for sentence in chunk.broken:
            print(f"BROKEN {sentence}", flush=True)
        if number % 200 == 0:
            print(f"{kind}: {number * CHUNK:,} after {time.monotonic() - began_s:.0f} s", flush=True)
    row = {
        "schedules": len(seeds),
        "first seed": seeds.start,
        "broken": len(broken),
        "sentences": broken,
        "seconds": round(time.monotonic() - began_s, 1),
        "processor ms per schedule": round(1e3 * seconds / len(seeds), 2),
        **dict(sorted(counts.items())),
    }
    print(f"{kind}: " + ", ".join(f"{name} {value}" for name, value in row.items() if name != "sentences"), flush=True)
    return row


def _chunks(seeds: range) -> Iterator[range]:
    return (seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="schedules of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--save", default="", help="write a dated file of this name into benchmarks/results")
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))  # processes that are spawned have it too
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        seeds = range(options.first, options.first + options.count)
        rows = {kind: run_kind(pool, kind, seeds) for kind in options.kinds}
    if options.save:
        command = " ".join(["python benchmarks/schedules.py", *sys.argv[1:]])
        print(save_result(options.save, {"command": command, "processes": options.processes, "kinds": rows}))
    return int(any(row["broken"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
