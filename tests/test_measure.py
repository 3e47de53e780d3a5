"""What `exchange=auto` measures, with made-up times: how often, in which sizes, and what becomes of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from engines import Exchange, ThreadTransport
from gradwire import parse
from gradwire.codecs import FP16, Codec, RandomK
from gradwire.drivers import measure
from gradwire.drivers.measure import SAMPLES, Bench
from gradwire.drivers.plan import GRAIN_NUMEL
from gradwire.reducers.auto import Auto


def alone() -> Bench:
    return Bench(ThreadTransport(Exchange(1), 0), torch.device("cpu"))


def test_a_curve_has_the_median_of_as_many_rounds_as_it_says_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = parse("none,exchange=auto")
    assert isinstance(auto, Auto)
    rounds: dict[int, Iterator[float]] = {}
    counted: dict[int, int] = {}

    def seconds(reducer: object, x: torch.Tensor, bench: Bench, burst: int) -> float:
        """1000 in the round that warms up, then 1, 2, 3, ... for every candidate."""
        counted[x.nbytes] = counted.get(x.nbytes, 0) + 1
        times = rounds.setdefault(x.nbytes, itertools.count(0))
        number = next(times) // len(auto.candidates)
        return float(number or 1000)

    monkeypatch.setattr(measure, "seconds", seconds)
    found = measure.curves(auto, alone())
    assert len(found) == len(auto.candidates)
    for curve in found:
        assert [point.nbytes for point in curve.points] == [sample.nbytes for sample in SAMPLES]
        assert [point.seconds for point in curve.points] == [(sample.rounds + 1) / 2 for sample in SAMPLES]
    assert counted == {sample.nbytes: (sample.rounds + 1) * len(auto.candidates) for sample in SAMPLES}


@pytest.mark.parametrize(
    ("codec", "sizes"),
    [
        (FP16(), [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]),
        (RandomK(0.25), [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]),
        (RandomK(0.01), [1 << 12, 1 << 14, 41_944]),  # a grain of 2^20 elements has no more
        (RandomK(1e-9), [8]),  # one value, which is padded, however large the gradient is
    ],
    ids=repr,
)
def test_curves_are_of_bytes_that_travel(codec: Codec, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`Auto` asks them by these bytes, and would else read the times of a gradient that is as large as a payload."""

    def seconds(reducer: object, x: torch.Tensor, bench: Bench, burst: int) -> float:
        assert x.numel() <= GRAIN_NUMEL
        return 1.0

    monkeypatch.setattr(measure, "seconds", seconds)
    for curve in measure.curves(Auto(codec), alone()):
        assert [point.nbytes for point in curve.points] == pytest.approx(sizes, rel=0.01)
        assert curve.seconds(1 << 30) == 1.0


def test_sizes_to_measure_are_four_times_as_large_as_the_ones_before_up_to_a_whole_grain() -> None:
    sizes = [sample.nbytes for sample in SAMPLES]
    assert {after / before for before, after in itertools.pairwise(sizes)} == {4.0}
    assert (sizes[0], sizes[-1]) == (1 << 12, 1 << 20)
