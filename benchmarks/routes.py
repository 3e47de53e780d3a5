"""Routes against Gloo's own collectives: `python benchmarks/routes.py [hosts] [rate] [largest size in MB]`.

Hosts are network namespaces joined by links of that rate. `Auto` measures its candidates once, as `gradwire.attach`
does, and chooses; then every route, plain `dist.all_reduce` and `Auto` itself reduce tensors of 4 KB to 64 MB in turn,
round after round. A round's time is the slowest rank's; each figure is the median over rounds. Last, at 16 MB, ways to
reduce and scatter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common import save_result
from gradwire.codecs import Identity
from gradwire.core.collective import Collective
from gradwire.core.grain import flat_grain
from gradwire.core.state import State
from gradwire.drivers.interpreter import run_program
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.network import Network
from gradwire.ranks.supervised import run_function
from gradwire.reducers import AllReduceExchange, Auto, Reduced, Step
from gradwire.reducers.routes import direct_scatter, ring_scatter
from gradwire.reducers.sent import SentAll

KB, MB = 1 << 10, 1 << 20


class Sample(NamedTuple):
    """Reduce `nbytes` in `rounds`, each contestant `burst` times in a row, after `warm` rounds that do not count."""

    nbytes: int
    rounds: int
    burst: int = 1
    warm: int = 1


SAMPLES = (
    Sample(4 * KB, 25, 8),
    Sample(16 * KB, 25, 8),
    Sample(64 * KB, 41, 4),
    Sample(256 * KB, 15, 2),
    Sample(1 * MB, 7),
    Sample(4 * MB, 5),
    Sample(16 * MB, 3),
    Sample(64 * MB, 3, warm=0),
)
SCATTER = Sample(16 * MB, 3)
ALLOWED_SHARE, ALLOWED_S = 0.10, 0.3e-3

Contestants = dict[str, Callable[[], object]]


def on_rank(rank: int, world_size: int, largest: int) -> dict[str, Any]:
    """What every rank does."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    transport = GroupTransport(group)
    began = time.perf_counter()
    auto = LinkProfiler(transport, torch.device("cpu")).with_times(Auto(Identity()))
    took = time.perf_counter() - began
    assert isinstance(auto, Auto)
    samples = [sample for sample in SAMPLES if sample.nbytes <= largest]
    return {
        "measuring_s": took,
        "curves": {name(c): curve.points for c, curve in zip(auto.candidates, auto.curves, strict=True)},
        "chosen": [name(auto.choose(sample.nbytes)) for sample in samples],
        "reduce": [timed(sample, reductions(auto, sample.nbytes, transport)) for sample in samples],
        "scatter": timed(SCATTER, scatters(SCATTER.nbytes, transport)) if SCATTER.nbytes <= largest else {},
    }


def name(reducer: AllReduceExchange) -> str:
    return "gloo" if type(reducer) is AllReduceExchange else type(reducer).__name__


