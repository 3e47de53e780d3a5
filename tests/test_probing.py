"""What the report's estimate rests on: all-reduces that are timed, in simulated time over links of every kind."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from engines import Exchange, ThreadTransport
from gradwire.drivers import probing
from gradwire.drivers.measure import Bench
from gradwire.drivers.probing import BUDGET_S, reduction_times
from gradwire.drivers.window import START_UP, Caps
from gradwire.session.estimate import Times, summarise
from gradwire.session.step_times import ToldSteps
from gradwire.topology.reduction_times import COLD_S, WARM_S, Probe, ReductionTimes
from simulated_links import Link, SimulatedTransport, Training

CPU = torch.device("cpu")
MBIT = 1e6 / 8
RATES, DELAYS, LOSSES, SLOWER, COMPUTE = (5, 20, 100, 1000), (0.0, 0.02, 0.05), (0.0, 0.001, 0.005), (1, 4), (0.02, 0.4)


def timed(link: Link, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> ReductionTimes:
    """What probing finds."""
    monkeypatch.setattr(probing, "time", link)
    found = reduction_times(Bench(SimulatedTransport(link), CPU), nbytes)
    assert found is not None
    return found


def told(training: Training, found: ReductionTimes, rank: int, share: float = 0.125, steps: int = 40) -> Times:
    """What a rank's report says after so many steps of a method."""
    columns = list(zip(*(training.step(share) for _ in range(steps)), strict=True))
    others = [ToldSteps.of(column, START_UP) for i, column in enumerate(columns) if i != rank]
    return summarise(columns[rank], START_UP, found, others)


def true_ms(training: Training, steps: int = 200) -> float:
    """Mean of DDP's steps."""
    return 1000 * statistics.fmean([training.dense_step() for _ in range(steps + 5)][5:])


