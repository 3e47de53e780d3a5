"""The efficiency of communication: shares, samples, joules, time against bandwidth, and what the page says of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comparisons import comparison, run
from gradwire.compare import storage
from gradwire.compare.crossover import method_pays_below
from gradwire.compare.efficiency import AROUND, Efficiency, efficiencies, rate_curves
from gradwire.compare.figures import summarise
from gradwire.compare.results import Comparison, Run, Split
from gradwire.report.charts import LineChart, Mark, Point, Series
from gradwire.report.efficiency import BROAD
from gradwire.report.page import render
from gradwire.topology.energy import EnergyMeter

LEARNED = tuple(1 + 3 * math.exp(-step / 4) + 0.01 * (step * 7 % 5) for step in range(60))


def trained(method: str, step_s: float, sent: float, coding_s: float = 0.0, watts: float | None = 50.0) -> Run:
    """A run whose steps compute for 0.1 s and train on 64 samples."""
    made = run(method, step_s=step_s, losses=LEARNED, sent=sent)
    split = Split(0.1, coding_s, step_s - 0.1 - coding_s, coding_s, step_s)
    split = Split(*(60 * seconds for seconds in dataclasses.astuple(split)))
    return dataclasses.replace(
        made, split=split, samples=60 * 64, energy_j=None if watts is None else watts * made.times_s[-1]
    )


@pytest.fixture
def measured() -> Comparison:
    """As docs/results.md has it at 100 Mbit/s, but that here each step is like the others."""
    return comparison(
        trained("torch.fp32", 1.02, 11.2e6),
        trained("torch.fp16", 0.55, 5.6e6, 0.004),
        trained("int4", 0.242, 1.45e6, 0.03),
        trained("powersgd:8,factors=fp16", 0.189, 352e3, 0.012),
        trained("torch.noop", 0.12, 1e3),
        hosts=4,
    )


# Figures -----------------------------------------------------------------------------------------------------


def by_method(found: Comparison) -> dict[str, Efficiency]:
    return {each.row.method: each for each in efficiencies(found, summarise(found))}


def test_shares_of_a_step_and_samples_are_those_of_the_runs(measured: Comparison) -> None:
    int4 = by_method(measured)["int4"]
    assert int4.coding == pytest.approx(0.03 / 0.242)
    assert int4.exposed == pytest.approx((0.242 - 0.13) / 0.242)
    assert int4.overhead == pytest.approx(1 - 0.1 / 0.242)
    assert int4.samples_per_s == pytest.approx(64 / 0.242)
    assert int4.samples_per_j == pytest.approx(64 / 0.242 / 50)
    assert int4.pays_below == method_pays_below(measured, "int4")
    assert by_method(measured)["torch.fp32"].pays_below is None


def test_what_is_not_known_is_none(measured: Comparison) -> None:
    runs = [dataclasses.replace(one, samples=0, energy_j=None) for one in measured.runs]
    old = by_method(dataclasses.replace(measured, runs=runs))
    assert {each.samples_per_s for each in old.values()} | {each.samples_per_j for each in old.values()} == {None}
    one_without = [dataclasses.replace(measured.runs[2], seed=1, energy_j=None), *measured.runs]
    some = by_method(dataclasses.replace(measured, runs=one_without))
    assert some["int4"].samples_per_j is None
    assert some["torch.fp32"].samples_per_j is not None


def test_curves_go_through_what_was_measured_and_cross_where_a_method_pays(measured: Comparison) -> None:
    curves = {curve.method: curve for curve in rate_curves(measured)}
    assert set(curves) == {"torch.fp32", "torch.fp16", "int4", "powersgd:8,factors=fp16"}
    rows = {row.method: row for row in summarise(measured)}
    for method, curve in curves.items():
        rates = [point.rate for point in curve.points]
        assert rates[0] <= 1e8 / AROUND
        assert rates[-1] >= 1e8 * AROUND * (1 - 1e-9)
        nearest = min(curve.points, key=lambda point: abs(math.log(point.rate / 1e8)))
        target = rows[method].target_s
        assert target is not None
        assert nearest.seconds == pytest.approx(target.mean, rel=0.1)
        seconds = [point.seconds for point in curve.points]
        assert seconds == sorted(seconds, reverse=True)
    crossing = curves["int4"].crossing
    assert crossing is not None
    assert crossing.rate == method_pays_below(measured, "int4")
    assert curves["torch.fp16"].crossing is None  # it is sooner on every link
    assert curves["torch.fp32"].crossing is None


def test_no_curve_without_fp32_or_a_rate(measured: Comparison) -> None:
    assert rate_curves(dataclasses.replace(measured, runs=measured.runs[2:])) == []
    options = measured.options | {"rates": ["100mbit", "20mbit"]}
    assert rate_curves(dataclasses.replace(measured, options=options)) == []


def test_results_of_before_are_read_and_new_ones_come_back(measured: Comparison, tmp_path: Path) -> None:
    storage.save(measured, tmp_path / "results.json")
    assert storage.load(tmp_path / "results.json").runs == measured.runs
    old = {key: value for key, value in storage.run_to_json(measured.runs[0]).items() if key != "energy_j"}
    del old["samples"]
    assert (storage.run_from_json(old).samples, storage.run_from_json(old).energy_j) == (0, None)


# The page ----------------------------------------------------------------------------------------------------


def test_the_page_shows_the_section_with_the_crossing_marked(measured: Comparison) -> None:
    page = render(measured)
    assert "Efficiency of communication" in page
    assert page.count("<title>Time to the target against bandwidth</title>") == 2
    marked = re.findall(r'<circle class="dot"[^>]*><title>([^<]*)</title>', page)
    assert len(marked) == 4  # two methods, in two widths
    for rate in marked:
        assert f"<td>{rate}</td>" in page
    assert "This machine does not tell" not in page


def test_a_machine_without_power_and_a_comparison_without_conclusion_say_so(measured: Comparison) -> None:
    runs = [dataclasses.replace(one, energy_j=None) for one in measured.runs]
    assert "this machine does not tell its power" in render(dataclasses.replace(measured, runs=runs))
    falling = [dataclasses.replace(one, losses=[9.0 - step / 10 for step in range(60)]) for one in measured.runs]
    page = render(dataclasses.replace(measured, runs=falling))
    assert "Efficiency of communication" in page
    assert "Time to the target against bandwidth" not in page


def test_equal_factors_are_equal_heights() -> None:
    points = [Point(10.0**power, 10.0 ** (6 - power), 10.0 ** (6 - power), 10.0 ** (6 - power)) for power in range(6)]
    chart = LineChart(
        "t", [Series("a", "tone1", points)], "bit/s", "x", log_y=True, marks=[Mark("a", 1e2, 1e4, "here")]
    )
    svg = chart.svg(BROAD)
    (line,) = re.findall(r'<polyline class="line" points="([^"]+)"', svg)
    heights = [float(pair.split(",")[1]) for pair in line.split()]
    steps = [after - before for before, after in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.3
    assert ">here</text>" in svg
    assert "kbit/s</text>" in svg


# Power -------------------------------------------------------------------------------------------------------


@pytest.fixture
def powercap(tmp_path: Path) -> Any:
    """Zones of a processor in a folder, and a function that sets a counter in joules."""

    def zone(at: str, name: str, joules: float, most: float = 1000.0) -> None:
        folder = tmp_path / "class" / "powercap" / at
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(str(round(joules * 1e6)))
        (folder / "max_energy_range_uj").write_text(str(round(most * 1e6)))

    zone("intel-rapl:0", "package-0", 900.0)
    zone("intel-rapl:0:0", "core", 500.0)
    zone("intel-rapl:0:1", "dram", 10.0)
    zone("intel-rapl:1", "psys", 5000.0)
    return SimpleNamespace(root=tmp_path, zone=zone)


class FakeNvml:
    """NVML with one GPU, whose counter is in millijoules."""

    NVMLError = RuntimeError
    used = 5_000

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return self.used


def test_packages_memory_and_gpus_count_once_and_a_counter_may_begin_again(powercap: Any) -> None:
    nvml = FakeNvml()
    with EnergyMeter(powercap.root, nvml) as meter:
        assert [name.split(" (")[0] for name in meter.sources] == ["package-0", "dram", "GPU 0"]
        powercap.zone("intel-rapl:0", "package-0", 950.0)
        meter.skip()  # 50 J that nobody asked for
        powercap.zone("intel-rapl:0", "package-0", 30.0)  # 80 J, past 1000
        powercap.zone("intel-rapl:0:1", "dram", 14.0)
        powercap.zone("intel-rapl:0:0", "core", 700.0)
        nvml.used += 7_000
        meter.add_up()
        assert meter.spent_j == pytest.approx(80 + 4 + 7)
        meter.add_up()
        assert meter.spent_j == pytest.approx(91)


def test_a_host_that_does_not_tell_its_power_spends_nothing_that_is_known(powercap: Any) -> None:
    for zone in (powercap.root / "class" / "powercap").iterdir():
        (zone / "energy_uj").unlink()  # only root may read it
    meter = EnergyMeter(powercap.root)
    meter.skip()
    meter.add_up()
    assert (meter.sources, meter.spent_j) == ((), None)
