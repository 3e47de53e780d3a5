"""Two-shot of sparse payloads: bytes that do not grow with the world, and nothing lost for good."""

from __future__ import annotations

import pytest
import torch

from gradwire import cost, parse
from gradwire.codecs import BlockInt, Chain, TopK
from gradwire.core.grain import ParameterSpec, flat_grain
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import ErrorFeedback, SparseTwoShot

SPEC = [ParameterSpec("w", (1000, 1000), torch.float32, torch.device("cpu"))]


@pytest.mark.parametrize("ranks", [2, 3, 8, 16, 64])
def test_bytes_are_two_payloads_whatever_the_world(ranks: int) -> None:
    """2 (n - 1)/n payloads; each row has a header, half an entry and three roundings to words more."""
    payload = TopK(0.01).payload_bytes(1_000_000)
    found = cost(parse("topk:0.01,exchange=twoshot,guard=off"), SPEC, ranks, grain_numel=1_000_000)
    assert found.wire_bytes <= 2 * payload * (ranks - 1) / ranks + 2 * 36 * ranks
    assert found.wire_bytes >= 1.96 * payload * (ranks - 1) / ranks


@pytest.mark.parametrize("numel", [1, 3, 10, 1001])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_at_density_one_the_mean_is_exact(numel: int, ranks: int) -> None:
    xs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    for mean in Lockstep(SparseTwoShot(TopK(1.0)), flat_grain(numel), ranks).step(xs):
        torch.testing.assert_close(mean, torch.stack(xs).mean(0))


def test_every_shard_sends_its_own_largest() -> None:
    """Ten of a hundred: the five largest of each half, although all of the ten largest stand in the first."""
    x = torch.arange(100.0, 0, -1)
    (mean,) = {tuple(m.tolist()) for m in Lockstep(SparseTwoShot(TopK(0.1)), flat_grain(100), 2).step([x, x])}
    assert torch.tensor(mean).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 50, 51, 52, 53, 54]


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("codec", [TopK(0.05), Chain(TopK(0.05), BlockInt(8))], ids=repr)
@pytest.mark.draw(1)
def test_what_is_left_out_comes_later(codec: TopK | Chain) -> None:
    """All the means of a constant gradient add up to it, less what one drain of the residuals takes."""
    ranks, numel, steps = 4, 400, 400
    lockstep = Lockstep(ErrorFeedback(SparseTwoShot(codec)), flat_grain(numel), ranks)
    xs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    total = torch.zeros(numel)
    for _ in range(steps):
        total += lockstep.step(xs)[0]
    want = torch.stack(xs).mean(0)
    # each entry's residuals are at most what gathers while others drain: a few rounds of 1/density steps, twice
    assert float((total / steps - want).abs().max()) <= 3 * 2 / 0.05 / steps * float(torch.stack(xs).abs().max())
