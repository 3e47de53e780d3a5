"""The benchmarks of federations measure what they say."""

from __future__ import annotations

import importlib
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.federated import SGD, Federation, Server
from gradwire.federated.client import Done
from gradwire.federated.engines import ClientJob, Lost
from gradwire.federated.simulation import Kept

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of the benchmarks by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_synthetic_devices_differ_as_the_paper_says(benchmark: Any) -> None:
    fedprox = benchmark("fedprox")
    devices = fedprox.synthetic(1.0, 1.0, 3)
    assert len(devices) == 30
    assert all(len(d.y) + len(d.held_y) >= 50 and len(d.y) == int(0.9 * (len(d.y) + len(d.held_y))) for d in devices)
    assert fedprox.synthetic(1.0, 1.0, 4)[0].x.shape != devices[0].x.shape
    largest = max(devices, key=lambda d: len(d.y)).x
    wanted = torch.arange(1.0, 61.0) ** -1.2
    assert (largest.var(0) / wanted).log().abs().max() < 0.3  # Sigma_jj = j^-1.2
    means = torch.stack([d.x.mean(0) for d in devices])
    assert 1.0 < means.var(0).mean() < 3.5  # v_k has the variance of B_k and one of its own
    assert 0.6 < (means - means.mean(1, keepdim=True)).var() < 1.4


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("slow", [0.0, 0.5, 0.9])
def test_an_exact_share_of_devices_are_stragglers_and_the_same_for_all_methods(benchmark: Any, slow: float) -> None:
    fedprox = benchmark("fedprox")
    devices = fedprox.synthetic(1.0, 1.0, 3)
    federation = Federation(30, lambda i: fedprox.client(devices, i))
    server = Server(torch.nn.Linear(60, 10), 30, sample=10, local=SGD(0.01))
    jobs = [ClientJob(task, Kept()) for task in server.begin()]
    lost, late = set[int](), set[int]()
    for outcome in fedprox.Stragglers(server.model, federation, slow, dropped=True).run(server.terms, jobs):
        lost |= {outcome.client} if isinstance(outcome, Lost) else set()
    for outcome in fedprox.Stragglers(server.model, federation, slow, dropped=False).run(server.terms, jobs):
        assert isinstance(outcome, Done)
        whole = 20 * math.ceil(outcome.update.examples / 10)
        late |= {outcome.update.client} if outcome.update.steps < whole else set()
        assert outcome.update.steps % (whole // 20) == 0
    assert len(lost) == round(10 * slow)
    assert late == lost


def test_rounds_to_a_target_lie_between_rounds(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = benchmark("fedavg_digits")
    values = {"fast": [96.0], "jumping": [80.0, 90.0, 70.0, 100.0], "never": [94.9, 10.0]}
    monkeypatch.setattr(digits, "accuracies", lambda setting, *_: iter(values[setting]))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert digits.rounds_to_target("fast", 0.1, 0) == 1.0
    assert digits.rounds_to_target("jumping", 0.1, 0) == 3.5  # half way from the best so far, 90
    assert digits.rounds_to_target("never", 0.1, 0) == math.inf


def test_figures_are_drawn_inside_their_panels(benchmark: Any) -> None:
    plots = benchmark("plots")
    line = plots.Line("a < b", [(1, 1e-9), (10, math.nan), (100, 1e9)], dots=True)
    drawn = ElementTree.fromstring(
        plots.figure("t", [plots.Panel("p", "x", [line], log_x=True, log_y=True, low=0.1, high=10)])
    )
    space = "{http://www.w3.org/2000/svg}"
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in drawn.iter(f"{space}circle")]
    assert dots == [(plots.LEFT, plots.HEIGHT - plots.BOTTOM), (plots.WIDTH - plots.RIGHT, plots.TOP)]
    assert "a < b" in {text.text for text in drawn.iter(f"{space}text")}


def test_a_fitted_line_is_the_least_squares_one(benchmark: Any) -> None:
    rows = [{"sample": x, "y": 3 * x + 2} for x in (5, 10, 40)]
    assert benchmark("federated").fitted(rows, "y") == pytest.approx((3.0, 2.0, 1.0))