def timed(sample: Sample, contestants: Contestants) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, on this rank."""
    times: dict[str, list[float]] = {label: [] for label in contestants}
    for turn in range(sample.warm + sample.rounds):
        for label, run in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(sample.burst):
                run()
            if turn >= sample.warm:
                times[label].append((time.perf_counter() - start) / sample.burst)
    return times


def reductions(auto: Auto, nbytes: int, transport: GroupTransport) -> Contestants:
    x = torch.zeros(nbytes // 4)
    plain = x.clone()
    grain, step = flat_grain(x.numel()), Step(0, transport.rank, transport.world_size)

    def by(reducer: AllReduceExchange) -> Callable[[], object]:
        return lambda: run_program(reducer.reduce(grain, x, State(), step), transport)

    def plainly() -> None:
        dist.all_reduce(plain)

    found: Contestants = {"dist.all_reduce": plainly}
    return found | {name(reducer): by(reducer) for reducer in (*auto.candidates, auto)}


def scatters(nbytes: int, transport: GroupTransport) -> Contestants:
    x = torch.zeros(nbytes // 4)
    out, step = torch.empty(x.numel() // transport.world_size), Step(0, transport.rank, transport.world_size)

    def by(scatter: Callable[[Tensor, Step], Generator[Collective, Tensor, Tensor]]) -> Callable[[], object]:
        return lambda: run_program(_program(scatter(x, step)), transport)

    return {
        "dist.reduce_scatter": lambda: _reduce_scatter(out, x),
        "direct_scatter": by(direct_scatter),
        "ring_scatter": by(ring_scatter),
        "all_to_all + sum": lambda: _all_to_all(x, transport.world_size),
    }


def _reduce_scatter(out: Tensor, x: Tensor) -> None:
    scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
    scatter(out, x)


def _all_to_all(x: Tensor, n: int) -> Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received.view(n, -1).sum(0)


def _program(scatter: Generator[Collective, Tensor, Tensor]) -> Generator[Collective, Tensor, Reduced]:
    shard = yield from scatter
    return Reduced(shard, SentAll(), State())


def medians(by_rank: list[dict[str, list[float]]]) -> dict[str, float]:
    """Of each contestant, over rounds, of the slowest rank's time."""
    rounds = {label: zip(*(times[label] for times in by_rank), strict=True) for label in by_rank[0]}
    return {label: statistics.median(map(max, each)) for label, each in rounds.items()}


def verdict(times: dict[str, float], chosen: str) -> dict[str, Any]:
    """How far the choice, and `Auto` with its own overhead, are from the best."""
    best = min((label for label in times if label != "Auto"), key=times.__getitem__)
    allowed = times[best] * (1 + ALLOWED_SHARE) + ALLOWED_S
    return {
        "best": best,
        "chosen": chosen,
        "chosen_ok": times[chosen] <= allowed,
        "auto_ok": times["Auto"] <= allowed,
        "seconds": times,
    }


def show(rows: list[dict[str, Any]], sizes: list[int]) -> None:
    labels = list(rows[0]["seconds"])
    print(f"{'ms, median':>10} " + " ".join(f"{label:>15}" for label in labels) + "  chosen, best, within 10% + 0.3 ms")
    for nbytes, row in zip(sizes, rows, strict=True):
        times = " ".join(f"{row['seconds'][label] * 1e3:15.2f}" for label in labels)
        size = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
        marks = f"choice {'yes' if row['chosen_ok'] else 'NO'}, Auto {'yes' if row['auto_ok'] else 'NO'}"
        print(f"{size:>10} {times}  {row['chosen']}, {row['best']}, {marks}")


def main() -> None:
    arguments = dict(enumerate(sys.argv))
    hosts, rate, largest = int(arguments.get(1, 4)), arguments.get(2, "200mbit"), int(arguments.get(3, 64)) * MB
    with Network(hosts, rate) as network:
        by_rank = run_function(f"{__file__}:on_rank", hosts, {"largest": largest}, 280, network)
        description = network.description
    first = by_rank[0]
    sizes = [sample.nbytes for sample in SAMPLES if sample.nbytes <= largest]
    times = [medians([found["reduce"][i] for found in by_rank]) for i in range(len(sizes))]
    rows = [verdict(each, chosen) for each, chosen in zip(times, first["chosen"], strict=True)]
    assert all(found["chosen"] == first["chosen"] for found in by_rank), "ranks chose differently"
    print(f"{description}; measuring took {first['measuring_s']:.1f} s")
    show(rows, sizes)
    scatter = medians([found["scatter"] for found in by_rank])
    for label, seconds in scatter.items():
        print(f"{label:>20} {seconds * 1e3:9.1f} ms  {scatter['dist.reduce_scatter'] / seconds:5.2f}x")
    figures = {"hosts": hosts, "rate": rate, "network": description, "measuring_s": first["measuring_s"]}
    reduce = [{"nbytes": nbytes, **row} for nbytes, row in zip(sizes, rows, strict=True)]
    print(save_result("routes", {**figures, "reduce": reduce, "scatter_s": scatter, "curves": first["curves"]}))


if __name__ == "__main__":
    main()
