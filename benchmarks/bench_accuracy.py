"""Whether `gradwire bench` tells the truth: `python benchmarks/bench_accuracy.py [--rate 100mbit] [--save]`.

On two emulated hosts it compares three things in one run:

- times of collectives and of a method with those of a bare loop, which is written here without anything of
  `gradwire.bench`: a barrier, so many calls, the time of the slowest rank by call;
- the rate of the link with the rate that it is limited to;
- its latency with half a round trip of a Gloo group's own messages, the fastest that there is over torch.distributed.
  Beside it stands that of plain sockets.

Both of each take turns in the same processes. What counts of times is the median over rounds of the ratio of two that
follow each other, so whatever else the machine does falls on both; of latencies the ratio of the lower quartiles. Rate
and latency are measured on a second network too, whose round trips have a delay.

It fails where times differ by more than 5%, the rate by more than 5%, or the latency by more than 20%.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from common import save_result
from gradwire import bench
from gradwire.network import Network, parse_rate
from gradwire.ranks.supervised import run_function
from link_probes import gloo_trip, plain_sockets, round_trips

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast")
SIZES = {"1K": (50, 81), "64K": (20, 15), "1M": (4, 7)}
"""Calls in a row at each size, and rounds of them."""
LINK_ROUNDS = 3
METHOD, METHOD_SIZE = "int4", "1M"
TIMES, RATE, LATENCY = 0.05, 0.05, 0.20
"""What differs by no more is right."""
DEADLINE_S = 560.0
UNTIMED = {"GRADWIRE_TIME_LINK": "0"}
"""As in a table, whose sessions do not time their link."""


def quartile(values: Sequence[float]) -> float:
    """The lower one."""
    return sorted(values)[len(values) // 4]


def bare_loop(job: Callable[[], object], calls: int, before: Callable[[], object] | None) -> float:
    """Seconds of a call on the slowest rank, without what is done before each; one call before them does not count."""
    job()
    dist.barrier()
    began, apart = time.perf_counter(), 0.0
    for _ in range(calls):
        if before is not None:
            start = time.perf_counter()
            before()
            apart += time.perf_counter() - start
        job()
    mine = torch.tensor([(time.perf_counter() - began - apart) / calls], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def bare_job(name: str, nbytes: int) -> Callable[[], object]:
    """A collective of a size as one would write it, with zeros."""
    whole, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // dist.get_world_size())
    taken = torch.zeros_like(whole)

    def job() -> None:
        if name == "all_reduce":
            dist.all_reduce(whole)
        elif name == "all_gather":
            dist.all_gather_single(taken, part)
        elif name == "all_to_all":
            dist.all_to_all_single(taken, whole)
        else:
            dist.broadcast(whole, 0)

    return job


def compared(
    options: bench.BenchOptions, rounds: int, job: Callable[[], object], before: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Times of the last row of a table, both ways in turn."""
    assert options.calls is not None
    (*_, row), ours, bare = bench.measure(options).rows, list[float](), list[float]()
    job()
    for _ in range(rounds):
        *_, row = bench.measure(options).rows
        assert row.times is not None
        ours.append(1e6 * row.times.slowest_s)
        bare.append(1e6 * bare_loop(job, options.calls, before))
    ratio = statistics.median(one / other for one, other in zip(ours, bare, strict=True))
    figures = {"bench_us": statistics.median(ours), "bare_us": statistics.median(bare), "ratio": ratio}
    return {"name": row.name, "size": options.max_bytes, **figures, "bench_rounds_us": ours, "bare_rounds_us": bare}


def options_of(collective: str, size: str, calls: int, *methods: str) -> bench.BenchOptions:
    """A table of one size."""
    return bench.BenchOptions((collective,), methods, min_bytes=size, max_bytes=size, calls=calls, no_links=True)


