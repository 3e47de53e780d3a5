"""What the system hands out anew, counted in pages: of tensors, arrays and what compiled code takes, in any thread.

It is measured in a process that has done nothing before. In one that has, malloc serves large pieces of what it was
given back, and no page is touched for the first time.
"""

from __future__ import annotations

import ctypes
import platform
import resource
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import Session
from gradwire.core.collective import AllGather, AllReduce, Collective
from gradwire.drivers.groups import group_apart
from gradwire.drivers.interpreter import Pending
from gradwire.drivers.process_group import SMALL_ROW_BYTES, GroupTransport
from gradwire.session.direct_lane import DirectLane

ROWS, COLUMNS, RANKS, STEPS = 1024, 512, 2, 5
GRADIENT = 4 * ROWS * COLUMNS
DEADLINE_S = 120.0
PAGE = resource.getpagesize()
LARGE = 1 << 16
"""Bytes from which on each allocation is one of the system's while pages are counted."""

CAN_COUNT = platform.libc_ver()[0] == "glibc"

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_HUGE_PAGES_OFF = 41  # PR_SET_THP_DISABLE of prctl(2): a huge page would count as one


@contextmanager
def large_memory_is_fresh() -> Generator[None]:
    """Have malloc ask the system for each large piece, and give it back, so that its pages are touched anew.

    Small pieces stay with malloc. Afterwards both thresholds are the largest that malloc sets them to by itself.
    """
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_MMAP, LARGE), "malloc has other options here"
    assert libc.mallopt(_TRIM, 1 << 30)
    assert libc.prctl(_HUGE_PAGES_OFF, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(_HUGE_PAGES_OFF, 0, 0, 0, 0)
        libc.mallopt(_MMAP, 32 << 20)
        libc.mallopt(_TRIM, 64 << 20)


def fresh_bytes(work: Callable[[], object]) -> int:
    """Bytes of the pages that this process touched first while it did `work`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return PAGE * (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


class Own(GroupTransport):
    """Adds up what Gloo takes for itself: a buffer for what it gathers, and one of a rank's part of an all-reduce."""

    gloo = 0

    def issue(self, request: Collective) -> Pending:
        """Issue, and note."""
        if isinstance(request, AllReduce):
            self.gloo += request.nbytes // self.world_size
        if isinstance(request, AllGather) and request.nbytes > SMALL_ROW_BYTES:
            self.gloo += request.nbytes * self.world_size
        return super().issue(request)


class CountingLane(DirectLane):
    """A lane whose transports are `Own`."""

    def transport(self) -> Own:
        """Another one."""
        self.own = Own(self.group, self.log)
        return self.own


class Ranks:
    """Ranks on threads, each with a lane over Gloo that sessions share."""

    def __init__(self, count: int) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(count)]
        root: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

        def lane(rank: int) -> CountingLane:
            store = root.clone()
            apart = dist.PrefixStore("ranks", store)  # pyright: ignore[reportPrivateImportUsage]
            return CountingLane(group_apart(apart, rank, count, DEADLINE_S), store, "ranks", DEADLINE_S)

        self.lanes = self.each(lane)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns on each thread."""
        jobs: list[Future[Any]] = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [job.result(DEADLINE_S) for job in jobs]

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()


def kinds_of_memory(rank: int, world_size: int) -> dict[str, int]:
    """Bytes that are seen of a tensor, an array, a tensor of another thread, and of what takes nothing."""
    x = torch.ones(ROWS * COLUMNS)
    with large_memory_is_fresh(), ThreadPoolExecutor(1) as thread:
        return {
            "tensor": fresh_bytes(lambda: x + 1),
            "array": fresh_bytes(lambda: np.full(GRADIENT, 1, np.uint8)),
            "thread": fresh_bytes(lambda: thread.submit(lambda: x + 1).result(20)),
            "nothing": fresh_bytes(lambda: x.add_(1)),
        }


def method(rank: int, world_size: int, spec: str, ranks: int, dtype: str) -> list[float]:
    """What ranks take anew in each step of a method, without Gloo's own, in gradients of that dtype a rank."""
    kind: torch.dtype = getattr(torch, dtype)
    like = {"w": torch.empty(ROWS, COLUMNS, dtype=kind), "b": torch.empty(COLUMNS, dtype=kind)}
    pair = Ranks(ranks)

    def session(rank: int) -> Session:
        return Session(like, spec, lane=pair.lanes[rank], grain_numel=ROWS * COLUMNS)

    sessions: Sequence[Session] = pair.each(session)
    gradients = [{name: torch.empty_like(tensor) for name, tensor in like.items()} for _ in range(ranks)]
    taken: list[float] = []
    with large_memory_is_fresh():
        for _ in range(STEPS):
            for own in gradients:
                for tensor in own.values():
                    tensor.normal_()
            gloo = sum(lane.own.gloo for lane in pair.lanes)
            fresh = fresh_bytes(lambda: pair.each(lambda rank: sessions[rank].reduce_(gradients[rank])))
            gloo = sum(lane.own.gloo for lane in pair.lanes) - gloo
            taken.append((fresh - gloo) / (ranks * ROWS * COLUMNS * kind.itemsize))
    for one in sessions:
        one.close()
    pair.close()
    return taken


def wrapped(port: str) -> nn.Module:
    """Two layers in what a port serves."""
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, COLUMNS))
    if port == "ddp":
        return DistributedDataParallel(model)
    if port == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def of_step(model: nn.Module) -> float:
    """What a forward and a backward pass take anew, the least of a few after the second, in gradients of a layer."""
    x, taken = torch.ones(1, COLUMNS), list[int]()
    for _ in range(STEPS):
        model.zero_grad(set_to_none=False)
        taken.append(fresh_bytes(lambda: model(x).sum().backward()))
    return min(taken[2:]) / GRADIENT


def port(rank: int, world_size: int, port: str, spec: str) -> dict[str, float]:
    """What a step takes by itself, and with a method."""
    with large_memory_is_fresh():
        alone = of_step(wrapped(port))
        model = wrapped(port)
        with gradwire.attach(model, spec):
            return {"alone": alone, "served": of_step(model)}
