"""What messages and computing take from each other: planted figures are found, and ranks agree on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from engines import ThreadTransport, on_threads
from gradwire.core.collective import AllReduce, Collective
from gradwire.core.link import Link
from gradwire.drivers import contention as module
from gradwire.drivers.contention import (
    BUDGET_S,
    LEAST_BYTES,
    LONGEST_S,
    MOST_BYTES,
    Computing,
    Contention,
    contention,
    reduction,
)
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
    """What is measured in simulated time."""

    class Planted(Computing):
        def _go_on(self) -> None:
            """Compute nothing."""

        def others_s(self) -> float:
            return transport.stolen_s

    monkeypatch.setattr(module, "time", transport.link)
    monkeypatch.setattr(module, "Computing", Planted)
    return contention(transport, idle)


@pytest.mark.parametrize("rate", [2.5e6, 2.5e8])
@pytest.mark.parametrize("work", [Link(0.0, 0.0), Link(4e-4, 0.0), Link(6e-4, 3e-10)])
def test_planted_figures_are_found(work: Link, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks: an all-reduce is made of six messages with 6/4 of its bytes."""
    transport = Served(SimulatedLink(rate, delay_s=1e-3))
    transport.work = work
    seen = found(transport, Link(5e-4, 1 / rate), monkeypatch)
    assert seen.link.alpha_s == pytest.approx(5e-4, rel=1e-6)
    assert seen.link.beta_s_per_byte == pytest.approx(1 / rate, rel=1e-6)
    assert seen.work.alpha_s == pytest.approx(work.alpha_s / 6, abs=1e-12)
    assert seen.work.beta_s_per_byte == pytest.approx(work.beta_s_per_byte * 4 / 6, abs=1e-18)


@pytest.mark.parametrize(("rate", "delay_s"), [(1e9, 0.0), (2.5e6, 0.0), (2.5e6, 0.05), (1e4, 0.0), (1e9, 1.0)])
def test_slow_links_carry_little_or_nothing(rate: float, delay_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no trial can be afforded, messages and computing are said to take nothing from each other."""
    transport, link = Served(SimulatedLink(rate, delay_s=delay_s)), Link(delay_s / 2, 1 / rate)
    transport.work = Link(1e-5, 0.0)
    sizes = list[int]()
    issue = transport.issue

    def noted(request: Collective) -> Answer:
        assert isinstance(request, AllReduce)
        sizes.append(request.tensor.nbytes)
        return issue(request)

    monkeypatch.setattr(transport, "issue", noted)
    seen = found(transport, link, monkeypatch)
    assert transport.link.now_s < 2.5 * BUDGET_S
    if not sizes:
        assert reduction(link, 4).seconds(3 * LEAST_BYTES) > 0.4
        assert seen == Contention(link, Link(0.0, 0.0))
        return
    small, large = sorted(size for size in set(sizes) if size >= LEAST_BYTES)
    assert small == LEAST_BYTES
    assert 2 * LEAST_BYTES <= large <= MOST_BYTES
    assert large == 2 * LEAST_BYTES or reduction(link, 4).seconds(large) <= LONGEST_S
    assert seen.work.alpha_s > 0.0


def test_a_busy_machine_ends_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that take far longer than they did while nothing was computed."""
    transport = Served(SimulatedLink(1e9, delay_s=0.1))
    found(transport, Link(1e-4, 1e-9), monkeypatch)
    one = transport.link.now_s
    assert one > BUDGET_S
    monkeypatch.setattr(module, "BUDGET_S", 1e9)
    transport.link.now_s = 0.0
    found(transport, Link(1e-4, 1e-9), monkeypatch)
    assert transport.link.now_s > 2.5 * one


def test_ranks_agree_though_they_measure_different_things() -> None:
    """On threads and in real time, so nothing is said of how long anything takes."""

    def on_rank(transport: ThreadTransport) -> tuple[Contention, int]:
        seen = contention(transport, Link(1e-3, 1e-9))
        return seen, len(transport.requests)

    first, *others = on_threads(3, on_rank)
    assert others == [first, first]


@pytest.mark.parametrize("computing", [(True, True, True), (True, False, True), (False, True, False)])
def test_only_ranks_that_compute_count(computing: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three ranks measures its own seconds; the result is the mean of those that compute."""
    smaller, larger = LEAST_BYTES, MOST_BYTES
    started = list[bool]()

    def planted(
        transport: ThreadTransport, computes: Computing, sizes: tuple[int, int], counts: list[int]
    ) -> list[float]:
        assert sizes == (smaller, larger)
        own = 1.0 + transport.rank
        return [own, own / 2, own + 1e-6 * (larger - smaller), own / 2]

    class Noted(Computing):
        def __init__(self, is_wanted: bool) -> None:
            started.append(is_wanted)
            super().__init__(is_wanted=False)

    monkeypatch.setattr(module, "_trial", planted)
    monkeypatch.setattr(module, "Computing", Noted)
    monkeypatch.setattr(module, "TRIALS", 1)
    own_s = [1.0 + rank for rank, computes in enumerate(computing) if computes]
    for seen in on_threads(3, lambda transport: contention(transport, Link(1e-5, 1e-10), computing[transport.rank])):
        whole = reduction(seen.link, 3), reduction(seen.work, 3)
        assert whole[0].seconds(smaller) == pytest.approx(sum(own_s) / len(own_s))
        assert whole[0].beta_s_per_byte == pytest.approx(1e-6)
        assert whole[1].alpha_s == pytest.approx(sum(own_s) / len(own_s) / 2)
    assert sorted(started) == sorted(computing)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def is_computing() -> bool:
    """Whether a thread computes."""
    return "gradwire-computing" in {thread.name for thread in threading.enumerate()}


@pytest.mark.usefixtures("one_thread")
def test_computing_stops_with_its_block_and_counts_for_itself() -> None:
    def break_off() -> None:
        with Computing() as computing:
            assert is_computing()
            began, before = time.process_time(), computing.others_s()
            time.sleep(0.2)
            assert computing.others_s() - before < (time.process_time() - began) / 2
            raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"):
        break_off()
    assert not is_computing()
    with Computing(is_wanted=False) as computing:
        assert not is_computing()
        assert computing.others_s() > 0.0
    torch.set_num_threads(2)
    with Computing() as computing:
        assert not is_computing()
        assert computing.others_s() > 0.0


@pytest.mark.usefixtures("one_thread")
def test_what_breaks_the_thread_is_raised_where_it_is_asked() -> None:
    class Broken(Computing):
        def _go_on(self) -> None:
            raise MemoryError("no room")

    with Broken() as computing, pytest.raises(MemoryError, match="no room"):
        computing.others_s()
