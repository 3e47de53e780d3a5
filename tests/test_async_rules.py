"""What a server makes of a push: rules and rates against the formulas of their papers."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from async_cases import START, gaussian, simulation
from gradwire import CompositionError, StateError
from gradwire.asynchronous import (
    ASGD,
    DCASGD,
    AdaptiveDCASGD,
    Bounded,
    DelayedNesterov,
    Free,
    Geometric,
    Hyperbolic,
    Inverse,
    Pace,
    ParameterServer,
    Rate,
    Relative,
    Result,
    RootHyperbolic,
    ServerRule,
)
from gradwire.asynchronous.methods import ASGDOptions, Compensated
from gradwire.asynchronous.rules import Moment
from gradwire.core.renamed import with_former_names
from gradwire.sync import DiLoCo
from gradwire.sync.outer import Rates

DOUBLE = torch.float64


def vectors(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(50, generator=generator, dtype=DOUBLE) for _ in range(count)]


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [
        (Inverse(), [0.1, 0.1, 0.05, 0.1 / 16]),
        (Hyperbolic(), [0.1, 0.05, 0.1 / 3, 0.1 / 17]),
        (RootHyperbolic(), [0.1, 0.1 / 2**0.5, 0.1 / 3**0.5, 0.1 / 17**0.5]),
        (Geometric(0.9), [0.1, 0.09, 0.081, 0.1 * 0.9**16]),
    ],
)
def test_rates_fall_with_staleness(rate: Rate, wanted: list[float]) -> None:
    for tau, eta in zip((0, 1, 2, 16), wanted, strict=True):
        w, g = vectors(2)
        expected = w - eta * g
        ASGD(0.1, rate).move_(w, g, w, {}, Moment(20, tau))
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("workers", [1, 4, 16])
def test_the_rate_of_zhang_et_al_divides_by_staleness_alone(workers: int) -> None:
    """alpha_0 / tau: as many pushes as workers, at the staleness that they measured, are one step at alpha_0."""
    w, g = torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
    for version in range(workers):
        ASGD(0.5, Inverse()).move_(w, g, w, {}, Moment(version, workers))
    assert float(w) == pytest.approx(-0.5)


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
@pytest.mark.parametrize("rate", get_args(get_type_hints(ASGDOptions)["rate"]))
def test_n_pushes_of_a_spec_move_as_far_as_one_step(rate: Any, workers: int) -> None:
    """Where workers are equally fast, and where they wait; those of a slow one are shortened, and none is longer."""
    rule, even = ASGDOptions(rate=rate).rule(workers), [1.0 + 1e-3 * worker for worker in range(workers)]

    def by(staleness: int) -> float:
        w = torch.zeros(1, dtype=DOUBLE)
        rule.move_(w, torch.ones(1, dtype=DOUBLE), w, {}, Moment(99, staleness))
        return -workers * float(w)

    def moved(seconds: list[float], pace: Pace) -> float:
        start = {"x": torch.zeros(1, dtype=DOUBLE)}
        push = Result({"x": torch.ones(1, dtype=DOUBLE)}, loss=0.0)
        run = simulation(rule, seconds, lambda parameters, grant: push, start, pace=pace)
        run.run(pushes=10 * workers)
        before = float(run.server.values)
        run.run(pushes=50 * workers)
        return (before - float(run.server.values)) / 50

    assert [by(staleness) for staleness in range(workers)] == pytest.approx([1.0] * workers)
    assert moved(even, Free()) == pytest.approx(1.0, rel=0.005)
    assert moved(even, Bounded(0)) == pytest.approx(1.0)
    assert moved([4.0, *even[1:]], Bounded(4)) == pytest.approx(1.0, abs=1e-3)
    assert 0.8 < moved([4.0, *even[1:]], Free()) <= 1.0 + 1e-9
    inverse = max(1, workers - 1) / (2 * workers - 1)
    falls = {"constant": 1.0, "inverse": inverse, "hyperbolic": 0.5, "root": 0.5**0.5}
    assert by(2 * workers - 1) == pytest.approx(falls[rate])


def test_a_usual_staleness_is_none_below_0() -> None:
    with pytest.raises(CompositionError, match="0 or more"):
        Relative(Hyperbolic(), -1)


def test_delay_compensation_is_the_papers() -> None:
    w, g, pulled = vectors(3)
    expected = [float(a - 0.3 * (b + 0.04 * b * b * (a - c))) for a, b, c in zip(w, g, pulled, strict=True)]
    DCASGD(0.3, 0.04).move_(w, g, pulled, {}, Moment(5, 2))
    assert w.tolist() == pytest.approx(expected, abs=1e-15)


def test_adaptive_delay_compensation_is_the_papers() -> None:
    w, pulled = vectors(2)
    rule = AdaptiveDCASGD(0.3, 2.0, 0.95)
    memory, expected, square = rule.memory(w), w.tolist(), [0.0] * 50
    for version, g in enumerate(vectors(4)):
        rule.move_(w, g, pulled, memory, Moment(version, 2))
        square = [0.95 * v + (1 - 0.95) * float(b) ** 2 for v, b in zip(square, g, strict=True)]
        expected = [
            a - 0.3 * (float(b) + 2.0 / (v + 1e-7) ** 0.5 * float(b) ** 2 * (a - float(c)))
            for a, b, c, v in zip(expected, g, pulled, square, strict=True)
        ]
    assert w.tolist() == pytest.approx(expected, abs=1e-12)


def compensated(scale: float, dtype: torch.dtype, rule: ServerRule) -> Tensor:
    """What the last of five pushes of that scale makes of w = 0, where w_pulled was elsewhere."""
    pulled = vectors(1)[0].to(dtype)
    w, memory = torch.zeros_like(pulled), rule.memory(pulled)
    for version, g in enumerate(vectors(5)):
        w.zero_()
        rule.move_(w, g.to(dtype) * scale, pulled, memory, Moment(version, 2))
    return w


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_compensation_is_the_same_share_of_pushes_of_any_length(dtype: torch.dtype) -> None:
    """Exactly so for powers of two, from 2^-40 = 9e-13 to 2^13 = 8192."""
    rule = Compensated(strength=0.5).rule(4)
    want = compensated(1.0, dtype, rule)
    plain = compensated(1.0, dtype, ASGD(0.25))
    assert float((want - plain).norm() / plain.norm()) > 0.1
    for power in range(-40, 14):
        assert torch.equal(compensated(2.0**power, dtype, rule), want * 2.0**power)
    for power in range(-12, 5):
        torch.testing.assert_close(compensated(10.0**power, dtype, rule) / 10.0**power, want, rtol=1e-5, atol=1e-7)


def test_compensation_of_nothing_is_nothing_and_none_overflows() -> None:
    rule, zero = Compensated(strength=2.0).rule(1), torch.zeros(4)
    memory = rule.memory(zero)
    w = torch.tensor([1.0, -2.0, 0.0, 1e30])
    rule.move_(w, zero, w - 1.0, memory, Moment(0, 1))
    assert w.tolist() == pytest.approx([1.0, -2.0, 0.0, 1e30])
    w, g = torch.zeros(4), torch.tensor([1e30, 1e-30, 0.0, -3e-23])
    for version in range(3):
        rule.move_(w, g, w - 1.0, memory, Moment(version, 1))
        assert bool(w.isfinite().all())
        assert bool(memory["mean_square"].isfinite().all())
    assert w[2] == 0
    with pytest.raises(CompositionError, match="epsilon"):
        AdaptiveDCASGD(0.1, epsilon=-1.0)


def test_a_server_of_before_goes_on_with_the_epsilon_that_it_had() -> None:
    """It was always 1e-7, and no snapshot said so."""
    old, new = (ParameterServer(START, AdaptiveDCASGD(0.25, 0.5), workers=1) for _ in range(2))
    saved = old.state_dict()
    saved["reducer"] = with_former_names(saved["reducer"])
    assert "AdaptiveDCASGD(lr=0.25, strength=0.5, decay=0.95)" in saved["reducer"]
    new.load_state_dict(saved)
    with pytest.raises(StateError, match=r"this is .*epsilon=0\.0"):
        ParameterServer(START, AdaptiveDCASGD(0.25, 0.5, epsilon=0.0), workers=1).load_state_dict(saved)


def test_fresh_gradients_need_no_compensation() -> None:
    for rule in (DCASGD(0.1, 5.0), AdaptiveDCASGD(0.1)):
        w, g = vectors(2)
        expected = w - 0.1 * g
        rule.move_(w, g, w.clone(), rule.memory(w), Moment(0, 0))
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.25])
def test_delayed_nesterov_is_diloco_of_the_mean_of_n_pushes(spread: float) -> None:
    """With the same g in each push; c only says when momentum is applied, so N pushes move w as far."""
    rule, outer = DelayedNesterov(every=4, lr=0.7, momentum=0.9, spread=spread), DiLoCo(0.7, 0.9)
    w, x = vectors(1)[0], vectors(1)[0]
    memory, theirs, behind = rule.memory(w), outer.memory(x), torch.zeros_like(x)
    for turn, g in enumerate(vectors(3)):
        for push in range(4):
            rule.move_(w, g, w, memory, Moment(4 * turn + push, 3))
        before = theirs["momentum"].clone()
        outer.move_(x, -g, theirs, Rates(0.1, 0.1))
        # the pushes between have the share c of the momentum of before
        behind += 0.7 * 0.9 * 3 * spread * (theirs["momentum"] - before)
        torch.testing.assert_close(w, x - behind, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("every", "c"), [(1, 0.0), (3, 0.0), (4, 0.1), (4, 0.25)])
def test_delayed_nesterov_is_algorithm_3_of_its_paper(every: int, c: float) -> None:
    """Number by number, with another g in each push, written as Liu et al. 2024 have it."""
    beta, lr = 0.9, 0.7
    rule, w, _ = DelayedNesterov(every, lr, beta, spread=c), *vectors(2)
    memory, theta = rule.memory(w), w.tolist()
    momentum, gathered = [0.0] * len(theta), [0.0] * len(theta)
    for t, g in enumerate(vectors(3 * every + 1)):
        rule.move_(w, g, w, memory, Moment(t, 2))
        for i, own in enumerate(g.tolist()):
            gathered[i] += own
            if (t + 1) % every == 0:
                momentum[i] = beta * momentum[i] + gathered[i] / every
                theta[i] -= lr * ((1 - c * every + c) * beta * momentum[i] + own / every)
                gathered[i] = 0.0
            else:
                theta[i] -= lr * (c * beta * momentum[i] + own / every)
    assert w.tolist() == pytest.approx(theta, rel=1e-12)


def noisy_loss(rule: ServerRule, staleness: int, pushes: int = 1200) -> float:
    """The loss at the end, with that staleness for every push."""
    start = {"x": torch.full((20,), 2.0, dtype=DOUBLE)}
    run = simulation(rule, [1.0] * (staleness + 1), gaussian, start)
    run.run(pushes=pushes)
    assert {one.staleness for one in run.history[staleness + 1 :]} == {staleness}
    return float(run.server.values.square().mean() / 2)


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("staleness", [8, 16, 32])
def test_delay_compensation_converges_where_plain_asgd_diverges(staleness: int) -> None:
    """A convex problem whose squared gradients are its Hessian on average; 2 is the loss at the start."""
    assert noisy_loss(ASGD(0.2), staleness) > 1e3
    assert noisy_loss(DCASGD(0.2, 0.5), staleness) < 0.2
    assert noisy_loss(AdaptiveDCASGD(0.2, 0.5), staleness) < 0.2
