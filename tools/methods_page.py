"""Write docs/methods.md, the page of all methods, from the lists in which they are registered.

`python tools/methods_page.py` writes it anew; a test holds that it is up to date.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from gradwire.catalogue import (
    GRAMMAR,
    KERNELS_ON,
    SHARED,
    TEXTS,
    Entry,
    Recommended,
    Special,
    Study,
    Use,
    catalogue,
    facts,
)
from gradwire.core.places import WINDOWS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "methods.md"

INTRODUCTION = """\
# Methods

`python tools/methods_page.py` makes this page of the lists in which methods are registered. `gradwire methods` shows
the same on a terminal, `gradwire methods int4` shows one method whole, and `gradwire.catalogue()` returns it in Python.
Methods for most users come first, then those for special cases, then those for study: these are kept and tested, and no
case is known in which one of them is the best. Methods of federations, such as FedAvg,
are on [a page of their own](federated.md).
"""

SECTIONS: dict[type[Use], str] = {
    Recommended: "Take one of these. All figures were measured, where the last line of each says.",
    Special: "Each of these is for a case of its own. Without that case, one of those above serves better.",
    Study: "What is known of each says why it is not above: it lost more, or was not measured in training.",
}

LEGEND = """\
Of several choices the first is the default. An exchange called `own` is of messages that belong to the method; the
others are in [exchanges.md](exchanges.md). A method with error feedback has none where a spec says `ef=off`. Ranks are
the fewest that the example needs. Kernels are what the method's kernels are written in on a CPU, and after the
semicolon on CUDA; `torch` is plain PyTorch. `gradwire methods NAME` names them one by one."""

HEADINGS = (
    "method",
    "what is sent",
    "for",
    "exchange",
    "error feedback",
    "ranks",
    "kernels",
    "options and their defaults",
)


def page() -> str:
    """Return the page."""
    return "\n".join([INTRODUCTION, *_sections(), *_grammar(), *_papers()])


def _sections() -> Iterator[str]:
    for use, entries in groupby(catalogue(), key=lambda entry: type(entry.use)):
        yield f"## {use.title}\n\n{SECTIONS[use]}\n"
        if use is Recommended:
            yield from map(_recommended, entries)
        else:
            yield f"{LEGEND}\n" if use is Special else ""
            yield f"{_table(use, list(entries))}\n"


def _recommended(entry: Entry) -> str:
    """A section of its own."""
    left_out = ("written", "for example", "taken by", "place", "paper", "write")
    assert isinstance(entry.use, Recommended)
    shown = {name: text for name, text in facts(entry).items() if name not in left_out}
    shown |= {"measured": ", ".join(f"[{_title(where)}]({_relative(where)})" for where in entry.use.measured)}
    shown |= {name: _codes(shown[name].split(", ")) for name in ("options", "shared options") if name in shown}
    lines = [f"- {name}: {text}" for name, text in shown.items()]
    return "\n".join([f"### `{entry.use.spec}`\n", *lines, ""])


def _table(use: type[Use], entries: Sequence[Entry]) -> str:
    headings = [("known" if heading == "for" and use is Study else heading) for heading in HEADINGS]
    return "\n".join([_row(headings), _row(["---"] * len(headings)), *(_row(_cells(entry)) for entry in entries)])


def _cells(entry: Entry) -> list[str]:
    told = facts(entry)
    return [
        f"`{entry.written}`",
        entry.summary,
        told.get("for") or told["known"],
        entry.exchange,
        "yes" if entry.feedback else "",
        told.get("fewest ranks", ""),
        compilers(told),
        _codes(entry.options) + (" and those of windows" if entry.shared else ""),
    ]


def compilers(told: Mapping[str, str]) -> str:
    """What kernels are written in, without their names: on a CPU, and on CUDA.

    >>> compilers({"kernels on a CPU": "numba: a, b", "kernels on CUDA": "Triton: a; torch: b"})
    'numba; Triton and torch'
    """
    said = [told[name] for name in KERNELS_ON if name in told]
    if any(text.startswith("those of") for text in said):
        return said[0]
    return "; ".join(" and ".join(re.findall(r"(?:^|; )(\w+):", text)) for text in said).replace("none", "torch")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def _grammar() -> Iterator[str]:
    yield f"## What may be written\n\n{_markdown(GRAMMAR)}\n"
    for place, text in TEXTS.items():
        yield f"### {place.title}: `{place.call_of('SPEC')}`\n\n{_markdown(text)}\n"
        if place is WINDOWS:
            yield f"Whatever has windows of H steps takes {_codes(SHARED)}.\n"


def _markdown(grammar: str) -> str:
    """Paragraphs as they are, and what is written in blocks of code."""
    return "\n\n".join(
        f"```text\n{textwrap.dedent(paragraph)}\n```" if paragraph.startswith("    ") else paragraph
        for paragraph in grammar.split("\n\n")
    )


def _papers() -> Iterator[str]:
    yield "## Papers\n"
    yield "[differences.md](differences.md) says where a method is not what its paper has.\n"
    for paper, entries in groupby(sorted(_with_papers(), key=_paper), key=_paper):
        yield f"- {_codes(entry.name for entry in entries)}: {paper}"
    yield ""


def _with_papers() -> list[Entry]:
    return [entry for entry in catalogue() if entry.paper]


def _paper(entry: Entry) -> str:
    return entry.paper


def _title(where: str) -> str:
    """The heading that an address is of."""
    path, _, address = where.partition("#")
    return next(text for text in headings(ROOT / path) if anchor(text) == address)


def headings(page: Path) -> list[str]:
    """Return the headings of a page."""
    return re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the address of a heading within its page, as GitHub makes it.

    >>> anchor("Ten methods at 20 Mbit/s")
    'ten-methods-at-20-mbits'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _relative(where: str) -> str:
    return where.removeprefix("docs/")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
