"""What each rank does in the tests of `auto`, with planted times: a link that is slow, and fast later."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import gradwire
from change_cases import GRAIN, Training
from fsdp2_cases import DEADLINE_S, VARIANTS, optimizer_of, train
from fsdp2_cases import digest as digest_of_shards
from gradwire.adapters.fsdp2.attach import ShardedSession
from gradwire.choosing.automatic import StepPace
from gradwire.core.link import Link
from gradwire.drivers.contention import Contention, message
from gradwire.session import automatic
from gradwire.session.session import Session
from gradwire.topology.reduction_times import Probe, ReductionTimes
from session_cases import digest

SLOW = ReductionTimes(6000, 20e-6, (Probe(6000, 20e-3, 0.0),))
"""20 ms for all gradients of the model, in fp32."""
NO_CONTENTION = Contention(Link(0.0, 0.0), Link(0.0, 0.0))
FAST_FROM = 25
"""The step from which on a message takes a fiftieth."""
CODING_S = {"none": 0.0, "fp16": 0.1e-3, "int4": 0.6e-3}
"""Of the candidates, in their order."""
LATE, LATE_STEPS = 75, 132
"""The same where ranks have stopped probing, since their steps were as usual."""
EARLY_SHARES = (0.5, 0.9)
"""Of a step that is mostly communication."""
STEPS = 54


def plant(rank: int, early: bool = False, fast_from: int = FAST_FROM, felt: bool = True, shorter_from: int = 0) -> None:
    """Times that each rank measures otherwise: the second one is slower in all."""
    training: list[automatic.Choosing] = []

    times = itertools.cycle(CODING_S.values())

    def plan_coding_s(*_: object) -> float:
        return (1 + rank) * next(times)

    def pace_of(samples: Sequence[object], coded_s: tuple[float, ...], sent_early: bool) -> StepPace:
        assert len(samples) >= (1 if early else automatic.FEWEST_SAMPLES)
        (session,) = training
        computed_s = 1.0 if session.engine.index < shorter_from else 4e-3
        return StepPace(computed_s + rank * 1e-3, 0.5 if sent_early else 0.0, coded_s)

    def communicated(_: object) -> float:
        return (EARLY_SHARES if early else (0.1, 0.9))[rank]

    def probe_s(*_: object) -> float:
        (session,) = training
        return (1 + rank) * (0.02 if session.engine.index < fast_from else 0.0004)

    def recent_step_s(_: object) -> float:
        """Steps of rank 1 become shorter, and those of rank 0 stay as they are."""
        (session,) = training
        return 0.02 if felt and rank == 1 and session.engine.index >= (shorter_from or fast_from) else 0.03

    def contention(_: object, link: Link, computes: bool) -> Contention:
        """That of the link that was timed, or has become fast."""
        assert computes or rank > 0
        timed = message(SLOW.link, 2).seconds(1000)
        assert link.seconds(1000) == pytest.approx(timed if link.seconds(1000) > timed / 2 else timed / 50)
        return NO_CONTENTION

    class Watched(automatic.Automatic):
        def before_step(self, session: automatic.Choosing) -> None:
            training[:] = [session]
            super().before_step(session)

    automatic.plan_coding_s, automatic.pace_of, automatic.probe_s = plan_coding_s, pace_of, probe_s  # type: ignore[assignment]
    automatic.contention = contention
    automatic.communicated, automatic.recent_step_s = communicated, recent_step_s
    Session.timed_link = lambda self: SLOW  # type: ignore[method-assign]
    gradwire.session.session.Automatic = Watched  # type: ignore[attr-defined]


def chosen(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Runs under `auto`, the same run without it, one that is saved and taken up, and ranks that disagree."""
    plant(rank)
    found: dict[str, Any] = {}
    for by_attach in (False, True):
        training = Training("auto", rank, by_attach)
        early = str(training.session.report())
        training.run(30)
        middle = digest(training.network)
        training.run(STEPS - 30)
        session = training.session
        assert session.automatic is not None
        found[f"auto {by_attach}"] = {
            "choices": session.automatic.packed(),
            "digest": digest(training.network),
            "middle": middle,
            "account": training.account(),
            "early": early,
            "report": session.report().as_dict()["chosen"],
        }
        session.close()
    plant(rank, early=True)
    training = Training("auto", rank, by_attach=True)
    training.run(STEPS)
    assert training.session.automatic is not None
    choices = training.session.automatic.packed()
    found["early"] = {"choices": choices, "digest": digest(training.network)}
    training.session.close()
    found["fixed early"] = fixed(rank, choices)
    found["late"], found["unfelt"] = late(rank, fast_from=LATE), late(rank, fast_from=LATE, felt=False)
    found["shorter"] = late(rank, fast_from=LATE_STEPS, shorter_from=LATE)
    found["waiting"] = waiting(rank)
    plant(rank)
    found["fixed"] = fixed(rank, found["auto True"]["choices"])
    found["resumed"] = resumed(rank, folder)
    try:
        Training("auto:bold" if rank else "auto", rank, by_attach=False)
    except gradwire.AttachError as error:
        found["disagree"] = str(error)
    return found


