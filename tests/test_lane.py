"""How a lane ends: nobody waits longer than he said, and what is still in use is not taken away."""

from __future__ import annotations

import threading
import time

import pytest
import torch

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