def of_method() -> dict[str, Any]:
    """Times of a method, beside those of a session of ours."""
    calls, rounds = SIZES[METHOD_SIZE]
    options = options_of("all_reduce", METHOD_SIZE, calls, METHOD)
    given = torch.randn(512, options.sizes[0] // 2048, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = given.clone()
    with gradwire.Session({"x": x}, METHOD) as session:
        return compared(options, rounds, lambda: session.reduce_({"x": x}), lambda: x.copy_(given))


def of_link(rate: float) -> dict[str, Any]:
    """Rate and latency, beside those of a ping-pong and of plain sockets."""
    links, trips = list[bench.BenchLink](), list[float]()
    for _ in range(LINK_ROUNDS):
        links += bench.measure(bench.BenchOptions(("all_reduce",), max_bytes="8", calls=1)).links
        trips.append(round_trips((0, 1), gloo_trip))
    plain_s, plain_beta = plain_sockets((0, 1), int(0.1 * rate / 8))
    bits_per_s = 8 / statistics.median(link.beta_s_per_byte for link in links)
    alpha_s, ping_pong_s = quartile([link.alpha_s for link in links]), quartile(trips)
    return {
        "rate": {"bits_per_s": bits_per_s, "of_limit": bits_per_s / rate, "plain": 8 / plain_beta},
        "latency": {
            "us": 1e6 * alpha_s,
            "ping_pong_us": 1e6 * ping_pong_s,
            "ratio": alpha_s / ping_pong_s,
            "plain_us": 1e6 * plain_s,
            "rounds_us": [1e6 * link.alpha_s for link in links],
            "ping_pong_rounds_us": [1e6 * trip_s for trip_s in trips],
        },
    }


def on_rank(rank: int, world_size: int, rate: float, link_only: bool) -> dict[str, Any]:
    """What each rank does."""
    rows: list[dict[str, Any]] = []
    if link_only:
        return {"rows": rows, **of_link(rate)}
    for name in COLLECTIVES:
        for size, (calls, rounds) in SIZES.items():
            options = options_of(name, size, calls)
            rows.append(compared(options, rounds, bare_job(name, options.sizes[0])))
    return {"rows": [*rows, of_method()], **of_link(rate)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", default="10ms", help="of a round trip on the second network")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    arguments = parser.parse_args()
    rate, found, missed = parse_rate(arguments.rate), list[dict[str, Any]](), list[str]()
    for delay in ("0", arguments.delay):
        with Network(2, arguments.rate, delay=delay) as network:
            print(network.description)
            told = {"rate": rate, "link_only": delay != "0"}
            one = run_function(f"{__file__}:on_rank", 2, told, DEADLINE_S, network, [UNTIMED] * 2)[0]
            one = {"network": network.description, "missed": show(one), **one}
        missed += [f"{name} with a delay of {delay}" for name in one["missed"]]
        found.append(one)
    print(f"beyond what is right: {', '.join(missed)}" if missed else "all within what is right")
    if arguments.save:
        print(save_result("bench_accuracy", {"rate": rate, "load": os.getloadavg(), "networks": found}))
    return bool(missed)


def show(found: dict[str, Any]) -> list[str]:
    """Print the figures of a network; return what is beyond what is right."""
    for row in found["rows"]:
        times = f"{row['bench_us']:>10.1f} us, bare loop {row['bare_us']:>10.1f} us, ratio {row['ratio']:.3f}"
        print(f"{row['name']:>11} {row['size']:>4}  {times}")
    rate, latency = found["rate"], found["latency"]
    print(f"rate {1e-6 * rate['bits_per_s']:.2f} Mbit/s, {rate['of_limit']:.3f} of the limit", end="")
    print(f" (plain sockets {1e-6 * rate['plain']:.2f})")
    print(
        f"latency {latency['us']:.1f} us, {latency['ratio']:.3f} of a ping-pong's {latency['ping_pong_us']:.1f}", end=""
    )
    print(f" (plain sockets {latency['plain_us']:.1f})")
    missed = [f"{row['name']} of {row['size']}" for row in found["rows"] if abs(row["ratio"] - 1) > TIMES]
    missed += ["the rate"] if abs(rate["of_limit"] - 1) > RATE else []
    return missed + (["the latency"] if abs(latency["ratio"] - 1) > LATENCY else [])


if __name__ == "__main__":
    sys.exit(main())
