"""Write the tables of docs/cases.md, between marks, from the case studies, calculators and estimates themselves.

`python tools/cases_page.py` writes them anew; a test holds that the page and the code agree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gradwire.cases import MEMORY, STUDIES, SYMBOLS, CaseStudy, case_study, spoken
from gradwire.core.figures import si_bytes, spoken_seconds

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cases.md"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table of Markdown; columns named by their number are set to the right."""
    marks = ["--:" if place in tuple(right) else "---" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, marks, *rows])


def study(found: CaseStudy) -> str:
    """The tables of a case study."""
    figures: list[list[str]] = []
    for figure in found.figures:
        published, off = "", ""
        if figure.published is not None and figure.error is not None:
            published, off = spoken(figure.published, figure.unit), f"{figure.error:+.1%}"
        figures.append([figure.name, spoken(figure.value, figure.unit), published, off, figure.formula, figure.source])
    volumes = [
        [each.kind, si_bytes(each.nbytes), str(each.ranks), "network" if each.leaves else "node", each.formula]
        for each in found.volumes
    ]
    memory = [[name, f"{nbytes / 1e9:.1f}", MEMORY[name]] for name, nbytes in found.memory._asdict().items()]
    memory.append(["total", f"{found.memory.total / 1e9:.1f}", f"of {found.hardware.memory_gb:g}; not published"])
    parts = [f"{name} {spoken_seconds(seconds)}" for name, seconds in found.time._asdict().items() if seconds]
    heading = ["figure", "by formula", "published", "off by", "formula", "published where"]
    blocks = [
        f"{found.title}. Volumes, memory and time below are those of {found.layout.gpus} {found.hardware.name}, "
        f"`{found.layout.says}`.",
        table(heading, figures, right=(1, 2, 3)),
        table(["sent by a GPU in a step", "bytes", "ranks", "over a", "formula"], volumes, right=(1, 2)),
        table(["memory of the fullest GPU", "GB", "formula"], memory, right=(1,)),
        f"Parts of the step (formulas: [plan](plan.md#step-time)): {', '.join(parts)}; total "
        f"{spoken_seconds(found.time.total)}.",
        "\n".join(f"- {assumption}" for assumption in found.assumptions),
    ]
    return "\n\n".join(blocks)


def symbols() -> str:
    """What the letters of formulas stand for."""
    return table(["symbol", "meaning"], SYMBOLS.items())


def blocks() -> Mapping[str, Callable[[], str]]:
    """What stands between each pair of marks."""
    return {"symbols": symbols, **{name: lambda name=name: study(case_study(name)) for name in STUDIES}}


def page(text: str) -> str:
    """The page with all that stands between marks written anew."""
    for mark, written in blocks().items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{written()}\n\n{end}{after}"
    return text


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
