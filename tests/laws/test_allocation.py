"""What a program takes, and that a whole step takes nothing anew after the second.

Where nothing is used again, a reducer takes one tensor of the gradient's size at most: the mean it returns. And no
codec holds more at any time than its payload and one buffer of the gradient's size.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.codecs import BlockInt, Codec, TopK
from gradwire.codecs.error_memory import ErrorMemory, compress_into
from gradwire.core.collective import Collective
from gradwire.core.key import Key
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import ErrorFeedback, Program, Reducer, ScatterReduce, ShardwiseScatterReduce, Step

from . import checks
from .pools import nothing_is_used_again
from .subjects import codecs, grain_for, reducers, sample

CODECS = codecs()
REDUCERS = reducers()
NUMEL = 1 << 18


class Allocations(TorchDispatchMode):
    """Counts storages of at least `nbytes` that operations return and were not given.

    What an operation frees before it returns is not seen, nor what numba allocates for itself.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.made: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and _storage(t) not in given and t.untyped_storage().nbytes() >= self.nbytes:
                self.made.append(f"{func} {tuple(t.shape)}")
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True, eq=False)
class Counted(checks.Spied):
    """Counts what rank 0's program allocates, and not what the driver does."""

    count: Allocations = field(default_factory=lambda: Allocations(4 * NUMEL))

    def turn(self, program: Program, answer: Tensor | None, step: Step) -> Collective:
        if step.rank:
            return super().turn(program, answer, step)
        with self.count:
            return super().turn(program, answer, step)


def allocations(reducer: Reducer) -> list[str]:
    """What rank 0's program allocates in its third step."""
    grain = grain_for(reducer, NUMEL)
    counted = Counted(reducer, count=Allocations(4 * grain.numel))
    with nothing_is_used_again():
        lockstep = Lockstep(counted, grain, world_size=8)
        for step in range(3):
            counted.count.made.clear()
            lockstep.step([sample("normal", grain.shape, seed=10 * step + rank) for rank in range(8)])
    return counted.count.made


@pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS.keys())
@pytest.mark.draw(5)
def test_only_the_mean_is_allocated(reducer: Reducer) -> None:
    made = allocations(reducer)
    assert len(made) <= 1, made


@pytest.mark.parametrize("half", [ScatterReduce(BlockInt(4)), ShardwiseScatterReduce(TopK(0.01))], ids=repr)
def test_a_shard_of_the_mean_takes_no_tensor_of_the_gradients_size(half: Reducer) -> None:
    assert allocations(ErrorFeedback(half)) == []


@pytest.mark.parametrize("codec", [c for c in CODECS if c.contraction(NUMEL)], ids=str)
def test_error_memory_allocates_the_new_memory_alone(codec: Codec) -> None:
    x, memory, layout = sample("normal", (NUMEL,)), ErrorMemory.zeros(NUMEL), codec.layout(NUMEL)
    out = layout.views(layout.empty(x.device))
    with nothing_is_used_again(), Allocations(4 * NUMEL) as encoding:
        codec.encode_keeping_into(x.clone(), Key(), out)
    with nothing_is_used_again(), Allocations(4 * NUMEL) as both:
        compress_into(codec, x, memory, Key(), out)
    assert len(both.made) == len(encoding.made), both.made  # there the clone, here the memory


def peak_nbytes(run: Callable[[], object]) -> int:
    """The most that `run` holds at once beyond what it was given, of tensors and of arrays.

    Frees of tensors inside an operation are seen; what compiled kernels allocate for themselves, a tile, is not.
    """
    with nothing_is_used_again():
        return _peak_nbytes(run)


def _peak_nbytes(run: Callable[[], object]) -> int:
    run()
    run()
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            before, _ = tracemalloc.get_traced_memory()
            run()
            arrays = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = (event.nbytes() for event in events)  # pyright: ignore[reportAttributeAccessIssue]
    tensors = max(itertools.accumulate(sizes), default=0)
    return arrays + tensors


def test_peak_is_seen() -> None:
    x = torch.ones(NUMEL)
    assert peak_nbytes(lambda: (x + 1) * (x + 2)) >= 3 * x.nbytes
    assert peak_nbytes(lambda: x.numpy() + 1) >= x.nbytes
    assert peak_nbytes(lambda: x.add_(1)) < x.nbytes // 8


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_codec_holds_its_payload_and_one_gradient(codec: Codec) -> None:
    x, key = sample("normal", (NUMEL,)), Key(name="w")
    payload, out = codec.encode(x, key), torch.empty(NUMEL)
    bound = x.nbytes + (1 << 14)  # and what Python needs
    assert peak_nbytes(lambda: codec.encode(x, key)) <= bound + codec.payload_bytes(NUMEL)
    assert peak_nbytes(lambda: codec.decode_into(payload, out, key)) <= bound
    assert peak_nbytes(lambda: codec.accumulate(payload, out, key, 0.5)) <= bound
