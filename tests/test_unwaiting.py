"""Optimizers whose ranks do not wait: what they compute, how they end, and what they refuse."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import CommunicationError, SpecError, StepError
from gradwire.asynchronous import ASGD, Bounded, ParameterServer, is_asynchronous, parse
from gradwire.asynchronous.methods import METHODS
from gradwire.asynchronous.reception import NOTHING, Reception
from gradwire.asynchronous.remote_servers import RemoteServers
from gradwire.asynchronous.sockets.connection import RemoteConnection
from gradwire.asynchronous.sockets.frames import HEAD, SECRET, VERSION, Frame, head_of, lengths_of, receive, send
from gradwire.asynchronous.sockets.host import Host
from gradwire.asynchronous.wire import MessageKind, WireMessage, plain
from gradwire.bench.ranks import run_function
from gradwire.sending import Sending

RANKS = 3
PART = {"part": torch.zeros(4)}
SECRET_OF_RUN = bytes(range(SECRET))


@functools.cache
def on_ranks(case: str, **arguments: Any) -> list[Any]:
    path = Path(__file__).with_name("unwaiting_cases.py")
    return run_function(f"{path}:{case}", RANKS, arguments, deadline_s=120)


def test_ranks_that_wait_for_all_make_steps_of_the_mean() -> None:
    assert max(on_ranks("no_staleness")) < 1e-6


@pytest.mark.parametrize(
    "spec", ["asgd", "asgd:inverse,H=2", "ssp:2,update=(topk:0.5,decay=0.9)", "dcasgd:0.5", "hogwild"]
)
def test_training_goes_on_while_one_rank_is_slow(spec: str) -> None:
    ranks = on_ranks("uneven", spec=spec)
    assert len({tuple(rank["model"]) for rank in ranks}) == 1
    assert all(rank["finite"] for rank in ranks)
    assert ranks[0]["last"] < 0.3 * ranks[0]["first"]
    assert all(rank["rates"] == [0.125] for rank in ranks)
    slow, *others = [rank["steps"] for rank in ranks]
    if spec.startswith("ssp"):
        assert all(abs(other - slow) <= 3 for other in others)
    else:
        assert min(others) > slow


def test_a_rank_sends_what_a_ring_sends() -> None:
    slow, *others = on_ranks("uneven", spec="asgd")
    parameters = 4 * len(slow["model"])
    for rank in others:
        pushed = rank["steps"] * parameters * (RANKS - 1) / RANKS
        served = (sum(r["steps"] for r in (slow, *others)) - rank["steps"]) * parameters / RANKS
        assert rank["sent"] == pytest.approx(pushed + served, rel=0.1)


def test_other_models_and_numbers_that_are_not_finite_are_refused() -> None:
    for said in on_ranks("refusals"):
        assert "differs between rank 0 and rank" in said["AsynchronousOptimizer"]
        assert "differs between rank 0 and rank" in said["HogwildOptimizer"]
        assert f"frames of version {VERSION + 1}, and rank 0 has" in said["frames"], "before anybody connects"
        assert "not finite, and nothing was pushed" in said["nan"]
        assert said["untouched"] == "True"
        assert "has finished" in said["finished"]


def test_a_rank_that_ends_is_named() -> None:
    *others, _ = on_ranks("one_ends")
    for rank, said in enumerate(others):
        [ended] = said["ranks"]
        assert ended != rank
        assert f"server {ended}, in rank {ended}'s process, is lost" in said["said"]
    assert RANKS - 1 in [said["ranks"][0] for said in others]  # the first of them to notice ended then, too


def test_processes_of_one_machine_step_one_copy() -> None:
    for rank, seen in enumerate(on_ranks("one_memory")):
        assert seen["seen"] == [rank, RANKS + rank]
        assert seen["version"] == 2 * RANKS
        assert seen["shared"] == [[2.0 * RANKS] * 3]
        assert seen["own"] == [[2.0 * RANKS + rank] * 3]


# ------------------------------------------------------------------------------------------ the language


@pytest.fixture
def network(one_rank: None) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_every_method_trains(name: str, network: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    optimizer = parse(METHODS[name].example).optimizer(torch.optim.SGD(network.parameters(), 0.1), network)
    before = network.weight.detach().clone()
    network(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, network.weight)
    optimizer.finish()
    optimizer.close()
    assert optimizer.version == 1


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("ssp", "needs its staleness"),
        ("ssp:-1", "it is 0, which is synchronous"),
        ("asgd:rate=fast", "known are constant"),
        ("asgd:H=0", "give 1 or more"),
        ("asgd:update=nonsense", "nonsense"),
        ("dcasgd:-2", "0 or more"),
        ("hogwild:4", "nothing after a colon"),
        ("hogwild,H=4", "it has none"),
        ("async:4", "known are asgd, ssp, dcasgd, hogwild"),
    ],
)
def test_what_cannot_be_read_is_said(spec: str, said: str) -> None:
    with pytest.raises((SpecError, ValueError), match=said):
        parse(spec)


def test_names_do_not_overlap() -> None:
    assert [is_asynchronous(spec) for spec in ("ssp:2", " hogwild", "local:H=2", "topk:0.1")] == [
        True,
        True,
        False,
        False,
    ]


def test_without_a_way_to_the_others_the_address_is_asked_for(
    network: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    inner = torch.optim.SGD(network.parameters(), 0.1)
    with pytest.raises(CommunicationError, match="pass address="):
        parse("asgd").optimizer(inner, network)
    with pytest.raises(CommunicationError, match="no server can listen at 203"):
        parse("asgd").optimizer(inner, network, address="203.0.113.1")


# ----------------------------------------------------------------------------------------------- servers


class Heard:
    """A line that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[Frame] = []

    def reply(self, message: WireMessage, data: torch.Tensor) -> None:
        self.said.append(Frame(message, data))


