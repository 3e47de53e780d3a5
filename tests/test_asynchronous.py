"""Servers and workers that do not wait: bounds, what counts once, and exact restores."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssp_cases
from async_cases import START, loss_of, model, optimum, quadratic, simulation
from gradwire import CompositionError, PushError, StateError, StepError
from gradwire.asynchronous import (
    ASGD,
    DCASGD,
    AdaptiveDCASGD,
    AsynchronousOptimizer,
    AsynchronousSimulation,
    Barriers,
    Bounded,
    DelayedNesterov,
    Faults,
    Fixed,
    Geometric,
    Gradient,
    Grant,
    LocalSteps,
    Machine,
    Matched,
    ParameterServer,
    Push,
    Receipt,
    Result,
    Sending,
    Worker,
    snapshots,
)
from gradwire.asynchronous.work import trained_of
from gradwire.codecs import BlockInt, TopK
from gradwire.core.key import Key

DOUBLE = torch.float64


def vectors_of(saved: Any) -> Any:
    """The vectors in a server's state."""
    return saved["parameters"]["server"]


# Bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_random_schedules_keep_their_promises(block: int) -> None:
    for seed in range(75 * block, 75 * (block + 1)):
        ssp_cases.check(seed)


def test_a_schedule_whose_grants_overtook_each_other() -> None:
    """Two restarts, joins of both lives under way, and the older grant came last: its push was refused."""
    ssp_cases.check(18024)


