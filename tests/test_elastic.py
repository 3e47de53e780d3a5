"""Elastic training: rounds that all readers of a log understand alike, and workers that are killed, leave and join."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from elastic_runs import Crew, Death, run_of, until
from gradwire import AttachError, CommunicationError, CompositionError, GradwireError, SpecError, StateError, StepError
from gradwire.catalogue import entry
from gradwire.compare.engines import make_engine
from gradwire.core.errors import PayloadError
from gradwire.core.grain import ParameterSpec
from gradwire.core.state import Leaf, replace_leaves, walk
from gradwire.drivers.engine import Engine
from gradwire.drivers.lockstep import Meeting, VirtualTransport
from gradwire.drivers.plan import plan
from gradwire.flight import stacks_of
from gradwire.spec import parse
from gradwire.sync import Averager, DiLoCo, DriftTriggered, Elastic, ElasticOptimizer, Mean, SlowMo
from gradwire.sync.elastic import handover, store
from gradwire.sync.elastic.heartbeat import Heartbeat
from gradwire.sync.elastic.messages import (
    NO_COPY,
    AnyLine,
    Came,
    Closed,
    ExpectedWorker,
    Hands,
    Has,
    Head,
    Void,
    line_of,
    parsed,
    written,
)
from gradwire.sync.elastic.owed import Owed
from gradwire.sync.elastic.protocol import Needs, RoundLog, decided, following, may_close, read
from gradwire.sync.elastic.rounds import Behind, Rounds

# What a log says --------------------------------------------------------------------------------------------------


def members(*workers: int) -> dict[int, ExpectedWorker]:
    return {worker: ExpectedWorker(f"w{worker}", worker / 8) for worker in workers}


def came(worker: int, copy: int = 4, **more: Any) -> Came:
    return Came(worker, f"w{worker}", copy, **more)


def here(*all_of_them: Came) -> dict[int, Came]:
    return {each.worker: each for each in all_of_them}


HEAD = Head(5, 4, members(0, 1, 2))


def log(*lines: str) -> bytes:
    return "".join(lines).encode()


def test_a_round_is_committed_once_all_trainers_hold_the_same_mean() -> None:
    lines = [line_of(came(0)), line_of(came(1)), line_of(came(7, NO_COPY)), line_of(Closed(1))]
    votes = [line_of(Has(1, "a", 0.5)), line_of(Has(0, "a", 0.25))]
    assert read(HEAD, log(*lines), "keep").state == "open"
    assert read(HEAD, log(*lines, votes[0], line_of(Has(7, "a", 0.0))), "keep").state == "open"  # a newcomer has no say
    ended = read(HEAD, log(*lines, *votes, line_of(Void(0, "too late"))), "keep")
    assert ended.state == "committed"
    after = following(ended)
    assert after.copy == 5
    assert after.expected == {0: ExpectedWorker("w0", 0.25), 1: ExpectedWorker("w1", 0.5), 7: ExpectedWorker("w7", 0.0)}
    assert not after.lost
    differing = read(HEAD, log(*lines, votes[0], line_of(Has(0, "b", 0.25))), "keep")
    assert (differing.state, "different means" in differing.why) == ("void", True)


def test_whoever_comes_after_the_list_was_closed_is_not_on_it() -> None:
    ended = read(HEAD, log(line_of(came(0)), line_of(Closed(0)), line_of(came(1)), line_of(Closed(1))), "keep")
    assert ended.decision is not None
    assert ended.decision.trainers == (0,)
    assert set(ended.decision.lost) == {1, 2}
    assert ended.decision.lost[2] == ExpectedWorker("w2", 0.25)


def test_losses_of_void_rounds_are_not_forgotten() -> None:
    first = read(HEAD, log(line_of(came(0)), line_of(came(1)), line_of(Closed(0)), line_of(Void(0, "link"))), "discard")
    head = following(first)
    assert (head.voids, head.copy, set(head.lost), set(head.expected)) == (1, 4, {2}, {0, 1})
    assert head.expected[1].owed == 1 / 8  # nothing was kept, so it owes what it owed
    again = decided(head, here(came(0), came(1)), "discard")
    assert (again.kind, again.copy, again.steps) == ("discard", 4, 0)
    assert decided(head, here(came(0), came(1)), "keep").kind == "average"


def test_only_the_newest_copy_is_trained_on() -> None:
    found = decided(HEAD, here(came(0), came(1, copy=3), came(2, steps=8, samples=64, leaving=True)), "keep")
    assert (found.trainers, found.newcomers, found.leaving, found.source) == ((0, 2), (1,), (2,), 0)
    assert (found.steps, found.samples) == (8, 64)
    alone = decided(HEAD, here(came(2, leaving=True), came(9, NO_COPY)), "keep")
    assert (alone.source, alone.leaving) == (2, (2,))  # it hands over what it has, and goes


def test_a_run_is_founded_with_the_most_trained_model() -> None:
    found = decided(Head(), here(came(0, NO_COPY), came(1, NO_COPY, windows=7), came(2, NO_COPY, windows=7)), "keep")
    assert (found.kind, found.source, found.trainers) == ("founding", 1, (0, 1, 2))


@pytest.mark.parametrize(
    ("head", "present", "late", "closes"),
    [
        (Head(), here(came(0, NO_COPY)), True, False),  # two are wanted to begin with
        (Head(), here(came(0, NO_COPY), came(1, NO_COPY)), False, True),
        (HEAD, here(came(0), came(1)), False, False),  # 2 is alive
        (HEAD, here(came(0), came(1)), True, True),
        (HEAD, here(came(0), came(2)), False, True),  # 1 is dead
        (HEAD, here(came(5, NO_COPY), came(6, NO_COPY)), True, False),  # nobody has the model
    ],
)
def test_when_a_list_may_be_closed(head: Head, present: dict[int, Came], late: bool, closes: bool) -> None:
    assert may_close(head, present, Needs(1, 2), lambda worker: worker != 1, late) == closes


def test_a_run_waits_for_the_least_number_of_workers() -> None:
    assert not may_close(HEAD, here(came(0)), Needs(2, 2), lambda _: False, late=True)
    assert may_close(HEAD, here(came(0), came(9, NO_COPY)), Needs(2, 2), lambda _: False, late=True)


@pytest.mark.draw(8)
@pytest.mark.parametrize("seed", range(40))
def test_survivors_of_any_order_of_events_agree(seed: int) -> None:
    """Virtual workers, one of which does its next thing at a time or dies; all that live know the same history."""
    run = VirtualRun(seed)
    for _ in range(400):
        run.advance()
    histories = [worker.history for worker in run.workers if not worker.dead]
    longest = max(histories, key=len)
    assert len(longest) > 3
    for history in histories:
        assert all(longest[number] == its for number, its in history.items() if number in longest)


class VirtualWorker:
    """A worker without a model: what it has is called after the rounds that were committed."""

    def __init__(self, number: int) -> None:
        self.number, self.copy, self.said, self.dead = number, NO_COPY, set[tuple[int, str]](), False
        self.history: dict[int, tuple[int, ...]] = {}


class VirtualRun:
    """Workers at logs in memory, in an order that a seed gives."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.workers = [VirtualWorker(number) for number in range(3)]
        self.heads, self.logs = [Head()], [""]

    def advance(self) -> None:
        living = [worker for worker in self.workers if not worker.dead]
        keeper = max(
            living, key=lambda worker: worker.copy
        )  # with the last one that has the model the run would be lost
        chance = self.random.random()
        if chance < 0.02 and len(living) > 1:
            self.random.choice([worker for worker in living if worker is not keeper]).dead = True
        elif chance < 0.05:
            self.workers.append(VirtualWorker(len(self.workers)))
        else:
            self._turn(self.random.choice(living))

    def _turn(self, me: VirtualWorker) -> None:
        now = read(self.heads[-1], self.logs[-1].encode(), "keep")
        if now.decision is None:
            self._say_once(me, "came", line_of(came(me.number, me.copy)))
            if may_close(now.head, now.came, Needs(1, 3), lambda worker: not self.workers[worker].dead, late=False):
                self.logs[-1] += line_of(Closed(me.number))
        elif now.state == "open":
            self._take_part(me, now)
        else:
            self._end(now)

    def _take_part(self, me: VirtualWorker, now: RoundLog) -> None:
        assert now.decision is not None
        if any(self.workers[worker].dead for worker in now.decision.trainers):
            self.logs[-1] += line_of(Void(me.number, "somebody died"))
        elif me.number in now.decision.trainers:
            self._say_once(me, "has", line_of(Has(me.number, "mean", 0.0)))

    def _end(self, now: RoundLog) -> None:
        """All that live look at the outcome, whatever was said after it."""
        assert now.decision is not None
        for worker in self.workers:
            if now.state == "committed" and worker.number in now.members and not worker.dead:
                worker.copy = now.decision.copy
                worker.history[now.head.round] = now.decision.trainers
        self.heads.append(following(now))
        self.logs.append("")

    def _say_once(self, me: VirtualWorker, what: str, line: str) -> None:
        if (len(self.logs), what) not in me.said:
            me.said.add((len(self.logs), what))
            self.logs[-1] += line


