"""Tables of results in the pages of docs/, between marks that name the script they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column to the left and the others to the right.

    >>> print(markdown(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|--:|
    | x | 1 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(head) - 1), *lines[1:]])


def write(page: str, mark: str, text: str) -> None:
    """Replace what stands between `<!-- mark -->` and `<!-- end of mark -->` in a page."""
    path, begin, end = DOCS / page, f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def shown(value: float | None) -> str:
    """Three digits, whole numbers from a hundred on, or a dash where there is nothing."""
    if value is None:
        return "—"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
