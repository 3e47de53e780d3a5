"""Thresholds and Deep Gradient Compression: what each does that no law says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradwire import kernels, parse
from gradwire.codecs import Threshold, TopK
from gradwire.core import saved
from gradwire.core.errors import CompositionError, PayloadError, StateError
from gradwire.core.grain import Grain, Segment, flat_grain
from gradwire.core.key import Key
from gradwire.core.renamed import with_former_names
from gradwire.core.state import Leaf, State
from gradwire.drivers.lockstep import Lockstep
from gradwire.drivers.virtual import VirtualRanks
from gradwire.kernels.selection import reference
from gradwire.reducers import (
    DGC,
    AdaptiveThreshold,
    AllGatherExchange,
    ErrorFeedback,
    MomentumCorrection,
    Scheduled,
    SparseTwoShot,
)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def leaf(state: State, *path: str) -> Tensor:
    node: Leaf | State = state
    for name in path:
        assert isinstance(node, State)
        node = node[name]
    assert isinstance(node, Leaf)
    return node.tensor


# Threshold


@given(
    numel=st.sampled_from([1, 31, 32, 33, 257, 5000]),
    tau=st.sampled_from([0.0, 0.5, 1.0, 2.5, 9.0]),
    share=st.floats(0, 1),
    seed=st.integers(0, 50),
)
def test_at_least_takes_all_or_the_largest(numel: int, tau: float, share: float, seed: int) -> None:
    x, most = (normal(numel, seed) * 2).round() / 2, round(share * numel)
    order = torch.sort(x.abs(), descending=True, stable=True).indices[:most]
    want = order[x.abs()[order] >= tau].sort().values
    for module in (kernels, reference):
        values = torch.empty(most)
        indices = module.at_least(x, torch.tensor(tau), values)
        assert indices[: want.numel()].tolist() == want.tolist()
        assert torch.equal(values[: want.numel()], x[want])
        assert indices[want.numel() :].eq(numel).all()
        assert values[want.numel() :].eq(0).all()


def test_nan_is_above_every_threshold() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), 0.0])
    for module in (kernels, reference):
        values = torch.empty(3)
        indices = module.at_least(x, torch.tensor(5.0), values)
        assert indices.tolist()[:2] == [1, 2]
        assert values[0].isnan()
        assert values[1].isinf()


@pytest.mark.parametrize(("tau", "cap"), [(0.0, 0.1), (1.0, 0.1), (1.0, 0.5), (2.0, 0.5), (9.0, 0.5)])
def test_what_a_threshold_leaves_is_bounded_as_declared(tau: float, cap: float) -> None:
    codec, x = Threshold(tau, cap), normal(2000)
    left = x - codec.decode(codec.encode(x), x)
    bound = codec.absolute_error(x.numel())
    assert bound is not None
    assert float(left.square().sum()) <= max(x.numel() * bound**2, (1 - cap) * float(x.square().sum()))
    if int((x.abs() >= tau).sum()) <= cap * x.numel():
        assert float(left.abs().max()) < tau


def test_a_channel_may_cut_what_a_threshold_does_not_send() -> None:
    codec, x = Threshold(2.5, cap=0.5), normal(4000)
    layout = codec.layout(x.numel())
    wire = layout.empty(x.device)
    codec.encode_into(x, Key(), layout.views(wire))
    used = codec.used_bytes(layout.views(wire), x.numel())
    assert used < layout.nbytes / 2
    assert not bool(wire[used:].any())


def test_damaged_counts_are_refused() -> None:
    codec, x = Threshold(1.0, cap=0.2), normal(1000)
    for more in (1, 1 << 20, -(1 << 30)):
        payload = codec.encode(x)
        payload[0][0] += more << 32
        with pytest.raises(PayloadError):
            codec.decode(payload, x)


@pytest.mark.parametrize("spec", ["threshold:-1", "threshold:nan", "threshold:inf", "threshold:1,cap=0"])
def test_thresholds_that_are_none_are_refused(spec: str) -> None:
    with pytest.raises(CompositionError, match=r"magnitude|fraction"):
        parse(spec)


# Adaptive threshold


def test_an_adaptive_threshold_sends_its_density() -> None:
    grain, density = flat_grain(20_000), 0.02
    lockstep = Lockstep(ErrorFeedback(AdaptiveThreshold(density)), grain, 1)
    shares: list[float] = []
    for step in range(300):
        (result,) = lockstep.reduce([normal(grain.numel, step)])
        shares.append(float((result.value != 0).float().mean()))
    # A sample's share is off by 1/sqrt(32), less by averaging over the 20 steps that tau remembers and the 100 here;
    # what is left is for tau's lag behind residuals, which have settled after a few 1/density steps.
    assert 0.8 * density <= sum(shares[200:]) / 100 <= 1.2 * density
    assert max(shares) <= 2 * density + 1 / grain.numel


def test_its_tau_follows_and_outlives_its_grain() -> None:
    whole = flat_grain(4000, name="w")
    lockstep = Lockstep(AdaptiveThreshold(0.1, memory=0.5), whole, 1)
    x = normal(4000)
    for scale in (1.0, 1.0, 8.0, 8.0, 8.0, 8.0):
        lockstep.step([scale * x])
    tau = leaf(lockstep.states[0], "tau")
    assert 0.8 * 8 * 1.645 <= float(tau) <= 1.2 * 8 * 1.645  # the 90% quantile of |normal|
    kept = saved.save([(whole, lockstep.states[0])], rank=0)
    parts = [
        Grain("w", (Segment("w", start, numel, 0),), (numel,), torch.float32, torch.device("cpu"))
        for start, numel in ((0, 3000), (3000, 1000))
    ]
    fresh = [(part, Lockstep(AdaptiveThreshold(0.1), part, 1).states[0]) for part in parts]
    assert all(torch.equal(leaf(state, "tau"), tau) for state in saved.load_all(fresh, kept, 0))


# Deep Gradient Compression


def by_the_book(gs: list[Tensor], k: int, m: float) -> tuple[list[Tensor], Tensor, Tensor]:
    """The paper's Algorithm for one worker, spelled out."""
    u, v, updates = torch.zeros_like(gs[0]), torch.zeros_like(gs[0]), list[Tensor]()
    for g in gs:
        u = m * u + g
        v = v + u
        mask = torch.zeros_like(v, dtype=torch.bool)
        mask[v.abs().topk(k).indices] = True
        updates.append(torch.where(mask, v, 0.0))
        u, v = torch.where(mask, 0.0, u), torch.where(mask, 0.0, v)
    return updates, u, v