@pytest.mark.parametrize(
    "line",
    [b"\x80\x04K\x01.\n", b"[]\n", b'{"by": true, "says": "came"}\n', b'{"by": 0, "says": "came"}\n', b"{" * 9000],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(CommunicationError, match="no message of gradwire's"):
        read(HEAD, line, "keep")


@pytest.mark.parametrize("raw", ["", "[]", '{"round": 1}', written(HEAD).replace("5", '"5"', 1)])
def test_what_is_no_head_is_refused(raw: str) -> None:
    assert parsed(written(HEAD), Head) == HEAD
    with pytest.raises(CommunicationError, match="no message of gradwire's"):
        parsed(raw, Head)


EVERY_LINE = (came(3, leaving=True), Closed(3), Has(3, "17e5", 0.5), Void(3, "link"), Hands(3, 1 << 40))


@pytest.mark.parametrize("said", EVERY_LINE, ids=lambda said: type(said).__name__)
def test_a_field_that_is_not_as_it_should_be_is_named(said: AnyLine) -> None:
    """Each field is missing once, and of another type once; and one is there that nobody knows."""
    assert parsed(line_of(said), AnyLine) == said
    fields = json.loads(line_of(said))
    wrong = [({**fields, "more": 1}, "more")]
    for name in fields.keys() - {"says"}:
        wrong.append(({key: value for key, value in fields.items() if key != name}, name))
        wrong.append(({**fields, name: [fields[name]]}, name))
    for record, name in wrong:
        with pytest.raises(CommunicationError, match=rf"gradwire's \(it.*\b{name}\b.*\): versions differ") as told:
            parsed(json.dumps(record), AnyLine)
        assert "docs/trust.md" in str(told.value)


@pytest.mark.parametrize("field", ["round", "copy", "expected", "lost", "voids"])
def test_a_head_is_read_whole_or_not_at_all(field: str) -> None:
    fields = json.loads(written(HEAD))
    for found in ({**fields, field: "?"}, {key: value for key, value in fields.items() if key != field}):
        with pytest.raises(CommunicationError, match=rf"\b{field}\b"):
            parsed(json.dumps(found), Head)
    part = {**fields, "expected": {"0": {"name": "w0"}}}
    with pytest.raises(CommunicationError, match=r"its expected.0 has no 'owed'"):
        parsed(json.dumps(part), Head)


def test_all_workers_write_the_same_head() -> None:
    backwards = Head(5, 4, dict(reversed(list(members(0, 9, 10).items()))), members(3), 1)
    text = written(Head(5, 4, members(0, 9, 10), members(3), 1))
    assert written(backwards) == written(parsed(text, Head)) == text


def test_a_norm_that_json_cannot_say_is_written_as_the_largest_number(team: Team) -> None:
    heartbeat = Heartbeat(team.store, "w", 5.0)
    rounds = Rounds(team.store, heartbeat, "keep", Needs(), 10.0, 10.0)
    rounds.come(came(heartbeat.number, NO_COPY))
    rounds.has("digest", float("nan"))
    assert rounds.now().owed == {heartbeat.number: sys.float_info.max}
    heartbeat.close(leaves=True)


# What is owed, and what is handed over ------------------------------------------------------------------------------


def engine(spec: str, rank: int, ranks: int) -> Engine:
    cpu = torch.device("cpu")
    specs = [ParameterSpec("w", (40, 30), torch.float32, cpu), ParameterSpec("b", (7,), torch.float32, cpu)]
    made = Engine(plan(specs, parse(spec)), VirtualTransport(Meeting(ranks), rank), 0)
    generator = torch.Generator().manual_seed(rank)

    def filled(_: str, leaf: Leaf) -> Leaf:
        owes = torch.randn(leaf.tensor.shape, generator=generator)
        return Leaf(owes, leaf.kind, leaf.owed, leaf.start) if leaf.owed else leaf

    made.set_states([replace_leaves(state, filled) for _, state in made.states()])
    return made


@pytest.mark.parametrize("spec", ["int4", "topk:0.1", "powersgd:2"])
def test_the_mean_lacks_the_same_after_a_change_of_workers(spec: str) -> None:
    """Three workers become two: each delivers what it owed of the mean of three as its part of the mean of two."""
    for rank in range(2):
        before = Owed.of(engine(spec, rank, 3), rank, 3)
        assert before.tensors()
        assert any(tensor.abs().max() > 0 for tensor in before.tensors())
        successor = engine(spec, rank, 2)
        successor.set_states(successor.initial_states())
        before.into(successor, rank, 2)
        after = Owed.of(successor, rank, 2)
        for old, new in zip(before.tensors(), after.tensors(), strict=True):
            torch.testing.assert_close(new / 2, old / 3, rtol=1e-6, atol=0)
        both = before.plus(before.tensors())
        assert all(torch.equal(a, 2 * b) for a, b in zip(both.tensors(), before.tensors(), strict=True))
        restored = Owed.from_state_dict(before.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(restored.tensors(), before.tensors(), strict=True))
        assert any(leaf.owed for _, state in successor.states() for _, leaf in walk(state))


def test_a_copy_is_handed_over_with_all_its_bits() -> None:
    tensors = [torch.randn(70_000), torch.zeros(5000), torch.arange(9), torch.tensor(2.5, dtype=torch.float64)]
    tensors += [torch.randn(30, 4).bfloat16(), torch.empty(0), torch.tensor([True, False])]
    tensors[0][:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    payload = handover.packed({"windows": 3}, tensors)
    words, found = handover.unpacked(payload, [torch.empty_like(tensor) for tensor in tensors])
    assert words == {"windows": 3}
    for own, its in zip(tensors, found, strict=True):
        assert own.dtype == its.dtype
        assert own.shape == its.shape
        assert own.reshape(-1).view(torch.uint8).equal(its.reshape(-1).view(torch.uint8))
    assert payload.numel() < 0.9 * sum(tensor.nbytes for tensor in tensors)


def test_a_damaged_copy_and_one_of_another_model_are_refused() -> None:
    payload = handover.packed({}, [torch.ones(50)])
    for like in ([torch.ones(49)], [torch.ones(51)], [torch.ones(50)] * 2, [], [torch.ones(50).double()]):
        with pytest.raises(PayloadError, match="of another model"):
            handover.unpacked(payload, like)
    damaged = payload.clone()
    damaged[20] += 1
    for wrong in (damaged, payload[:-1], payload[:2]):
        with pytest.raises(PayloadError, match="is damaged"):
            handover.unpacked(wrong, [torch.ones(50)])


# Workers on threads ---------------------------------------------------------------------------------------------------


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


class Team:
    """Workers on threads of this process, who meet at a store in memory."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self.pool = ThreadPoolExecutor(8)
        self.models = threading.Lock()

    def join(self, number: int, **options: Any) -> tuple[Elastic, nn.Sequential]:
        with self.models:  # the global generator makes them
            model = network(number)
        settings: dict[str, Any] = {"every": 2, "deadline_s": 15.0, "lost_after_s": 0.6, "outer": DiLoCo(), **options}
        return Elastic(model, store=self.store, name=f"w{number}", **settings), model

    def start(self, work: Callable[..., Any], number: int, **options: Any) -> Future[Any]:
        def whole() -> Any:
            elastic, model = self.join(number, **options)
            with elastic:
                return work(elastic, model)

        return self.pool.submit(whole)

    def all(self, work: Callable[..., Any], workers: int, **options: Any) -> list[Any]:
        futures = [self.start(work, number, begin_with=workers, **options) for number in range(workers)]
        return [future.result(60) for future in futures]


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = Team()
    yield made
    made.pool.shutdown(wait=True, cancel_futures=True)


def train(elastic: Elastic, model: nn.Module, windows: int) -> None:
    """Each step learns from what nobody else has."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator().manual_seed(int(elastic.name[1:]))
    while elastic.windows < windows and not elastic.left:
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        elastic.step(samples=8)


def bits(model: nn.Module) -> bytes:
    return b"".join(t.detach().contiguous().numpy().tobytes() for t in model.state_dict().values())


@pytest.mark.parametrize("method", ["none", "int4", "topk:0.2", "powersgd:2"])
def test_workers_begin_alike_and_stay_alike(method: str, team: Team) -> None:
    def work(elastic: Elastic, model: nn.Module) -> Any:
        found = [bits(model)]
        for windows in range(1, 4):
            train(elastic, model, windows)
            found.append(bits(model))
        return found, elastic.rank, elastic.world_size, elastic.steps, elastic.samples, elastic.sent_bytes

    first, *others = team.all(work, 3, method=method)
    assert all(other[0] == first[0] for other in others)
    assert len(set(first[0])) == 4
    assert sorted(each[1] for each in (first, *others)) == [0, 1, 2]
    assert {each[2:5] for each in (first, *others)} == {(3, 3 * 3 * 2, 3 * 3 * 2 * 8)}
    assert first[5] > 0


def test_without_losses_it_is_averaging(team: Team) -> None:
    """One window of two workers, next to the mean of what both would have done alone."""
    start = network(0)

    def work(elastic: Elastic, model: nn.Module) -> Any:
        begin = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        own: list[torch.Tensor] = []
        for step in range(2):
            optimizer.zero_grad()
            (model(torch.ones(4, 6)).sum() * (1 + elastic.rank)).backward()
            optimizer.step()
            if step == 1:
                own.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            elastic.step()
        return begin, own[0], nn.utils.parameters_to_vector(model.parameters()).detach()

    one, other = team.all(work, 2, outer=None)
    assert sum(p.numel() for p in start.parameters()) == one[0].numel()
    assert torch.equal(one[2], other[2])
    torch.testing.assert_close(one[2], (one[1] + other[1]) / 2, rtol=0, atol=1e-6)


def test_a_newcomer_has_all_that_the_others_have(team: Team) -> None:
    begun = threading.Event()

    def old(elastic: Elastic, model: nn.Module) -> Any:
        train(elastic, model, 2)
        begun.set()
        while elastic.world_size < 3:
            train(elastic, model, elastic.windows + 1)
        at = elastic.windows
        train(elastic, model, at + 3)
        return at, bits(model), elastic.steps, [change.joined for change in elastic.changes], elastic.handed_bytes

    def new(elastic: Elastic, model: nn.Module) -> Any:
        at = elastic.windows
        train(elastic, model, at + 3)
        return at, bits(model), elastic.steps

    futures = [team.start(old, number, begin_with=2, method="int4") for number in range(2)]
    assert begun.wait(30)
    newcomer = team.start(new, 2, method="int4").result(60)
    for found in (future.result(60) for future in futures):
        assert found[:3] == newcomer
        assert found[3] == [(), ("w2",)]
    assert sum(future.result()[4] for future in futures) > 0


def test_who_leaves_hands_over_what_it_owes(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all owe of the mean together is the same before and after, and nobody counts it as lost."""
    met, before, after = threading.Barrier(3), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    kept, notes = Owed.of, threading.Event()

    def noted(engine: Engine, rank: int, ranks: int) -> Owed:
        owed = kept(engine, rank, ranks)
        if notes.is_set():
            before.setdefault(threading.current_thread().name, torch.cat(owed.tensors()) / ranks)
        return owed

    monkeypatch.setattr(Owed, "of", noted)

    def share(elastic: Elastic) -> torch.Tensor:
        state = elastic.state_dict()["owed"]
        return torch.cat([grain["values"] for grain in state["grains"]]) / state["ranks"]

    def work(elastic: Elastic, model: nn.Module) -> Any:
        train(elastic, model, 2)
        if elastic.name == "w2":
            elastic.leave()
        met.wait(30)
        notes.set()
        met.wait(30)
        train(elastic, model, 3)
        if not elastic.left:
            after[elastic.name] = share(elastic)
        met.wait(30)
        return elastic.left, elastic.changes[-1].left, elastic.changes[-1].lost

    found = team.all(work, 3, method="topk:0.1")
    assert sorted(left for left, _, _ in found) == [False, False, True]
    assert all((left, lost) == (("w2",), {}) for _, left, lost in found)
    assert len(before) == 3
    assert len(after) == 2
    total = torch.stack(list(before.values())).sum(0)
    assert float(total.abs().max()) > 1e-3
    torch.testing.assert_close(torch.stack(list(after.values())).sum(0), total, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lost", ["keep", "discard"])
def test_a_window_with_losses_is_kept_or_discarded(lost: str, team: Team) -> None:
    def work(elastic: Elastic, model: nn.Module) -> Any:
        train(elastic, model, 1)
        if elastic.name == "w2":
            return None  # it closes, in the middle of the run
        copy, owed = elastic.global_copy(), elastic.steps
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            if elastic.step():
                break
        went_back = all(torch.equal(model.get_parameter(name), value) for name, value in copy.items())
        return elastic.last.kind, elastic.windows, elastic.steps - owed, went_back, list(elastic.last.lost), bits(model)

    one, other, _ = team.all(work, 3, lost=lost, method="int4")
    assert one == other
    expected = ("average", 2, 4, False, ["w2"]) if lost == "keep" else ("discard", 1, 0, True, ["w2"])
    assert one[:5] == expected


def test_what_lost_workers_owed_is_told(team: Team) -> None:
    def work(elastic: Elastic, model: nn.Module) -> Any:
        train(elastic, model, 2)
        if elastic.name == "w1":
            values = elastic.state_dict()["owed"]
            return float(torch.cat([grain["values"] for grain in values["grains"]]).norm() / values["ranks"])
        train(elastic, model, 3)
        return elastic.last.lost["w1"]

    said, owed = team.all(work, 2, method="topk:0.1")
    assert said == pytest.approx(owed, rel=1e-5)
    assert owed > 1e-3


def test_a_run_begins_again_from_a_saved_state(team: Team) -> None:
    def work(elastic: Elastic, model: nn.Module) -> Any:
        train(elastic, model, 3)
        return elastic.state_dict(), bits(model)

    (saved, model_bits), (other, _) = team.all(work, 2, method="topk:0.2")

    def again(elastic: Elastic, model: nn.Module) -> Any:
        begun = bits(model), elastic.windows, elastic.steps, elastic.state_dict()["owed"]
        train(elastic, model, 4)
        return begun

    futures = [
        team.start(again, number, run="again", begin_with=2, method="topk:0.2", resume=state)
        for number, state in enumerate((saved, other))
    ]
    for future, state in zip(futures, (saved, other), strict=True):
        begun, windows, steps, owed = future.result(60)
        assert (begun, windows, steps) == (model_bits, 3, saved["steps"])
        pairs = zip(owed["grains"], state["owed"]["grains"], strict=True)
        assert all(torch.equal(one["values"], its["values"]) for one, its in pairs)
    for wrong, said in (
        ({**saved, "version": 9}, "version 9"),
        ({**saved, "tensors": {}}, "has a tensor"),
        ({**saved, "steps": "3"}, "is damaged"),
        ({**saved, "owed": {"grains": []}}, "'owed' is damaged"),
    ):
        with pytest.raises(StateError, match=said):
            team.join(0, run="wrong", resume=wrong)


def test_a_parameter_that_is_not_finite_is_named_on_all_workers(team: Team) -> None:
    told_both = threading.Barrier(2, timeout=30)  # a worker that left at once might be missed before the other is told

    def work(elastic: Elastic, model: nn.Module) -> Any:
        before = elastic.global_copy()
        if elastic.name == "w1":
            with torch.no_grad():
                model.get_parameter("0.weight").fill_(float("nan"))
        elastic.step()
        with pytest.raises((StepError, CommunicationError)) as told:
            elastic.step()
        told_both.wait()
        kept = elastic.global_copy()
        assert all(torch.equal(kept[name], before[name]) for name in before)
        return str(told.value)

    said = team.all(work, 2, lost_after_s=10.0)  # a busy machine must not lose one meanwhile
    assert any("'0.weight' is not finite on some rank" in each for each in said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lost": "maybe"}, "lost='maybe': give one of 'keep', 'discard'"),
        ({"least": 0}, "least=0"),
        ({"least": 3, "begin_with": 2}, "begin_with=2"),
        ({"every": DriftTriggered(0.1, 8)}, "windows that drift ends"),
        ({"outer": SlowMo()}, "use DiLoCo"),
        ({"method": "dp:1"}, "fixed number of ranks"),
        ({"method": "int8,node=2"}, "leave out node="),
        ({"method": "krum:1"}, "ranks"),
        ({"every": 0}, "every=0"),
        ({"store": "29400"}, "give host:port"),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    with pytest.raises(CompositionError, match=said):
        Elastic(network(0), **{"store": store, **settings})


def test_a_worker_of_another_run_is_told_in_what_it_differs(team: Team) -> None:
    elastic, _ = team.join(0)
    with elastic:
        with pytest.raises(AttachError, match="every=Constant"):
            team.join(1, every=3)
        with pytest.raises(AttachError, match=r"has 'copy of 0.weight' \(8, 6\) .*, and this worker .* \(5, 6\)"):
            Elastic(nn.Sequential(nn.Linear(6, 5)), 2, store=team.store, outer=DiLoCo())
        assert elastic.world_size == 1


def test_a_worker_of_another_version_is_told_both(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, _ = team.join(0)
    with elastic:
        monkeypatch.setattr(store, "VERSION", "9.8.7")
        with pytest.raises(AttachError) as told:
            team.join(1, every=3)
    assert f"which has gradwire {gradwire.__version__}, and this worker gradwire 9.8.7" in str(told.value)


def test_too_few_workers_and_a_run_that_is_over_are_told(team: Team) -> None:
    with pytest.raises(CommunicationError, match=r"begin_with=2 asks for more workers than have come within .* \(w0\)"):
        team.join(0, begin_with=2, deadline_s=0.3)
    elastic, model = team.join(0, run="short")
    train(elastic, model, 1)
    elastic.close()
    elastic.close()
    with pytest.raises(StepError, match="has left its run"):
        elastic.step()
    with pytest.raises(CommunicationError, match="nobody who has the model of this run"):
        team.join(1, run="short")


def test_below_its_least_number_a_run_gives_up(team: Team) -> None:
    def work(elastic: Elastic, model: nn.Module) -> Any:
        train(elastic, model, 1)
        if elastic.name == "w1":
            return ""
        with pytest.raises(CommunicationError) as told:
            train(elastic, model, 2)
        return str(told.value)

    assert "least=2 asks for more workers" in team.all(work, 2, least=2, deadline_s=2.0)[0]


def test_a_name_that_is_taken_ends_who_had_it(team: Team) -> None:
    first, model = team.join(0)
    with first:
        first._heartbeat._take_name()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(CommunicationError, match="another worker has taken the name 'w0'"):
            train(first, model, 10_000)


def test_a_worker_that_was_asleep_sees_that_the_run_has_gone_on(team: Team) -> None:
    heartbeat = Heartbeat(team.store, "asleep", 5.0)
    rounds = Rounds(team.store, heartbeat, "keep", Needs(1, 2), 10.0, 10.0)
    rounds.append(came(heartbeat.number))
    team.store.set("now", written(Head(7, 6, members(3))))
    team.store.delete_key(rounds.name)
    with pytest.raises(Behind, match="past round 0"):
        rounds.outcome()
    heartbeat.close(leaves=True)


# As an averager -------------------------------------------------------------------------------------------------------


def averages(elastic: Elastic) -> Averager:
    """Pyright sees to it that it is one."""
    return elastic


def test_in_mid_window_the_global_copy_can_be_evaluated(team: Team) -> None:
    def work(elastic: Elastic, model: nn.Module) -> Any:
        train(elastic, model, 1)
        agreed, sent = elastic.global_copy(), elastic.stats().wire_bytes
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        model(torch.full((4, 6), 1.0 + elastic.rank)).square().mean().backward()
        optimizer.step()
        elastic.step()
        own = bits(model)
        with averages(elastic).evaluating():
            evaluated = {name: p.detach().clone() for name, p in model.named_parameters()}
            assert all(torch.equal(evaluated[name], agreed[name]) for name in agreed)
        assert bits(model) == own
        assert elastic.stats().wire_bytes == sent
        assert any(not torch.equal(p, agreed[name]) for name, p in model.named_parameters())
        return {name: value.tolist() for name, value in evaluated.items()}

    one, other = team.all(work, 2)
    assert one == other
    assert not Elastic.averages_to_evaluate


def test_sync_ends_a_window_early(team: Team) -> None:
    def work(elastic: Elastic, model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            elastic.step(samples=8)
        elastic.sync()
        ended = elastic.windows, elastic.steps, elastic.samples, bits(model)
        elastic.sync()  # there is nothing to average
        return *ended, elastic.windows

    one, other = team.all(work, 2, every=2)
    assert one == other
    assert (*one[:3], one[4]) == (2, 6, 48, 2)


def test_figures_go_on_where_the_list_of_workers_changes(team: Team) -> None:
    """Bytes and steps are of all averages; a report is of those among the workers at hand."""

    def work(elastic: Elastic, model: nn.Module) -> Any:
        with pytest.raises(StepError, match="there was none yet among those of now"):
            elastic.report()
        train(elastic, model, 11)
        three = elastic.stats(), elastic.report()
        if elastic.name == "w2":
            elastic.leave()
        train(elastic, model, 12)
        if elastic.left:
            with pytest.raises(StepError, match="has left"):
                elastic.report()
            return three, elastic.stats(), None
        with pytest.raises(StepError, match="there was none yet among those of now"):
            elastic.report()
        train(elastic, model, 13)
        return three, elastic.stats(), elastic.report()

    *stayed, left = team.all(work, 3, method="int4", outer=None)
    for (before, among_three), after, among_two in stayed:
        assert (before.steps, after.steps) == (2 * 11, 2 * 13)  # a session for parameters, and one for buffers
        assert 0 < before.wire_bytes < after.wire_bytes
        assert (among_three.ranks, among_three.steps, among_three.first_step) == (3, 6, 5)  # without start-up
        assert (among_two.ranks, among_two.steps, among_two.first_step) == (2, 0, 13)
        assert "too early" in among_two.verdict
        assert among_three.sent_bytes == pytest.approx(before.wire_bytes / (2 * 11))
        assert among_two.method == among_three.method == "int4"
        assert (among_three.period, among_three.steps_a_period, among_three.times) == ("window", 2, None)
        assert among_three.residual_norm
        assert among_three.dense_bytes > among_three.sent_bytes
        assert "less than DDP in fp32 (not counted: what newcomers are handed)" in among_three.verdict
    assert left[1].steps == 2 * 12


def test_a_report_is_of_one_worker_too(team: Team) -> None:
    elastic, model = team.join(0)
    with elastic:
        train(elastic, model, 1)
        assert "there is one rank" in elastic.report().verdict


def test_a_run_under_way_takes_up_no_saved_state(team: Team) -> None:
    elastic, _ = team.join(0)
    with elastic, pytest.raises(StateError, match="begin another run"):
        averages(elastic).checked(elastic.state_dict())


# By a spec ------------------------------------------------------------------------------------------------------------


def test_a_spec_says_what_elastic_is_made_with(team: Team) -> None:
    spec = "elastic:H=3,update=int4,lr=0.5,momentum=0.25,nesterov=off,lost=discard"
    model = network(0)
    inner = torch.optim.SGD(model.parameters(), 0.05)
    optimizer = gradwire.wrap(inner, model, spec, store=team.store, name="w0", seed=7)
    outer = DiLoCo(lr=0.5, momentum=0.25, nesterov=False)
    with (
        optimizer,
        Elastic(network(0), 3, "int4", store=team.store, run="other", outer=outer, lost="discard", seed=7) as made,
    ):
        assert isinstance(optimizer, ElasticOptimizer)
        assert optimizer.averaging.settings == made.settings
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
        assert (optimizer.averaging.windows, optimizer.averaging.steps, optimizer.stats().steps) == (1, 3, 2)
        assert optimizer.report().method == spec
        assert optimizer.state_dict()["sync"]["windows"] == 1
        both: list[Any] = [optimizer, made]
        for saves in both:
            with pytest.raises(StateError, match="begin again with resume="):
                gradwire.save("nowhere", saves)
        with pytest.raises(StateError, match="begin another run"):
            optimizer.load_state_dict(optimizer.state_dict())
        saved = optimizer.state_dict()["sync"]
    assert optimizer.averaging.left
    again = gradwire.wrap(inner, model, spec, store=team.store, run="again", seed=7, resume=saved)
    assert again.averaging.windows == 1
    again.close()


def test_a_spec_without_an_outer_step_is_the_mean(team: Team) -> None:
    model = network(0)
    inner = torch.optim.SGD(model.parameters(), 0.05)
    with (
        gradwire.wrap(inner, model, "elastic:2", store=team.store) as optimizer,
        Elastic(network(0), 2, store=team.store, run="other") as plain,
    ):
        assert optimizer.averaging.settings == plain.settings
        assert optimizer.averaging.outer == Mean()


def test_workers_of_one_spec_stay_alike(team: Team) -> None:
    def work(number: int) -> Any:
        with team.models:
            model = network(number)
        inner = torch.optim.AdamW(model.parameters(), 0.01)
        spec = "elastic:2,update=topk:0.2,lr=0.7,momentum=0.9"
        with gradwire.wrap(inner, model, spec, store=team.store, name=f"w{number}", begin_with=2) as optimizer:
            generator = torch.Generator().manual_seed(number)
            while optimizer.averaging.windows < 3:
                optimizer.zero_grad()
                model(torch.randn(8, 6, generator=generator)).square().mean().backward()
                optimizer.step()
            return bits(model), optimizer.averaging.steps

    one, other = (future.result(60) for future in [team.pool.submit(work, number) for number in range(2)])
    assert one == other
    assert one[1] == 2 * 3 * 2


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("elastic:H=0", "every=0"),
        ("elastic:8,nesterov=off", "leave nesterov out"),
        ("elastic:8,lr=0", "lr=0"),
        ("elastic:8,momentum=1", "momentum=1"),
        ("elastic:8,update=int9", "unknown method 'int9'"),
        ("elastic:8,update=dp:1", "fixed number of ranks"),
        ("elastic:8,update=(int8,node=2)", "leave out node="),
        ("elastic:8,lost=maybe", "known are keep, discard"),
        ("elastic:8,outer=int4", "known are"),
    ],
)
def test_a_spec_that_fits_nothing_is_refused(spec: str, answer: str) -> None:
    with pytest.raises(GradwireError) as refused:
        gradwire.parse(spec)
    assert answer in str(refused.value)


def test_a_spec_elsewhere_is_answered_with_the_call_that_takes_it() -> None:
    call = 'gradwire.wrap(optimizer, model, "elastic:8", store="host:29400")'
    assert entry("elastic").place.call_of("elastic:8") == call
    with pytest.raises(SpecError, match=re.escape(call)):
        gradwire.Session({"w": torch.zeros(3)}, "elastic:8")
    with pytest.raises(SpecError, match=re.escape(call)):
        make_engine("ddp").check("elastic:8", 2)


# Processes ------------------------------------------------------------------------------------------------------------


def test_a_store_that_nobody_holds_is_told() -> None:
    with pytest.raises(CommunicationError, match=r"the store at 127.0.0.1:1 cannot be reached: start it with"):
        store.connected("127.0.0.1:1", "run", connect_s=0.5)


def test_a_port_that_is_taken_is_told() -> None:
    held: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    with pytest.raises(CommunicationError, match=f"cannot listen on port {held.port}"):
        store.serve(held.port)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as made:
        yield made


def plan_for(samples: int, **options: Any) -> dict[str, Any]:
    return {"samples": samples, "options": {"begin_with": 3, **options}}


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize(
    ("method", "lost", "deaths"),
    [
        ("int4", "keep", [Death(1, "issue", 9, 0.0), Death(2, "after", 21, 0.2)]),
        ("none", "discard", [Death(0, "before", 14, 0.0), Death(2, "issue", 12, 0.1)]),
    ],
)
@pytest.mark.draw(1)
def test_workers_that_are_killed_come_back(method: str, lost: str, deaths: list[Death], crew: Crew) -> None:
    found = run_of(crew, f"killed {lost}", deaths, 3, plan_for(16_000, method=method, lost=lost))
    assert found.killed == 2
    assert found.lost >= 1
    assert found.windows >= 33


@pytest.mark.one_draw_in(2)
def test_who_is_asked_to_leave_does(crew: Crew, tmp_path: Path) -> None:
    """Its flight record tells what it does, and that SIGTERM was not its end."""
    plan, records = plan_for(16_000, records=str(tmp_path)), tmp_path
    workers = [crew.start(slot, run="leaving", name=f"w{slot}", **plan) for slot in range(3)]
    until(workers, lambda: any("windows" in words for words in workers[2].said), 60)
    workers[2].kill(signal.SIGTERM)
    asked = stacks_of(records, ask_first=True, patience_s=30.0)
    assert [line.rank for line in asked.lines] == [0, 1, 2]
    assert all("gradwire.sync.Elastic" in line.doing for line in asked.lines)
    until(workers, lambda: all(worker.process.poll() is not None for worker in workers), 60)
    ends = [worker.said[-1] for worker in workers]
    assert [end["left"] for end in ends] == [False, False, True]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert [change["left"] for change in ends[0]["changes"]][-1] == ["w2"]
    assert not any(change["lost"] for change in ends[0]["changes"])
    assert {line.state for line in stacks_of(records).lines} == {"ended"}
    for worker in workers:
        worker.close()


@pytest.mark.one_draw_in(2)
def test_a_run_whose_store_is_gone_says_so() -> None:
    with Crew(1) as crew:
        worker = crew.start(0, run="run", name="w0", samples=10**9)
        until([worker], lambda: any("windows" in words for words in worker.said), 60)
        crew.kill_store()
        until([worker], lambda: worker.process.poll() is not None, 60)
        assert worker.process.returncode == 1
        assert "CommunicationError: the store cannot be reached: start it with `gradwire store`" in crew.tail(worker)
        worker.close()


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    page = (Path(__file__).parents[1] / "docs" / "elastic.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    exec("".join(blocks), {})
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
