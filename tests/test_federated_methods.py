"""The mathematics of federations: closed forms, server steps against their formulas, and laws of what is sent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from federations import CLIENTS, Point, centres, examples, on_quadratics
from gradwire.core.errors import CompositionError
from gradwire.federated import (
    SGD,
    Client,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FederatedMethod,
    Federation,
    FedNova,
    FedProx,
    FedYogi,
    Mean,
    Scaffold,
    Server,
    ServerStep,
    Simulation,
)
from gradwire.federated.local import normaliser
from gradwire.federated.methods import CONTROL, MODEL, ClientMessage, Vectors, Work

LR, MU, ROUNDS = 0.1, 0.5, 100
TAU = torch.arange(1, CLIENTS + 1, dtype=torch.float64)

# What one round and all rounds come to, by arithmetic that shares nothing with the code ---------------------------


def share(rate: float) -> Tensor:
    """How far tau_i local steps of that rate bring client i from x to where they lead, 0 to 1."""
    return 1 - (1 - rate) ** TAU


def weighted(weights: Tensor, rows: Tensor) -> Tensor:
    return (weights[:, None] * rows).sum(0) / weights.sum()


@dataclass
class Closed:
    """What a round with the clients S makes of x, and where all rounds with all clients lead."""

    round: Callable[[Tensor, Tensor], Tensor]
    limit: Tensor


def fed_avg() -> Closed:
    def one(x: Tensor, S: Tensor) -> Tensor:
        return x + weighted(examples()[S], (share(LR)[:, None] * (centres() - x))[S])

    return Closed(one, weighted(examples() * share(LR), centres()))


def fed_prox() -> Closed:
    pull = share(LR * (1 + MU)) / (1 + MU)  # y goes to (e + mu x) / (1 + mu), at the rate lr (1 + mu)

    def one(x: Tensor, S: Tensor) -> Tensor:
        return x + weighted(examples()[S], (pull[:, None] * (centres() - x))[S])

    return Closed(one, weighted(examples() * share(LR * (1 + MU)), centres()))


def fed_nova() -> Closed:
    pull = share(LR) / TAU

    def one(x: Tensor, S: Tensor) -> Tensor:
        effective = (examples() * TAU)[S].sum() / examples()[S].sum()
        return x + effective * weighted(examples()[S], (pull[:, None] * (centres() - x))[S])

    return Closed(one, weighted(examples() * share(LR) / TAU, centres()))


def scaffold() -> Closed:
    controls = torch.zeros(CLIENTS, 3, dtype=torch.float64)  # c is their mean, which no formula here updates

    def one(x: Tensor, S: Tensor) -> Tensor:
        mean = controls.mean(0)
        changes = share(LR)[:, None] * (centres() + controls - mean - x)
        controls[S] += (-mean - changes / (LR * TAU[:, None]))[S]
        return x + changes[S].mean(0)

    return Closed(one, centres().mean(0))


CLOSED: dict[type[FederatedMethod], Callable[[], Closed]] = {
    FedAvg: fed_avg,
    FedProx: fed_prox,
    FedNova: fed_nova,
    Scaffold: scaffold,
}


def check_closed_form(method: FederatedMethod, closed: Callable[[], Closed]) -> None:
    """Rounds of some clients, and the limit with all of them, are what the arithmetic says."""
    simulation, wanted = on_quadratics(method=method, sample=4, seed=2), closed()
    x = next(simulation.server.model.parameters())
    for _ in range(6):
        expected = wanted.round(x.detach().clone(), torch.tensor(simulation.round().clients))
        assert torch.allclose(x, expected, rtol=0, atol=1e-12)
    simulation = on_quadratics(method=method)
    for _ in simulation.run(ROUNDS):
        pass
    assert (next(simulation.server.model.parameters()) - wanted.limit).abs().max() < 1e-6


METHODS: tuple[FederatedMethod, ...] = (FedAvg(), FedProx(MU), FedNova(), Scaffold())


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_quadratic_clients_converge_to_the_closed_form(method: FederatedMethod) -> None:
    check_closed_form(method, CLOSED[type(method)])


def test_the_four_limits_differ() -> None:
    limits = [closed().limit for closed in CLOSED.values()]
    for i, limit in enumerate(limits):
        assert all((limit - other).abs().max() > 1e-3 for other in limits[:i])


# Perturbed formulas fail the check ----------------------------------------------------------------------------------


class UnweightedAvg(FedAvg):
    weighted = False


@dataclass(frozen=True)
class StrongerProx(FedProx):
    def direction_(self, g: Tensor, y: Tensor, x: Tensor, shared: Vectors, kept: Vectors) -> Tensor:
        return g.add_((y - x) * (1.001 * self.mu))


class ProxToZero(FedProx):
    def direction_(self, g: Tensor, y: Tensor, x: Tensor, shared: Vectors, kept: Vectors) -> Tensor:
        return g.add_(y, alpha=self.mu)


class NovaByOneMore(FedNova):
    def message(self, work: Work) -> ClientMessage:
        return ClientMessage({MODEL: (work.y - work.x) / (work.steps + 1)}, {})


class NovaWithoutLength(FedNova):
    def change(self, mean: Tensor, local: SGD, steps: object, shares: object) -> Tensor:
        return mean


class ScaffoldReversed(Scaffold):
    def direction_(self, g: Tensor, y: Tensor, x: Tensor, shared: Vectors, kept: Vectors) -> Tensor:
        return g.sub_(shared[CONTROL]).add_(kept.get(CONTROL, 0.0))


class ScaffoldWithoutServer(Scaffold):
    """c_i' = c_i + (x - y) / (tau lr), without - c."""

    def message(self, work: Work) -> ClientMessage:
        sent, kept = super().message(work)
        off = work.shared[CONTROL]
        return ClientMessage({MODEL: sent[MODEL], CONTROL: sent[CONTROL] + off}, {CONTROL: kept[CONTROL] + off})


