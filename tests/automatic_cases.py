"""What each rank does in the tests of `auto`, with planted times: a link that is slow, and fast later."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradwire
from change_cases import GRAIN, Training
from gradwire.choosing.automatic import StepPace
from gradwire.session import automatic
from gradwire.session.session import Session
from gradwire.topology.reduction_times import Probe, ReductionTimes
from session_cases import digest

SLOW = ReductionTimes(6000, 20e-6, (Probe(6000, 20e-3, 0.0),))
"""20 ms for all gradients of the model, in fp32."""
FAST_FROM = 25
"""The step from which on a message takes a fiftieth."""
CODING_S = {"none": 0.0, "fp16": 0.1e-3, "int4": 0.6e-3}
STEPS = 54


def plant(rank: int) -> None:
    """Times that each rank measures otherwise: the second one is slower in all."""
    training: list[automatic.Choosing] = []

    def coding_s(spec: str, *_: object, **__: object) -> float:
        return (1 + rank) * CODING_S[spec]

    def pace_of(samples: Sequence[object], coded_s: tuple[float, ...], sent_early: bool) -> StepPace:
        assert len(samples) >= automatic.FEWEST_SAMPLES
        return StepPace((4 + rank) * 1e-3, 0.5 if sent_early else 0.0, coded_s)

    def probe_s(*_: object) -> float:
        (session,) = training
        return (1 + rank) * (0.02 if session.engine.index < FAST_FROM else 0.0004)

    class Watched(automatic.Automatic):
        def before_step(self, session: automatic.Choosing) -> None:
            training[:] = [session]
            super().before_step(session)

    automatic.coding_s, automatic.pace_of, automatic.probe_s = coding_s, pace_of, probe_s  # type: ignore[assignment]
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
    found["fixed"] = fixed(rank, found["auto True"]["choices"])
    found["resumed"] = resumed(rank, folder)
    try:
        Training("auto:bold" if rank else "auto", rank, by_attach=False)
    except gradwire.AttachError as error:
        found["disagree"] = str(error)
    return found


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
