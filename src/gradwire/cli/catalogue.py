"""How the catalogue looks on a terminal: all methods in three parts, or one method whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradwire.catalogue import LANGUAGES, Entry, Language, catalogue, facts, listed


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
    for language in LANGUAGES:
        console.print(Text(f"{language.title}: specs of {language.parse}\n", style="bold"))
        for block in _blocks(language):
            console.print(block)
            console.print()


_ABRIDGED = ("what is sent", "written", "for example", "read by", "place", "shared options", "paper")
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


def _blocks(language: Language) -> Iterator[RenderableType]:
    """The paragraphs of a grammar, as wide as there is room."""
    for paragraph in language.grammar.split("\n\n"):
        lines = paragraph.splitlines()
        if lines[0].startswith("    "):
            yield _rows(_definitions(lines))
        else:
            yield Text(" ".join(lines))
    if language.shared:
        yield Text(f"Whatever has windows of H steps takes {', '.join(language.shared)}.")


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