class ScaffoldByNumber(Scaffold):
    """c += the mean change times 0.9."""

    def share(self, shared: dict[str, Tensor], mean: Vectors, fraction: float) -> dict[str, Tensor]:
        return super().share(shared, mean, 0.9 * fraction)


PERTURBED: tuple[tuple[FederatedMethod, type[FederatedMethod]], ...] = (
    (UnweightedAvg(), FedAvg),
    (FedProx(0.001), FedAvg),
    (FedProx(MU * 1.001), FedProx),
    (StrongerProx(MU), FedProx),
    (ProxToZero(MU), FedProx),
    (FedAvg(), FedNova),
    (NovaByOneMore(), FedNova),
    (NovaWithoutLength(), FedNova),
    (FedNova(0.001), FedNova),
    (FedAvg(), Scaffold),
    (ScaffoldReversed(), Scaffold),
    (ScaffoldWithoutServer(), Scaffold),
    (ScaffoldByNumber(), Scaffold),
)


@pytest.mark.parametrize(("method", "like"), PERTURBED, ids=lambda part: getattr(part, "__name__", repr(part)))
def test_a_perturbed_formula_fails_the_check(method: FederatedMethod, like: type[FederatedMethod]) -> None:
    with pytest.raises(AssertionError):
        check_closed_form(method, CLOSED[like])