def late(rank: int, **planted: Any) -> dict[str, Any]:
    """A run that changes when ranks have stopped probing, and the steps in which they do."""
    plant(rank, **planted)
    training, probed = Training("auto", rank, by_attach=False), list[int]()
    probe = automatic.probe_s

    def counted(*arguments: Any) -> float:
        probed.append(training.session.engine.index)
        return probe(*arguments)

    automatic.probe_s = counted
    training.run(LATE_STEPS)
    assert training.session.automatic is not None
    choices = training.session.automatic.packed()
    training.session.close()
    return {"choices": choices, "probed": probed}


def waiting(rank: int) -> list[dict[str, Any]]:
    """A run in which one rank has no step to tell of when it is time to choose."""
    plant(rank)
    training = Training("auto", rank, by_attach=False)
    chooser = training.session.automatic
    assert chooser is not None
    chooser._knows_pace = lambda session: rank == 0 or session.engine.index > 20  # type: ignore[method-assign]
    training.run(STEPS)
    training.session.close()
    return chooser.packed()


def fixed(rank: int, choices: list[dict[str, Any]]) -> str:
    """What the report says to do for the same run without `auto`."""
    training = Training("none", rank, by_attach=True)
    for choice in choices:
        training.run(choice["step"] - training.step)
        training.change(choice["spec"])
    training.run(STEPS - training.step)
    training.session.close()
    return digest(training.network)


def resumed(rank: int, folder: str) -> list[Any]:
    """A run that is saved in step 20 and taken up: what it goes on with, and where it is in step 30."""
    training = Training("auto", rank, by_attach=False)
    training.run(20)
    gradwire.save(Path(folder), training.session)
    training.session.close()
    training.session = gradwire.Session(training.network, "auto", grain_numel=GRAIN, deadline_s=30)
    assert gradwire.load(Path(folder), training.session) == 20
    method = training.session.method
    training.run(10)
    training.session.close()
    return [method, digest(training.network)]


def sharded(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A sharded model under `auto`, the same run without it, and one that is saved and taken up."""
    plant(rank)
    net, fixed_net = VARIANTS["plain"](), VARIANTS["plain"]()
    optimizer, fixed_optimizer = optimizer_of(net), optimizer_of(fixed_net)
    with gradwire.attach(net, "auto:bold", deadline_s=DEADLINE_S) as session:
        assert session.automatic is not None
        train(net, rank, 20, optimizer=optimizer)
        gradwire.save(Path(folder), session)
        weights, moments = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
        train(net, rank, STEPS, start=20, optimizer=optimizer)
        choices, report, ended = session.automatic.packed(), session.report(), digest_of_shards(net)
        with pytest.raises(gradwire.StateError, match=r"use gradwire\.save and load"):
            cast(ShardedSession, session).stateful()
    with gradwire.attach(fixed_net, "none", deadline_s=DEADLINE_S) as session:
        at = 0
        for choice in choices:
            train(fixed_net, rank, choice["step"], start=at, optimizer=fixed_optimizer)
            session.change(choice["spec"])
            at = choice["step"]
        train(fixed_net, rank, STEPS, start=at, optimizer=fixed_optimizer)
    net.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    with gradwire.attach(net, "auto:bold", deadline_s=DEADLINE_S) as session:
        step = gradwire.load(Path(folder), session)
        took_up = session.method
        train(net, rank, 30, start=step, optimizer=optimizer)
        resumed = digest_of_shards(net)
    train_to_30 = VARIANTS["plain"]()
    optimizer = optimizer_of(train_to_30)
    with gradwire.attach(train_to_30, "none", deadline_s=DEADLINE_S) as session:
        train(train_to_30, rank, choices[0]["step"], optimizer=optimizer)
        session.change(choices[0]["spec"])
        train(train_to_30, rank, 30, start=choices[0]["step"], optimizer=optimizer)
    return {
        "choices": choices,
        "report": report.chosen,
        "estimated": report.times,
        "same": ended == digest_of_shards(fixed_net),
        "resumed": [step, took_up, resumed == digest_of_shards(train_to_30)],
    }