def test_dgc_is_the_papers() -> None:
    grain, m = flat_grain(500), 0.9
    gs = [normal(500, seed) for seed in range(12)]
    lockstep = Lockstep(MomentumCorrection(AllGatherExchange(TopK(0.02)), m), grain, 1)
    updates = [lockstep.step([g])[0] for g in gs]
    want, u, v = by_the_book(gs, 10, m)
    for got, update in zip(updates, want, strict=True):
        torch.testing.assert_close(got, update)
    torch.testing.assert_close(leaf(lockstep.states[0], "velocity"), u)
    torch.testing.assert_close(leaf(lockstep.states[0], "residual"), v)


def test_masking_leaves_alone_what_waits_and_what_never_had_a_gradient() -> None:
    """Entry 0 is sent each step, 1 waits with its momentum, 2 has its first gradient after five steps."""
    reducer = MomentumCorrection(AllGatherExchange(TopK(1 / 3)), momentum=0.5)
    ranks = Lockstep(reducer, flat_grain(3), 1)
    waits, late = [0.0, 0.0], [0.0, 0.0]  # u and v of the entries 1 and 2
    for step in range(10):
        gradients = (1.0, 1.0 if step >= 5 else 0.0)
        ranks.step([torch.tensor([100.0, *gradients])])
        for entry, gradient in zip((waits, late), gradients, strict=True):
            entry[0] = 0.5 * entry[0] + gradient
            entry[1] += entry[0]
        state = ranks.states[0]
        assert leaf(state, "velocity").tolist() == [0.0, waits[0], late[0]]
        assert leaf(state, "residual").tolist() == [0.0, waits[1], late[1]]


