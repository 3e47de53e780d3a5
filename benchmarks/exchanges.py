"""Ways to swap and to gather rows on Gloo: `python benchmarks/exchanges.py [--hosts 2 4 8] [--rates 20mbit] [--save]`.

Hosts are network namespaces joined by links of a rate. The link is timed by all-reduces, as a session does it. Then all
ways take turns: Gloo's all_to_all and all_gather, the same rows as messages (each receive posted before the sends), an
all_to_all of the repeated row, and what gradwire takes by itself, before and after it knows the link. A figure is the
median over rounds of the slowest rank's time, by what the bytes of one direction take at the rate of the all-reduce.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import save_result
from gradwire.core.collective import AllGather, AllToAll, Collective
from gradwire.core.link import Link
from gradwire.drivers.contention import message
from gradwire.drivers.interpreter import ask
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.network import Network
from gradwire.ranks.supervised import run_function
from routes import KB, Contestants, Sample, medians, timed

ROWS = (2 * KB, 8 * KB, 32 * KB, 64 * KB, 256 * KB, 1024 * KB)
LONGEST_S = 0.4
"""An exchange whose bytes take longer is left out."""
TIMED_BYTES = 1 << 22
ROUNDS, BURST, BURST_S = 9, 12, 0.15
"""Each way takes `BURST` turns in a row, or fewer where they would take longer than `BURST_S`."""


def on_rank(rank: int, world_size: int) -> dict[str, Any]:
    """What every rank does."""
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    plain = GroupTransport(group)
    times = LinkProfiler(plain, torch.device("cpu")).reduction_times(TIMED_BYTES)
    assert times is not None
    link, cells = message(times.link, world_size), list[dict[str, Any]]()
    for nbytes in ROWS:
        bytes_s = (world_size - 1) * nbytes * link.beta_s_per_byte
        if bytes_s > LONGEST_S:
            continue
        burst = min(max(int(BURST_S / bytes_s), 1), BURST)
        rows = torch.zeros((world_size, nbytes), dtype=torch.uint8)
        for kind, ways in (("swap", swaps(rows, link)), ("gather", gathers(rows[0], link))):
            cells.append(
                {"kind": kind, "row": nbytes, "bytes_s": bytes_s, "s": timed(Sample(nbytes, ROUNDS, burst), ways)}
            )
    return {"byte_s": link.beta_s_per_byte, "cells": cells}


def transports(link: Link) -> tuple[Callable[[Collective], Callable[[], object]], ...]:
    """What asks a transport that knows no link, one that takes every link for slow, and one that knows the link."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    made = [GroupTransport(group) for _ in range(3)]
    made[1].link, made[2].link = replace(link, beta_s_per_byte=1.0), link
    return tuple(lambda request, each=each: lambda: ask(request, each) for each in made)


def swaps(rows: Tensor, link: Link) -> Contestants:
    """All ways for an all-to-all."""
    before, messages, now = transports(link)
    out, request = torch.empty_like(rows), AllToAll(rows)
    return {
        "all_to_all": partial(dist.all_to_all_single, out, rows),
        "messages": messages(request),
        "link unknown": before(request),
        "link known": now(request),
    }


def gathers(row: Tensor, link: Link) -> Contestants:
    """All ways to gather."""
    before, messages, now = transports(link)
    n = dist.get_world_size()
    out, repeated, request = torch.empty((n, row.numel()), dtype=row.dtype), row.repeat(n, 1), AllGather(row)
    return {
        "all_gather": partial(dist.all_gather_single, out.view(-1), row),
        "repeated row": partial(dist.all_to_all_single, out, repeated),
        "messages": messages(request),
        "link unknown": before(request),
        "link known": now(request),
    }


def of_all(by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells, with the median over rounds of the slowest rank."""
    cells = list[dict[str, Any]]()
    for same in zip(*(each["cells"] for each in by_rank), strict=True):
        cells.append({**same[0], "s": medians([cell["s"] for cell in same])})
    return cells


def show(hosts: int, rate: str, cells: list[dict[str, Any]]) -> None:
    for kind in ("swap", "gather"):
        of_kind = [cell for cell in cells if cell["kind"] == kind]
        names = list(of_kind[0]["s"])
        print(f"{hosts} hosts, {rate}, {kind}: time by that of the bytes, and ms")
        print(f"{'row':>8} {'bytes':>10} " + " ".join(f"{name:>16}" for name in names))
        for cell in of_kind:
            times = " ".join(f"{each / cell['bytes_s']:7.2f} {1e3 * each:8.2f}" for each in cell["s"].values())
            print(f"{cell['row'] // KB:5d} KB {1e3 * cell['bytes_s']:7.2f} ms {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["20mbit", "100mbit", "2gbit"])
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    found = list[dict[str, Any]]()
    for hosts in options.hosts:
        for rate in options.rates:
            with Network(hosts, rate) as network:
                by_rank = run_function(f"{__file__}:on_rank", hosts, {}, 280, network)
            cells = of_all(by_rank)
            show(hosts, rate, cells)
            found.append({"hosts": hosts, "rate": rate, "byte_s": by_rank[0]["byte_s"], "cells": cells})
    if options.save:
        print(save_result("exchanges", {"networks": found}))


if __name__ == "__main__":
    main()
