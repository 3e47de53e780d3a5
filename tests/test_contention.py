"""What messages and computing take from each other: planted figures are found, and ranks agree on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from engines import ThreadTransport, on_threads
from gradwire.core.collective import AllReduce, Collective
from gradwire.core.link import Link
from gradwire.drivers import contention as module
from gradwire.drivers.contention import LEAST_BYTES, LONGEST_S, MOST, MOST_BYTES, Computing, Contention, contention
from gradwire.drivers.interpreter import Answer
from simulated_links import Link as SimulatedLink
from simulated_links import SimulatedTransport


class Served(SimulatedTransport):
    """Each all-reduce also takes computing away; `stolen_s` is how much so far."""

    work = Link(0.0, 0.0)
    stolen_s = 0.0

    def issue(self, request: Collective) -> Answer:
        """Let the time pass."""
        assert isinstance(request, AllReduce)
        self.stolen_s += self.work.seconds(request.tensor.nbytes)
        return super().issue(request)


def found(transport: Served, idle: Link, monkeypatch: pytest.MonkeyPatch) -> Contention:
    """What is measured in simulated time, in which a second has a thousand rounds of computing."""

    class Planted(Computing):
        def rate_during(self, job: Callable[[], object]) -> float:
            began, stolen_s = transport.link.now_s, transport.stolen_s
            job()
            return 1000 * (1 - (transport.stolen_s - stolen_s) / (transport.link.now_s - began))

    monkeypatch.setattr(module, "time", transport.link)
    monkeypatch.setattr(module, "Computing", Planted)
    return contention(transport, idle)


@pytest.mark.parametrize("rate", [2.5e6, 2.5e8])
@pytest.mark.parametrize("work", [Link(0.0, 0.0), Link(4e-4, 0.0), Link(6e-4, 3e-10)])
def test_planted_figures_are_found(work: Link, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks: an all-reduce is made of six messages with 6/4 of its bytes."""
    transport = Served(SimulatedLink(rate, delay_s=1e-3))
    transport.work = work
    seen = found(transport, Link(3e-3, 6 / 4 / rate), monkeypatch)
    assert seen.link.alpha_s == pytest.approx(5e-4, rel=1e-6)
    assert seen.link.beta_s_per_byte == pytest.approx(1 / rate, rel=1e-6)
    assert seen.work.alpha_s == pytest.approx(work.alpha_s / 6, abs=1e-12)
    assert seen.work.beta_s_per_byte == pytest.approx(work.beta_s_per_byte * 4 / 6, abs=1e-18)


@pytest.mark.parametrize("idle", [Link(1.0, 1e-4), Link(1e-3, 1e-6), Link(0.0, 0.0)])
def test_slow_links_carry_little_and_fast_ones_no_more_than_is_needed(
    idle: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Served(SimulatedLink(1e9))
    sizes = list[int]()
    issue = transport.issue

    def noted(request: Collective) -> Answer:
        assert isinstance(request, AllReduce)
        sizes.append(request.tensor.nbytes)
        return issue(request)

    monkeypatch.setattr(transport, "issue", noted)
    found(transport, idle, monkeypatch)
    small, large = sorted(size for size in set(sizes) if size >= LEAST_BYTES)
    assert small == LEAST_BYTES
    assert 2 * LEAST_BYTES <= large <= MOST_BYTES
    assert large == 2 * LEAST_BYTES or idle.seconds(large) <= LONGEST_S
    assert len(sizes) <= module.TRIALS * (2 * MOST + 4)


def test_ranks_agree_though_they_measure_different_things() -> None:
    """On threads and in real time, so nothing is said of how long anything takes."""

    def on_rank(transport: ThreadTransport) -> tuple[Contention, int]:
        seen = contention(transport, Link(1e-3, 1e-9))
        return seen, len(transport.requests)

    (first, sent), *others = on_threads(3, on_rank)
    assert all(other == (first, sent) for other in others)
    assert first.link.alpha_s + first.link.beta_s_per_byte > 0.0


def test_computing_stops_with_its_block() -> None:
    def break_off() -> None:
        with Computing() as computing:
            assert computing.rate_during(lambda: time.sleep(0.05)) > 0.0
            raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"):
        break_off()
    assert "gradwire-computing" not in {thread.name for thread in threading.enumerate()}
