"""The catalogue, `gradwire methods`, docs/methods.md and docs/specs.md agree, and the figures in them were measured."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import gradwire
import methods_page
from gradwire.asynchronous.methods import METHODS as UNWAITING
from gradwire.catalogue import (
    COMPILER_TITLES,
    KERNELS_ON,
    Entry,
    Recommended,
    Special,
    Study,
    catalogue,
    entry,
    facts,
)
from gradwire.cli.catalogue import print_catalogue, print_entry
from gradwire.cli.inform import run_methods
from gradwire.cli.main import main, parser
from gradwire.core.errors import SpecError
from gradwire.core.options import described
from gradwire.core.places import EVERY_STEP
from gradwire.drivers.virtual import VirtualRanks
from gradwire.kernels.dispatch import Kernel, implementation_table
from gradwire.sync.methods import METHODS as SYNCHRONISED

ROOT = Path(__file__).parents[1]
ENTRIES = catalogue()
RECOMMENDED = [each for each in ENTRIES if isinstance(each.use, Recommended)]
FIGURE = re.compile(r"\d+\.\d+")


def names(use: type) -> list[str]:
    return [each.name for each in ENTRIES if isinstance(each.use, use)]


def words(use: Recommended | Special | Study) -> str:
    """All that is said of what a method is for, but for how it is written."""
    return " ".join(str(text) for name, text in vars(use).items() if name not in ("spec", "measured"))


# What it holds


def test_every_method_of_every_language_is_there_once() -> None:
    assert sorted(each.name for each in ENTRIES) == sorted([*gradwire.methods(), *SYNCHRONISED, *UNWAITING])


def test_the_first_are_few_and_the_last_are_for_study() -> None:
    order = [type(each.use) for each in ENTRIES]
    assert order == sorted(order, key=[Recommended, Special, Study].index)
    assert 3 <= len(RECOMMENDED) <= 4
    assert names(Special)
    assert names(Study)


@pytest.mark.parametrize("each", ENTRIES, ids=lambda each: each.name)
def test_an_entry_says_what_its_method_is(each: Entry) -> None:
    assert gradwire.parse(each.example)
    assert words(each.use)
    if each.name in gradwire.methods():
        method = gradwire.methods()[each.name]
        assert each.options == described(method.options)
        assert (each.summary, each.exchange, each.feedback) == (method.summary, method.exchange, method.feedback)
        assert gradwire.parse(each.example).fewest_ranks == each.fewest_ranks


def test_no_reason_is_said_of_nothing() -> None:
    """Where a registration does not say what its method is for."""
    assert not [each.name for each in ENTRIES if each.use == Study()]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean 'krum'"):
        entry("krumm")


# Kernels


@pytest.mark.parametrize("each", [each for each in ENTRIES if each.place is EVERY_STEP], ids=lambda each: each.name)
def test_the_kernels_told_are_those_that_run(each: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of another model, with whatever kernels there are here, but the one that the engine asks for itself."""
    ran: set[str] = set()
    on = Kernel[Any, Any].on

    def noted(self: Kernel[Any, Any], device: torch.device, numel: int) -> Any:
        ran.add(f"{self.family}.{self.name}")
        return on(self, device, numel)

    monkeypatch.setattr(Kernel, "on", noted)
    reducer, model = gradwire.parse(each.example), torch.nn.Linear(60, 50)
    ranks = VirtualRanks(reducer, model, max(3, reducer.fewest_ranks))
    for step in range(2):
        torch.manual_seed(step)
        ranks.step(
            [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(ranks.world_size)]
        )
    for name in KERNELS_ON:
        assert set(re.findall(r"\w+\.\w+", facts(each)[name])) == ran - {"selection.all_finite"}


def test_each_kernel_is_told_to_run_in_what_the_table_of_kernels_says() -> None:
    table = {f"{family}.{name}": titles for family, name, *titles in implementation_table()}
    told: set[str] = set()
    for each in ENTRIES:
        for i, name in enumerate(KERNELS_ON):
            for compiler, kernels in re.findall(r"(\w+): ([\w., ]+)", facts(each).get(name, "")):
                found = [kernel for kernel in kernels.split(", ") if "." in kernel]
                assert all(COMPILER_TITLES[table[kernel][i]] == compiler for kernel in found)
                told.update(found)
    assert len(told) > 40


def test_the_page_tells_of_kernels_in_short() -> None:
    rows = {row.split("`")[1]: row for row in methods_page.page().splitlines() if row.startswith("| `")}
    for each in ENTRIES:
        if not isinstance(each.use, Recommended):
            assert f"| {methods_page.compilers(facts(each))} |" in rows[each.written]
    assert "| numba; Triton and torch |" in rows["topk:DENSITY"]
    assert "| numba; torch |" in rows["krum:BAD"]
    assert "| torch; torch |" in rows["none"]
    assert "| those of codec= |" in rows["choco:GRAPH"]


# What was measured