def test_a_velocity_that_cancels_to_the_last_bit_is_forgotten() -> None:
    """2, then -3 with m = 0.5: v = 2 + (1 - 3) = 0 and u = -2, of which nothing was sent; u is taken for sent."""
    ranks = Lockstep(MomentumCorrection(AllGatherExchange(TopK(0.5)), momentum=0.5), flat_grain(2), 1)
    for gradient in (2.0, -3.0):
        ranks.step([torch.tensor([100.0, gradient])])
    assert leaf(ranks.states[0], "velocity").tolist() == leaf(ranks.states[0], "residual").tolist() == [0.0, 0.0]


def test_without_momentum_it_is_error_feedback() -> None:
    grain = flat_grain(300)
    ours, theirs = (
        Lockstep(reducer, grain, 3)
        for reducer in (
            MomentumCorrection(AllGatherExchange(TopK(0.1)), 0.0),
            ErrorFeedback(AllGatherExchange(TopK(0.1))),
        )
    )
    for step in range(5):
        xs = [normal(300, 3 * step + rank) for rank in range(3)]
        assert torch.equal(ours.step(xs)[0], theirs.step(xs)[0])


def test_clipping_bounds_what_is_added() -> None:
    grain, ranks = flat_grain(400), 4
    lockstep = Lockstep(MomentumCorrection(AllGatherExchange(TopK(1.0)), 0.0, clip=2.0), grain, ranks)
    large, small = [100 * normal(400, rank) for rank in range(ranks)], [1e-3 * normal(400, r) for r in range(ranks)]
    want = sum(x / x.norm() * 2.0 * ranks**0.5 for x in large) / ranks
    torch.testing.assert_close(lockstep.step(large)[0], want)
    torch.testing.assert_close(lockstep.step(small)[0], torch.stack(small).mean(0))
    assert not bool(lockstep.step([torch.zeros(400)] * ranks)[0].any())


def dense(**settings: Any) -> MomentumCorrection:
    """Clipping alone: everything is sent, without momentum."""
    return MomentumCorrection(AllGatherExchange(TopK(1.0)), 0.0, **settings)


@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
def test_a_clip_is_the_norm_at_which_independent_gradients_begin_to_be_clipped(ranks: int) -> None:
    xs = [normal(10_000, rank) for rank in range(ranks)]
    mean = torch.stack(xs).mean(0)
    for share in (0.5, 1.0, 2.0):
        lockstep = Lockstep(dense(clip=share * float(mean.norm())), flat_grain(10_000), ranks)
        assert float(lockstep.step(xs)[0].norm() / mean.norm()) == pytest.approx(min(1.0, share), rel=0.03)


@pytest.mark.parametrize("ranks", [1, 8])
def test_clipping_is_algorithm_4_of_the_paper(ranks: int) -> None:
    """Parts that are divided by n are clipped at threshold / sqrt(n), and added up."""
    xs, threshold = [3.0 ** (rank % 3) * normal(400, rank) for rank in range(ranks)], 30.0
    parts = [x / ranks for x in xs]
    want = sum(part * min(1.0, threshold * ranks**-0.5 / float(part.norm())) for part in parts)
    torch.testing.assert_close(Lockstep(dense(clip=threshold), flat_grain(400), ranks).step(xs)[0], want)


def test_a_save_goes_on_with_what_its_clip_was_of() -> None:
    """Up to version 0.2.0 `clip` was that of a sum, and no save said so."""
    grain, ranks = flat_grain(400), 4
    schedule = [[normal(400, 10 * step + rank) for rank in range(ranks)] for step in range(4)]

    def made(spec: str) -> Lockstep:
        return Lockstep(parse(spec), grain, ranks)

    first = made("dgc:0.1,clip=2,clip_of=sum")
    for xs in schedule[:2]:
        first.step(xs)
    states = [state | {"reducer": with_former_names(state["reducer"])} for state in first.state_dicts()]
    assert states[0]["reducer"] == "Guard(inner=DGC(density=0.1, momentum=0.9, clip=2.0, ramp=0))"
    later = made("dgc:0.1,clip=2")
    later.load_state_dicts(states)
    assert repr(later.reducer) == repr(first.reducer)
    again = made("dgc:0.1,clip=2")
    again.load_state_dicts(later.state_dicts())
    other = made("dgc:0.1,clip=2")
    for xs in schedule[2:]:
        want = first.step(xs)[0]
        assert torch.equal(later.step(xs)[0], want)
        assert torch.equal(again.step(xs)[0], want)
        assert not torch.equal(other.step(xs)[0], want)
    with pytest.raises(StateError, match="clip=3"):
        made("dgc:0.1,clip=3").load_state_dicts(states)


