"""`auto`: what it chooses, that all ranks choose alike, that nothing owed is lost, and what it refuses."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import gradwire
from gradwire import AttachError, Session, SpecError, StateError
from gradwire.adapters.fsdp2.form import sharded_method
from gradwire.choosing import CANDIDATES, Demand
from gradwire.choosing.automatic import GAIN, Chosen, StepPace, accuracy_of, decide, demands_of
from gradwire.choosing.coding import plan_coding_s
from gradwire.choosing.forecast import PlanMessages, plan_demand
from gradwire.choosing.rules import NEAR
from gradwire.cli.main import main
from gradwire.core.grain import ParameterSpec
from gradwire.core.link import Link
from gradwire.core.saved_schema import CHOICES
from gradwire.drivers import window as module
from gradwire.drivers.contention import Contention
from gradwire.drivers.engine import Stats
from gradwire.drivers.parts import Chunked, plan_parts
from gradwire.drivers.plan import plan
from gradwire.drivers.window import START_UP, Window
from gradwire.ranks.supervised import run_function
from gradwire.session.automatic import (
    BY_HAND,
    CHOOSES_AFTER,
    EARLY_AFTER,
    RECENT,
    Automatic,
    communicated,
    recent_step_s,
)
from gradwire.session.form import WHOLE
from gradwire.spec import as_method
from gradwire.topology.processors import Processors

SAFE = ("none", "fp16", "int4")
AGREED = ("choices", "digest", "middle", "report", "account")
"""What is the same on all ranks."""
CASES = str(Path(__file__).with_name("automatic_cases.py"))


@pytest.mark.one_draw_in(4)
def test_ranks_choose_alike_adapt_lose_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    """Two real ranks, whose measurements are planted and differ; the link becomes fast in step 25."""
    ranks: list[dict[str, Any]] = run_function(f"{CASES}:chosen", 2, {"folder": str(tmp_path)}, 240)
    for found in ranks:
        for by_attach in (False, True):
            auto = found[f"auto {by_attach}"]
            same = ranks[0][f"auto {by_attach}"]
            assert [auto[key] for key in AGREED] == [same[key] for key in AGREED]
            steps = [(choice["step"], choice["spec"]) for choice in auto["choices"]]
            assert steps == [(CHOOSES_AFTER, "int4"), (50, "none")]  # looks in steps 30 and 50 have seen it
            given, accounted = auto["account"]
            assert accounted == pytest.approx(given, abs=1e-4)
            assert "auto:safe has not chosen yet: it does so after 10 steps" in " ".join(auto["early"].lower().split())
            # of the 5 ms that were planted, int4 coded 1.2 where gradients are sent early
            assert re.match(r"auto:safe took none from step 50 on, since its step takes [35]\.", auto["report"])
            assert '"int4" before step 10, "none" before step 50' in auto["report"]
            assert "the runner-up was " in auto["report"]
        # looks in steps 33 and 53 have seen it; a choice in step 13 has changed nothing
        assert [(each["step"], each["spec"]) for each in found["early"]["choices"]] == [
            (EARLY_AFTER, "int4"),
            (53, "none"),
        ]
        # steps of one rank have become shorter by the look in step 90; or they have not, and the fifth look is due
        for name, last, probed in (("late", 110, [10, 30, 90, 110, 130]), ("unfelt", 130, [10, 30, 110, 130])):
            seen = found[name]
            assert [(each["step"], each["spec"]) for each in seen["choices"]] == [(10, "int4"), (last, "none")]
            assert seen["probed"] == probed
        # the link stays as it was, and one rank computes for a shorter time: looks in steps 90 and 110 have seen it
        assert [(each["step"], each["spec"]) for each in found["shorter"]["choices"]] == [(10, "none"), (110, "int4")]
        assert found["shorter"]["probed"] == [10, 30, 90, 110, 130]
        assert [(each["step"], each["spec"]) for each in found["waiting"]] == [(30, "int4")]
        assert found["fixed early"] == found["early"]["digest"]
        assert found["fixed"] == found["auto True"]["digest"]
        assert found["resumed"] == ["int4", found["auto False"]["middle"]]
        assert found["disagree"].startswith("ranks disagree on the method: rank 1 has")
    assert ranks[0]["auto True"]["choices"] != ranks[0]["auto False"]["choices"]  # a pass hides some of what is sent


def demands(sending_s: float, coding_s: float) -> list[Demand]:
    """Of fp32 and of a method that sends a tenth."""
    return [Demand("none", 0.0, sending_s, (1,)), Demand("int4", coding_s, sending_s / 10, (1,))]


@pytest.mark.parametrize("now", ["none", "int4"])
def test_a_method_is_left_for_one_that_is_enough_faster(now: str) -> None:
    """By a tenth for one that loses more, and by a twentieth for one that loses less."""
    pace, gain = StepPace(1.0, 0.0, (0.0, 0.1)), GAIN if now == "none" else 1 / NEAR
    other = {"none": "int4", "int4": "none"}[now]
    for sending_s in (0.0, 0.05, 0.1, 0.111, 0.2, 0.3, 0.5, 1.0, 5.0):
        steps = {"none": 1.0 + sending_s, "int4": 1.1 + sending_s / 10}
        choice = decide(demands(sending_s, 0.1), pace, 10, now)
        assert choice.spec == (other if steps[other] < gain * steps[now] else now)
        assert choice.runner_up.startswith({"none": "int4", "int4": "none"}[choice.spec])


@pytest.mark.parametrize(
    ("steps", "now", "taken"),
    [
        ((1.0, 0.905, 0.865), "none", "int4"),  # fp16 is near, and not worth a change
        ((1.0, 0.89, 0.865), "none", "fp16"),
        ((0.91, 1.5, 1.0), "int4", "none"),  # which loses less, so a twentieth is enough
        ((0.97, 1.5, 1.0), "int4", "int4"),
        ((1.5, 0.93, 0.95), "int4", "int4"),
        ((1.5, 1.0, 0.91), "fp16", "fp16"),
    ],
)
def test_a_step_stays_near_the_best(steps: tuple[float, ...], now: str, taken: str) -> None:
    asked = [Demand(spec, 0.0, step_s - 0.5, (1,)) for spec, step_s in zip(SAFE, steps, strict=True)]
    at_hand = asked[SAFE.index(now)]
    pace = StepPace(0.5, 0.0, (0.0, 0.0, 0.0), exposed_s=at_hand.sending_s)
    assert decide(asked, pace, 10, now).spec == taken


def test_the_slowest_rank_counts() -> None:
    paces = [StepPace(1.0, 0.5, (0.1, 0.4)), StepPace(3.0, 0.2, (0.2, 0.3))]
    assert StepPace.slowest(paces) == StepPace.slowest(paces[::-1]) == StepPace(3.0, 0.2, (0.2, 0.4))


def test_what_processors_served_the_network_is_not_computing() -> None:
    """Whatever is exposed was no work beside computing; a figure that makes no sense takes half of a step at most.

    Where ranks share cores, what the processors computed counts, if that is more.
    """
    held = Demand("none", 0.1, 0.4, (1,), work_s=0.2)
    for exposed_s, computing_s, worked_s, crowded_s in (
        (0.0, 0.7, 0.3, 0.7),
        (0.2, 0.8, 0.9, 1.8),
        (0.4, 0.9, 0.9, 1.8),
        (0.9, 0.9, 0.4, 0.9),
        (0.9, 0.9, 0.8, 1.6),
    ):
        pace = StepPace(1.0, 0.5, (0.0,), exposed_s, worked_s)
        assert pace.alone(held)[0] == pytest.approx(computing_s)
        assert pace._replace(crowding=2.0).alone(held)[0] == pytest.approx(crowded_s)
    assert StepPace(1.0, 0.5, (0.0,)).alone(held._replace(work_s=7.0))[0] == pytest.approx(0.5)
    assert StepPace(1.0, 0.5, (0.0,)).alone(held._replace(coding_s=7.0)) == (0.5, 0.0)
    assert StepPace(1.0, 0.5, (0.0,), 0.3).alone(Demand("none", 0.0, 0.0, (1,))) == (1.0, 0.5)


@pytest.mark.parametrize("crowding", [1.0, 2.0])
@pytest.mark.parametrize("backward", [0.0, 0.5, 0.75])
def test_a_step_that_was_predicted_tells_what_it_computes(backward: float, crowding: float) -> None:
    """The pace of a run that is as the forecast says gives back the computing that the forecast was made of."""
    for compute_s, coding_s, sending_s, work_s, busy_s in itertools.product(
        (1.0, 4.0), (0.0, 0.3), (0.2, 1.0, 9.0), (0.0, 0.1), (0.0, 1.5)
    ):
        held = Demand("none", coding_s, sending_s, (1, 2, 3, 4), work_s, busy_s if backward else 0.0)
        seen = held.beside(compute_s, backward)
        worked_s = compute_s / crowding
        if not backward:  # waves go out one after the other while they are coded, and all of that is at the end
            pace = StepPace(compute_s, 0.0, (coding_s,), seen.step_s - compute_s, worked_s, crowding)
            assert pace.alone(held) == pytest.approx((compute_s, 0.0))
            continue
        pass_s = compute_s + coding_s + seen.serving_s
        share = (backward * compute_s + coding_s + seen.serving_s) / pass_s
        found = StepPace(pass_s, share, (coding_s,), seen.exposed_s, worked_s, crowding).alone(held)
        assert found == pytest.approx((compute_s, backward), rel=0.05 if work_s and busy_s else 1e-9)


def test_ranks_that_share_cores_code_longer() -> None:
    crowded = Processors(0.5, 1)
    pace, model = (
        StepPace(1.0, 0.5, (0.0, 0.1), crowding=crowded.crowding),
        [ParameterSpec("w", (100,), torch.float32, torch.device("cpu"))],
    )
    messages = {spec: PlanMessages.of(plan(model, as_method(spec)), 2) for spec in ("none", "fp16")}
    found = demands_of(messages, Link(0.0, 0.0), pace)
    assert [(each.spec, each.coding_s) for each in found] == [("none", 0.0), ("fp16", 0.2)]


def test_of_a_sharded_model_nothing_is_hidden_and_a_shard_is_what_a_rank_keeps() -> None:
    spec = ParameterSpec("w", (90, 100), torch.float32, torch.device("cpu"))
    parts = [[Chunked(spec, 4500)], [Chunked(spec._replace(name="v"), 4500)]]
    sharded = plan_parts(parts, sharded_method("int4"), range(2), grain_numel=3000)
    whole = plan([spec, spec._replace(name="v")], as_method("int4"), 3000)
    assert plan_coding_s(sharded, 2) > 0.0
    of_parts, of_waves = (plan_demand("int4", planned, 2, Link(1e-3, 1e-6)) for planned in (sharded, whole))
    assert 0.0 < of_parts.sending_s < of_waves.sending_s  # nothing is gathered in the end
    assert of_parts.beside(1.0).hidden_s == 0.0 < of_waves.beside(1.0).hidden_s


@pytest.mark.one_draw_in(3)
def test_ranks_of_a_sharded_model_choose_alike_and_can_be_repeated(tmp_path: Path) -> None:
    """As above, under FSDP2, whose ranks never try PowerSGD: it wants whole matrices."""
    ranks: list[dict[str, Any]] = run_function(f"{CASES}:sharded", 2, {"folder": str(tmp_path)}, 240)
    for found in ranks:
        assert found["choices"] == ranks[0]["choices"]
        assert [(each["step"], each["spec"]) for each in found["choices"]] == [(CHOOSES_AFTER, "int4"), (50, "none")]
        assert found["same"]
        assert found["resumed"] == [20, "int4", True]
        assert found["report"].startswith("auto:bold took none from step 50 on, since its step takes 5.")
        assert found["estimated"] is None  # of a step without the method, which FSDP2 would not make by all-reduces


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("auto:save", "'save' is no class of accuracy: did you mean 'safe'"),
        ("auto,exchange=ring", "'auto,exchange=ring' says more than what may be lost: write auto, auto:lossless"),
        ("auto+int8", "says more than what may be lost"),
    ],
)
def test_a_spec_says_a_class_and_nothing_else(spec: str, said: str) -> None:
    assert [accuracy_of(each) for each in ("auto", "auto:accuracy=bold", "automatic", nn)] == [
        "safe",
        "bold",
        None,
        None,
    ]
    with pytest.raises(SpecError, match=said):
        accuracy_of(spec)


def test_what_auto_cannot_serve_is_refused_in_a_sentence() -> None:
    with pytest.raises(SpecError, match=r"'auto' in 'auto': it chooses a method by what a training loop measures"):
        gradwire.parse("auto")
    with pytest.raises(SpecError, match="it chooses a method by what"):
        gradwire.parse("local:8,outer=auto")
    with pytest.raises(AttachError, match=r"parameters= and replicate= are for models of fully_shard"):
        gradwire.attach(nn.Linear(3, 3), "auto", parameters="int8")
    with pytest.raises(AttachError, match="with replicate= each shard's copies would choose for themselves"):
        gradwire.attach(nn.Linear(3, 3), "auto", replicate=cast(Any, "mesh"))
    spec = ParameterSpec("w", (3,), torch.float32, torch.device("cuda"))
    with pytest.raises(AttachError, match="auto measures steps on the CPU, and the parameters are on cuda"):
        Automatic.of("safe", [spec], WHOLE, None, 2)


def test_gradwire_run_reads_auto_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--method", "auto:save"], "'save' is no class of accuracy: did you mean 'safe'"),
        (["--method", "auto", "--parameters", "int9000"], "int9000"),
        (["--method", "auto:bold"], "there is no script nowhere.py"),
    ):
        assert main(["run", *words, "nowhere.py"]) == 2
        assert said in capsys.readouterr().err


def test_one_rank_stays_with_none_and_a_save_tells_choices(one_rank: None) -> None:
    tensors = {"a": torch.ones(3)}
    with Session(tensors, "auto:bold", deadline_s=5) as session:
        for _ in range(CHOOSES_AFTER + 2):
            session.reduce_(tensors)
        assert session.method == "none"
        assert session.report().chosen == "auto:bold stays with none: there is one rank, and nothing is sent"
        assert session.state_dict()[CHOICES] == []
        session.change("fp16")
        session.reduce_(tensors)
        assert session.report().chosen == "auto:bold chooses no more, since session.change was called"
        assert session.automatic is not None
        assert session.automatic.choices == [Chosen(CHOOSES_AFTER + 2, "fp16", BY_HAND)]
        last = Chosen(10, CANDIDATES[-1].spec, "since")
        assert session.automatic.unpacked({CHOICES: [last._asdict()]}, CHOICES) == (last,)
        with pytest.raises(StateError, match="a saved choice has no 'spec'"):
            session.automatic.unpacked({CHOICES: [{"step": 3}]}, CHOICES)
        with pytest.raises(StateError, match="must be a list"):
            session.load_state_dict({**session.state_dict(), CHOICES: "int4"})
    with Session(tensors, "auto:lossless", deadline_s=5) as careful:
        assert careful.automatic is not None
        with pytest.raises(StateError, match="which auto:lossless does not allow"):
            careful.automatic.unpacked({CHOICES: [last._asdict()]}, CHOICES)


def test_a_save_says_which_method_the_training_loop_has_taken(one_rank: None) -> None:
    """Loaded under `auto` by another run, or by the same run that has gone on."""
    tensors = {"a": torch.ones(3)}
    with Session(tensors, "auto", deadline_s=5) as session:
        session.reduce_(tensors)
        before = session.state_dict()
        session.change("topk:0.5")  # which auto:safe does not take by itself
        after = session.state_dict()
        session.reduce_(tensors)
        session.load_state_dict(before)
        assert session.method == "none"
        assert "chooses no more" not in session.report().chosen
        session.reduce_(tensors)
    with Session(tensors, "auto", deadline_s=5) as other:
        other.load_state_dict(after)
        assert other.method == "topk:0.5"
        other.reduce_(tensors)
        assert "chooses no more" in other.report().chosen
        assert other.state_dict()[CHOICES] == after[CHOICES]


@pytest.mark.parametrize("spec", ["none", "fp16", "int4", "powersgd:8,factors=fp16"])
def test_messages_are_priced_on_any_link(spec: str) -> None:
    model = [ParameterSpec(f"w{i}", (200, 90), torch.float32, torch.device("cpu")) for i in range(9)]
    planned, link = plan(model, as_method(spec), 40_000), Link(3e-3, 2e-7)
    beside = Contention(Link(4e-3, 3e-7), Link(1e-4, 1e-9))
    found = PlanMessages.of(planned, 3).demand(spec, link, coding_s=0.2, beside=beside)
    wanted = plan_demand(spec, planned, 3, link, coding_s=0.2, beside=beside)
    assert found.waves == wanted.waves
    assert found[1:3] == pytest.approx(wanted[1:3])
    assert found[4:] == pytest.approx(wanted[4:])
    assert 0.0 < found.work_s < found.sending_s < found.busy_s


def test_what_a_look_reads_of_a_window() -> None:
    window, stats, now = Window(), Stats(), 0.0
    assert communicated(window) == recent_step_s(window) == 0.0
    for step in range(START_UP + RECENT + 3):
        now += 2.0 if step < START_UP + 4 else 3.0
        stats.steps, stats.exposed_s = step, stats.exposed_s + 1.0
        window.end(now, stats)
        assert communicated(window) == pytest.approx(0.0 if step < 2 else 0.5 if step < START_UP + 4 else 1 / 3)
    assert recent_step_s(window) == 3.0


def test_what_the_thread_of_the_training_loop_computed_is_told_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """From bucket to bucket; what other threads do is not in it, and a clock of another thread says nothing."""
    clock, window, stats = [5.0], Window(), Stats()
    monkeypatch.setattr(module, "time", SimpleNamespace(thread_time=lambda: clock[0]))
    worked = list[float]()
    for step, computed_s in enumerate((1.0, 2.0, 0.5, -3.0, 1.5)):  # the fourth begins in another thread
        clock[0] += computed_s
        window.begin()
        clock[0] += 0.25  # the rest of the backward pass
        stats.steps = step + 1
        window.end(10.0 * step, stats)
        worked += [window.latest.worked_s] if window.latest else []
    assert worked == [2.25, 0.75, 0.0, 1.75]
