"""What ranks do in `test_bench.py`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from gradwire import bench
from gradwire.bench import collectives
from gradwire.bench.collectives import CALLS, CollectivePlace

_CPU = torch.device("cpu")


def table(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    return bench.measure(bench.BenchOptions.of(options)).as_dict()


def refusal(rank: int, world_size: int, options: list[dict[str, Any]]) -> str:
    """What this rank is told where each rank has options of its own."""
    try:
        bench.measure(bench.BenchOptions.of(options[rank]))
    except bench.BenchError as error:
        return str(error)
    return "nothing"


def wrong(rank: int, world_size: int, root: int) -> dict[str, list[int]]:
    """How many elements differ on this rank after each collective, and after one that did nothing."""
    found: dict[str, list[int]] = {}
    for name, kind in CALLS.items():
        made = kind(CollectivePlace(_world(), _CPU, torch.float32, 5, root))
        made.fill()
        untouched = made.wrong()
        made.call()
        found[name] = [made.wrong(), untouched]
    return found


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Partial(dist.ProcessGroup):
    """A backend that can broadcast and nothing else."""

    def getBackendName(self) -> str:
        return "partial"

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.broadcast(tensors[0], opts.rootRank)
        return _Done()


class _Done(dist.Work):
    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


def partial_backend(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Partial:
        return Partial(rank, size)  # pyright: ignore[reportCallIssue] - as PyTorch's own tests make one

    dist.Backend.register_backend("partial", make, devices=["cpu"])
    group = dist.new_group(backend="partial")
    assert isinstance(group, dist.ProcessGroup)
    return bench.measure(bench.BenchOptions.of(options), group).as_dict()


def one_fails(rank: int, world_size: int) -> str:
    """What a rank is told where one of them cannot go on."""
    real = collectives.CALLS["broadcast"]

    class Failing(real):
        def fill(self) -> None:
            if rank == 1:
                raise OSError("the cable is gone")
            super().fill()

        def call(self) -> None:
            """Nothing, so that nobody waits for the rank that failed."""

    collectives.CALLS["broadcast"] = Failing
    try:
        bench.measure(bench.BenchOptions(collectives=("broadcast",), max_bytes="8", calls=1, no_links=True))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def slow_rank(rank: int, world_size: int) -> list[float]:
    """Times of a job that takes 20 ms on rank 1 and nothing elsewhere."""
    from gradwire.bench.timing import CallClock
    from gradwire.drivers.process_group import GroupTransport

    clock = CallClock(GroupTransport(_world()), _CPU, 4, 1.0)
    times = clock.time(lambda: time.sleep(0.02 if rank == 1 else 0.0))
    return [times.calls, times.mean_s, times.slowest_s, times.p99_s]