def server(workers: int = 2) -> ParameterServer:
    return ParameterServer(PART, ASGD(0.5), workers=workers)


def test_refused_pushes_change_nothing_and_are_told() -> None:
    core, line = server(), Heard()
    reception = Reception(core)
    reception.receive(line, plain(MessageKind.JOIN, 0), NOTHING)
    grant = line.said[-1].message.grant
    push = WireMessage(MessageKind.PUSH, grant, core.names.fingerprint)
    reception.receive(line, push, torch.zeros(3, dtype=torch.uint8))
    reception.receive(line, push._replace(fingerprint=1), torch.ones(4).view(torch.uint8))
    assert [frame.message.kind for frame in line.said[1:]] == [MessageKind.REFUSED] * 2
    reception.receive(line, push, torch.ones(4).view(torch.uint8))
    assert line.said[-1].message.kind is MessageKind.GRANT
    assert line.said[-1].data.view(torch.float32).tolist() == [-0.5] * 4
    reception.receive(line, push, torch.ones(4).view(torch.uint8))
    assert "applied before" in line.said[-1].message.text
    assert core.version == 1


def test_whoever_hangs_up_frees_the_others() -> None:
    first, second = Heard(), Heard()
    reception = Reception(ParameterServer(PART, ASGD(0.5), workers=2, pace=Bounded(0)))
    reception.receive(first, plain(MessageKind.JOIN, 0), NOTHING)
    reception.receive(second, plain(MessageKind.JOIN, 1), NOTHING)
    push = WireMessage(MessageKind.PUSH, first.said[-1].message.grant, reception.server.names.fingerprint)
    reception.receive(first, push, torch.ones(4).view(torch.uint8))
    assert len(first.said) == 1
    reception.disconnect(second)
    assert [frame.message.kind for frame in first.said] == [MessageKind.GRANT, MessageKind.GRANT]
    assert reception.workers == [0]


