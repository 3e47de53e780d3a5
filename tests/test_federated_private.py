"""Private federations: what one client can move, what that costs, and rounds to which nobody comes."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accountants import gaussian, on_a_grid, sampled_at_once, sampled_gaussian
from federations import CLIENTS, Point, on_quadratics, quadratics, state_bits, vector
from flower_cases import FIRST, LocalGrid
from gradwire.adapters.flower import FederatedStrategy, client_app
from gradwire.core.errors import CompositionError, FederationError, StateError
from gradwire.core.key import Key
from gradwire.federated import (
    SGD,
    BufferedServer,
    BufferedSimulation,
    ByWeight,
    Client,
    Conditions,
    FedAdam,
    Federation,
    FedNova,
    Poisson,
    Server,
    Simulation,
    Uniform,
)
from gradwire.federated.sampling import Sampling
from gradwire.reducers.aggregate import PrivateMean, epsilon, epsilon_of_replacing

# found and not imported: that takes a second of every process of tests
pytestmark = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="epsilon is that of dp-accounting")

SAVES = Path(__file__).with_name("golden") / "federations"
CLIP = 1.0
QUIET = "dp:1,noise=0"


# What a number of rounds costs --------------------------------------------------------------------------------------

SETTINGS = [(1.0, 100, 1e-5, 1.0), (1.0, 100, 1e-5, 0.1), (2.0, 50, 1e-6, 0.3), (0.8, 60, 1e-5, 0.02)]


@pytest.mark.parametrize(("sigma", "steps", "delta", "q"), SETTINGS)
@pytest.mark.draw(2)
def test_adding_one_client_costs_what_independent_accountants_say(
    sigma: float, steps: int, delta: float, q: float
) -> None:
    """Never less than the exact epsilon, never more than the closed form gives for whole orders."""
    claimed = epsilon(sigma, steps, delta, q)
    exact = on_a_grid((1.0, q), (0.0, 0.0), sigma, steps, delta)
    assert exact <= claimed <= sampled_gaussian(sigma, steps, delta, q) * (1 + 1e-9)


@pytest.mark.parametrize(("sigma", "steps", "delta", "q"), SETTINGS)
@pytest.mark.draw(2)
def test_adding_one_client_costs_what_distributions_of_losses_say(
    sigma: float, steps: int, delta: float, q: float
) -> None:
    """The library's other accountant is numerical, and knows no orders."""
    accounting, pld = pytest.importorskip("dp_accounting"), pytest.importorskip("dp_accounting.pld")
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(accounting.PoissonSampledDpEvent(q, accounting.GaussianDpEvent(sigma)), steps)
    other = accountant.get_epsilon(delta)
    assert on_a_grid((1.0, q), (0.0, 0.0), sigma, steps, delta) <= other * (1 + 1e-6)
    assert other < epsilon(sigma, steps, delta, q)


@pytest.mark.parametrize(("sigma", "steps", "delta", "q"), SETTINGS)
@pytest.mark.draw(1)
def test_replacing_one_client_costs_what_independent_accountants_say(
    sigma: float, steps: int, delta: float, q: float
) -> None:
    """A client whose update is C is replaced by one whose update is -C, and all others send zeros."""
    claimed = epsilon_of_replacing(sigma, steps, delta, q)
    exact = on_a_grid((1.0, q), (-1.0, q), sigma, steps, delta)
    assert exact <= claimed <= sampled_at_once(sigma / 2, steps, delta, q) * (1 + 1e-9)


@pytest.mark.parametrize(("sigma", "steps", "delta", "q"), SETTINGS[:3])
@pytest.mark.draw(1)
def test_a_sample_of_one_size_costs_more_than_one_in_which_each_is_drawn_by_itself(
    sigma: float, steps: int, delta: float, q: float
) -> None:
    """What `epsilon` gives for such a sample is less than the exact value for a client that is another one."""
    assert epsilon(sigma, steps, delta, q) < on_a_grid((1.0, q), (-1.0, q), sigma, steps, delta)


