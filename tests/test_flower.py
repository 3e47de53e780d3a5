"""Federations on Flower, without a network and without Ray: the same bits as in one process, whatever goes wrong."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from federations import Classifier, on_classifier, small_model, state_bits
from flower_cases import FIRST, LocalGrid, altered, context, on_flower
from gradwire.adapters.flower import FederatedStrategy, client_app, content
from gradwire.adapters.flower.client import partition_id
from gradwire.adapters.flower.content import MESSAGE, ROUND, WRITER, NodeAnswer, NodeIdentity, plain, read, written
from gradwire.adapters.flower.memory import PENDING, SETTLED, KeptAfter
from gradwire.core.errors import CompositionError, FederationError, StateError
from gradwire.core.key import Key
from gradwire.core.record import pack
from gradwire.federated import SGD, Client, Conditions, FedAdam, Federation, FedNova, FedProx, Scaffold, Server
from gradwire.federated.client import Done

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nova": {"method": FedNova(), "update": "topk:0.1"},
    "scaffold": {"method": Scaffold(), "update": "topk:0.2", "broadcast": "int4"},
    "adam": {"method": FedProx(0.1), "optimizer": FedAdam(lr=0.05), "update": "int4"},
}


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)  # Flower's logger keeps to itself


# The same run as in one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS)
def test_a_run_has_the_bits_of_one_process(run: str) -> None:
    here = on_classifier(**RUNS[run])
    rounds = list(here.run(5))
    strategy, grid = on_flower(**RUNS[run])
    result = strategy.start(grid, num_rounds=5)
    assert strategy.rounds == rounds
    assert strategy.given_up == []
    assert state_bits(strategy.server) == state_bits(here.server)
    last = result.arrays.to_torch_state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in here.server.model.state_dict().items())
    assert result.train_metrics_clientapp[5]["loss"] == rounds[-1].loss
    assert result.train_metrics_clientapp[5]["sent-bytes"] == sum(rounds[-1].sent_bytes.values())


@pytest.mark.parametrize("run", ["nova", "scaffold"])
def test_what_is_lost_after_training_costs_no_memory(run: str) -> None:
    """In process a lost client does not train; on Flower it trains, and its answer is lost."""
    weather = Conditions(drop=0.4)
    here = on_classifier(**RUNS[run])
    here.conditions = weather
    strategy, grid = on_flower(**RUNS[run])

    def lose(node: int, message: Message, reply: Message | None) -> list[Message]:
        key = Key(strategy.server.terms.seed, strategy.server.round, "federated.weather", rank=node - FIRST)
        return [reply] if reply and weather.share(key) else []

    grid.fault = lose
    lost = 0
    for _ in range(8):
        strategy.start(grid, num_rounds=1)
        lost += len(here.round().dropped)
    assert lost > 4
    assert state_bits(strategy.server) == state_bits(here.server)


@pytest.mark.parametrize("run", ["nova", "scaffold"])
def test_a_round_below_its_quorum_is_given_up_and_the_next_goes_on(run: str) -> None:
    here = on_classifier(quorum=3, **RUNS[run])
    strategy, grid = on_flower(quorum=3, **RUNS[run])
    seen: list[int] = []

    def lose(node: int, message: Message, reply: Message | None) -> list[Message]:
        number = int(message.metadata.group_id)
        seen.append(number)
        return [reply] if reply and (number != 3 or seen.count(3) <= 2) else []

    grid.fault = lose
    strategy.start(grid, num_rounds=6)
    for number in range(1, 7):
        if number == 3:
            here.server.begin()
            here.server.abandon()
        else:
            here.round()
    (why,) = strategy.given_up
    assert "has 2 updates of 4 clients, and it needs 3: nothing was applied" in why
    assert "did not answer in time" in why
    assert [done.number for done in strategy.rounds] == [0, 1, 2, 3, 4]
    assert state_bits(strategy.server) == state_bits(here.server)


def test_repeated_replies_count_once() -> None:
    here = on_classifier(**RUNS["nova"])
    strategy, grid = on_flower(**RUNS["nova"])
    grid.fault = lambda node, message, reply: [reply, reply] if reply else []
    strategy.start(grid, num_rounds=4)
    assert strategy.rounds == list(here.run(4))
    assert state_bits(strategy.server) == state_bits(here.server)


def test_late_replies_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Replies of round 2 come in round 3, before and beside those of round 3."""
    strategy, grid = on_flower(sample=12, quorum=6, **RUNS["nova"])
    late: list[Message] = []

    def delay(node: int, message: Message, reply: Message | None) -> list[Message]:
        assert reply is not None
        if message.metadata.group_id == "2" and node >= FIRST + 9:
            late.append(reply)
            return []
        if message.metadata.group_id == "3" and node >= FIRST + 10:
            return [late[node - FIRST - 9], reply] if node == FIRST + 10 else [late[node - FIRST - 9]]
        return [reply]

    grid.fault = delay
    strategy.start(grid, num_rounds=3)
    assert len(late) == 3
    assert set(strategy.rounds[1].dropped) == {9, 10, 11}
    assert strategy.rounds[2].dropped == {11: "client 11 answers to a message of another round: it is left out"}


