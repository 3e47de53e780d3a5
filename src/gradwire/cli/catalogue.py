"""How the catalogue looks on a terminal: all methods in three parts, or one method whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradwire.catalogue import GRAMMAR, SHARED, TEXTS, Entry, catalogue, facts, listed
from gradwire.core.places import BASELINES, CLIENTS, WINDOWS
from gradwire.core.registry import table


def print_catalogue(console: Console) -> None:
    """Print all methods, those for most users first, and what every method takes."""
    for title, entries in groupby(catalogue(), key=lambda entry: entry.use.title):
        console.print(Text(f"{title}\n", style="bold underline"))
        for entry in entries:
            console.print(Text.assemble((entry.written, "bold"), "  ", entry.summary))
            console.print(_rows({name: text for name, text in listed(entry).items() if name not in _ABRIDGED}))
            console.print()
    console.print(
        "Of several choices the first is the default. `gradwire methods NAME` shows one method whole.\n",
        highlight=False,
    )
    _print_text(console, "What may be written", GRAMMAR)
    for place, text in TEXTS.items():
        shared = f"\n\nWhatever has windows of H steps takes {', '.join(SHARED)}." if place is WINDOWS else ""
        _print_text(console, f"{place.title}: {place.call_of('SPEC')}", text + shared)
    for place in (CLIENTS, BASELINES):
        names = ", ".join(name for name, method in table().items() if method.place is place)
        _print_text(console, f"{place.title}: {place.call_of('SPEC')}", names)


def _print_text(console: Console, title: str, text: str) -> None:
    console.print(Text(f"{title}\n", style="bold"))
    for block in _blocks(text):
        console.print(block)
        console.print()


_ABRIDGED = ("what is sent", "written", "for example", "taken by", "place", "shared options", "paper")
"""What the list leaves to the page of one method, or says otherwise."""


def print_entry(entry: Entry, console: Console) -> None:
    """Print one method whole."""
    console.print(Text(entry.name, style="bold"))
    console.print(_rows(facts(entry)))


def _rows(found: Mapping[str, str]) -> RenderableType:
    """A line for each thing, and what is said of it beside, as wide as there is room."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in found.items():
        table.add_row(Text(name), Text(text))
    return Padding(table, (0, 0, 0, 4))


def _blocks(text: str) -> Iterator[RenderableType]:
    """Paragraphs, as wide as there is room."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        yield _rows(_definitions(lines)) if lines[0].startswith("    ") else Text(" ".join(lines))


def _definitions(lines: list[str]) -> dict[str, str]:
    """What is written, and what it means, of lines in two columns: the second may go on in the next line."""
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith(" " * 5):
            last = list(found)[-1]
            found[last] = f"{found[last]} {line.strip()}"
        else:
            name, _, text = re.sub(r"  +", "\t", line.strip(), count=1).partition("\t")
            found[name] = text
    return found
