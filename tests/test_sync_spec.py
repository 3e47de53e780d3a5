"""Specs of `gradwire.sync`: what reads, what is refused, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gradwire import CompositionError, SpecError
from gradwire.codecs import BlockInt
from gradwire.reducers import ErrorFeedback, Guard, TwoShot
from gradwire.sync import Constant, DiLoCo, DriftTriggered, Increasing, LocalSGD, is_sync, parse
from gradwire.sync.methods import METHODS
from gradwire.sync.optimizers import DeMo, Dion
from spec_places import where_of


@pytest.fixture
def model(one_rank: None) -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))


def made(spec: str, model: nn.Module, inner: torch.optim.Optimizer | None = None) -> Iterator[object]:
    optimizer = parse(spec).optimizer(inner or torch.optim.SGD(model.parameters(), lr=0.25), model, **where_of(spec))
    try:
        yield optimizer
    finally:
        optimizer.close()


@pytest.mark.parametrize("name", METHODS)
def test_the_example_of_every_method_trains(name: str, model: nn.Module) -> None:
    for optimizer in made(METHODS[name].example, model):
        assert isinstance(optimizer, torch.optim.Optimizer)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(torch.ones(2, 40)).square().sum().backward()
        optimizer.step()
        assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_windows_are_made_as_written(model: nn.Module) -> None:
    for optimizer in made("diloco:H=20,outer=int4,lr=0.5,fragments=2,delay=3,merge=0.25,buffers=own", model):
        assert isinstance(optimizer, LocalSGD)
        averaging = optimizer.averaging
        assert averaging.schedule == Constant(20)
        assert averaging.outer == DiLoCo(lr=0.5)
        assert len(averaging.fragments) == 2
        assert (averaging.delay, averaging.merge) == (3, 0.25)
        assert averaging.session.reducer == Guard(ErrorFeedback(TwoShot(BlockInt(4))))


def test_windows_may_grow_or_end_early(model: nn.Module) -> None:
    for spec, schedule in {
        "local:2,last=16,double_after=50": Increasing(2, 16, 50),
        "local:2,last=16,double_after=25%,steps=150": Increasing(2, 16, 38),
        "local:2,last=16,double_after=25%,steps=1500": Increasing(2, 16, 375),
        "local:H=64,drift=0.01": DriftTriggered(0.01, 64),
    }.items():
        for optimizer in made(spec, model):
            assert isinstance(optimizer, LocalSGD)
            assert optimizer.averaging.schedule == schedule


def test_a_window_that_ends_by_drift_says_nothing_else(model: nn.Module) -> None:
    """PyTorch would warn of a number that is read with its gradient; warnings are errors here."""
    for optimizer in made("local:H=64,drift=0.01", model):
        assert isinstance(optimizer, LocalSGD)
        model(torch.ones(2, 40)).square().sum().backward()
        optimizer.step()
        assert optimizer.averaging.session.engine.index == 1


def test_an_optimizer_takes_over_what_the_scripts_own_was_told(model: nn.Module) -> None:
    first, last = model.children()
    groups = [{"params": first.parameters(), "lr": 0.5}, {"params": last.parameters(), "weight_decay": 0.125}]
    for optimizer in made("demo", model, torch.optim.AdamW(groups, lr=0.25, weight_decay=0.0)):
        assert isinstance(optimizer, DeMo)
        assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.0), (0.25, 0.125)]
        assert [entry.name for entry in optimizer.entries()] == [name for name, _ in model.named_parameters()]


def test_what_is_written_counts_more_than_what_is_taken_over(model: nn.Module) -> None:
    for optimizer in made("dion:2,lr=0.125,adam=1.*/0.bias", model, torch.optim.AdamW(model.parameters(), lr=0.5)):
        assert isinstance(optimizer, Dion)
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert [e.name for e in optimizer.entries() if optimizer.is_orthonormal(e.name, e.parameter)] == ["0.weight"]


def test_parentheses_enclose_what_has_commas() -> None:
    assert parse("local:H=4,outer=(topk:0.1,decay=0.5),warmup=3").options["outer"] == "topk:0.1,decay=0.5"


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("locl:H=8", "did you mean 'local'?"),
        ("local:h=8", "did you mean 'H'?"),
        ("local:H=eight", "expected a whole number"),
        ("local:H=8,H=9", "given twice"),
        ("local:8,H=9", "given twice"),
        ("local:", "nothing stands after the colon"),
        ("local:8,9", "an option is written name=value"),
        ("local:H=", "an option is written name=value"),
        ("local:H=8,outer=(int4", "parentheses do not match"),
        ("local:H=8,outer=int4)", "parentheses do not match"),
        ("local:H=8,outer=int9", "unknown method 'int9'"),
        ("local:H=2,last=16", "last= and double_after= together"),
        ("local:H=2,last=16,double_after=25%", r"tell how long that is, as in double_after=25%,steps=1000"),
        ("local:H=8,warmup=5%", r"tell how long that is, as in warmup=5%,steps=1000"),
        ("local:H=8,warmup=101%,steps=50", "give 0% to 100% of one step or more"),
        ("local:H=8,warmup=5%,steps=0", "give 0% to 100% of one step or more"),
        ("local:H=8,warmup=some", "a number of steps, or a percentage of steps="),
        ("local:H=8,steps=100", "tells what percentages are of"),
        ("local:H=8,moments=mine", "known are own, average"),
        ("onebitadam", "needs its freeze_step"),
        ("demo:method=int4", "known are"),
    ],
)
def test_what_cannot_be_read_is_refused(spec: str, answer: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(spec)
    assert answer in str(refused.value)


@pytest.mark.parametrize("spec", ["local:H=0", "diloco:momentum=1", "slowmo:beta=-1"])
def test_numbers_that_make_no_sense_are_refused(spec: str) -> None:
    with pytest.raises(CompositionError):
        parse(spec)


def test_reducers_serve_elsewhere() -> None:
    assert [is_sync(spec) for spec in ("int4", "topk:0.01+int8", "torch.fp32", "local", " demo:0.1")] == [
        False,
        False,
        False,
        True,
        True,
    ]
