"""Every method says of which paper it is, where in it, and where it differs; docs/differences.md says so too."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import gradwire
from gradwire.asynchronous.methods import METHODS as UNWAITING
from gradwire.catalogue import catalogue
from gradwire.sync.methods import METHODS as SYNCHRONISED

PAGE = (Path(__file__).parents[1] / "docs" / "differences.md").read_text()
NAMES = [entry.name for entry in catalogue()]
METHODS = {**gradwire.methods(), **SYNCHRONISED, **UNWAITING}

PAPER = re.compile(r"[A-Z]\w+ (et al\. )?(19|20)\d\d|arXiv:\d{4}\.\d{5}")
PLACE = re.compile(
    r"\b(algorithm|alg\.|eq\.|equation|section|lemma|theorem|definition)s?\s+(\(?[A-Z]?\.?\d+(?:\.\d+)*)", re.I
)
OF_NO_PAPER = re.compile(r"\bno paper\b", re.IGNORECASE)

WITHOUT_PLACE = {
    "onebit": "no copy to look the number up in",
    "acpsgd": "no copy to look the number up in",
    "adasum": "no copy to look the number up in",
    "bmuf": "no copy to look the number up in",
    "bulyan": "no copy to look the number up in",
    "gradzip": "no copy to look the number up in",
    "multikrum": "no copy to look the number up in",
    "threshold": "two papers, and no copy to look the numbers up in",
}
"""Methods whose docstring names the paper but no number, and why: a number that is guessed is worse than none."""


class Row(NamedTuple):
    """A row of the page: a method that is not quite its paper's."""

    names: list[str]
    paper: str
    theirs: str
    ours: str


def documentation(name: str) -> str:
    return " ".join((inspect.getdoc(METHODS[name].build) or "").split())


def rows() -> list[Row]:
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    return [Row(named(cells[0]), *cells[1:]) for cells in found if len(cells) == 4 and named(cells[0])]


def named(text: str) -> list[str]:
    """Names of methods in a text."""
    return [name for name in re.findall(r"`(\w+)`", text) if name in NAMES]


def listed(phrase: str) -> list[str]:
    """Names of methods that follow a phrase, up to the end of its sentence."""
    return [name for found in re.findall(rf"{phrase}: ([^.;]*)[.;]", PAGE) for name in named(found)]


DIFFERENT = {name: row for row in rows() for name in row.names}
ALIKE = listed("As in their papers")
OWN = listed("Of no paper")


@pytest.mark.parametrize("name", NAMES)
def test_a_method_names_its_paper_and_the_place_in_it(name: str) -> None:
    text = documentation(name)
    if name in WITHOUT_PLACE:
        assert PAPER.search(text)
        assert not PLACE.search(text), f"{name!r} names a place: take it off the list"
    else:
        assert OF_NO_PAPER.search(text) or (PAPER.search(text) and PLACE.search(text)), text[:200]


def test_every_method_is_on_the_page_once() -> None:
    assert sorted([*DIFFERENT, *ALIKE, *OWN]) == sorted(NAMES)
    assert len(DIFFERENT) == sum(len(row.names) for row in rows())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_and_the_docstring_say_the_same(name: str) -> None:
    """Whether there is a difference, of which paper, and at which place."""
    text = documentation(name)
    assert ("deviates" in text) == (name in DIFFERENT), text
    if name in OWN:
        assert OF_NO_PAPER.search(text)
    if name in DIFFERENT:
        row = DIFFERENT[name]
        assert row.theirs
        assert row.ours
        assert row.theirs != row.ours
        for author, year in re.findall(r"([A-Z]\w+)[^;,(]*? (\d{4})", row.paper):
            assert re.search(rf"{author}\b[^;]*?{year}", text), (author, year)
        for kind, number in PLACE.findall(row.paper):
            assert re.search(rf"{re.escape(kind)}s?\s+{re.escape(number)}", text, re.IGNORECASE), (kind, number)


def test_the_federated_table_is_linked() -> None:
    assert "(federated.md#where-this-differs-from-the-papers)" in PAGE
