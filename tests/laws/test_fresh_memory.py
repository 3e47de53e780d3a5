"""After its second step a method takes no memory of a gradient's size anew, on the whole way of a step.

What is counted are pages that the system hands out: of drivers, ports, process groups, PyTorch and compiled kernels.
What Gloo takes for itself in a collective is measured apart, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
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

from .fresh import CAN_COUNT, fresh_bytes, large_memory_is_fresh
from .subjects import reducers

pytestmark = pytest.mark.skipif(not CAN_COUNT, reason="malloc of glibc can be told to hide nothing")

ROWS, COLUMNS, RANKS, STEPS = 1024, 512, 2, 5
GRADIENT = 4 * ROWS * COLUMNS
DEADLINE_S = 120.0


class Own(GroupTransport):
    """Adds up what Gloo takes for itself: a buffer for what it gathers, and one for the sum of an all-reduce."""

    gloo = 0

    def issue(self, request: Collective) -> Pending:
        """Issue, and note."""
        if isinstance(request, AllReduce):
            self.gloo += request.nbytes
        if isinstance(request, AllGather) and request.nbytes > SMALL_ROW_BYTES:
            self.gloo += request.nbytes * self.world_size
        return super().issue(request)


class CountingLane(DirectLane):
    """A lane whose transports are `Own`."""

    def transport(self) -> Own:
        """Another one."""
        self.own = Own(self.group, self.log)
        return self.own


class Pair:
    """Two ranks on threads, each with a lane over Gloo that sessions share."""

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(RANKS)]
        root: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

        def lane(rank: int) -> CountingLane:
            store = root.clone()
            apart = dist.PrefixStore("pair", store)  # pyright: ignore[reportPrivateImportUsage]
            return CountingLane(group_apart(apart, rank, RANKS, DEADLINE_S), store, "pair", DEADLINE_S)

        self.lanes = self.each(lane)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns on each thread."""
        jobs: list[Future[Any]] = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [job.result(DEADLINE_S) for job in jobs]

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two ranks."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def nothing_is_hidden() -> Iterator[None]:
    """Count all that is large."""
    with large_memory_is_fresh():
        yield


def test_all_kinds_of_memory_are_seen() -> None:
    x = torch.ones(ROWS * COLUMNS)
    assert fresh_bytes(lambda: x + 1) >= GRADIENT
    assert fresh_bytes(lambda: np.full(GRADIENT, 1, np.uint8)) >= GRADIENT
    with ThreadPoolExecutor(1) as thread:
        assert fresh_bytes(lambda: thread.submit(lambda: x + 1).result(20)) >= GRADIENT
    assert fresh_bytes(lambda: x.add_(1)) < GRADIENT // 4


# Two ranks pair up, so neither whole nodes nor rules that want more ranks; the noise of a private mean, and the
# decompositions of `svd`, are LAPACK's and the system's: see the page.
SERVED = {
    spec: reducer
    for spec, reducer in reducers().items()
    if reducer.fewest_ranks <= RANKS and reducer.rank_multiple == 1 and not reducer.private and "svd" not in spec
}


@pytest.mark.parametrize("spec", SERVED)
@pytest.mark.draw(12)
def test_a_step_takes_no_gradient_of_fresh_memory(spec: str, pair: Pair) -> None:
    like = {"w": torch.empty(ROWS, COLUMNS), "b": torch.empty(COLUMNS)}

    def session(rank: int) -> Session:
        return Session(like, spec, lane=pair.lanes[rank], grain_numel=ROWS * COLUMNS)

    sessions: Sequence[Session] = pair.each(session)
    gradients = [{name: torch.empty_like(tensor) for name, tensor in like.items()} for _ in range(RANKS)]
    taken: list[float] = []
    for _ in range(STEPS):
        for own in gradients:
            for tensor in own.values():
                tensor.normal_()
        gloo = sum(lane.own.gloo for lane in pair.lanes)
        fresh = fresh_bytes(lambda: pair.each(lambda rank: sessions[rank].reduce_(gradients[rank])))
        gloo = sum(lane.own.gloo for lane in pair.lanes) - gloo
        taken.append((fresh - gloo) / (RANKS * GRADIENT))
    for one in sessions:
        one.close()
    # Codecs whose payloads differ in size may meet a larger one than before, so not every single step is empty.
    assert min(taken[2:]) < 0.25, taken
    assert max(taken[2:]) < 1.0, taken


# Ports, on one rank ---------------------------------------------------------------------------------------------------


def wrapped(port: str) -> nn.Module:
    """Two layers in what a port serves."""
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Linear(ROWS, COLUMNS))
    if port == "ddp":
        return DistributedDataParallel(model)
    if port == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def fresh_of_step(model: nn.Module) -> float:
    """Bytes that a forward and a backward pass take anew, the least of a few after the second."""
    x, taken = torch.ones(1, COLUMNS), list[int]()
    for _ in range(STEPS):
        model.zero_grad(set_to_none=False)
        taken.append(fresh_bytes(lambda: model(x).sum().backward()))
    return min(taken[2:])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("port", ["ddp", "unwrapped", "fsdp2"])
@pytest.mark.parametrize("spec", ["int4", "topk:0.01"])
def test_a_port_takes_no_gradient_more_than_training_without_it(port: str, spec: str) -> None:
    alone = fresh_of_step(wrapped(port))
    model = wrapped(port)
    with gradwire.attach(model, spec):
        served = fresh_of_step(model)
    assert served - alone < 2 * GRADIENT // 4, (served / GRADIENT, alone / GRADIENT)  # of two layers
