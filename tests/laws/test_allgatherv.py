"""An all-gather of what payloads use: the mean of an all-gather bit for bit, in fewer bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import Lockstep, cost, parse
from gradwire.codecs import Codec, Threshold, TopK
from gradwire.core.collective import AllGather as Gather
from gradwire.core.grain import ParameterSpec, flat_grain
from gradwire.core.state import walk
from gradwire.reducers import AllGatherExchange, AllGatherVExchange, ErrorFeedback

from .checks import Spied, check_conservation, check_non_finite
from .subjects import CPU, DTYPES, bits, codecs, sample


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", [*codecs(), TopK(0.1, indices="rice")], ids=repr)
@pytest.mark.draw(6)
def test_the_mean_is_that_of_an_all_gather(codec: Codec, dtype: torch.dtype) -> None:
    grain = flat_grain(2571, dtype=dtype)
    xs = [sample(kind, grain.shape, dtype, seed=1) for kind in ("normal", "sparse", "zeros")]
    short, whole = (Lockstep(exchange(codec), grain, 3) for exchange in (AllGatherVExchange, AllGatherExchange))
    for mean, want in zip(short.step(xs), whole.step(xs), strict=True):
        assert torch.equal(bits(mean), bits(want))


def gathered_bytes(lockstep: Lockstep, xs: list[Tensor]) -> int:
    """What each rank hands to the gather of a step; the same for all."""
    assert isinstance(lockstep.reducer, Spied)
    lockstep.reducer.asked.clear()
    check_conservation(lockstep, xs)
    (size,) = {request.nbytes for request in lockstep.reducer.seen if isinstance(request, Gather)}
    return size


def test_only_what_the_fullest_payload_uses_travels() -> None:
    """Of room for 500 entries rank 1 fills 20 and rank 0 less: about 20 values and 20 short gaps, not 500."""
    xs = [torch.zeros(10_000), torch.zeros(10_000)]
    xs[0][:5], xs[1][::500] = 1.0, 2.0
    grain, whole = flat_grain(10_000), Threshold(0.5).payload_bytes(10_000)
    size = gathered_bytes(Lockstep(Spied(ErrorFeedback(AllGatherVExchange(Threshold(0.5)))), grain, 2), xs)
    values_begin = Threshold(0.5).layout(10_000).offsets[1]
    assert values_begin < size <= values_begin + 4 * 20 < whole
    nothing = [torch.zeros(10_000)] * 2
    assert gathered_bytes(Lockstep(Spied(AllGatherVExchange(Threshold(0.5))), grain, 2), nothing) <= values_begin


def test_residuals_are_those_of_an_all_gather_and_bad_steps_leave_none() -> None:
    grain = flat_grain(1000)
    steps = [[sample("heavy", (1000,), seed=10 * step + rank) for rank in range(3)] for step in range(4)]
    both = [Lockstep(parse(f"threshold:0.3,exchange={exchange}"), grain, 3) for exchange in ("allgatherv", "allgather")]
    for xs in steps:
        for lockstep in both:
            lockstep.step(xs)
    for one, other in zip(both[0].states, both[1].states, strict=True):
        assert all(torch.equal(a.tensor, b.tensor) for (_, a), (_, b) in zip(walk(one), walk(other), strict=True))
    bad = [x.clone() for x in steps[0]]
    bad[2][7] = float("nan")
    check_non_finite(both[0], steps[0], bad, all_nan=True)


def test_cost_is_the_most_that_can_travel() -> None:
    specs = [ParameterSpec("w", (100, 100), torch.float32, CPU)]
    short, whole = (cost(parse(f"threshold:0.3,exchange={e}"), specs, 4) for e in ("allgatherv", "allgather"))
    assert short.payload_bytes == whole.payload_bytes + 8