@contextlib.contextmanager
def hosted(core: ParameterServer) -> Generator[Host]:
    host = Host(core, "127.0.0.1", SECRET_OF_RUN)
    try:
        yield host
    finally:
        host.close()


def test_strangers_and_noise_are_cut_off_and_others_are_served() -> None:
    with hosted(server(1)) as host:
        for first in (
            b"x" * SECRET,
            SECRET_OF_RUN + b"\xff" * HEAD,
            SECRET_OF_RUN + (3).to_bytes(4, "little") + bytes(HEAD - 4 + 3),
        ):
            with socket.create_connection(host.address, timeout=10) as stranger:
                stranger.sendall(first)
                assert stranger.recv(1) == b""
        far = RemoteConnection(host.address, SECRET_OF_RUN, 16, 10.0)
        worker = RemoteServers([far], [PART], 0, sending=Sending(), seed=0, deadline_s=10.0)
        worker.join()
        granted = worker.push(torch.tensor([2.0, 0.0, 0.0, 0.0]), 0.0, 0.1)
        assert granted.values.tolist() == [-1.0, 0.0, 0.0, 0.0]
        assert worker.read().tolist() == [-1.0, 0.0, 0.0, 0.0]
        worker.close()


def test_a_server_that_is_silent_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far = RemoteConnection(silent.getsockname()[:2], SECRET_OF_RUN, 16, 10.0)
        worker = RemoteServers([far], [PART], 0, sending=Sending(), seed=0, deadline_s=0.2)
        with pytest.raises(CommunicationError, match=r"server 0, in rank 0's process, is silent for 0.2 s"):
            worker.join()
        worker.close()


def test_a_frame_that_ends_early_is_no_frame() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(head_of(plain(MessageKind.JOIN, 0), 8) + b"1234")
    theirs.close()
    with ours, pytest.raises(ConnectionResetError):
        receive(ours, 8)


def test_lengths_are_looked_at_before_anything_is_allocated() -> None:
    with pytest.raises(CommunicationError, match="are the most"):
        lengths_of(head_of(plain(MessageKind.JOIN, 0), 17)[:HEAD], 16)


LARGE = 5 << 30
"""Bytes of a part that no 32 bits can count. Memory that is never touched costs nothing."""


class Stream:
    """A socket as far as frames use it: what is sent can be read, but large data only in its length."""

    def __init__(self) -> None:
        self.kept, self.large = bytearray(), 0

    def sendall(self, data: bytes | memoryview) -> None:
        if len(data) < LARGE:
            self.kept += data
        else:
            self.large += len(data)

    def recv_into(self, into: memoryview) -> int:
        come = min(len(into), len(self.kept) or self.large, 1 << 30)
        if self.kept:
            into[:come], self.kept = self.kept[:come], self.kept[come:]
        else:
            self.large -= come
        return come


def test_a_part_of_more_than_four_gibibytes_has_a_frame() -> None:
    stream: Any = Stream()
    said = plain(MessageKind.PUSH, 3)
    send(stream, said, torch.empty(LARGE, dtype=torch.uint8))
    frame = receive(stream, LARGE)
    assert (frame.message, frame.data.numel(), stream.large) == (said, LARGE, 0)
    send(stream, said, torch.empty(LARGE, dtype=torch.uint8))
    with pytest.raises(CommunicationError, match=f"{LARGE} bytes, where 4096 and {LARGE - 1} are the most"):
        receive(stream, LARGE - 1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("with_closure", [False, True])
def test_hogwild_keeps_what_is_not_finite_from_the_shared_model(with_closure: bool) -> None:
    model = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = parse("hogwild").optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def closure() -> torch.Tensor:
        loss = model(torch.full((1, 3), float("nan"))).sum()
        loss.backward()
        return loss

    if not with_closure:
        closure()
    with pytest.raises(StepError, match=r"the gradient of 'weight' is not finite.*lower the learning rates"):
        optimizer.step(closure if with_closure else None)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.close()
