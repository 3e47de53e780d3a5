"""Which method for which case: the rules, the command and the page say the same."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import choosing_page
import gradwire
from gradwire.choosing import (
    ACCURACIES,
    CANDIDATES,
    CASES,
    LAYOUTS,
    NEAR,
    SLOW,
    Case,
    Demand,
    best_of,
    boundaries,
    choose,
    coding,
    coding_s,
    demand,
    square_matrices,
)
from gradwire.choosing.accuracy import SAFE_ERROR, allows
from gradwire.choosing.rules import BUCKET
from gradwire.cli.main import main
from gradwire.core.errors import SpecError
from gradwire.core.link import Link
from gradwire.drivers.contention import Contention
from gradwire.drivers.cost import specs_on
from gradwire.topology import AxisLink, MeasuredPair
from gradwire.topology.link_profile import LinkProfile

ALONE = ("int4", "powersgd:8,factors=fp16", "topk:0.01", "none,exchange=ring", "krum:1", "int8,node=2")
"""Specs with messages of each kind."""

QUALITY = Path(__file__).parents[1] / "benchmarks" / "results" / "quality_2026-11-21.json"


def test_every_case_takes_something_that_can_be_written() -> None:
    for case in CASES:
        for spec in re.findall(r'(?<!=)"([^"]+)"', case.call) or [case.take]:
            assert gradwire.parse(spec).place.call_of(spec) == case.call.replace("attach(model", "attach(ddp")
        assert (choosing_page.PAGE.parent / case.page).exists()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slow", SLOW)
def test_a_case_keeps_the_class_of_accuracy_or_says_which_one_it_needs(layout: str, slow: str) -> None:
    for accuracy in ACCURACIES:
        found = choose(Case(rate=1e9, step_s=0.1, layout=layout, slow=slow, accuracy=accuracy))
        if found.forecasts:
            continue
        (fixed,) = (each for each in CASES if each.call == found.call)
        if allows(accuracy, fixed.accuracy):
            assert found.why == fixed.why
        else:
            assert f"It needs --accuracy bold: methods that {accuracy} allows {fixed.stricter}" in found.why
            assert fixed.stricter


def test_a_sharded_model_is_sent_as_its_class_of_accuracy_allows(capsys: pytest.CaptureFixture[str]) -> None:
    calls = {"lossless": "none", "safe": "int4", "bold": "int4,parameters=int8"}
    for accuracy, spec in calls.items():
        assert main(["choose", "--rate", "1gbit", "--layout", "fsdp2", "--accuracy", accuracy]) == 0
        said = capsys.readouterr().out
        assert f'Take gradwire.attach(model, "{spec}")' in said
        assert "It needs" not in said


def test_what_is_taken_is_the_first_that_is_nearly_the_fastest() -> None:
    for step_s in (0.01, 0.1, 1.0, 10.0, 100.0):
        found = choose(Case(rate=1e8, parameters=10**6, step_s=step_s, accuracy="bold"))
        steps = [forecast.step_s for forecast in found.forecasts]
        place = 0 if found.take is None else [forecast.spec for forecast in found.forecasts].index(found.take)
        assert steps[place] <= NEAR * min(steps)
        assert all(step > NEAR * min(steps) for step in steps[:place])
        others = [forecast for forecast in found.forecasts if forecast is not found.forecasts[place]]
        assert found.runner_up is best_of(others)


def test_the_faster_the_link_the_less_is_done() -> None:
    order = ["none", "fp16", "int4", "powersgd:8,factors=fp16"]
    places: list[int] = []
    for rate in (1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12):
        take = choose(Case(rate=rate, parameters=10**7, step_s=0.5, accuracy="bold")).take or "none"
        places.append(order.index(take) if take in order else len(order))
    assert places == sorted(places, reverse=True)
    assert (places[0], places[-1]) == (len(order), 0)


def test_boundaries_are_where_the_choice_changes() -> None:
    found = boundaries(Case(rate=1e9, parameters=10**6, accuracy="bold"))
    for name, seconds in list(found.items())[:-1]:
        take = choose(Case(rate=1e9, parameters=10**6, step_s=1.01 * seconds, accuracy="bold")).take
        assert take == (None if name == "none" else name)


@pytest.mark.one_draw_in(3)
def test_times_grow_with_the_model_beyond_what_is_planned() -> None:
    cases = [Case(rate=1e9, parameters=n, step_s=1.0) for n in (10**8, 10**10, 10**11)]
    small, _, large = (choose(case).forecasts[0].sending_s for case in cases)
    assert large == pytest.approx(1000 * small, rel=0.02)
    _, small, large = (choose(case).forecasts[-1].sending_s for case in cases)
    assert large == pytest.approx(10 * small, rel=0.02)


def test_ddp_sends_full_buckets_and_the_rest() -> None:
    rest = BUCKET // 2
    case = Case(parameters=10 * BUCKET + rest, rate=1e9, ranks=4, step_s=1e-6)
    sending_s = 3 / 2 * 4 * case.parameters * 8e-9 + 11 * 6 * 1e-4
    found = choose(case).forecasts[0]
    assert found.sending_s == pytest.approx(sending_s, rel=1e-6)
    long = choose(dataclasses.replace(case, step_s=1000.0)).forecasts[0]
    assert long.exposed_s == pytest.approx(rest / case.parameters * sending_s, rel=1e-6)  # the last one is never hidden
    last = choose(dataclasses.replace(case, parameters=16 * BUCKET, step_s=1000.0)).forecasts[0]
    assert last.exposed_s == pytest.approx(last.sending_s / 16, rel=1e-6)


def test_a_latency_is_assumed_only_where_none_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def latency_s(delay_s: float | None) -> float:
        """What the rounds of one bucket take beside its bytes, of one round."""
        case = Case(rate=1e9, parameters=1000, ranks=2, step_s=1.0, delay_s=delay_s)
        return (choose(case).forecasts[0].sending_s - 4000 * 8e-9) / 2

    assert latency_s(None) == pytest.approx(1e-4)
    assert latency_s(5e-5) == pytest.approx(2.5e-5)
    assert latency_s(0.0) == pytest.approx(0.0, abs=1e-12)
    words = "choose --rate 1tbit --parameters 1k --ranks 1001 --step 1 --accuracy lossless --device cpu --delay"
    for told, ms in (("2us", "2.0"), ("2ms", "2,000")):
        assert main([*words.split(), told]) == 0
        assert ms in capsys.readouterr().out
    assert main(["choose", "--rate", str(measured(tmp_path, 2e-5, 8e-9)), "--parameters", "1M", "--no-coding"]) == 0
    assert "a round trip of 0.040 ms" in capsys.readouterr().out


def measured(folder: Path, alpha_s: float, beta_s_per_byte: float | None) -> Path:
    """The file of two nodes of two ranks; without a rate the links between these were described."""
    levels = {"rank": tuple((rank,) for rank in range(4)), "node": ((0, 1), (2, 3))}
    pairs = () if beta_s_per_byte is None else (MeasuredPair((0, 2), alpha_s, beta_s_per_byte),)
    links = (AxisLink("rank", (MeasuredPair((0, 1), 1e-6, 1e-9),)), AxisLink("node", pairs))
    profile = LinkProfile(hosts=("a", "a", "b", "b"), names=("a", "a", "b", "b"), levels=levels, links=links)
    file = folder / "links.json"
    file.write_text(profile.to_text())
    return file


@pytest.mark.parametrize(
    ("beta_s_per_byte", "said"), [(None, "were described and not measured"), (0.0, "showed no limit")]
)
@pytest.mark.parametrize(
    "words", ["choose --no-coding", "simulate none --step 10ms --parameters 1M", "cost none --task digits"]
)
def test_links_without_a_measured_rate_are_refused(
    words: str, beta_s_per_byte: float | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = measured(tmp_path, 1e-4, beta_s_per_byte)
    assert main([*words.split(), "--rate", str(file)]) in (1, 2)
    error = " ".join(capsys.readouterr().err.split())
    assert f"links between nodes {said}" in error
    assert "give a rate" in error


def test_a_profile_tells_its_hosts_and_ranks_that_share_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["choose", "--rate", str(measured(tmp_path, 1e-4, 8e-9)), "--parameters", "1M", "--no-coding"]
    for accuracy, shared in (("safe", True), ("lossless", False)):
        assert main([*words, "--accuracy", accuracy]) == 0
        said = capsys.readouterr().out
        assert "links measured on a, b" in said
        assert ("Up to 2 ranks share the link of a node" in said and "try int4,node=auto" in said) is shared
    assert main(["choose", "--rate", "1gbit", "--parameters", "1M", "--no-coding"]) == 0
    said = capsys.readouterr().out
    assert "measured on" not in said
    assert "share the link" not in said


def test_buckets_of_a_model_that_is_given_are_not_joined() -> None:
    """DDP has as many as ten models of a tenth have."""
    matrices = tuple(square_matrices(1_300_000_000))
    given = choose(Case.of_model(matrices, rate=1e10, step_s=1.0)).forecasts[0]
    by_size = choose(Case(parameters=sum(each.numel for each in matrices), rate=1e10, step_s=1.0)).forecasts[0]
    assert given.sending_s == pytest.approx(by_size.sending_s, rel=1e-6)
    assert given.hidden_s == pytest.approx(by_size.hidden_s, rel=1e-6)


@pytest.mark.one_draw_in(2)
def test_a_large_model_is_planned_whole() -> None:
    """Its waves have several grains, so that messages are fewer than ten models of a tenth have."""
    model = square_matrices(1_300_000_000)
    numel = sum(matrix.numel for matrix in model)
    small, large = (
        choose(Case(parameters=n, rate=1e10, step_s=1.0)).forecasts[-1].sending_s for n in (numel // 10, numel)
    )
    assert large < 8 * small
    whole = demand("int4", model, 4, Link(8e-5, 8e-10))  # the latency that is assumed at 10 Gbit/s
    assert large == pytest.approx(whole.sending_s, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"layout": "grid"}, "'grid' is none of ddp, fsdp2, sites, leaving, clients"),
        ({"slow": "often"}, "'often' is none of never, one, any"),
        ({"device": "tpu"}, "'tpu' is none of cpu, cuda"),
        ({"ranks": 1}, "communication needs 2 ranks and a parameter at least"),
        ({"accuracy": "save"}, "'save' is no class of accuracy: did you mean 'safe'"),
        ({"step_s": 0.0}, "a step without communication takes some time, not 0.0 s"),
    ],
)
def test_nonsense_is_refused(case: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Case(**{"rate": 1e8, **case})  # type: ignore[arg-type]


def test_a_class_of_accuracy_allows_what_was_measured() -> None:
    """The rule of `safe`, by the figures of docs/building/quality.md: every stage of training, both tasks."""
    tasks = json.loads(QUALITY.read_text(encoding="utf-8"))["tasks"].values()
    classes = list(ACCURACIES)
    for candidate in CANDIDATES[1:]:  # `none` loses nothing, and is not measured there
        stages = [task["methods"][candidate.spec][stage] for task in tasks for stage in task["stages"]]
        worst = max(stage["error"] for stage in stages)
        assert candidate.accuracy == ("safe" if worst <= SAFE_ERROR else "bold"), (candidate, worst)
    for n, accuracy in enumerate(classes):
        allowed = [each for each in CANDIDATES if classes.index(each.accuracy) <= n]
        found = choose(Case(rate=1e6, parameters=10**6, step_s=0.01, accuracy=accuracy)).forecasts
        assert [forecast.spec for forecast in found[: len(allowed)]] == [each.spec for each in allowed]
        assert len(found) == len(allowed) + (accuracy == "bold")  # windows


@pytest.mark.parametrize("coding_s", [0.0, 0.3, 30.0])
def test_a_step_is_between_hiding_all_and_hiding_nothing(coding_s: float) -> None:
    """And it grows with each of its parts; of coding nothing is hidden."""
    before = 0.0
    for sending_s in (0.0, 0.1, 1.0, 3.0, 30.0):
        found = Demand("int4", coding_s, sending_s, (5, 5, 5, 5)).beside(3.0)
        assert found.step_s == pytest.approx(found.compute_s + coding_s + found.exposed_s)
        assert sending_s / 4 <= found.exposed_s + 1e-9 <= sending_s + 1e-9  # the last wave is never hidden
        assert max(3.0 + coding_s, sending_s) <= found.step_s + 1e-9
        assert found.step_s >= before
        before = found.step_s


@pytest.mark.parametrize("sending_s", [0.1, 1.0, 3.0, 30.0])
def test_serving_the_network_gives_back_a_part_of_what_is_hidden(sending_s: float) -> None:
    """No work is as a spare core, and where all of sending is work nothing is gained by sending early."""
    waves, before = (5, 5, 5, 5), 0.0
    free = Demand("int4", 0.3, sending_s, waves).beside(3.0)
    for share in (0.0, 0.25, 0.5, 1.0, 4.0):
        found = Demand("int4", 0.3, sending_s, waves, work_s=share * sending_s).beside(3.0)
        assert found.serving_s == pytest.approx(min(share, 1.0) * found.hidden_s)
        assert free.step_s - 1e-9 <= found.step_s <= 3.3 + sending_s + 1e-9
        assert found.step_s >= before
        before = found.step_s
    assert before == pytest.approx(3.3 + sending_s)


def test_work_is_counted_by_messages_and_bytes_as_sending_is() -> None:
    model = nn.Linear(1000, 1000)
    found = demand("none", model, 2, Link(0.0, 1e-6), beside=Contention(Link(0.0, 2e-6), Link(0.0, 1e-7)))
    assert found.work_s == pytest.approx(found.sending_s / 10)
    assert found.busy_s == pytest.approx(2 * found.sending_s)
    alone = demand("none", model, 2, Link(0.0, 1e-6))
    assert alone.work_s == alone.busy_s == 0.0


@pytest.mark.parametrize("sending_s", [0.1, 1.0, 3.0, 30.0])
def test_messages_that_take_longer_beside_computing_hide_less(sending_s: float) -> None:
    """As on a slower link while the pass goes on, and never by more than if nothing were sent before its end."""
    before = 0.0
    for busy in (0.0, 1.0, 1.5, 3.0, 100.0):
        found = Demand("int4", 0.3, sending_s, (5, 5, 5, 5), busy_s=busy * sending_s).beside(3.0)
        assert before <= found.step_s <= 3.3 + sending_s + 1e-9
        assert found.step_s == pytest.approx(3.3 + found.exposed_s)
        before = found.step_s


def test_waves_of_matrices_send_their_factors_together() -> None:
    """By a link that has latency alone, the figure is the number of collectives that follow each other."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    found = demand("powersgd:2", model, 2, Link(1.0, 0.0))
    assert found.sending_s == pytest.approx(4.0)  # P with the biases, then Q: each a ring of two rounds
    assert sum(found.waves) == sum(parameter.numel() for parameter in model.parameters())