def test_clipping_sees_the_whole_gradient_and_not_a_grain() -> None:
    """Two layers in grains of their own: both are scaled by the norm of the two together."""
    model, ranks = nn.ModuleDict({"a": nn.Linear(20, 5, bias=False), "b": nn.Linear(5, 8, bias=False)}), 4
    clipped = MomentumCorrection(AllGatherExchange(TopK(1.0)), 0.0, clip=2.0)
    virtual = VirtualRanks(clipped, model, ranks, grain_numel=50)
    assert len(virtual.plan.units) > 2
    large, small = [100 * normal(100, rank) for rank in range(ranks)], [normal(40, 9 + rank) for rank in range(ranks)]
    own = [{"a.weight": a.view(5, 20), "b.weight": b.view(8, 5)} for a, b in zip(large, small, strict=True)]
    virtual.step(own)
    norms = [math.hypot(*(float(g.norm()) for g in gradients.values())) for gradients in own]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        want = sum(g[name] * 2.0 * ranks**0.5 / norm for g, norm in zip(own, norms, strict=True)) / ranks
        torch.testing.assert_close(parameter.grad, want)


def test_the_density_ramps_down() -> None:
    lockstep = Lockstep(DGC(0.01, ramp=2), flat_grain(10_000), 2)
    counts = [int((lockstep.step([normal(10_000, s)] * 2)[0] != 0).sum()) for s in range(8)]
    assert counts == [2500, 2500, 625, 625, 156, 156, 100, 100]


def test_a_step_rolled_back_leaves_momentum_as_it_was() -> None:
    lockstep = Lockstep(parse("dgc:0.1"), flat_grain(200), 2)
    lockstep.step([normal(200, 1), normal(200, 2)])
    again = Lockstep(parse("dgc:0.1"), flat_grain(200), 2)
    again.step([normal(200, 1), normal(200, 2)])
    lockstep.step([normal(200, 3), torch.full((200,), float("inf"))])
    again.index += 1
    xs = [normal(200, 4), normal(200, 5)]
    assert torch.equal(lockstep.step(xs)[0], again.step(xs)[0])


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CompositionError, match="keeps one already"):
        MomentumCorrection(ErrorFeedback(AllGatherExchange(TopK(0.1))))
    with pytest.raises(CompositionError, match="elementwise contraction"):
        MomentumCorrection(AllGatherExchange(TopK(0.1, "fp16")))
    with pytest.raises(CompositionError, match="momentum"):
        parse("dgc:0.1,momentum=1")
    with pytest.raises(CompositionError, match="clip"):
        parse("dgc:0.1,clip=-1")
    with pytest.raises(CompositionError, match="says nothing without clip="):
        parse("dgc:0.1,clip_of=sum")
    with pytest.raises(CompositionError, match="CompressionWarmUp"):
        Scheduled(((3, AllGatherExchange(TopK(0.1))), (0, SparseTwoShot(TopK(0.1)))))
    with pytest.raises(CompositionError, match="at least one stage"):
        Scheduled(())


def test_a_header_that_says_too_few_is_read_alike_by_all() -> None:
    x, codec = normal(2000), Threshold(0.5, cap=0.5)
    payload = codec.encode(x)
    payload[0][0] -= 100 << 32  # as if a hundred entries were not there
    decoded, added = codec.decode(payload, x), torch.zeros_like(x)
    codec.accumulate(payload, added, Key())
    assert torch.equal(decoded, added)