# What is wrong with a reply ------------------------------------------------------------------------------------------

NODE = FIRST + 3
"""The one whose replies are wrong."""


def rewritten(**fields: Any) -> Callable[[Message, Message], list[Message]]:
    """A reply whose update has other values in some fields."""

    def rewrite(answer: NodeAnswer) -> NodeAnswer:
        assert isinstance(answer.outcome, Done)
        return answer.replace(outcome=answer.outcome.replace(update=answer.outcome.update.replace(**fields)))

    return lambda message, reply: [altered(reply, rewrite)]


def wires(**changes: Tensor) -> Callable[[Message, Message], list[Message]]:
    """A reply whose update has other wires, or more."""

    def rewrite(answer: NodeAnswer) -> NodeAnswer:
        assert isinstance(answer.outcome, Done)
        update = answer.outcome.update
        return answer.replace(outcome=answer.outcome.replace(update=update.replace(wires={**update.wires, **changes})))

    return lambda message, reply: [altered(reply, rewrite)]


def in_place_of(change: Callable[[bytes], bytes], stype: str = WRITER) -> Callable[[Message, Message], list[Message]]:
    """A reply whose record has other bytes, or another writer."""

    def put(message: Message, reply: Message) -> list[Message]:
        array = reply.content.array_records[MESSAGE]["record"]
        data = change(array.data)
        reply.content[MESSAGE] = ArrayRecord({"record": Array("uint8", (len(data),), stype, data)})
        return [reply]

    return put


def pickled(packed: bytes) -> bytes:
    file = BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return file.getvalue()