class Lax(ssp_cases.Watched):
    """Grants one step too many."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clocks.pace = Bounded(self.staleness + 1)


class Loyal(ssp_cases.Watched):
    """Waits for the dead."""

    def leave(self, worker: int) -> list[Grant]:
        kept = self.clocks.leave
        self.clocks.leave = lambda worker: None
        try:
            return super().leave(worker)
        finally:
            self.clocks.leave = kept


class Forgetful(ssp_cases.Watched):
    """Applies what comes."""

    def _require_due(self, push: Push) -> None:
        self.books.computing.add(push.grant.worker)
        self._granted[push.grant.worker] = push.grant


@pytest.mark.parametrize("kind", [Lax, Loyal, Forgetful])
def test_the_watch_sees_servers_that_break_their_promises(kind: type[ssp_cases.Watched]) -> None:
    def check_all() -> None:
        for seed in range(100):
            ssp_cases.check(seed, kind)

    with pytest.raises(ssp_cases.Broken):
        check_all()


def test_no_staleness_is_synchronous_training() -> None:
    run = simulation(ASGD(0.3 / 3), [1.0, 2.5, 4.0], pace=Bounded(0))
    expected = copy.deepcopy(START)
    for turn in range(5):
        run.run(pushes=3)
        assert {one.version - one.staleness for one in run.history[3 * turn :]} == {3 * turn}
        for name, tensor in expected.items():
            tensor -= 0.3 * sum((tensor - optimum(worker)[name]) / 3 for worker in range(3))
            torch.testing.assert_close(run.server.parameters()[name], tensor, rtol=0, atol=1e-14)
    assert run.now_s == 20.0  # five steps of the slowest


def test_a_bound_lets_the_others_run_ahead_and_no_further() -> None:
    run = simulation(ASGD(0.01), [1.0, 1.0, 100.0], pace=Bounded(3))
    run.run(seconds=50.0)
    assert run.server.clocks.completed == [4, 4, 0]
    assert run.server.leave(2)  # the slow one dies, and both go on
    run = simulation(ASGD(0.01), [1.0, 1.0, 100.0])
    run.run(seconds=50.0)
    assert run.server.clocks.completed == [50, 50, 0]


def test_barriers_make_all_meet() -> None:
    run = simulation(ASGD(0.01), [1.0, 3.0], pace=Barriers(4))
    run.run(seconds=30.0)
    for number in (4, 8):
        reached = [one.at_s for one in run.history if one.number == number - 1]
        begun = [one.at_s for one in run.history if one.number == number]
        assert min(begun) == max(reached) + 1.0


def test_local_steps_with_a_barrier_after_each_push_are_local_sgd() -> None:
    start = {name: p.detach() for name, p in trained_of(model()).items()}
    server = ParameterServer(start, ASGD(0.5), workers=2, pace=Barriers(1), length=Fixed(3))
    sgd: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = functools.partial(torch.optim.SGD, lr=0.1)
    workers = [Worker(LocalSteps(model(), loss_of, sgd), start) for _ in range(2)]
    AsynchronousSimulation(server, workers, [Machine(1.0), Machine(2.0)]).run(pushes=4)
    networks, means = [model(), model()], list[Tensor]()
    for turn in range(2):
        for rank, network in enumerate(networks):
            inner = sgd(list(network.parameters()))
            for step in range(3 * turn, 3 * turn + 3):
                inner.zero_grad()
                loss_of(network, rank, step).backward()
                inner.step()
        means = [(p.detach() + q.detach()) / 2 for p, q in zip(*(n.parameters() for n in networks), strict=True)]
        for network in networks:
            nn.utils.vector_to_parameters(torch.cat([mean.view(-1) for mean in means]), network.parameters())
    for mean, ours in zip(means, server.parameters().values(), strict=True):
        torch.testing.assert_close(ours, mean, rtol=0, atol=1e-14)


def test_local_steps_match_the_speed_of_workers() -> None:
    run = simulation(DelayedNesterov(every=2), [1.0, 4.0], length=Matched(8))
    run.run(pushes=20)
    counts = [sum(one.worker == worker for one in run.history[4:]) for worker in (0, 1)]
    assert abs(counts[0] - counts[1]) <= 1
    plain = simulation(DelayedNesterov(every=2), [1.0, 4.0], length=Fixed(8))
    plain.run(pushes=20)
    assert sum(one.worker == 0 for one in plain.history) == 16


def test_gradients_of_models_train_them() -> None:
    network = model()
    start = {name: p.detach().clone() for name, p in trained_of(network).items()}
    server = ParameterServer(start, ASGD(0.05), workers=3, pace=Bounded(2))
    workers = [Worker(Gradient(model(), loss_of), start) for _ in range(3)]
    run = AsynchronousSimulation(server, workers, [Machine(1.0), Machine(1.3), Machine(2.0)])
    run.run(pushes=150)
    losses = [one.loss for one in run.history]
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])


# What counts ----------------------------------------------------------------------------------------------------


def test_what_a_codec_loses_is_owed_and_not_lost() -> None:
    seen = list[Tensor]()

    def noted(parameters: Any, grant: Grant) -> Result:
        result = quadratic(parameters, grant)
        seen.append(torch.cat([g.reshape(-1) for g in result.gradient.values()]))
        return result

    run = simulation(ASGD(0.25), [1.0, 1.7], noted, sending=Sending(TopK(0.25), decay=1.0))
    before = run.server.values.clone()
    run.run(pushes=30)
    for number, worker in enumerate(run.workers):  # have them know that their last pushes were applied
        worker.compute(Grant(number, 10**6, 0, 0, 1), run.server.values)
    owed = sum((worker.memory.owed for worker in run.workers if worker.memory is not None), torch.zeros(8))
    moved = before - run.server.values
    torch.testing.assert_close(moved, 0.25 * (sum(seen[:30]) - owed), rtol=0, atol=1e-5)
    assert float(owed.abs().max()) > 0.01
    run.run(pushes=300)
    middle = {name: (optimum(0)[name] + optimum(1)[name]) / 2 for name in START}
    assert all(float((run.server.parameters()[name] - best).abs().max()) < 1.5 for name, best in middle.items())


def test_a_push_that_does_not_count_stays_owed() -> None:
    sending = Sending(TopK(0.25), decay=1.0)
    server, worker = (
        ParameterServer(START, ASGD(0.1), workers=1, sending=sending),
        Worker(quadratic, START, sending=sending),
    )
    [grant] = server.join(0)
    [second] = server.receive(worker.compute(grant, server.values)).grants
    lost = worker.compute(second, server.values)
    known = worker.memory
    assert known is not None
    server.begin_life()
    [third] = server.join(0)
    assert third.number == 1
    again = worker.compute(third, server.values)
    assert worker.memory is known
    with pytest.raises(PushError, match="before the server was restarted"):
        server.receive(lost)
    assert server.receive(again).grants[0].number == 2


def test_restores_are_exact() -> None:
    for rule in (ASGD(0.02), DCASGD(0.02), AdaptiveDCASGD(0.02, 0.1), DelayedNesterov(3, 0.1)):
        run = simulation(rule, [1.0, 1.7, 2.9], sending=Sending(BlockInt(4, stochastic=True)), length=Matched(4))
        run.run(pushes=20)
        saved = run.server.state_dict()
        other = ParameterServer(START, rule, workers=3, sending=run.server.sending, length=Matched(4))
        other.load_state_dict(saved)
        pushes = list[Push]()
        kept = run.server.receive

        def noted(push: Push, kept: Callable[[Push], Receipt] = kept, pushes: list[Push] = pushes) -> Receipt:
            pushes.append(push)
            return kept(push)

        run.server.receive = noted
        run.run(pushes=20)
        assert len(pushes) == 20
        assert not torch.equal(other.values, run.server.values)
        receipts = [other.receive(push) for push in pushes]
        assert torch.equal(other.values, run.server.values)
        assert [receipt.staleness for receipt in receipts] == [one.staleness for one in run.history[20:]]
        assert repr(other.state_dict()) == repr(run.server.state_dict())


def test_snapshots_in_a_folder(tmp_path: Path) -> None:
    run = simulation(AdaptiveDCASGD(0.1), [1.0, 2.0])
    assert not snapshots.restore(run.server, tmp_path)
    for _ in range(4):
        run.run(pushes=5)
        snapshots.save(run.server, tmp_path)
    saved = run.server.state_dict()
    assert len(list(tmp_path.iterdir())) == 2
    run.run(pushes=5)
    assert snapshots.restore(run.server, tmp_path)
    assert (run.server.version, run.server.life) == (20, 1)
    assert repr(vectors_of(run.server.state_dict())) == repr(vectors_of(saved))
    assert snapshots.restore(run.server, tmp_path)
    assert run.server.life == 2  # the new life was saved at once
    other = ParameterServer(START, ASGD(0.1), workers=2)
    with pytest.raises(StateError, match="AdaptiveDCASGD"):
        snapshots.restore(other, tmp_path)
    assert (other.version, other.life) == (0, 0)


def test_simulations_repeat_themselves() -> None:
    faults = Faults(repeats=0.3, crashes_at_s=(7.0,), snapshot_every=3)
    first, second = (simulation(ASGD(0.1), [1.0, 1.7, 2.9], faults=faults) for _ in range(2))
    for run in (first, second):
        run.run(pushes=30)
    assert first.history == second.history
    assert first.refused == second.refused != []
    assert first.server.life == 1


# Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Bounded(-1), "staleness of -1"),
        (lambda: Barriers(0), "barrier every 0"),
        (lambda: Geometric(0.0), "base of 0.0"),
        (lambda: ASGD(-0.1), "lr=-0.1"),
        (lambda: ASGD(float("nan")), "lr=nan"),
        (lambda: DCASGD(0.1, -1.0), "strength=-1.0"),
        (lambda: AdaptiveDCASGD(0.1, decay=1.0), "decay=1.0"),
        (lambda: DelayedNesterov(0), "every 0 pushes"),
        (lambda: DelayedNesterov(4, spread=0.3), "spread of 0.3"),
        (lambda: Fixed(0), "0 local steps"),
        (lambda: Matched(0), "0 local steps"),
        (lambda: Sending(TopK(0.1), decay=0.0), "decay 0.0"),
        (lambda: ParameterServer(START, ASGD(0.1), workers=0), "0 workers"),
        (lambda: ParameterServer({}, ASGD(0.1), workers=1), "no tensors"),
        (lambda: ParameterServer({"x": torch.zeros(2, dtype=torch.int64)}, ASGD(0.1), workers=1), "torch.int64"),
        (lambda: Machine(step_s=0.0), "more than 0 seconds"),
        (lambda: Machine(returns_at_s=3.0), "after it has died"),
        (lambda: Faults(repeats=2.0), "lie in"),
        (lambda: Faults(restart_s=-1.0), "times are 0 or more"),
        (lambda: AsynchronousSimulation(ParameterServer(START, ASGD(0.1), workers=2), [], []), "2 workers"),
    ],
)
def test_nonsense_is_refused_when_it_is_made(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(CompositionError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.fixture
def due() -> tuple[ParameterServer, Push]:
    """A server that waits for a push of worker 0, and that push."""
    server = ParameterServer(START, AdaptiveDCASGD(0.1), workers=2)
    server.join(1)
    [grant] = server.join(0)
    first = Worker(quadratic, START).compute(grant, server.values)
    [grant] = server.receive(first).grants
    return server, Worker(quadratic, START).compute(grant, server.values)


def wire_of(value: float) -> Tensor:
    return Sending().send(torch.full((8,), value, dtype=DOUBLE), None, Key())[0]


BAD: dict[str, tuple[Callable[[Push], Push], str]] = {
    "unknown": (lambda push: push._replace(grant=push.grant._replace(worker=7)), "worker 7 is unknown"),
    "negative": (lambda push: push._replace(grant=push.grant._replace(worker=-1)), "worker -1 is unknown"),
    "repeated": (lambda push: push._replace(grant=push.grant._replace(number=0)), "was applied before"),
    "early": (lambda push: push._replace(grant=push.grant._replace(number=5)), "push 1 from version 1 is due"),
    "stale": (lambda push: push._replace(grant=push.grant._replace(version=0)), "computed from version 0"),
    "life": (lambda push: push._replace(grant=push.grant._replace(life=3)), "have the worker join again"),
    "model": (lambda push: push._replace(fingerprint=push.fingerprint + 1), "of another model"),
    "cut": (lambda push: push._replace(wire=push.wire[:-8]), "left out as damaged"),
    "nan": (lambda push: push._replace(wire=wire_of(float("nan"))), "not finite"),
    "infinite": (lambda push: push._replace(wire=wire_of(float("inf"))), "not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_push_that_is_refused_changes_nothing(name: str, due: tuple[ParameterServer, Push]) -> None:
    server, push = due
    before = repr(server.state_dict())
    damage, says = BAD[name]
    with pytest.raises(PushError, match=says) as error:
        server.receive(damage(push))
    assert "\n" not in str(error.value)
    assert repr(server.state_dict()) == before
    assert server.receive(push).grants[0].number == 2
    with pytest.raises(PushError, match="push 1 of worker 0 was applied before"):
        server.receive(push)


def test_who_was_taken_for_dead_joins_again(due: tuple[ParameterServer, Push]) -> None:
    server, push = due
    server.leave(0)
    with pytest.raises(PushError, match="taken for dead: have it join again"):
        server.receive(push)
    [grant] = server.join(0)
    assert server.receive(push._replace(grant=grant)).grants[0].number == 2
    for call in (server.join, server.leave):
        with pytest.raises(PushError, match="worker 2 is unknown"):
            call(2)


def test_a_worker_refuses_what_is_wrong() -> None:
    server = ParameterServer(START, ASGD(0.1), workers=1)
    [grant] = server.join(0)
    missing = Worker(lambda parameters, grant: Result({"x": parameters["x"]}, 0.0), START)
    with pytest.raises(StepError, match="tensor 'y' is missing"):
        missing.compute(grant, server.values)
    wrong = Worker(lambda parameters, grant: Result({**parameters, "x": torch.ones(1)}, 0.0), START)
    with pytest.raises(StepError, match=r"'x' has shape \(1,\)"):
        wrong.compute(grant, server.values)
    nan = Worker(lambda parameters, grant: Result({n: t * torch.nan for n, t in parameters.items()}, 0.0), START)
    with pytest.raises(StepError, match="not finite, and nothing was pushed"):
        nan.compute(grant, server.values)
    worker = Worker(quadratic, START)
    worker.compute(grant._replace(life=2), server.values)
    with pytest.raises(StateError, match="before its restart 2, at version 0: restore it from its newest snapshot"):
        worker.compute(grant._replace(life=1), server.values)


DAMAGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda saved: saved.pop("clocks"), "no 'clocks'"),
    (lambda saved: saved.update(pushes=[1]), "no 'pushes' of 2"),
    (lambda saved: saved.update(granted=[None]), "what 2 workers compute"),
    (lambda saved: saved.update(speeds=[1.0, float("nan")]), "no speeds"),
    (lambda saved: saved["clocks"].update(phases=[9, 0]), "phase that there is not"),
    (lambda saved: vectors_of(saved).pop("element:backup.1"), "the saved server has"),
    (lambda saved: vectors_of(saved)["element:values"][0].update(values=torch.ones(3)), "another model"),
    (lambda saved: saved.update(reducer="other"), "is that of other"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_a_damaged_state_changes_nothing(
    damage: Callable[[Any], Any], says: str, due: tuple[ParameterServer, Push]
) -> None:
    server, _ = due
    before, saved = repr(server.state_dict()), server.state_dict()
    damage(saved)
    with pytest.raises(StateError, match=says):
        server.load_state_dict(saved)
    assert repr(server.state_dict()) == before


def test_refusals_do_not_go_on_for_ever() -> None:
    server, worker = ParameterServer(START, ASGD(0.1), workers=1), Worker(quadratic, START)
    [grant] = server.join(0)
    worker.compute(grant, server.values)
    assert not worker.refused(grant._replace(number=7), "an older push")
    assert [worker.refused(grant, "no") for _ in range(9)] == [True] * 9
    with pytest.raises(PushError, match="10 pushes in a row were refused; the last: no"):
        worker.refused(grant, "no")


def test_the_page_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "asynchronous.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    exec("".join(blocks), {})


# Coding -----------------------------------------------------------------------------------------------------------


def test_what_coding_compiles_is_ready_before_the_first_step(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the very length of each server's part, since some kernels are for long vectors only."""
    coded: list[int] = []
    encode = BlockInt.encode_into

    def noted(self: BlockInt, x: Tensor, *rest: Any) -> None:
        coded.append(x.numel())
        encode(self, x, *rest)

    monkeypatch.setattr(BlockInt, "encode_into", noted)
    layer = nn.Linear(40, 40)
    inner = torch.optim.SGD(layer.parameters(), 0.1)
    optimizer = AsynchronousOptimizer(inner, layer, sending=Sending(BlockInt(4)), address="127.0.0.1")
    assert coded == [40 * 41]
    optimizer.close()
