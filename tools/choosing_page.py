"""Write the two tables of docs/choosing.md from `gradwire.choosing`.

`python tools/choosing_page.py` writes them anew; a test holds that they are up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gradwire.choosing import CASES, LAYOUTS, SLOW, Case, boundaries
from gradwire.core.figures import significant
from marks import replaced

PAGE = Path(__file__).resolve().parents[1] / "docs" / "choosing.md"
RATES = {"20mbit": 2e7, "100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10, "25gbit": 2.5e10, "100gbit": 1e11}
PARAMETERS = 100_000_000
METHODS = ("none", "fp16", "int4", "powersgd:8,factors=fp16")


def written(text: str) -> str:
    """The page with both tables as they are now."""
    for name, table in (("cases", _cases()), ("rates", _rates())):
        text = replaced(text, name, "\n".join(table))
    return text


def _cases() -> Iterator[str]:
    yield "| case | class | take | what it does | page |"
    yield "|---|---|---|---|---|"
    for case in CASES:
        said = LAYOUTS[case.layout] if case.layout else SLOW[case.slow or ""]
        yield f"| {said} | `{case.accuracy}` | `{case.call.strip('`')}` | {case.why} | [{case.page}]({case.page}) |"


def _rates() -> Iterator[str]:
    yield "| link | PyTorch alone | `fp16` | `int4` | `powersgd:8,factors=fp16` |"
    yield "|---|--:|--:|--:|--:|"
    for rate, bits_per_s in RATES.items():
        found = boundaries(Case(bits_per_s, parameters=PARAMETERS, accuracy="bold"))
        yield f"| {rate} | {' | '.join(_from(found.get(name)) for name in METHODS)} |"


def _from(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{significant(seconds, 2)} s" if seconds >= 1 else f"{significant(1e3 * seconds, 2)} ms"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