# FedNova's normalisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1, 2, 7, 50])
def test_normalisers_are_those_of_the_paper(tau: int) -> None:
    rho, alpha = 0.9, LR * MU
    assert normaliser(SGD(LR), 0.0, tau) == tau
    momentum = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert normaliser(SGD(LR, momentum=rho), 0.0, tau) == pytest.approx(momentum, rel=1e-12)
    assert normaliser(SGD(LR), MU, tau) == pytest.approx((1 - (1 - alpha) ** tau) / alpha, rel=1e-12)


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.8, 0.0), (0.0, 0.7), (0.8, 0.7)])
def test_a_constant_gradient_moves_a_client_by_the_normaliser(momentum: float, mu: float) -> None:
    """With g = 1 in each step x - y = lr |a|_1, whatever solver a is of: FedNova then moves by tau_eff lr."""

    def client(i: int) -> Client:
        def loss(model: nn.Module, key: object) -> Tensor:
            return next(model.parameters()).sum()

        return Client(1, loss, steps=3 * i + 1)

    local = SGD(LR, momentum=momentum)
    for method, reach in (
        (FedAvg(), [normaliser(local, 0.0, 3 * i + 1) for i in range(3)]),
        (FedProx(mu), [normaliser(local, mu, 3 * i + 1) for i in range(3)]),
        (FedNova(mu), [normaliser(local, mu, 3 * i + 1) for i in range(3)]),
    ):
        simulation = Simulation(Server(Point(), 3, sample=3, local=local, method=method), Federation(3, client))
        simulation.round()
        moved = -next(simulation.server.model.parameters())
        assert torch.allclose(moved, torch.full_like(moved, LR * sum(reach) / 3), rtol=1e-12)


# Server steps -------------------------------------------------------------------------------------------------------


def steps(seed: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator).tolist()


def by_formula(rule: str, d: list[float], tau: float, beta1: float, beta2: float, lr: float) -> float:
    """One coordinate, number by number."""
    x, m, v = 0.0, 0.0, tau * tau
    for step in d:
        m = beta1 * m + (1 - beta1) * step
        if rule == "adagrad":
            v = v + step * step
        elif rule == "adam":
            v = beta2 * v + (1 - beta2) * step * step
        else:
            v = v - (1 - beta2) * step * step * math.copysign(1.0, v - step * step)
        x = x + lr * m / (math.sqrt(v) + tau)
    return x


def after(rule: ServerStep, changes: list[list[float]]) -> Tensor:
    x = torch.zeros(4, dtype=torch.float64)
    memory = rule.memory(x)
    for change in changes:
        rule.move_(x, torch.tensor(change, dtype=torch.float64), memory)
    return x


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_server_steps_are_those_of_the_papers(seed: int) -> None:
    changes = steps(seed)
    columns = [list(column) for column in zip(*changes, strict=True)]
    formula = functools.partial(by_formula, tau=0.1, beta1=0.8, beta2=0.7, lr=0.3)
    for name, rule in (
        ("adagrad", FedAdagrad(lr=0.3, beta1=0.8, tau=0.1)),
        ("adam", FedAdam(lr=0.3, beta1=0.8, beta2=0.7, tau=0.1)),
        ("yogi", FedYogi(lr=0.3, beta1=0.8, beta2=0.7, tau=0.1)),
    ):
        wanted = [formula(name, column) for column in columns]
        assert after(rule, changes).tolist() == pytest.approx(wanted, rel=1e-12)
    plain = [0.3 * sum(column) for column in columns]
    assert after(Mean(0.3), changes).tolist() == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_fed_avg_m_is_sgd_with_momentum_on_the_negative_change(seed: int) -> None:
    changes = steps(seed)
    x = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    sgd = torch.optim.SGD([x], lr=0.3, momentum=0.6)
    for change in changes:
        x.grad = -torch.tensor(change, dtype=torch.float64)
        sgd.step()
    assert torch.allclose(after(FedAvgM(0.3, 0.6), changes), x, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mean(0.0),
        lambda: FedAvgM(1.0, 1.0),
        lambda: FedAdam(tau=0.0),
        lambda: FedYogi(beta2=1.0),
        lambda: FedAdagrad(lr=float("nan")),
        lambda: FedProx(-1.0),
        lambda: FedNova(float("nan")),
        lambda: SGD(0.0),
        lambda: SGD(0.1, steps=0),
        lambda: SGD(0.1, momentum=1.0),
        lambda: SGD(0.1, weight_decay=-1.0),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(CompositionError):
        make()
