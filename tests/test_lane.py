"""How a lane ends, without taking away what is still in use; and sessions over a group that somebody else has made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire import AttachError, Session, StepError
from gradwire.core.errors import ConnectionLost
from gradwire.drivers.groups import group_apart
from gradwire.session.direct_lane import DirectLane
from gradwire.session.lane import SideStream


class Stuck:
    """A stream whose work goes on until somebody ends it."""

    def __init__(self, device: torch.device) -> None:
        self.ended = threading.Event()

    def query(self) -> bool:
        return self.ended.is_set()

    def synchronize(self) -> None:
        self.ended.wait()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    monkeypatch.setattr(torch.cuda, "Stream", Stuck)
    return SideStream(torch.device("cuda"))


def test_a_stuck_stream_is_waited_for_no_longer_than_said(stream: SideStream) -> None:
    at_end = threading.Event()
    releasing = threading.Timer(20, stream._stream.ended.set)  # type: ignore[attr-defined]
    releasing.start()
    began = time.monotonic()
    stream.close(0.2, at_end.set)
    assert time.monotonic() - began < 10
    assert not at_end.is_set()
    releasing.cancel()
    stream._stream.ended.set()  # type: ignore[attr-defined]
    assert at_end.wait(20)


def test_an_idle_stream_is_ended_at_once(stream: SideStream) -> None:
    stream._stream.ended.set()  # type: ignore[attr-defined]
    threads: list[threading.Thread] = []
    stream.close(20, lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]


# Over a group that was made elsewhere ---------------------------------------------------------------------------------


def on_each(act: Callable[[DirectLane], Any], monkeypatch: pytest.MonkeyPatch, deadline_s: float = 20.0) -> list[Any]:
    """What two threads return that have a lane over a group of theirs, where there is no default group."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert not dist.is_initialized()
    root: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

    def one(rank: int) -> Any:
        store = root.clone()
        group = group_apart(dist.PrefixStore("pair", store), rank, 2, deadline_s)  # pyright: ignore[reportPrivateImportUsage]
        return act(DirectLane(group, store, "pair", deadline_s))

    with ThreadPoolExecutor(2) as pool:
        return [future.result(60) for future in [pool.submit(one, rank) for rank in range(2)]]


def test_a_session_needs_no_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())  # a test of a silent rank may have left a thread that still waits for it

    def work(lane: DirectLane) -> Any:
        x, y = torch.full((40,), float(lane.group.rank())), torch.arange(3.0)
        session, other = Session({"x": x}, "int8", lane=lane), Session({"y": y}, "none", lane=lane)
        for each, tensors in ((session, {"x": x}), (other, {"y": y})):
            each.reduce_(tensors)
        begun = set(threading.enumerate()) - before
        assert not [thread for thread in begun if "gradwire-communication" in thread.name]
        session.close()
        other.reduce_({"y": y})  # they share a lane, and end apart
        figures = other.stats().steps, other.report().ranks, session.is_open
        other.close()
        return x.tolist(), y.tolist(), figures

    one, its = on_each(work, monkeypatch)
    assert one == its
    assert one[0] == pytest.approx([0.5] * 40, abs=0.01)
    assert one[1:] == ([0.0, 1.0, 2.0], (2, 2, False))


def test_sessions_that_differ_are_told_in_what(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(lane: DirectLane) -> str:
        with pytest.raises(AttachError) as told:
            Session({"x": torch.zeros(5 + lane.group.rank())}, "none", lane=lane)
        return str(told.value)

    one, its = on_each(work, monkeypatch)
    assert one == its
    assert "number 0 is 'x' (6,)" in one


def reduce_for_ever(session: Session, x: torch.Tensor) -> None:
    while True:
        session.reduce_({"x": x})


def test_an_error_is_raised_as_it_is_and_ends_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(lane: DirectLane) -> str:
        x = torch.ones(30)
        session = Session({"x": x}, "none", lane=lane)
        session.reduce_({"x": x})
        if lane.group.rank():
            lane.group.abort()
            return ""
        with pytest.raises(ConnectionLost, match="failed after"):
            reduce_for_ever(session, x)
        with pytest.raises(Exception, match="communication failed in an earlier step"):
            session.reduce_({"x": x})
        session.close()
        with pytest.raises(StepError, match="is closed"):
            session.reduce_({"x": x})
        return "told"

    assert on_each(work, monkeypatch) == ["told", ""]


def test_a_session_without_a_lane_still_wants_a_group() -> None:
    with pytest.raises(AttachError, match="no default process group"):
        Session(nn.Linear(2, 2), "none")
