"""Hosts of unequal speed, and comparisons on unequal links with delay: from the options to the report."""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import gradwire
from comparisons import comparison, run
from gradwire.cli.console import ConsoleView
from gradwire.cli.main import parser
from gradwire.cli.option_arguments import read_options
from gradwire.compare import compare, crossover
from gradwire.compare.options import CompareError, CompareOptions
from gradwire.compare.plan import make_plan
from gradwire.compare.results import Run
from gradwire.compare.storage import load, save
from gradwire.core.errors import NetworkError
from gradwire.network.slow import SlowProcessor, parse_slow
from gradwire.report.page import render


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_slow_processor_takes_its_factor_of_what_was_computed():
    processor = SlowProcessor(4)
    begun, cpu = time.perf_counter(), time.process_time()
    processor.begin()
    for _ in range(20):
        busy(0.01)
        processor.pay()
    seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    assert seconds > 3.9 * used
    busy(0.1)  # off the clock
    processor.begin()
    begun = time.perf_counter()
    processor.pay()
    assert time.perf_counter() - begun < 0.05


@pytest.mark.usefixtures("one_rank")
def test_what_a_slow_processor_codes_is_slept_for_where_it_is_coded():
    """So messages leave later, the report counts it as coding, and the step is not charged with it once more."""
    processor = SlowProcessor(4)
    given = {"a": torch.randn(3_000_000)}
    with gradwire.Session(given, "int4", deadline_s=30) as session:
        session.reduce_(given)
        before = session.stats().encode_s
        processor.watch_coding(session.engine)
        processor.begin()
        begun, cpu = time.perf_counter(), time.process_time()
        session.reduce_(given)
        seconds, used = time.perf_counter() - begun, time.process_time() - cpu
        coded = session.stats().encode_s - before
    assert 4 * used > coded > 2 * used
    assert seconds > 0.9 * coded
    begun = time.perf_counter()
    processor.pay()
    assert time.perf_counter() - begun < 3 * used - 0.5 * coded


def test_gradients_of_a_slow_processor_come_as_late_as_they_would():
    """Each of four layers takes its time in the backward pass, and each gradient is slept for before it is seen."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            busy(0.02)
            return gradients[0]

    layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    processor, seen = SlowProcessor(5), list[float]()

    def note(_: torch.Tensor) -> None:
        seen.append(time.perf_counter())

    for layer in layers:
        processor.watch(layer)
        layer.weight.register_post_accumulate_grad_hook(note)
    x = torch.ones(1, 4)
    for layer in layers:
        x = Slow.apply(layer(x))
    loss = x.sum()
    processor.begin()
    begun = time.perf_counter()
    loss.backward()
    moments = [begun, *seen]
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert len(gaps) == 4
    assert min(gaps) > 0.095


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["9:4x"], "slow host 9 does not exist: hosts are 0 to 3"),
        (["3:0.5x"], "write HOST:FACTOR from 1x to 1000x"),
        (["3:1001x"], "write HOST:FACTOR from 1x to 1000x"),
        (["3"], "slow host '3' cannot be read"),
        (["-1:4x"], "slow host '-1:4x' cannot be read"),
        (["1:2x", "1:3x"], "slow host 1 is given twice"),
    ],
)
def test_slow_hosts_that_make_no_sense_are_refused(texts: list[str], said: str):
    with pytest.raises(ValueError, match=said):
        parse_slow(texts, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rates": ("100mbit",)}, "there are 1 rates for 4 hosts"),
        ({"delay": "50"}, "delay '50' cannot be emulated"),
        ({"loss": "60%"}, "loss '60%' cannot be used"),
        ({"slow": ("4:2x",)}, "slow host 4 does not exist"),
        ({"delay": "5ms", "network": "paced"}, "paced sockets have neither delay nor loss"),
    ],
)
def test_a_comparison_refuses_what_cannot_be_emulated(changes: dict[str, Any], said: str):
    with pytest.raises(CompareError, match=said):
        make_plan(CompareOptions(task="digits", **changes))


def test_the_command_line_knows_unequal_hosts_and_the_internet():
    words = ["compare", "--rates", "100mbit,20mbit", "--delay", "50ms", "--loss", "0.1%", "--slow", "0:4x", "1:2x"]
    given = read_options(parser().parse_args(words), CompareOptions)
    assert given.rates == ("100mbit", "20mbit")
    assert (given.delay, given.loss, given.slow) == ("50ms", "0.1%", ("0:4x", "1:2x"))


def test_runs_under_other_delays_losses_rates_or_slow_hosts_are_not_mixed():
    plain = make_plan(CompareOptions(task="digits")).conditions("user", "none")
    assert plain["network"] == "user"  # as in folders from before there were delays
    for changes in ({"delay": "5ms"}, {"loss": "1%"}, {"rates": ("1mbit",) * 4}, {"slow": ("1:2x",)}):
        options = CompareOptions(task="digits", **changes)  # pyright: ignore[reportArgumentType]
        assert make_plan(options).conditions("user", "none") != plain


@pytest.mark.long
@pytest.mark.net
@pytest.mark.timeout(200)
def test_a_comparison_over_a_delay_with_a_slow_host(tmp_path: Path):
    """Ten steps whose reduction takes a round trip at least, on two hosts, one of which sleeps nine times its work."""

    def compared(**changes: Any) -> Run:
        options = CompareOptions(task="digits", methods=("torch.fp32",), hosts=2, steps=10, network="user", **changes)
        return compare.compare(options, ConsoleView(Console(file=StringIO()))).runs[0]

    try:
        plain = compared(out=tmp_path / "plain")
    except NetworkError as error:
        pytest.skip(f"no user network here: {error}")
    far = compared(out=tmp_path / "far", delay="40ms", slow=("1:10x",))
    assert plain.status == far.status == "finished"
    assert plain.losses == far.losses
    assert far.times_s[-1] > 10 * 0.04
    assert far.split.compute_s > 2.5 * plain.split.cpu_s  # of two hosts one takes ten times its processor time
    assert plain.line_cores is None
    assert far.line_cores is not None
    assert 0 < far.line_cores < 0.5


def internet() -> Any:
    runs = [dataclasses.replace(run("torch.fp32"), line_cores=0.1, line_missed=2), run("int4")]
    made = comparison(*runs)
    made.options.update(rates=["100mbit", "20mbit"], delay="50ms", loss="0.1%", slow=["1:4x"])
    return made


def test_the_report_tells_links_and_slow_hosts_and_what_the_line_took(tmp_path: Path):
    save(internet(), tmp_path / "results.json")
    words = re.sub(r"\s+", " ", html.unescape(render(load(tmp_path / "results.json"))))
    assert "links of 100mbit, 20mbit with a round trip of 50ms that lose 0.1% of their frames, slow hosts 1:4x" in words
    assert "The delay line took 10 % of a core (at most 10 %), which the ranks lacked" in words
    assert "it was too slow for 2 frames, which got lost" in words
    assert "Slow hosts (1:4x) sleep in proportion" in words
    assert "delay line" not in render(comparison(run("torch.fp32")))


def test_unequal_links_have_no_single_rate_to_conclude_from():
    assert crossover.measured_rate(comparison(run("torch.fp32"))) == 1e8
    assert crossover.measured_rate(internet()) is None