@pytest.mark.parametrize("nbytes", [800_000, 4_000_000], ids=["0.8MB", "4MB"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("rate", RATES)
def test_the_estimate_is_within_a_tenth_or_the_report_cannot_tell(
    rate: float, delay: float, loss: float, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slower, compute_s in itertools.product(SLOWER, COMPUTE):
        link = Link(rate * MBIT, delay, loss)
        found = timed(link, nbytes, monkeypatch)
        training = Training(link, (compute_s, compute_s, compute_s, slower * compute_s), nbytes)
        for rank in (0, 3):
            times, truth = told(training, found, rank), true_ms(training)
            if times.tells:
                assert times.dense_step_ms == pytest.approx(truth, rel=0.1)
            assert times.tells or loss or found.probes[-1].nbytes < nbytes  # without noise all is known


def test_where_frames_are_lost_the_truth_lies_in_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = []
    for seed in range(40):
        link = Link(100 * MBIT, 0.02, 0.001)
        link.draw = np.random.default_rng(seed)
        found = timed(link, 800_000, monkeypatch)
        training = Training(link, (0.02,) * 4, 800_000)
        times, truth = told(training, found, 0), true_ms(training)
        inside.append(times.dense_low_ms <= truth <= times.dense_high_ms)
    assert sum(inside) >= 34


def test_what_waits_for_a_slow_rank_is_not_the_links_on_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(100 * MBIT)
    found = timed(link, 4_000_000, monkeypatch)
    training = Training(link, (0.1, 0.1, 0.1, 0.4), 4_000_000)
    ranks = [told(training, found, rank) for rank in range(4)]
    assert {round(times.dense_step_ms, 6) for times in ranks} == {round(ranks[3].dense_step_ms, 6)}
    assert ranks[0].dense_step_ms == pytest.approx(true_ms(training), rel=0.02)
    assert ranks[0].exposed_ms == pytest.approx(ranks[3].exposed_ms + 300)


def test_a_rank_that_knows_nothing_of_the_others_cannot_tell_whom_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(100 * MBIT)
    found = timed(link, 4_000_000, monkeypatch)
    training = Training(link, (0.1, 0.1, 0.1, 0.4), 4_000_000)
    samples = [training.step(0.125)[0] for _ in range(10)]
    times = summarise(samples, START_UP, found, None)
    assert not times.tells
    assert times.dense_low_ms <= true_ms(training) <= times.dense_high_ms


# ---------------------------------------------------------------------------------------------- what probing takes


@pytest.mark.parametrize("rate", [0.05, 1, 20, 1000])
@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_probing_takes_its_time_and_no_more(rate: float, delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(rate * MBIT, delay)
    found = timed(link, 400_000_000, monkeypatch)
    smallest_s = 2 * found.curve.seconds(1 << 15) + 40 * found.least_s
    assert link.now_s <= BUDGET_S + 5.0 + smallest_s
    assert found.error_s > 0 or found.probes[-1].nbytes == found.nbytes


def test_fast_links_are_probed_quickly_up_to_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(1000 * MBIT)
    found = timed(link, 1_000_002, monkeypatch)
    assert found.probes[-1].nbytes == 1_000_004
    assert link.now_s < 0.5
    assert found.link.seconds(1_000_002) == pytest.approx(found.seconds, rel=1e-4)


def test_a_large_model_is_told_from_sizes_whose_slopes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(20 * MBIT)
    found = timed(link, 40_000_000, monkeypatch)
    assert len(found.probes) >= 3
    assert found.probes[-1].nbytes < found.nbytes
    assert found.seconds == pytest.approx(1.5 * 40e6 / (20 * MBIT), rel=0.01)
    assert found.error_s < 0.02 * found.seconds


def test_sizes_whose_slopes_differ_are_not_drawn_out() -> None:
    steady = tuple(Probe(size, 1.0 + size / 100, 0.0) for size in (100, 200, 400))
    assert ReductionTimes(800, 1.0, steady).error_s == pytest.approx(0.0)
    bent = (*steady[:2], Probe(400, 9.0, 0.0))  # slopes of 0.01 and 0.03
    assert ReductionTimes(800, 1.0, bent).error_s == pytest.approx(400 * 0.02)
    noisy = (*steady[:2], Probe(400, 5.0, 0.2))
    assert ReductionTimes(800, 1.0, noisy).error_s == pytest.approx(0.2 + 400 * 0.2 / 200)
    assert ReductionTimes(800, 1.0, steady[1:]).error_s == math.inf
    assert ReductionTimes(400, 1.0, noisy).error_s == 0.2


def test_a_window_that_was_idle_costs_round_trips_again(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = Link(100 * MBIT, 0.05), Link(100 * MBIT)
    found = timed(far, 1_000_000, monkeypatch)
    assert found.cold_s >= 0.05
    assert timed(near, 1_000_000, monkeypatch).cold_s == 0.0
    assert found.cold_after(WARM_S) == (0.0, 0.0)
    assert found.cold_after(COLD_S) == found.cold_after(9.0) == (found.cold_s, found.cold_error_s)
    assert found.cold_after((WARM_S + COLD_S) / 2)[0] == pytest.approx(found.cold_s / 2)
    assert found.cold_after((WARM_S + COLD_S) / 2)[1] >= found.cold_s / 2 - 1e-9


class Clocks(threading.local):
    """A clock for each thread, which goes on by `tick_s` whenever it is looked at."""

    now_s, tick_s = 0.0, 0.1

    def perf_counter(self) -> float:
        """Now."""
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


def test_ranks_whose_clocks_differ_send_the_same_sizes_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, clocks = Exchange(2), Clocks()
    transports = [ThreadTransport(exchange, rank) for rank in range(2)]
    monkeypatch.setattr(probing, "time", clocks)

    def on_rank(rank: int) -> ReductionTimes | None:
        clocks.tick_s = (0.1, 0.5)[rank]
        return reduction_times(Bench(transports[rank], CPU), 400_000, Caps(100_000, 200_000))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(on_rank, range(2)))
    assert found[0] == found[1]
    sent = [[request.nbytes for request in transport.requests] for transport in transports]
    assert sent[0] == sent[1]
    assert {100_000, 200_000} <= set(sent[0])  # DDP's buckets
    assert 400_000 not in sent[0]


def test_one_rank_has_no_link() -> None:
    assert reduction_times(Bench(ThreadTransport(Exchange(1), 0), CPU), 400) is None