def test_a_sample_costs_no_more_than_all() -> None:
    costs = [epsilon_of_replacing(1.0, 100, 1e-5, q) for q in (0.1, 0.3, 0.5, 0.9, 1.0)]
    assert costs == sorted(costs)
    assert costs[2] == costs[3] == costs[4]


def test_a_hundred_rounds_of_all_clients_cost_three_times_what_was_said() -> None:
    """With sigma 1 and all clients in each round, 96.1 is for a client more, and 294.9 for another client."""
    assert epsilon(1.0, 100, 1e-5) == pytest.approx(96.116, abs=1e-3)
    assert epsilon_of_replacing(1.0, 100, 1e-5) == pytest.approx(294.861, abs=1e-3)
    assert epsilon(1.0, 100, 1e-5) < gaussian(0.5, 100, 1e-5) < epsilon_of_replacing(1.0, 100, 1e-5)
    assert gaussian(1.0, 100, 1e-5) < epsilon(1.0, 100, 1e-5)


@pytest.mark.parametrize("cost", [epsilon, epsilon_of_replacing])
def test_epsilon_of_nothing_is_nothing(cost: Callable[..., float]) -> None:
    assert cost(1.0, 0, 1e-5) == cost(0.0, 0, 1e-5) == 0.0
    assert cost(0.0, 1, 1e-5) == math.inf
    for wrong in ({"noise": -1.0}, {"steps": -1}, {"delta": 0.0}, {"sampling": 0.0}, {"sampling": 1.1}):
        with pytest.raises(CompositionError, match="delta lies in"):
            cost(**{"noise": 1.0, "steps": 1, "delta": 1e-5, **wrong})


def test_a_server_tells_the_epsilon_of_its_sampling() -> None:
    def of(sample: Sampling | int) -> float:
        simulation = on_quadratics(sample=sample, aggregate="dp:1,noise=3")
        for _ in simulation.run(4):
            pass
        assert simulation.server.epsilon(1e-3) > simulation.server.epsilon(1e-2)
        return simulation.server.epsilon(1e-5)

    assert of(Poisson(0.3)) == epsilon(3.0, 4, 1e-5, 0.3)
    assert of(3) == epsilon_of_replacing(3.0, 4, 1e-5, 0.3)
    assert of(ByWeight(3, tuple(range(1, 11)))) == epsilon_of_replacing(3.0, 4, 1e-5)
    with pytest.raises(CompositionError, match="hides no client: take aggregate"):
        on_quadratics().server.epsilon(1e-5)


# What one client moves ----------------------------------------------------------------------------------------------


def pulling(towards: dict[int, float], missing: int | None = None) -> Federation:
    """Clients that pull far beyond the clip, downwards or upwards; one of them may fail in every round."""

    def client(i: int) -> Client:
        def loss(model: nn.Module, key: Key) -> Tensor:
            if i == missing:
                raise OSError("no data")
            return -100.0 * towards.get(i, 1.0) * next(model.parameters()).sum()

        return Client(1.0, loss)

    return Federation(CLIENTS, client)


def after_a_round(federation: Federation, **settings: Any) -> Tensor:
    server = Server(Point(1), CLIENTS, local=SGD(0.1), aggregate=QUIET, **settings)
    Simulation(server, federation).round()
    return vector(server)


ALL = [CLIENTS, Poisson(1.0)]


@pytest.mark.parametrize("sample", ALL)
def test_a_client_more_or_less_moves_the_mean_by_the_clip_over_the_expected_number(sample: Any) -> None:
    """Nine clients pull up and one pulls down: without it the mean moved by 0.2 where it may move by 0.1."""
    with_it, without = (after_a_round(pulling({3: -1.0}, missing), sample=sample) for missing in (None, 3))
    assert float(with_it) == pytest.approx(0.8)
    assert float((with_it - without).norm()) == pytest.approx(CLIP / CLIENTS)