def test_coding_is_timed_once_a_form_and_grows_with_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted second for each form: real time differs from run to run."""
    timed: list[tuple[int, ...]] = []

    def unit_s(unit: coding.Unit, world_size: int, repeats: int) -> float:
        timed.append(unit.grain.shape)
        return 1.0

    monkeypatch.setattr(coding, "_unit_s", unit_s)
    model = nn.Sequential(*(nn.Linear(300, 300, bias=False, device="meta") for _ in range(10)))
    assert coding_s("int4", model, 4, grain_numel=90_000) == 10.0
    assert timed == [(90_000,)]


@pytest.mark.parametrize("spec", ALONE)
def test_a_rank_codes_among_mirrors_as_among_ranks(spec: str) -> None:
    """Without a network: whatever it asks for is answered in the shape that it has among real ranks."""
    assert coding_s(spec, nn.Linear(40, 50), world_size=6, repeats=1) > 0.0


def test_the_command_says_what_python_says(capsys: pytest.CaptureFixture[str]) -> None:
    words = "choose --rate 100mbit --parameters 1.85M --step 130 --accuracy bold --no-coding --device cpu"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    found = choose(Case(rate=1e8, parameters=1_850_000, step_s=0.13, accuracy="bold"))
    assert f"Take {found.call}" in said
    assert found.runner_up is not None
    assert f"The runner-up is {found.runner_up.spec}" in said
    assert all(forecast.spec in said for forecast in found.forecasts)
    assert main(["choose", "--rate", "1tbit", "--task", "digits", "--step", "100"]) == 0
    assert "Use PyTorch alone." in capsys.readouterr().out


def test_ranks_on_gpus_send_fewer_and_larger_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """Their grains have up to 2^24 elements, those of processors 2^20: each is two collectives under `int4`."""
    on_cpu, on_gpu = (
        choose(Case(rate=1e10, parameters=124_000_000, step_s=0.04, device=device)) for device in ("cpu", "cuda")
    )
    of_cpu, of_gpu = (found.forecasts[-1].sending_s for found in (on_cpu, on_gpu))
    least_s = 2 * 3 / 4 * 124e6 / 2 / (1e10 / 8)  # without latency and scales
    assert least_s < of_gpu < 1.2 * least_s < 1.5 * least_s < of_cpu
    assert on_cpu.forecasts[0].sending_s == on_gpu.forecasts[0].sending_s  # DDP has its buckets everywhere
    assert on_gpu.case.says.startswith("4 ranks on GPUs, 124 M parameters")
    words = "choose --rate 10gbit --parameters 124M --step 40 --no-coding --device cuda"
    assert main(words.split()) == 0
    assert on_gpu.why in capsys.readouterr().out


def test_a_model_on_a_gpu_is_planned_as_one() -> None:
    specs = specs_on("cuda", nn.Linear(2000, 1000))
    assert (Case.of_model(specs, rate=1e8).device, Case.of_model(nn.Linear(9, 9), rate=1e8).device) == ("cuda", "cpu")
    assert len(demand("int4", specs, 2, Link(1e-4, 1e-9)).waves) == 2
    assert len(demand("int4", nn.Linear(2000, 1000), 2, Link(1e-4, 1e-9)).waves) == 9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_coding_on_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = "coding is measured on this machine, where PyTorch finds no GPU: take device cpu, or leave coding out"
    with pytest.raises(SpecError, match=said):
        coding_s("int4", specs_on("cuda", nn.Linear(9, 9)), 2)
    assert main(["choose", "--rate", "1gbit", "--parameters", "1M", "--device", "cuda"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rate fast", "rate 'fast' cannot be used"),
        (
            "--rate 1gbit --parameters many",
            "--parameters 'many' is no number of parameters: write one such as 1.85M or 7B",
        ),
        (f"--rate 1gbit --parameters {'9' * 400}", "is no number of parameters: write one such as 1.85M or 7B"),
        (f"--rate 1gbit --parameters {'9' * 200}", "is no number of parameters: write one such as 1.85M or 7B"),
        ("--rate 1gbit --delay soon", "--delay 'soon' is no time: write a number and a unit of us, ms, s"),
        ("--rate 1gbit --parameters 1M --task digits", "--task tells the model, and so does --parameters"),
        ("--rate 1gbit --step nan", "a step without communication takes some time, not nan s"),
        ("--rate 1gbit --accuracy careful", "'careful' is no class of accuracy: known are lossless, safe, bold"),
        ("--rate nowhere.json", "nowhere.json cannot be read"),
    ],
)
def test_the_command_refuses_nonsense(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", *words.split()]) in (1, 2)
    assert said in capsys.readouterr().err


def test_the_cost_command_tells_coding_and_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    cost = ["cost", "none", "int4", "--task", "digits"]
    assert main([*cost, "--rate", "20mbit", "--coding", "--computing", "20"]) == 0
    for line in capsys.readouterr().out.splitlines()[1:]:
        if line.split():
            sending, coding_ms, hidden, step = (float(number.replace(",", "")) for number in line.split()[-4:])
            assert step == pytest.approx(20.0 + coding_ms + sending - hidden, abs=0.3)
            assert 0.0 < coding_ms < step > 20.0
    for words, said in (
        (["--computing", "20"], "--computing is a part of a step, and the others are missing"),
        (["--rate", "20mbit", "--coding", "--computing", "-1"], "--computing -1.0 is no time"),
        (["--coding", "--hosts", "2", "4"], "--coding tells times for one number of --hosts"),
    ):
        assert main([*cost, *words]) == 2
        assert said in capsys.readouterr().err


def test_the_page_has_the_tables_of_the_rules() -> None:
    text = choosing_page.PAGE.read_text(encoding="utf-8")
    assert text == choosing_page.written(text), "run python tools/choosing_page.py"
