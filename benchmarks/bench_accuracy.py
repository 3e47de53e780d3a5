"""Whether `gradwire bench` tells the truth: `python benchmarks/bench_accuracy.py [--rate 100mbit] [--save]`.

On two emulated hosts it compares three things in one run:

- times of collectives and of a method with those of a bare loop, which is written here without anything of
  `gradwire.bench`: a barrier, so many calls, the time of the slowest rank by call. Both take turns in the same
  processes, and what counts is the ratio of the medians over rounds;
- the rate of the link with the rate that it is limited to;
- its latency with half a round trip of PyTorch's own `send` and `recv`. Beside it stands that of plain sockets.

It fails where times differ by more than 5%, the rate by more than 5%, or the latency by more than 20%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
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
SIZES = {"1K": 200, "64K": 40, "1M": 8}
"""Calls in a row at each size."""
METHOD, METHOD_SIZE = "int4", "1M"
TIMES, RATE, LATENCY = 0.05, 0.05, 0.20
"""What differs by no more is right."""
DEADLINE_S = 560.0


def bare_loop(job: Callable[[], object], calls: int) -> float:
    """Seconds of a call on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        job()
    mine = torch.tensor([(time.perf_counter() - began) / calls], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def bare_job(name: str, nbytes: int, session: gradwire.Session | None) -> Callable[[], object]:
    """A collective of a size as one would write it, with zeros, or a step of a session."""
    if session is not None:
        x = torch.randn(session.shapes["x"], generator=torch.Generator().manual_seed(dist.get_rank()))
        return lambda: session.reduce_({"x": x.clone()})
    whole, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // dist.get_world_size())
    taken, parts = torch.zeros_like(whole), list(torch.zeros_like(whole).chunk(dist.get_world_size()))

    def job() -> None:
        if name == "all_reduce":
            dist.all_reduce(whole)
        elif name == "all_gather":
            dist.all_gather(parts, part)
        elif name == "all_to_all":
            dist.all_to_all_single(taken, whole)
        else:
            dist.broadcast(whole, 0)

    return job


def compared(name: str, size: str, calls: int, rounds: int) -> dict[str, Any]:
    """Times of one row, both ways in turn."""
    methods = (METHOD,) if name == METHOD else ()
    collectives = ("all_reduce",) if methods else (name,)
    options = bench.BenchOptions(
        collectives=collectives, methods=methods, min_bytes=size, max_bytes=size, calls=calls, no_links=True
    )
    nbytes = options.sizes[0]
    session = gradwire.Session({"x": torch.zeros(512, nbytes // 4 // 512)}, name) if methods else None
    job, ours, bare = bare_job(name, nbytes, session), list[float](), list[float]()
    job()
    for _ in range(rounds):
        *_, row = bench.measure(options).rows
        assert row.times is not None
        ours.append(1e6 * row.times.slowest_s)
        bare.append(1e6 * bare_loop(job, calls))
    if session is not None:
        session.close()
    bench_us, bare_us = statistics.median(ours), statistics.median(bare)
    figures = {"bench_us": bench_us, "bare_us": bare_us, "ratio": bench_us / bare_us}
    return {"name": name, "size": size, **figures, "bench_rounds_us": ours, "bare_rounds_us": bare}


def on_rank(rank: int, world_size: int, rate: float, rounds: int) -> dict[str, Any]:
    """What each rank does."""
    rows = [compared(name, size, calls, rounds) for name in COLLECTIVES for size, calls in SIZES.items()]
    rows.append(compared(METHOD, METHOD_SIZE, SIZES[METHOD_SIZE], rounds))
    links = bench.measure(bench.BenchOptions(collectives=("all_reduce",), max_bytes="8", calls=1)).links
    gloo_s = round_trips((0, 1), gloo_trip)
    plain_s, plain_beta = plain_sockets((0, 1), int(0.1 * rate / 8))
    (link,) = links
    assert link.bits_per_s is not None
    return {
        "rows": rows,
        "rate": {"bits_per_s": link.bits_per_s, "of_limit": link.bits_per_s / rate, "plain": 8 / plain_beta},
        "latency": {
            "us": 1e6 * link.alpha_s,
            "ping_pong_us": 1e6 * gloo_s,
            "ratio": link.alpha_s / gloo_s,
            "plain_us": 1e6 * plain_s,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", default="0")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    arguments = parser.parse_args()
    told = {"rate": parse_rate(arguments.rate), "rounds": arguments.rounds}
    with Network(2, arguments.rate, delay=arguments.delay) as network:
        print(network.description)
        found = run_function(f"{__file__}:on_rank", 2, told, DEADLINE_S, network)[0]
        description = network.description
    for row in found["rows"]:
        print(
            f"{row['name']:>11} {row['size']:>4}  {row['bench_us']:>10.1f} us, bare loop {row['bare_us']:>10.1f} us",
            end="",
        )
        print(f", ratio {row['ratio']:.3f}")
    rate, latency = found["rate"], found["latency"]
    print(f"rate {1e-6 * rate['bits_per_s']:.2f} Mbit/s, {rate['of_limit']:.3f} of the limit", end="")
    print(f" (plain sockets {1e-6 * rate['plain']:.2f})")
    print(
        f"latency {latency['us']:.1f} us, {latency['ratio']:.3f} of a ping-pong's {latency['ping_pong_us']:.1f}", end=""
    )
    print(f" (plain sockets {latency['plain_us']:.1f})")
    missed = [f"{row['name']} of {row['size']}" for row in found["rows"] if abs(row["ratio"] - 1) > TIMES]
    missed += ["the rate"] if abs(rate["of_limit"] - 1) > RATE else []
    missed += ["the latency"] if abs(latency["ratio"] - 1) > LATENCY else []
    print(f"beyond what is right: {', '.join(missed)}" if missed else "all within what is right")
    if arguments.save:
        print(save_result("bench_accuracy", {"network": description, **told, "missed": missed, **found}))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