@pytest.mark.parametrize("sample", ALL)
def test_another_client_moves_the_mean_by_twice_as_much(sample: Any) -> None:
    one, other = (after_a_round(pulling({3: pull}), sample=sample) for pull in (-1.0, 1.0))
    assert float((one - other).norm()) == pytest.approx(2 * CLIP / CLIENTS)


@pytest.mark.parametrize(("sample", "expected"), [(Poisson(0.4), 4.0), (Uniform(4), 4.0), (Poisson(0.04), 0.4)])
def test_the_denominator_is_what_was_expected_in_every_round(
    sample: Sampling, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rounds with a client and without it: models differ by C / (q W), or not at all if it was not drawn."""

    def seventeen(bits: int) -> int:
        return 17

    monkeypatch.setattr(secrets, "randbits", seventeen)
    servers = [Server(Point(1), CLIENTS, sample=sample, local=SGD(0.1), aggregate=QUIET) for _ in range(2)]
    federations = [pulling({3: -1.0}, missing) for missing in (None, 3)]
    simulations = [Simulation(server, each) for server, each in zip(servers, federations, strict=True)]
    apart, numbers = [], set[int]()
    for _ in range(60):
        before = [vector(server) for server in servers]
        rounds = [simulation.round() for simulation in simulations]
        moved = [vector(server) - x for server, x in zip(servers, before, strict=True)]
        counted = len(rounds[0].clients) - 2 * (3 in rounds[0].clients)
        assert float(moved[0]) == pytest.approx(CLIP * counted / expected, abs=1e-12)
        apart.append(float((moved[0] - moved[1]).abs()))
        numbers.add(len(rounds[0].clients))
        assert (apart[-1] > 1e-9) == (3 in rounds[0].clients)
    assert max(apart) == pytest.approx(CLIP / expected)
    assert len(numbers) == 1 if isinstance(sample, Uniform) else len(numbers) > 1


def test_clients_that_are_lost_do_not_change_the_denominator() -> None:
    """Three of ten pull, the others are lost on the way: a mean over ten all the same."""
    server = Server(Point(1), CLIENTS, sample=CLIENTS, local=SGD(0.1), aggregate=QUIET)
    simulation = Simulation(server, pulling({}), conditions=Conditions(drop=0.7))
    done = simulation.round()
    assert 0 < len(done.clients) < 7
    assert float(vector(server)) == pytest.approx(CLIP * len(done.clients) / CLIENTS)


def test_steps_of_clients_do_not_show_where_the_mean_is_private() -> None:
    """FedNova multiplies by the mean number of steps, which would tell who took part without any noise."""

    def federation(missing: int | None) -> Federation:
        every = pulling({}, missing)
        return Federation(CLIENTS, lambda i: Client(1.0, every.client(i).loss, steps=1000 if i == 3 else 2))

    settings: dict[str, Any] = {"sample": Poisson(1.0), "method": FedNova()}
    with_it, without = (
        Simulation(Server(Point(1), CLIENTS, local=SGD(0.1, steps=2), aggregate=QUIET, **settings), federation(missing))
        for missing in (None, 3)
    )
    for simulation in (with_it, without):
        simulation.round()
    apart = vector(with_it.server) - vector(without.server)
    assert float(apart.norm()) == pytest.approx(2 * CLIP / CLIENTS)  # both have made two steps, as was agreed on


def test_on_flower_a_client_without_a_node_does_not_change_the_denominator() -> None:
    every = pulling({3: -1.0})
    models = []
    for nodes in (range(CLIENTS), [i for i in range(CLIENTS) if i != 3], []):
        app = client_app(lambda: Point(1), every, local=SGD(0.1))
        server = Server(Point(1), CLIENTS, sample=Poisson(1.0), local=SGD(0.1), aggregate=QUIET)
        strategy = FederatedStrategy(server, wait_s=0.1)
        strategy.start(LocalGrid(app, [FIRST + i for i in nodes]), num_rounds=1)
        assert strategy.given_up == []
        assert len(strategy.rounds) == server.round == 1
        models.append(float(vector(server)))
    assert models == pytest.approx([0.8, 0.9, 0.0])


# Who is drawn -------------------------------------------------------------------------------------------------------


def test_poisson_draws_each_client_by_itself() -> None:
    """How often each client comes, how often two come together, and how much their number varies."""
    q, rounds = 0.3, 4000
    drawn = torch.zeros(rounds, 8, dtype=torch.float64)
    for step in range(rounds):
        drawn[step, Poisson(q).draw(8, Key(seed=3, step=step))] = 1
    assert float((drawn.mean(0) - q).abs().max()) < 5 * math.sqrt(q * (1 - q) / rounds)
    together = drawn.T @ drawn / rounds
    pairs = together[~torch.eye(8, dtype=torch.bool)]
    assert float((pairs - q * q).abs().max()) < 5 * math.sqrt(q * q * (1 - q * q) / rounds)
    assert float(drawn.sum(1).var()) == pytest.approx(8 * q * (1 - q), rel=0.12)
    assert int((drawn.sum(1) == 0).sum()) == pytest.approx(rounds * (1 - q) ** 8, rel=0.25)


def test_a_poisson_draw_is_ascending_repeatable_and_as_small_as_its_sample() -> None:
    first = Poisson(1e-8).draw(10**9, Key(seed=5))
    assert first == sorted(set(first)) == Poisson(1e-8).draw(10**9, Key(seed=5))
    assert 0 < len(first) < 40
    assert Poisson(1.0).draw(5, Key()) == [0, 1, 2, 3, 4]
    for wrong in (0.0, -0.1, 1.5, math.nan):
        with pytest.raises(CompositionError, match=r"lies in \(0, 1\]"):
            Poisson(wrong)


def test_nobody_who_knows_the_seed_knows_who_takes_part_in_a_private_round() -> None:
    """Clients are told the seed, and sampling hides them only from those who cannot draw the sample again."""

    def drawn(**settings: Any) -> list[list[int]]:
        servers = [on_quadratics(sample=Poisson(0.5), seed=4, **settings).server for _ in range(12)]
        return [[task.client for task in server.begin()] for server in servers]

    assert len({tuple(clients) for clients in drawn()}) == 1
    assert len({tuple(clients) for clients in drawn(aggregate=QUIET)}) > 1


# Rounds to which nobody comes ---------------------------------------------------------------------------------------


def test_an_empty_private_round_adds_noise_and_counts() -> None:
    numel, q, clip, sigma = 40_000, 0.05, 2.0, 1.5
    server = Server(Point(numel), CLIENTS, sample=Poisson(q), local=SGD(0.1), aggregate=PrivateMean(clip, sigma))
    while server.begin():
        server.abandon()
    done = server.end()
    assert (done.number, done.clients, server.round) == (0, (), 1)
    assert math.isnan(done.loss)
    noise, want = vector(server), sigma * clip / (q * CLIENTS)
    assert float(noise.std()) == pytest.approx(want, rel=5 / math.sqrt(2 * numel))
    assert server.epsilon(1e-5) == epsilon(sigma, 1, 1e-5, q)


def test_a_round_of_lost_clients_adds_noise_and_counts() -> None:
    simulation = on_quadratics(aggregate="dp:1", optimizer=FedAdam(0.1))
    simulation.conditions = Conditions(drop=1.0)
    before = vector(simulation.server)
    done = simulation.round()
    assert len(done.dropped) == CLIENTS
    assert simulation.server.round == 1
    assert bool((vector(simulation.server) != before).all())


def test_an_empty_round_without_privacy_is_below_its_quorum() -> None:
    server = on_quadratics(sample=Poisson(0.1)).server
    while server.begin():
        server.abandon()
    with pytest.raises(FederationError, match="has 0 updates of 0 clients, and it needs 1"):
        server.end()


def test_a_private_round_has_no_quorum() -> None:
    assert on_quadratics(aggregate="dp:1").server.quorum == on_quadratics(aggregate="dp:1", quorum=0).server.quorum == 0
    assert on_quadratics().server.quorum == 1
    with pytest.raises(CompositionError, match=r"a quorum of 3 with a private mean.*leave quorum out"):
        on_quadratics(aggregate="dp:1", quorum=3)


def test_poisson_sampling_is_refused_where_a_rule_would_seldom_have_enough() -> None:
    assert on_quadratics(sample=Poisson(0.5), aggregate="krum:1").server
    with pytest.raises(CompositionError, match="needs 5 clients a round and would get 3"):
        on_quadratics(sample=Poisson(0.3), aggregate="krum:1")
    with pytest.raises(CompositionError, match="quorum of 11 among 10"):
        on_quadratics(sample=Poisson(0.3), quorum=11)


def test_a_mean_of_no_expected_rows_is_refused() -> None:
    for expected in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(CompositionError, match="say how many are expected"):
            PrivateMean(1.0).mean_of(torch.ones(2, 3), expected)


# Without rounds -----------------------------------------------------------------------------------------------------


def buffered(**settings: Any) -> BufferedServer:
    given: dict[str, Any] = {"buffer": 3, "local": SGD(0.1), "aggregate": "dp:1", **settings}
    return BufferedServer(Point(1), CLIENTS, **given)


def run(server: BufferedServer, federation: Federation, steps: int, concurrency: int = 4) -> list[tuple[int, ...]]:
    return [step.clients for step in BufferedSimulation(server, federation, concurrency=concurrency).run(steps)]


def test_another_client_moves_a_buffered_step_by_two_clips_over_the_buffer() -> None:
    servers = [buffered(aggregate=QUIET) for _ in range(2)]
    runs = [
        BufferedSimulation(server, pulling({3: pull}), concurrency=4).run(40)
        for server, pull in zip(servers, (-1.0, 1.0), strict=True)
    ]
    apart = []
    for _ in range(40):
        before = [vector(server) for server in servers]
        steps = [next(each) for each in runs]
        assert steps[0].clients == steps[1].clients
        moved = [vector(server) - x for server, x in zip(servers, before, strict=True)]
        apart.append(float((moved[0] - moved[1]).abs()))
        assert (apart[-1] > 1e-9) == (3 in steps[0].clients)
    assert max(apart) == pytest.approx(2 * CLIP / 3)


def test_no_client_is_in_a_private_step_twice() -> None:
    """One client is fast: without privacy it comes back before the step that has its last update is made."""

    def fast(client: int, key: Key) -> float:
        return 0.01 if client < 3 else 1.0

    def most(aggregate: str) -> int:
        simulation = BufferedSimulation(
            buffered(aggregate=aggregate, buffer=6), pulling({}), concurrency=5, duration=fast
        )
        return max(max(step.clients.count(client) for client in step.clients) for step in simulation.run(60))

    assert most("mean") > 1
    assert most("dp:1") == 1


def test_clients_whose_updates_wait_do_not_begin_again() -> None:
    server = buffered(buffer=CLIENTS)
    simulation = BufferedSimulation(server, pulling({}), concurrency=1)
    assert sorted(next(simulation.run(1)).clients) == list(range(CLIENTS))
    with pytest.raises(CompositionError, match="those whose updates wait begin nothing"):
        BufferedSimulation(server, pulling({}), concurrency=2)
    BufferedSimulation(buffered(aggregate="mean", buffer=CLIENTS), pulling({}), concurrency=2)
    everybody = [server.start() for _ in range(CLIENTS)]
    assert len({task.client for task in everybody}) == CLIENTS
    with pytest.raises(FederationError, match="all 10 clients are training: "):
        server.start()


def test_a_buffered_server_counts_the_steps_of_the_client_that_took_part_most() -> None:
    server, again = buffered(aggregate="dp:1,noise=4"), buffered(aggregate="dp:1,noise=4")
    assert server.epsilon(1e-5) == 0.0
    steps = run(server, pulling({}), 20)
    most = max(sum(client in clients for clients in steps) for client in range(CLIENTS))
    assert 6 <= most < 20
    assert server.epsilon(1e-5) == epsilon_of_replacing(4.0, most, 1e-5)
    again.load_state_dict(server.state_dict())
    assert again.epsilon(1e-5) == server.epsilon(1e-5)
    assert state_bits(again) == state_bits(server)
    run(again, pulling({}), 20)
    assert again.epsilon(1e-5) > server.epsilon(1e-5)
    with pytest.raises(CompositionError, match="hides no client"):
        buffered(aggregate="mean").epsilon(1e-5)


Spoil = Callable[[Any], object]
SPOILED: list[tuple[Spoil, str]] = [
    (lambda saved: saved.update(used=[[1]]), "'used' are no pairs"),
    (lambda saved: saved.update(used=[[1, "a"]]), "'used' are no pairs"),
    (lambda saved: saved.pop("uncounted"), "no 'uncounted'"),
]


@pytest.mark.parametrize(("spoil", "says"), SPOILED)
def test_a_damaged_count_is_refused_and_changes_nothing(spoil: Spoil, says: str) -> None:
    server, other = buffered(), buffered()
    run(server, pulling({}), 3)
    saved, before = server.state_dict(), state_bits(other)
    spoil(saved)
    with pytest.raises(StateError, match=says):
        other.load_state_dict(saved)
    assert state_bits(other) == before


# Saves of before ----------------------------------------------------------------------------------------------------


def test_a_private_server_of_an_older_version_goes_on() -> None:
    """It was saved with a quorum of 5, which a private mean no longer has."""
    simulation = on_quadratics(torch.float32, aggregate="dp:0.5", sample=6, update="topk:0.34")
    saved = torch.load(SAVES / "private.pt", weights_only=True)
    assert saved["server"]["settings"]["quorum"] == "5"
    simulation.load_state_dict(saved)
    assert simulation.server.round == 4
    assert torch.equal(vector(simulation.server), saved["server"]["model"]["model"])
    simulation.round()
    assert simulation.server.epsilon(1e-5) == epsilon_of_replacing(1.0, 5, 1e-5, 0.6)


def test_a_buffered_private_server_of_an_older_version_goes_on() -> None:
    """Nobody counted then, and one client could fill a buffer of three, which costs as much as nine steps."""
    server = BufferedServer(Point(), CLIENTS, buffer=3, local=SGD(0.1), aggregate="dp:0.5")
    server.load_state_dict(torch.load(SAVES / "private-buffered.pt", weights_only=True))
    assert server.steps == 4
    assert server.epsilon(1e-5) == epsilon_of_replacing(1.0, 36, 1e-5)
    for _ in BufferedSimulation(server, quadratics(), concurrency=4).run(1):
        pass
    assert server.epsilon(1e-5) == epsilon_of_replacing(1.0, 37, 1e-5)


def test_a_server_of_an_older_version_goes_on() -> None:
    settings = {"sample": ByWeight(6, tuple(range(1, 11))), "quorum": 5, "update": "topk:0.34", "broadcast": "int4"}
    simulation = on_quadratics(torch.float32, optimizer=FedAdam(0.05), **settings)
    simulation.load_state_dict(torch.load(SAVES / "weighted.pt", weights_only=True))
    assert [done.number for done in simulation.run(2)] == [4, 5]
