"""Nothing that does nothing passes silently in `gradwire.sync` and `gradwire.asynchronous` either.

Every method of `gradwire.sync` trains a small model on four ranks with every option that it has: what ranks have then
must differ from what they have without the option.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

import gradwire
from gradwire.core.errors import CompositionError, GradwireError, SpecError
from gradwire.core.options import Option
from gradwire.ranks.supervised import run_function
from gradwire.sync import BMUF, DiLoCo
from gradwire.sync.methods import METHODS

CASES = str(Path(__file__).with_name("sync_option_cases.py"))
BASES = {
    **{name: method.example for name, method in METHODS.items()},
    "local": "local:H=4",
    "diloco": "diloco:H=4",
    "slowmo": "slowmo:H=4",
    "bmuf": "bmuf:H=4,momentum=0.5",
    "elastic": "elastic:H=4,lr=0.7,momentum=0.5",
    "zerooneadam": "zerooneadam:var_freeze_step=4,local_step_scaler=1",
    "dion": "dion:4,lr=0.01",
    "onebitadam": "onebitadam:freeze_step=4",
}
VALUES = {
    "H": ("2",),
    "last": ("8,double_after=4",),
    "double_after": ("2,last=8",),
    "drift": ("0.0001",),
    "warmup": ("2", "20%,steps=10"),
    "steps": ("10,warmup=20%",),
    "outer": ("int4", "topk:0.1"),
    "update": ("int4", "topk:0.1"),
    "delay": ("1", "1,merge=progress"),
    "merge": ("0.5",),
    "graph": ("complete",),
    "codec": ("int4",),
    "method": ("sign:64",),
    "adam": ("0.weight",),
    "adam_share": ("0.5,adam=0.weight",),
    "var_freeze_step": ("6",),
    "chunk": ("8",),
}
"""Values of options whose kind does not tell them, with other options where they need some."""
ELSEWHERE = {"lost": "test_elastic.py: it is of windows in which workers are lost, and none is lost here"}
"""Options that do something where nothing here brings it about, and where it is tried."""
NUMBERS = {int: ("2", "3"), float: ("0.5", "0.001")}
RANKS = 4  # a ring of three is complete


class Tried(NamedTuple):
    """A spec, and specs with an option more of which each must do something, or where `any_will_do` one of them."""

    base: str
    specs: tuple[str, ...]
    any_will_do: bool


def tried() -> Iterator[Tried]:
    """Every option of every method."""
    for name, method in METHODS.items():
        for option, found in method.options.items():
            if option in ELSEWHERE:
                continue
            values, any_will_do = values_of(option, found)
            base = without(BASES[name], option)
            specs = (f"{base}{option}={value}" for value in values)
            yield Tried(BASES[name], tuple(spec for spec in specs if readable(spec)), any_will_do)


def values_of(option: str, found: Option) -> tuple[tuple[str, ...], bool]:
    """Values to try, and whether one of them is enough."""
    if option in VALUES:
        return VALUES[option], False
    if typing.get_origin(found.kind) is Literal:
        return tuple(value for value in typing.get_args(found.kind) if value != found.default), False
    if found.kind is bool:
        return ("off" if found.default else "on",), False
    return NUMBERS[found.kind], True


def without(spec: str, option: str) -> str:
    """A spec without an option, ready for another one."""
    name, _, text = spec.partition(":")
    items = [item if "=" in item else f"{METHODS[name].argument}={item}" for item in text.split(",") if item]
    kept = [item for item in items if item.partition("=")[0] != option]
    return f"{name}:{''.join(f'{item},' for item in kept)}"


def readable(spec: str) -> bool:
    try:
        gradwire.sync.parse(spec)
    except GradwireError:
        return False
    return True


TRIED = list(tried())


@pytest.fixture(scope="module")
def found(asked: list[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What every rank had, by spec."""
    cases = [parameters["case"] for parameters in asked if "case" in parameters]
    specs = sorted({spec for case in cases for spec in (case.base, *case.specs)})
    return run_function(f"{CASES}:digests", RANKS, {"specs": specs}, 280)


@pytest.mark.parametrize("case", TRIED, ids=lambda case: case.specs[0] if case.specs else case.base)
@pytest.mark.draw(8)
def test_what_an_option_asks_for_happens(case: Tried, found: list[dict[str, str]]) -> None:
    had = [spec for spec in case.specs if spec in found[0]]
    assert had, f"no value of an option of {case.base} can be had"
    changed = {spec: any(rank[spec] != rank[case.base] for rank in found) for spec in had}
    assert any(changed.values()) if case.any_will_do else all(changed.values()), changed


REFUSED = {
    "local:H=8,last=8,double_after=50": "make last= larger",
    "local:H=1,drift=0.1": "make H larger",
    "local:H=1,warmup=10": "make H larger, or leave it out",
    "local:H=8,merge=progress": "add delay=1, or leave merge out",
    "diloco:H=8,momentum=0,nesterov=off": "leave nesterov out",
    "bmuf:H=8,momentum=0,nesterov=off": "leave nesterov out",
    "local:H=8,outer=(none,ef=on)": "leave it out",
    "dcasgd:0": "which is 'asgd'",
    "ssp:4,update=(none,ef=on)": "leave it out",
}


@pytest.mark.parametrize(("spec", "remedy"), REFUSED.items())
def test_what_would_do_nothing_is_refused_with_what_to_do(spec: str, remedy: str) -> None:
    with pytest.raises((SpecError, CompositionError), match=re.escape(remedy)) as raised:
        gradwire.parse(spec)
    assert len(str(raised.value)) < 240


def test_the_same_by_hand() -> None:
    with pytest.raises(CompositionError, match="leave nesterov out"):
        DiLoCo(momentum=0.0, nesterov=False)
    with pytest.raises(CompositionError, match="leave nesterov out"):
        BMUF(momentum=0.0, nesterov=False)
    assert DiLoCo(momentum=0.0) != DiLoCo()
