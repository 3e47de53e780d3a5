"""Which method for which case: the rules, the command and the page say the same."""

from __future__ import annotations

import re

import pytest

import choosing_page
import gradwire
from gradwire.choosing import CASES, NEAR, Case, boundaries, choose
from gradwire.cli.main import main
from gradwire.core.errors import SpecError


def test_every_case_takes_something_that_can_be_written() -> None:
    for case in CASES:
        for spec in re.findall(r'(?<!=)"([^"]+)"', case.call) or [case.take]:
            assert gradwire.parse(spec).place.call_of(spec) == case.call.replace("attach(model", "attach(ddp")
        assert (choosing_page.PAGE.parent / case.page).exists()


def test_what_is_taken_is_the_first_that_is_nearly_the_fastest() -> None:
    for step_s in (0.01, 0.1, 1.0, 10.0, 100.0):
        found = choose(Case(rate=1e8, parameters=10**6, step_s=step_s))
        steps = [step_s + timed.link_s for timed in found.timed]
        place = 0 if found.take is None else [timed.spec for timed in found.timed].index(found.take)
        assert steps[place] <= NEAR * min(steps)
        assert all(step > NEAR * min(steps) for step in steps[:place])


def test_the_faster_the_link_the_less_is_done() -> None:
    order = ["none", "fp16", "int4", "powersgd:8,factors=fp16"]
    places: list[int] = []
    for rate in (1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12):
        take = choose(Case(rate=rate, parameters=10**7, step_s=0.5)).take or "none"
        places.append(order.index(take) if take in order else len(order))
    assert places == sorted(places, reverse=True)
    assert (places[0], places[-1]) == (len(order), 0)


def test_boundaries_are_where_the_choice_changes() -> None:
    case = Case(rate=1e9, parameters=10**6)
    found = boundaries(case)
    for name, seconds in list(found.items())[:-1]:
        take = choose(Case(rate=1e9, parameters=10**6, step_s=1.01 * seconds)).take
        assert take == (None if name == "none" else name)


def test_times_grow_with_the_model_beyond_what_is_timed() -> None:
    small, large = (choose(Case(rate=1e9, parameters=n, step_s=1.0)).timed[0].link_s for n in (10**8, 10**10))
    assert large == pytest.approx(100 * small, rel=0.02)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"layout": "grid"}, "'grid' is none of ddp, fsdp2, sites, leaving, clients"),
        ({"slow": "often"}, "'often' is none of never, one, any"),
        ({"ranks": 1}, "communication needs 2 ranks and a parameter at least"),
        ({"step_s": 0.0}, "a step without communication takes some time, not 0.0 s"),
    ],
)
def test_nonsense_is_refused(case: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Case(**{"rate": 1e8, **case})  # type: ignore[arg-type]


def test_the_command_says_what_python_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--for", "100mbit", "--parameters", "1.85M", "--step", "130"]) == 0
    said = capsys.readouterr().out
    found = choose(Case(rate=1e8, parameters=1_850_000, step_s=0.13))
    assert f"Take {found.call}" in said
    assert all(timed.spec in said for timed in found.timed)
    assert main(["methods", "--for", "1tbit", "--parameters", "1M", "--step", "100"]) == 0
    assert "Use PyTorch alone." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--for fast", "rate 'fast' cannot be used"),
        (
            "--for 1gbit --parameters many",
            "--parameters many is no number of parameters: write one such as 1.85M or 7B",
        ),
        ("--for 1gbit int4", "--for says which method to take: give no SPEC"),
        ("--for 1gbit --step nan", "a step without communication takes some time, not nan s"),
    ],
)
def test_the_command_refuses_nonsense(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_page_has_the_tables_of_the_rules() -> None:
    text = choosing_page.PAGE.read_text(encoding="utf-8")
    assert text == choosing_page.written(text), "run python tools/choosing_page.py"
