"""`benchmarks/quality.py` measures what it says, flags what declares too much, and its page shows what it measured."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs import QSGD, TopK
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.plan import Unit, plan
from gradwire.reducers import AllGatherExchange, Reducer

ROOT = Path(__file__).parents[1]
MODEL = [ParameterSpec("w", (40, 100), torch.float32, torch.device("cpu"))]


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("quality")


@dataclass(frozen=True)
class BoastfulTopK(TopK):
    """Declares that next to nothing is lost."""

    def contraction(self, numel: int) -> float | None:
        return 0.99


@dataclass(frozen=True)
class BoastfulQSGD(QSGD):
    """Declares a variance that is too small."""

    def omega(self) -> float | None:
        return 0.01


def gradient(seed: int = 0) -> dict[str, Tensor]:
    return {"w": torch.randn(40, 100, generator=torch.Generator().manual_seed(seed))}


def test_what_top_k_loses_is_what_it_leaves_out(quality: ModuleType) -> None:
    subject = quality.Alone(
        [Unit(grain, quality.exchange_of(r)) for grain, r in plan(MODEL, gradwire.parse("topk:0.1")).units]
    )
    subject.start()
    found, x = subject.measure(gradient(), 5), gradient()["w"].flatten().double()
    kept = x.abs().topk(400).values.square().sum() / x.square().sum()
    assert found["contraction"] == pytest.approx(float(kept), rel=1e-6)
    assert found["error"] == pytest.approx(float(1 - kept) ** 0.5, rel=1e-6)
    assert found["cosine"] == pytest.approx(float(kept) ** 0.5, rel=1e-6)
    assert found["declared"] == pytest.approx(0.1)
    assert (found["draws"], found["violations"]) == (1, [])
    assert 3.2 < found["bits"] <= found["buffer_bits"] < 3.2 + 0.6  # values, and log2 C(4000, 400) / 4000 = 0.47


@pytest.mark.parametrize("honest", [AllGatherExchange(TopK(0.1)), AllGatherExchange(QSGD(15))], ids=repr)
@pytest.mark.parametrize(
    "boastful", [AllGatherExchange(BoastfulTopK(0.1)), AllGatherExchange(BoastfulQSGD(15))], ids=repr
)
def test_who_loses_more_than_is_declared_is_named(quality: ModuleType, honest: Reducer, boastful: Reducer) -> None:
    for reducer, flagged in ((honest, 0), (boastful, 1)):
        subject = quality.Alone(plan(MODEL, reducer).units)
        subject.start()
        assert len(subject.measure(gradient(), 5)["violations"]) == flagged


def test_chance_alone_is_no_violation(quality: ModuleType) -> None:
    lucky = quality.Loss("w", 0.5, None, 1.0, lost=[0.3, 0.9, 0.4, 0.8], product=[0.0] * 4)
    assert lucky.excess() is None  # the mean, 0.6, is above 0.5, by less than one standard error
    certain = quality.Loss("w", 0.5, None, 1.0, lost=[0.6, 0.6001, 0.5999, 0.6], product=[0.0] * 4)
    assert "0.5 declared" in certain.excess()


def test_residuals_are_those_of_error_feedback(quality: ModuleType) -> None:
    subject, x = quality.Subject("topk:0.1", MODEL, steps=20), gradient()["w"].flatten()
    residual = torch.zeros_like(x)
    for index in range(20):
        subject.step(gradient(), index)
        y = residual + x
        residual = y.masked_fill(y.abs() >= y.abs().topk(400).values[-1], 0.0)
        assert subject.residuals[-1] == pytest.approx(float(residual.norm()), rel=1e-5)
    assert set(subject.measured) == {"early", "middle", "late"}
    ratio = quality.feedback(subject.residuals, [float(x.norm())] * 20)["ratio"]
    assert ratio["10"] == pytest.approx(
        sum(r * r for r in subject.residuals[:10]) ** 0.5 / 10**0.5 / float(x.norm()), rel=1e-6
    )


def test_every_method_that_loses_something_is_measured(quality: ModuleType) -> None:
    specs = quality.specs_to_measure()
    reducers = {spec: gradwire.parse(spec) for spec in specs}
    assert len(set(reducers.values())) == len(specs)
    names = {re.split(r"[:,+]", spec)[0] for spec in specs}
    rules = {"median", "trimmed", "krum", "multikrum", "bulyan", "rfa", "clip", "adasum", "dp"}
    assert names == set(gradwire.methods()) - rules - {"none"}


def test_the_page_shows_what_the_file_holds(quality: ModuleType) -> None:
    page = importlib.import_module("quality_page")
    text = (ROOT / "docs" / "building" / "quality.md").read_text()
    shown = text[text.index(page.BEGIN) + len(page.BEGIN) : text.index(page.END)].strip()
    (name,) = re.findall(r"Figures: `benchmarks/results/(quality_[\d-]+\.json)`", shown)
    found = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    assert page.table(found, name).strip() == shown
    assert doctest.testmod(page).failed == 0