def places(use: Recommended) -> Iterator[str]:
    """What stands at each place that a recommended method refers to."""
    for where in use.measured:
        path, _, address = where.partition("#")
        yield section((ROOT / path).read_text(), address)


def section(text: str, address: str) -> str:
    """A page from a heading to the next one of its rank."""
    lines = text.splitlines()
    first = next(
        i for i, line in enumerate(lines) if methods_page.anchor(line.lstrip("# ")) == address and line[0] == "#"
    )
    rank = lines[first].split()[0]
    rest = (i for i in range(first + 1, len(lines)) if re.match(rf"#{{1,{len(rank)}}} ", lines[i]))
    return "\n".join(lines[first : next(rest, len(lines))])


@pytest.mark.parametrize("each", RECOMMENDED, ids=lambda each: each.name)
def test_what_is_recommended_was_measured_where_it_says(each: Entry) -> None:
    assert isinstance(each.use, Recommended)
    assert gradwire.parse(each.use.spec)
    found = set(FIGURE.findall(" ".join(places(each.use))))
    told = FIGURE.findall(words(each.use).replace(each.use.spec, ""))
    assert len(told) >= 4
    assert set(told) - OPTIONS <= found


OPTIONS = {"0.02"}
"""Densities in the texts, which are no figures."""


def test_what_is_told_of_the_others_was_measured() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "methods.md"]
    found = {figure for page in pages for figure in FIGURE.findall(page.read_text())}
    told = {
        figure
        for each in ENTRIES
        if isinstance(each.use, Special | Study)
        for figure in FIGURE.findall(words(each.use))
    }
    assert len(told) > 20
    assert told - {"0.5"} <= found


# Where it is shown


def printed(width: int, name: str | None = None) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    if name:
        print_entry(entry(name), console)
    else:
        print_catalogue(console)
    return console.export_text()


def joined(text: str) -> str:
    """Without what folding has put in."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100, 190])
def test_the_list_fits_and_says_everything(width: int) -> None:
    text = printed(width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for each in ENTRIES:
        assert joined(f"{each.written} {each.summary}") in joined(text)
        for fact in ("link", "accuracy", "for", "known", "exchange", "fewest ranks", "options"):
            assert facts(each).get(fact, "").replace(" ", "") in re.sub(r"\s", "", text), (each.name, fact)


def test_the_list_has_three_parts_in_order() -> None:
    text = printed(100)
    assert text.index("Recommended\n") < text.index("Special cases\n") < text.index("Study\n")
    assert (
        text.index("Recommended\n") < text.index("int4:BLOCK") < text.index("Special cases\n") < text.index("krum:BAD")
    )
    for said in ("5 for krum:1", "7 for bulyan:1", "3 for trimmed:1", "exchange=direct|ring|tree|rhd|auto"):
        assert said in text


@pytest.mark.parametrize("each", ENTRIES, ids=lambda each: each.name)
def test_one_method_is_shown_whole(each: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", each.name]) == 0
    text = re.sub(r"\s", "", capsys.readouterr().out)
    for name, fact in facts(each).items():
        assert f"{name}{fact}".replace(" ", "") in text


def test_a_spec_that_says_more_than_a_name_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "fp16,vectors=off", "local:H=2", "ssp:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  =  ")[0] for line in lines] == ["fp16,vectors=off", "local:H=2", "ssp:1"]
    assert repr(gradwire.parse("fp16,vectors=off")) in lines[0]


def test_the_command_prints_the_list() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    assert run_methods(parser().parse_args(["methods"]), console) == 0
    assert console.export_text() == printed(100)


def test_the_page_is_up_to_date() -> None:
    assert methods_page.PAGE.read_text(encoding="utf-8") == methods_page.page(), "run python tools/methods_page.py"


def test_the_page_has_every_method_and_its_options() -> None:
    text = methods_page.page()
    for each in ENTRIES:
        assert f"`{each.use.spec if isinstance(each.use, Recommended) else each.written}`" in text
        assert all(option.replace("|", "\\|") in text or option in text for option in each.options)


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", methods_page.page())
    assert len(links) > 5
    for link in links:
        path, _, address = link.partition("#")
        target = (methods_page.PAGE.parent / path).resolve()
        assert target.is_file(), link
        assert not address or address in map(methods_page.anchor, methods_page.headings(target)), link


def test_the_page_of_specs_shows_what_is_recommended() -> None:
    text = (ROOT / "docs" / "specs.md").read_text()
    table = text[text.index("| spec | link |") : text.index("The third goes with")]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:] if row]
    assert [row[0].strip("`") for row in rows] != []
    by_spec = {row[0].strip("`"): row for row in rows}
    assert set(by_spec) == {each.use.spec for each in RECOMMENDED if isinstance(each.use, Recommended)}
    for each in RECOMMENDED:
        assert isinstance(each.use, Recommended)
        assert set(FIGURE.findall(by_spec[each.use.spec][3])) <= set(FIGURE.findall(each.use.cost))
    assert len(ENTRIES) - len(rows) > 50
