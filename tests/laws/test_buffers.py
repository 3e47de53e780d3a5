"""What lies in memory that is used again is nobody's: whatever it holds, and whoever had it before, nothing changes.

Here each buffer is filled with ones, which are NaN as floats, before it is given away, and small tensors are pooled
too. Means and states are the same bits as in memory that is fresh.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.buffers import SMALLEST, BufferPool
from gradwire.core.state import flatten
from gradwire.drivers.lockstep import Lockstep, Meeting, together
from gradwire.reducers import Reducer

from .pools import FreshPool, PoisonedPool
from .subjects import grain_for, normal, ranks_for, reducers

NUMEL, STEPS = 600, 4


def step_with_sinks(ranks: Lockstep, tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `Lockstep.step`, but each mean is copied as soon as it is known."""
    meeting, taken = Meeting(ranks.world_size), dict[int, Tensor]()
    for rank, (own, tensor) in enumerate(zip(ranks.engines, tensors, strict=True)):
        transport: Any = own.transport
        transport.meeting = meeting
        own.begin(lambda _, mean, rank=rank: taken.update({rank: mean.clone()}))
        own.deliver(0, 0, tensor.reshape(-1))
    together([own.script() for own in ranks.engines])
    for own in ranks.engines:
        own.finish()
        own.release()
    return [taken[rank] for rank in range(ranks.world_size)]


REPEATABLE = {spec: reducer for spec, reducer in reducers().items() if reducer.repeatable}


@pytest.mark.parametrize("reducer", REPEATABLE.values(), ids=REPEATABLE)
@pytest.mark.draw(20)
def test_memory_is_given_again_only_when_nobody_holds_it(reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    grain, count = grain_for(reducer, NUMEL), ranks_for(reducer, 2)
    pool = PoisonedPool()
    monkeypatch.setattr(buffers, "SMALLEST", 1)
    found: list[tuple[list[list[Tensor]], Lockstep]] = []
    for one in (FreshPool(), pool):
        monkeypatch.setattr(buffers, "POOL", one)
        ranks = Lockstep(reducer, grain, count)
        steps = [[normal(grain.shape, count * index + rank) for rank in range(count)] for index in range(STEPS)]
        found.append(([step_with_sinks(ranks, tensors) for tensors in steps], ranks))
    (plain_means, plain), (means, reused) = found
    for one, other in zip(plain_means, means, strict=True):
        for mean, again in zip(one, other, strict=True):
            assert torch.equal(mean, again)
    for state, other in zip(plain.states, reused.states, strict=True):
        leaves = flatten(other)
        for name, tensor in flatten(state).items():
            assert torch.equal(tensor, leaves[name]), name
    assert pool.use().hits > 0


# The pool by itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> BufferPool:
    """A pool of its own."""
    return BufferPool()


HOLDS: dict[str, Callable[[Tensor], object]] = {
    "a view of a view": lambda x: x.view(-1)[7:9],
    "an array": lambda x: x.numpy(),
    "a memoryview": lambda x: memoryview(cast(Any, x.numpy())),
    "another dtype": lambda x: x.view(torch.int32).view(2, -1).mT,
    "its storage": lambda x: x.untyped_storage(),
    "a tensor of an array": lambda x: torch.from_numpy(x.numpy()[3:]),
    "a function": lambda x: lambda: x,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_every_kind_of_hold_keeps_memory(hold: Callable[[Tensor], object], pool: BufferPool) -> None:
    x = pool.empty((SMALLEST,), torch.float32)
    place, held = x.data_ptr(), hold(x)
    del x
    assert pool.empty((SMALLEST,), torch.float32).data_ptr() != place
    assert held is not None
    del held
    assert pool.use().idle_bytes == pool.use().held_bytes == 2 * 4 * SMALLEST
    again = [pool.empty((SMALLEST,), torch.float32) for _ in range(2)]
    assert place in {one.data_ptr() for one in again}


def test_idle_memory_is_bounded_by_what_was_in_use(pool: BufferPool) -> None:
    most = 0
    for size in range(1, 40):  # each of another size, so that none serves the next
        held = [pool.empty((size * SMALLEST,), torch.uint8) for _ in range(2)]
        most = max(most, sum(buffers.size_for(x.nbytes) for x in held))
        assert pool.use().held_bytes - most <= most
        del held
    use = pool.use()
    assert use.idle_bytes == use.held_bytes <= 2 * most
    newest = pool.empty((39 * SMALLEST,), torch.uint8)
    assert pool.use().hits == use.hits + 1  # what was let go is what was idle for longest
    pool.let_go()
    assert pool.use().held_bytes == buffers.size_for(newest.nbytes)
    assert pool.use().idle_bytes == 0


def test_small_tensors_and_those_of_devices_are_not_pooled(monkeypatch: pytest.MonkeyPatch, pool: BufferPool) -> None:
    monkeypatch.setattr(buffers, "POOL", pool)
    assert buffers.empty((SMALLEST - 1,), torch.uint8, torch.device("cpu")).shape == (SMALLEST - 1,)
    assert buffers.zeros((SMALLEST,), torch.uint8, torch.device("meta")).is_meta
    assert buffers.empty((0, 3), torch.float32, torch.device("cpu")).shape == (0, 3)
    assert pool.use() == (0, 0, 0, 0)


def test_what_is_made_in_inference_mode_can_be_written_outside_of_it(pool: BufferPool) -> None:
    with torch.inference_mode():
        x = pool.empty((SMALLEST,), torch.uint8)
    assert not x.is_inference()
    x.requires_grad_(False).fill_(1)


def test_threads_never_share_memory(pool: BufferPool) -> None:
    begin = threading.Barrier(4)

    def work(number: int) -> int:
        begin.wait(20)
        wrong = 0
        for turn in range(300):
            x = pool.empty((SMALLEST + turn % 3 * SMALLEST // 2,), torch.uint8).fill_(number)
            half = x[: SMALLEST // 2]
            del x
            wrong += int((half != number).sum())
        return wrong

    with ThreadPoolExecutor(4) as threads:
        assert [job.result(60) for job in [threads.submit(work, number) for number in range(4)]] == [0] * 4
    use = pool.use()
    assert use.hits + use.misses == 1200
    assert use.hits > 1000
