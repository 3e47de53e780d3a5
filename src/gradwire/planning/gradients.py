"""What a method sends, holds and codes of a layer's gradients, by its own programs on tensors without data."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from gradwire.core.agreement import Agree, Once, Total
from gradwire.core.axis import SubGroups
from gradwire.core.collective import AllGather, Collective
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grain import ParameterSpec
from gradwire.core.state import walk
from gradwire.drivers.cost import requests_of
from gradwire.drivers.parts import Chunked, plan_parts
from gradwire.drivers.plan import GRAIN_NUMEL, Unit, plan
from gradwire.reducers.base import Reducer
from gradwire.reducers.requirements import require_alike
from gradwire.reducers.step import PAST_WARM_UPS, Step
from gradwire.spec import as_method

BUFFER_BYTES = 4
"""Of an element: the buffer that a gradient is copied to before it is coded."""
Matrix = tuple[int, int]


class GradientTraffic(NamedTuple):
    """Of an element of the gradients on one rank, in bytes.

    Attributes:
        requests: collectives of a layer, one of each kind and axis, with the bytes that each is handed for an element.
            An axis is one of the ranks that hold copies; None: all of them.
        state_bytes: that the method keeps from step to step.
        coding_bytes: that coding reads and writes: the gradient in float32 is read and written, and so is the state;
            what collectives are handed is written, and what they bring is read.
    """

    requests: tuple[tuple[Collective, float], ...]
    state_bytes: float
    coding_bytes: float


@functools.cache
def method_of(spec: str) -> Reducer:
    """Return the method of a spec.

    Raises:
        SpecError, CompositionError: a spec that cannot be read, or whose ranks would not end with the same gradient.
    """
    return require_alike(as_method(spec))


@functools.cache
def shard_method_of(spec: str) -> Reducer:
    """Return the half of a method that leaves each rank with its shard of the mean.

    Raises:
        SpecError: a method without that half, such as one that wants whole matrices.
    """
    method = method_of(spec)
    try:
        half = method.scattered()
    except CompositionError as error:
        raise _no_shards(spec) from error
    if half.scope == "tensor":
        raise _no_shards(spec)
    return half


def _no_shards(spec: str) -> SpecError:
    return SpecError(
        f"method={spec} does not end with a shard of the mean on each rank: take sharding=none with it, or a method "
        "such as int4, fp8 or topk:0.01"
    )


@functools.lru_cache(maxsize=4096)
def gradient_traffic(spec: str, matrices: tuple[Matrix, ...], ranks: int, shards: bool) -> GradientTraffic:
    """Return what a method sends, holds and codes, for an element of gradients that are these matrices.

    Methods that code elements have grains of 2^20 elements in models of this size, which are all alike, so one grain
    tells. Methods that code matrices are asked for each matrix. What is sent once a step, to agree on something, is
    left out.

    Args:
        spec: of the method.
        matrices: of a layer, as rows and columns.
        ranks: that hold copies of them.
        shards: whether each rank wants its shard of the mean alone.

    Raises:
        SpecError, CompositionError: a method that is unknown, that needs more ranks, or that has no shards.

    >>> found = gradient_traffic("int4,ef=off", ((4096, 4096),), 8, shards=False)
    >>> [(type(request).__name__, round(nbytes, 2)) for request, nbytes in found.requests]
    [('AllToAll', 0.52), ('AllGather', 0.06)]
    """
    method = shard_method_of(spec) if shards else method_of(spec)
    method.require_ranks(ranks)
    step = Step(PAST_WARM_UPS, 0, ranks)
    units = _units(method, matrices, ranks, shards)
    numel = sum(unit.grain.numel for unit in units)
    asked: dict[tuple[type[Collective], SubGroups | None], list[Collective]] = {}
    for request in chain.from_iterable(requests_of(unit, step) for unit in units):
        if not isinstance(request, Agree | Total | Once):
            asked.setdefault((type(request), request.axis), []).append(request)
    requests = tuple((alike[0], sum(each.nbytes for each in alike) / numel) for alike in asked.values())
    states = chain.from_iterable(walk(unit.reducer.init(unit.grain, step)) for unit in units)
    state = sum(leaf.tensor.nbytes for _, leaf in states) / numel
    moved = sum(nbytes * (1 + _copies(request, ranks)) for request, nbytes in requests)
    return GradientTraffic(requests, state, 2 * 4 + 2 * state + moved)


def _copies(request: Collective, ranks: int) -> int:
    """How many times what it is handed a collective brings to a rank."""
    if not isinstance(request, AllGather):
        return 1
    return ranks if request.axis is None else request.axis.size_of(0)


def _units(method: Reducer, matrices: Sequence[Matrix], ranks: int, shards: bool) -> list[Unit]:
    meta = torch.device("meta")
    if method.scope == "tensor":
        specs = [ParameterSpec(f"layer.{i}", shape, torch.float32, meta) for i, shape in enumerate(matrices)]
        return list(plan(specs, method).units)
    numel = min(GRAIN_NUMEL, sum(map(math.prod, matrices)))
    grain = ParameterSpec("layer", (numel,), torch.float32, meta)
    if not shards:
        return list(plan([grain], method, numel).units)
    chunk = -(-numel // ranks)
    return list(plan_parts([[Chunked(grain, chunk)]], method, range(ranks), chunk * ranks).units)