def claims_a_terabyte(packed: bytes) -> bytes:
    header = json.dumps({"0": {"dtype": "U8", "shape": [10**12], "data_offsets": [0, 10**12]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


def without(message: Message, reply: Message) -> list[Message]:
    del reply.content[MESSAGE]
    return [reply]


def of_before(message: Message, reply: Message) -> list[Message]:
    """What a node answers whose gradwire is older than these records."""
    del reply.content[MESSAGE]
    reply.content["gradwire.numbers"] = ConfigRecord({"json": "{}"})
    reply.content["gradwire.arrays"] = ArrayRecord()
    return [reply]


def same(packed: bytes) -> bytes:
    return packed


WRONG: dict[str, tuple[Callable[[Message, Message], list[Message]], str]] = {
    "no reply": (lambda message, reply: [], "client 3 did not answer in time"),
    "an error": (
        lambda message, reply: [Message(Error(5, "Node\nis\x1b unavailable"), reply_to=message)],
        "client 3's node failed: Node is unavailable",
    ),
    "another model": (rewritten(fingerprint="0" * 16), "sends an update of another model"),
    "another client": (rewritten(client=4), "client 3 sends an update as client 4"),
    "another round": (rewritten(round=7), "sends an update of round 7 in round 0"),
    "no examples": (rewritten(examples=0), "claims 0.0 examples"),
    "steps in words": (
        rewritten(steps="five"),
        "3's answer is no NodeAnswer: its outcome.update.steps should be a whole number, not a text",
    ),
    "cut": (in_place_of(lambda packed: packed[:-5]), "client 3's answer is a record that is damaged"),
    "another round's token": (
        lambda message, reply: [altered(reply, lambda answer: answer.replace(token="x"))],
        "answers to a message of another round",
    ),
    "nothing": (without, f"client 3's answer has no record that {WRITER} could read"),
    "an old form": (of_before, f"client 3's answer has no record that {WRITER} could read"),
    "another version": (
        in_place_of(same, "gradwire 0.1.0"),
        f"client 3's answer was written by gradwire 0.1.0, and this is {WRITER}: give server and nodes one",
    ),
    "another record": (
        in_place_of(lambda packed: pack(NodeIdentity(3))),
        "client 3's answer is no NodeAnswer: it has 'type', which is unknown",
    ),
    "a long field": (
        in_place_of(lambda packed: packed.replace(b"forgot", b"f\n\x1b[2J")),
        "client 3's answer is no NodeAnswer: it has 'f\\n\\x1b[2J', which is unknown",
    ),
    "a pickle": (in_place_of(pickled), "a record that is damaged"),
    "a claim": (in_place_of(claims_a_terabyte), "a record that is damaged"),
    "another form": (in_place_of(same, "torch"), "was written by torch"),
    "a matrix": (
        rewritten(buffers=torch.zeros(2, 2, dtype=torch.float64)),
        "should be a vector of torch.float64, not a tensor of shape",
    ),
    "floats": (
        rewritten(buffers=torch.zeros(25)),
        "should be a vector of torch.float64, not a tensor of shape (25,) and torch.float32",
    ),
    "cut bytes": (wires(model=torch.zeros(3, dtype=torch.uint8)), "is left out as damaged"),
    "another vector": (wires(more=torch.zeros(3, dtype=torch.uint8)), "it trains by another method"),
    "not finite": (rewritten(buffers=torch.full((25,), math.nan, dtype=torch.float64)), "not finite"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_reply_drops_its_client_and_no_other(kind: str) -> None:
    make, reason = WRONG[kind]
    strategy, grid = on_flower(sample=12, update="topk:0.1")
    grid.fault = lambda node, message, reply: [] if not reply else make(message, reply) if node == NODE else [reply]
    strategy.start(grid, num_rounds=1)
    (done,) = strategy.rounds
    assert set(done.dropped) == {3}
    assert len(done.clients) == 11
    assert reason in done.dropped[3]
    assert len(done.dropped[3]) <= 400
    grid.fault = lambda node, message, reply: [reply] if reply else []
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[1].dropped == {}


def test_replies_of_nodes_that_were_not_asked_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    here = on_classifier(**RUNS["nova"])
    strategy, grid = on_flower(**RUNS["nova"])

    def more(node: int, message: Message, reply: Message | None) -> list[Message]:
        assert reply is not None
        stranger = Message(reply.content, reply_to=message)
        vars(stranger.metadata)["_src_node_id"] = 5
        return [stranger, reply]

    grid.fault = more
    strategy.start(grid, num_rounds=2)
    assert strategy.rounds == list(here.run(2))
    assert "node 5 was not asked in this round: its reply is left out" in caplog.text


# Nodes ---------------------------------------------------------------------------------------------------------------


def test_nodes_that_are_no_client_take_no_part(caplog: pytest.LogCaptureFixture) -> None:
    strategy, grid = on_flower(sample=12)
    grid.contexts[1] = context(1, {})
    grid.contexts[2] = context(2, {"partition-id": 99})
    grid.contexts[4] = context(4, {"partition-id": "x"})
    grid.contexts[3] = context(3, {"partition-id": 7})
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[0].dropped == {}
    assert "node 1 takes no part: a node with partition-id None does not know which client it is" in caplog.text
    assert "node 2 takes no part: it says that it is client 99 of a federation of 12" in caplog.text
    assert "node 4 takes no part: a node with partition-id 'x'" in caplog.text
    assert f"node {FIRST + 7} says that it is client 7, as another node did before" in caplog.text
    assert SETTLED not in grid.contexts[3].state


def test_clients_without_a_node_are_dropped_until_one_comes() -> None:
    strategy, grid = on_flower(sample=12)
    away = grid.contexts.pop(FIRST + 5)
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[0].dropped == {5: "client 5 has no node that is connected"}
    grid.contexts[77] = context(77, {"partition-id": "5"})
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[1].dropped == {}
    del grid.contexts[77]
    grid.contexts[FIRST + 5] = away
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[2].dropped == {}


def test_a_federation_without_nodes_gives_its_rounds_up() -> None:
    strategy, grid = on_flower()
    grid.contexts.clear()
    strategy.start(grid, num_rounds=2)
    assert len(strategy.given_up) == 2
    assert strategy.rounds == []


def test_a_node_may_have_its_own_client_alone() -> None:
    own = Classifier(12)
    here = on_classifier(update="topk:0.1")
    strategy, grid = on_flower(update="topk:0.1")
    grid.app = client_app(
        small_model, lambda context: own(partition_id(context)), local=SGD(lr=0.1, steps=5), update="topk:0.1"
    )
    strategy.start(grid, num_rounds=3)
    assert strategy.rounds == list(here.run(3))
    assert state_bits(strategy.server) == state_bits(here.server)


def test_what_a_client_raises_drops_it() -> None:
    def client(i: int) -> Client:
        def loss(model: nn.Module, key: Key) -> Tensor:
            raise ValueError("no such file")

        return Client(1, loss) if i == 2 else Classifier(12)(i)

    strategy, grid = on_flower(sample=12, federation=Federation(12, client))
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[0].dropped == {2: "client 2 raised ValueError: no such file"}


def test_what_a_client_raises_may_name_a_file_that_is_no_text() -> None:
    def own(context: Context) -> Client:
        raise OSError("no file b\udcff")

    strategy, grid = on_flower(sample=12)
    grid.app = client_app(small_model, own, local=SGD(lr=0.1, steps=5))
    strategy.start(grid, num_rounds=1)
    assert "client 0 raised OSError: no file b\\udcff" in strategy.given_up[0]


def test_a_client_app_that_fails_drops_its_client() -> None:
    def no_model() -> nn.Module:
        raise OSError("disk\nfull")

    strategy, grid = on_flower(sample=12)
    good = grid.app
    grid.app = client_app(no_model, Federation(12, Classifier(12)), local=SGD(lr=0.1, steps=5))
    strategy.start(grid, num_rounds=1)
    assert "client 0's node failed: <class 'OSError'>:<'disk full'>" in strategy.given_up[0]
    grid.app = good
    strategy.start(grid, num_rounds=1)
    assert len(strategy.rounds[0].clients) == 12


def test_what_makes_a_nodes_own_client_may_fail() -> None:
    def own(context: Context) -> Client:
        raise OSError("disk full")

    strategy, grid = on_flower(sample=12)
    grid.app = client_app(small_model, own, local=SGD(lr=0.1, steps=5))
    strategy.start(grid, num_rounds=1)
    assert "client 0 raised OSError: disk full" in strategy.given_up[0]


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        ({"local": SGD(lr=0.2, steps=5)}, "the server has local SGD(lr=0.1"),
        ({"local": SGD(lr=0.1, steps=5), "method": FedNova()}, "has FedNova(mu=0.0): give both the same settings"),
        ({"local": SGD(lr=0.1, steps=5), "update": "int8"}, "the server has update Sending("),
    ],
)
def test_other_settings_are_told(app: dict[str, Any], reason: str) -> None:
    strategy, grid = on_flower()
    grid.app = client_app(small_model, Federation(12, Classifier(12)), **app)
    strategy.start(grid, num_rounds=1)
    assert reason in strategy.given_up[0]


def test_another_model_and_another_federation_are_told() -> None:
    strategy, grid = on_flower()
    grid.app = client_app(lambda: nn.Linear(8, 4), Federation(12, Classifier(12)), local=SGD(lr=0.1, steps=5))
    strategy.start(grid, num_rounds=1)
    assert "the server has model" in strategy.given_up[0]
    strategy, grid = on_flower(sample=12)
    grid.app = client_app(small_model, Federation(3, Classifier(3)), local=SGD(lr=0.1, steps=5))
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[0].clients == (0, 1, 2)
    assert strategy.rounds[0].dropped[11] == "client 11 is none of this federation's 3"


OTHER = f"was written by gradwire 0.1.0, and this is {WRITER}: give server and nodes one version"


def other_version(app: ClientApp, monkeypatch: pytest.MonkeyPatch, kinds: str) -> Any:
    """The ClientApp of node `NODE` is of another version of gradwire, where it answers messages of some kinds."""

    def run(message: Message, own: Context) -> Message:
        with monkeypatch.context() as other:
            if own.node_id == NODE and message.metadata.message_type.startswith(kinds):
                other.setattr(content, "WRITER", "gradwire 0.1.0")
            return app(message, own)

    return run


def test_a_node_of_another_version_takes_no_part(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, grid = on_flower(sample=12)
    grid.app = other_version(grid.app, monkeypatch, "query")
    strategy.start(grid, num_rounds=1)
    assert f"node {NODE} takes no part: its answer {OTHER}" in caplog.text
    assert strategy.rounds[0].dropped == {3: "client 3 has no node that is connected"}


def test_a_node_that_has_changed_its_version_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, grid = on_flower(sample=12)
    grid.app = other_version(grid.app, monkeypatch, "train")
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[0].dropped == {3: f"client 3's answer {OTHER}"}


@pytest.mark.parametrize("part", [MESSAGE, ROUND])
def test_an_order_of_another_version_is_refused_by_the_node(part: str) -> None:
    strategy, grid = on_flower(sample=12)
    good = grid.app

    def run(message: Message, own: Context) -> Message:
        if own.node_id == NODE and part in message.content:
            array = message.content.array_records[part]["record"]
            array.stype = "gradwire 9.9.9"
        return good(message, own)

    grid.app = run  # pyright: ignore[reportAttributeAccessIssue]
    strategy.start(grid, num_rounds=1)
    assert strategy.rounds[0].dropped == {
        3: f"an order was written by gradwire 9.9.9, and this is {WRITER}: give server and nodes one version"
    }


def test_a_model_is_turned_into_bytes_once_a_round() -> None:
    strategy, grid = on_flower(sample=12)
    seen: list[Message] = []
    grid.fault = lambda node, message, reply: (seen.append(message), [reply] if reply else [])[1]
    strategy.start(grid, num_rounds=1)
    assert len(seen) == 12
    assert len({id(message.content[ROUND]) for message in seen}) == 1
    assert max(len(message.content.array_records[MESSAGE]["record"].data) for message in seen) < 256


def test_a_seed_of_any_size_reaches_the_nodes() -> None:
    here, (strategy, grid) = on_classifier(seed=-(10**40)), on_flower(seed=-(10**40))
    strategy.start(grid, num_rounds=2)
    assert strategy.rounds == list(here.run(2))
    assert state_bits(strategy.server) == state_bits(here.server)


# State ---------------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_exactly_where_nodes_have_kept_their_state() -> None:
    whole, grid = on_flower(**RUNS["scaffold"])
    whole.start(grid, num_rounds=6)
    broken, there = on_flower(**RUNS["scaffold"])
    broken.start(there, num_rounds=3)
    saved = broken.state_dict()
    again, _ = on_flower(**RUNS["scaffold"])
    again.load_state_dict(saved)
    again.start(there, num_rounds=3)
    assert state_bits(again.server) == state_bits(whole.server)
    with pytest.raises(StateError, match="no state of a strategy"):
        again.load_state_dict({"server": 3})


def test_memory_that_is_gone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A new run of Flower, in which nodes have new state."""
    strategy, grid = on_flower(sample=12, **RUNS["nova"])
    strategy.start(grid, num_rounds=2)
    for node in grid.contexts:
        grid.contexts[node] = context(node)
    strategy.start(grid, num_rounds=1)
    assert "client 4 has lost what it owed the server: it begins anew" in caplog.text
    assert len(strategy.rounds[2].clients) == 12


def test_a_control_variate_that_is_gone_cannot_be_made_up() -> None:
    strategy, grid = on_flower(sample=12, method=Scaffold())
    strategy.start(grid, num_rounds=2)
    grid.contexts[NODE] = context(NODE)
    strategy.start(grid, num_rounds=2)
    for done in strategy.rounds[2:]:
        assert done.dropped == {
            3: "client 3 has lost what it kept in round 1, which Scaffold() cannot do without: begin a new federation"
        }


def test_a_server_that_begins_anew_finds_clients_without_memory() -> None:
    first, grid = on_flower(**RUNS["nova"])
    first.start(grid, num_rounds=4)
    second, _ = on_flower(**RUNS["nova"])
    fresh, other = on_flower(**RUNS["nova"])
    second.start(grid, num_rounds=4)
    fresh.start(other, num_rounds=4)
    assert state_bits(second.server) == state_bits(fresh.server)


def test_a_state_holds_two_versions_at_most() -> None:
    strategy, grid = on_flower(sample=12, **RUNS["nova"])
    strategy.start(grid, num_rounds=3)
    for held in grid.contexts.values():
        assert set(held.state) == {SETTLED, PENDING}
        assert read(held.state, PENDING, KeptAfter, "it").round == 2
        assert read(held.state, SETTLED, KeptAfter, "it").round == 1


def test_damaged_state_drops_its_client() -> None:
    strategy, grid = on_flower(sample=12, **RUNS["nova"])
    strategy.start(grid, num_rounds=1)
    grid.contexts[NODE].state[PENDING] = written(NodeIdentity(3))
    strategy.start(grid, num_rounds=1)
    assert "a node's state is no KeptAfter: it has 'type', which is unknown" in strategy.rounds[1].dropped[3]


# The strategy as Flower has strategies -------------------------------------------------------------------------------


def test_a_round_that_flower_stopped_is_given_up() -> None:
    here = on_classifier(**RUNS["nova"])
    strategy, grid = on_flower(**RUNS["nova"])

    def stops(node: int, message: Message, reply: Message | None) -> list[Message]:
        raise ConnectionError("the SuperLink is gone")

    good, grid.fault = grid.fault, stops
    with pytest.raises(ConnectionError):
        strategy.start(grid, num_rounds=1)
    grid.fault = good
    strategy.start(grid, num_rounds=1)
    here.server.begin()
    here.server.abandon()
    assert strategy.rounds == [here.round()]


def test_initial_arrays_are_the_servers_model() -> None:
    strategy, grid = on_flower()
    strategy.start(grid, strategy.arrays(), num_rounds=1)
    with pytest.raises(FederationError, match="leave them out"):
        strategy.start(grid, ArrayRecord(dict(nn.Linear(2, 2).state_dict())))


def test_the_server_evaluates_and_mods_see_the_configuration() -> None:
    seen: list[object] = []

    def mod(message: Message, context: Context, go_on: Callable[[Message, Context], Message]) -> Message:
        seen.append(message.content.config_records["config"]["lr"])
        return go_on(message, context)

    strategy, grid = on_flower()
    grid.app = client_app(small_model, Federation(12, Classifier(12)), local=SGD(lr=0.1, steps=5), mods=[mod])
    rounds: list[int] = []
    strategy.start(
        grid,
        num_rounds=2,
        train_config=ConfigRecord({"lr": 0.5}),
        evaluate_fn=lambda number, arrays: rounds.append(number),
    )
    assert rounds == [0, 1, 2]
    assert seen == [0.5] * 8


@pytest.mark.parametrize("nodes", [0, 13])
def test_wrong_numbers_of_nodes_are_refused(nodes: int) -> None:
    with pytest.raises(CompositionError, match="wait for 1 to 12"):
        FederatedStrategy(Server(small_model(), 12, sample=2, local=SGD(0.1)), nodes=nodes)


def test_words_of_others_are_one_short_line() -> None:
    assert plain("a\n\x1b[2Jb") == "a [2Jb"
    assert len(plain("x" * 10_000)) == 256


WITHOUT = """
import sys
sys.modules["flwr"] = None
try:
    import gradwire.adapters.flower
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_flower_one_sentence_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "CompositionError federations on Flower need flwr: pip install 'gradwire[flower]'"


def test_the_grid_for_tests_is_one_of_flowers() -> None:
    assert isinstance(on_flower()[1], LocalGrid)
